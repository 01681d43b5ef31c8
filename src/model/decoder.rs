//! Generation: tokens in, logits of the last one out, with keys and values of all earlier ones cached.

use std::sync::Arc;

use crate::{
    error::{Error, Result},
    kernels::{
        adapted_linear::Dropout,
        arena::{Arenas, Place},
        cpu::on_pool,
        device::{
            Buffer,
            DType::{F32, U32},
            View,
        },
        embed, layernorm,
        matmul::{self, Start},
    },
};

use super::{
    Base, Limits,
    base::MANY,
    block::{Block, rows},
    buffers::{BlockBuffers, Passes, Sizes, Work},
    cache::Cache,
    flow::{Flow, Input, Stage},
    policy::Policy,
    prefix::Prompt,
    stack::{check_length, head_matrix},
    wiring::Wiring,
};

/// Tokens a prompt is fed in at a time: workspace stays small, products stay efficient.
const CHUNK: usize = 512;

/// A base with adapters, reading one sequence of tokens, or several that begin alike.
pub struct Decoder {
    base: Arc<Base>,
    wiring: Wiring,
    values: Buffer,
    prompt: Option<Prompt>,
    cache: Cache,
    /// Sequences read side by side.
    rows: usize,
    x: [Buffer; 2],
    block: Option<BlockBuffers>,
    work: Work,
    stats: Buffer,
    logits: Buffer,
    /// Logits of a device, copied.
    on_host: Vec<f32>,
    ids: Buffer,
    positions: Buffer,
    starts: Buffer,
    /// Place of the last token that is read.
    last: Buffer,
    flow: Flow,
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
        wiring: Wiring,
        values: Vec<f32>,
        rows: usize,
        capacity: usize,
    ) -> Result<Self> {
        check_length(&base, &wiring, capacity)?;
        let config = &base.config;
        let (device, activations) = (base.device, base.activations);
        let mut arenas = Arenas::real(None).on(device);
        let mut prompt = Prompt::new(&wiring, config, activations, false, &mut arenas)?;
        let (mut wiring, mut values) = (wiring, values);
        if device.is_host() {
            wiring.turn(&mut values, config);
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
        let ranks = std::array::from_fn(|site| {
            (0..config.layers).map(|layer| wiring.ranks(layer, site)).max().unwrap_or(0)
        });
        let sizes = Sizes { config, limits, activations };
        let made = arenas.build("decoding", Place::Memory, |arena| {
            let x = [
                arena.take("x", activations, &[n, config.width])?,
                arena.take("y", activations, &[n, config.width])?,
            ];
            let block = BlockBuffers::cut(arena, "block", sizes, ranks)?;
            let work = Work::cut(arena, sizes, Passes { head_rows: 0, backward: None })?;
            let stats = arena.take("stats_f", F32, &[rows, 2])?;
            let logits = arena.take("logits", F32, &[rows, config.vocab])?;
            let last = arena.take("last", U32, &[1])?;
            let mut tokens = |name: &str| arena.take(name, U32, &[n]);
            let inputs = (tokens("ids")?, tokens("positions")?, tokens("starts")?, last);
            Ok((x, block, work, stats, logits, inputs))
        })?;
        let (x, block, work, stats, logits, (ids, positions, starts, last)) = made;
        let block = Some(block);
        let flow = Flow::new(Policy::default(), &base)?;
        Ok(Self {
            base,
            wiring,
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
            ids,
            positions,
            starts,
            last,
            flow,
        })
    }

    /// Whether layers of the base are in memory one after another only.
    ///
    /// # Errors
    /// When no thread can be had.
    pub(super) fn stream(&mut self, stream: bool) -> Result<()> {
        self.flow = Flow::new(Policy { stream, ..Policy::default() }, &self.base)?;
        Ok(())
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
            self.read(last, 1, Wanted::Last)?;
            self.head(1)
        })
    }

    /// Reads one token into each sequence; returns the logits `(rows, v)` that follow them.
    ///
    /// # Errors
    /// As [`Decoder::feed`].
    pub fn feed_each(&mut self, ids: &[u32]) -> Result<&[f32]> {
        self.check(ids, 1)?;
        on_pool(|| {
            self.read(ids, self.rows, Wanted::All)?;
            self.head(self.rows)
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

    /// Runs the blocks over `ids (rows, t)`; the output of those `wanted` ends up in `x[layers % 2]`.
    fn read(&mut self, ids: &[u32], rows: usize, wanted: Wanted) -> Result<()> {
        let (n, past) = (ids.len(), self.position());
        let tokens = n / rows;
        let base = Arc::clone(&self.base);
        let (config, weights) = (&base.config, &base.weights);
        let c = config.width;
        let first = (past + self.wiring.prefix_len()) as u32;
        let positions: Vec<u32> = (0..rows).flat_map(|_| (first..).take(tokens)).collect();
        self.ids.view_mut().upload(ids);
        self.positions.view_mut().upload(&positions);
        self.last.view_mut().upload(&[n as u32 - 1]);
        let (id_view, position_view) = (rows!(self.ids, n, 1), rows!(self.positions, n, 1));
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
                deltas: &self.wiring.layers[layer],
                values: self.values.view(),
                prompt: self.prompt.as_ref().map(|p| (p.view(self.values.view()), self.wiring.prefix_len())),
                starts: rows!(self.starts, n, 1),
                rows,
                tokens,
                dropout: Dropout::NONE,
                wanted: match wanted {
                    _ if layer + 1 < config.layers => None,
                    Wanted::Nothing => Some(rows!(self.last, 0, 1)),
                    Wanted::Last if n > 1 => Some(self.last.view()),
                    Wanted::Last | Wanted::All => None,
                },
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

    /// Logits `(count, v)` of the first `count` rows of the blocks' output.
    fn head(&mut self, count: usize) -> Result<&[f32]> {
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
                matmul::frozen_nn(hidden, turned.view(), Start::Zero, logits, count);
            }
            _ => matmul::frozen_nt(hidden, head_matrix(&self.base), Start::Zero, logits, count),
        }
        let logits = rows!(self.logits, count, config.vocab);
        if logits.device().is_host() {
            return Ok(logits.host());
        }
        self.on_host = logits.to_vec();
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
