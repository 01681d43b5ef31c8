//! A training run as a job that memory is planned for: its buffers, its time, and the ways to do it.

use std::fmt;

use engraft_adapters::AdapterSet;
use engraft_util::{atomic::BUFFER, words::count_of};

use super::sample::PlannedSamples;
use crate::{
    data::{RowStatistics, Sampler},
    device::{
        DType,
        arena::{Placement, TableRow},
    },
    engine::{Trainer, TrainerOptions},
    error::Result,
    model::{BaseDType, Config, Policy, Recompute, arch::Arch, scratch},
    observe::phase::Phase,
    optim::{AdamWOptions, OptimizerKind},
    plan::{
        ByPhase, Candidates, Job, LastResort, PlannedBase, PlannedDevice, Row, by_phase,
        calibrate::Rates,
        predict::{MicroBatch, Update},
    },
};

/// One way to train: chosen by a plan or fixed by options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanConfig {
    /// Sequences per forward and backward pass.
    pub micro_batch: usize,
    /// Recompute, head rows, streaming and placements.
    pub policy: Policy,
    /// How the optimizer keeps its moments.
    pub optimizer: OptimizerKind,
}

/// Written as options: `--micro-batch 4 --recompute none ..`.
impl fmt::Display for PlanConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = self.options().map(|(option, value)| format!("--{option} {value}"));
        f.write_str(&options.join(" "))
    }
}

impl PlanConfig {
    /// Names and values of the options that fix it.
    fn options(&self) -> [(&'static str, String); 7] {
        let Policy { recompute, head_rows, stream, inputs, moments, .. } = self.policy;
        let on = |flag: bool| if flag { "on" } else { "off" }.to_owned();
        [
            ("micro-batch", self.micro_batch.to_string()),
            ("recompute", recompute.to_string()),
            ("head-rows", head_rows.to_string()),
            ("stream-base", on(stream)),
            ("offload-inputs", on(inputs.is_away())),
            ("offload-optimizer", on(moments.is_away())),
            ("optimizer", self.optimizer.name().to_owned()),
        ]
    }
}

/// The fixed parts of a [`PlanConfig`]; `None` leaves a part to the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Constraints {
    /// Sequences per forward and backward pass.
    pub micro_batch: Option<usize>,
    /// Which activations blocks compute again.
    pub recompute: Option<Recompute>,
    /// Rows of logits in memory at a time.
    pub head_rows: Option<usize>,
    /// Whether the base is streamed.
    pub stream: Option<bool>,
    /// Whether inputs of blocks are moved out of the planned memory.
    pub inputs: Option<bool>,
    /// Whether moments are moved out of the planned memory.
    pub moments: Option<bool>,
    /// How moments are kept; 8-bit ones, which change results, are chosen only where nothing else fits.
    pub optimizer: Option<OptimizerKind>,
    /// Type of activations; F32 on a CPU and F16 on other devices where nothing is fixed.
    pub activations: Option<DType>,
    /// Whether micro-batch, chunks and optimizer are those of a save, which no option changes.
    pub resumed: bool,
}

/// Fixes only the optimizer: the memory of a machine then changes results by rounding
/// alone.
impl Default for Constraints {
    fn default() -> Self {
        Self { optimizer: Some(OptimizerKind::default()), ..Self::NONE }
    }
}

impl Constraints {
    /// Nothing is fixed.
    pub const NONE: Self = Self {
        micro_batch: None,
        recompute: None,
        head_rows: None,
        stream: None,
        inputs: None,
        moments: None,
        optimizer: None,
        activations: None,
        resumed: false,
    };
}

