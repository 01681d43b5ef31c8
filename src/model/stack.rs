//! The whole model: embedding, blocks, head and loss, forwards and backwards over planned buffers.

use std::sync::Arc;

use engraft_util::rng;

use crate::{
    data::{Batch, NO_LOSS},
    device::{
        View,
        arena::{Arenas, Place},
        cpu::on_pool,
    },
    error::{Error, Result},
    kernels::{
        adapted_linear::Dropout,
        embed,
        head_loss::{self, Supervised, Tally},
        layernorm,
        matmul::Matrix,
    },
    observe::phase::{self, Moment},
};

use super::{
    Base, Config, Limits, Policy,
    activations::{ANY, Held},
    bindings::{Site, Wiring},
    block::{Block, Gradients, rows},
    buffers::{Inputs, Sizes},
    weight_streamer::{Flow, Input, Stage},
};

/// Trained values as a forward needs them.
#[derive(Clone, Copy)]
pub struct Trained<'a> {
    /// The flat store.
    pub values: View<'a>,
    /// Keys and values of the prefix `(p, 2 l c)`.
    pub prompt: Option<View<'a>>,
}

/// Losses of the supervised tokens of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LossSum {
    /// Their sum, in f64 over FP32 losses, in the order of the tokens.
    pub sum: f64,
    /// How many there are.
    pub tokens: usize,
}

/// How a training pass weighs and disturbs a micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct Pass {
    /// Factor of every token's gradient: one over the supervised tokens of the optimizer step.
    pub factor: f32,
    /// Label smoothing.
    pub smoothing: f32,
    /// Dropout in front of every A.
    pub dropout: Dropout,
}

impl Pass {
    /// Dropout of a micro-batch: rows are numbered within the step, so that cutting a batch into
    /// micro-batches changes no mask.
    pub fn dropout(p: f64, seed: u64, step: u64, first_row: usize, seq_len: usize, stride: usize) -> Dropout {
        let key = rng::key(&[seed, rng::name("dropout"), step]);
        Dropout { key, p: p as f32, first_row, seq_len: seq_len.max(1), stride }
    }
}

/// A base prepared for micro-batches up to a limit.
pub struct Stack {
    base: Arc<Base>,
    wiring: Wiring,
    limits: Limits,
    inputs: Inputs,
    held: Held,
    flow: Flow,
}

impl Stack {
    /// Prepares `base` with `wiring` for micro-batches up to `limits`; `training` adds what a backward
    /// needs. What it holds is cut from `arenas`.
    ///
    /// # Errors
    /// When rows are longer than the base's positions allow, or memory cannot be reserved.
    pub fn new(
        base: Arc<Base>,
        wiring: Wiring,
        limits: Limits,
        policy: Policy,
        training: bool,
        arenas: &mut Arenas,
    ) -> Result<Self> {
        check_length(&base, &wiring, limits.tokens)?;
        let (inputs, held) = Self::cut(&base.config, &wiring, limits, policy, training, arenas)?;
        let flow = Flow::new(policy, &base)?;
        Ok(Self { base, wiring, limits, inputs, held, flow })
    }

