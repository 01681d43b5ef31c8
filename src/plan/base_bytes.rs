//! How many bytes the parts of a base take: in its file, in the memory of a device, and while it is streamed.

use super::table::{MOMENTS, by_moment};
use crate::observe::phase::Moment;
use crate::{
    device::fixed,
    model::{BaseDType, Config},
};

/// Bytes of the parts of a base that move together when it is streamed.
#[derive(Debug, Clone, Copy)]
pub struct BaseBytes {
    /// Token and position embeddings.
    pub embeddings: u64,
    /// One block.
    pub block: u64,
    /// All blocks.
    pub blocks: u64,
    /// The head, where it is not the token embedding.
    pub own_head: u64,
    /// The matrix of the head, wherever it is.
    pub head: u64,
    /// The last layer norm.
    pub last_norm: u64,
    /// Tensors of scales beside each matrix.
    scales: u64,
}

/// A tensor of a file shares its first and last page with its neighbours.
const PAGE: u64 = 4096;

impl BaseBytes {
    /// Of a base with these sizes, its matrices kept as `dtype`.
    pub fn of(config: &Config, dtype: BaseDType) -> Self {
        let (c, f) = (config.width, config.inner);
        let sites: u64 = [(c, 3 * c), (c, c), (c, f), (f, c)]
            .into_iter()
            .map(|(rows, cols)| dtype.matrix_bytes(rows, cols))
            .sum();
        let head = dtype.matrix_bytes(config.vocab, c);
        let (c, f) = (c as u64, f as u64);
        let block = sites + 2 * (9 * c + f);
        Self {
            embeddings: head + 2 * config.positions as u64 * c,
            block,
            blocks: block * config.layers as u64,
            own_head: if config.tied { 0 } else { head },
            head,
            last_norm: 4 * c,
            scales: u64::from(dtype == BaseDType::Q8),
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.embeddings + self.blocks + self.own_head + self.last_norm
    }

    /// The same in FP16 on a CUDA device, where every tensor is aligned.
    pub fn on_device(config: &Config) -> Self {
        let aligned = |elements: usize| (2 * elements).next_multiple_of(fixed::ALIGN) as u64;
        let (c, f) = (config.width, config.inner);
        let norm = 2 * aligned(c);
        let linear = |inputs: usize, outputs: usize| aligned(inputs * outputs) + aligned(outputs);
        let block = 2 * norm + linear(c, 3 * c) + linear(c, c) + linear(c, f) + linear(f, c);
        let head = aligned(config.vocab * c);
        Self {
            embeddings: head + aligned(config.positions * c),
            block,
            blocks: block * config.layers as u64,
            own_head: if config.tied { 0 } else { head },
            head,
            last_norm: norm,
            scales: 0,
        }
    }

    /// Pages of a streamed base that are in memory together, by moment: a stage and the one after it.
    pub(super) fn streamed(&self) -> [u64; MOMENTS] {
        let pages = |bytes: u64, tensors: u64| bytes + tensors * PAGE;
        let block = pages(self.block, 12 + 4 * self.scales);
        let (embeddings, head) = (pages(self.embeddings, 2 + self.scales), pages(self.head, 1 + self.scales));
        by_moment(|moment| match moment {
            Moment::Loading | Moment::Update | Moment::Saving => self.last_norm,
            Moment::Forward | Moment::Evaluation => block + block.max(embeddings).max(head),
            Moment::Head => block + head,
            Moment::Backward => 2 * block,
        })
    }
}
