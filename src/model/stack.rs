//! The whole model: embedding, blocks, head and loss, forwards and backwards over planned buffers.

use std::sync::Arc;

use engraft_util::rng;

use crate::{
    data::{Batch, NO_LOSS},
    device::{
        View, ViewMut,
        arena::{Arenas, Placement},
        cpu::on_pool,
    },
    error::{Error, Result},
    kernels::{
        adapted_linear::Dropout,
        embed,
        head_loss::{self, Supervised, Tally},
        layernorm,
        matmul::Matrix,
        noise::Noise,
    },
    observe::phase::{self, Phase},
};

use super::{
    Base, Config, Limits, Policy,
    activations::ActivationBuffers,
    arch::Site,
    bindings::{AdapterBindings, LayerSites},
    block::{Gradients, rows},
    buffers::{Inputs, Sizes},
    layers::{Layers, MicroBatch, RowGroup, last_norm},
    output_scales::OutputScales,
    weight_streamer::{Stage, WeightStreamer},
};

/// Trained values as a forward needs them.
#[derive(Clone, Copy)]
pub struct Trained<'a> {
    /// The flat store of all trainables.
    pub values: View<'a>,
    /// Keys and values of the prefix `(p, 2 l c)`.
    pub prefix: Option<View<'a>>,
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
    /// Part of the target probability that is spread over the vocabulary.
    pub smoothing: f32,
    /// Dropout in front of every A.
    pub dropout: Dropout,
    /// Noise on the embeddings.
    pub noise: Noise,
}

impl Pass {
    /// Dropout of a micro-batch: rows are numbered within the step, so that cutting a batch into
    /// micro-batches changes no mask.
    pub fn dropout(p: f64, seed: u64, step: u64, first_row: usize, seq_len: usize, stride: usize) -> Dropout {
        let key = rng::key(&[seed, rng::name("dropout"), step]);
        Dropout { key, p: p as f32, first_row, seq_len: seq_len.max(1), stride }
    }

    /// Noise of up to `magnitude` on the embeddings of a micro-batch, whose rows are numbered as for its dropout.
    pub fn noise(magnitude: f32, rows: Dropout, seed: u64, step: u64, vocab: usize) -> Noise {
        let key = rng::key(&[seed, rng::name("neftune"), step]);
        let Dropout { first_row, seq_len, stride, .. } = rows;
        Noise { key, magnitude, first_row, seq_len, stride, vocab }
    }
}

/// A base prepared for micro-batches up to a limit.
pub struct Stack {
    layers: Layers,
    bindings: AdapterBindings,
    limits: Limits,
    inputs: Inputs,
}

impl Stack {
    /// Prepares `base` with `bindings` for micro-batches up to `limits`; `training` adds what a backward
    /// needs. What it holds is cut from `arenas`.
    ///
    /// # Errors
    /// When rows are longer than the base's positions allow, or memory cannot be reserved.
    pub fn new(
        base: Arc<Base>,
        bindings: AdapterBindings,
        limits: Limits,
        policy: Policy,
        training: bool,
        arenas: &mut Arenas,
    ) -> Result<Self> {
        check_length(&base, &bindings, limits.tokens.saturating_sub(bindings.prompt_len()))?;
        let (inputs, buffers) = Self::cut(&base.config, &bindings, limits, policy, training, arenas)?;
        let streamer = WeightStreamer::new(policy, &base)?;
        Ok(Self { layers: Layers { base, buffers, streamer }, bindings, limits, inputs })
    }

