//! How many bytes the parts of a base take: in its file, in the memory of a device, and while it is streamed.

use super::table::{MOMENTS, by_moment};
use crate::observe::phase::Phase;
use crate::{
    device::fixed,
    model::{
        BaseDType, Config,
        arch::{Arch, POSITION_EMBEDDING, SITES, Tensor},
    },
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
    /// Tensors of a block, without scales.
    tensors: u64,
    /// Tensors of scales beside each matrix.
    scales: u64,
}

/// A tensor of a file shares its first and last page with its neighbours.
const PAGE: u64 = 4096;

impl BaseBytes {
    /// Of a base with these sizes, its matrices kept as `dtype`.
    pub fn of(config: &Config, dtype: BaseDType) -> Self {
        let arch = Arch::of(config);
        Self::sum(&arch, config, |tensor| match tensor.shape[..] {
            // Positions are no matrix of a product.
            [rows, cols] if tensor.name != POSITION_EMBEDDING => dtype.matrix_bytes(rows, cols),
            _ => 2 * tensor.elements() as u64,
        })
        .with_scales(dtype)
    }

    /// The parts of a base whose tensors take so many bytes.
    fn sum(arch: &Arch, config: &Config, bytes: impl Fn(&Tensor) -> u64) -> Self {
        let all = |tensors: &[Tensor]| tensors.iter().map(&bytes).sum::<u64>();
        let block = arch.block();
        Self {
            embeddings: all(&arch.embeddings()),
            block: all(&block),
            blocks: all(&block) * config.layers as u64,
            own_head: arch.own_head().as_ref().map_or(0, &bytes),
            head: bytes(&arch.head()),
            last_norm: all(&arch.last_norm()),
            tensors: block.len() as u64,
            scales: 0,
        }
    }

    /// Matrices that are kept as `dtype` may have scales beside them.
    fn with_scales(self, dtype: BaseDType) -> Self {
        Self { scales: u64::from(dtype == BaseDType::Q8), ..self }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.embeddings + self.blocks + self.own_head + self.last_norm
    }

    /// The same in FP16 on a CUDA device, where every tensor is aligned.
    pub fn on_device(config: &Config) -> Self {
        Self::sum(&Arch::of(config), config, |tensor| {
            (2 * tensor.elements()).next_multiple_of(fixed::ALIGN) as u64
        })
    }

    /// Pages of a streamed base that are in memory together, by moment: a stage and the one after it.
    pub(super) fn streamed(&self) -> [u64; MOMENTS] {
        let pages = |bytes: u64, tensors: u64| bytes + tensors * PAGE;
        let block = pages(self.block, self.tensors + SITES as u64 * self.scales);
        let (embeddings, head) = (pages(self.embeddings, 2 + self.scales), pages(self.head, 1 + self.scales));
        by_moment(|moment| match moment {
            Phase::Loading | Phase::Update | Phase::Saving => self.last_norm,
            Phase::Forward | Phase::Evaluation => block + block.max(embeddings).max(head),
            Phase::Head => block + head,
            Phase::Backward => 2 * block,
        })
    }
}
