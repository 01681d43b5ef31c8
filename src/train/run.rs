//! A training run from its first look at the data to the finished adapter.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use engraft_adapters::{Kinds, peft};

use super::{
    Event, PlanConfig, Reporter, RunFolder, RunOptions,
    events::{self, Progress, Stage},
    memory,
    pace::{History, Pace, per_second},
    prepare::{Prepared, describe, prepare},
    record::Recorder,
    resume,
    save::{self, SaveInfo},
};
use crate::{
    data::{Batch, NO_LOSS, RowRef, Tokenizer},
    engine::Trainer,
    error::{Error, Report, Result},
    model::Base,
    observe::{
        counting, machine,
        phase::{self, Phase},
        trace::Trace,
    },
    optim::schedule::rate,
    plan::{Selection, budget, calibrate::Rates, size, size_up},
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

/// Tokens of a text that make a prompt.
const PROMPT: usize = 16;

/// The tokens up to the first supervised one; of a text, its first tokens. Ids from `vocab` on are no text.
fn beginning(row: RowRef, vocab: usize) -> Vec<u32> {
    let text = row.ids.iter().zip(row.targets).filter(|(id, _)| (**id as usize) < vocab);
    let unsupervised = text.clone().take_while(|(_, target)| **target == NO_LOSS).count();
    let len = if unsupervised == 0 { PROMPT } else { unsupervised + 1 };
    text.map(|(id, _)| *id).take(len).collect()
}

/// Trains until the last step, or until `interrupt` is set.
///
/// # Errors
/// Bad input, a failure while running, [`Error::Interrupted`], or an error of the reporter.
pub fn run(
    options: &RunOptions,
    base: &Arc<Base>,
    tokenizer: Option<&Tokenizer>,
    folder: RunFolder,
    reporter: &mut dyn Reporter,
    interrupt: &AtomicBool,
) -> Result<Finished> {
    let is_new = !folder.path().exists();
    let path = folder.path().to_owned();
    let finished = go(options, base, tokenizer, folder, reporter, interrupt);
    if finished.is_err() && is_new {
        // Tokenised rows lay there, without a name, before the run was known to be possible. A folder with
        // anything in it stays.
        let _ = std::fs::remove_dir(path);
    }
    finished
}

/// As [`run`], but may leave an empty folder.
fn go(
    options: &RunOptions,
    base: &Arc<Base>,
    tokenizer: Option<&Tokenizer>,
    mut folder: RunFolder,
    reporter: &mut dyn Reporter,
    interrupt: &AtomicBool,
) -> Result<Finished> {
    let past = if options.resume { save::newest(&folder.saves())? } else { None };
    let (past, damaged) = past.map_or((None, Vec::new()), |(past, damaged)| (Some(past), damaged));
    let trace = options.memory_trace.as_ref().map(|_| Trace::start()).transpose()?;
    let mut reporter = Recorder::new(reporter);
    begin(&mut reporter, Stage::Reading)?;
    let mut prepared = prepare(options, base, tokenizer, past.as_ref(), folder.path())?;
    let past_info = past.as_ref().map(|past| &past.info);
    begin(&mut reporter, Stage::Preparing)?;
    let selection = memory::plan(options, base, &memory::job(options, base, &prepared, past_info))?;
    let info = describe(options, base, &prepared, selection.chosen.plan.config);
    let longer = match &past {
        None => None,
        Some(past) => {
            resume::check(past, &info, prepared.set.layout.len, folder.path())?;
            let warmup = |steps| options.warmup.steps(steps);
            resume::changed_length(&past.info, &info, options.schedule, options.lr, warmup)?
        }
    };
    let setup = Setup { options, base, tokenizer, past: past_info, spool: folder.path() };
    let Planned { mut trainer, selection, before, smaller } = setup.allocate(&mut prepared, selection)?;
    counting::reset_peak();
    // A smaller plan may change the micro-batch.
    let info = describe(options, base, &prepared, selection.chosen.plan.config);
    let done_before = past.as_ref().map(|past| past.info.step);
    if let Some(past) = past {
        resume::check_finite(&past)?;
        trainer.restore(past.info.step, &past.tensors())?;
        trainer.restore_loss_scale(past.info.loss_scale);
    }
    folder.claim()?;
    folder.write_config(&options.config_text)?;
    let history = reporter.open(&folder, done_before)?;
    let run = Run {
        options,
        base,
        prepared: &prepared,
        info,
        selection: &selection,
        before,
        folder: &folder,
        interrupt,
        history,
    };
    reporter.event(&Event::Start(&run.start(&trainer)))?;
    reporter.event(&Event::Plan(&selection))?;
    for note in damaged.iter().chain(&smaller).chain(&prepared.hints).chain(&longer) {
        reporter.event(&Event::Note(note))?;
    }
    let finished = run.train(&mut trainer, &mut reporter);
    if let Err(error) = &finished {
        reporter.failed(trainer.steps_done(), error);
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
    /// Folder for nameless files.
    spool: &'a Path,
}

impl Setup<'_> {
    /// Allocates the memory of `selection`. If less is free than the system reported, another process took
    /// it, and the next smaller plan is tried, once.
    fn allocate(&self, prepared: &mut Prepared, selection: Selection<PlanConfig>) -> Result<Planned> {
        let &Self { options, base, tokenizer, past, spool } = self;
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
        let job = memory::job(options, base, prepared, past);
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

/// The parts of a run that stay the same.
struct Run<'a> {
    options: &'a RunOptions,
    base: &'a Base,
    prepared: &'a Prepared,
    /// The description in saves, at step 0.
    info: SaveInfo,
    selection: &'a Selection<PlanConfig>,
    before: usize,
    folder: &'a RunFolder,
    interrupt: &'a AtomicBool,
    /// What earlier processes recorded.
    history: History,
}

impl Run<'_> {
    /// The loop over optimizer steps.
    fn train(&self, trainer: &mut Trainer, reporter: &mut dyn Reporter) -> Result<Finished> {
        let steps = self.prepared.steps;
        let begun_at = trainer.steps_done();
        if begun_at >= steps {
            reporter.event(&Event::Note(&format!(
                "the run is finished after {steps} steps; a larger --steps goes on"
            )))?;
            // The process that made the last step may have been killed before it wrote the adapter, or
            // removed older saves.
            save::prune(&self.folder.saves(), begun_at, self.options.keep)?;
            self.write_adapter(trainer)?;
            return self.finish(trainer, 0.0, reporter);
        }
        let mut pace = Pace::new(self.history);
        if begun_at == 0 {
            self.evaluate(trainer, &mut pace, reporter)?;
        }
        while trainer.steps_done() < steps {
            self.stop_if_interrupted(trainer)?;
            self.stop_if_memory_is_short(trainer)?;
            self.step(trainer, &mut pace, reporter)?;
            let done = trainer.steps_done();
            if done == steps || is_due(done, self.options.save_every) {
                self.save(trainer, reporter)?;
            }
            if done < steps && is_due(done, self.options.eval_every) {
                self.evaluate(trainer, &mut pace, reporter)?;
            }
        }
        self.write_adapter(trainer)?;
        self.evaluate(trainer, &mut pace, reporter)?;
        if self.is_faster_than_planned(pace.fastest()) {
            Rates::forget(self.options.cache.as_deref(), self.base.weights.wte.arithmetic);
        }
        self.finish(trainer, pace.tokens_per_s(), reporter)
    }

    /// Whether steps of `tokens_per_s` show that the plan's rates are too low. A machine may be slower than
    /// its rates because of other programs, so slow steps show nothing.
    fn is_faster_than_planned(&self, tokens_per_s: f64) -> bool {
        let chosen = &self.selection.chosen;
        let tokens = self.options.batch * self.prepared.longest();
        chosen.measured && tokens_per_s > FASTER * tokens as f64 / chosen.seconds
    }

    /// One optimizer step.
    fn step(&self, trainer: &mut Trainer, pace: &mut Pace, reporter: &mut dyn Reporter) -> Result<()> {
        let options = self.options;
        let done = trainer.steps_done();
        let batches = self.micro_batches(done);
        let lr = rate(options.schedule, options.lr, self.prepared.warmup, self.prepared.steps, done);
        let started = Instant::now();
        let report = trainer.step(&batches, lr).map_err(|error| self.out_of_memory(trainer, error))?;
        let (seconds, smoothed_loss) = pace.step(report.loss, report.input_tokens, started);
        let step = done + 1;
        let event = events::Step {
            step,
            steps: self.prepared.steps,
            loss: report.loss,
            smoothed_loss,
            lr,
            grad_norm: report.grad_norm,
            tokens: report.tokens,
            tokens_per_s: per_second(report.input_tokens, seconds),
            seconds,
            epoch: self.epoch(step),
            elapsed: pace.elapsed(),
            remaining: pace.remaining(self.prepared.steps - step),
            memory: resident(),
            scale: report.scale,
        };
        reporter.event(&Event::Step(&event))
    }

    /// Passes over the training rows that `steps` steps make.
    fn epoch(&self, steps: u64) -> f64 {
        steps as f64 * self.options.batch as f64 / self.prepared.train.rows.len() as f64
    }

    fn micro_batch(&self) -> usize {
        self.selection.chosen.plan.config.micro_batch
    }

    /// The rows of the step after `done` steps, cut into micro-batches.
    fn micro_batches(&self, done: u64) -> Vec<Batch> {
        let (train, batch) = (&self.prepared.train, self.options.batch);
        let drawn = self.prepared.sampler.rows(done * batch as u64, batch);
        drawn.chunks(self.micro_batch()).map(|chunk| train.batch(chunk)).collect()
    }

    /// Loss over the held-out rows, if there are any.
    fn evaluate(&self, trainer: &mut Trainer, pace: &mut Pace, reporter: &mut dyn Reporter) -> Result<()> {
        let Some(eval) = &self.prepared.eval else { return Ok(()) };
        phase::enter(Phase::Evaluation);
        let started = Instant::now();
        let mut progress = Progress { stage: Stage::Evaluating, done: 0, total: eval.rows.len() as u64 };
        // A batch is handed out when those before it are done. What cannot be shown is no reason to stop.
        let mut show = |batch: &Batch| {
            let _ = reporter.event(&Event::Progress(&progress));
            progress.done += batch.rows as u64;
        };
        let batches = eval.batches(self.micro_batch()).take_while(|_| !self.interrupt.load(Ordering::Relaxed));
        let found = trainer.evaluate(&mut batches.inspect(|batch| show(batch)));
        // A part of the rows says nothing about all of them.
        self.stop_if_interrupted(trainer)?;
        let found = found?;
        let seconds = started.elapsed().as_secs_f64();
        pace.evaluated(seconds);
        let step = trainer.steps_done();
        let event = events::Eval {
            step,
            loss: found.loss,
            tokens: found.tokens,
            seconds,
            epoch: self.epoch(step),
            elapsed: pace.elapsed(),
            memory: resident(),
        };
        reporter.event(&Event::Eval(&event))
    }

    /// After a signal: saves, so that `--resume` loses nothing, and stops.
    fn stop_if_interrupted(&self, trainer: &Trainer) -> Result<()> {
        if !self.interrupt.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.write_save(trainer)?;
        let output = self.folder.path().display();
        let message = format!("interrupted after step {}; everything is saved", trainer.steps_done());
        Err(Error::Interrupted(Report::new(message))
            .hint(format!("engraft train --resume --output {output}")))
    }

    /// Stops while there is still memory to save with.
    fn stop_if_memory_is_short(&self, trainer: &Trainer) -> Result<()> {
        match (self.options.free_memory)() {
            Some(free) if free < budget::LOW => {
                let message = format!("{} of memory are free, which is too little to go on", size(free));
                Err(self.out_of_memory(trainer, Error::memory(message)))
            }
            _ => Ok(()),
        }
    }

    /// After [`Error::Memory`]: saves, and tells how to go on; any other error passes.
    fn out_of_memory(&self, trainer: &Trainer, error: Error) -> Error {
        let Error::Memory(report) = error else { return error };
        if let Err(unsaved) = self.write_save(trainer) {
            return Error::Memory(report.with_hint(unsaved.to_string()));
        }
        let output = self.folder.path().display();
        let less = size_up(self.selection.chosen.peak() / 4 * 3);
        Error::Memory(
            report
                .with_hint(format!("everything is saved after step {}", trainer.steps_done()))
                .with_hint(format!("engraft train --resume --output {output} --memory {less}"))
                .with_hint("or free memory, and resume without --memory"),
        )
    }

    fn save(&self, trainer: &Trainer, reporter: &mut dyn Reporter) -> Result<()> {
        let started = Instant::now();
        begin(reporter, Stage::Saving)?;
        let path = self.write_save(trainer)?;
        self.write_adapter(trainer)?;
        let (step, seconds) = (trainer.steps_done(), started.elapsed().as_secs_f64());
        reporter.event(&Event::Saved(&events::Saved { step, path, seconds }))
    }

    fn write_save(&self, trainer: &Trainer) -> Result<PathBuf> {
        phase::enter(Phase::Saving);
        let loss_scale = trainer.loss_scale();
        let info = save::SaveInfo { step: trainer.steps_done(), loss_scale, ..self.info.clone() };
        let path = save::write(&self.folder.saves(), &info, &trainer.tensors())?;
        save::prune(&self.folder.saves(), info.step, self.options.keep)?;
        Ok(path)
    }

    fn write_adapter(&self, trainer: &Trainer) -> Result<()> {
        let projected = trainer.projected();
        let (values, description) = (trainer.values(), self.base.description());
        Ok(peft::save(&self.folder.adapter(), trainer.set(), &values, projected.as_deref(), &description)?)
    }

    fn finish(&self, trainer: &Trainer, tokens_per_s: f64, reporter: &mut dyn Reporter) -> Result<Finished> {
        let adapter = self.folder.adapter();
        let done = events::Done {
            step: trainer.steps_done(),
            adapter: adapter.clone(),
            peak_bytes: self.selection.chosen.peak(),
            counted: self.counted(),
            measured_bytes: machine::resident().map(|resident| resident.peak),
            tokens_per_s,
        };
        reporter.event(&Event::Done(&done))?;
        let rows = self.prepared.eval.as_ref().unwrap_or(&self.prepared.train);
        let vocab = self.base.config.vocab;
        let prompt = rows.rows.iter().next().map(|row| beginning(row, vocab)).unwrap_or_default();
        Ok(Finished { step: done.step, adapter, prompt })
    }

    fn counted(&self) -> Option<events::Counted> {
        let planned = self.before as u64 + self.selection.chosen.plan.counted();
        let counted = counting::measured_peak() as u64;
        // The plan of a run on a device does not count the host's memory.
        (counting::peak() > 0 && self.base.device.own_memory().is_none())
            .then_some(events::Counted { planned, counted })
    }

    fn start(&self, trainer: &Trainer) -> events::Start {
        let prepared = self.prepared;
        events::Start {
            base: self.base.name.clone(),
            method: Kinds::of(&prepared.set.spec).map_or_else(String::new, |kinds| kinds.to_string()),
            matched: prepared.set.matched(&self.base.description()),
            trainables: prepared.set.trainables(),
            data: prepared.train.report,
            eval_rows: prepared.eval.as_ref().map_or(0, |eval| eval.rows.len()),
            done: trainer.steps_done(),
            steps: prepared.steps,
            batch: self.options.batch,
            micro_batch: self.micro_batch(),
            seq_len: prepared.seq_len,
            output: self.folder.path().to_owned(),
            machine: self.options.machine.clone(),
            config: self.options.config_text.clone(),
        }
    }
}

fn is_due(done: u64, every: u64) -> bool {
    every > 0 && done.is_multiple_of(every)
}

/// How many times as fast as planned a step is that nothing but wrong rates explains.
const FASTER: f64 = 1.5;

/// Tells that a stage begins whose length is not known.
fn begin(reporter: &mut dyn Reporter, stage: Stage) -> Result<()> {
    reporter.event(&Event::Progress(&Progress { stage, done: 0, total: 0 }))
}

/// Resident bytes of the process.
fn resident() -> Option<u64> {
    machine::resident().map(|resident| resident.total)
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