    /// The memory of a stack: all of what [`Stack::new`] holds beside the base.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    fn cut(
        config: &Config,
        bindings: &AdapterBindings,
        limits: Limits,
        policy: Policy,
        training: bool,
        arenas: &mut Arenas,
    ) -> Result<(Inputs, ActivationBuffers)> {
        let sizes = Sizes { config, limits, activations: policy.activations };
        let by_id = training && bindings.embedding.trains();
        let inputs = arenas.build("data", Placement::Memory, |arena| Inputs::cut(arena, limits, by_id))?;
        Ok((inputs, ActivationBuffers::cut(arenas, sizes, &[bindings], policy, training)?))
    }

    /// Counts the memory of a stack in `arenas` that plan; needs no base.
    ///
    /// # Errors
    /// None but those of `arenas`.
    pub fn plan(
        config: &Config,
        bindings: &AdapterBindings,
        limits: Limits,
        policy: Policy,
        training: bool,
        arenas: &mut Arenas,
    ) -> Result<()> {
        Self::cut(config, bindings, limits, policy, training, arenas).map(|_| ())
    }

    /// The base it runs on.
    pub fn base(&self) -> &Arc<Base> {
        &self.layers.base
    }

    /// Brings the output scales at the end of the flat store up to date with the values before them.
    pub fn derive(&mut self, scales: &mut OutputScales, store: ViewMut) {
        let Layers { base, streamer, .. } = &mut self.layers;
        scales.derive(base, streamer, &self.bindings, store);
    }

    /// The adapters that it was prepared with.
    pub fn bindings(&self) -> &AdapterBindings {
        &self.bindings
    }

    /// Losses of a micro-batch, without gradients, dropout or smoothing.
    ///
    /// # Errors
    /// When the batch is larger than the limits, or a token is outside the vocabulary.
    pub fn loss(&mut self, trained: Trained, batch: &Batch) -> Result<LossSum> {
        let mut tally = Tally::default();
        let tokens = on_pool(|| self.losses(trained, batch, &mut tally))?;
        self.layers.base.device.check()?;
        Ok(LossSum { sum: tally.sum(), tokens })
    }

    fn losses(&mut self, trained: Trained, batch: &Batch, tally: &mut Tally) -> Result<usize> {
        let supervised = self.upload(batch)?;
        if supervised == 0 {
            return Ok(0);
        }
        let groups = [group(&self.bindings, trained, batch)];
        let micro = micro_batch(&self.bindings, &self.inputs, &groups, batch, None);
        self.layers.forward_only(micro, Some(Stage::Head), None)?;
        let (base, layers) = (Arc::clone(&self.layers.base), self.bindings.layers.len());
        self.layers.streamer.enter(&base.weights, Stage::Head, None, self.layers.passed(layers));
        head(&mut self.layers, &self.inputs, micro, supervised, None, tally);
        self.layers.streamer.leave(&base.weights, self.layers.buffers.pages(layers));
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
        self.layers.base.device.check()?;
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
            let groups = [group(&self.bindings, trained, batch)];
            let micro = micro_batch(&self.bindings, &self.inputs, &groups, batch, Some(pass));
            phase::enter(Phase::Forward);
            let kept = self.layers.forward_keeping(micro, Stage::Head)?;
            let (layers, lowest) = (self.bindings.layers.len(), self.bindings.lowest());
            let back_to = (lowest < layers).then(|| Stage::Block(layers - 1));
            let base = Arc::clone(&self.layers.base);
            self.layers.streamer.enter(&base.weights, Stage::Head, back_to, self.layers.passed(layers));
            phase::enter(Phase::Head);
            head(&mut self.layers, &self.inputs, micro, supervised, Some((pass, &mut *to)), tally);
            phase::enter(Phase::Backward);
            self.layers.backward(micro, to, lowest, kept)?;
            Ok(supervised)
        })
    }

    /// Brings a micro-batch to the device; returns how many tokens are supervised.
    fn upload(&mut self, batch: &Batch) -> Result<usize> {
        if batch.rows > self.limits.rows || batch.seq_len > self.limits.tokens {
            return Err(Error::failed(format!(
                "a micro-batch of {} x {} tokens is larger than the {} x {} that memory was planned for; please report this",
                batch.rows, batch.seq_len, self.limits.rows, self.limits.tokens
            )));
        }
        let config = &self.layers.base.config;
        let vocab = config.vocab;
        let prompt = self.bindings.prompt_len();
        // A virtual token has one place in its document.
        let known = |id: u32, position: u32| match (id as usize).checked_sub(vocab) {
            None => true,
            Some(index) => index < prompt && index == position as usize,
        };
        let mut cells = batch.ids.iter().zip(&batch.positions);
        let outside = cells.find(|(id, position)| !known(**id, **position)).map(|(id, _)| *id);
        let target = batch
            .targets
            .iter()
            .copied()
            .find(|&t| t != NO_LOSS && !(0..vocab as i64).contains(&i64::from(t)));
        if let Some(id) = outside.map(i64::from).or(target.map(i64::from)) {
            return Err(Error::input(format!(
                "token {id} is outside the vocabulary of {vocab} of base {}; tokenise the data for this base",
                self.layers.base.name
            )));
        }
        let without = batch.ids.chunks(batch.seq_len.max(1)).find(|row| row[0] as usize != vocab);
        if let (1.., Some(row)) = (prompt, without) {
            return Err(Error::failed(format!(
                "a row begins with token {} instead of the {prompt} virtual tokens of the prompt; prepare rows with a \
                 prompt of {prompt}",
                row[0]
            )));
        }
        // Positions of text start after the prefix.
        let shift = self.bindings.prefix_len() as u32;
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
        if let Some(by_id) = &mut self.inputs.by_id {
            by_id.view_mut().upload(&embed::by_id(&batch.ids));
        }
        Ok(supervised.len())
    }
}

/// The head: its own matrix, or the token embedding `(v, c)`.
pub(super) fn head_matrix(base: &Base) -> Matrix<'_> {
    base.weights.head().view()
}

