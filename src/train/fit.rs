//! Which memory plan a run takes: what it is for, what it may take, what a save has fixed, and what to do
//! when the machine has less than it said.

use std::{path::Path, sync::Arc};

use engraft_adapters::AdapterSet;

use super::{options::RunOptions, prepare::Prepared, save::SaveInfo};
use crate::engine::trainer::{Trainer, TrainerOptions};
use crate::{
    data::Dataset,
    device::{DeviceKind, arena::Arenas},
    error::{Error, Result},
    kernels::matmul::Arithmetic,
    model::{
        Base, BaseDType, BaseSource, Config,
        base::{check_activations, check_weights},
    },
    observe::machine,
    optim::OptimizerKind,
    plan::{
        budget::{self, Limit},
        calibrate::Rates,
        choose::{Constraints, Selection, choose, size},
        table::{BaseBytes, Home, PlanConfig, Row, Target, TrainingJob},
    },
};

/// What a plan of the run is made for.
pub(super) fn job<'a>(options: &RunOptions, base: &'a Base, prepared: &'a Prepared) -> TrainingJob<'a> {
    let heap = |data: &Dataset| data.memory().0 as u64;
    // Rows on the heap are there already, and so in what the process holds.
    let held = machine::resident().is_some();
    let rows_on_heap = heap(&prepared.train) + prepared.eval.as_ref().map_or(0, heap);
    TrainingJob {
        config: &base.config,
        base_dtype: base.dtype,
        set: &prepared.set,
        batch: options.batch,
        seq_len: prepared.longest(),
        target: if base.device.kind() == DeviceKind::CPU {
            cpu(base.weights.wte.arithmetic)
        } else {
            Target::Cuda
        },
        program: budget::program(),
        rows_on_heap: if held { 0 } else { rows_on_heap },
        streamable: base.source != BaseSource::Embedded,
    }
}

/// Refuses what a target cannot do.
///
/// # Errors
/// [`Error::Input`] with the option.
fn check_wish(constraints: Constraints, target: Target) -> Result<()> {
    match (target, constraints.activations) {
        (Target::Cpu { .. }, Some(activations)) => check_activations(DeviceKind::CPU, activations),
        _ => Ok(()),
    }
}

/// The kind of device that `target` is.
pub fn kind_of(target: Target) -> &'static DeviceKind {
    match target {
        Target::Cpu { .. } => DeviceKind::CPU,
        Target::Cuda => DeviceKind::CUDA,
    }
}

/// The pool of this process, computing in `arithmetic`.
pub fn cpu(arithmetic: Arithmetic) -> Target {
    Target::Cpu { threads: rayon::current_num_threads(), arithmetic }
}

/// A run that is only planned: no weights, perhaps no data.
#[derive(Debug, Clone, Copy)]
pub struct PlanRequest<'a> {
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
pub fn plan_request(options: &RunOptions, plan_request: PlanRequest) -> Result<Selection> {
    let program = budget::assumed_program();
    let job = TrainingJob {
        config: plan_request.config,
        base_dtype: plan_request.base_dtype,
        set: plan_request.set,
        batch: options.batch,
        seq_len: plan_request.seq_len,
        target: plan_request.target,
        program,
        rows_on_heap: 0,
        streamable: plan_request.streamable,
    };
    check_wish(options.constraints, plan_request.target)?;
    check_weights(kind_of(plan_request.target), plan_request.base_dtype)?;
    // BF16 on a CPU is arithmetic alone.
    let activations = options.constraints.activations.filter(|_| plan_request.target == Target::Cuda);
    let constraints = Constraints { activations, ..options.constraints };
    let budget = match plan_request.target {
        // Nobody knows how much an absent device has.
        Target::Cuda => budget::device_bytes(options.memory, None, 0),
        Target::Cpu { .. } => budget::bytes(options.memory, program),
    };
    match plan_request.target {
        Target::Cpu { arithmetic, .. } => {
            choose(&job, constraints, budget, &Rates::load_or_measure(options.cache.as_deref(), arithmetic))
        }
        Target::Cuda => choose(&job, constraints, budget, &Rates::NOMINAL_GPU).map(unmeasured),
    }
}

/// A choice whose seconds are those of some other machine: ratios hold, times do not.
fn unmeasured(mut selection: Selection) -> Selection {
    selection.chosen.measured = false;
    selection
}

/// The choice by the speeds of this machine, which are measured only where they decide anything.
fn by_speed(
    cache: Option<&Path>,
    job: &TrainingJob,
    constraints: Constraints,
    budget: Option<u64>,
) -> Result<Selection> {
    let Target::Cpu { arithmetic, .. } = job.target else {
        return choose(job, constraints, budget, &Rates::NOMINAL_GPU).map(unmeasured);
    };
    if let Some(rates) = Rates::cached(cache, arithmetic) {
        return choose(job, constraints, budget, &rates);
    }
    let selection = choose(job, constraints, budget, &Rates::NOMINAL)?;
    if selection.trades_nothing(constraints) {
        return Ok(unmeasured(selection));
    }
    choose(job, constraints, budget, &Rates::load_or_measure(cache, arithmetic))
}

