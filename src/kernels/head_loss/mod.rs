//! Language-model head and cross-entropy in one op, in chunks of supervised rows.
//!
//! For a supervised row with hidden state `h` and target `y`: `z = h E^T` over the vocabulary,
//! `loss = (1 - e) (lse(z) - z_y) + e (lse(z) - mean(z))` with label smoothing e as in PyTorch
//! (Szegedy et al. 2016), `dz = factor (softmax(z) - (1 - e) [v = y] - e / V)`, `dh = dz E`.
//! E is frozen, so no gradient of it exists. Only one chunk of logits is ever in memory.

use super::{
    gather,
    matmul::{self, Matrix, Start},
};
use crate::device::{DType, Device, View, ViewMut};

pub use tally::Tally;

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod reference;
mod simd;
mod tally;
#[cfg(test)]
mod tests;

/// Hidden states and what they should predict.
#[derive(Clone, Copy)]
pub struct Supervised<'a> {
    /// Hidden states after the last layer norm `(n, c)`.
    pub hidden: View<'a>,
    /// Which of them are supervised `(m)`, ascending; `None` where all are, m = n.
    pub rows: Option<View<'a>>,
    /// Their targets `(m)`, inside the vocabulary.
    pub targets: View<'a>,
    /// Label smoothing e.
    pub smoothing: f32,
}

/// FP32 logits between the rows of a chunk of `v` logits each: with 16-bit activations their gradients lie in the
/// same bytes, in rows that products on tensor cores like.
pub fn stride(v: usize, activations: DType) -> usize {
    if activations == DType::F32 { v } else { v.next_multiple_of(8) }
}

/// Workspace: `gathered (chunk, c)` and `logits (chunk, v)`, rows of the latter [`stride`] apart.
pub struct Work<'a> {
    /// Hidden states of a chunk, then their gradients; not used where all rows are supervised.
    pub gathered: ViewMut<'a>,
    /// Logits of a chunk, then their gradients.
    pub logits: ViewMut<'a>,
}

/// Losses `(m)` of the supervised rows; with `gradient = (d_hidden (n, c), factor)` also
/// `d_hidden = factor * d(sum of losses) / d hidden`, zero in rows without supervision.
pub fn forward_backward(
    input: Supervised,
    head: Matrix,
    work: Work,
    losses: ViewMut,
    gradient: Option<(ViewMut, f32)>,
) {
    let (c, m) = (head.cols, input.targets.len());
    let stride = stride(head.rows, input.hidden.dtype());
    let chunk = work.logits.len() / stride;
    let Work { mut gathered, mut logits } = work;
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
        cross_entropy(z.reborrow(), head.rows, hidden.dtype(), targets, input.smoothing, factor, losses);
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
        Device::Cpu => matmul::frozen_nt(hidden, head, Start::Zero, z, count),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            let stride = stride(head.rows, hidden.dtype());
            matmul::cuda::frozen_nt(gpu, hidden, head, Start::Zero, (z, stride), count);
        }
    }
}

/// `d_hidden (count, c) = dz E`, where dz is what [`cross_entropy`] left.
fn hidden_gradient(dz: View, head: Matrix, d_hidden: ViewMut, count: usize) {
    match d_hidden.device() {
        Device::Cpu => matmul::frozen_nn(dz, head, Start::Zero, d_hidden, count),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::hidden_gradient(gpu, dz, head, d_hidden, count),
    }
}

/// Losses of rows of `v` logits in `z`, [`stride`] apart; with a factor, `z` becomes its own gradient, in the type
/// of the activations.
fn cross_entropy(
    z: ViewMut,
    v: usize,
    activations: DType,
    targets: View,
    smoothing: f32,
    factor: Option<f32>,
    losses: ViewMut,
) {
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
