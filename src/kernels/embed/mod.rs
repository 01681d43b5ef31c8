//! Embedding of tokens: `x[i] = wte[ids[i]] + wpe[positions[i]] + sum of s B A[:, ids[i]]`.
//!
//! Ids from v on are those of virtual tokens (prompt tuning, Lester et al. 2021): `x[i] = prompt[ids[i] - v] +
//! wpe[positions[i]]`, where the prompt `(p, c)` is FP32 and learned. Both other tables are frozen. A delta
//! of low rank (LoRA, Hu et al. 2021, in the form that PEFT has for embeddings) adds to the rows of wte:
//! `A (r, v)`, `B (c, r)`, scale s. Its factors and their gradients are ranges of two flat FP32 buffers. A
//! head that is tied to wte does not see it.

use super::{adapted_linear::Vector, matmul::Matrix};
use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

/// A low-rank delta of the token embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbeddingDelta {
    /// `A (r, v)` in the flat buffers.
    pub a: Vector,
    /// `B (c, r)` in the flat buffers.
    pub b: Vector,
    /// Rank r, the rows of A.
    pub rank: usize,
    /// Factor of the delta.
    pub scale: f32,
}

impl EmbeddingDelta {
    /// Whether a factor gets a gradient.
    pub fn trains(&self) -> bool {
        !self.a.frozen || !self.b.frozen
    }
}

/// The rows that an embedding is made of.
#[derive(Clone, Copy)]
pub struct Tables<'a> {
    /// `wte (v, c)`: rows of ids below v.
    pub wte: Matrix<'a>,
    /// `wpe (positions, c)` in FP16.
    pub wpe: View<'a>,
    /// `(p, c)` in FP32: rows of the ids from v on, where there are any.
    pub prompt: Option<View<'a>>,
}

/// The tokens of a pass by their ids.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// Ids `(n)`.
    pub ids: View<'a>,
    /// v: ids below it have a row of wte, and others no delta.
    pub vocab: usize,
}

/// What the backward of a delta writes.
pub struct DeltaGradients<'a> {
    /// The flat buffer that grows by the gradients, FP32.
    pub grads: ViewMut<'a>,
    /// Workspace of n r floats.
    pub d_xa: ViewMut<'a>,
}

/// Indices of tokens `(n)`, those of one id side by side and ascending: the order in which gradients of a row of the
/// embedding are added up, whatever the number of threads and the schedule of a device.
pub fn by_id(ids: &[u32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_unstable_by_key(|&token| (ids[token as usize], token));
    order
}

/// Floats of scratch that a CPU thread uses for deltas of rank up to `rank` on `n` tokens of width `c`, and floats that
/// packing takes beside it.
pub fn scratch(n: usize, c: usize, rank: usize) -> (usize, usize) {
    cpu::scratch(n, c, rank)
}

/// `x (n, c)` from `ids (n)` and `positions (n)`; every id and position must be inside its table.
pub fn forward(ids: View, positions: View, tables: Tables, x: ViewMut) {
    match x.device() {
        Device::Cpu => cpu::forward(ids.host(), positions.host(), tables, x.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(gpu, ids, positions, tables, x),
    }
}

/// Backward of the rows of a prompt: `d_prompt (p, c)[id - v] += dx (n, c)[i]` for each token of such an id, in the order
/// of [`by_id`].
pub fn prompt_backward(tokens: Tokens, by_id: View, dx: View, d_prompt: ViewMut) {
    if tokens.ids.is_empty() {
        return;
    }
    match dx.device() {
        Device::Cpu => cpu::prompt_backward(tokens, by_id.host(), dx.host(), d_prompt.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::prompt_backward(gpu, tokens, by_id, dx, d_prompt),
    }
}

/// `x (n, c)[i] += s B A[:, ids[i]]`, with the factors in `values`.
pub fn add_delta(delta: &EmbeddingDelta, tokens: Tokens, values: View, x: ViewMut) {
    if tokens.ids.is_empty() || delta.rank == 0 {
        return;
    }
    match x.device() {
        Device::Cpu => cpu::add_delta(delta, tokens, values.host(), x.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::add_delta(gpu, delta, tokens, values, x),
    }
}

/// Backward of [`add_delta`] from `dx (n, c)`: `dB += s sum over i of dx[i] A[:, ids[i]]^T`, and
/// `dA[:, id] += s B^T dx[i]` for each token of that id, in the order of [`by_id`].
pub fn delta_backward(
    delta: &EmbeddingDelta,
    tokens: Tokens,
    by_id: View,
    values: View,
    dx: View,
    to: DeltaGradients,
) {
    if tokens.ids.is_empty() || delta.rank == 0 {
        return;
    }
    match dx.device() {
        Device::Cpu => cpu::delta_backward(delta, tokens, by_id.host(), values.host(), dx.host(), to),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::delta_backward(gpu, delta, tokens, by_id, values, dx, to),
    }
}
