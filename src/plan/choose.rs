//! The choice: the fastest predicted setting that fits, and what every other choice would cost.

use super::{
    calibrate::Rates,
    predict::seconds,
    table::{Job, Plan, Setting, Target, plan},
};
use crate::{
    device::{DType, arena::Place},
    error::{Error, Report, Result},
    model::{Policy, Recompute},
    optim::OptimizerKind,
};

/// What is fixed; `None` leaves it to the choice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wish {
    /// Rows at a time.
    pub micro_batch: Option<usize>,
    /// What blocks compute again.
    pub recompute: Option<Recompute>,
    /// Rows of logits at a time.
    pub head_rows: Option<usize>,
    /// Whether the base is streamed.
    pub stream: Option<bool>,
    /// Whether inputs of blocks wait elsewhere.
    pub inputs: Option<bool>,
    /// Whether moments are elsewhere.
    pub moments: Option<bool>,
    /// How moments are kept.
    pub optimizer: Option<OptimizerKind>,
    /// Type of activations; F32 on a CPU and F16 on a CUDA device where nothing is fixed.
    pub activations: Option<DType>,
    /// Whether rows at a time, chunks and the optimizer are those of a save, which no option changes.
    pub resumed: bool,
}

/// A plan with the seconds that an optimizer step is predicted to take.
#[derive(Debug, Clone)]
pub struct Predicted {
    /// The plan.
    pub plan: Plan,
    /// Seconds a step, on a machine of the rates it was predicted with.
    pub seconds: f64,
    /// Whether those are rates of this machine.
    pub measured: bool,
}

impl Choice {
    /// Whether `wish` was left nothing to trade: what speeds decide is as it would be with any memory.
    pub fn trades_nothing(&self, wish: Wish) -> bool {
        let Setting { policy, optimizer, .. } = self.chosen.plan.setting;
        policy.recompute == wish.recompute.unwrap_or_default()
            && policy.stream == wish.stream.unwrap_or_default()
            && policy.inputs.is_away() == wish.inputs.unwrap_or_default()
            && policy.moments.is_away() == wish.moments.unwrap_or_default()
            && optimizer == wish.optimizer.unwrap_or_default()
    }
}

impl Predicted {
    fn of(job: &Job, setting: Setting, rates: &Rates) -> Result<Self> {
        Ok(Self { plan: plan(job, setting)?, seconds: seconds(job, setting, rates), measured: true })
    }

    /// Peak bytes.
    pub fn peak(&self) -> u64 {
        self.plan.peak().1
    }
}

/// One choice made otherwise, all others as chosen.
#[derive(Debug, Clone)]
pub struct Alternative {
    /// The option and its value.
    pub option: String,
    /// Bytes at the peak, more or less than chosen.
    pub bytes: i64,
    /// Seconds a step over those of the chosen setting.
    pub time: f64,
    /// Whether it would fit.
    pub fits: bool,
}

/// What was chosen, and what could have been.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The plan to run.
    pub chosen: Predicted,
    /// The bytes it had to fit into; `None` for any number.
    pub budget: Option<u64>,
    /// Other values of what was left to the choice.
    pub alternatives: Vec<Alternative>,
    /// What takes less memory, each by itself and whatever was wished: at most three, the best first.
    pub remedies: Vec<String>,
}

/// Time that moving bytes and waiting for them costs beyond what is predicted, as a part of a step: between
/// nearly equal settings the one that moves none wins.
const MOVING_RISK: f64 = 0.02;
/// Settings whose predicted times differ by less are equally fast, and the smaller one is taken.
const AS_FAST: f64 = 1.01;
/// Saving less than this is no remedy.
const WORTH: u64 = 1 << 20;
/// Chunks of the head to choose from.
const HEAD_ROWS: [usize; 3] = [Policy::HEAD_ROWS, 128, 32];

/// The fastest predicted setting of `job` under `wish` that fits into `budget` bytes.
///
/// # Errors
/// [`Error::Input`] when none fits, with the smallest that there is.
pub fn choose(job: &Job, wish: Wish, budget: Option<u64>, rates: &Rates) -> Result<Choice> {
    let mut settings: Vec<(Setting, f64)> = candidates(job, wish)
        .into_iter()
        .map(|setting| (setting, risky(setting) * seconds(job, setting, rates)))
        .collect();
    settings.sort_by(|a, b| a.1.total_cmp(&b.1));
    let fits = |plan: &Plan| budget.is_none_or(|budget| plan.peak().1 <= budget);
    let mut smallest: Option<Plan> = None;
    let mut found: Option<Plan> = None;
    for &(setting, _) in &settings {
        let plan = plan(job, setting)?;
        if fits(&plan) {
            found = Some(plan);
            break;
        }
        if smallest.as_ref().is_none_or(|least| plan.peak().1 < least.peak().1) {
            smallest = Some(plan);
        }
    }
    let Some(best) = found else {
        let Some(least) = smallest else {
            return Err(Error::failed("there is no way to run this; please report this"));
        };
        // With as many whole MiB as it takes, a faster setting may fit too.
        let enough = least.peak().1.next_multiple_of(1 << 20);
        let would = choose(job, wish, Some(enough), rates)?.chosen.plan.setting;
        return Err(Error::Input(nothing_fits(job, wish, budget, (enough, would))));
    };
    let best = same_everywhere(job, &settings, best, budget)?;
    let chosen = Predicted { seconds: seconds(job, best.setting, rates), plan: best, measured: true };
    let alternatives = alternatives(job, wish, budget, &chosen, rates)?;
    let remedies = remedies(job, wish, &chosen)?;
    Ok(Choice { chosen, budget, alternatives, remedies })
}

