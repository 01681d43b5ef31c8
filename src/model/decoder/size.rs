//! The memory of a decoder: what it cuts from arenas, and the scratch of its kernels.

use super::pass::PassInputs;
use crate::{
    device::{
        Buffer, DType,
        DType::{F32, U32},
        arena::{Arenas, Placement, TableRow},
    },
    error::Result,
    kernels::{
        argmax,
        matmul::{Arithmetic, device_scratch::SMALL_BATCH},
    },
    model::{
        Config, Limits, Policy,
        activations::ActivationBuffers,
        bindings::AdapterBindings,
        buffers::Sizes,
        cache::Cache,
        output_scales::OutputScales,
        prefix::PrefixState,
        scratch::{self, FactorTypes, ScratchNeeds},
    },
};

/// Most tokens of prompts in a pass: workspace stays small, products stay efficient.
pub(super) const CHUNK: usize = 512;

/// Where kernels take their scratch.
#[derive(Debug, Clone, Copy)]
pub enum ScratchPlace {
    /// In the host's memory, for a pool of so many threads.
    Threads(usize, Arithmetic),
    /// In the memory of a device, for factors of these types.
    Device(FactorTypes),
}

/// What the memory of a decoder depends on beside base and adapters.
#[derive(Clone, Copy)]
pub(super) struct DecoderSize {
    /// Sequences that are read side by side.
    pub rows: usize,
    /// Tokens of each in the cache, virtual ones of a prompt included.
    pub cached: usize,
}

impl DecoderSize {
    /// That of one sequence of `capacity` tokens after the prompt of `bindings`.
    pub fn of_one(bindings: &AdapterBindings, capacity: usize) -> Self {
        Self { rows: 1, cached: capacity + bindings.prompt_len() }
    }

    /// Most tokens of a pass: a chunk of a prompt, or one token of each row.
    pub fn most(self) -> usize {
        self.cached.clamp(1, CHUNK).max(self.rows)
    }

    /// The cache, and logits, the largest of them, inputs and starts of a pass.
    pub fn cut(
        self,
        config: &Config,
        activations: DType,
        arenas: &mut Arenas,
    ) -> Result<(Cache, [Buffer; 4])> {
        let (rows, most) = (self.rows, self.most());
        let cache = Cache::new(config, rows, self.cached, activations, arenas)?;
        let buffers = arenas.build("decoding", Placement::Memory, |arena| {
            let logits = arena.take("logits", F32, &[rows, config.vocab])?;
            let largest = arena.take("largest logits", U32, &[rows, argmax::NUMBERS])?;
            let inputs = arena.take("inputs", U32, &[PassInputs::most(rows, most)])?;
            Ok([logits, largest, inputs, arena.take("starts", U32, &[most])?])
        })?;
        Ok((cache, buffers))
    }

    /// Activations of a pass with any of `bindings`.
    pub fn workspace(
        self,
        config: &Config,
        bindings: &[&AdapterBindings],
        activations: DType,
        arenas: &mut Arenas,
    ) -> Result<ActivationBuffers> {
        let sizes = Sizes { config, limits: Limits { rows: 1, tokens: self.most() }, activations };
        let policy = Policy { head_rows: 0, activations, ..Policy::default() };
        ActivationBuffers::cut(arenas, sizes, bindings, policy, false)
    }

    /// Bytes of scratch for passes with any of `bindings`.
    pub fn scratch(self, config: &Config, bindings: &[&AdapterBindings], place: ScratchPlace) -> usize {
        let most =
            |of: &dyn Fn(&AdapterBindings) -> usize| bindings.iter().map(|one| of(one)).max().unwrap_or(0);
        let needs = ScratchNeeds {
            config,
            rows: self.most(),
            batch: self.rows,
            keys: most(&AdapterBindings::prefix_len) + self.cached,
            rank: most(&AdapterBindings::most_rank),
            embedding_rank: most(&|bindings| bindings.embedding.most_rank()),
            dropout: false,
            scaled_deltas: bindings.iter().any(|bindings| bindings.scales_deltas()),
            // Scales were derived before.
            derived_ranks: None,
            trained_norms: false,
        };
        match place {
            ScratchPlace::Threads(threads, arithmetic) => scratch::bytes(needs, threads, arithmetic),
            ScratchPlace::Device(types) => {
                // Each row may have adapters of its own.
                let ranks = most(&AdapterBindings::most_ranks) * self.rows.min(SMALL_BATCH);
                scratch::decoding(needs, types, self.rows, ranks)
            }
        }
    }

    /// Every buffer of a decoder with `bindings`.
    pub fn plan(
        self,
        config: &Config,
        bindings: &AdapterBindings,
        activations: DType,
    ) -> Result<Vec<TableRow>> {
        let mut arenas = Arenas::planning();
        self.cut(config, activations, &mut arenas)?;
        PrefixState::new(bindings, config, activations, false, &mut arenas)?;
        OutputScales::new(bindings, &mut arenas)?;
        self.workspace(config, &[bindings], activations, &mut arenas)?;
        arenas.build("adapter", Placement::Memory, |arena| {
            arena.take("values", F32, &[bindings.store_len()])
        })?;
        Ok(arenas.into_rows())
    }
}
