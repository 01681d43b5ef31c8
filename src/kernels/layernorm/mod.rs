//! Layer normalisation of rows with a gain and a bias (Ba, Kiros and Hinton 2016).
//!
//! `y = (x - mean) * rstd * gain + bias` with `rstd = 1 / sqrt(var + eps)` and the population variance. The backward adds
//! the gradient of `x` to that of the residual path. Gain and bias are the base's, or trained ones in place of it, whose
//! gradients are sums over the rows: `d_gain = sum of dy * (x - mean) * rstd`, `d_bias = sum of dy`, in an order that
//! follows from the number of rows alone.

use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod device_scratch;
pub mod reference;
#[cfg(test)]
mod tests;

/// Parameters `(c)` of a layer norm, and its epsilon.
#[derive(Clone, Copy)]
pub struct Norm<'a> {
    /// Gain `(c)`: FP16 of the base, or FP32 where it is trained.
    pub gain: View<'a>,
    /// Bias `(c)`: FP16 of the base, or FP32 where it is trained.
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

/// Where the gradients of a norm's parameters are added.
pub struct ParameterGradients<'a> {
    /// The flat buffer of all gradients, FP32.
    pub grads: ViewMut<'a>,
    /// Where that of the gain `(c)` begins, where it is trained.
    pub gain: Option<usize>,
    /// Where that of the bias `(c)` begins, where it is trained.
    pub bias: Option<usize>,
}

/// Adds the gradients of gain and bias, from `dy (n, c)`, and `x (n, c)` and `stats (n, 2)` of the forward.
pub fn parameter_gradients(dy: View, x: View, stats: View, to: ParameterGradients) {
    assert!(dy.len() == x.len() && x.len().is_multiple_of((stats.len() / 2).max(1)), "layernorm shapes");
    if stats.is_empty() {
        return;
    }
    match x.device() {
        Device::Cpu => cpu::parameter_gradients(dy.host(), x.host(), stats.host(), to),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::parameter_gradients(gpu, dy, x, stats, to),
    }
}