/// A training run to plan.
#[derive(Debug, Clone, Copy)]
pub struct TrainingJob<'a> {
    /// Config of the base, for its sizes.
    pub config: &'a Config,
    /// Type that its matrices are kept in.
    pub base_dtype: BaseDType,
    /// The adapter to be trained.
    pub set: &'a AdapterSet,
    /// Sequences per optimizer step.
    pub batch: usize,
    /// Tokens of the longest row, those of a prompt included.
    pub seq_len: usize,
    /// The device that trains.
    pub device: PlannedDevice,
    /// Bytes of code, runtime, tokenizer and everything else in the process that the plan does not count.
    pub program: u64,
    /// Bytes of tokenised rows on the heap.
    pub rows_on_heap: u64,
    /// Lengths and supervised tokens of the rows; `None` where they are unknown, then all rows are full and every
    /// token has a loss. Only the time that is shown depends on them, never a choice: data must not change rounding.
    pub rows: Option<&'a RowStatistics>,
    /// Whether the base is in a file that can be streamed.
    pub streamable: bool,
    /// The parts of a way that are fixed.
    pub constraints: Constraints,
    /// Tokens of the longest sample with its prompt; 0 for no samples.
    pub sample_tokens: usize,
}

impl<'a> TrainingJob<'a> {
    /// Floats of the largest A or B that is put together for the adapter's file, where a module has several deltas or one
    /// on a part of it.
    fn joined(&self) -> usize {
        let sites = Arch::of(self.config).sites;
        let of_modules = self.set.loras.chunk_by(|a, b| (a.layer, a.site) == (b.layer, b.site));
        let joined = of_modules.filter(|loras| loras.len() > 1 || loras[0].part.is_some());
        let sizes = joined.map(|loras| {
            let (rank, site) = (loras.iter().map(|lora| lora.rank).sum::<usize>(), &sites[loras[0].site]);
            rank * site.inputs.max(site.outputs)
        });
        sizes.max().unwrap_or(0)
    }

    /// The samples that a run with `config` makes.
    fn samples(&self, config: PlanConfig) -> PlannedSamples<'a> {
        let Policy { activations, stream, .. } = config.policy;
        let tokens = self.sample_tokens;
        PlannedSamples {
            config: self.config,
            set: self.set,
            device: self.device,
            tokens,
            activations,
            base_dtype: self.base_dtype,
            stream,
        }
    }

    /// Options that sizes depend on; the others have any value.
    fn trainer_options(&self, config: PlanConfig) -> TrainerOptions {
        TrainerOptions {
            rows: config.micro_batch,
            seq_len: self.seq_len,
            policy: config.policy,
            optimizer: config.optimizer,
            adamw: AdamWOptions::default(),
            clip: 0.0,
            label_smoothing: 0.0,
            neftune: 0.0,
            seed: 0,
        }
    }

    /// Whether `config` trades no memory for time: with more memory the choice would be the same.
    pub fn trades_nothing(&self, config: PlanConfig) -> bool {
        let (PlanConfig { policy, optimizer, .. }, fixed) = (config, self.constraints);
        policy.recompute == fixed.recompute.unwrap_or_default()
            && policy.stream == fixed.stream.unwrap_or_default()
            && policy.inputs.is_away() == fixed.inputs.unwrap_or_default()
            && policy.moments.is_away() == fixed.moments.unwrap_or_default()
            && optimizer == fixed.optimizer.unwrap_or_default()
    }

    /// Seconds of an optimizer step over rows as the data have them.
    pub fn expected_seconds(&self, config: PlanConfig, rates: &Rates) -> f64 {
        let Some(rows) = self.rows else { return self.seconds(config, rates) };
        let tokens = rows.padded_length(config.micro_batch).round() as usize;
        let supervised = (config.micro_batch as f64 * rows.supervised).round() as usize;
        self.step_seconds(config, rates, tokens, supervised)
    }

    /// Seconds of a step whose micro-batches have rows of `tokens`, `supervised` of all of which have a loss.
    fn step_seconds(&self, config: PlanConfig, rates: &Rates, tokens: usize, supervised: usize) -> f64 {
        let PlanConfig { micro_batch, policy, optimizer } = config;
        let passes = self.batch.div_ceil(micro_batch.max(1)) as f64;
        let Self { set, device, .. } = *self;
        let base = self.base();
        let pass = MicroBatch { base, set, device, batch: micro_batch, seq_len: tokens, supervised, policy };
        let (work, bytes) = match optimizer {
            OptimizerKind::AdamW => (1.0, 8.0),
            OptimizerKind::AdamW8bit => (EIGHT_BIT, 2.0),
        };
        let update = Update { trainables: set.trainables(), work, bytes, moments: policy.moments };
        passes * pass.seconds(rates) + update.seconds(rates)
    }

    /// Whether the base was brought to a device as a whole before anything was planned.
    fn is_resident(&self) -> bool {
        self.device.own_memory().is_some()
    }
}