    /// The memory of a stack: all of what [`Stack::new`] holds beside the base.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    fn cut(
        config: &Config,
        wiring: &Wiring,
        limits: Limits,
        policy: Policy,
        training: bool,
        arenas: &mut Arenas,
    ) -> Result<(Inputs, Held)> {
        let sizes = Sizes { config, limits, activations: policy.activations };
        let inputs = arenas.build("data", Place::Memory, |arena| Inputs::cut(arena, limits))?;
        Ok((inputs, Held::cut(arenas, sizes, wiring, policy, training)?))
    }

    /// Counts the memory of a stack in `arenas` that plan; needs no base.
    ///
    /// # Errors
    /// None but those of `arenas`.
    pub fn plan(
        config: &Config,
        wiring: &Wiring,
        limits: Limits,
        policy: Policy,
        training: bool,
        arenas: &mut Arenas,
    ) -> Result<()> {
        Self::cut(config, wiring, limits, policy, training, arenas).map(|_| ())
    }

    /// The base it runs on.
    pub fn base(&self) -> &Arc<Base> {
        &self.base
    }

    /// Losses of a micro-batch, without gradients, dropout or smoothing.
    ///
    /// # Errors
    /// When the batch is larger than the limits, or a token is outside the vocabulary.
    pub fn loss(&mut self, trained: Trained, batch: &Batch) -> Result<LossSum> {
        let mut tally = Tally::default();
        let tokens = on_pool(|| self.losses(trained, batch, &mut tally))?;
        self.base.device.check()?;
        Ok(LossSum { sum: tally.sum(), tokens })
    }

    fn losses(&mut self, trained: Trained, batch: &Batch, tally: &mut Tally) -> Result<usize> {
        let supervised = self.upload(batch)?;
        if supervised == 0 {
            return Ok(0);
        }
        self.embed(batch);
        let base = Arc::clone(&self.base);
        let (n, c, layers) = (batch.ids.len(), base.config.width, base.config.layers);
        for layer in 0..layers {
            self.flow.enter(&base.weights, Stage::Block(layer), after(layer, layers), self.passed(layer));
            // One block's memory serves all layers.
            let (buffers, owned) = self.held.any_block()?;
            let block =
                block((&base, &self.flow), &self.wiring, &self.inputs, trained, layer, batch, Dropout::NONE);
            let (x, y, work) = self.held.step(layer);
            let saved = block.forward(rows!(x, n, c), buffers, work, None, rows!(mut y, n, c));
            self.held.give_back(ANY, saved.discard(), owned);
        }
        self.flow.enter(&base.weights, Stage::Head, None, self.passed(layers));
        let none = Pass { factor: 0.0, smoothing: 0.0, dropout: Dropout::NONE };
        self.head(batch, supervised, none, (false, tally));
        self.flow.leave(&base.weights, self.held.pages(layers));
        Ok(supervised)
    }

    /// Losses of a micro-batch, and the gradients of all trainables added to `to`.
    ///
    /// # Errors
    /// As [`Stack::loss`]; and when the stack was not made for training.
    pub fn loss_and_gradients(
        &mut self,
        trained: Trained,
        to: &mut Gradients,
        batch: &Batch,
        pass: Pass,
    ) -> Result<LossSum> {
        let mut tally = Tally::default();
        let tokens = self.accumulate(trained, to, batch, pass, &mut tally)?;
        self.base.device.check()?;
        Ok(LossSum { sum: tally.sum(), tokens })
    }

    /// As [`Stack::loss_and_gradients`], with the losses added to `tally`: a device is not waited for. Returns how
    /// many tokens are supervised.
    ///
    /// # Errors
    /// As [`Stack::loss_and_gradients`].
    pub fn accumulate(
        &mut self,
        trained: Trained,
        to: &mut Gradients,
        batch: &Batch,
        pass: Pass,
        tally: &mut Tally,
    ) -> Result<usize> {
        let supervised = self.upload(batch)?;
        if supervised == 0 {
            return Ok(0);
        }
        on_pool(|| {
            self.embed(batch);
            let layers = self.base.config.layers;
            let kept = self.forward(trained, batch, pass.dropout)?;
            let back_to = (self.wiring.lowest() < layers).then(|| Stage::Block(layers - 1));
            self.flow.enter(&self.base.weights, Stage::Head, back_to, self.passed(layers));
            phase::enter(Moment::Head);
            self.head(batch, supervised, pass, (true, tally));
            phase::enter(Moment::Backward);
            self.backward(trained, to, batch, pass.dropout, kept)?;
            Ok(supervised)
        })
    }

    /// Forward through all blocks, each keeping what the policy says.
    fn forward(&mut self, trained: Trained, batch: &Batch, dropout: Dropout) -> Result<Kept> {
        let (n, base) = (batch.ids.len(), Arc::clone(&self.base));
        let (c, layers) = (base.config.width, base.config.layers);
        phase::enter(Moment::Forward);
        for layer in 0..layers {
            self.flow.enter(&base.weights, Stage::Block(layer), after(layer, layers), self.passed(layer));
            let (buffers, owned) = self.held.block(layer)?;
            let block =
                block((&base, &self.flow), &self.wiring, &self.inputs, trained, layer, batch, dropout);
            let (x, y, work) = self.held.step(layer);
            let saved = block.forward(rows!(x, n, c), buffers, work, None, rows!(mut y, n, c));
            // What the layer owns keeps its content until the backward comes by.
            self.held.give_back(layer, saved.discard(), owned);
            self.held.send(layer, n * c);
        }
        Ok(Kept)
    }

    /// Backward through the blocks from the top to the lowest adapter.
    fn backward(
        &mut self,
        trained: Trained,
        to: &mut Gradients,
        batch: &Batch,
        dropout: Dropout,
        Kept: Kept,
    ) -> Result<()> {
        let (n, base) = (batch.ids.len(), Arc::clone(&self.base));
        let (c, lowest) = (base.config.width, self.wiring.lowest());
        for layer in (lowest..base.config.layers).rev() {
            let below = layer.checked_sub(1).filter(|&below| below >= lowest);
            let input = Input {
                release: self.held.pages(layer + 1),
                fetch: below.and_then(|below| self.held.pages(below)),
            };
            self.flow.enter(&base.weights, Stage::Block(layer), below.map(Stage::Block), input);
            if let Some(below) = below {
                self.held.fetch(below, n * c);
            }
            let block =
                block((&base, &self.flow), &self.wiring, &self.inputs, trained, layer, batch, dropout);
            let (buffers, owned) = self.held.block(layer)?;
            // A layer's own buffers tell what it kept; all others are made again.
            let keep = owned.keep();
            let (x, work, back) = self.held.back(layer).ok_or_else(lost)?;
            let x = rows!(x, n, c);
            let saved = block.again(x, buffers, work, keep);
            let buffers = block.backward(x, saved, work, back, to, layer > lowest);
            self.held.give_back(layer, buffers, owned);
        }
        self.flow.leave(&base.weights, self.held.pages(lowest));
        Ok(())
    }

    /// The input that the computation has behind it when it enters block `layer`.
    fn passed(&self, layer: usize) -> Input {
        Input { release: layer.checked_sub(1).and_then(|below| self.held.pages(below)), fetch: None }
    }

    fn embed(&mut self, batch: &Batch) {
        let (n, c) = (batch.ids.len(), self.base.config.width);
        let weights = &self.base.weights;
        let (ids, positions) = (self.inputs.ids.view().slice(0, n), self.inputs.positions.view().slice(0, n));
        self.flow.enter(&self.base.weights, Stage::Embed, Some(Stage::Block(0)), Input::default());
        let x = rows!(mut self.held.input_mut(0), n, c);
        embed::forward(ids, positions, weights.wte.view(), weights.wpe.view(), x);
    }

    /// Last layer norm, head and loss; with `gradient` also the gradient of the last block's output, of as many tokens.
    fn head(&mut self, batch: &Batch, supervised: usize, pass: Pass, (gradient, tally): (bool, &mut Tally)) {
        let (n, c) = (batch.ids.len(), self.base.config.width);
        let (config, weights) = (&self.base.config, &self.base.weights);
        let norm = layernorm::Norm {
            gain: weights.ln_f.gain.view(),
            bias: weights.ln_f.bias.view(),
            epsilon: config.layer_norm_eps,
        };
        let (x, work, space, back) = self.held.head();
        // The last block may have computed the supervised tokens alone.
        let all = wanted(&self.wiring, &self.inputs, config.layers - 1, batch, pass.dropout).is_none();
        let (n, rows) =
            if all { (n, Some(rows!(self.inputs.rows, supervised, 1))) } else { (supervised, None) };
        let x = rows!(x, n, c);
        layernorm::forward(x, norm, rows!(mut work.normed, n, c), rows!(mut space.stats, n, 2));
        let input = Supervised {
            hidden: rows!(work.normed, n, c),
            rows,
            targets: rows!(self.inputs.targets, supervised, 1),
            smoothing: pass.smoothing,
        };
        let chunk = head_loss::Work { gathered: space.gathered.view_mut(), logits: work.room.logits() };
        let losses = rows!(mut space.losses, supervised, 1);
        let head = head_matrix(&self.base);
        match back.filter(|_| gradient) {
            None => head_loss::forward_backward(input, head, chunk, losses, None),
            Some(back) => {
                let d_normed = rows!(mut back.narrow, n, c);
                head_loss::forward_backward(input, head, chunk, losses, Some((d_normed, pass.factor)));
                rows!(mut back.grad, n, c).clear();
                let (d_normed, stats) = (rows!(back.narrow, n, c), rows!(space.stats, n, 2));
                layernorm::backward(d_normed, x, stats, norm, rows!(mut back.grad, n, c));
            }
        }
        tally.add(rows!(space.losses, supervised, 1));
    }

    /// Brings a micro-batch to the device; returns how many tokens are supervised.
    fn upload(&mut self, batch: &Batch) -> Result<usize> {
        if batch.rows > self.limits.rows || batch.seq_len > self.limits.tokens {
            return Err(Error::failed(format!(
                "a micro-batch of {} x {} tokens is larger than the {} x {} that memory was planned for; please report this",
                batch.rows, batch.seq_len, self.limits.rows, self.limits.tokens
            )));
        }
        let config = &self.base.config;
        let vocab = config.vocab;
        let outside = batch.ids.iter().copied().find(|&id| id as usize >= vocab);
        let target = batch
            .targets
            .iter()
            .copied()
            .find(|&t| t != NO_LOSS && !(0..vocab as i64).contains(&i64::from(t)));
        if let Some(id) = outside.map(i64::from).or(target.map(i64::from)) {
            return Err(Error::input(format!(
                "token {id} is outside the vocabulary of {vocab} of base {}; tokenise the data for this base",
                self.base.name
            )));
        }
        // Positions of text start behind the prefix.
        let shift = self.wiring.prefix_len() as u32;
        let positions: Vec<u32> = batch.positions.iter().map(|position| position + shift).collect();
        let supervised: Vec<u32> = (0u32..)
            .zip(&batch.targets)
            .filter(|(_, target)| **target != NO_LOSS)
            .map(|(row, _)| row)
            .collect();
        let targets: Vec<i32> = batch.targets.iter().copied().filter(|&target| target != NO_LOSS).collect();
        self.inputs.ids.view_mut().upload(&batch.ids);
        self.inputs.positions.view_mut().upload(&positions);
        self.inputs.starts.view_mut().upload(&batch.starts);
        self.inputs.rows.view_mut().upload(&supervised);
        self.inputs.targets.view_mut().upload(&targets);
        Ok(supervised.len())
    }
}

