//! What of the base, and of the inputs of blocks, is in memory while a pass goes through the layers.
//!
//! A streamed base is read from its mapped file a stage ahead of the computation and given back a stage
//! behind it, so that about two stages are in memory at a time. Inputs of blocks that wait in a file are
//! given back once the next block has them, and fetched again a block ahead of the backward.

use crate::{
    error::Result,
    kernels::{
        arena::Place,
        pages::{Pager, Region, Turn},
    },
};

use super::{
    policy::Policy,
    weights::{BlockWeights, Linear, Norm, Weights},
};

/// What a stretch of a pass reads of the base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Token and position embeddings.
    Embed,
    /// One block.
    Block(usize),
    /// The head.
    Head,
}

/// Moves pages ahead of and behind a pass; does nothing for a resident base with inputs in memory.
pub struct Flow {
    pager: Option<Pager>,
    stream: bool,
    inputs: bool,
    held: Vec<Stage>,
}

impl Flow {
    /// Prepares for `policy`.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn new(policy: Policy) -> Result<Self> {
        let inputs = policy.inputs == Place::Disk;
        let pager = if policy.stream || inputs { Some(Pager::start()?) } else { None };
        Ok(Self { pager, stream: policy.stream, inputs, held: Vec::new() })
    }

    /// The computation enters `stage` and then goes on to `next`: both are brought into memory, whatever
    /// else was there is given back; `input` is given back or fetched with them.
    pub fn enter(&mut self, weights: &Weights, stage: Stage, next: Option<Stage>, input: Input) {
        let Some(pager) = &mut self.pager else { return };
        let mut turn = Turn::default();
        if self.stream {
            let wanted: Vec<Stage> = std::iter::once(stage).chain(next).collect();
            for &old in self.held.iter().filter(|old| !wanted.contains(old)) {
                turn.release.extend(regions(weights, old));
            }
            // Of the embeddings only the rows of a batch are read: no need to fetch all.
            let new = |stage: &&Stage| **stage != Stage::Embed && !self.held.contains(*stage);
            for &new in wanted.iter().filter(new) {
                turn.fetch.extend(regions(weights, new));
            }
            self.held = wanted;
        }
        if self.inputs {
            turn.release.extend(input.release);
            turn.fetch.extend(input.fetch);
        }
        if !turn.release.is_empty() || !turn.fetch.is_empty() {
            pager.turn(turn);
        }
    }

    /// A pass is over: everything is given back before this returns.
    pub fn leave(&mut self, weights: &Weights, input: Option<Region>) {
        let Some(pager) = &mut self.pager else { return };
        let held = std::mem::take(&mut self.held);
        let mut release: Vec<Region> = held.iter().flat_map(|&stage| regions(weights, stage)).collect();
        release.extend(input.filter(|_| self.inputs));
        pager.turn(Turn { release, fetch: Vec::new() });
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
        Stage::Head => weights.head.as_ref().unwrap_or(&weights.wte).regions(),
        Stage::Block(layer) => weights.blocks.get(layer).map(of_block).unwrap_or_default(),
    }
}

fn of_block(block: &BlockWeights) -> Vec<Region> {
    let norm = |norm: &Norm| vec![norm.gain.region(), norm.bias.region()];
    let linear = |linear: &Linear| [linear.weight.regions(), vec![linear.bias.region()]].concat();
    [
        norm(&block.ln_1),
        linear(&block.c_attn),
        linear(&block.attn_proj),
        norm(&block.ln_2),
        linear(&block.c_fc),
        linear(&block.mlp_proj),
    ]
    .concat()
}
