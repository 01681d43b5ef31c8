//! Generation: tokens in, logits of the last one out, with keys and values of all earlier ones cached.

use std::sync::Arc;

use super::scratch::{self, ScratchNeeds};
use crate::{
    device::{
        Buffer,
        DType::{F32, U32},
        View,
        arena::{Arenas, Placement},
        cpu::on_pool,
        graph::Graph,
    },
    error::{Error, Result},
    kernels::{
        adapted_linear::Dropout,
        embed, layernorm,
        matmul::{self, InitialValue},
    },
};

use super::{
    Base, Limits,
    base::MANY,
    bindings::AdapterBindings,
    block::{Block, rows},
    buffers::{BlockBuffers, Passes, Sizes, Workspace},
    cache::Cache,
    policy::Policy,
    prefix::PrefixState,
    stack::{check_length, head_matrix},
    weight_streamer::{Input, Stage, WeightStreamer},
};

/// Tokens a prompt is fed in at a time: workspace stays small, products stay efficient.
const CHUNK: usize = 512;

/// A base with adapters, reading one sequence of tokens, or several that begin alike.
pub struct Decoder {
    base: Arc<Base>,
    bindings: AdapterBindings,
    values: Buffer,
    prompt: Option<PrefixState>,
    cache: Cache,
    /// Sequences read side by side.
    rows: usize,
    x: [Buffer; 2],
    block: Option<BlockBuffers>,
    work: Workspace,
    stats: Buffer,
    logits: Buffer,
    /// Logits of a device, copied.
    on_host: Vec<f32>,
    /// Tokens in the cache, place of the last token that is read, n ids, n positions: `(2 + 2 n)`, in one upload.
    inputs: Buffer,
    starts: Buffer,
    flow: WeightStreamer,
    recorded: Recorded,
}

/// The launches of one further token a row, of which a device starts hundreds: recorded, it starts them as one.
enum Recorded {
    /// Nor will they be: on a host, where blocks come and go, and where the device refused.
    Never,
    /// Not for the rows of the last token: a first one loads kernels and scratch.
    Not(usize),
    /// For so many rows.
    For(usize, Graph),
}

/// Tokens whose output is read; all others need not pass the last block behind its keys and values.
#[derive(Clone, Copy)]
enum Wanted {
    Nothing,
    Last,
    All,
}

impl Decoder {
    /// Prepares for one sequence of up to `capacity` tokens, and up to `rows` that [`Decoder::fork`]
    /// makes of it; `values` is the flat store of the wiring.
    ///
    /// # Errors
    /// When `capacity` exceeds the positions, or memory cannot be reserved.
    pub fn new(
        base: Arc<Base>,
        bindings: AdapterBindings,
        values: Vec<f32>,
        rows: usize,
        capacity: usize,
    ) -> Result<Self> {
        check_length(&base, &bindings, capacity)?;
        let config = &base.config;
        let (device, activations) = (base.device, base.activations);
        let mut arenas = Arenas::real(None).on(device);
        let mut prompt = PrefixState::new(&bindings, config, activations, false, &mut arenas)?;
        let (mut bindings, mut values) = (bindings, values);
        if device.kind().wants_transposed_factors {
            bindings.turn(&mut values, config);
        }
        let values = Buffer::on(device, &values)?;
        if let Some(prompt) = &mut prompt {
            prompt.refresh(values.view());
        }
        let rows = rows.max(1);
        let cache = Cache::new(config, rows, capacity, activations, &mut arenas)?;
        // A chunk of the prompt, or one token of each row.
        let limits = Limits { rows: 1, tokens: capacity.clamp(1, CHUNK).max(rows) };
        let n = limits.tokens;
        let needs =
            ScratchNeeds { config, rows: n, keys: bindings.prefix_len() + capacity, rank: 0, dropout: false };
        device.reserve(scratch::decoding(needs, activations, rows))?;
        let ranks = std::array::from_fn(|site| {
            (0..config.layers).map(|layer| bindings.ranks(layer, site)).max().unwrap_or(0)
        });
        let sizes = Sizes { config, limits, activations };
        let made = arenas.build("decoding", Placement::Memory, |arena| {
            let x = [
                arena.take("x", activations, &[n, config.width])?,
                arena.take("y", activations, &[n, config.width])?,
            ];
            let block = BlockBuffers::cut(arena, "block", sizes, ranks)?;
            let work = Workspace::cut(arena, sizes, Passes { head_rows: 0, backward: None })?;
            let stats = arena.take("stats_f", F32, &[rows, 2])?;
            let logits = arena.take("logits", F32, &[rows, config.vocab])?;
            let inputs = arena.take("inputs", U32, &[2 + 2 * n])?;
            let starts = arena.take("starts", U32, &[n])?;
            Ok((x, block, work, stats, logits, (inputs, starts)))
        })?;
        let (x, block, work, stats, logits, (inputs, starts)) = made;
        let block = Some(block);
        let flow = WeightStreamer::new(Policy::default(), &base)?;
        let records = device.kind().records_graphs && !base.is_streamed();
        let recorded = if records { Recorded::Not(0) } else { Recorded::Never };
        Ok(Self {
            base,
            bindings,
            values,
            prompt,
            cache,
            rows: 1,
            x,
            block,
            work,
            stats,
            logits,
            on_host: Vec::new(),
            inputs,
            starts,
            flow,
            recorded,
        })
    }

