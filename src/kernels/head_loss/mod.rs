//! Language-model head and cross-entropy in one op, in chunks of supervised rows.
//!
//! For a supervised row with hidden state `h` and target `y`: `z = h E^T` over the vocabulary,
//! `loss = (1 - e) (lse(z) - z_y) + e (lse(z) - mean(z))` with label smoothing e as in PyTorch
//! (Szegedy et al. 2016), `dz = factor (softmax(z) - (1 - e) [v = y] - e / V)`, `dh = dz E`.
//! E is frozen, so no gradient of it exists. Only one chunk of logits is ever in memory.

use super::{
    device::{Device, View, ViewMut},
    matmul::{self, Matrix, Start},
};

#[cfg(target_arch = "x86_64")]
mod avx512;
mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

/// Hidden states and what they should predict.
#[derive(Clone, Copy)]
pub struct Supervised<'a> {
    /// Hidden states after the last layer norm `(n, c)`.
    pub hidden: View<'a>,
    /// Which of them are supervised `(m)`, ascending.
    pub rows: View<'a>,
    /// Their targets `(m)`, inside the vocabulary.
    pub targets: View<'a>,
    /// Label smoothing e.
    pub smoothing: f32,
}

/// Workspace: `gathered (chunk, c)` and `logits (chunk, v)`.
pub struct Work<'a> {
    /// Hidden states of a chunk, then their gradients.
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
    let (c, m) = (head.cols, input.rows.len());
    let chunk = work.logits.len() / head.rows;
    let Work { mut gathered, mut logits } = work;
    let (mut losses, mut gradient) = (losses, gradient);
    if let Some((d_hidden, _)) = &mut gradient {
        d_hidden.reborrow().clear();
    }
    for first in (0..m).step_by(chunk) {
        let count = chunk.min(m - first);
        let rows = input.rows.slice(first, count);
        let targets = input.targets.slice(first, count);
        let mut hidden = gathered.reborrow().slice(0, count * c);
        let mut z = logits.reborrow().slice(0, count * head.rows);
        gather(input.hidden, rows, hidden.reborrow(), c);
        matmul::frozen_nt(hidden.as_view(), head, Start::Zero, z.reborrow(), count);
        let losses = losses.reborrow().slice(first, count);
        let factor = gradient.as_ref().map(|(_, factor)| *factor);
        cross_entropy(z.reborrow(), targets, input.smoothing, factor, losses);
        if let Some((d_hidden, _)) = &mut gradient {
            matmul::frozen_nn(z.as_view(), head, Start::Zero, hidden.reborrow(), count);
            scatter(hidden.as_view(), rows, d_hidden.reborrow(), c);
        }
    }
}

/// `to[i] = from[rows[i]]`, rows of `c`.
pub fn gather(from: View, rows: View, to: ViewMut, c: usize) {
    match to.device() {
        Device::Cpu => cpu::gather(from.host(), rows.host(), to.host(), c),
    }
}

/// `to[rows[i]] = from[i]`, rows of `c`.
fn scatter(from: View, rows: View, to: ViewMut, c: usize) {
    match to.device() {
        Device::Cpu => cpu::scatter(from.host(), rows.host(), to.host(), c),
    }
}

/// Losses of rows of logits `z (m, v)`; with a factor, `z` becomes its own gradient.
fn cross_entropy(z: ViewMut, targets: View, smoothing: f32, factor: Option<f32>, losses: ViewMut) {
    match z.device() {
        Device::Cpu => cpu::cross_entropy(z.host(), targets.host(), smoothing, factor, losses.host()),
    }
}
