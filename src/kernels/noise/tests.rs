//! The CPU side against the twin; what the numbers depend on.

use super::*;
use crate::testing::with_threads;

fn noise() -> Noise {
    Noise { key: 77, magnitude: 0.5, first_row: 3, seq_len: 5, stride: 8, vocab: 20 }
}

fn run(noise: Noise, ids: &[u32], c: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..ids.len() * c).map(|at| (at % 7) as f32 - 3.0).collect();
    add(noise, ids.into(), x[..].as_mut().into());
    x
}

#[test]
fn cpu_matches_its_twin() {
    for (n, c) in [(1, 3), (10, 37), (70, 64)] {
        let ids: Vec<u32> = (0..n).map(|at| at * 5 % 23).collect();
        let x: Vec<f64> = (0..n as usize * c).map(|at| (at % 7) as f64 - 3.0).collect();
        let expected = reference::add(noise(), &ids, &x);
        let found = run(noise(), &ids, c);
        assert!(
            found.iter().zip(&expected).all(|(found, expected)| (f64::from(*found) - expected).abs() < 1e-6)
        );
        let changed = found.iter().zip(&x).filter(|(found, x)| f64::from(**found) != **x).count();
        let text = ids.iter().filter(|id| **id < 20).count();
        assert!(changed <= text * c && changed * 10 >= text * c * 9, "{changed} of {}", text * c);
    }
}

#[test]
fn rows_cut_into_micro_batches_have_the_same_noise() {
    let ids = [1u32; 20];
    let whole = run(noise(), &ids, 6);
    let second = Noise { first_row: 5, ..noise() };
    let parts = [run(noise(), &ids[..10], 6), run(second, &ids[10..], 6)].concat();
    let start: Vec<f32> = run(Noise::NONE, &ids, 6);
    let added = |x: &[f32], start: &[f32]| x.iter().zip(start).map(|(x, y)| x - y).collect::<Vec<_>>();
    let half = run(Noise::NONE, &ids[..10], 6);
    let expected = [added(&parts[..60], &half), added(&parts[60..], &half)].concat();
    let close = |a: &f32, b: &f32| (a - b).abs() < 1e-6;
    assert!(added(&whole, &start).iter().zip(&expected).all(|(a, b)| close(a, b)));
    // Padding to a longer row moves no number.
    let long = Noise { seq_len: 7, ..noise() };
    let padded = run(long, &[1; 7], 6);
    let zeros = run(Noise::NONE, &[1; 7], 6);
    let short = added(&whole[..30], &start[..30]);
    assert!(added(&padded, &zeros)[..30].iter().zip(&short).all(|(a, b)| close(a, b)));
}

#[test]
fn noise_is_uniform_and_as_large_as_the_paper_says() {
    // sqrt(64 * 100) is 80.
    assert_eq!(magnitude(5.0, 64, 100), 0.0625);
    let wide = Noise { magnitude: 1.0, vocab: 2, first_row: 0, seq_len: 1000, stride: 1000, key: 5 };
    let mut x = vec![0f32; 64_000];
    add(wide, [1u32; 1000][..].into(), x[..].as_mut().into());
    let mean = x.iter().map(|x| f64::from(*x)).sum::<f64>() / x.len() as f64;
    let variance = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    // Four standard errors of 64,000 numbers of variance 1/3.
    assert!(mean.abs() < 0.0092 && (variance - 1.0 / 3.0).abs() < 0.005, "{mean} {variance}");
    assert!(x.iter().all(|x| (-1.0..=1.0).contains(x)));
}

#[test]
fn threads_change_no_bit() {
    let ids: Vec<u32> = (0..200).map(|at| at % 19).collect();
    let one = with_threads(1, || run(noise(), &ids, 33));
    assert!([2, 3, 16].iter().all(|&threads| with_threads(threads, || run(noise(), &ids, 33)) == one));
}