/// What is fixed: by options, and what results depend on by the save that the run goes on from.
///
/// # Errors
/// When the save holds something else than numbers where they belong.
pub(super) fn constraints(options: &RunOptions, base: &Base, past: Option<&SaveInfo>) -> Constraints {
    let mut constraints = Constraints { activations: Some(base.activations), ..options.constraints };
    // On a device with memory of its own that was settled when the base was brought there.
    if !base.device.kind().shares_host_memory() {
        constraints.stream = Some(base.is_streamed());
    }
    let Some(past) = past else { return constraints };
    constraints.resumed = true;
    let number = |name: &str| past.options.get(name).and_then(|value| value.parse().ok());
    constraints.micro_batch = constraints.micro_batch.or_else(|| number(MICRO_BATCH));
    constraints.head_rows = constraints.head_rows.or_else(|| number(HEAD_ROWS));
    let kinds = [OptimizerKind::AdamW, OptimizerKind::AdamW8bit];
    constraints.optimizer =
        constraints.optimizer.or_else(|| kinds.into_iter().find(|kind| kind.name() == past.optimizer));
    constraints
}

const MICRO_BATCH: &str = "micro-batch";
const HEAD_ROWS: &str = "head-rows";

/// What a plan chose and results depend on, as options are written.
pub(super) fn identity(setting: PlanConfig) -> [(String, String); 3] {
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
pub(super) fn plan(
    options: &RunOptions,
    base: &Base,
    job: &TrainingJob,
    constraints: Constraints,
) -> Result<Selection> {
    check_wish(constraints, job.target)?;
    let budget = match job.target {
        Target::Cuda => budget::device_bytes(options.memory, base.device.free(), base_bytes(base)),
        Target::Cpu { .. } => budget::bytes(options.memory, job.program),
    };
    by_speed(options.cache.as_deref(), job, constraints, budget)
}

/// Bytes that a device holds of a base before a trainer is made.
fn base_bytes(base: &Base) -> u64 {
    if base.device.kind().shares_host_memory() {
        return BaseBytes::of(&base.config, base.dtype).total();
    }
    let parts = BaseBytes::on_device(&base.config);
    if base.is_streamed() { parts.total() - parts.blocks } else { parts.total() }
}

/// The next smaller plan after `selection`, which the machine has no room for: within what is free now, and
/// within three quarters of what the other wanted.
///
/// # Errors
/// When there is none.
pub(super) fn smaller(
    options: &RunOptions,
    base: &Base,
    job: &TrainingJob,
    constraints: Constraints,
    selection: &Selection,
) -> Result<Selection> {
    let less = selection.chosen.peak() - budget::wanted(&selection.chosen.plan) / 4;
    let free = match job.target {
        Target::Cuda => budget::device_bytes(Limit::Auto, base.device.free(), base_bytes(base)),
        Target::Cpu { .. } => budget::bytes(Limit::Auto, job.program),
    };
    let free = free.unwrap_or(less);
    by_speed(options.cache.as_deref(), job, constraints, Some(less.min(free)))
}

/// Refuses a plan that wants more than is free.
///
/// # Errors
/// [`Error::Memory`] with both numbers.
pub(super) fn check(selection: &Selection, free: Option<u64>) -> Result<()> {
    let wanted = budget::wanted(&selection.chosen.plan);
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
fn check_pinned(selection: &Selection, free: Option<u64>) -> Result<()> {
    let away =
        |row: &&Row| row.home == Home::Host && matches!(row.role, "offloaded inputs" | "moments" | "stages");
    let pinned: u64 = selection.chosen.plan.rows.iter().filter(away).map(|row| row.bytes).sum();
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

/// A trainer as `selection` says.
///
/// # Errors
/// [`Error::Memory`] when the machine has less than planned; and as [`Trainer::new`].
pub(super) fn trainer(
    options: &RunOptions,
    base: &Arc<Base>,
    prepared: &Prepared,
    values: &[f32],
    selection: &Selection,
    spool: &Path,
) -> Result<Trainer> {
    let free =
        if base.device.kind().shares_host_memory() { (options.free_memory)() } else { base.device.free() };
    check(selection, free)?;
    if !base.device.kind().shares_host_memory() {
        check_pinned(selection, (options.free_memory)())?;
    }
    let PlanConfig { micro_batch, policy, optimizer } = selection.chosen.plan.setting;
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
    if base.device.kind().wants_settled_weights && !policy.stream {
        // Without the memory for it the file serves as well.
        let mut settled = Base::clone(&base);
        if settled.weights.settle().is_ok() {
            base = Arc::new(settled);
        }
    }
    Trainer::new(base, prepared.set.clone(), values, trainer_options, arenas)
}