    /// Whether layers of the base are in memory one after another only.
    ///
    /// # Errors
    /// When no thread can be had.
    pub(super) fn stream(&mut self, stream: bool) -> Result<()> {
        self.flow = WeightStreamer::new(Policy { stream, ..Policy::default() }, &self.base)?;
        Ok(())
    }

    /// Has every launch of a token started by itself on a device, too.
    pub fn never_record(&mut self) {
        self.recorded = Recorded::Never;
    }

    /// Whether a further token is started as a whole.
    pub fn is_recorded(&self) -> bool {
        matches!(self.recorded, Recorded::For(..))
    }

    /// Tokens read so far.
    pub fn position(&self) -> usize {
        self.cache.filled()
    }

    /// Tokens that can be read in all.
    pub fn capacity(&self) -> usize {
        self.cache.capacity()
    }

    /// Forgets all but the first `tokens`, and all sequences but the first.
    pub fn rewind(&mut self, tokens: usize) {
        self.cache.truncate(tokens);
        self.rows = 1;
    }

    /// Goes on with `rows` copies of the sequence read so far, at most as many as were prepared for.
    pub fn fork(&mut self, rows: usize) {
        self.cache.fork(rows, self.base.config.width);
        self.rows = rows;
    }

    /// Reads `ids` into the only sequence; returns the logits `(v)` that follow the last of them.
    ///
    /// # Errors
    /// When there is nothing to read, no room left, or an id is outside the vocabulary.
    pub fn feed(&mut self, ids: &[u32]) -> Result<&[f32]> {
        self.check(ids, ids.len())?;
        on_pool(|| {
            let (before, last) = ids.split_at((ids.len() - 1) / CHUNK * CHUNK);
            for chunk in before.chunks(CHUNK) {
                self.read(chunk, 1, Wanted::Nothing)?;
            }
            if last.len() == 1 {
                self.step(last)?;
            } else {
                self.read(last, 1, Wanted::Last)?;
                self.head(1);
            }
            self.logits(1)
        })
    }

    /// Reads one token into each sequence; returns the logits `(rows, v)` that follow them.
    ///
    /// # Errors
    /// As [`Decoder::feed`].
    pub fn feed_each(&mut self, ids: &[u32]) -> Result<&[f32]> {
        self.check(ids, 1)?;
        on_pool(|| {
            self.step(ids)?;
            self.logits(ids.len())
        })
    }

