//! The way through the layers of a base, for training, evaluation and generation: embedding, blocks, last norm; and the
//! way back.

use std::{ops::Range, sync::Arc};

use crate::{
    device::{View, ViewMut},
    error::{Error, Result},
    kernels::{
        adapted_linear::Dropout,
        embed::{self, DeltaGradients, Tables, Tokens},
        layernorm,
        noise::{self, Noise},
    },
};

use super::{
    Base,
    activations::{ANY, ActivationBuffers},
    bindings::{EmbeddingBinding, LayerSites, PromptBinding},
    block::{Block, Gradients, rows},
    cache::{CachedRows, LayerCache},
    norms::{NormBindings, normalise},
    weight_streamer::{Input, Stage, WeightStreamer},
};

/// Rows that follow one another in a pass, of one length and with the same adapters.
#[derive(Clone)]
pub struct RowGroup<'a> {
    /// First of its tokens among the n of the pass.
    pub first: usize,
    /// Number of rows b.
    pub batch: usize,
    /// Tokens t of each row.
    pub tokens: usize,
    /// Which of the wanted tokens are of these rows, where not all tokens are wanted.
    pub wanted: Range<usize>,
    /// Adapters of the embedding.
    pub embedding: &'a EmbeddingBinding,
    /// Adapters of the sites, by layer.
    pub sites: &'a [LayerSites],
    /// Vectors of the norms.
    pub norms: &'a NormBindings,
    /// The flat store that they point into.
    pub values: View<'a>,
    /// Keys and values of the prefix `(p, 2 l c)`, and p.
    pub prefix: Option<(View<'a>, usize)>,
    /// Where the rows go on in a cache.
    pub cached: Option<CachedRows<'a>>,
}

impl RowGroup<'_> {
    /// Number of tokens, b t.
    pub fn len(&self) -> usize {
        self.batch * self.tokens
    }

    /// Its tokens among those of the pass, or among the wanted ones where not all are.
    pub fn places(&self, all: bool) -> Range<usize> {
        if all { self.first..self.first + self.len() } else { self.wanted.clone() }
    }
}

/// The input of a pass: n tokens, in memory of the device, and adapters and cache of each group of rows.
#[derive(Clone, Copy)]
pub struct MicroBatch<'a> {
    /// Token ids `(n)`.
    pub ids: View<'a>,
    /// Rows of the position embedding `(n)`.
    pub positions: View<'a>,
    /// First visible token of each token `(n)`.
    pub starts: View<'a>,
    /// Indices of the tokens `(n)`, those of one id side by side ([`embed::by_id`]), where a backward comes to the
    /// embedding.
    pub by_id: Option<View<'a>>,
    /// All rows, in the order of their tokens.
    pub groups: &'a [RowGroup<'a>],
    /// The tokens whose output of the last block anything reads `(m)`, ascending; `None` where that is all of them.
    pub wanted: Option<View<'a>>,
    /// Dropout in front of every A; none after attention of the last block where not all tokens are `wanted`.
    pub dropout: Dropout,
    /// Noise on the embeddings of a training pass.
    pub noise: Noise,
}

impl MicroBatch<'_> {
    /// Number of tokens n.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Tokens that leave the last block: m, or n where all are wanted.
    pub fn outputs(&self) -> usize {
        self.wanted.map_or(self.len(), |wanted| wanted.len())
    }
}

/// A base and the memory of a pass through it.
pub struct Layers {
    pub base: Arc<Base>,
    pub buffers: ActivationBuffers,
    pub streamer: WeightStreamer,
}

/// The activations that a forward left in its layers, to be consumed by the backward.
#[must_use = "activations that nobody differentiates were kept for nothing"]
pub struct Kept(());

impl Layers {
    /// Embedding and blocks, each of which keeps what the policy says; `next` is read after the last block.
    ///
    /// # Errors
    /// When an earlier failure left memory unaccounted for.
    pub fn forward_keeping(&mut self, batch: MicroBatch, next: Stage) -> Result<Kept> {
        self.forward(batch, Some(next), Keeping::Policy, None).map(|()| Kept(()))
    }

