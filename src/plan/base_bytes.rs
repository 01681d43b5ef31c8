//! How many bytes the parts of a base take: in its file, in the memory of a device, and while it is streamed.

use super::{ByPhase, PlannedDevice, Row, by_phase, from_the_first_pass};
use crate::{
    device::{OwnMemory, arena::Placement},
    model::{
        BaseDType, Config,
        arch::{Arch, HEAD, POSITION_EMBEDDING, SITES, TOKEN_EMBEDDING, Tensor},
    },
    observe::phase::Phase,
};

/// Bytes of the parts of a base that move together when it is streamed.
#[derive(Debug, Clone, Copy)]
pub struct BaseBytes {
    /// Bytes of token and position embeddings.
    pub embeddings: u64,
    /// One block, its biases and norms included.
    pub block: u64,
    /// Bytes of all blocks together.
    pub blocks: u64,
    /// The head, where it is not the token embedding.
    pub own_head: u64,
    /// Bytes of the head's matrix, also if it is the token embedding.
    pub head: u64,
    /// Bytes of the last layer norm.
    pub last_norm: u64,
    /// Tensors of a block, without scales.
    tensors: u64,
    /// Tensors of scales of a block, of the token embedding and of the head.
    scales: [u64; 3],
}

/// A tensor of a file shares its first and last page with its neighbours.
const PAGE: u64 = 4096;

impl BaseBytes {
    /// The bytes of a base with these sizes whose matrices are kept as `dtype`.
    pub fn of(config: &Config, dtype: BaseDType) -> Self {
        let arch = Arch::of(config);
        Self::sum(&arch, config, |tensor| match tensor.shape[..] {
            [rows, cols] => dtype.of_matrix(&tensor.name).matrix_bytes(rows, cols),
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
            scales: [0; 3],
        }
    }

    /// Matrices that are kept as `dtype` may have tensors of scales.
    fn with_scales(self, dtype: BaseDType) -> Self {
        let of = |name: &str| dtype.of_matrix(name).scale_tensors();
        Self { scales: [SITES as u64 * dtype.scale_tensors(), of(TOKEN_EMBEDDING), of(HEAD)], ..self }
    }

    /// Bytes of the whole base.
    pub fn total(&self) -> u64 {
        self.embeddings + self.blocks + self.own_head + self.last_norm
    }

    /// The same in the `memory` of a device, where every tensor is aligned, and rows follow the head and the matrices
    /// without codes behind a layer norm.
    pub fn on_device(config: &Config, dtype: BaseDType, memory: &OwnMemory) -> Self {
        let arch = Arch::of(config);
        let head = arch.head();
        let aligned = |bytes: usize| bytes.next_multiple_of(memory.alignment) as u64;
        Self::sum(&arch, config, |tensor| match tensor.shape[..] {
            [rows, cols] => {
                let of = dtype.of_matrix(&tensor.name);
                let rows = match of {
                    _ if *tensor == head => rows.next_multiple_of(memory.head_rows),
                    BaseDType::F16 if arch.is_normed(tensor) => rows + memory.delta_rows,
                    _ => rows,
                };
                of.tensor_bytes(rows, cols).map(aligned).sum()
            }
            _ => aligned(2 * tensor.elements()),
        })
    }

    /// Pages of a streamed base that are in memory together, by phase: a stage and the one after it.
    fn streamed(&self) -> ByPhase {
        let pages = |bytes: u64, tensors: u64| bytes + tensors * PAGE;
        let [of_block, of_embedding, of_head] = self.scales;
        let block = pages(self.block, self.tensors + of_block);
        let (embeddings, head) = (pages(self.embeddings, 2 + of_embedding), pages(self.head, 1 + of_head));
        by_phase(|phase| match phase {
            Phase::Loading | Phase::Update | Phase::Saving => self.last_norm,
            Phase::Forward | Phase::Evaluation | Phase::Sampling => block + block.max(embeddings).max(head),
            Phase::Head => block + head,
            Phase::Backward => 2 * block,
        })
    }
}

/// The base of a job.
#[derive(Debug, Clone, Copy)]
pub struct PlannedBase<'a> {
    /// Widths and counts of its layers.
    pub config: &'a Config,
    /// Type that its matrices are kept in.
    pub dtype: BaseDType,
}

impl PlannedBase<'_> {
    /// Its parts in the memory of `device`, or else in its file.
    pub fn bytes(self, device: PlannedDevice) -> BaseBytes {
        match device.own_memory() {
            Some(memory) => BaseBytes::on_device(self.config, self.dtype, memory),
            None => BaseBytes::of(self.config, self.dtype),
        }
    }

    pub(super) fn rows(self, device: PlannedDevice, streamed: bool) -> Vec<Row> {
        let parts = self.bytes(device);
        let place = if streamed { Placement::Disk } else { device.place(Placement::Memory) };
        let resident = |bytes: u64| from_the_first_pass(if streamed { 0 } else { bytes });
        let mut rows = self.tensors(place);
        rows.iter_mut().for_each(|row| row.resident = resident(row.bytes));
        let small = parts.total() - rows.iter().map(|row| row.bytes).sum::<u64>();
        rows.push(Row::new("base", "biases and norms", small, place, "run").with_resident(resident(small)));
        match device.own_memory() {
            _ if !streamed => {}
            None => {
                let resident = parts.streamed();
                let most = resident.iter().copied().max().unwrap_or(0);
                let row = Row::new("base", "in use and read ahead", most, Placement::Host, "two stages");
                rows.push(row.with_resident(resident));
            }
            Some(_) => rows.extend(on_its_way(parts)),
        }
        rows
    }

    /// The matrices, those of all blocks in one row.
    fn tensors(self, place: Placement) -> Vec<Row> {
        let config = self.config;
        let (c, layers, arch) = (config.width, config.layers, Arch::of(config));
        let of = |tensor: &str| self.dtype.of_matrix(tensor);
        let embeddings = [
            ("token embedding", vec![config.vocab, c], 1, of(TOKEN_EMBEDDING)),
            ("position embedding", vec![config.positions, c], 1, of(POSITION_EMBEDDING)),
        ];
        let sites =
            arch.sites.iter().map(|site| (site.label, vec![site.inputs, site.outputs], layers, self.dtype));
        let head = arch.own_head().map(|head| ("head", head.shape, 1, of(HEAD)));
        let tensors = embeddings.into_iter().chain(sites).chain(head);
        let row = |(name, shape, count, dtype): (&str, Vec<usize>, usize, BaseDType)| {
            let bytes = dtype.matrix_bytes(shape[0], shape[1]) * count as u64;
            let dtype = Some(dtype.element_type());
            Row { dtype, shape, count, ..Row::new("base", name, bytes, place, "run") }
        };
        tensors.map(row).collect()
    }
}

/// The parts of a streamed base in the memory of a device, and the host's copies of blocks on their way
/// there.
fn on_its_way(parts: BaseBytes) -> [Row; 3] {
    let (ends, blocks) = (parts.total() - parts.blocks, 2 * parts.block);
    let on_device = Placement::Memory;
    [
        Row::new("base", "embeddings, head, last norm", ends, on_device, "run").once_used(),
        Row::new("stages", "two blocks alternately", blocks, on_device, "two stages").once_used(),
        Row::new("stages", "pinned copies of two blocks", blocks, Placement::Host, "two stages"),
    ]
}