impl Job for TrainingJob<'_> {
    type Config = PlanConfig;

    fn base(&self) -> PlannedBase<'_> {
        PlannedBase { config: self.config, dtype: self.base_dtype }
    }

    fn device(&self) -> PlannedDevice {
        self.device
    }

    fn streams_base(&self, config: PlanConfig) -> bool {
        config.policy.stream
    }

    fn buffers(&self, config: PlanConfig) -> Result<Vec<TableRow>> {
        Trainer::plan(self.config, self.set, self.trainer_options(config))
    }

    /// Pages stay in memory between, unless they are of a file.
    fn lifetime(&self, buffer: &TableRow) -> &'static str {
        match (buffer.role, buffer.name.as_str()) {
            ("trainables" | "moments", "gradient" | "d prefix") => "step",
            ("trainables" | "moments", _) => "run",
            ("allocation of ranks", "scores" | "products") => "step",
            ("allocation of ranks", _) => "run",
            ("prefix", _) => "step",
            ("saved inputs" | "saved activations", name) if name.starts_with("shared") => "block",
            ("saved inputs" | "offloaded inputs" | "saved activations", _) => "forward to backward",
            ("workspace", "gathered" | "losses" | "stats_f") => "head",
            ("workspace", name) if name.ends_with("logits") => "block, head",
            ("workspace", _) => "block",
            _ => "micro-batch",
        }
    }

    fn resident_of_file(&self, config: PlanConfig, row: &Row) -> ByPhase {
        if row.role == "moments" {
            let window = config.optimizer.window_bytes().min(row.bytes);
            return by_phase(|phase| if phase == Phase::Update { window } else { 0 });
        }
        // The input of a block, its output, and one that is being fetched or given back.
        let one = row.bytes / row.count as u64;
        let most = row.bytes.min(3 * one);
        let pass = [Phase::Forward, Phase::Head, Phase::Backward, Phase::Evaluation];
        by_phase(|phase| if pass.contains(&phase) { most } else { 0 })
    }

    /// The process itself and rows on their way.
    fn beside(&self, config: PlanConfig) -> Vec<Row> {
        let cells = (self.batch * self.seq_len) as u64;
        let micro = (config.micro_batch * self.seq_len) as u64;
        // Ids, targets, positions and starts of a batch, the tokenised rows they come from, and lists of a
        // micro-batch that are made on its way to the device.
        let in_front = self.set.embedding.is_some() || self.set.prompt.is_some();
        let by_id = if in_front { 4 } else { 0 };
        let step = cells * (16 + 12) + micro * (16 + by_id);
        // Strings and lists whose sizes are not planned one by one: names of tensors and headers of files
        // while saving, losses of a micro-batch, events. Seen: up to 0.1 MiB. And the order of the rows in an
        // epoch, 4 bytes a row: 4.6 MiB for a gigabyte of text.
        let order = Sampler::bytes(self.rows.map_or(0, RowStatistics::rows)) as u64;
        let small = (256 << 10) + 512 * self.set.layout.tensors.len() as u64 + order;
        let file = (BUFFER + size_of::<f32>() * self.joined()) as u64;
        let row = |role, name, bytes, lifetime| Row::new(role, name, bytes, Placement::Host, lifetime);
        let mut rows = vec![
            row("program", "code, runtime, tokenizer", self.program, "run").always(),
            row("data", "tokenised rows", self.rows_on_heap, "run").always(),
            row("data", "rows of a step", step, "step").once_used(),
            row("data", "lists, names, events", small, "run").once_used(),
            row("data", "buffers of a file being written", file, "save")
                .with_resident(by_phase(|phase| if phase == Phase::Saving { file } else { 0 })),
        ];
        rows.extend(self.samples(config).rows());
        rows
    }

    fn scratch(&self, config: PlanConfig) -> u64 {
        let options = self.trainer_options(config);
        let bytes = match self.device.cores {
            Some(cores) => {
                scratch::bytes(options.needs(self.config, self.set), cores.threads, cores.arithmetic)
            }
            None => options.device_scratch(self.config, self.base_dtype, self.set),
        };
        let scales =
            if self.device.cores.is_some() { scratch::scales(self.config, self.base_dtype) } else { 0 };
        self.samples(config).scratch().max(bytes as u64) + scales as u64
    }
}

