//! Matrix products with a frozen matrix, of FP16 or of codes of 8 or 4 bits, and small dense FP32 ones. Accumulation is FP32. Activations
//! are FP32 on CPUs, of any type on CUDA devices.
//!
//! GPT-2 stores weights as Conv1D `[in, out]`. Forward and backward of a linear layer, and the two of
//! the head, read the same bytes in one of two ways:
//!
//! | function | maths | used as |
//! |---|---|---|
//! | [`frozen_nn`] | `y (n, cols) = x (n, rows) W (rows, cols)` | forward of a layer, backward of the head |
//! | [`frozen_nt`] | `y (n, rows) = x (n, cols) W^T` | backward of a layer, forward of the head |

use super::{
    activation::{self, Activation},
    nf4::Sizes,
};
use crate::device::{Device, View, ViewMut, cpu::vectors};

mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;
pub mod device_scratch;
mod matrix;
mod simd;
#[cfg(test)]
mod tests;
mod transposed;

pub(super) use matrix::Elements;
pub use matrix::{Arithmetic, FrozenMatrix, Layout, Matrix, Scales};
pub use transposed::TransposedMatrix;

/// Sizes of a product `y (n, outer) = x (n, inner) V`, where V is a matrix of weights or its transpose.
#[derive(Clone, Copy)]
struct ProductShape {
    n: usize,
    inner: usize,
    outer: usize,
}

impl ProductShape {
    /// Asserts that x and y have these sizes.
    fn check(self, x: &[f32], y: &[f32]) {
        let Self { n, inner, outer } = self;
        assert!(x.len() >= n * inner && y.len() >= n * outer, "shapes of a frozen product");
    }
}

/// The part `V[inner .. inner + depth, outer .. outer + width]`.
#[derive(Clone, Copy)]
struct PanelRange {
    inner: usize,
    depth: usize,
    outer: usize,
    width: usize,
}

/// Floats of scratch of a CPU thread, and floats that packing takes for `n` rows.
pub fn scratch(n: usize) -> (usize, usize) {
    cpu::scratch(n)
}

/// Floats of scratch that the tasks of a product of `n` rows share on a CPU.
pub fn shared(n: usize, arithmetic: Arithmetic) -> usize {
    if arithmetic.in_pairs() { simd::shared(n) } else { 0 }
}

/// The same for the scales of a matrix `(rows, cols)` of 4-bit codes, beside those.
pub fn shared_scales(rows: usize, cols: usize) -> usize {
    if vectors() { Sizes { rows, cols }.decoded() } else { 0 }
}

/// The initial value of an output, to which a product is added.
#[derive(Clone, Copy)]
pub enum InitialValue<'a> {
    /// Zero for every element.
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

/// `y (n, cols) = start + x (n, rows) W`, and `activated (n, cols) = f(y)`. Where a device does both in one pass, f sees
/// y before it is rounded.
pub fn frozen_nn_activated(
    x: View,
    w: Matrix,
    start: InitialValue,
    y: ViewMut,
    (f, activated): (Activation, ViewMut),
    n: usize,
) {
    let mut y = y;
    #[cfg(feature = "cuda")]
    let mut activated = activated;
    #[cfg(feature = "cuda")]
    if let Device::Cuda(gpu) = y.device()
        && f == Activation::GeluTanh
        && cuda::frozen_nn_gelu(gpu, x, w, start, (y.reborrow(), activated.reborrow()), n)
    {
        return;
    }
    frozen_nn(x, w, start, y.reborrow(), n);
    activation::forward(f, y.as_view(), activated);
}

/// `d (n, rows) = (start + dy (n, cols) W^T) * f'(x)`: the gradient of x where the layer's input was f(x (n, rows)).
pub fn frozen_nt_derived(
    dy: View,
    w: Matrix,
    start: InitialValue,
    d: ViewMut,
    (f, x): (Activation, View),
    n: usize,
) {
    let mut d = d;
    #[cfg(feature = "cuda")]
    if let Device::Cuda(gpu) = d.device()
        && f == Activation::GeluTanh
        && cuda::frozen_nt_gelu_gradient(gpu, dy, w, start, (d.reborrow(), x), n)
    {
        return;
    }
    frozen_nt(dy, w, start, d.reborrow(), n);
    activation::backward(f, x, d);
}

/// Sizes of a dense layer `y (n, outputs) = x (n, inputs) W^T + b` with FP32 `W (outputs, inputs)` and
/// `b (outputs)`: torch's `Linear`, for the small trained network of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenseShape {
    /// Rows n of x and y.
    pub n: usize,
    /// Width of x, the columns of W.
    pub inputs: usize,
    /// Width of y, the rows of W.
    pub outputs: usize,
}

/// Destinations of the gradients of a dense layer.
pub struct DenseGradients<'a> {
    /// Gradient of W `(outputs, inputs)`; the product is added to it.
    pub dw: ViewMut<'a>,
    /// Gradient of b `(outputs)`; the sum is added to it.
    pub db: ViewMut<'a>,
    /// Gradient of x `(n, inputs)`, if it is wanted; overwritten.
    pub dx: Option<ViewMut<'a>>,
}

/// `y (n, outputs) = x (n, inputs) W^T + b`.
pub fn dense_forward(x: View, w: View, b: View, y: ViewMut, shape: DenseShape) {
    match y.device() {
        Device::Cpu => cpu::dense_forward(x.host(), w.host(), b.host(), y.host(), shape),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::dense_forward(gpu, x, w, b, y, (shape.n, shape.inputs, shape.outputs)),
    }
}

/// Gradients of [`dense_forward`] from `dy (n, outputs)`: `dw += dy^T x`, `db += sum_n dy`, `dx = dy W`.
pub fn dense_backward(dy: View, x: View, w: View, gradients: DenseGradients, shape: DenseShape) {
    let DenseGradients { dw, db, dx } = gradients;
    match dy.device() {
        Device::Cpu => cpu::dense_backward(dy.host(), x.host(), dw.host(), db.host(), shape),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            cuda::dense_backward(gpu, dy, x, (dw, db), (shape.n, shape.inputs, shape.outputs));
        }
    }
    if let Some(dx) = dx {
        dense_input_gradient(dy, w, dx, shape, false);
    }
}

/// `dx (n, inputs) = dy W`, or `dx += dy W` with `accumulate`.
pub fn dense_input_gradient(dy: View, w: View, dx: ViewMut, shape: DenseShape, accumulate: bool) {
    match dy.device() {
        Device::Cpu => cpu::dense_input_gradient(dy.host(), w.host(), dx.host(), shape, accumulate),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            let shape = (shape.n, shape.inputs, shape.outputs);
            cuda::dense_input_gradient(gpu, dy, w, dx, shape, accumulate);
        }
    }
}