/// The activations that a forward left in its stack, to be consumed by the backward.
#[must_use = "activations that nobody differentiates were kept for nothing"]
struct Kept;

/// What the computation goes on to after block `layer` of `layers`.
fn after(layer: usize, layers: usize) -> Option<Stage> {
    Some(if layer + 1 < layers { Stage::Block(layer + 1) } else { Stage::Head })
}

/// Only an earlier error in the middle of a pass can leave memory unaccounted for.
pub(super) fn lost() -> Error {
    Error::failed("an earlier failure left the model without workspace; start again")
}

/// The head: its own matrix, or the token embedding `(v, c)`.
pub(super) fn head_matrix(base: &Base) -> Matrix<'_> {
    base.weights.head().view()
}

/// Rows of `tokens` behind the prefix must fit the position embedding.
pub(super) fn check_length(base: &Base, wiring: &Wiring, tokens: usize) -> Result<()> {
    let (positions, prefix) = (base.config.positions, wiring.prefix_len());
    if tokens + prefix <= positions {
        return Ok(());
    }
    let behind = if prefix == 0 { String::new() } else { format!(" behind a prefix of {prefix}") };
    Err(Error::input(format!(
        "a row of {tokens} tokens{behind} is longer than the {positions} positions of base {}; use --seq-len {} or less",
        base.name,
        positions.saturating_sub(prefix)
    )))
}

