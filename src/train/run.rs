//! A training run from its first look at the data to the finished adapter.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use engraft_adapters::peft;

use super::{
    Event, Reporter, RunFolder, RunOptions, Trainer, TrainerOptions, base_bytes, events,
    prepare::{Prepared, prepare},
    resume, save,
};
use crate::{
    data::{Batch, Dataset, NO_LOSS, RowRef, Tokenizer},
    error::{Error, Report, Result},
    kernels::arena::{Arenas, TableRow},
    model::Base,
    optim::schedule::rate,
};

/// What a run leaves behind.
#[derive(Debug)]
pub struct Finished {
    /// Folder of the adapter.
    pub adapter: PathBuf,
    /// Beginning of a held-out row (else of a training row): its prompt, or a few tokens of a text.
    pub prompt: Vec<u32>,
}

/// Tokens of a text that make a prompt.
const PROMPT: usize = 16;

/// What stands in front of the first supervised token; of a text, its first tokens.
fn beginning(row: RowRef) -> Vec<u32> {
    let unsupervised = row.targets.iter().take_while(|&&target| target == NO_LOSS).count();
    let len = if unsupervised == 0 { PROMPT } else { unsupervised + 1 };
    row.ids.iter().copied().take(len).collect()
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
    let past = if options.resume { save::newest(&folder.saves())? } else { None };
    let (past, damaged) = past.map_or((None, Vec::new()), |(past, damaged)| (Some(past), damaged));
    let mut prepared = prepare(options, base, tokenizer, past.as_ref(), folder.path())?;
    let longer = match &past {
        None => None,
        Some(past) => {
            resume::check(past, &prepared.info, prepared.set.layout.len, folder.path())?;
            let warmup = |steps| options.warmup.steps(steps);
            resume::changed_length(&past.info, &prepared.info, options.schedule, options.lr, warmup)?
        }
    };
    let mut trainer = build_trainer(options, base, &mut prepared)?;
    if let Some(past) = past {
        resume::check_finite(&past)?;
        trainer.restore(past.info.step, &past.tensors())?;
    }
    folder.claim()?;
    folder.write_config(&options.config_text)?;
    let run = Run { options, base, prepared: &prepared, folder: &folder, interrupt };
    reporter.event(&Event::Start(&run.start(&trainer)))?;
    for note in damaged.iter().chain(&prepared.hints).chain(&longer) {
        reporter.event(&Event::Note(note))?;
    }
    run.train(&mut trainer, reporter)
}

fn build_trainer(options: &RunOptions, base: &Arc<Base>, prepared: &mut Prepared) -> Result<Trainer> {
    let longest = prepared.train.longest().max(prepared.eval.as_ref().map_or(0, Dataset::longest));
    let trainer_options = TrainerOptions {
        rows: options.micro_batch,
        seq_len: longest,
        policy: options.policy,
        optimizer: options.optimizer,
        adamw: options.adamw,
        clip: options.clip,
        label_smoothing: options.label_smoothing,
        seed: options.seed,
    };
    let values = std::mem::take(&mut prepared.values);
    Trainer::new(base.clone(), prepared.set.clone(), values, trainer_options, Arenas::real(None))
}

/// What stays the same while a run runs.
struct Run<'a> {
    options: &'a RunOptions,
    base: &'a Base,
    prepared: &'a Prepared,
    folder: &'a RunFolder,
    interrupt: &'a AtomicBool,
}