    /// Embedding and blocks without a backward after them. One block's memory serves all layers. Rows of a cache go on
    /// in `caches`, one for each layer.
    ///
    /// # Errors
    /// As [`Layers::forward_keeping`].
    pub fn forward_only(
        &mut self,
        batch: MicroBatch,
        next: Option<Stage>,
        caches: Option<&mut [LayerCache]>,
    ) -> Result<()> {
        self.forward(batch, next, Keeping::Nothing, caches)
    }

    fn forward(
        &mut self,
        batch: MicroBatch,
        next: Option<Stage>,
        keeping: Keeping,
        mut caches: Option<&mut [LayerCache]>,
    ) -> Result<()> {
        let (n, base) = (batch.len(), Arc::clone(&self.base));
        let (c, layers, weights) = (base.config.width, base.config.layers, &base.weights);
        self.streamer.enter(weights, Stage::Embed, Some(Stage::Block(0)), Input::default());
        embedding(&base, batch, rows!(mut self.buffers.input_mut(0), n, c));
        for layer in 0..layers {
            let after = if layer + 1 < layers { Some(Stage::Block(layer + 1)) } else { next };
            self.streamer.enter(weights, Stage::Block(layer), after, self.passed(layer));
            let (buffers, owned) = match keeping {
                Keeping::Policy => self.buffers.block(layer)?,
                Keeping::Nothing => self.buffers.any_block()?,
            };
            let block = block(&base, &self.streamer, &batch, layer);
            let (x, y, workspace) = self.buffers.step(layer);
            let cache = caches.as_deref_mut().and_then(|caches| caches.get_mut(layer));
            let saved = block.forward(rows!(x, n, c), buffers, workspace, cache, rows!(mut y, n, c));
            // A layer's own buffers keep their content until the backward.
            match keeping {
                Keeping::Policy => {
                    self.buffers.give_back(layer, saved.discard(), owned);
                    self.buffers.send(layer, n * c);
                }
                Keeping::Nothing => self.buffers.give_back(ANY, saved.discard(), owned),
            }
        }
        Ok(())
    }

    /// Backward through the blocks from the top to block `lowest`, and to the embedding where that is trained.
    ///
    /// # Errors
    /// As [`Layers::forward_keeping`], and when the buffers are not those of a training.
    pub fn backward(
        &mut self,
        batch: MicroBatch,
        to: &mut Gradients,
        lowest: usize,
        Kept(()): Kept,
    ) -> Result<()> {
        let (n, base) = (batch.len(), Arc::clone(&self.base));
        let c = base.config.width;
        let embedding = batch.groups.iter().any(|group| group.embedding.trains());
        for layer in (lowest..base.config.layers).rev() {
            let below = layer.checked_sub(1).filter(|&below| below >= lowest);
            let input = Input {
                release: self.buffers.pages(layer + 1),
                fetch: below.and_then(|below| self.buffers.pages(below)),
            };
            self.streamer.enter(&base.weights, Stage::Block(layer), below.map(Stage::Block), input);
            if let Some(below) = below {
                self.buffers.fetch(below, n * c);
            }
            let block = block(&base, &self.streamer, &batch, layer);
            let (buffers, owned) = self.buffers.block(layer)?;
            // A layer's own buffers tell what it kept; all others are computed again.
            let keep = owned.keep();
            let (x, workspace, back) = self.buffers.back(layer).ok_or_else(lost)?;
            let x = rows!(x, n, c);
            let saved = block.again(x, buffers, workspace, keep);
            let buffers = block.backward(x, saved, workspace, back, to, embedding || layer > lowest);
            self.buffers.give_back(layer, buffers, owned);
        }
        if embedding {
            self.embedding_backward(batch, to)?;
        }
        self.streamer.leave(&base.weights, self.buffers.pages(lowest));
        Ok(())
    }