/// Time that moving bytes and waiting for them costs beyond what is predicted, as a part of a step: between
/// nearly equal ways the one that moves none wins.
const MOVING_RISK: f64 = 0.02;
/// An update of 8-bit moments takes this many times that of FP32 ones (docs/BENCHMARKS.md).
const EIGHT_BIT: f64 = 1.35;

impl Candidates for TrainingJob<'_> {
    fn candidates(&self) -> Vec<PlanConfig> {
        candidates(self, self.constraints)
    }

    /// Seconds of an optimizer step over full rows with a loss on every token.
    fn seconds(&self, config: PlanConfig, rates: &Rates) -> f64 {
        self.step_seconds(config, rates, self.seq_len, config.micro_batch * self.seq_len)
    }

    fn risk(&self, config: PlanConfig) -> f64 {
        let Policy { stream, inputs, moments, .. } = config.policy;
        let moving = [stream, inputs.is_away(), moments.is_away()];
        let eight_bit = config.optimizer == OptimizerKind::AdamW8bit;
        // 8-bit moments change the result a little: only where nothing else fits.
        let last = if eight_bit { 1e3 } else { 1.0 };
        last * (1.0 + MOVING_RISK * moving.into_iter().filter(|moves| *moves).count() as f64)
    }

    /// Whether they differ at most in micro-batch and head rows.
    fn are_alike(&self, one: PlanConfig, other: PlanConfig) -> bool {
        let policy = Policy { head_rows: other.policy.head_rows, ..one.policy };
        PlanConfig { micro_batch: other.micro_batch, policy, ..one } == other
    }

    fn differences(&self, now: PlanConfig, other: PlanConfig) -> Vec<String> {
        let pairs = now.options().into_iter().zip(other.options());
        let different = pairs.filter(|(now, other)| now != other);
        different.map(|(_, (option, value))| format!("{option} {value}")).collect()
    }

    /// All single options but those of a save, and streaming, which on a device is only done where it is
    /// asked for.
    fn savings(&self, now: PlanConfig) -> Vec<PlanConfig> {
        let Constraints { micro_batch, head_rows, optimizer, activations, resumed, .. } = self.constraints;
        let free = match resumed {
            true => Constraints { micro_batch, head_rows, optimizer, activations, ..Constraints::NONE },
            false => Constraints { activations, ..Constraints::NONE },
        };
        let streamed = PlanConfig { policy: Policy { stream: true, ..now.policy }, ..now };
        let streamed = (self.is_resident() && self.streamable).then_some(streamed);
        candidates(self, free).into_iter().chain(streamed).collect()
    }

    fn last_resorts(&self) -> Vec<LastResort<PlanConfig>> {
        let fixed = self.constraints;
        if fixed.resumed || fixed.optimizer != Some(OptimizerKind::AdamW) {
            return Vec::new();
        }
        let eight_bit = Constraints { optimizer: Some(OptimizerKind::AdamW8bit), ..fixed };
        vec![LastResort { option: "optimizer adamw8bit", candidates: candidates(self, eight_bit) }]
    }

    fn fixed(&self) -> Vec<&'static str> {
        let Constraints { micro_batch, recompute, head_rows, stream, inputs, moments, resumed, .. } =
            self.constraints;
        let options = [
            ("micro-batch", micro_batch.is_some() && !resumed),
            ("recompute", recompute.is_some()),
            ("head-rows", head_rows.is_some() && !resumed),
            ("stream-base", stream.is_some() && !self.is_resident()),
            ("offload-inputs", inputs.is_some()),
            ("offload-optimizer", moments.is_some()),
        ];
        options.into_iter().filter(|(_, fixed)| *fixed).map(|(name, _)| name).collect()
    }

    fn released(&self) -> Vec<PlanConfig> {
        if self.fixed().is_empty() {
            return Vec::new();
        }
        let Constraints { micro_batch, head_rows, stream, optimizer, activations, resumed, .. } =
            self.constraints;
        let kept = |rows: Option<usize>| rows.filter(|_| resumed);
        let free = Constraints {
            micro_batch: kept(micro_batch),
            head_rows: kept(head_rows),
            stream: stream.filter(|_| self.is_resident()),
            optimizer,
            activations,
            resumed,
            ..Constraints::NONE
        };
        candidates(self, free)
    }

    fn title(&self) -> String {
        format!("{} of up to {}", count_of(self.batch, "row"), count_of(self.seq_len, "token"))
    }

    fn advice(&self) -> Vec<String> {
        // On a device streaming has to be asked for: the base is brought there before anything is planned.
        let resident = self.is_resident() && self.constraints.stream != Some(true);
        let stream = resident
            .then_some("--stream-base on keeps two blocks of the base on the device at a time".to_owned());
        let shorter = "a smaller --seq-len or --rank makes it smaller still".to_owned();
        stream.into_iter().chain([shorter]).collect()
    }
}

