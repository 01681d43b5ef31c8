//! One optimizer step over micro-batches, and evaluation: the engine of a training run.

use std::{borrow::Cow, sync::Arc};

use engraft_adapters::AdapterSet;

use super::{
    before_update::{BeforeUpdate, PendingUpdate},
    evaluator::{Evaluation, evaluate},
};
use crate::{
    data::Batch,
    device::{
        Buffer,
        DType::{F16, F32},
        Device,
        arena::{Arenas, Placement, TableRow},
        cpu::on_pool,
    },
    error::{Error, Result},
    kernels::{head_loss::Tally, noise},
    model::{
        AdapterBindings, Base, BaseDType, Config, Gradients, Limits, LossSum, OutputScales, Pass, Policy,
        PrefixState, Stack, Trained, derived_ranks,
        not_finite::remedy_in_training,
        scratch::{self, FactorTypes, ScratchNeeds},
    },
    observe::phase::{self, Phase},
    optim::{
        AdamWOptions, LossScale, Optimizer, OptimizerKind, RankAllocator, SavedTensor, StateTensor, upload,
    },
};

/// Name of the trainable values among the tensors of a save.
pub const VALUES: &str = "values";

/// Sizes, policy and optimizer of a [`Trainer`].
#[derive(Debug, Clone, Copy)]
pub struct TrainerOptions {
    /// Most sequences of a micro-batch.
    pub rows: usize,
    /// Tokens of the longest row, those of a prompt included.
    pub seq_len: usize,
    /// Which activations are kept and which are computed again.
    pub policy: Policy,
    /// Element type of the moments.
    pub optimizer: OptimizerKind,
    /// Betas, eps and decay.
    pub adamw: AdamWOptions,
    /// Largest global gradient norm; 0 for any.
    pub clip: f64,
    /// Part of the target probability spread over the vocabulary.
    pub label_smoothing: f64,
    /// Alpha of the noise on the embeddings; 0 for none.
    pub neftune: f64,
    /// Seed of dropout masks and noise.
    pub seed: u64,
}

impl TrainerOptions {
    fn limits(&self) -> Limits {
        Limits { rows: self.rows, tokens: self.seq_len }
    }

    /// The sizes that scratch depends on, for `set` on a base of `config`.
    pub fn needs<'a>(&self, config: &'a Config, set: &AdapterSet) -> ScratchNeeds<'a> {
        ScratchNeeds {
            config,
            rows: self.rows * self.seq_len,
            batch: self.rows,
            keys: self.seq_len + set.prefix.as_ref().map_or(0, |prefix| prefix.length),
            // The gradient of a vector takes as much as that of rank 1.
            rank: set.loras.iter().map(|lora| lora.rank).max().unwrap_or(0).max(set.vectors.len().min(1)),
            embedding_rank: set.embedding.as_ref().map_or(0, |delta| delta.rank),
            dropout: set.dropout() > 0.0,
            scaled_deltas: set.loras.iter().any(|lora| lora.d.is_some() || lora.e.is_some()),
            derived_ranks: derived_ranks(set),
            trained_norms: !set.norms.is_empty(),
        }
    }

    /// Bytes of scratch that the kernels of a device share, for a base kept as `base`.
    pub fn device_scratch(&self, config: &Config, base: BaseDType, set: &AdapterSet) -> usize {
        let types = FactorTypes { activations: self.policy.activations, base };
        scratch::training(self.needs(config, set), types, set.layout.len)
    }
}

/// The numbers of one optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepReport {
    /// Mean loss over the supervised tokens of the step.
    pub loss: f64,
    /// Global L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Supervised tokens of the step.
    pub tokens: usize,
    /// Input tokens, padding included.
    pub input_tokens: usize,
    /// The loss scale after the step, and how often gradients overflowed so far.
    pub scale: LossScale,
}

/// The flat store of trained values, with its gradient and the optimizer's memory.
struct Trainables {
    prefix: Option<PrefixState>,
    scales: Option<OutputScales>,
    store: Buffer,
    gradient: Buffer,
    optimizer: Optimizer,
    allocator: Option<RankAllocator>,
}

impl Trainables {
    fn cut(
        config: &Config,
        bindings: &AdapterBindings,
        set: &AdapterSet,
        options: TrainerOptions,
        arenas: &mut Arenas,
    ) -> Result<Self> {
        let len = bindings.store_len();
        let prefix = PrefixState::new(bindings, config, options.policy.activations, true, arenas)?;
        let (store, gradient) = arenas.build("trainables", Placement::Memory, |arena| {
            Ok((arena.take("values", F32, &[len])?, arena.take("gradient", F32, &[len])?))
        })?;
        let scales = OutputScales::new(bindings, arenas)?;
        let segments = set.layout.segments();
        let TrainerOptions { optimizer, adamw, policy, .. } = options;
        let optimizer = Optimizer::new(optimizer, &segments, adamw, policy.moments, arenas)?;
        let allocator = RankAllocator::new(set, arenas)?;
        Ok(Self { prefix, scales, store, gradient, optimizer, allocator })
    }
}