/// The single changes that save most at the peak of `chosen`, with what they save.
fn remedies(job: &Job, wish: Wish, chosen: &Predicted) -> Result<Vec<String>> {
    let now = chosen.plan.setting;
    // On a device streaming is never chosen, but may be asked for.
    let streamed = (job.target == Target::Cuda && job.streamable)
        .then_some(Setting { policy: Policy { stream: true, ..now.policy }, ..now });
    let free = Wish { activations: wish.activations, ..Wish::default() };
    let Wish { micro_batch, head_rows, optimizer, .. } = wish;
    let free = if wish.resumed { Wish { micro_batch, head_rows, optimizer, ..free } } else { free };
    let mut less: Vec<(u64, String)> = Vec::new();
    for setting in candidates(job, free).into_iter().chain(streamed) {
        let Some(option) = only_difference(now, setting) else { continue };
        let saved = chosen.peak().saturating_sub(plan(job, setting)?.peak().1);
        // Of several values of an option the one that saves most.
        let name = |option: &str| option.split(' ').next().map(str::to_owned);
        match less.iter_mut().find(|(_, known)| name(known) == name(&option)) {
            Some(known) if known.0 < saved => *known = (saved, option),
            Some(_) => {}
            None => less.push((saved, option)),
        }
    }
    less.retain(|(saved, _)| *saved >= WORTH);
    less.sort_by_key(|(saved, _)| std::cmp::Reverse(*saved));
    Ok(less.into_iter().take(3).map(|(saved, option)| format!("--{option} (-{})", size(saved))).collect())
}

impl Choice {
    /// `report` with what would take less.
    pub fn with_remedies(&self, report: Report) -> Report {
        match self.remedies.as_slice() {
            [] => report,
            some => report.with_hint(format!("what takes less, each by itself: {}", some.join(", "))),
        }
    }
}

/// `best` with the rows at a time, and rows of logits, that are as fast as any by nominal speeds and take
/// the least memory. Rounding depends on these two: they must not follow the noise of a measurement.
fn same_everywhere(job: &Job, settings: &[(Setting, f64)], best: Plan, budget: Option<u64>) -> Result<Plan> {
    let alike = |setting: Setting| {
        let policy = Policy { head_rows: best.setting.policy.head_rows, ..setting.policy };
        Setting { micro_batch: best.setting.micro_batch, policy, ..setting } == best.setting
    };
    let mut family = Vec::new();
    for &(setting, _) in settings.iter().filter(|(setting, _)| alike(*setting)) {
        let plan = plan(job, setting)?;
        if budget.is_none_or(|budget| plan.peak().1 <= budget) {
            family.push((seconds(job, setting, &Rates::NOMINAL), plan));
        }
    }
    let fastest = family.iter().map(|(time, _)| *time).fold(f64::INFINITY, f64::min);
    let near = family.into_iter().filter(|(time, _)| *time <= fastest * AS_FAST);
    Ok(near.map(|(_, plan)| plan).min_by_key(|plan| plan.peak().1).unwrap_or(best))
}

fn risky(setting: Setting) -> f64 {
    let Policy { stream, inputs, moments, .. } = setting.policy;
    let moving = [stream, inputs.is_away(), moments.is_away()];
    let eight_bit = setting.optimizer == OptimizerKind::AdamW8bit;
    // 8-bit states change the result a little: only where nothing else of the kind fits.
    let last = if eight_bit { 1e3 } else { 1.0 };
    last * (1.0 + MOVING_RISK * moving.into_iter().filter(|moves| *moves).count() as f64)
}

