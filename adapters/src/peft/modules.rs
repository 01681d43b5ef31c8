//! Adapted modules as PEFT sees them: one A and one B each, parts of a module fused into blocks.
//!
//! Parts with A_1 .. A_n of rank r on disjoint columns are, exactly, one LoRA of rank n r on the whole
//! module: A stacks the A_i, B is block-wise with B_i at (columns of part i, rows i r .. (i + 1) r) and
//! zero elsewhere. Alpha is multiplied by n (by sqrt(n) under rsLoRA), so that the scale stays. So are deltas on the same
//! columns: a trained one and the frozen copy of what it began as.

use std::{borrow::Cow, ops::Range};

use super::MODULE_PREFIX;
use crate::{AdapterSet, BaseDescription, Lora, methods::Kind};

/// A module with all the deltas of a set that act on it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Module {
    /// Full path, such as `transformer.h.3.attn.c_attn`.
    pub path: String,
    pub layer: usize,
    pub site: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// Rank of the fused LoRA.
    pub rank: usize,
    /// Alpha of the fused LoRA.
    pub alpha: f64,
    /// Indices into the set's `loras`.
    pub loras: Range<usize>,
}

/// The modules of a set that the deltas of one kind of method act on, in the set's order; `root` when its
/// scales are divided by the root of the rank.
pub(crate) fn modules(set: &AdapterSet, kind: &Kind, root: bool, base: &BaseDescription) -> Vec<Module> {
    let mut modules: Vec<Module> = Vec::new();
    let own = |(_, lora): &(usize, &Lora)| set.is_of(lora, kind);
    for (index, lora) in set.loras.iter().enumerate().filter(own) {
        match modules.last_mut() {
            Some(last) if (last.layer, last.site) == (lora.layer, lora.site) => last.loras.end = index + 1,
            _ => modules.push(module(lora, index, base)),
        }
    }
    for module in &mut modules {
        let parts = module.loras.len() as f64;
        module.rank *= module.loras.len();
        module.alpha *= if root { parts.sqrt() } else { parts };
    }
    modules
}

fn module(lora: &Lora, index: usize, base: &BaseDescription) -> Module {
    let site = &base.sites[lora.site];
    Module {
        path: site.module(lora.layer),
        layer: lora.layer,
        site: lora.site,
        inputs: site.inputs,
        outputs: site.outputs,
        rank: lora.rank,
        alpha: lora.alpha,
        loras: index..index + 1,
    }
}

impl Module {
    /// Name of A in the file, [rank, inputs].
    pub fn a(&self) -> String {
        format!("{MODULE_PREFIX}{}.lora_A.weight", self.path)
    }

    /// Name of B in the file, [outputs, rank].
    pub fn b(&self) -> String {
        format!("{MODULE_PREFIX}{}.lora_B.weight", self.path)
    }

    /// Whether several deltas are fused in it, or a single part is placed in a zero matrix.
    pub fn is_fused(&self, set: &AdapterSet) -> bool {
        self.loras.len() > 1 || set.loras[self.loras.start].part.is_some()
    }

    /// The fused A. The parts are apart in the flat store, so more than one is copied.
    pub fn fuse_a<'a>(&self, set: &AdapterSet, values: &'a [f32]) -> Cow<'a, [f32]> {
        let slot = |lora: &Lora| &values[set.layout.tensors[lora.a].range()];
        match &set.loras[self.loras.clone()] {
            [one] => slot(one).into(),
            parts => parts.iter().flat_map(slot).copied().collect(),
        }
    }

    /// The fused B: blocks on the diagonal, zeros elsewhere.
    pub fn fuse_b<'a>(&self, set: &AdapterSet, values: &'a [f32]) -> Cow<'a, [f32]> {
        let slot = |lora: &Lora| &values[set.layout.tensors[lora.b].range()];
        if !self.is_fused(set) {
            return slot(&set.loras[self.loras.start]).into();
        }
        let mut fused = vec![0.0; self.outputs * self.rank];
        for (block, lora) in set.loras[self.loras.clone()].iter().enumerate() {
            for (row, from) in lora.columns.clone().zip(slot(lora).chunks(lora.rank)) {
                let at = row * self.rank + block * lora.rank;
                fused[at..at + lora.rank].copy_from_slice(from);
            }
        }
        fused.into()
    }

    /// Takes a fused A apart into the flat store.
    pub fn split_a(&self, set: &AdapterSet, fused: &[f32], values: &mut [f32]) {
        let mut rest = fused;
        for lora in &set.loras[self.loras.clone()] {
            let slot = &set.layout.tensors[lora.a];
            let (own, after) = rest.split_at(slot.len());
            values[slot.range()].copy_from_slice(own);
            rest = after;
        }
    }

    /// Takes a fused B apart into the flat store; the index of the first value that is not zero
    /// outside the blocks comes back.
    pub fn split_b(&self, set: &AdapterSet, fused: &[f32], values: &mut [f32]) -> Option<usize> {
        let mut outside = fused.to_vec();
        for (block, lora) in set.loras[self.loras.clone()].iter().enumerate() {
            let own = &mut values[set.layout.tensors[lora.b].range()];
            for (row, to) in lora.columns.clone().zip(own.chunks_mut(lora.rank)) {
                let at = row * self.rank + block * lora.rank;
                to.copy_from_slice(&fused[at..at + lora.rank]);
                outside[at..at + lora.rank].fill(0.0);
            }
        }
        outside.iter().position(|&value| value != 0.0)
    }
}
