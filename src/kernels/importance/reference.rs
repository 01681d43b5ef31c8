//! REFERENCE twin, in any precision, written out element by element.

use engraft_util::real::Real;

use super::{Smoothing, Triplets};

/// Takes the importance of `values` by `gradient` into `mean` and `uncertainty`.
pub fn smooth<T: Real>(values: &[T], gradient: &[T], mean: &mut [T], uncertainty: &mut [T], by: Smoothing) {
    let (b1, b2) = (T::of(by.betas.0), T::of(by.betas.1));
    for at in 0..values.len() {
        let importance = (values[at] * gradient[at] * T::of(by.factor)).abs();
        mean[at] = b1 * mean[at] + (T::one() - b1) * importance;
        uncertainty[at] = b2 * uncertainty[at] + (T::one() - b2) * (importance - mean[at]).abs();
    }
}

/// The scores of the triplets of one delta.
pub fn scores<T: Real>(mean: &[T], uncertainty: &[T], delta: Triplets) -> Vec<T> {
    let Triplets { a, b, d, rank, inputs, outputs, .. } = delta;
    let s = |at: usize| mean[at] * uncertainty[at];
    let score = |k: usize| {
        let row = (0..inputs).map(|i| s(a + k * inputs + i)).sum::<T>() / T::of(inputs as f64);
        let column = (0..outputs).map(|o| s(b + o * rank + k)).sum::<T>() / T::of(outputs as f64);
        s(d + k) + (row + column)
    };
    (0..rank).map(score).collect()
}
