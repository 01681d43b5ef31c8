//! Layer normalisation of rows with a frozen gain and bias (Ba, Kiros and Hinton 2016).
//!
//! `y = (x - mean) * rstd * gain + bias` with `rstd = 1 / sqrt(var + eps)` and the population variance.
//! Gain and bias are frozen, so the backward computes the gradient of `x` alone, and adds it to that of the residual
//! path.

use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

/// Frozen FP16 parameters `(c)` of a layer norm, and its epsilon.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// Gain `(c)`, FP16.
    pub gain: View<'a>,
    /// Bias `(c)`, FP16.
    pub bias: View<'a>,
    /// Epsilon, added to the variance.
    pub epsilon: f32,
}

/// `y (n, c)` and `stats (n, 2)` = mean and rstd of each row of `x (n, c)`.
pub fn forward(x: View, norm: Norm, y: ViewMut, stats: ViewMut) {
    match y.device() {
        Device::Cpu => cpu::forward(x.host(), norm, y.host(), stats.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(gpu, x, norm, y, stats),
    }
}

/// `dx (n, c) += d loss / d x`, from `dy (n, c)`, and `x` and `stats` of the forward.
pub fn backward(dy: View, x: View, stats: View, norm: Norm, dx: ViewMut) {
    match dx.device() {
        Device::Cpu => cpu::backward(dy.host(), x.host(), stats.host(), norm, dx.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(gpu, dy, x, stats, norm, dx),
    }
}
