//! Uniform noise on the embeddings of a training pass: `x[i, j] += m (2 u[i, j] - 1)`, u uniform in [0, 1).
//!
//! NEFTune (Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning") with
//! `m = alpha / sqrt(t c)`, where t is the length of the rows of a batch, padding included, as the hook of Transformers
//! takes it. Its gradient passes through unchanged. Virtual tokens (ids from v on) get none: they are not in the
//! table of embeddings. Numbers are counted by rows of the optimizer step and places in them, so that micro-batches,
//! threads and resuming change none.

use engraft_util::rng;

use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

/// The noise of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Noise {
    /// Key of seed and step.
    pub key: u64,
    /// Largest magnitude m; 0 for no noise.
    pub magnitude: f32,
    /// Number of this micro-batch's first row within the optimizer step.
    pub first_row: usize,
    /// Length t of the rows of this micro-batch.
    pub seq_len: usize,
    /// Length that elements are numbered with, the same for every micro-batch of a run.
    pub stride: usize,
    /// Ids from here on are virtual tokens.
    pub vocab: usize,
}

impl Noise {
    /// No noise: magnitude 0.
    pub const NONE: Self = Self { key: 0, magnitude: 0.0, first_row: 0, seq_len: 1, stride: 1, vocab: 0 };

    /// Number of the first element of token `token` of n, in rows of `c` elements.
    fn index(&self, token: usize, c: usize) -> u64 {
        let row = self.first_row + token / self.seq_len;
        ((row * self.stride + token % self.seq_len) * c) as u64
    }

    /// The noise of the element of this number, between -m and m.
    fn of(&self, index: u64) -> f32 {
        self.magnitude * (2.0 * rng::uniform(self.key, index) - 1.0)
    }
}

/// `alpha / sqrt(t c)`.
pub fn magnitude(alpha: f64, t: usize, c: usize) -> f32 {
    (alpha / ((t * c).max(1) as f64).sqrt()) as f32
}

/// Adds the noise to `x (n, c)` of the tokens `ids (n)`.
pub fn add(noise: Noise, ids: View, x: ViewMut) {
    if noise.magnitude == 0.0 || ids.is_empty() {
        return;
    }
    match x.device() {
        Device::Cpu => cpu::add(noise, ids.host(), x.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::add(gpu, noise, ids, x),
    }
}
