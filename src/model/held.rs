//! All memory of a [`Stack`](super::Stack): cut here, once to count and once to hold.

use crate::{
    error::Result,
    kernels::{
        arena::{Arenas, Place},
        device::Buffer,
        pages::Region,
    },
};

use super::{
    buffers::{BackwardWork, BlockBuffers, HeadWork, Owned, Parts, Passes, Sizes, Work},
    policy::{Keep, Policy},
    stack::lost,
    wiring::Wiring,
};

/// The layer whose memory serves all layers of a pass that keeps nothing, where layers share none.
pub const ANY: usize = 0;

/// Buffers of a stack.
pub struct Held {
    /// Inputs of the blocks and output of the last, `(n, c)`.
    residual: Vec<Buffer>,
    /// First layer whose input must last until the backward; those below take turns with two buffers.
    lasting: usize,
    /// What each block keeps.
    layers: Vec<Parts>,
    /// What blocks use in turn.
    shared: Parts,
    /// Workspace of a forward.
    work: Work,
    /// Workspace of head and loss.
    head: HeadWork,
    /// Workspace of a backward; `None` where there is no training.
    back: Option<BackwardWork>,
}

impl Held {
    /// Cuts all buffers for `wiring` under `policy`; `training` adds what a backward needs.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    pub fn cut(
        arenas: &mut Arenas,
        sizes: Sizes,
        wiring: &Wiring,
        policy: Policy,
        training: bool,
    ) -> Result<Self> {
        let (layers, width) = (sizes.config.layers, sizes.config.width);
        let lasting = if training { wiring.lowest().min(layers) } else { layers + 1 };
        let residual = arenas.build("saved inputs", policy.inputs, |arena| {
            let in_turn = lasting.min(2);
            (0..in_turn)
                .map(|index| format!("in turn {index}"))
                .chain((lasting..=layers).map(|layer| format!("residual {layer}")))
                .map(|name| arena.take(name, sizes.activations, &[sizes.limits.cells(), width]))
                .collect::<Result<Vec<_>>>()
        })?;
        let ranks = |layer: usize| std::array::from_fn(|site| wiring.ranks(layer, site));
        let keeps = |layer: usize| {
            let trained = training && layer >= lasting;
            if trained { policy.recompute.keeps(layer) } else { Keep::Input }
        };
        let (kept, shared) = arenas.build("saved activations", Place::Memory, |arena| {
            let kept = (0..layers)
                .map(|layer| {
                    let name = format!("block {layer}");
                    Parts::cut(arena, &name, sizes, ranks(layer), Parts::kept(keeps(layer)))
                })
                .collect::<Result<Vec<_>>>()?;
            let most = std::array::from_fn(|site| {
                (0..layers).map(|layer| wiring.ranks(layer, site)).max().unwrap_or(0)
            });
            // An evaluation borrows one block for all layers: a kept one serves where all are alike.
            let alike = (0..layers).all(|layer| ranks(layer) == most);
            let missing: [bool; 4] = std::array::from_fn(|part| {
                let own = (0..layers).all(|layer| Parts::kept(keeps(layer))[part]);
                !(own && alike)
            });
            Ok((kept, Parts::cut(arena, "shared block", sizes, most, missing)?))
        })?;
        let (work, head, back) = arenas.build("workspace", Place::Memory, |arena| {
            let passes = Passes { head_rows: policy.head_rows, backward: training.then_some(wiring) };
            let work = Work::cut(arena, sizes, passes)?;
            let head = HeadWork::cut(arena, sizes, policy.head_rows)?;
            let back = training.then(|| BackwardWork::cut(arena, sizes, wiring)).transpose()?;
            Ok((work, head, back))
        })?;
        Ok(Self { residual, lasting, layers: kept, shared, work, head, back })
    }

    /// The memory of block `layer`, to be given back with [`Held::give_back`].
    ///
    /// # Errors
    /// When an earlier failure left it unaccounted for.
    pub fn block(&mut self, layer: usize) -> Result<(BlockBuffers, Owned)> {
        let own = self.layers.get_mut(layer).ok_or_else(lost)?;
        own.assemble(&mut self.shared).ok_or_else(lost)
    }

    /// Takes back the memory of block `layer`.
    pub fn give_back(&mut self, layer: usize, buffers: BlockBuffers, owned: Owned) {
        if let Some(own) = self.layers.get_mut(layer) {
            own.dissolve(buffers, owned, &mut self.shared);
        }
    }

    /// Memory for any block of a pass that keeps nothing, to be given back as that of [`ANY`].
    ///
    /// # Errors
    /// As [`Held::block`].
    pub fn any_block(&mut self) -> Result<(BlockBuffers, Owned)> {
        if self.shared.is_whole() {
            return Parts::default().assemble(&mut self.shared).ok_or_else(lost);
        }
        self.block(ANY)
    }

    /// Where the input of block `layer` is; `layer = layers` stands for the output of the last.
    fn place(&self, layer: usize) -> usize {
        if layer >= self.lasting { layer - self.lasting + self.lasting.min(2) } else { layer % 2 }
    }

    /// Input of block `layer`.
    fn input(&self, layer: usize) -> &Buffer {
        &self.residual[self.place(layer)]
    }

    /// Input of block `layer`, to write.
    pub fn input_mut(&mut self, layer: usize) -> &mut Buffer {
        let place = self.place(layer);
        &mut self.residual[place]
    }

    /// Input and output of block `layer` and the workspace of a forward.
    pub fn step(&mut self, layer: usize) -> (&Buffer, &mut Buffer, &mut Work) {
        let (read, write) = (self.place(layer), self.place(layer + 1));
        let (x, y) = two(&mut self.residual, read, write);
        (x, y, &mut self.work)
    }

    /// Input of block `layer` and the workspace of both directions.
    pub fn back(&mut self, layer: usize) -> Option<(&Buffer, &mut Work, &mut BackwardWork)> {
        let place = self.place(layer);
        Some((&self.residual[place], &mut self.work, self.back.as_mut()?))
    }

    /// Output of the last block, and the workspace of the head and of a backward.
    pub fn head(&mut self) -> (&Buffer, &mut Work, &mut HeadWork, Option<&mut BackwardWork>) {
        let place = self.place(self.layers.len());
        (&self.residual[place], &mut self.work, &mut self.head, self.back.as_mut())
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
