//! Chooses the memory plan of a run: its budget, the parts that options or a save fix, and the next
//! smaller plan if less memory is free than the system reported.

use std::{path::Path, sync::Arc};

use engraft_adapters::AdapterSet;

use super::{
    job::{Constraints, PlanConfig, TrainingJob},
    options::RunOptions,
    prepare::Prepared,
    sample,
    save::SaveInfo,
};
use crate::{
    data::Dataset,
    device::arena::{Arenas, Placement},
    engine::{Trainer, TrainerOptions},
    error::{Error, Result},
    model::{Base, BaseDType, BaseSource, Config, base::check_activations},
    observe::machine,
    optim::OptimizerKind,
    plan::{
        PlannedBase, PlannedDevice, Row, Selection,
        budget::{self, Limit},
        calibrate::Rates,
        choose, size,
    },
};

/// The run as a job to plan; a run that goes on from `past` keeps all that results depend on.
pub(super) fn job<'a>(
    options: &RunOptions,
    base: &'a Base,
    prepared: &'a Prepared,
    past: Option<&SaveInfo>,
) -> TrainingJob<'a> {
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
        device: PlannedDevice::of(base.device, base.weights.wte.arithmetic),
        program: budget::program(),
        rows_on_heap: if held { 0 } else { rows_on_heap },
        rows: Some(&prepared.statistics),
        streamable: base.source != BaseSource::Embedded,
        constraints: constraints(options, base, past),
        sample_tokens: sample::longest(&prepared.samples),
    }
}

/// Refuses activations that a device cannot compute with.
///
/// # Errors
/// [`Error::Input`] that names `--precision`.
fn check_planned_activations(constraints: Constraints, device: PlannedDevice) -> Result<()> {
    match constraints.activations {
        Some(activations) => check_activations(device.kind, activations),
        _ => Ok(()),
    }
}

/// A run that is only planned: no weights, perhaps no data.
#[derive(Debug, Clone, Copy)]
pub struct PlanRequest<'a> {
    /// Widths and counts of the base's layers.
    pub config: &'a Config,
    /// Type that its matrices are kept in.
    pub base_dtype: BaseDType,
    /// The adapter to be trained.
    pub set: &'a AdapterSet,
    /// Tokens of the longest row.
    pub seq_len: usize,
    /// The device that would compute.
    pub device: PlannedDevice,
    /// Whether the base is in a file.
    pub streamable: bool,
    /// Tokens of the longest sample with its prompt; 0 for no samples.
    pub sample_tokens: usize,
}

/// The plan of a run that is only planned. Free memory is that of this machine.
///
/// # Errors
/// When nothing fits, with the smallest plan that there is.
pub fn plan_request(options: &RunOptions, request: PlanRequest) -> Result<Selection<PlanConfig>> {
    let PlanRequest { config, base_dtype, set, seq_len, device, streamable, sample_tokens } = request;
    check_planned_activations(options.constraints, device)?;
    let stored = |asked| device.kind.stored_activations(asked);
    let activations = options.constraints.activations.map(stored);
    let job = TrainingJob {
        config,
        base_dtype,
        set,
        batch: options.batch,
        seq_len,
        device,
        program: budget::assumed_program(),
        rows_on_heap: 0,
        rows: None,
        streamable,
        constraints: Constraints { activations, ..options.constraints },
        sample_tokens,
    };
    // The memory of an absent device is unknown.
    let budget = bytes(options.memory, &job, None, 0);
    match device.cores {
        Some(cores) => {
            choose(&job, budget, &Rates::load_or_measure(options.cache.as_deref(), cores.arithmetic))
        }
        None => choose(&job, budget, &device.kind.nominal_rates).map(Selection::unmeasured),
    }
}

/// Bytes that `job` may take of the planned memory; of a device's own `free` are left, and it holds `held`.
fn bytes(limit: Limit, job: &TrainingJob, free: Option<u64>, held: u64) -> Option<u64> {
    match job.device.own_memory() {
        Some(memory) => budget::device_bytes(limit, memory, free, held),
        None => budget::bytes(limit, job.program),
    }
}

