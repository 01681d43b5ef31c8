//! The loop over optimizer steps: evaluations, saves, and the ways it ends.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use engraft_adapters::{Kinds, peft};
use engraft_util::words::count;

use super::{
    Event, Finished, PlanConfig, Reporter, RunFolder, RunOptions,
    events::{self, Stage},
    pace::{Pace, per_second},
    prepare::Prepared,
    save::{self, SaveInfo},
};
use crate::{
    data::{Batch, NO_LOSS, RowRef},
    engine::Trainer,
    error::{Error, Report, Result},
    model::Base,
    observe::{
        counting, machine,
        phase::{self, Phase},
    },
    optim::schedule::rate,
    plan::{Selection, budget, calibrate::Rates, size, size_up},
};

/// The parts of a run that stay the same.
pub(super) struct Run<'a> {
    pub options: &'a RunOptions,
    pub base: &'a Base,
    pub prepared: &'a Prepared,
    /// The description in saves, at step 0.
    pub info: SaveInfo,
    pub selection: &'a Selection<PlanConfig>,
    /// Bytes on heap and in arenas before any of the plan was there.
    pub before: usize,
    pub folder: &'a RunFolder,
    pub interrupt: &'a AtomicBool,
    /// Clock and counters, which go on from what earlier processes recorded.
    pub pace: Pace,
}

impl Run<'_> {
    /// The loop over optimizer steps.
    ///
    /// # Errors
    /// As [`super::run()`] after its start.
    pub fn train(&mut self, trainer: &mut Trainer, reporter: &mut dyn Reporter) -> Result<Finished> {
        let steps = self.prepared.steps;
        let begun_at = trainer.steps_done();
        if begun_at >= steps {
            reporter.event(&Event::Note(&format!(
                "the run is finished after {}; a larger --steps goes on",
                count(steps, "step")
            )))?;
            // The process that made the last step may have been killed before it wrote the adapter, or
            // removed older saves.
            save::prune(&self.folder.saves(), begun_at, self.options.keep)?;
            self.write_adapter(trainer)?;
            return self.finish(trainer, 0.0, reporter);
        }
        if begun_at == 0 {
            self.evaluate(trainer, reporter)?;
        }
        while trainer.steps_done() < steps {
            self.stop_if_interrupted(trainer, reporter)?;
            self.stop_if_memory_is_short(trainer)?;
            self.step(trainer, reporter)?;
            let done = trainer.steps_done();
            if done == steps || is_due(done, self.options.save_every) {
                self.save(trainer, reporter)?;
            }
            if done < steps && is_due(done, self.options.eval_every) {
                self.evaluate(trainer, reporter)?;
            }
        }
        self.write_adapter(trainer)?;
        self.evaluate(trainer, reporter)?;
        if self.is_faster_than_planned(self.pace.fastest()) {
            Rates::forget(self.options.cache.as_deref(), self.base.weights.wte.arithmetic);
        }
        self.finish(trainer, self.pace.tokens_per_s(), reporter)
    }

    /// Whether steps of `tokens_per_s` show that the plan's rates are too low. A machine may be slower than
    /// its rates because of other programs, so slow steps show nothing.
    fn is_faster_than_planned(&self, tokens_per_s: f64) -> bool {
        let chosen = &self.selection.chosen;
        let tokens = self.options.batch as f64 * self.prepared.statistics.padded_length(1);
        chosen.measured && tokens_per_s > FASTER * tokens / chosen.seconds
    }

    /// One optimizer step.
    fn step(&mut self, trainer: &mut Trainer, reporter: &mut dyn Reporter) -> Result<()> {
        let options = self.options;
        let done = trainer.steps_done();
        let batches = self.micro_batches(done);
        let lr = rate(options.schedule, options.lr, self.prepared.warmup, self.prepared.steps, done);
        let started = Instant::now();
        let report = trainer.step(&batches, lr).map_err(|error| self.out_of_memory(trainer, error))?;
        let (seconds, smoothed_loss) = self.pace.step(report.loss, report.input_tokens, started);
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
            elapsed: self.pace.elapsed(),
            remaining: self.pace.remaining(self.prepared.steps - step),
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
    fn evaluate(&mut self, trainer: &mut Trainer, reporter: &mut dyn Reporter) -> Result<()> {
        let Some(eval) = &self.prepared.eval else { return Ok(()) };
        let interrupt = self.interrupt;
        phase::enter(Phase::Evaluation);
        let started = Instant::now();
        let mut progress =
            events::StageProgress { stage: Stage::Evaluating, done: 0, total: eval.rows.len() as u64 };
        // A batch is handed out when those before it are done. That it cannot be shown is no reason to stop.
        let show = |batch: &Batch| {
            let _ = reporter.event(&Event::Progress(progress));
            progress.done += batch.rows as u64;
        };
        let batches = eval.batches(self.micro_batch()).take_while(|_| !interrupt.load(Ordering::Relaxed));
        let found = trainer.evaluate(&mut batches.inspect(show));
        // A part of the rows says nothing about all of them.
        self.stop_if_interrupted(trainer, reporter)?;
        let found = found?;
        let seconds = started.elapsed().as_secs_f64();
        self.pace.evaluated(seconds);
        let step = trainer.steps_done();
        let event = events::Eval {
            step,
            loss: found.loss,
            tokens: found.tokens,
            seconds,
            epoch: self.epoch(step),
            elapsed: self.pace.elapsed(),
            memory: resident(),
        };
        reporter.event(&Event::Eval(&event))
    }

    /// After a signal: saves, so that `--resume` loses nothing, writes the adapter, and stops.
    fn stop_if_interrupted(&self, trainer: &Trainer, reporter: &mut dyn Reporter) -> Result<()> {
        if !self.interrupt.load(Ordering::Relaxed) {
            return Ok(());
        }
        let save = self.write_save(trainer)?;
        self.write_adapter(trainer)?;
        let (step, steps) = (trainer.steps_done(), self.prepared.steps);
        let adapter = self.folder.adapter();
        let message = format!(
            "interrupted after step {step} of {steps}; saved, and the adapter of this step is in {}",
            adapter.display()
        );
        reporter.event(&Event::Interrupted(&events::Interrupted { step, steps, adapter, save }))?;
        Err(Error::Interrupted(Report::new(message)).hint(self.folder.resume_command()))
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
        let resume = self.folder.resume_command();
        let less = size_up(self.selection.chosen.peak() / 4 * 3);
        Error::Memory(
            report
                .with_hint(format!("everything is saved after step {}", trainer.steps_done()))
                .with_hint(format!("{resume} --memory {less}"))
                .with_hint("or free memory, and resume without --memory"),
        )
    }

    fn save(&self, trainer: &Trainer, reporter: &mut dyn Reporter) -> Result<()> {
        let started = Instant::now();
        reporter.event(&Event::begun(Stage::Saving))?;
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

    /// What is known before the first step.
    pub fn start(&self, trainer: &Trainer) -> events::Start {
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

/// Resident bytes of the process.
fn resident() -> Option<u64> {
    machine::resident().map(|resident| resident.total)
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
