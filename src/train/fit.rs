//! Which memory plan a run takes: what it is for, what it may take, what a save has fixed, and what to do
//! when the machine has less than it said.

use std::{path::Path, sync::Arc};

use engraft_adapters::AdapterSet;

use super::{options::RunOptions, prepare::Prepared, save::SaveInfo};
use crate::engine::trainer::{Trainer, TrainerOptions};
use crate::{
    data::Dataset,
    device::{DType, arena::Arenas},
    error::{Error, Result},
    kernels::matmul::Arithmetic,
    model::{
        Base, BaseDType, BaseSource, Config,
        base::{check_weights, no_f16},
    },
    observe::machine,
    optim::OptimizerKind,
    plan::{
        budget::{self, Limit},
        calibrate::Rates,
        choose::{Choice, Wish, choose, size},
        table::{BaseBytes, Home, Job, Row, Setting, Target},
    },
};

/// What a plan of the run is made for.
pub(super) fn job<'a>(options: &RunOptions, base: &'a Base, prepared: &'a Prepared) -> Job<'a> {
    let heap = |data: &Dataset| data.memory().0 as u64;
    // Rows on the heap are there already, and so in what the process holds.
    let held = machine::resident().is_some();
    let rows_on_heap = heap(&prepared.train) + prepared.eval.as_ref().map_or(0, heap);
    Job {
        config: &base.config,
        base_dtype: base.dtype,
        set: &prepared.set,
        batch: options.batch,
        seq_len: prepared.longest(),
        target: if base.device.is_host() { cpu(base.weights.wte.arithmetic) } else { Target::Cuda },
        program: budget::program(),
        rows_on_heap: if held { 0 } else { rows_on_heap },
        streamable: base.source != BaseSource::Embedded,
    }
}

/// Refuses what a target cannot do.
///
/// # Errors
/// [`Error::Input`] with the option.
fn check_wish(wish: Wish, target: Target) -> Result<()> {
    match (target, wish.activations) {
        (Target::Cpu { .. }, Some(DType::F16)) => Err(no_f16()),
        _ => Ok(()),
    }
}

/// The pool of this process, computing in `arithmetic`.
pub fn cpu(arithmetic: Arithmetic) -> Target {
    Target::Cpu { threads: rayon::current_num_threads(), arithmetic }
}

/// A run that is only planned: no weights, perhaps no data.
#[derive(Debug, Clone, Copy)]
pub struct Draft<'a> {
    /// Sizes of the base.
    pub config: &'a Config,
    /// What its matrices are kept in.
    pub base_dtype: BaseDType,
    /// The adapter.
    pub set: &'a AdapterSet,
    /// Tokens of the longest row.
    pub seq_len: usize,
    /// What would compute.
    pub target: Target,
    /// Whether the base lies in a file.
    pub streamable: bool,
}

/// The plan of a draft. Where it is to fit into what is free, that is the memory of this machine.
///
/// # Errors
/// When nothing fits, with the smallest plan that there is.
pub fn draft(options: &RunOptions, draft: Draft) -> Result<Choice> {
    let program = budget::assumed_program();
    let job = Job {
        config: draft.config,
        base_dtype: draft.base_dtype,
        set: draft.set,
        batch: options.batch,
        seq_len: draft.seq_len,
        target: draft.target,
        program,
        rows_on_heap: 0,
        streamable: draft.streamable,
    };
    check_wish(options.wish, draft.target)?;
    check_weights(draft.target != Target::Cuda, draft.base_dtype)?;
    // BF16 on a CPU is arithmetic alone.
    let activations = options.wish.activations.filter(|_| draft.target == Target::Cuda);
    let wish = Wish { activations, ..options.wish };
    let budget = match draft.target {
        // Nobody knows how much an absent device has.
        Target::Cuda => budget::device_bytes(options.memory, None, 0),
        Target::Cpu { .. } => budget::bytes(options.memory, program),
    };
    match draft.target {
        Target::Cpu { arithmetic, .. } => {
            choose(&job, wish, budget, &Rates::load_or_measure(options.cache.as_deref(), arithmetic))
        }
        Target::Cuda => choose(&job, wish, budget, &Rates::NOMINAL_GPU).map(unmeasured),
    }
}

/// A choice whose seconds are those of some other machine: ratios hold, times do not.
fn unmeasured(mut choice: Choice) -> Choice {
    choice.chosen.measured = false;
    choice
}

/// The choice by the speeds of this machine, which are measured only where they decide anything.
fn by_speed(cache: Option<&Path>, job: &Job, wish: Wish, budget: Option<u64>) -> Result<Choice> {
    let Target::Cpu { arithmetic, .. } = job.target else {
        return choose(job, wish, budget, &Rates::NOMINAL_GPU).map(unmeasured);
    };
    if let Some(rates) = Rates::cached(cache, arithmetic) {
        return choose(job, wish, budget, &rates);
    }
    let choice = choose(job, wish, budget, &Rates::NOMINAL)?;
    if choice.trades_nothing(wish) {
        return Ok(unmeasured(choice));
    }
    choose(job, wish, budget, &Rates::load_or_measure(cache, arithmetic))
}

