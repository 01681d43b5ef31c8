//! The choice: the fastest predicted way that fits, and the cost of every other one.

use std::cmp::Reverse;

use super::{Candidates, LastResort, Plan, calibrate::Rates, plan, size, size_up};
use crate::error::{Error, Report, Result};

/// A plan with its predicted time.
#[derive(Debug, Clone)]
pub struct Predicted<C> {
    /// The memory of the way.
    pub plan: Plan<C>,
    /// Seconds that it takes, on a machine of the rates it was predicted with.
    pub seconds: f64,
    /// Whether these are seconds on this machine.
    pub measured: bool,
}

impl<C> Predicted<C> {
    /// Bytes of the planned memory in the phase that takes most.
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
    /// Its seconds over those of the chosen way.
    pub time: f64,
    /// Whether it would fit into the budget.
    pub fits: bool,
}

/// The chosen way and its alternatives.
#[derive(Debug, Clone)]
pub struct Selection<C> {
    /// The chosen plan.
    pub chosen: Predicted<C>,
    /// The budget in bytes; `None` if there was none.
    pub budget: Option<u64>,
    /// Other values of what was left to the choice.
    pub alternatives: Vec<Alternative>,
    /// Options that each save memory on their own, also against the user's choice: at most three, the best
    /// first.
    pub remedies: Vec<String>,
}

impl<C> Selection<C> {
    /// The selection by speeds of some other machine: ratios hold, times do not.
    #[must_use]
    pub fn unmeasured(mut self) -> Self {
        self.chosen.measured = false;
        self
    }

    /// `report` with the options that would take less.
    pub fn with_remedies(&self, report: Report) -> Report {
        match self.remedies.as_slice() {
            [] => report,
            some => report.with_hint(format!("what takes less, each by itself: {}", some.join(", "))),
        }
    }
}

/// Candidates whose predicted times differ by less are equally fast, and the smaller one is taken.
const AS_FAST: f64 = 1.01;
/// Saving less than this is no remedy.
const WORTH: u64 = 1 << 20;

/// The fastest predicted way to do `job` that fits into `budget` bytes.
///
/// # Errors
/// [`Error::Input`] when none fits, with the smallest that there is.
pub fn choose<J: Candidates>(job: &J, budget: Option<u64>, rates: &Rates) -> Result<Selection<J::Config>> {
    let mut candidates: Vec<(J::Config, f64)> = job
        .candidates()
        .into_iter()
        .map(|config| (config, job.risk(config) * job.seconds(config, rates)))
        .collect();
    candidates.sort_by(|a, b| a.1.total_cmp(&b.1));
    let candidates: Vec<J::Config> = candidates.into_iter().map(|(config, _)| config).collect();
    let best = match first_that_fits(job, &candidates, budget)? {
        Found::Fits(plan) => plan,
        Found::Smallest(least) => return Err(Error::Input(nothing_fits(job, budget, &candidates, &least)?)),
    };
    let best = same_everywhere(job, &candidates, best, budget)?;
    let seconds = job.seconds(best.config, rates);
    let chosen = Predicted { plan: best, seconds, measured: true };
    let alternatives = alternatives(job, budget, &chosen, rates)?;
    let remedies = remedies(job, &chosen)?;
    Ok(Selection { chosen, budget, alternatives, remedies })
}

/// The result of a search within a budget.
enum Found<C> {
    Fits(Plan<C>),
    /// Nothing; this is the smallest plan.
    Smallest(Plan<C>),
}

/// The first of `candidates` whose plan fits.
fn first_that_fits<J: Candidates>(
    job: &J,
    candidates: &[J::Config],
    budget: Option<u64>,
) -> Result<Found<J::Config>> {
    let mut smallest: Option<Plan<J::Config>> = None;
    for &config in candidates {
        let plan = plan(job, config)?;
        let peak = plan.peak().1;
        if budget.is_none_or(|budget| peak <= budget) {
            return Ok(Found::Fits(plan));
        }
        if smallest.as_ref().is_none_or(|least| peak < least.peak().1) {
            smallest = Some(plan);
        }
    }
    let none = || Error::failed("there is no way to run this; please report this");
    smallest.map(Found::Smallest).ok_or_else(none)
}

/// The single changes that save most at the peak of `chosen`, with what they save.
fn remedies<J: Candidates>(job: &J, chosen: &Predicted<J::Config>) -> Result<Vec<String>> {
    let now = chosen.plan.config;
    let mut less: Vec<(u64, String)> = Vec::new();
    for config in job.savings(now) {
        let Some(option) = only_difference(job, now, config) else { continue };
        let saved = chosen.peak().saturating_sub(plan(job, config)?.peak().1);
        // Several values of an option are one remedy: the one that saves most.
        let name = |option: &str| option.split(' ').next().map(str::to_owned);
        match less.iter_mut().find(|(_, known)| name(known) == name(&option)) {
            Some(known) if known.0 < saved => *known = (saved, option),
            Some(_) => {}
            None => less.push((saved, option)),
        }
    }
    less.retain(|(saved, _)| *saved >= WORTH);
    less.sort_by_key(|(saved, _)| Reverse(*saved));
    Ok(less.into_iter().take(3).map(|(saved, option)| format!("--{option} (-{})", size(saved))).collect())
}

