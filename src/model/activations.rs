//! All memory of a pass through the layers: cut by the same code to be counted and to be held.
//!
//! Inputs of blocks that must last until the backward are buffers of their own; or, where they wait in the host's memory
//! ([`Placement::Host`]), three buffers of the device that they rotate through: the forward writes one, reads another,
//! and the third is being copied out; the backward reads one while the next is copied in.

use crate::{
    device::{
        Buffer,
        arena::{Arenas, Placement},
        async_copy::AsyncCopier,
        page_cache::Region,
    },
    error::Result,
};

use super::{
    arch::Arch,
    bindings::AdapterBindings,
    buffers::{
        BackwardWork, BlockActivations, BlockBuffers, HeadWork, KeptWidths, OwnedMask, Passes, Sizes,
        Workspace,
    },
    layers::lost,
    policy::{Keep, Policy},
};

/// The layer whose memory serves all layers of a pass that keeps nothing, where layers share none.
pub const ANY: usize = 0;

/// Buffers that inputs rotate through where they are offloaded to the host's memory.
pub const ROTATING: usize = 3;

/// Inputs of blocks that are offloaded to the host's memory.
struct OffloadedInputs {
    // First, so that it is dropped first: it ends when copies have.
    copier: AsyncCopier,
    /// Copies of the inputs from the first lasting one on; of the last ones, which nothing overwrites, there are none.
    copies: Vec<Buffer>,
    /// Which layer's input each of the buffers on the device holds.
    holds: [Option<usize>; ROTATING],
}

/// Buffers of a pass through the layers.
pub struct ActivationBuffers {
    /// Copies of the inputs that are not in `residual`.
    offloaded: Option<OffloadedInputs>,
    /// Inputs of the blocks and output of the last, `(n, c)`.
    residual: Vec<Buffer>,
    /// First layer whose input must last until the backward; those below alternate between two buffers.
    lasting: usize,
    /// The activations that each block keeps.
    layers: Vec<BlockActivations>,
    /// Activations of one block, shared by all.
    shared: BlockActivations,
    /// Workspace of a forward.
    workspace: Workspace,
    /// Workspace of head and loss.
    head: HeadWork,
    /// Workspace of a backward; `None` where there is no training.
    back: Option<BackwardWork>,
}