/// What is the same for all micro-batches of a step.
#[derive(Clone, Copy)]
struct StepFactors {
    /// Factor of every token's gradient.
    factor: f32,
    /// Largest noise on the embeddings.
    noise: f32,
}

/// A frozen base, an adapter and an optimizer.
pub struct Trainer {
    set: AdapterSet,
    stack: Stack,
    /// The flat store: trained values, and after them what is derived from them.
    values: Buffer,
    /// Gradient of the whole store.
    gradient: Buffer,
    prefix: Option<PrefixState>,
    scales: Option<OutputScales>,
    /// Whether values have changed since scales were derived.
    stale: bool,
    optimizer: Optimizer,
    allocator: Option<RankAllocator>,
    options: TrainerOptions,
    dropout: f64,
    table: Vec<TableRow>,
    scale: LossScale,
    /// Factor by which the gradient in its buffer is too large.
    gradient_scale: f64,
    hooks: Vec<Box<dyn BeforeUpdate>>,
}

impl Trainer {
    /// Prepares training of `set` from `values` on `base`, in memory from `arenas`.
    ///
    /// # Errors
    /// When rows are longer than the positions of the base, or memory cannot be reserved.
    pub fn new(
        base: Arc<Base>,
        set: AdapterSet,
        values: &[f32],
        options: TrainerOptions,
        mut arenas: Arenas,
    ) -> Result<Self> {
        let bindings = AdapterBindings::new(&[(&set, 1.0)], base.config.layers)?;
        let len = set.layout.len;
        if values.len() != len {
            return Err(Error::failed(format!(
                "{} values for {len} trainables; please report this",
                values.len()
            )));
        }
        let Trainables { prefix, scales, mut store, gradient, optimizer, allocator } =
            Trainables::cut(&base.config, &bindings, &set, options, &mut arenas)?;
        store.view_mut().upload(values);
        base.device.reserve(options.device_scratch(&base.config, base.dtype, &set))?;
        let scale = if options.policy.activations == F16 { LossScale::dynamic() } else { LossScale::NONE };
        let stack = Stack::new(base, bindings, options.limits(), options.policy, true, &mut arenas)?;
        let dropout = set.dropout();
        let table = arenas.into_rows();
        let mut trainer = Self {
            set,
            stack,
            values: store,
            gradient,
            prefix,
            scales,
            stale: true,
            optimizer,
            allocator,
            options,
            dropout,
            table,
            scale,
            gradient_scale: 1.0,
            hooks: Vec::new(),
        };
        trainer.refresh();
        Ok(trainer)
    }

    /// Every buffer that a trainer of `set` on a base of `config` would hold; needs neither.
    ///
    /// # Errors
    /// When the set brings more than one prefix.
    pub fn plan(config: &Config, set: &AdapterSet, options: TrainerOptions) -> Result<Vec<TableRow>> {
        let bindings = AdapterBindings::new(&[(set, 1.0)], config.layers)?;
        let mut arenas = Arenas::planning();
        Trainables::cut(config, &bindings, set, options, &mut arenas)?;
        Stack::plan(config, &bindings, options.limits(), options.policy, true, &mut arenas)?;
        Ok(arenas.into_rows())
    }

    /// One optimizer step over all of `micro_batches`; every supervised token counts the same.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, nothing is supervised, the gradient is not finite, or a device
    /// fails; the adapter is then as before, unless the device is lost.
    pub fn step(&mut self, micro_batches: &[Batch], lr: f64) -> Result<StepReport> {
        let step = self.steps_done() + 1;
        let (losses, grad_norm) = loop {
            let losses = self.accumulate(micro_batches)?;
            if !losses.sum.is_finite() {
                return Err(Error::failed(format!(
                    "the loss of step {step} is not finite ({}); {}{}",
                    losses.sum,
                    remedy_in_training(&self.set, step - 1),
                    if self.scale.is_dynamic() { ", or give --precision bf16 or f32" } else { "" }
                )));
            }
            let (scale, clip) = (self.gradient_scale, self.options.clip);
            phase::enter(Phase::Update);
            self.before_update(step, losses.tokens)?;
            let len = self.set.layout.len;
            let norm = on_pool(|| {
                let (values, gradient) = (self.values.view_mut(), self.gradient.view_mut());
                self.optimizer.update(values.slice(0, len), gradient.slice(0, len), lr, clip, scale)
            });
            self.stale = true;
            self.stack.base().device.check()?;
            if norm.is_finite() {
                self.allocate_ranks(step - 1, Optimizer::factor(norm, clip, scale))?;
                self.scale.succeeded();
                break (losses, norm);
            }
            self.scale.overflowed(step, norm, &remedy_in_training(&self.set, step - 1))?;
        };
        self.refresh();
        Ok(StepReport {
            loss: losses.sum / losses.tokens as f64,
            grad_norm,
            tokens: losses.tokens,
            input_tokens: micro_batches.iter().map(|batch| batch.ids.len()).sum(),
            scale: self.scale,
        })
    }

