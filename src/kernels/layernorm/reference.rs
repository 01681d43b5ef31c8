//! REFERENCE twin of layer normalisation, in any precision.

use engraft_util::real::Real;

/// `(y, stats)` of rows of width `gain.len()`.
pub fn forward<T: Real>(x: &[T], gain: &[T], bias: &[T], epsilon: T) -> (Vec<T>, Vec<T>) {
    let c = gain.len();
    let width = T::of(c as f64);
    let (mut y, mut stats) = (Vec::with_capacity(x.len()), Vec::new());
    for row in x.chunks_exact(c) {
        let mean = row.iter().copied().sum::<T>() / width;
        let variance = row.iter().map(|&v| (v - mean) * (v - mean)).sum::<T>() / width;
        let rstd = (variance + epsilon).sqrt().recip();
        y.extend((0..c).map(|i| (row[i] - mean) * rstd * gain[i] + bias[i]));
        stats.extend([mean, rstd]);
    }
    (y, stats)
}

/// `d loss / d x`.
///
/// In the forward pass `y = x_hat * gain + bias` with `x_hat = (x - mean) * rstd`, so with
/// `g = dy * gain`: `dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))`.
pub fn backward<T: Real>(dy: &[T], x: &[T], stats: &[T], gain: &[T]) -> Vec<T> {
    let c = gain.len();
    let width = T::of(c as f64);
    let mut dx = Vec::with_capacity(x.len());
    for ((dy, x), stats) in dy.chunks_exact(c).zip(x.chunks_exact(c)).zip(stats.chunks_exact(2)) {
        let (mean, rstd) = (stats[0], stats[1]);
        let g: Vec<T> = (0..c).map(|i| dy[i] * gain[i]).collect();
        let x_hat: Vec<T> = x.iter().map(|&v| (v - mean) * rstd).collect();
        let mean_g = g.iter().copied().sum::<T>() / width;
        let mean_gx = (0..c).map(|i| g[i] * x_hat[i]).sum::<T>() / width;
        dx.extend((0..c).map(|i| rstd * (g[i] - mean_g - x_hat[i] * mean_gx)));
    }
    dx
}

/// `d loss / d gain` and `d loss / d bias`: in the forward pass `y = x_hat * gain + bias`.
pub fn parameter_gradients<T: Real>(dy: &[T], x: &[T], stats: &[T], c: usize) -> (Vec<T>, Vec<T>) {
    let (mut gain, mut bias) = (vec![T::zero(); c], vec![T::zero(); c]);
    for ((dy, x), stats) in dy.chunks_exact(c).zip(x.chunks_exact(c)).zip(stats.chunks_exact(2)) {
        for i in 0..c {
            gain[i] += dy[i] * (x[i] - stats[0]) * stats[1];
            bias[i] += dy[i];
        }
    }
    (gain, bias)
}