/// Block `layer` as it sees this micro-batch.
fn block<'a>(
    (base, flow): (&'a Base, &'a Flow),
    wiring: &'a Wiring,
    inputs: &'a Inputs,
    trained: Trained<'a>,
    layer: usize,
    batch: &Batch,
    dropout: Dropout,
) -> Block<'a> {
    Block {
        config: &base.config,
        layer,
        weights: flow.block(&base.weights, layer),
        deltas: &wiring.layers[layer],
        values: trained.values,
        prompt: trained.prompt.map(|prompt| (prompt, wiring.prefix_len())),
        starts: inputs.starts.view().slice(0, batch.ids.len()),
        rows: batch.rows,
        tokens: batch.seq_len,
        dropout,
        wanted: wanted(wiring, inputs, layer, batch, dropout),
        count: None,
    }
}

/// The tokens whose output of block `layer` anything reads: the supervised ones of the last block; `None` where that is
/// (nearly) all. Elements that dropout drops are numbered by where a token stands in the batch, so it sees all.
fn wanted<'a>(
    wiring: &Wiring,
    inputs: &'a Inputs,
    layer: usize,
    batch: &Batch,
    dropout: Dropout,
) -> Option<View<'a>> {
    let behind = [Site::AttnProj, Site::CFc, Site::MlpProj];
    let drops = dropout.p > 0.0 && behind.iter().any(|&site| !wiring.layers[layer][site as usize].is_empty());
    if layer + 1 < wiring.layers.len() || drops {
        return None;
    }
    let (m, n) = (batch.supervised(), batch.ids.len());
    // Copying rows to and fro costs a few percent of what a block costs behind attention.
    (m * 8 <= n * 7).then(|| inputs.rows.view().slice(0, m))
}