    /// Has `hook` called in every step between backward and update, after those that are there.
    pub fn add_hook(&mut self, hook: Box<dyn BeforeUpdate>) {
        self.hooks.push(hook);
    }

    /// Calls the hooks with the flat gradient and the number of supervised tokens: the one place between
    /// backward and update.
    fn before_update(&mut self, step: u64, supervised: usize) -> Result<()> {
        let len = self.set.layout.len;
        for hook in &mut self.hooks {
            hook.before_update(PendingUpdate {
                gradient: self.gradient.view_mut().slice(0, len),
                values: self.values.view_mut().slice(0, len),
                layout: &self.set.layout,
                supervised,
                step,
                gradient_scale: self.gradient_scale,
            })?;
        }
        Ok(())
    }

    /// Takes the update after `before` others into account where ranks are allocated; `factor` is that of its gradient.
    fn allocate_ranks(&mut self, before: u64, factor: f64) -> Result<()> {
        let Some(allocator) = &mut self.allocator else { return Ok(()) };
        let len = self.set.layout.len;
        let (values, gradient) = (self.values.view_mut().slice(0, len), self.gradient.view().slice(0, len));
        on_pool(|| allocator.after_update(before, values, gradient, factor));
        self.stack.base().device.check()
    }

    /// The gradient of the mean loss over the supervised tokens of `micro_batches`, and of the penalty that a method adds
    /// to it, left in place; returns the sum of the losses, without the penalty.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn accumulate(&mut self, micro_batches: &[Batch]) -> Result<LossSum> {
        let supervised: usize = micro_batches.iter().map(Batch::supervised).sum();
        if supervised == 0 {
            return Err(Error::input("a batch has no supervised token; check the labels of the data"));
        }
        self.gradient.view_mut().clear();
        self.refresh();
        if self.scales.is_some() {
            phase::enter(Phase::Forward);
            self.derive();
        }
        self.gradient_scale = self.scale.factor();
        let factor = self.gradient_scale as f32 / supervised as f32;
        let (mut tally, mut tokens) = (Tally::default(), 0);
        // As if the rows of a step were one batch, which is padded to its longest row.
        let longest = micro_batches.iter().map(|batch| batch.seq_len).max().unwrap_or(0);
        let noise = noise::magnitude(self.options.neftune, longest, self.stack.base().config.width);
        let mut first_row = 0;
        for batch in micro_batches {
            tokens += self.micro_batch(batch, StepFactors { factor, noise }, first_row, &mut tally)?;
            first_row += batch.rows;
        }
        if let Some(prefix) = &mut self.prefix {
            prefix.backward(self.values.view(), self.gradient.view_mut());
        }
        if let Some(scales) = &self.scales {
            scales.backward(self.stack.bindings(), self.gradient.view_mut());
        }
        if let Some(allocator) = &mut self.allocator {
            let (values, gradient) = (self.values.view(), self.gradient.view_mut());
            on_pool(|| allocator.add_penalty(values, gradient, self.gradient_scale));
        }
        // The losses of all micro-batches are read here, once a step.
        self.stack.base().device.check()?;
        Ok(LossSum { sum: tally.sum(), tokens })
    }

    fn micro_batch(
        &mut self,
        batch: &Batch,
        factors: StepFactors,
        first_row: usize,
        tally: &mut Tally,
    ) -> Result<usize> {
        let TrainerOptions { seed, seq_len, label_smoothing, .. } = self.options;
        let step = self.optimizer.step();
        let dropout = Pass::dropout(self.dropout, seed, step, first_row, batch.seq_len, seq_len);
        let noise = Pass::noise(factors.noise, dropout, seed, step, self.stack.base().config.vocab);
        let pass = Pass { factor: factors.factor, smoothing: label_smoothing as f32, dropout, noise };
        let values = self.values.view();
        // The gradient of a prefix is written while its values are read: two buffers of one struct.
        let (prefix, d_prefix) = match &mut self.prefix {
            None => (None, <&mut [f32]>::default().into()),
            Some(prefix) => {
                let (view, gradient) = prefix.parts(values);
                (Some(view), gradient)
            }
        };
        let mut to = Gradients { store: self.gradient.view_mut(), prefix: d_prefix };
        self.stack.accumulate(Trained { values, prefix }, &mut to, batch, pass, tally)
    }

    /// Mean loss over `batches`, without dropout or smoothing; changes nothing.
    ///
    /// # Errors
    /// When a token is outside the vocabulary or nothing is supervised.
    pub fn evaluate(&mut self, batches: &mut dyn Iterator<Item = Batch>) -> Result<Evaluation> {
        self.derive();
        let values = self.values.view();
        let prefix = self.prefix.as_ref().map(|prefix| prefix.view(values));
        let remedy = || remedy_in_training(&self.set, self.optimizer.step());
        evaluate(&mut self.stack, Trained { values, prefix }, batches, remedy)
    }

    /// Number of optimizer steps done.
    pub fn steps_done(&self) -> u64 {
        self.optimizer.step()
    }

    /// Everything that training changes, except the count of steps: the values, then the
    /// optimizer's state, by name. Views of the buffers, for a resume file.
    pub fn tensors(&self) -> Vec<StateTensor<'_>> {
        let values = self.values.view().slice(0, self.set.layout.len);
        let mut tensors = vec![(VALUES, values, self.values.part(0..self.set.layout.len))];
        tensors.extend(self.optimizer.tensors());
        tensors.extend(self.allocator.iter().flat_map(RankAllocator::tensors));
        tensors
    }

    /// Goes on from the [`Trainer::tensors`] saved after `step` steps.
    ///
    /// # Errors
    /// When they belong to another number of trainables or another optimizer; nothing is changed then.
    pub fn restore(&mut self, step: u64, tensors: &[SavedTensor]) -> Result<()> {
        let len = self.set.layout.len;
        let Some((values, moments)) = tensors.split_first().filter(|(values, _)| values.name == VALUES)
        else {
            return Err(Error::input(format!("the save does not begin with {VALUES}; use another save")));
        };
        if values.dtype != F32 || values.bytes.len() != len * F32.size() {
            return Err(Error::input(format!(
                "the save holds {} trainables where this adapter has {len}; resume with the options it was made with",
                values.bytes.len() / F32.size()
            )));
        }
        let own = self.allocator.as_ref().map_or(0, |it| it.tensors().len()).min(moments.len());
        let (moments, allocation) = moments.split_at(moments.len() - own);
        if let Some(allocator) = &self.allocator {
            allocator.check(allocation)?;
        }
        self.optimizer.restore(step, moments)?;
        if let Some(allocator) = &mut self.allocator {
            allocator.restore(allocation);
        }
        upload(&mut self.values, values);
        self.stale = true;
        self.refresh();
        Ok(())
    }

    /// The device of the base and of all buffers.
    pub fn device(&self) -> Device {
        self.stack.base().device
    }

    /// The frozen base that it trains on.
    pub fn base(&self) -> &Arc<Base> {
        self.stack.base()
    }

    /// The adapter set being trained.
    pub fn set(&self) -> &AdapterSet {
        &self.set
    }

    /// The trained values, in the order of the set's layout.
    pub fn values(&self) -> Cow<'_, [f32]> {
        let view = self.values.view().slice(0, self.set.layout.len);
        if view.device().is_host_visible() { Cow::Borrowed(view.host()) } else { Cow::Owned(view.to_vec()) }
    }

    /// The gradient that the last step or [`Trainer::accumulate`] left, in the layout of the store.
    pub fn gradient(&self) -> Vec<f32> {
        let mut gradient: Vec<f32> = self.gradient.view().slice(0, self.set.layout.len).to_vec();
        if self.gradient_scale != 1.0 {
            gradient.iter_mut().for_each(|g| *g = (f64::from(*g) / self.gradient_scale) as f32);
        }
        gradient
    }

    /// The loss scale, for a save; `None` where there is none.
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.scale.is_dynamic().then_some(self.scale)
    }

    /// Goes on with the loss scale of a save.
    pub fn restore_loss_scale(&mut self, scale: Option<LossScale>) {
        if let Some(scale) = scale.filter(|_| self.scale.is_dynamic()) {
            self.scale = scale;
        }
    }

    /// Keys and values `(p, 2 l c)` of a prefix with a projection; `None` without one.
    pub fn projected(&self) -> Option<Vec<f32>> {
        self.prefix.as_ref()?.projected()
    }

    /// Brings keys and values of a projected prefix up to date with the store.
    fn refresh(&mut self) {
        if let Some(prefix) = &mut self.prefix {
            prefix.refresh(self.values.view());
        }
    }

    /// Brings output scales that are derived up to date with the store, where it has changed: once a step.
    fn derive(&mut self) {
        if let Some(scales) = self.scales.as_mut().filter(|_| self.stale) {
            self.stack.derive(scales, self.values.view_mut());
        }
        self.stale = false;
    }

    /// Every buffer that it holds, as it was allocated.
    pub fn memory(&self) -> Vec<TableRow> {
        self.table.clone()
    }
}
