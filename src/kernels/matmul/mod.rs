//! Matrix products with a frozen matrix, FP16 or 8-bit, and small dense FP32 ones. Accumulation is FP32. Activations
//! are FP32 on CPUs, of any type on CUDA devices.
//!
//! GPT-2 stores weights as Conv1D `[in, out]`. Forward and backward of a linear layer, and the two of
//! the head, read the same bytes in one of two ways:
//!
//! | function | maths | used as |
//! |---|---|---|
//! | [`frozen_nn`] | `y (n, cols) = x (n, rows) W (rows, cols)` | forward of a layer, backward of the head |
//! | [`frozen_nt`] | `y (n, rows) = x (n, cols) W^T` | backward of a layer, forward of the head |

use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;
pub mod device_scratch;
mod matrix;
mod simd;
#[cfg(test)]
mod tests;

pub(super) use matrix::Elements;
pub use matrix::{Arithmetic, FrozenMatrix, Layout, Matrix};

/// Floats of scratch of a CPU thread, and floats that packing takes for `n` rows.
pub fn scratch(n: usize) -> (usize, usize) {
    cpu::scratch(n)
}

/// Floats of scratch that the tasks of a product of `n` rows share on a CPU.
pub fn shared(n: usize, arithmetic: Arithmetic) -> usize {
    if arithmetic.in_pairs() { simd::shared(n) } else { 0 }
}

/// The initial value of an output, to which a product is added.
#[derive(Clone, Copy)]
pub enum InitialValue<'a> {
    /// Zeros.
    Zero,
    /// The present content of the output.
    Keep,
    /// An FP16 bias `(out)` in every row.
    Bias(View<'a>),
    /// A residual `(n, out)` plus an FP16 bias `(out)`: `y = residual + x W + b`.
    Residual(View<'a>, View<'a>),
}

/// `y (n, cols) = start + x (n, rows) W`.
pub fn frozen_nn(x: View, w: Matrix, start: InitialValue, y: ViewMut, n: usize) {
    match y.device() {
        Device::Cpu => cpu::frozen_nn(x.host(), w, start, y.host(), n),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::frozen_nn(gpu, (x, w.rows), w, start, y, n),
    }
}

/// `y (n, rows) = start + x (n, cols) W^T`.
pub fn frozen_nt(x: View, w: Matrix, start: InitialValue, y: ViewMut, n: usize) {
    match y.device() {
        Device::Cpu => cpu::frozen_nt(x.host(), w, start, y.host(), n),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::frozen_nt(gpu, x, w, start, (y, w.rows), n),
    }
}

/// `y (n, outputs) = x (n, inputs) W^T + b` with FP32 `W (outputs, inputs)` and `b (outputs)`:
/// torch's `Linear`, for the small trained network of a prefix.
pub fn dense_forward(x: View, w: View, b: View, y: ViewMut, (n, inputs, outputs): (usize, usize, usize)) {
    match y.device() {
        Device::Cpu => cpu::dense_forward(x.host(), w.host(), b.host(), y.host(), (n, inputs, outputs)),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::dense_forward(gpu, x, w, b, y, (n, inputs, outputs)),
    }
}

/// Gradients of [`dense_forward`]: `dw += dy^T x`, `db += sum_n dy`, and `dx = dy W` where it is `Some`.
pub fn dense_backward(
    dy: View,
    x: View,
    w: View,
    (dw, db): (ViewMut, ViewMut),
    dx: Option<ViewMut>,
    shape: (usize, usize, usize),
) {
    match dy.device() {
        Device::Cpu => cpu::dense_backward(dy.host(), x.host(), (dw.host(), db.host()), shape),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::dense_backward(gpu, dy, x, (dw, db), shape),
    }
    if let Some(dx) = dx {
        dense_input_gradient(dy, w, dx, shape, false);
    }
}

/// `dx (n, inputs) = dy W`, or `dx += dy W` with `accumulate`.
pub fn dense_input_gradient(dy: View, w: View, dx: ViewMut, shape: (usize, usize, usize), accumulate: bool) {
    match dy.device() {
        Device::Cpu => cpu::dense_input_gradient(dy.host(), w.host(), dx.host(), shape, accumulate),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::dense_input_gradient(gpu, dy, w, dx, shape, accumulate),
    }
}
