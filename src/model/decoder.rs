//! Generation: tokens in, logits of the last one out, with keys and values of all earlier ones cached.

use std::sync::Arc;

use crate::{
    error::{Error, Result},
    kernels::{
        adapted_linear::Dropout,
        device::{
            Arena, Buffer,
            DType::{F32, U32},
            View,
        },
        embed, layernorm,
        matmul::{self, Start},
    },
};

use super::{
    Base, Limits,
    block::{Block, rows},
    buffers::{BlockBuffers, Work},
    cache::Cache,
    prefix::Prompt,
    stack::{check_length, head_matrix},
    wiring::Wiring,
};

/// Tokens a prompt is fed in at a time: workspace stays small, products stay efficient.
const CHUNK: usize = 256;

/// A base with adapters, reading one sequence of tokens.
pub struct Decoder {
    base: Arc<Base>,
    wiring: Wiring,
    values: Buffer,
    prompt: Option<Prompt>,
    cache: Cache,
    x: [Buffer; 2],
    block: Option<BlockBuffers>,
    work: Work,
    stats: Buffer,
    logits: Buffer,
    ids: Buffer,
    positions: Buffer,
    starts: Buffer,
}

impl Decoder {
    /// Prepares for sequences of up to `capacity` tokens; `values` is the flat store of the wiring.
    ///
    /// # Errors
    /// When `capacity` exceeds the positions, or memory cannot be reserved.
    pub fn new(base: Arc<Base>, wiring: Wiring, values: Vec<f32>, capacity: usize) -> Result<Self> {
        check_length(&base, &wiring, capacity)?;
        let config = &base.config;
        let (mut prompt, _) = Prompt::new(&wiring, config, false)?;
        let values = Buffer::from_slice(&values)?;
        if let Some(prompt) = &mut prompt {
            prompt.refresh(values.view());
        }
        let cache = Cache::new(config, 1, capacity)?;
        let limits = Limits { rows: 1, tokens: capacity.clamp(1, CHUNK) };
        let n = limits.tokens;
        let ranks = std::array::from_fn(|site| {
            (0..config.layers).map(|layer| wiring.ranks(layer, site)).max().unwrap_or(0)
        });
        let (made, _) = Arena::build("decoding", |arena| {
            let x = [arena.take("x", F32, &[n, config.width])?, arena.take("y", F32, &[n, config.width])?];
            let block = BlockBuffers::cut(arena, "block", config, limits, ranks)?;
            let work = Work::cut(arena, config, limits)?;
            let stats = arena.take("stats_f", F32, &[1, 2])?;
            let logits = arena.take("logits", F32, &[1, config.vocab])?;
            let mut tokens = |name: &str| arena.take(name, U32, &[n]);
            Ok((x, block, work, stats, logits, (tokens("ids")?, tokens("positions")?, tokens("starts")?)))
        })?;
        let (x, block, work, stats, logits, (ids, positions, starts)) = made;
        let block = Some(block);
        Ok(Self {
            base,
            wiring,
            values,
            prompt,
            cache,
            x,
            block,
            work,
            stats,
            logits,
            ids,
            positions,
            starts,
        })
    }

    /// Tokens read so far.
    pub fn position(&self) -> usize {
        self.cache.filled()
    }

    /// Tokens that can be read in all.
    pub fn capacity(&self) -> usize {
        self.cache.capacity()
    }

    /// Forgets all but the first `tokens`.
    pub fn rewind(&mut self, tokens: usize) {
        self.cache.truncate(tokens);
    }

    /// Reads `ids`; returns the logits `(v)` that follow the last of them, in FP32.
    ///
    /// # Errors
    /// When there is nothing to read, no room left, or an id is outside the vocabulary.
    pub fn feed(&mut self, ids: &[u32]) -> Result<&[f32]> {
        let vocab = self.base.config.vocab;
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::input(format!(
                "token {id} is outside the vocabulary of {vocab} of base {}; give ids below that",
                self.base.name
            )));
        }
        let room = self.capacity() - self.position();
        if ids.is_empty() || ids.len() > room {
            return Err(Error::input(format!(
                "{} tokens do not fit where 1 to {room} do; shorten the prompt or lower --max-new-tokens",
                ids.len()
            )));
        }
        for chunk in ids.chunks(CHUNK) {
            self.read(chunk)?;
        }
        let last = (ids.len() - 1) % CHUNK;
        Ok(self.head(last))
    }

    /// Runs the blocks over `ids`; their output ends up in `x[layers % 2]`.
    fn read(&mut self, ids: &[u32]) -> Result<()> {
        let (n, past) = (ids.len(), self.position());
        let base = Arc::clone(&self.base);
        let (config, weights) = (&base.config, &base.weights);
        let c = config.width;
        let shift = (past + self.wiring.prefix_len()) as u32;
        let positions: Vec<u32> = (shift..).take(n).collect();
        self.ids.view_mut().upload(ids);
        self.positions.view_mut().upload(&positions);
        let (id_view, position_view) = (rows!(self.ids, n, 1), rows!(self.positions, n, 1));
        let x = rows!(mut self.x[0], n, c);
        embed::forward(id_view, position_view, weights.wte.view(), weights.wpe.view(), x, c);
        let mut buffers =
            self.block.take().ok_or_else(|| Error::failed("generation failed before; start again"))?;
        for layer in 0..config.layers {
            let block = Block {
                config,
                layer,
                weights: &weights.blocks[layer],
                deltas: &self.wiring.layers[layer],
                values: self.values.view(),
                prompt: self.prompt.as_ref().map(|p| (p.view(self.values.view()), self.wiring.prefix_len())),
                starts: rows!(self.starts, n, 1),
                rows: 1,
                tokens: n,
                dropout: Dropout::NONE,
            };
            let (left, right) = self.x.split_at_mut(1);
            let (x, y) = if layer % 2 == 0 { (&left[0], &mut right[0]) } else { (&right[0], &mut left[0]) };
            let cache = Some(&mut self.cache.layers[layer]);
            let state = block.forward(rows!(x, n, c), buffers, &mut self.work, cache, rows!(mut y, n, c));
            buffers = state.discard();
        }
        self.block = Some(buffers);
        Ok(())
    }

    /// Logits of row `row` of the last chunk.
    fn head(&mut self, row: usize) -> &[f32] {
        let (config, weights) = (&self.base.config, &self.base.weights);
        let norm = layernorm::Norm {
            gain: weights.ln_f.gain.view(),
            bias: weights.ln_f.bias.view(),
            epsilon: config.layer_norm_eps,
        };
        let c = config.width;
        let x = self.x[config.layers % 2].view().slice(row * c, c);
        layernorm::forward(x, norm, rows!(mut self.work.normed, 1, c), self.stats.view_mut());
        let hidden = rows!(self.work.normed, 1, c);
        matmul::frozen_nt(hidden, head_matrix(&self.base), Start::Zero, self.logits.view_mut(), 1);
        self.logits.view().host()
    }

    /// Cached keys and values of a layer, `(position, c)` each.
    pub(super) fn keys_and_values(&self, layer: usize) -> (Vec<f32>, Vec<f32>) {
        let c = self.base.config.width;
        let (k, v) = self.cache.layers[layer].heads(c);
        let filled = |view: View| view.slice(0, self.position() * c).to_vec();
        (filled(k.data), filled(v.data))
    }
}
