//! Norms of the columns of a frozen matrix with its low-rank deltas, and the output scale that follows from them.
//!
//! ```text
//! V = W + sum of s A^T diag(d) B^T diag(e)        n_j = || column j of V ||_2        g = m / n
//! ```
//!
//! `W (in, out)` is frozen; a delta has `A (r, in)`, `B (columns, r)`, `s`, `d (r)` and `e (columns)` as in
//! [`adapted_linear`](super::adapted_linear), and adds to a range of W's columns. `m (out)` is learned and n is not
//! differentiated (DoRA, Liu et al. 2024, section 4.3), so the gradient of m is that of g over n.
//!
//! V is made a tile at a time and never written: W is read once. An element is summed in FP32, in an order that follows
//! from the shapes alone.
//!
//! A column of zeros has no direction: its g is 0, and its m gets no gradient. A norm that is not a number stays one in g.

use super::{adapted_linear::Delta, matmul::Matrix};
use crate::device::{Device, View, ViewMut, cpu::on_pool};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod device_scratch;
pub mod reference;
#[cfg(test)]
mod tests;

/// A frozen matrix with what is added to it.
#[derive(Clone, Copy)]
pub struct AdaptedMatrix<'a> {
    /// `W (in, out)`.
    pub weight: Matrix<'a>,
    /// Low-rank deltas of any tokens, their factors as they are saved.
    pub deltas: &'a [Delta],
    /// The flat buffer that holds all factors and vectors, FP32.
    pub values: View<'a>,
}

impl AdaptedMatrix<'_> {
    /// Sum of the ranks of the deltas.
    #[cfg(feature = "cuda")]
    fn ranks(&self) -> usize {
        self.deltas.iter().map(|delta| delta.rank).sum()
    }
}

/// Floats of scratch that a CPU thread uses, and floats that packing takes beside it, for deltas of `ranks` in all.
pub fn scratch(ranks: usize) -> (usize, usize) {
    cpu::scratch(ranks)
}

/// Norms `(out)` of the columns of V.
///
/// # Panics
/// When factors are transposed.
pub fn forward(matrix: AdaptedMatrix, norms: ViewMut) {
    assert!(
        matrix.deltas.iter().all(|delta| !delta.transposed),
        "norms follow from factors as they are saved"
    );
    assert_eq!(norms.len(), matrix.weight.cols, "a norm for every column");
    match norms.device() {
        Device::Cpu => cpu::forward(matrix, norms.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(gpu, matrix, norms),
    }
}

/// Norms of the columns of W alone, as a CPU computes them, wherever W is.
pub fn of_weight(weight: Matrix) -> Vec<f32> {
    let mut norms = vec![0f32; weight.cols];
    weight.with_host_copy(|weight| {
        let none: &[f32] = &[];
        on_pool(|| cpu::forward(AdaptedMatrix { weight, deltas: &[], values: none.into() }, &mut norms));
    });
    norms
}

/// `g (out) = m / norms`.
pub fn output_scale(m: View, norms: View, g: ViewMut) {
    assert!(m.len() == g.len() && norms.len() == g.len(), "shapes of an output scale");
    match g.device() {
        Device::Cpu => cpu::output_scale(m.host(), norms.host(), g.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::output_scale(gpu, m, norms, g),
    }
}

/// Backward of [`output_scale`] for norms that are constants: `dm (out) += dg / norms`.
pub fn output_scale_backward(dg: View, norms: View, dm: ViewMut) {
    assert!(dg.len() == dm.len() && norms.len() == dm.len(), "shapes of an output scale");
    match dm.device() {
        Device::Cpu => cpu::output_scale_backward(dg.host(), norms.host(), dm.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::output_scale_backward(gpu, dg, norms, dm),
    }
}
