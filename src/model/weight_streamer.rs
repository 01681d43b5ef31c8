//! Which parts of the base, and which inputs of blocks, are in memory while a pass goes through the layers.
//!
//! A streamed base is read from its mapped file a stage ahead of the computation and given back a stage
//! after it, so that about two stages are in memory at a time. Inputs of blocks that wait in a file are
//! given back once the next block has them, and fetched again a block ahead of the backward.
//!
//! For a device with memory of its own a streamed base has all but its blocks there, and two slots for these, which
//! they use alternately: while kernels read one, the next is copied.

use crate::{
    device::{
        Frozen,
        arena::Placement,
        page_cache::{PageRequest, Pager, Region},
        staging::{SLOTS, StagingSlots},
    },
    error::Result,
};

use super::{
    base::Base,
    policy::Policy,
    weights::{BlockWeights, Weights},
};

/// The part of the base that a stretch of a pass reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Token and position embeddings.
    Embed,
    /// The weights of one block.
    Block(usize),
    /// The matrix of the head.
    Head,
}

/// Moves pages in ahead of a pass and out after it; does nothing for a resident base with inputs in memory.
pub struct WeightStreamer {
    pager: Option<Pager>,
    stream: bool,
    inputs: bool,
    held: Vec<Stage>,
    staged: Option<StagedBlocks>,
}

impl WeightStreamer {
    /// Prepares for passes over `base` under `policy`.
    ///
    /// # Errors
    /// When no thread can be started, or a device has no memory for two blocks.
    pub fn new(policy: Policy, base: &Base) -> Result<Self> {
        let inputs = policy.inputs == Placement::Disk;
        let stream = (policy.stream || base.is_streamed()) && base.device.kind().shares_host_memory();
        let pager = if stream || inputs { Some(Pager::start()?) } else { None };
        let staged = if base.is_streamed() { StagedBlocks::new(base)? } else { None };
        Ok(Self { pager, stream, inputs, held: Vec::new(), staged })
    }

    /// Block `layer` as kernels read it; of a base streamed to a device what [`WeightStreamer::enter`] brought.
    pub fn block<'a>(&'a self, weights: &'a Weights, layer: usize) -> &'a BlockWeights {
        self.staged.as_ref().and_then(|staged| staged.block(layer)).unwrap_or(&weights.blocks[layer])
    }

    /// The computation enters `stage` and then goes on to `next`: both are brought into memory, whatever
    /// else was there is given back; `input` is given back or fetched with them.
    pub fn enter(&mut self, weights: &Weights, stage: Stage, next: Option<Stage>, input: Input) {
        if let Some(staged) = &mut self.staged {
            staged.enter(weights, stage, next);
        }
        let Some(pager) = &mut self.pager else { return };
        let mut request = PageRequest::default();
        if self.stream {
            let wanted: Vec<Stage> = std::iter::once(stage).chain(next).collect();
            for &old in self.held.iter().filter(|old| !wanted.contains(old)) {
                request.release.extend(regions(weights, old));
            }
            // Of the embeddings only the rows of a batch are read: no need to fetch all.
            let new = |stage: &&Stage| **stage != Stage::Embed && !self.held.contains(*stage);
            for &new in wanted.iter().filter(new) {
                request.fetch.extend(regions(weights, new));
            }
            self.held = wanted;
        }
        if self.inputs {
            request.release.extend(input.release);
            request.fetch.extend(input.fetch);
        }
        if !request.release.is_empty() || !request.fetch.is_empty() {
            pager.send(request);
        }
    }

    /// A pass is over: everything is given back before this returns.
    pub fn leave(&mut self, weights: &Weights, input: Option<Region>) {
        let Some(pager) = &mut self.pager else { return };
        let held = std::mem::take(&mut self.held);
        let mut release: Vec<Region> = held.iter().flat_map(|&stage| regions(weights, stage)).collect();
        release.extend(input.filter(|_| self.inputs));
        pager.send(PageRequest { release, fetch: Vec::new() });
        pager.wait();
    }
}

/// Inputs of blocks that move with a stage.
#[derive(Default)]
pub struct Input {
    /// Not needed before the backward comes by.
    pub release: Option<Region>,
    /// Needed by the next stage.
    pub fetch: Option<Region>,
}

/// The pages that `stage` reads.
fn regions(weights: &Weights, stage: Stage) -> Vec<Region> {
    match stage {
        Stage::Embed => [weights.wte.regions(), vec![weights.wpe.region()]].concat(),
        Stage::Head => weights.head().regions(),
        Stage::Block(layer) => weights.blocks.get(layer).map(of_block).unwrap_or_default(),
    }
}