    /// Backward of the embedding, from the gradient of the first block's input.
    fn embedding_backward(&mut self, batch: MicroBatch, to: &mut Gradients) -> Result<()> {
        let (n, config) = (batch.len(), &self.base.config);
        let (_, _, back) = self.buffers.back(0).ok_or_else(lost)?;
        let by_id = batch.by_id.ok_or_else(lost)?;
        let tokens = Tokens { ids: batch.ids, vocab: config.vocab };
        for group in batch.groups {
            for delta in group.embedding.deltas.iter().filter(|delta| delta.trains()) {
                let dx = rows!(back.grad, n, config.width);
                let to = DeltaGradients { grads: to.store.reborrow(), d_xa: back.d_xa.view_mut() };
                embed::delta_backward(delta, tokens, by_id, group.values, dx, to);
            }
            let prompt = group.embedding.prompt.filter(|prompt| !prompt.rows.frozen);
            if let Some(PromptBinding { length, rows }) = prompt {
                let dx = rows!(back.grad, n, config.width);
                let to = to.store.reborrow().slice(rows.at, length * config.width);
                embed::prompt_backward(tokens, by_id, dx, to);
            }
        }
        Ok(())
    }

    /// The last norm of the rows that left the last block, into the workspace.
    pub fn last_norm(&mut self, batch: MicroBatch) {
        let (n, c) = (batch.outputs(), self.base.config.width);
        let (x, workspace, head, _) = self.buffers.head();
        let (normed, stats) = (rows!(mut workspace.normed, n, c), rows!(mut head.stats, n, 2));
        normalise_last(&self.base, batch, rows!(x, n, c), normed, stats);
    }

    /// The input that the forward no longer needs when it enters block `layer`, or the head after the last block.
    pub fn passed(&self, layer: usize) -> Input {
        Input { release: layer.checked_sub(1).and_then(|below| self.buffers.pages(below)), fetch: None }
    }
}

/// `x (n, c)`: the rows of both tables, and what the adapters of each group add.
fn embedding(base: &Base, batch: MicroBatch, x: ViewMut) {
    let (c, vocab, weights) = (base.config.width, base.config.vocab, &base.weights);
    let tables = Tables { wte: weights.wte.view(), wpe: weights.wpe.view(), prompt: None };
    let mut x = x;
    // One call for all rows, unless some have rows of the table of their own.
    let apart = batch.groups.iter().any(|group| group.embedding.prompt.is_some());
    if !apart {
        embed::forward(batch.ids, batch.positions, tables, x.reborrow());
    }
    for group in batch.groups {
        let (first, len) = (group.first, group.len());
        let (ids, positions) = (batch.ids.slice(first, len), batch.positions.slice(first, len));
        let mut x = x.reborrow().slice(first * c, len * c);
        if apart {
            let prompt = group.embedding.prompt;
            let prompt = prompt.map(|prompt| group.values.slice(prompt.rows.at, prompt.length * c));
            embed::forward(ids, positions, Tables { prompt, ..tables }, x.reborrow());
        }
        for delta in &group.embedding.deltas {
            embed::add_delta(delta, Tokens { ids, vocab }, group.values, x.reborrow());
        }
    }
    noise::add(batch.noise, batch.ids, x);
}

/// Which activations blocks keep of a forward.
#[derive(Clone, Copy)]
enum Keeping {
    /// Those of the policy.
    Policy,
    /// None: one block's memory serves all.
    Nothing,
}

/// Block `layer` as it sees a micro-batch.
fn block<'a>(
    base: &'a Base,
    streamer: &'a WeightStreamer,
    batch: &MicroBatch<'a>,
    layer: usize,
) -> Block<'a> {
    Block {
        config: &base.config,
        layer,
        weights: streamer.block(&base.weights, layer),
        groups: batch.groups,
        starts: batch.starts,
        dropout: batch.dropout,
        wanted: batch.wanted.filter(|_| layer + 1 == base.config.layers),
    }
}

/// The norm after the last block, with the vectors of `group`.
pub fn last_norm<'a>(base: &'a Base, group: &RowGroup<'a>) -> layernorm::Norm<'a> {
    group.norms.last.of(&base.weights.ln_f, group.values, base.config.layer_norm_eps)
}

fn normalise_last<'a>(base: &'a Base, batch: MicroBatch<'a>, x: View, y: ViewMut, stats: ViewMut) {
    let of = |group: &RowGroup<'a>| {
        (group.norms.last, last_norm(base, group), group.places(batch.wanted.is_none()))
    };
    normalise(batch.groups, of, x, y, stats);
}

/// Only an earlier error in the middle of a pass can leave memory unaccounted for.
pub fn lost() -> Error {
    Error::failed("an earlier failure left the model without workspace; start again")
}