impl ActivationBuffers {
    /// Cuts all buffers under `policy` for rows that have any of `bindings`; `training`, which has one, adds what a
    /// backward needs.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    pub fn cut(
        arenas: &mut Arenas,
        sizes: Sizes,
        bindings: &[&AdapterBindings],
        policy: Policy,
        training: bool,
    ) -> Result<Self> {
        let (layers, width) = (sizes.config.layers, sizes.config.width);
        let lowest = bindings.iter().map(|bindings| bindings.lowest()).min().unwrap_or(layers);
        let lasting = if training { lowest.min(layers) } else { layers + 1 };
        let shape = [sizes.limits.cells(), width];
        let offloads = policy.inputs == Placement::Host;
        let last = if offloads { layers.min(lasting + ROTATING - 1) } else { layers };
        let place = if offloads { Placement::Memory } else { policy.inputs };
        let residual = arenas.build("saved inputs", place, |arena| {
            let alternating = lasting.min(2);
            (0..alternating)
                .map(|index| format!("alternating {index}"))
                .chain((lasting..=last).map(|layer| format!("residual {layer}")))
                .map(|name| arena.take(name, sizes.activations, &shape))
                .collect::<Result<Vec<_>>>()
        })?;
        let offloaded = if offloads {
            let copies = arenas.build("offloaded inputs", Placement::Host, |arena| {
                (lasting + ROTATING..=layers)
                    .map(|above| {
                        arena.take(format!("residual {}", above - ROTATING), sizes.activations, &shape)
                    })
                    .collect::<Result<Vec<_>>>()
            })?;
            Some(OffloadedInputs {
                copier: AsyncCopier::new(arenas.device(), ROTATING)?,
                copies,
                holds: [None; ROTATING],
            })
        } else {
            None
        };
        let arch = Arch::of(sizes.config);
        let widths = |layer: usize| {
            let mut widths = KeptWidths::default();
            for bindings in bindings {
                let sites = bindings.layers[layer].iter().zip(&arch.sites);
                sites.for_each(|(site, shape)| widths.add(site, shape, training));
            }
            widths
        };
        let keeps = |layer: usize| {
            let trained = training && layer >= lasting;
            if trained { policy.recompute.keeps(layer) } else { Keep::Input }
        };
        let (kept, shared) = arenas.build("saved activations", Placement::Memory, |arena| {
            let kept = (0..layers)
                .map(|layer| {
                    let name = format!("block {layer}");
                    BlockActivations::cut(
                        arena,
                        &name,
                        sizes,
                        widths(layer),
                        BlockActivations::kept(keeps(layer)),
                    )
                })
                .collect::<Result<Vec<_>>>()?;
            let most = (0..layers).map(widths).fold(KeptWidths::default(), KeptWidths::max);
            // An evaluation borrows one block for all layers: a kept one serves where all are alike.
            let alike = (0..layers).all(|layer| widths(layer) == most);
            let missing: [bool; 4] = std::array::from_fn(|part| {
                let own = (0..layers).all(|layer| BlockActivations::kept(keeps(layer))[part]);
                !(own && alike)
            });
            Ok((kept, BlockActivations::cut(arena, "shared block", sizes, most, missing)?))
        })?;
        let (workspace, head, back) = arenas.build("workspace", Placement::Memory, |arena| {
            let backward = bindings.first().copied().filter(|_| training);
            let scaled =
                bindings.iter().map(|bindings| bindings.scaled_width(&arch, training)).max().unwrap_or(0);
            let deltas = bindings.iter().any(|bindings| bindings.most_ranks() > 0);
            let passes = Passes { head_rows: policy.head_rows, backward, scaled, deltas };
            let workspace = Workspace::cut(arena, sizes, passes)?;
            let head = HeadWork::cut(arena, sizes, policy.head_rows)?;
            let back = backward.map(|bindings| BackwardWork::cut(arena, sizes, bindings)).transpose()?;
            Ok((workspace, head, back))
        })?;
        Ok(Self { offloaded, residual, lasting, layers: kept, shared, workspace, head, back })
    }

    /// The memory of block `layer`, to be given back with [`ActivationBuffers::give_back`].
    ///
    /// # Errors
    /// When an earlier failure left it unaccounted for.
    pub fn block(&mut self, layer: usize) -> Result<(BlockBuffers, OwnedMask)> {
        let own = self.layers.get_mut(layer).ok_or_else(lost)?;
        own.assemble(&mut self.shared).ok_or_else(lost)
    }

    /// Takes back the memory of block `layer`.
    pub fn give_back(&mut self, layer: usize, buffers: BlockBuffers, owned: OwnedMask) {
        if let Some(own) = self.layers.get_mut(layer) {
            own.dissolve(buffers, owned, &mut self.shared);
        }
    }

    /// Memory for any block of a pass that keeps nothing, to be given back as that of [`ANY`].
    ///
    /// # Errors
    /// As [`ActivationBuffers::block`].
    pub fn any_block(&mut self) -> Result<(BlockBuffers, OwnedMask)> {
        if self.shared.is_whole() {
            return BlockActivations::default().assemble(&mut self.shared).ok_or_else(lost);
        }
        self.block(ANY)
    }

    /// Where the input of block `layer` is; `layer = layers` stands for the output of the last.
    fn place(&self, layer: usize) -> usize {
        if layer < self.lasting {
            return layer % 2;
        }
        let offset = layer - self.lasting;
        self.lasting.min(2) + if self.offloaded.is_some() { offset % ROTATING } else { offset }
    }

    /// Which of the rotating buffers the input of `layer` has; `None` where nothing is offloaded.
    fn slot(&self, layer: usize) -> Option<usize> {
        let offloads = self.offloaded.is_some() && layer >= self.lasting;
        offloads.then(|| (layer - self.lasting) % ROTATING)
    }

    /// The input of `layer` is about to be written.
    fn claim(&mut self, layer: usize) {
        if let (Some(slot), Some(offloaded)) = (self.slot(layer), &mut self.offloaded) {
            offloaded.copier.wait(slot);
            offloaded.holds[slot] = Some(layer);
        }
    }

    /// The forward is done with the first `len` elements of the input of `layer`, which wait for the backward: where
    /// another input will take their buffer, in the host's memory.
    pub fn send(&mut self, layer: usize, len: usize) {
        let (place, Some(slot)) = (self.place(layer), self.slot(layer)) else { return };
        let Some(offloaded) = &mut self.offloaded else { return };
        if let Some(copy) = offloaded.copies.get_mut(layer - self.lasting) {
            let (from, to) = (self.residual[place].view(), copy.view_mut());
            offloaded.copier.copy(slot, from.slice(0, len), to.slice(0, len));
        }
    }

    /// The backward comes to `layer` soon and will need the first `len` elements of its input.
    pub fn fetch(&mut self, layer: usize, len: usize) {
        let (place, Some(slot)) = (self.place(layer), self.slot(layer)) else { return };
        let Some(offloaded) =
            self.offloaded.as_mut().filter(|offloaded| offloaded.holds[slot] != Some(layer))
        else {
            return;
        };
        if let Some(copy) = offloaded.copies.get(layer - self.lasting) {
            let (from, to) = (copy.view(), self.residual[place].view_mut());
            offloaded.copier.copy(slot, from.slice(0, len), to.slice(0, len));
            offloaded.holds[slot] = Some(layer);
        }
    }

    /// Input of block `layer`.
    fn input(&self, layer: usize) -> &Buffer {
        &self.residual[self.place(layer)]
    }

    /// Input of block `layer`, to write.
    pub fn input_mut(&mut self, layer: usize) -> &mut Buffer {
        self.claim(layer);
        let place = self.place(layer);
        &mut self.residual[place]
    }

    /// Input and output of block `layer` and the workspace of a forward.
    pub fn step(&mut self, layer: usize) -> (&Buffer, &mut Buffer, &mut Workspace) {
        self.claim(layer + 1);
        let (read, write) = (self.place(layer), self.place(layer + 1));
        let (x, y) = two(&mut self.residual, read, write);
        (x, y, &mut self.workspace)
    }

    /// Input of block `layer` and the workspace of both directions.
    pub fn back(&mut self, layer: usize) -> Option<(&Buffer, &mut Workspace, &mut BackwardWork)> {
        let place = self.place(layer);
        if let (Some(slot), Some(offloaded)) = (self.slot(layer), &mut self.offloaded) {
            offloaded.copier.wait(slot);
        }
        Some((&self.residual[place], &mut self.workspace, self.back.as_mut()?))
    }

    /// Output of the last block, and the workspace of the head and of a backward.
    pub fn head(&mut self) -> (&Buffer, &mut Workspace, &mut HeadWork, Option<&mut BackwardWork>) {
        let place = self.place(self.layers.len());
        (&self.residual[place], &mut self.workspace, &mut self.head, self.back.as_mut())
    }

    /// Pages of the input of block `layer`, where it waits in a file.
    pub fn pages(&self, layer: usize) -> Option<Region> {
        (layer >= self.lasting).then(|| self.input(layer).region()).flatten()
    }
}

/// Two different buffers of a list, the first to read, the second to write.
fn two(list: &mut [Buffer], read: usize, write: usize) -> (&Buffer, &mut Buffer) {
    if read < write {
        let (left, right) = list.split_at_mut(write);
        (&left[read], &mut right[0])
    } else {
        let (left, right) = list.split_at_mut(read);
        (&right[0], &mut left[write])
    }
}
