//! A training run from its first look at the data to the finished adapter.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
};

use super::{
    Event, PlanConfig, Reporter, RunFolder, RunOptions,
    card::{Card, CardWriter},
    events::Stage,
    job::TrainingJob,
    memory,
    pace::Pace,
    prepare::{Prepared, describe, prepare},
    record::Recorder,
    resume,
    save::{self, SaveInfo},
    steps::Run,
};
use crate::{
    data::Tokenizer,
    engine::Trainer,
    error::{Error, Result},
    model::Base,
    observe::{counting, trace::Trace},
    plan::{Selection, size},
};

/// The result of a run.
#[derive(Debug)]
pub struct Finished {
    /// Number of steps done.
    pub step: u64,
    /// Path of the adapter's folder.
    pub adapter: PathBuf,
    /// Beginning of a held-out row (else of a training row): its prompt, or a few tokens of a text.
    pub prompt: Vec<u32>,
}

/// Trains until the last step, or until `interrupt` is set.
///
/// # Errors
/// Bad input, a failure while running, [`Error::Interrupted`], or an error of the reporter.
pub fn run(
    options: &RunOptions,
    base: &Arc<Base>,
    tokenizer: Option<&Tokenizer>,
    mut folder: RunFolder,
    reporter: &mut dyn Reporter,
    interrupt: &AtomicBool,
) -> Result<Finished> {
    let past = match options.resume_from {
        Some(step) => Some((save::of_step(&folder.saves(), step)?, Vec::new())),
        None if options.resume => save::newest(&folder.saves())?,
        None => None,
    };
    let (past, damaged) = past.map_or((None, Vec::new()), |(past, damaged)| (Some(past), damaged));
    let trace = options.memory_trace.as_ref().map(|_| Trace::start()).transpose()?;
    let mut recorder = Recorder::new(reporter);
    recorder.event(&Event::begun(Stage::Reading))?;
    let mut prepared = prepare(options, base, tokenizer, past.as_ref(), folder.path())?;
    let past_info = past.as_ref().map(|past| &past.info);
    recorder.event(&Event::begun(Stage::Preparing))?;
    let (selection, program) = {
        let job = memory::job(options, base, &prepared, past_info);
        (memory::plan(options, base, &job)?, job.program)
    };
    let info = describe(options, base, &prepared, selection.chosen.plan.config);
    let longer = match &past {
        None => None,
        Some(past) => {
            resume::check(past, &info, prepared.set.layout.len, folder.path())?;
            let warmup = |steps| options.warmup.steps(steps);
            resume::changed_length(&past.info, &info, options.schedule, warmup)?
        }
    };
    let setup = Setup { options, base, tokenizer, past: past_info, program, spool: folder.path() };
    let Planned { mut trainer, selection, before, smaller } = setup.allocate(&mut prepared, selection)?;
    counting::reset_peak();
    // A smaller plan may change the micro-batch.
    let info = describe(options, base, &prepared, selection.chosen.plan.config);
    let progress = past.as_ref().map(|past| past.info.progress.clone()).unwrap_or_default();
    let done_before = past.as_ref().map(|past| past.info.step);
    if let Some(past) = past {
        resume::check_finite(&past)?;
        trainer.restore(past.info.step, &past.tensors())?;
        trainer.restore_loss_scale(past.info.loss_scale);
    }
    folder.claim()?;
    folder.write_config(&options.config_text)?;
    if let Some(step) = options.resume_from {
        // Or a later --resume would go on from one of the saves that this run leaves behind.
        save::prune(&folder.saves(), step, usize::MAX)?;
    }
    let history = recorder.open(&folder, done_before)?;
    let mut run = Run {
        options,
        base,
        tokenizer,
        prepared: &prepared,
        info,
        progress,
        selection: &selection,
        before,
        folder: &folder,
        interrupt,
        pace: Pace::new(history),
    };
    let done = trainer.steps_done();
    let card = Card::new(options, base.description(), &prepared, done);
    let mut reporter = CardWriter::new(&mut recorder, card, folder.path());
    reporter.event(&Event::Start(&run.start(&trainer)))?;
    reporter.event(&Event::Plan(&selection))?;
    for note in damaged.iter().chain(&smaller).chain(&prepared.hints).chain(&longer) {
        reporter.event(&Event::Note(note))?;
    }
    let finished = run.train(&mut trainer, &mut reporter);
    if matches!(finished, Err(Error::Interrupted(_))) {
        // What is wrong with a card must not hide how to go on.
        let _ = reporter.write();
    }
    if let Err(error) = &finished {
        recorder.failed(trainer.steps_done(), error);
    }
    // Also of a run that failed: its user wants to see why.
    if let (Some(trace), Some(path)) = (trace, &options.memory_trace) {
        let plan = &selection.chosen.plan;
        let written = trace.finish()?.write(path, &plan.by_phase(), plan.peak().1);
        return finished.and_then(|finished| written.map(|()| finished));
    }
    finished
}

/// A trainer and the plan it was made by.
struct Planned {
    trainer: Trainer,
    selection: Selection<PlanConfig>,
    /// Bytes on heap and in arenas before any of the plan was there.
    before: usize,
    /// Why it is not the plan that was chosen first.
    smaller: Option<String>,
}

/// Everything that a trainer is made from, except rows and plan.
struct Setup<'a> {
    options: &'a RunOptions,
    base: &'a Arc<Base>,
    tokenizer: Option<&'a Tokenizer>,
    /// The save that the run goes on from.
    past: Option<&'a SaveInfo>,
    /// Bytes of memory that the process held when the first plan was chosen.
    program: u64,
    /// Folder for nameless files.
    spool: &'a Path,
}

impl Setup<'_> {
    /// Allocates the memory of `selection`. If less is free than the system reported, another process took
    /// it, and the next smaller plan is tried, once.
    fn allocate(&self, prepared: &mut Prepared, selection: Selection<PlanConfig>) -> Result<Planned> {
        let &Self { options, base, tokenizer, past, program, spool } = self;
        let before = counting::measured();
        let stream = selection.chosen.plan.config.policy.stream;
        let values = prepared.values(options, base, tokenizer, stream)?;
        let trainer = |selection: &Selection<PlanConfig>| {
            memory::trainer(options, base, prepared, &values, selection, spool)
        };
        let reason = match trainer(&selection) {
            Err(Error::Memory(reason)) => reason,
            trainer => return Ok(Planned { trainer: trainer?, selection, before, smaller: None }),
        };
        // Peaks of two plans can be compared only with the same program in both: threads come and go.
        let job = TrainingJob { program, ..memory::job(options, base, prepared, past) };
        let Ok(selection) = memory::smaller(options, base, &job, &selection) else {
            return Err(Error::Memory(selection.with_remedies(reason)));
        };
        let trainer = trainer(&selection).map_err(|error| match error {
            Error::Memory(reason) => Error::Memory(selection.with_remedies(reason)),
            other => other,
        })?;
        let smaller = format!(
            "{}; going on with the next smaller plan, {} at its peak: {}",
            reason.message,
            size(selection.chosen.peak()),
            selection.chosen.plan.config
        );
        Ok(Planned { trainer, selection, before, smaller: Some(smaller) })
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
