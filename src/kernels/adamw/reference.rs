//! REFERENCE twin of the update, in any precision.

use super::Update;
use engraft_util::real::Real;

/// One update of `values` and both moments.
pub fn update<T: Real>(values: &mut [T], gradient: &[T], first: &mut [T], second: &mut [T], u: Update) {
    let (b1, b2) = (T::of(u.betas.0), T::of(u.betas.1));
    let one = T::one();
    let correction = |beta: f64| T::of(1.0 - beta.powf(u.step as f64));
    let step_size = T::of(u.lr) / correction(u.betas.0);
    let root = correction(u.betas.1).sqrt();
    for i in 0..values.len() {
        let g = gradient[i] * T::of(u.factor);
        values[i] = values[i] * T::of(1.0 - u.lr * u.weight_decay);
        first[i] = b1 * first[i] + (one - b1) * g;
        second[i] = b2 * second[i] + (one - b2) * g * g;
        values[i] = values[i] - step_size * first[i] / (second[i].sqrt() / root + T::of(u.epsilon));
    }
}
