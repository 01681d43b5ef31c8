//! Helpers of kernel tests: repeatable numbers, comparisons, central differences.

use half::f16;

#[cfg(test)]
mod skip_tests;

pub use skip_tests::skip;

/// Repeatable values in -1 .. 1, different for every `seed`.
pub fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        // xorshift64*: Vigna, "An experimental exploration of Marsaglia's xorshift generators".
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// As [`numbers`], rounded to FP16.
pub fn f16_numbers(seed: u64, len: usize) -> Vec<f16> {
    numbers(seed, len).into_iter().map(f16::from_f32).collect()
}

/// The values of [`numbers`] in f64.
pub fn doubles(seed: u64, len: usize) -> Vec<f64> {
    numbers(seed, len).into_iter().map(f64::from).collect()
}

/// Every pair within `tolerance * (1 + |expected|)`.
#[track_caller]
pub fn assert_close(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: lengths");
    for (at, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(found) - expected).abs();
        assert!(error <= tolerance * (1.0 + expected.abs()), "{what}[{at}]: {found} against {expected}");
    }
}

/// Compares `gradient` with central differences of `loss` at `point`, all in f64.
#[track_caller]
pub fn assert_gradient(point: &[f64], gradient: &[f64], what: &str, loss: impl Fn(&[f64]) -> f64) {
    assert_eq!(point.len(), gradient.len(), "{what}: lengths");
    for (at, (&found, expected)) in gradient.iter().zip(central_differences(point, loss)).enumerate() {
        let error = (found - expected).abs();
        assert!(error <= 1e-7 * (1.0 + expected.abs()), "d{what}[{at}]: {found} against {expected}");
    }
}

/// The gradient of `loss` at `point` by central differences, in f64.
pub fn central_differences(point: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let step = 1e-5;
    let difference = |at: usize| {
        let shifted = |by: f64| {
            let mut point = point.to_vec();
            point[at] += by;
            loss(&point)
        };
        (shifted(step) - shifted(-step)) / (2.0 * step)
    };
    (0..point.len()).map(difference).collect()
}

/// `sum(values * weights)`: turns an output into a scalar whose gradient is `weights`.
pub fn weighted(values: &[f64], weights: &[f64]) -> f64 {
    values.iter().zip(weights).map(|(a, b)| a * b).sum()
}

/// `values` converted to f64.
pub fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}

/// Runs `body` on a pool of that many threads.
pub fn with_threads<R: Send>(threads: usize, body: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(body)
}