/// Every setting that `wish` leaves.
fn candidates(job: &Job, wish: Wish) -> Vec<Setting> {
    let cuda = job.target == Target::Cuda;
    let activations = wish.activations.unwrap_or(if cuda { DType::F16 } else { DType::F32 });
    let micro_batches = wish.micro_batch.map_or_else(|| divisors(job.batch), |rows| vec![rows]);
    let recompute = wish.recompute.map_or_else(|| recomputes(job.config.layers), |one| vec![one]);
    let chunks = wish.head_rows.map_or_else(|| HEAD_ROWS.to_vec(), |rows| vec![rows]);
    let either = |fixed: Option<bool>, possible: bool| match fixed {
        Some(fixed) => vec![fixed],
        None if possible => vec![false, true],
        None => vec![false],
    };
    let place = |away: bool| if away { job.target.away() } else { Place::Memory };
    let optimizers = wish
        .optimizer
        .map_or_else(|| vec![OptimizerKind::AdamW, OptimizerKind::AdamW8bit], |kind| vec![kind]);
    let mut all = Vec::new();
    for &micro_batch in &micro_batches {
        for &recompute in &recompute {
            for &head_rows in &chunks {
                for stream in either(wish.stream, job.streamable && !cuda) {
                    for inputs in either(wish.inputs, true).into_iter().map(place) {
                        for moments in either(wish.moments, true).into_iter().map(place) {
                            for &optimizer in &optimizers {
                                let policy =
                                    Policy { recompute, head_rows, stream, inputs, moments, activations };
                                all.push(Setting { micro_batch, policy, optimizer });
                            }
                        }
                    }
                }
            }
        }
    }
    all
}

/// What a choice between keeping and computing again may be.
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

/// Every single choice made otherwise.
fn alternatives(
    job: &Job,
    wish: Wish,
    budget: Option<u64>,
    chosen: &Predicted,
    rates: &Rates,
) -> Result<Vec<Alternative>> {
    let now = chosen.plan.setting;
    let mut list = Vec::new();
    for setting in candidates(job, wish) {
        let Some(option) = only_difference(now, setting) else { continue };
        let other = Predicted::of(job, setting, rates)?;
        list.push(Alternative {
            option,
            bytes: other.peak() as i64 - chosen.peak() as i64,
            time: other.seconds / chosen.seconds,
            fits: budget.is_none_or(|budget| other.peak() <= budget),
        });
    }
    Ok(list)
}

/// The option in which `other` differs, if it is one.
fn only_difference(now: Setting, other: Setting) -> Option<String> {
    let (a, b) = (now.policy, other.policy);
    let on = |flag: bool| if flag { "on" } else { "off" };
    let differences = [
        (now.micro_batch != other.micro_batch).then(|| format!("micro-batch {}", other.micro_batch)),
        (a.recompute != b.recompute).then(|| format!("recompute {}", b.recompute)),
        (a.head_rows != b.head_rows).then(|| format!("head-rows {}", b.head_rows)),
        (a.stream != b.stream).then(|| format!("stream-base {}", on(b.stream))),
        (a.inputs != b.inputs).then(|| format!("offload-inputs {}", on(b.inputs.is_away()))),
        (a.moments != b.moments).then(|| format!("offload-optimizer {}", on(b.moments.is_away()))),
        (now.optimizer != other.optimizer).then(|| format!("optimizer {}", other.optimizer.name())),
    ];
    let mut found = differences.into_iter().flatten();
    found.next().filter(|_| found.next().is_none())
}

/// The sentence for a job that fits in no way.
fn nothing_fits(job: &Job, wish: Wish, budget: Option<u64>, (enough, would): (u64, Setting)) -> Report {
    let report = Report::new(format!(
        "--memory {}: is too small for {} rows of up to {} tokens; the smallest plan takes {}",
        size(budget.unwrap_or(u64::MAX)),
        job.batch,
        job.seq_len,
        size_up(enough)
    ));
    // On a device streaming has to be asked for: the base is brought there before anything is planned.
    let resident = job.target == Target::Cuda && wish.stream != Some(true);
    let report = match resident {
        true => report.with_hint("--stream-base on keeps two blocks of the base on the device at a time"),
        false => report,
    };
    report
        .with_hint(format!("--memory {} would fit: {would}", size_up(enough)))
        .with_hint("a smaller --seq-len or --rank makes it smaller still")
}

/// Bytes for people, in units of 1024, rounded to nearest.
pub fn size(bytes: u64) -> String {
    let (unit, name) = unit(bytes);
    let value = bytes as f64 / unit as f64;
    if value >= 100.0 || unit == 1 { format!("{value:.0}{name}") } else { format!("{value:.2}{name}") }
}

/// Bytes for people that are enough: rounded up to a whole MiB.
pub fn size_up(bytes: u64) -> String {
    format!("{}MiB", bytes.div_ceil(1 << 20))
}

fn unit(bytes: u64) -> (u64, &'static str) {
    [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
        .into_iter()
        .find(|(unit, _)| bytes >= *unit)
        .unwrap_or((1, "B"))
}