fn of_block(block: &BlockWeights) -> Vec<Region> {
    block.tensors().into_iter().map(Frozen::region).collect()
}

/// Two slots on a device that the blocks of a streamed base use alternately.
struct StagedBlocks {
    slots: StagingSlots,
    /// The weights of a block in each slot.
    blocks: [BlockWeights; SLOTS],
    table: SlotTable,
}

impl StagedBlocks {
    fn new(base: &Base) -> Result<Option<Self>> {
        let Some(first) = base.weights.blocks.first() else { return Ok(None) };
        let Some(slots) = StagingSlots::new(base.device, &first.tensors())? else { return Ok(None) };
        let blocks = std::array::from_fn(|slot| {
            let mut block = first.clone();
            let there = slots.tensors(slot, &first.tensors());
            block.tensors_mut().into_iter().zip(there).for_each(|(tensor, there)| *tensor = there);
            block
        });
        Ok(Some(Self { slots, blocks, table: SlotTable::default() }))
    }

    fn block(&self, layer: usize) -> Option<&BlockWeights> {
        self.table.slot_of(layer).map(|slot| &self.blocks[slot])
    }

    /// Kernels that follow read the block of `stage`; that of `next` is on its way while they run.
    fn enter(&mut self, weights: &Weights, stage: Stage, next: Option<Stage>) {
        let layer_of = |stage: Stage| if let Stage::Block(layer) = stage { Some(layer) } else { None };
        let (now, next) = (layer_of(stage), next.and_then(layer_of));
        if let Some(layer) = now {
            let slot = self.bring(weights, layer, next);
            self.slots.wait(slot);
        }
        if let Some(layer) = next {
            self.bring(weights, layer, now);
        }
    }

    fn bring(&mut self, weights: &Weights, layer: usize, other: Option<usize>) -> usize {
        let (slot, is_there) = self.table.take(layer, other);
        if !is_there {
            let part = weights.blocks[layer].tensors().into_iter().cloned().collect();
            self.slots.bring(slot, part);
        }
        slot
    }
}

/// Which block each slot holds.
#[derive(Default)]
struct SlotTable([Option<usize>; SLOTS]);

impl SlotTable {
    fn slot_of(&self, layer: usize) -> Option<usize> {
        self.0.iter().position(|held| *held == Some(layer))
    }

    /// The slot that block `layer` has from now on, and whether it is there already; never that of block `other`.
    fn take(&mut self, layer: usize, other: Option<usize>) -> (usize, bool) {
        if let Some(slot) = self.slot_of(layer) {
            return (slot, true);
        }
        let taken = other.and_then(|other| self.slot_of(other));
        let slot = (0..SLOTS).find(|slot| Some(*slot) != taken).unwrap_or(0);
        self.0[slot] = Some(layer);
        (slot, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks that a pass enters and goes on to, as `Stack` does, and the copies that it makes.
    fn copies(table: &mut SlotTable, layers: usize, lowest: usize) -> Vec<usize> {
        let up = (0..layers).map(|layer| (Some(layer), (layer + 1 < layers).then_some(layer + 1)));
        let down = (lowest..layers).rev().map(|layer| (Some(layer), (layer > lowest).then(|| layer - 1)));
        let slots =
            [(None, Some(0))].into_iter().chain(up).chain([(None, layers.checked_sub(1))]).chain(down);
        let mut copied = Vec::new();
        for (now, next) in slots {
            for (layer, other) in [(now, next), (next, now)] {
                let Some(layer) = layer else { continue };
                let (slot, is_there) = table.take(layer, other);
                assert_eq!(table.slot_of(layer), Some(slot));
                copied.extend((!is_there).then_some(layer));
            }
            // The block that kernels read stays while the next one is copied.
            assert!(now.is_none_or(|now| table.slot_of(now).is_some()), "{now:?} {next:?}");
            assert!(next.is_none_or(|next| table.slot_of(next).is_some()), "{now:?} {next:?}");
        }
        copied
    }

    #[test]
    fn a_block_is_copied_once_a_direction_and_the_last_two_of_one_serve_the_other() {
        let mut table = SlotTable::default();
        assert_eq!(copies(&mut table, 5, 0), [0, 1, 2, 3, 4, 2, 1, 0]);
        assert_eq!(copies(&mut table, 5, 0), [2, 3, 4, 2, 1, 0], "0 and 1 are there from the pass before");
        assert_eq!(copies(&mut table, 5, 3), [2, 3, 4]);
        assert_eq!(copies(&mut table, 5, 3), [0, 1, 2, 3, 4]);
        assert_eq!(copies(&mut SlotTable::default(), 1, 0), [0]);
        assert_eq!(copies(&mut SlotTable::default(), 2, 0), [0, 1]);
    }
}