/// Rows of `tokens` after the prefix and the prompt must fit the position embedding.
pub(super) fn check_length(base: &Base, bindings: &AdapterBindings, tokens: usize) -> Result<()> {
    let (positions, prefix, prompt) = (base.config.positions, bindings.prefix_len(), bindings.prompt_len());
    if tokens + prefix + prompt <= positions {
        return Ok(());
    }
    let after = match (prefix, prompt) {
        (0, 0) => String::new(),
        (_, 0) => format!(" after a prefix of {prefix}"),
        (0, _) => format!(" after a prompt of {prompt} virtual tokens"),
        _ => format!(" after a prefix of {prefix} and a prompt of {prompt} virtual tokens"),
    };
    Err(Error::input(format!(
        "a row of {tokens} tokens{after} is longer than the {positions} positions of base {}; use --seq-len {} or less",
        base.name,
        positions.saturating_sub(prefix + prompt)
    )))
}

/// All rows of a micro-batch: they are of one length and have the same adapters.
fn group<'a>(bindings: &'a AdapterBindings, trained: Trained<'a>, batch: &Batch) -> RowGroup<'a> {
    RowGroup {
        first: 0,
        batch: batch.rows,
        tokens: batch.seq_len,
        wanted: 0..batch.supervised(),
        embedding: &bindings.embedding,
        sites: &bindings.layers,
        norms: &bindings.norms,
        values: trained.values,
        prefix: trained.prefix.map(|prefix| (prefix, bindings.prefix_len())),
        cached: None,
    }
}

/// A micro-batch that was uploaded to `inputs`.
fn micro_batch<'a>(
    bindings: &AdapterBindings,
    inputs: &'a Inputs,
    groups: &'a [RowGroup<'a>],
    batch: &Batch,
    pass: Option<Pass>,
) -> MicroBatch<'a> {
    let n = batch.ids.len();
    let (dropout, noise) = pass.map_or((Dropout::NONE, Noise::NONE), |pass| (pass.dropout, pass.noise));
    MicroBatch {
        ids: rows!(inputs.ids, n, 1),
        positions: rows!(inputs.positions, n, 1),
        starts: rows!(inputs.starts, n, 1),
        by_id: inputs.by_id.as_ref().map(|by_id| rows!(by_id, n, 1)),
        groups,
        wanted: wanted(bindings, inputs, batch, dropout),
        dropout,
        noise,
    }
}

/// Last norm, head and loss of a micro-batch and its number of supervised tokens; in a training pass also the gradients
/// of the last norm, and that of the last block's output, of as many tokens.
fn head(
    layers: &mut Layers,
    inputs: &Inputs,
    batch: MicroBatch,
    supervised: usize,
    training: Option<(Pass, &mut Gradients)>,
    tally: &mut Tally,
) {
    let (n, c, base) = (batch.outputs(), layers.base.config.width, Arc::clone(&layers.base));
    layers.last_norm(batch);
    let (x, workspace, space, back) = layers.buffers.head();
    let input = Supervised {
        hidden: rows!(workspace.normed, n, c),
        // The last block may have computed the supervised tokens alone.
        rows: if batch.wanted.is_none() { Some(rows!(inputs.rows, supervised, 1)) } else { None },
        targets: rows!(inputs.targets, supervised, 1),
        smoothing: training.as_ref().map_or(0.0, |(pass, _)| pass.smoothing),
    };
    let chunk =
        head_loss::HeadScratch { gathered: space.gathered.view_mut(), logits: workspace.shared.logits() };
    let losses = rows!(mut space.losses, supervised, 1);
    let matrix = head_matrix(&base);
    match back.zip(training) {
        None => head_loss::forward_backward(input, matrix, chunk, losses, None),
        Some((back, (pass, to))) => {
            let d_normed = rows!(mut back.narrow, n, c);
            head_loss::forward_backward(input, matrix, chunk, losses, Some((d_normed, pass.factor)));
            rows!(mut back.grad, n, c).clear();
            let (d_normed, x, stats) = (rows!(back.narrow, n, c), rows!(x, n, c), rows!(space.stats, n, 2));
            // A backward has one group.
            let group = &batch.groups[0];
            group.norms.last.gradients(d_normed, x, stats, to.store.reborrow());
            layernorm::backward(d_normed, x, stats, last_norm(&base, group), rows!(mut back.grad, n, c));
        }
    }
    tally.add(rows!(space.losses, supervised, 1));
}

/// The tokens whose output of the last block anything reads: the supervised ones; `None` where that is (nearly) all.
/// Elements that dropout drops are numbered by where a token stands in the batch, so it sees all.
fn wanted<'a>(
    bindings: &AdapterBindings,
    inputs: &'a Inputs,
    batch: &Batch,
    dropout: Dropout,
) -> Option<View<'a>> {
    let after_attention = [Site::AttnProj, Site::CFc, Site::MlpProj];
    let adapted =
        |last: &LayerSites| after_attention.iter().any(|&site| !last[site as usize].deltas.is_empty());
    if dropout.p > 0.0 && bindings.layers.last().is_some_and(adapted) {
        return None;
    }
    let (m, n) = (batch.supervised(), batch.ids.len());
    // Copying rows to and fro costs a few percent of the time of a block after its attention.
    (m * 8 <= n * 7).then(|| inputs.rows.view().slice(0, m))
}
