//! Each vector operation of this CPU against the same operation on single numbers.

use super::*;
use crate::testing::{numbers, skip};

fn lanes<S: Simd>(s: S, vector: S::Floats) -> Vec<f32> {
    let mut lanes = vec![0f32; S::LANES];
    // SAFETY: the length of a vector.
    unsafe { s.store(lanes.as_mut_ptr(), vector) };
    lanes
}

/// Runs a test at the level of this process.
macro_rules! vectors {
    ($name:ident, $check:ident) => {
        #[test]
        fn $name() {
            if at_level!(s => s.enter(#[inline(always)] || $check(s))).is_none() {
                skip("no vector kernels at this level", false);
            }
        }
    };
}

vectors!(exponentials_and_reciprocals_are_near, near);

fn near<S: Simd>(s: S) {
    for step in -8800..8800 {
        let x = step as f32 * 0.01;
        let exact = f64::from(x).exp();
        let error = (f64::from(lanes(s, exp(s, s.splat(x)))[S::LANES - 1]) - exact).abs() / exact;
        // Below 2^-126 numbers have fewer bits.
        assert!(error < 2.0e-7 || exact < 1.2e-38, "exp({x}) is off by {error}");
        let x = x + 0.003;
        let error = f64::from(lanes(s, s.reciprocal(s.splat(x)))[1]) * f64::from(x) - 1.0;
        assert!(error.abs() < 1.3e-7, "1 / {x} is off by {error}");
    }
    for (x, expected) in [(f32::NEG_INFINITY, 0.0), (f32::INFINITY, f32::INFINITY), (0.0, 1.0)] {
        assert_eq!(lanes(s, exp(s, s.splat(x)))[0], expected);
    }
    assert!(lanes(s, exp(s, s.splat(f32::NAN)))[0].is_nan());
    // Numbers below the normal ones are rounded once.
    for (n, expected) in [
        (-149.0, f32::from_bits(1)),
        (-126.0, f32::MIN_POSITIVE),
        (-140.0, 2f32.powi(-140)),
        (127.0, 2f32.powi(127)),
    ] {
        assert_eq!(lanes(s, s.scale(s.splat(1.0), s.splat(n)))[0], expected, "2^{n}");
    }
    assert_eq!(lanes(s, s.scale(s.splat(1.0), s.splat(129.0)))[0], f32::INFINITY);
}

vectors!(operations_are_those_of_numbers, numbers_alike);

fn numbers_alike<S: Simd>(s: S) {
    let (a, b, c) = (numbers(1, S::LANES), numbers(2, S::LANES), numbers(3, S::LANES));
    let all = |of: &dyn Fn(usize) -> f32| (0..S::LANES).map(of).collect::<Vec<_>>();
    let [x, y, z] = [&a, &b, &c].map(|values| load_or(s, values, 0.0));
    assert_eq!(lanes(s, s.add(x, y)), all(&|i| a[i] + b[i]));
    assert_eq!(lanes(s, s.sub(x, y)), all(&|i| a[i] - b[i]));
    assert_eq!(lanes(s, s.mul(x, y)), all(&|i| a[i] * b[i]));
    assert_eq!(lanes(s, s.fma(x, y, z)), all(&|i| a[i].mul_add(b[i], c[i])));
    assert_eq!(lanes(s, s.fnma(x, y, z)), all(&|i| (-a[i]).mul_add(b[i], c[i])));
    assert_eq!(lanes(s, s.min(x, y)), all(&|i| a[i].min(b[i])));
    assert_eq!(lanes(s, s.max(x, y)), all(&|i| a[i].max(b[i])));
    let ten = s.splat(10.0);
    assert_eq!(lanes(s, s.round(s.mul(x, ten))), all(&|i| (a[i] * 10.0).round_ties_even()));
    assert_eq!(lanes(s, s.unless_reaching(x, y, z)), all(&|i| if b[i] >= c[i] { 0.0 } else { a[i] }));
    let mut mixed = a.clone();
    mixed[0] = b[0];
    let other = load_or(s, &mixed, 0.0);
    assert_eq!(lanes(s, s.unless_equal(z, other, y)), all(&|i| if i == 0 { 0.0 } else { c[i] }));
    let nan = s.splat(f32::NAN);
    for vector in
        [s.unless_equal(nan, nan, nan), s.unless_reaching(nan, nan, y), s.max(x, nan), s.min(x, nan)]
    {
        assert!(lanes(s, vector).iter().all(|x| x.is_nan()), "NaN stays NaN");
    }

    let mut parts = a.clone();
    while parts.len() > 1 {
        let (low, high) = parts.split_at(parts.len() / 2);
        parts = low.iter().zip(high).map(|(low, high)| low + high).collect();
    }
    assert_eq!(s.sum(x), parts[0]);
    assert_eq!(s.largest(x), a.iter().copied().fold(f32::NEG_INFINITY, f32::max));

    let square: Vec<Vec<f32>> = (0..S::LANES as u64).map(|row| numbers(10 + row, S::LANES)).collect();
    let transposed =
        s.transposed(array(s.zero(), |i| if i < S::LANES { load_or(s, &square[i], 0.0) } else { s.zero() }));
    for (i, vector) in transposed.into_iter().enumerate().take(S::LANES) {
        assert_eq!(lanes(s, vector), all(&|j| square[j][i]));
    }
}

vectors!(parts_of_vectors_touch_nothing_else, parts);

fn parts<S: Simd>(s: S) {
    let a = numbers(1, S::LANES);
    for count in 0..=S::LANES {
        let expected: Vec<f32> = (0..S::LANES).map(|i| if i < count { a[i] } else { 7.0 }).collect();
        assert_eq!(lanes(s, load_or(s, &a[..count], 7.0)), expected);
        let mut values = vec![7.0; S::LANES];
        store(s, &mut values[..count], load_or(s, &a, 0.0));
        assert_eq!(values, expected);
        let small: Vec<f16> = a[..count].iter().map(|&x| f16::from_f32(x)).collect();
        let expected: Vec<f32> =
            (0..S::LANES).map(|i| small.get(i).map_or(0.0, |value| value.to_f32())).collect();
        assert_eq!(lanes(s, widened(s, &small)), expected);
    }
    let codes: Vec<i8> = (0..S::LANES as i32).map(|i| (i * 37 % 255 - 127) as i8).collect();
    // SAFETY: the length of a vector.
    let found = lanes(s, unsafe { s.whole(codes.as_ptr()) });
    assert!(found.iter().zip(&codes).all(|(&found, &code)| found == f32::from(code)), "{found:?}");
    let mut values = numbers(5, 3 * S::LANES + 3);
    let expected: Vec<f32> = values.iter().map(|x| x + x).collect();
    let mut others = values.clone();
    replace(s, &mut values, |x| s.add(x, x));
    assert_eq!(values, expected);
    let mut first = vec![1.0; values.len()];
    replace_both(s, &mut others, &mut first, |x, one| (s.add(x, x), s.add(one, x)));
    assert_eq!(others, expected);
    assert!(first.iter().zip(&expected).all(|(first, twice)| (first - 1.0 - twice / 2.0).abs() < 1e-6));
    let total = s.sum(fold(s, &values, 0.0, s.zero(), |sums, x| s.add(sums, x)));
    assert!((total - values.iter().sum::<f32>()).abs() < 1e-4);
}