    fn check(&self, ids: &[u32], tokens: usize) -> Result<()> {
        let vocab = self.base.config.vocab;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::input(format!(
                "token {id} is outside the vocabulary of {vocab} of base {}; give ids below that",
                self.base.name
            )));
        }
        let room = self.capacity() - self.position();
        if ids.is_empty() || tokens > room {
            return Err(Error::input(format!(
                "{tokens} tokens do not fit where 1 to {room} do; shorten the prompt or lower --max-new-tokens"
            )));
        }
        Ok(())
    }

    /// One further token for each row, and its logits.
    fn step(&mut self, ids: &[u32]) -> Result<()> {
        let (rows, filled) = (ids.len(), self.position());
        self.upload(ids, rows);
        match &self.recorded {
            Recorded::For(of, recording) if *of == rows && recording.replay() => {
                self.cache.advance(1);
                return Ok(());
            }
            Recorded::Not(of) if *of == rows => {
                let mut done = Ok(());
                let recording = Graph::new(self.base.device, || done = self.token(rows, true));
                done?;
                if let Some(recording) = recording.filter(Graph::replay) {
                    self.recorded = Recorded::For(rows, recording);
                    return Ok(());
                }
                // Nothing was computed.
                self.cache.truncate(filled);
                self.recorded = Recorded::Never;
            }
            Recorded::For(..) | Recorded::Not(_) => self.recorded = Recorded::Not(rows),
            Recorded::Never => {}
        }
        self.token(rows, !matches!(self.recorded, Recorded::Never))
    }

    /// One further token of `inputs` for each row, and its logits.
    fn token(&mut self, rows: usize, counted: bool) -> Result<()> {
        self.blocks(rows, rows, Wanted::All, counted)?;
        self.head(rows);
        Ok(())
    }

    /// Brings `ids (rows, t)` to the device.
    fn upload(&mut self, ids: &[u32], rows: usize) {
        let (n, past) = (ids.len(), self.position() as u32);
        let first = past + self.bindings.prefix_len() as u32;
        let positions = (0..rows).flat_map(|_| (first..).take(n / rows));
        let inputs: Vec<u32> =
            [past, n as u32 - 1].into_iter().chain(ids.iter().copied()).chain(positions).collect();
        self.inputs.view_mut().upload(&inputs);
    }

    /// Runs the blocks over `ids (rows, t)`; the output of those `wanted` ends up in `x[layers % 2]`.
    fn read(&mut self, ids: &[u32], rows: usize, wanted: Wanted) -> Result<()> {
        self.upload(ids, rows);
        self.blocks(ids.len(), rows, wanted, false)
    }

    /// The same over the n tokens of `inputs`; where they are `counted` the device goes by its own count of those before.
    fn blocks(&mut self, n: usize, rows: usize, wanted: Wanted, counted: bool) -> Result<()> {
        let tokens = n / rows;
        let base = Arc::clone(&self.base);
        let (config, weights) = (&base.config, &base.weights);
        let c = config.width;
        let inputs = self.inputs.view();
        let (count, last) = (inputs.slice(0, 1), inputs.slice(1, 1));
        let (id_view, position_view) = (inputs.slice(2, n), inputs.slice(2 + n, n));
        let x = rows!(mut self.x[0], n, c);
        self.flow.enter(weights, Stage::Embed, Some(Stage::Block(0)), Input::default());
        embed::forward(id_view, position_view, weights.wte.view(), weights.wpe.view(), x);
        let mut buffers =
            self.block.take().ok_or_else(|| Error::failed("generation failed before; start again"))?;
        for layer in 0..config.layers {
            let next = (layer + 1 < config.layers).then(|| Stage::Block(layer + 1));
            self.flow.enter(weights, Stage::Block(layer), next, Input::default());
            let block = Block {
                config,
                layer,
                weights: self.flow.block(weights, layer),
                deltas: &self.bindings.layers[layer],
                values: self.values.view(),
                prompt: self
                    .prompt
                    .as_ref()
                    .map(|p| (p.view(self.values.view()), self.bindings.prefix_len())),
                starts: rows!(self.starts, n, 1),
                rows,
                tokens,
                dropout: Dropout::NONE,
                wanted: match wanted {
                    _ if layer + 1 < config.layers => None,
                    Wanted::Nothing => Some(last.slice(0, 0)),
                    Wanted::Last if n > 1 => Some(last),
                    Wanted::Last | Wanted::All => None,
                },
                count: counted.then_some(count),
            };
            let (left, right) = self.x.split_at_mut(1);
            let (x, y) = if layer % 2 == 0 { (&left[0], &mut right[0]) } else { (&right[0], &mut left[0]) };
            let cache = Some(&mut self.cache.layers[layer]);
            let state = block.forward(rows!(x, n, c), buffers, &mut self.work, cache, rows!(mut y, n, c));
            buffers = state.discard();
        }
        self.block = Some(buffers);
        self.flow.leave(weights, None);
        Ok(())
    }

    /// Leaves the logits `(count, v)` of the first `count` rows of the blocks' output.
    fn head(&mut self, count: usize) {
        let (config, weights) = (&self.base.config, &self.base.weights);
        let norm = layernorm::Norm {
            gain: weights.ln_f.gain.view(),
            bias: weights.ln_f.bias.view(),
            epsilon: config.layer_norm_eps,
        };
        let c = config.width;
        let x = rows!(self.x[config.layers % 2], count, c);
        layernorm::forward(x, norm, rows!(mut self.work.normed, count, c), rows!(mut self.stats, count, 2));
        let hidden = rows!(self.work.normed, count, c);
        let logits = rows!(mut self.logits, count, config.vocab);
        match &weights.head_turned {
            Some(turned) if MANY.contains(&count) => {
                matmul::frozen_nn(hidden, turned.view(), InitialValue::Zero, logits, count);
            }
            _ => matmul::frozen_nt(hidden, head_matrix(&self.base), InitialValue::Zero, logits, count),
        }
    }

    /// The logits `(count, v)` that were left last.
    fn logits(&mut self, count: usize) -> Result<&[f32]> {
        let logits = rows!(self.logits, count, self.base.config.vocab);
        if logits.device().is_host_visible() {
            return Ok(logits.host());
        }
        logits.read_into(&mut self.on_host);
        self.base.device.check()?;
        Ok(&self.on_host)
    }

    /// Cached keys and values of a layer, `(position, c)` each.
    pub(super) fn keys_and_values(&self, layer: usize) -> (Vec<f32>, Vec<f32>) {
        let c = self.base.config.width;
        let (k, v) = self.cache.layers[layer].heads(c);
        let filled = |view: View| view.slice(0, self.position() * c).to_floats();
        (filled(k.data), filled(v.data))
    }
}