/// Every way that `fixed` leaves.
fn candidates(job: &TrainingJob, fixed: Constraints) -> Vec<PlanConfig> {
    let device = job.device;
    let activations = fixed.activations.unwrap_or(device.activations());
    let micro_batches = fixed.micro_batch.map_or_else(|| divisors(job.batch), |rows| vec![rows]);
    let recompute = fixed.recompute.map_or_else(|| recomputes(job.config.layers), |one| vec![one]);
    let chunks = fixed.head_rows.map_or_else(|| device.kind.head_chunks.to_vec(), |rows| vec![rows]);
    let either = |fixed: Option<bool>, possible: bool| match fixed {
        Some(fixed) => vec![fixed],
        None if possible => vec![false, true],
        None => vec![false],
    };
    let place = |away: bool| if away { device.away() } else { Placement::Memory };
    let kinds = [OptimizerKind::AdamW, OptimizerKind::AdamW8bit];
    let optimizers = fixed.optimizer.map_or_else(|| kinds.to_vec(), |kind| vec![kind]);
    let mut all = Vec::new();
    for &micro_batch in &micro_batches {
        for &recompute in &recompute {
            for &head_rows in &chunks {
                for stream in either(fixed.stream, job.streamable && !job.is_resident()) {
                    for inputs in either(fixed.inputs, true).into_iter().map(place) {
                        for moments in either(fixed.moments, true).into_iter().map(place) {
                            for &optimizer in &optimizers {
                                let policy =
                                    Policy { recompute, head_rows, stream, inputs, moments, activations };
                                all.push(PlanConfig { micro_batch, policy, optimizer });
                            }
                        }
                    }
                }
            }
        }
    }
    all
}

/// The choices between keeping activations and computing them again.
fn recomputes(layers: usize) -> Vec<Recompute> {
    let mut all = vec![Recompute::None, Recompute::Mlp, Recompute::Linear];
    all.extend([2, 3].into_iter().filter(|&every| every < layers).map(Recompute::Every));
    all.push(Recompute::All);
    all
}

/// All divisors, the largest first; of very many only those that about halve.
fn divisors(batch: usize) -> Vec<usize> {
    let all: Vec<usize> =
        (1..=batch.max(1)).rev().filter(|rows| batch.max(1).is_multiple_of(*rows)).collect();
    let mut kept: Vec<usize> = Vec::new();
    for rows in all {
        if rows == 1 || kept.last().is_none_or(|last| rows * 3 <= last * 2) {
            kept.push(rows);
        }
    }
    kept
}

#[cfg(test)]
#[path = "job_tests.rs"]
mod tests;
