//! The choice: the fastest predicted way that fits, and what every other choice would cost.

use std::cmp::Reverse;

use super::{LastResort, Plan, Ways, calibrate::Rates, plan, size, size_up};
use crate::error::{Error, Report, Result};

/// A plan with its predicted time.
#[derive(Debug, Clone)]
pub struct Predicted<C> {
    /// The plan.
    pub plan: Plan<C>,
    /// Seconds that it takes, on a machine of the rates it was predicted with.
    pub seconds: f64,
    /// Whether those are rates of this machine.
    pub measured: bool,
}

impl<C> Predicted<C> {
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
    /// Its seconds over those of the chosen way.
    pub time: f64,
    /// Whether it would fit.
    pub fits: bool,
}

/// What was chosen, and what could have been.
#[derive(Debug, Clone)]
pub struct Selection<C> {
    /// The plan to run.
    pub chosen: Predicted<C>,
    /// The bytes it had to fit into; `None` for any number.
    pub budget: Option<u64>,
    /// Other values of what was left to the choice.
    pub alternatives: Vec<Alternative>,
    /// What takes less memory, each by itself and whatever was asked for: at most three, the best first.
    pub remedies: Vec<String>,
}

impl<C> Selection<C> {
    /// The selection by speeds of some other machine: ratios hold, times do not.
    #[must_use]
    pub fn unmeasured(mut self) -> Self {
        self.chosen.measured = false;
        self
    }

    /// `report` with what would take less.
    pub fn with_remedies(&self, report: Report) -> Report {
        match self.remedies.as_slice() {
            [] => report,
            some => report.with_hint(format!("what takes less, each by itself: {}", some.join(", "))),
        }
    }
}

/// Ways whose predicted times differ by less are equally fast, and the smaller one is taken.
const AS_FAST: f64 = 1.01;
/// Saving less than this is no remedy.
const WORTH: u64 = 1 << 20;

/// The fastest predicted way to do `job` that fits into `budget` bytes.
///
/// # Errors
/// [`Error::Input`] when none fits, with the smallest that there is.
pub fn choose<J: Ways>(job: &J, budget: Option<u64>, rates: &Rates) -> Result<Selection<J::Config>> {
    let mut ways: Vec<(J::Config, f64)> =
        job.ways().into_iter().map(|way| (way, job.risk(way) * job.seconds(way, rates))).collect();
    ways.sort_by(|a, b| a.1.total_cmp(&b.1));
    let ways: Vec<J::Config> = ways.into_iter().map(|(way, _)| way).collect();
    let best = match first_that_fits(job, &ways, budget)? {
        Found::Fits(plan) => plan,
        Found::Smallest(least) => return Err(Error::Input(nothing_fits(job, budget, &ways, &least)?)),
    };
    let best = same_everywhere(job, &ways, best, budget)?;
    let seconds = job.seconds(best.config, rates);
    let chosen = Predicted { plan: best, seconds, measured: true };
    let alternatives = alternatives(job, budget, &chosen, rates)?;
    let remedies = remedies(job, &chosen)?;
    Ok(Selection { chosen, budget, alternatives, remedies })
}

/// What there is within a budget.
enum Found<C> {
    Fits(Plan<C>),
    /// Nothing; this is the smallest plan.
    Smallest(Plan<C>),
}

/// The first of `ways` whose plan fits.
fn first_that_fits<J: Ways>(job: &J, ways: &[J::Config], budget: Option<u64>) -> Result<Found<J::Config>> {
    let mut smallest: Option<Plan<J::Config>> = None;
    for &way in ways {
        let plan = plan(job, way)?;
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
fn remedies<J: Ways>(job: &J, chosen: &Predicted<J::Config>) -> Result<Vec<String>> {
    let now = chosen.plan.config;
    let mut less: Vec<(u64, String)> = Vec::new();
    for way in job.savings(now) {
        let Some(option) = only_difference(job, now, way) else { continue };
        let saved = chosen.peak().saturating_sub(plan(job, way)?.peak().1);
        // Of several values of an option the one that saves most.
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

/// `best` with those parts on which rounding depends that are as fast as any by nominal speeds and take
/// the least memory: they must not follow the noise of a measurement.
fn same_everywhere<J: Ways>(
    job: &J,
    ways: &[J::Config],
    best: Plan<J::Config>,
    budget: Option<u64>,
) -> Result<Plan<J::Config>> {
    let mut family = Vec::new();
    for &way in ways.iter().filter(|way| job.are_alike(**way, best.config)) {
        let plan = plan(job, way)?;
        if budget.is_none_or(|budget| plan.peak().1 <= budget) {
            family.push((job.seconds(way, &Rates::NOMINAL), plan));
        }
    }
    let fastest = family.iter().map(|(time, _)| *time).fold(f64::INFINITY, f64::min);
    let near = family.into_iter().filter(|(time, _)| *time <= fastest * AS_FAST);
    Ok(near.map(|(_, plan)| plan).min_by_key(|plan| plan.peak().1).unwrap_or(best))
}

/// Every single choice made otherwise.
fn alternatives<J: Ways>(
    job: &J,
    budget: Option<u64>,
    chosen: &Predicted<J::Config>,
    rates: &Rates,
) -> Result<Vec<Alternative>> {
    let mut list = Vec::new();
    for way in job.ways() {
        let Some(option) = only_difference(job, chosen.plan.config, way) else { continue };
        let peak = plan(job, way)?.peak().1;
        list.push(Alternative {
            option,
            bytes: peak as i64 - chosen.peak() as i64,
            time: job.seconds(way, rates) / chosen.seconds,
            fits: budget.is_none_or(|budget| peak <= budget),
        });
    }
    Ok(list)
}

/// The option in which `other` differs, if it is one.
fn only_difference<J: Ways>(job: &J, now: J::Config, other: J::Config) -> Option<String> {
    let mut differences = job.differences(now, other);
    let first = differences.pop()?;
    differences.is_empty().then_some(first)
}

/// The sentence for a job of which no way fits, `least` being the smallest; `ways` begin with the fastest.
fn nothing_fits<J: Ways>(
    job: &J,
    budget: Option<u64>,
    ways: &[J::Config],
    least: &Plan<J::Config>,
) -> Result<Report> {
    // With as many whole MiB as it takes, a faster way may fit too.
    let enough = least.peak().1.next_multiple_of(1 << 20);
    let would = match first_that_fits(job, ways, Some(enough))? {
        Found::Fits(plan) => same_everywhere(job, ways, plan, Some(enough))?.config,
        Found::Smallest(plan) => plan.config,
    };
    let mut report = Report::new(format!(
        "--memory {}: is too small for {}; the smallest plan takes {}",
        size(budget.unwrap_or(u64::MAX)),
        job.title(),
        size_up(enough)
    ));
    report = report.with_hint(format!("--memory {} would fit: {would}", size_up(enough)));
    for LastResort { option, ways } in job.last_resorts() {
        let (Found::Smallest(plan) | Found::Fits(plan)) = first_that_fits(job, &ways, Some(0))?;
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
