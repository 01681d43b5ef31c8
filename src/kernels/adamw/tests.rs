//! The fused update against its twin; the norm against a plain sum.

use super::*;
use crate::testing::*;

#[test]
fn cpu_matches_reference_over_many_updates() {
    let len = 40_001;
    let (mut w, mut m, mut v) = (numbers(1, len), vec![0f32; len], vec![0f32; len]);
    let (mut wide_w, mut wide_m, mut wide_v) = (widened(&w), widened(&m), widened(&v));
    for step in 1..=5 {
        let gradient = numbers(1 + step, len);
        let u =
            Update { step, lr: 1e-2, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.1, factor: 0.25 };
        update(
            w.as_mut_slice().into(),
            gradient[..].into(),
            m.as_mut_slice().into(),
            v.as_mut_slice().into(),
            u,
        );
        reference::update(&mut wide_w, &widened(&gradient), &mut wide_m, &mut wide_v, u);
    }
    assert_close(&w, &wide_w, 1e-6, "values");
    assert_close(&m, &wide_m, 1e-6, "first moment");
    assert_close(&v, &wide_v, 1e-6, "second moment");
}

#[test]
fn the_norm_is_a_plain_sum_whatever_the_threads() {
    let gradient = numbers(3, 100_003);
    let expected: f64 = gradient.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| square_sum(gradient[..].into()))
    };
    assert!((run(1) - expected).abs() < 1e-9 * expected);
    assert_eq!(run(1), run(3));
}