/// `best` with those parts on which rounding depends that are as fast as any by the nominal speeds of the device's kind
/// and take the least memory: they must not follow the noise of a measurement.
fn same_everywhere<J: Candidates>(
    job: &J,
    candidates: &[J::Config],
    best: Plan<J::Config>,
    budget: Option<u64>,
) -> Result<Plan<J::Config>> {
    let nominal = &job.device().kind.nominal_rates;
    let mut family = Vec::new();
    for &config in candidates.iter().filter(|config| job.are_alike(**config, best.config)) {
        let plan = plan(job, config)?;
        if budget.is_none_or(|budget| plan.peak().1 <= budget) {
            family.push((job.seconds(config, nominal), plan));
        }
    }
    let fastest = family.iter().map(|(time, _)| *time).fold(f64::INFINITY, f64::min);
    let near = family.into_iter().filter(|(time, _)| *time <= fastest * AS_FAST);
    Ok(near.map(|(_, plan)| plan).min_by_key(|plan| plan.peak().1).unwrap_or(best))
}

/// Every single choice made otherwise.
fn alternatives<J: Candidates>(
    job: &J,
    budget: Option<u64>,
    chosen: &Predicted<J::Config>,
    rates: &Rates,
) -> Result<Vec<Alternative>> {
    let mut list = Vec::new();
    for config in job.candidates() {
        let Some(option) = only_difference(job, chosen.plan.config, config) else { continue };
        let peak = plan(job, config)?.peak().1;
        list.push(Alternative {
            option,
            bytes: peak as i64 - chosen.peak() as i64,
            time: job.seconds(config, rates) / chosen.seconds,
            fits: budget.is_none_or(|budget| peak <= budget),
        });
    }
    Ok(list)
}

/// The option in which `other` differs, if it is one.
fn only_difference<J: Candidates>(job: &J, now: J::Config, other: J::Config) -> Option<String> {
    let mut differences = job.differences(now, other);
    let first = differences.pop()?;
    differences.is_empty().then_some(first)
}

/// The sentence for a job of which no way fits, `least` being the smallest; `candidates` begin with the fastest.
fn nothing_fits<J: Candidates>(
    job: &J,
    budget: Option<u64>,
    candidates: &[J::Config],
    least: &Plan<J::Config>,
) -> Result<Report> {
    // With as many whole MiB as it takes, a faster way may fit too.
    let enough = least.peak().1.next_multiple_of(1 << 20);
    let would = match first_that_fits(job, candidates, Some(enough))? {
        Found::Fits(plan) => same_everywhere(job, candidates, plan, Some(enough))?.config,
        Found::Smallest(plan) => plan.config,
    };
    let released = released(job, least)?;
    let fixed = released.as_ref().map_or(String::new(), |(pins, _)| format!("with {pins} fixed "));
    let mut report = Report::new(format!(
        "--memory {}: is too small for {}; {fixed}the smallest plan takes {}",
        size(budget.unwrap_or(u64::MAX)),
        job.title(),
        size_up(enough)
    ));
    if let Some((pins, peak)) = released {
        report = report.with_hint(format!("without {pins} the smallest plan takes {}", size_up(peak)));
    }
    report = report.with_hint(format!("--memory {} would fit: {would}", size_up(enough)));
    for LastResort { option, candidates } in job.last_resorts() {
        let (Found::Smallest(plan) | Found::Fits(plan)) = first_that_fits(job, &candidates, Some(0))?;
        let peak = plan.peak().1;
        let saved = least.peak().1.saturating_sub(peak);
        if saved >= WORTH {
            report = report.with_hint(format!(
                "with --{option} the smallest plan takes {} (-{})",
                size_up(peak),
                size(saved)
            ));
        }
    }
    Ok(job.advice().into_iter().fold(report, Report::with_hint))
}

/// The options that the user fixed and that the smallest plan of all has otherwise than `least`, the smallest
/// with them, and that plan's peak; `None` if it is as large.
fn released<J: Candidates>(job: &J, least: &Plan<J::Config>) -> Result<Option<(String, u64)>> {
    let candidates = job.released();
    if candidates.is_empty() {
        return Ok(None);
    }
    let (Found::Smallest(plan) | Found::Fits(plan)) = first_that_fits(job, &candidates, Some(0))?;
    let peak = plan.peak().1;
    let fixed = job.fixed();
    let is_fixed = |option: &String| option.split(' ').next().is_some_and(|name| fixed.contains(&name));
    let pins = job.differences(plan.config, least.config).into_iter().filter(is_fixed);
    let pins: Vec<String> = pins.map(|option| format!("--{option}")).collect();
    let saved = least.peak().1.saturating_sub(peak);
    Ok((saved >= WORTH && !pins.is_empty()).then(|| (listed(&pins), peak)))
}

/// `a`, `a and b`, `a, b and c`.
fn listed(items: &[String]) -> String {
    match items {
        [first @ .., last] if !first.is_empty() => format!("{} and {last}", first.join(", ")),
        few => few.concat(),
    }
}