impl Run<'_> {
    /// The loop.
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
        if begun_at == 0 {
            self.evaluate(trainer, reporter)?;
        }
        let (mut tokens, mut seconds) = (0, 0.0);
        while trainer.steps_done() < steps {
            self.stop_if_interrupted(trainer)?;
            let (step_tokens, step_seconds) = self.step(trainer, reporter)?;
            tokens += step_tokens;
            seconds += step_seconds;
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
        self.finish(trainer, per_second(tokens, seconds), reporter)
    }

    /// One optimizer step; returns its input tokens and seconds.
    fn step(&self, trainer: &mut Trainer, reporter: &mut dyn Reporter) -> Result<(usize, f64)> {
        let options = self.options;
        let done = trainer.steps_done();
        let batches = self.micro_batches(done);
        let lr = rate(options.schedule, options.lr, self.prepared.warmup, self.prepared.steps, done);
        let started = Instant::now();
        let report = trainer.step(&batches, lr)?;
        let seconds = started.elapsed().as_secs_f64();
        let step = done + 1;
        if !report.loss.is_finite() || !report.grad_norm.is_finite() {
            return Err(Error::failed(format!(
                "step {step}: the loss is {} and the gradient norm {}; lower --lr ({}) or set --clip",
                report.loss, report.grad_norm, options.lr
            )));
        }
        let event = events::Step {
            step,
            steps: self.prepared.steps,
            loss: report.loss,
            lr,
            grad_norm: report.grad_norm,
            tokens: report.tokens,
            tokens_per_s: per_second(report.input_tokens, seconds),
        };
        reporter.event(&Event::Step(&event))?;
        Ok((report.input_tokens, seconds))
    }

    /// The rows of the step after `done` steps, cut into micro-batches.
    fn micro_batches(&self, done: u64) -> Vec<Batch> {
        let (train, batch) = (&self.prepared.train, self.options.batch);
        let drawn = self.prepared.sampler.rows(done * batch as u64, batch);
        drawn.chunks(self.options.micro_batch).map(|chunk| train.batch(chunk)).collect()
    }

    /// Loss over the held-out rows, if there are any.
    fn evaluate(&self, trainer: &mut Trainer, reporter: &mut dyn Reporter) -> Result<()> {
        let Some(eval) = &self.prepared.eval else { return Ok(()) };
        let mut batches =
            eval.batches(self.options.micro_batch).take_while(|_| !self.interrupt.load(Ordering::Relaxed));
        let found = trainer.evaluate(&mut batches);
        // A part of the rows says nothing about all of them.
        self.stop_if_interrupted(trainer)?;
        let found = found?;
        let event = events::Eval { step: trainer.steps_done(), loss: found.loss, tokens: found.tokens };
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

    fn save(&self, trainer: &Trainer, reporter: &mut dyn Reporter) -> Result<()> {
        let path = self.write_save(trainer)?;
        self.write_adapter(trainer)?;
        reporter.event(&Event::Saved(&path))
    }

    fn write_save(&self, trainer: &Trainer) -> Result<PathBuf> {
        let info = save::SaveInfo { step: trainer.steps_done(), ..self.prepared.info.clone() };
        let path = save::write(&self.folder.saves(), &info, &trainer.tensors())?;
        save::prune(&self.folder.saves(), info.step, self.options.keep)?;
        Ok(path)
    }

    fn write_adapter(&self, trainer: &Trainer) -> Result<()> {
        let projected = trainer.projected();
        let (values, description) = (trainer.values(), self.base.description());
        Ok(peft::save(&self.folder.adapter(), trainer.set(), values, projected.as_deref(), &description)?)
    }

    fn finish(&self, trainer: &Trainer, tokens_per_s: f64, reporter: &mut dyn Reporter) -> Result<Finished> {
        let adapter = self.folder.adapter();
        let buffers: usize = trainer.memory().iter().map(TableRow::bytes).sum();
        let peak_bytes = (buffers + base_bytes(&self.base.weights)) as u64;
        let done =
            events::Done { step: trainer.steps_done(), adapter: adapter.clone(), peak_bytes, tokens_per_s };
        reporter.event(&Event::Done(&done))?;
        let rows = self.prepared.eval.as_ref().unwrap_or(&self.prepared.train);
        Ok(Finished { adapter, prompt: rows.rows.iter().next().map(beginning).unwrap_or_default() })
    }

    fn start(&self, trainer: &Trainer) -> events::Start {
        let prepared = self.prepared;
        events::Start {
            base: self.base.name.clone(),
            matched: prepared.set.matched(&self.base.description()),
            trainables: prepared.set.trainables(),
            data: prepared.train.report,
            eval_rows: prepared.eval.as_ref().map_or(0, |eval| eval.rows.len()),
            done: trainer.steps_done(),
            steps: prepared.steps,
            batch: self.options.batch,
            micro_batch: self.options.micro_batch,
            seq_len: prepared.seq_len,
            output: self.folder.path().to_owned(),
        }
    }
}

fn is_due(done: u64, every: u64) -> bool {
    every > 0 && done.is_multiple_of(every)
}

fn per_second(tokens: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}