/// What is fixed: by options, and what results depend on by the save that the run goes on from.
///
/// # Errors
/// When the save holds something else than numbers where they belong.
pub(super) fn wish(options: &RunOptions, base: &Base, past: Option<&SaveInfo>) -> Wish {
    let mut wish = Wish { activations: Some(base.activations), ..options.wish };
    // On a device that was settled when the base was brought there.
    if !base.device.is_host() {
        wish.stream = Some(base.is_streamed());
    }
    let Some(past) = past else { return wish };
    wish.resumed = true;
    let number = |name: &str| past.options.get(name).and_then(|value| value.parse().ok());
    wish.micro_batch = wish.micro_batch.or_else(|| number(MICRO_BATCH));
    wish.head_rows = wish.head_rows.or_else(|| number(HEAD_ROWS));
    let kinds = [OptimizerKind::AdamW, OptimizerKind::AdamW8bit];
    wish.optimizer = wish.optimizer.or_else(|| kinds.into_iter().find(|kind| kind.name() == past.optimizer));
    wish
}

const MICRO_BATCH: &str = "micro-batch";
const HEAD_ROWS: &str = "head-rows";

/// What a plan chose and results depend on, as options are written.
pub(super) fn identity(setting: Setting) -> [(String, String); 3] {
    [
        (MICRO_BATCH.to_owned(), setting.micro_batch.to_string()),
        (HEAD_ROWS.to_owned(), setting.policy.head_rows.to_string()),
        ("optimizer".to_owned(), format!("{:?}", setting.optimizer.name())),
    ]
}

/// The plan of a run.
///
/// # Errors
/// When nothing fits, with the smallest plan that there is.
pub(super) fn plan(options: &RunOptions, base: &Base, job: &Job, wish: Wish) -> Result<Choice> {
    check_wish(wish, job.target)?;
    let budget = match job.target {
        Target::Cuda => budget::device_bytes(options.memory, base.device.free(), base_bytes(base)),
        Target::Cpu { .. } => budget::bytes(options.memory, job.program),
    };
    by_speed(options.cache.as_deref(), job, wish, budget)
}

/// Bytes that a device holds of a base before a trainer is made.
fn base_bytes(base: &Base) -> u64 {
    if base.device.is_host() {
        return BaseBytes::of(&base.config, base.dtype).total();
    }
    let parts = BaseBytes::on_device(&base.config);
    if base.is_streamed() { parts.total() - parts.blocks } else { parts.total() }
}

/// The next smaller plan after `choice`, which the machine has no room for: within what is free now, and
/// within three quarters of what the other wanted.
///
/// # Errors
/// When there is none.
pub(super) fn smaller(
    options: &RunOptions,
    base: &Base,
    job: &Job,
    wish: Wish,
    choice: &Choice,
) -> Result<Choice> {
    let less = choice.chosen.peak() - budget::wanted(&choice.chosen.plan) / 4;
    let free = match job.target {
        Target::Cuda => budget::device_bytes(Limit::Auto, base.device.free(), base_bytes(base)),
        Target::Cpu { .. } => budget::bytes(Limit::Auto, job.program),
    };
    let free = free.unwrap_or(less);
    by_speed(options.cache.as_deref(), job, wish, Some(less.min(free)))
}

/// Refuses a plan that wants more than is free.
///
/// # Errors
/// [`Error::Memory`] with both numbers.
pub(super) fn check(choice: &Choice, free: Option<u64>) -> Result<()> {
    let wanted = budget::wanted(&choice.chosen.plan);
    match free {
        Some(free) if free < wanted => Err(Error::memory(format!(
            "the plan takes {} more memory where {} are free; free some, or give a smaller --memory",
            size(wanted),
            size(free)
        ))),
        _ => Ok(()),
    }
}

/// Refuses a plan of a device that offloads more than the host has free: pinned pages cannot be swapped out.
///
/// # Errors
/// [`Error::Failed`], as a smaller plan would offload more.
fn check_pinned(choice: &Choice, free: Option<u64>) -> Result<()> {
    let away =
        |row: &&Row| row.home == Home::Host && matches!(row.role, "offloaded inputs" | "moments" | "stages");
    let pinned: u64 = choice.chosen.plan.rows.iter().filter(away).map(|row| row.bytes).sum();
    match free {
        Some(free) if free < pinned => Err(Error::failed(format!(
            "the plan pins {} of the host's memory where {} are free; free some, or give --offload-inputs off and \
             --offload-optimizer off",
            size(pinned),
            size(free)
        ))),
        _ => Ok(()),
    }
}

/// A trainer as `choice` says.
///
/// # Errors
/// [`Error::Memory`] when the machine has less than planned; and as [`Trainer::new`].
pub(super) fn trainer(
    options: &RunOptions,
    base: &Arc<Base>,
    prepared: &Prepared,
    values: &[f32],
    choice: &Choice,
    spool: &Path,
) -> Result<Trainer> {
    let free = if base.device.is_host() { (options.free_memory)() } else { base.device.free() };
    check(choice, free)?;
    if !base.device.is_host() {
        check_pinned(choice, (options.free_memory)())?;
    }
    let Setting { micro_batch, policy, optimizer } = choice.chosen.plan.setting;
    let trainer_options = TrainerOptions {
        rows: micro_batch,
        seq_len: prepared.longest(),
        policy,
        optimizer,
        adamw: options.adamw,
        clip: options.clip,
        label_smoothing: options.label_smoothing,
        seed: options.seed,
    };
    let arenas = Arenas::real(Some(spool.to_owned())).on(base.device);
    let mut base = Arc::clone(base);
    if base.device.is_host() && !policy.stream {
        // Without the memory for it the file serves as well.
        let mut settled = Base::clone(&base);
        if settled.weights.settle().is_ok() {
            base = Arc::new(settled);
        }
    }
    Trainer::new(base, prepared.set.clone(), values, trainer_options, arenas)
}
