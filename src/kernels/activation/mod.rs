//! The pointwise function of the MLP half, and its derivative; always in FP32.
//!
//! | kind | f(x) | source |
//! |---|---|---|
//! | `GeluTanh` | `x / (1 + exp(-2u))`, `u = sqrt(2/pi) (x + 0.044715 x^3)`, the same as `x/2 (1 + tanh u)` |
//! Hendrycks and Gimpel 2016 |
//! | `Gelu` | `x/2 (1 + erf(x / sqrt 2))` | the same |
//! | `Relu` | `max(x, 0)`, derivative 0 at 0 as in PyTorch | |
//! | `Silu` | `x / (1 + exp(-x))` | the same |
//! | `Tanh` | `tanh x` | used by the projection of a prefix |

use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;
pub mod reference;
mod simd;
#[cfg(test)]
mod tests;

/// A pointwise function, by the names of `activation_function` in configs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// GELU with the tanh approximation: `gelu_new`, `gelu_pytorch_tanh`, `gelu_fast`.
    GeluTanh,
    /// GELU with the error function: `gelu`.
    Gelu,
    /// `max(x, 0)`: `relu`.
    Relu,
    /// `silu`, also named `swish`.
    Silu,
    /// Hyperbolic tangent, of a prefix's network.
    Tanh,
}

/// `y = f(x)`, any equal shapes.
pub fn forward(kind: Activation, x: View, y: ViewMut) {
    match y.device() {
        Device::Cpu => cpu::forward(kind, x.host(), y.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(gpu, kind, x, y),
    }
}

/// In place `d = d * f'(x)`: on entry the gradient of the output, on exit that of the input.
pub fn backward(kind: Activation, x: View, d: ViewMut) {
    match d.device() {
        Device::Cpu => cpu::backward(kind, x.host(), d.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(gpu, kind, x, d),
    }
}