/// The choice by the speeds of this machine, which are measured only where they decide anything.
fn by_speed(cache: Option<&Path>, job: &TrainingJob, budget: Option<u64>) -> Result<Selection<PlanConfig>> {
    let Some(cores) = job.device.cores else {
        return choose(job, budget, &job.device.kind.nominal_rates).map(Selection::unmeasured);
    };
    let by_measured = |rates: &Rates| {
        let mut selection = choose(job, budget, rates)?;
        selection.chosen.seconds = job.expected_seconds(selection.chosen.plan.config, rates);
        Ok(selection)
    };
    if let Some(rates) = Rates::cached(cache, cores.arithmetic) {
        return by_measured(&rates);
    }
    let selection = choose(job, budget, &job.device.kind.nominal_rates)?;
    if job.trades_nothing(selection.chosen.plan.config) {
        return Ok(selection.unmeasured());
    }
    by_measured(&Rates::load_or_measure(cache, cores.arithmetic))
}

/// The parts of a plan that are fixed: by options, or, where results depend on them, by the save that the
/// run goes on from.
fn constraints(options: &RunOptions, base: &Base, past: Option<&SaveInfo>) -> Constraints {
    let mut constraints = Constraints { activations: Some(base.activations), ..options.constraints };
    // On a device that was settled when the base was brought there.
    if base.device.own_memory().is_some() {
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

/// The chosen values that results depend on, as options are written.
pub(super) fn identity(config: PlanConfig) -> [(String, String); 3] {
    [
        (MICRO_BATCH.to_owned(), config.micro_batch.to_string()),
        (HEAD_ROWS.to_owned(), config.policy.head_rows.to_string()),
        ("optimizer".to_owned(), format!("{:?}", config.optimizer.name())),
    ]
}

/// The plan of a run.
///
/// # Errors
/// When nothing fits, with the smallest plan that there is.
pub(super) fn plan(options: &RunOptions, base: &Base, job: &TrainingJob) -> Result<Selection<PlanConfig>> {
    check_planned_activations(job.constraints, job.device)?;
    let budget = bytes(options.memory, job, base.device.free(), held(base, job));
    by_speed(options.cache.as_deref(), job, budget)
}

/// Bytes that a device holds of a base before a trainer is made.
fn held(base: &Base, job: &TrainingJob) -> u64 {
    let parts = PlannedBase { config: &base.config, dtype: base.dtype }.bytes(job.device);
    if base.device.own_memory().is_some() && base.is_streamed() {
        return parts.total() - parts.blocks;
    }
    parts.total()
}

/// The next smaller plan after `selection`, which the machine has no room for: within what is free now, and
/// within three quarters of what the other wanted.
///
/// # Errors
/// [`Error::Memory`] when there is no smaller plan.
pub(super) fn smaller(
    options: &RunOptions,
    base: &Base,
    job: &TrainingJob,
    selection: &Selection<PlanConfig>,
) -> Result<Selection<PlanConfig>> {
    let less = selection.chosen.peak() - budget::wanted(&selection.chosen.plan) / 4;
    let free = bytes(Limit::Auto, job, base.device.free(), held(base, job)).unwrap_or(less);
    by_speed(options.cache.as_deref(), job, Some(less.min(free)))
}

/// Refuses a plan that wants more than is free.
///
/// # Errors
/// [`Error::Memory`] with the planned and the free bytes.
fn check(selection: &Selection<PlanConfig>, free: Option<u64>) -> Result<()> {
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
fn check_pinned(selection: &Selection<PlanConfig>, free: Option<u64>) -> Result<()> {
    let away = |row: &&Row| {
        row.place == Placement::Host && matches!(row.role, "offloaded inputs" | "moments" | "stages")
    };
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

/// A trainer as `selection` says; buffers that it offloads to a file are in the folder `spool`.
///
/// # Errors
/// [`Error::Memory`] when the machine has less than planned; and as [`Trainer::new`].
pub(super) fn trainer(
    options: &RunOptions,
    base: &Arc<Base>,
    prepared: &Prepared,
    values: &[f32],
    selection: &Selection<PlanConfig>,
    spool: &Path,
) -> Result<Trainer> {
    let is_host = base.device.own_memory().is_none();
    check(selection, if is_host { (options.free_memory)() } else { base.device.free() })?;
    if !is_host {
        check_pinned(selection, (options.free_memory)())?;
    }
    let PlanConfig { micro_batch, policy, optimizer } = selection.chosen.plan.config;
    let trainer_options = TrainerOptions {
        rows: micro_batch,
        seq_len: prepared.longest(),
        policy,
        optimizer,
        adamw: options.adamw,
        clip: options.clip,
        label_smoothing: options.label_smoothing,
        neftune: options.neftune,
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
