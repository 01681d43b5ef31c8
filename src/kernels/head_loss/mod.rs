//! Language-model head and cross-entropy in one op, in chunks of supervised rows.
//!
//! For a supervised row with hidden state `h` and target `y`: `z = h E^T` over the vocabulary,
//! `loss = (1 - e) (lse(z) - z_y) + e (lse(z) - mean(z))` with label smoothing e as in PyTorch
//! (Szegedy et al. 2016), `dz = factor (softmax(z) - (1 - e) [v = y] - e / V)`, `dh = dz E`.
//! E is frozen, so no gradient of it exists. Only one chunk of logits is ever in memory.

use super::{
    gather,
    matmul::{self, InitialValue, Matrix},
};
use crate::device::{DType, Device, HEAD_ROWS, View, ViewMut};

pub use tally::Tally;

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod reference;
mod simd;
mod tally;
#[cfg(test)]
mod tests;

/// Hidden states and their targets.
#[derive(Clone, Copy)]
pub struct Supervised<'a> {
    /// Hidden states after the last layer norm `(n, c)`.
    pub hidden: View<'a>,
    /// Indices of the supervised rows `(m)`, ascending; `None` where all are, m = n.
    pub rows: Option<View<'a>>,
    /// Targets `(m)` of the supervised rows, inside the vocabulary.
    pub targets: View<'a>,
    /// Label smoothing e, 0 for none.
    pub smoothing: f32,
}

/// Distance of rows of `v` FP32 logits: with 16-bit activations their gradients take the same bytes, and the columns after
/// v stand for the rows of zeros after a device's copy of the head.
pub fn stride(v: usize, activations: DType) -> usize {
    if activations == DType::F32 { v } else { v.next_multiple_of(HEAD_ROWS) }
}

/// The head with the rows of zeros that logits have columns for.
#[cfg(feature = "cuda")]
fn padded(head: Matrix, activations: DType) -> Matrix {
    let padded = head.padded();
    let has_columns = padded.rows == stride(head.rows, activations);
    if has_columns { padded } else { head }
}

/// Workspace: `gathered (chunk, c)` and `logits (chunk, v)`, whose rows are [`stride`] apart.
pub struct HeadScratch<'a> {
    /// Hidden states of a chunk, later their gradients; unused where all rows are supervised.
    pub gathered: ViewMut<'a>,
    /// Logits of a chunk, later their gradients.
    pub logits: ViewMut<'a>,
}

/// Losses `(m)` of the supervised rows; with `gradient = (d_hidden (n, c), factor)` also
/// `d_hidden = factor * d(sum of losses) / d hidden`, zero in rows without supervision.
pub fn forward_backward(
    input: Supervised,
    head: Matrix,
    work: HeadScratch,
    losses: ViewMut,
    gradient: Option<(ViewMut, f32)>,
) {
    let (c, m) = (head.cols, input.targets.len());
    let stride = stride(head.rows, input.hidden.dtype());
    let chunk = work.logits.len() / stride;
    let HeadScratch { mut gathered, mut logits } = work;
    let (mut losses, mut gradient) = (losses, gradient);
    if let (Some((d_hidden, _)), Some(_)) = (&mut gradient, input.rows) {
        d_hidden.reborrow().clear();
    }
    for first in (0..m).step_by(chunk) {
        let count = chunk.min(m - first);
        let rows = input.rows.map(|rows| rows.slice(first, count));
        let targets = input.targets.slice(first, count);
        let mut z = logits.reborrow().slice(0, count * stride);
        let hidden = match rows {
            None => input.hidden.slice(first * c, count * c),
            Some(rows) => {
                gather::gather(input.hidden, rows, gathered.reborrow(), c);
                gathered.as_view().slice(0, count * c)
            }
        };
        logits_of(hidden, head, z.reborrow(), count);
        let losses = losses.reborrow().slice(first, count);
        let factor = gradient.as_ref().map(|(_, factor)| *factor);
        let logits = Logits { z: z.reborrow(), v: head.rows, activations: hidden.dtype() };
        cross_entropy(logits, targets, input.smoothing, factor, losses);
        match (&mut gradient, rows) {
            (None, _) => {}
            (Some((d_hidden, _)), None) => {
                hidden_gradient(z.as_view(), head, d_hidden.reborrow().slice(first * c, count * c), count);
            }
            (Some((d_hidden, _)), Some(rows)) => {
                let mut d_some = gathered.reborrow().slice(0, count * c);
                hidden_gradient(z.as_view(), head, d_some.reborrow(), count);
                gather::scatter(d_some.as_view(), rows, d_hidden.reborrow(), c);
            }
        }
    }
}

/// `z (count, v) = hidden E^T`, rows of z [`stride`] apart.
fn logits_of(hidden: View, head: Matrix, z: ViewMut, count: usize) {
    match z.device() {
        Device::Cpu => matmul::frozen_nt(hidden, head, InitialValue::Zero, z, count),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            let stride = stride(head.rows, hidden.dtype());
            let head = padded(head, hidden.dtype());
            matmul::cuda::frozen_nt(gpu, hidden, head, InitialValue::Zero, (z, stride), count);
        }
    }
}

/// `d_hidden (count, c) = dz E`, with dz from [`cross_entropy`].
fn hidden_gradient(dz: View, head: Matrix, d_hidden: ViewMut, count: usize) {
    match d_hidden.device() {
        Device::Cpu => matmul::frozen_nn(dz, head, InitialValue::Zero, d_hidden, count),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::hidden_gradient(gpu, dz, head, d_hidden, count),
    }
}

/// Logits `(chunk, v)` of a chunk of supervised tokens.
struct Logits<'a> {
    /// FP32 logits `(rows, v)`, rows [`stride`] apart.
    z: ViewMut<'a>,
    v: usize,
    /// Type of their gradients.
    activations: DType,
}

/// Losses `(rows)` of rows of logits; with a factor, the logits become their own gradients times the factor.
fn cross_entropy(logits: Logits, targets: View, smoothing: f32, factor: Option<f32>, losses: ViewMut) {
    let Logits { z, v, activations } = logits;
    match z.device() {
        Device::Cpu => cpu::cross_entropy(z.host(), targets.host(), smoothing, factor, losses.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            cuda::cross_entropy(gpu, z, (v, activations), targets, smoothing, factor, losses)
        }
    }
    #[cfg(not(feature = "cuda"))]
    let _ = (v, activations);
}
