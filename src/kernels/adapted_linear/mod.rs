//! The one op that carries all linear adapters: a frozen linear layer plus low-rank deltas.
//!
//! `y (n, out) = residual + x W + b`, and for each delta on its columns
//! `y[:, columns] += scale * (drop(x) A^T) B^T` with `A (r, in)`, `B (columns, r)` (Hu et al. 2021).
//! `drop` is inverted dropout: each element is zeroed with probability p or divided by 1 - p.
//!
//! A, B and their gradients are ranges of two flat FP32 buffers, so an optimizer sees one vector.

use std::ops::Range;

use super::matmul::{self, InitialValue, Matrix};
use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;
pub mod device_scratch;
pub mod reference;
#[cfg(test)]
mod tests;

/// A frozen linear layer: Conv1D weight `(in, out)` and bias `(out)`, FP16.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    /// Weight `(in, out)`.
    pub weight: Matrix<'a>,
    /// Bias `(out)`.
    pub bias: View<'a>,
}

/// A low-rank delta of a linear layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    /// Where `A (r, in)` begins in the flat buffers.
    pub a: usize,
    /// Where `B (columns, r)` begins in the flat buffers.
    pub b: usize,
    /// r.
    pub rank: usize,
    /// Output columns that the delta adds to.
    pub columns: Range<usize>,
    /// Factor of the delta.
    pub scale: f32,
    /// Whether both lie transposed, A as `(in, r)` and B as `(r, columns)`: products of few rows then read them as they
    /// are. For CPUs, and [`forward`] alone.
    pub turned: bool,
}

/// Which elements of a delta's input are dropped: a pure function of seed, step, delta and element,
/// so that recomputing a block replays it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Key of step and seed; the delta's place is mixed in.
    pub key: u64,
    /// Probability of dropping an element; 0 turns dropout off.
    pub p: f32,
    /// Number of this micro-batch's first row within the optimizer step.
    pub first_row: usize,
    /// Length `t` of the rows of this micro-batch.
    pub seq_len: usize,
    /// Length that element numbers are counted with, the same for every micro-batch of a run.
    pub stride: usize,
}

impl Dropout {
    /// No dropout.
    pub const NONE: Self = Self { key: 0, p: 0.0, first_row: 0, seq_len: 1, stride: 1 };

    /// The key of a delta whose A begins at `a`.
    #[inline(always)]
    fn key_of(&self, a: usize) -> u64 {
        self.key ^ (a as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// The factor of input element `column` of row `row` of `n`, of a delta whose A begins at `a`.
    #[inline(always)]
    fn factor(&self, a: usize, inputs: usize, row: usize, column: usize) -> f32 {
        let token = (self.first_row + row / self.seq_len) * self.stride + row % self.seq_len;
        let kept = engraft_util::rng::uniform(self.key_of(a), (token * inputs + column) as u64) >= self.p;
        if kept { 1.0 / (1.0 - self.p) } else { 0.0 }
    }
}

/// Floats of scratch that a CPU thread uses for `n` rows and sites up to `widest` when deltas drop
/// elements, and floats that packing takes for deltas up to `rank`.
pub fn scratch(n: usize, widest: usize, rank: usize, dropout: bool) -> (usize, usize) {
    cpu::scratch(n, widest, rank, dropout)
}

/// Forward. `low` receives `drop(x) A^T` of every delta, `(n, r)` one after another, for the backward.
#[allow(clippy::too_many_arguments, reason = "an op with two frozen, two trained and two saved operands")]
pub fn forward(
    x: View,
    layer: Layer,
    residual: Option<View>,
    deltas: &[Delta],
    values: View,
    dropout: Dropout,
    low: ViewMut,
    y: ViewMut,
    n: usize,
) {
    let start = residual
        .map_or(InitialValue::Bias(layer.bias), |residual| InitialValue::Residual(residual, layer.bias));
    match y.device() {
        Device::Cpu => {
            let (mut y, shape) = (y, (n, layer.weight.rows, layer.weight.cols));
            matmul::frozen_nn(x, layer.weight, start, y.reborrow(), n);
            cpu::add_deltas(x.host(), deltas, values.host(), dropout, low.host(), y.host(), shape);
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            cuda::forward(gpu, (x, layer.weight, start), deltas, values, dropout, low, y, n);
        }
    }
}

/// What deltas alone add to `y (n, out)` in [`forward`], without dropout: for rows that have other adapters than their
/// neighbours, after one frozen product of all rows. `low` receives `x A^T` of every delta; `sizes` are n, in and out.
pub fn add_deltas(
    x: View,
    deltas: &[Delta],
    values: View,
    low: ViewMut,
    y: ViewMut,
    sizes: (usize, usize, usize),
) {
    if deltas.is_empty() {
        return;
    }
    match y.device() {
        Device::Cpu => {
            cpu::add_deltas(x.host(), deltas, values.host(), Dropout::NONE, low.host(), y.host(), sizes);
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::add_deltas(gpu, x, deltas, values, Dropout::NONE, low, y, sizes),
    }
}

/// The part of [`forward`] that the backward needs: `low` receives `drop(x) A^T` of every delta.
#[allow(clippy::too_many_arguments, reason = "mirrors the forward")]
pub fn low(x: View, inputs: usize, deltas: &[Delta], values: View, dropout: Dropout, low: ViewMut, n: usize) {
    assert!(deltas.iter().all(|delta| !delta.turned), "factors of training lie as they are saved");
    match x.device() {
        Device::Cpu => cpu::low(x.host(), deltas, values.host(), dropout, low.host(), (n, inputs)),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::low(gpu, x, deltas, values, dropout, low, (n, inputs)),
    }
}

/// Backward: adds the gradients of A and B to `grads`, and writes `dx (n, in)` where asked for.
///
/// `x` is the forward's input, needed only when there are deltas; `low` is what the forward saved;
/// `d_low` is workspace of the same size.
#[allow(clippy::too_many_arguments, reason = "an op with two frozen, two trained and two saved operands")]
pub fn backward(
    dy: View,
    x: View,
    layer: Layer,
    deltas: &[Delta],
    values: View,
    grads: ViewMut,
    dropout: Dropout,
    low: View,
    d_low: ViewMut,
    dx: Option<ViewMut>,
    n: usize,
) {
    let mut dx = dx;
    if let Some(dx) = &mut dx {
        matmul::frozen_nt(dy, layer.weight, InitialValue::Zero, dx.reborrow(), n);
    }
    match dy.device() {
        Device::Cpu => {
            let shape = (n, layer.weight.rows, layer.weight.cols);
            let dx = dx.map(ViewMut::host);
            let (x, low) = if deltas.is_empty() { (&[][..], &[][..]) } else { (x.host(), low.host()) };
            cpu::backward_deltas(
                dy.host(),
                x,
                deltas,
                (values.host(), grads.host()),
                dropout,
                (low, d_low.host()),
                dx,
                shape,
            );
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            let shape = (n, layer.weight.rows, layer.weight.cols);
            cuda::backward_deltas(gpu, dy, x, deltas, (values, grads), dropout, (low, d_low), dx, shape);
        }
    }
}
