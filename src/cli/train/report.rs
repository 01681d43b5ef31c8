//! Prints the events of a run: lines and a progress bar for people, or one JSON object per line.

use std::{
    io::{self, IsTerminal},
    time::Duration,
};

use indicatif::{HumanCount, ProgressBar, ProgressStyle};
use serde_json::json;

use crate::{
    cli::common::output::{count, one_line, write_json, write_note, write_out},
    cli::train::table,
    error::Result,
    plan::{Selection, size},
    train::{
        Event, PlanConfig, Reporter,
        events::{Done, Eval, Sample, Start, Step},
    },
};

/// One JSON object per line on stdout.
pub struct JsonReporter;

impl Reporter for JsonReporter {
    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        match event {
            Event::Start(_) | Event::Saved(_) => Ok(()),
            Event::Plan(selection) => write_json(&table::event(selection)),
            Event::Note(note) => {
                write_note(&format!("hint: {note}"));
                Ok(())
            }
            Event::Step(step) => {
                let mut line = json!({
                    "event": "step", "step": step.step, "loss": step.loss, "lr": step.lr,
                    "grad_norm": step.grad_norm, "tokens": step.tokens, "tokens_per_s": step.tokens_per_s,
                });
                if step.scale.is_dynamic() {
                    line["loss_scale"] = json!(step.scale.factor());
                    line["overflows"] = json!(step.scale.skipped());
                }
                write_json(&line)
            }
            Event::Eval(eval) => {
                let mut line = json!({
                    "event": "eval", "step": eval.step, "loss": eval.loss,
                    "perplexity": eval.perplexity(), "tokens": eval.tokens,
                });
                if let Some(best) = eval.best {
                    line["best"] = json!(best);
                }
                write_json(&line)
            }
            Event::Sample(sample) => write_json(&json!({
                "event": "sample", "step": sample.step, "prompt": sample.prompt, "text": sample.text,
            })),
            Event::Done(done) => write_json(&json!({
                "event": "done", "step": done.step, "adapter": done.adapter.display().to_string(),
                "peak_bytes": done.peak_bytes, "measured_bytes": done.measured_bytes,
                "counted_bytes": done.counted.map(|both| both.counted),
                "planned_counted_bytes": done.counted.map(|both| both.planned),
                "tokens_per_s": done.tokens_per_s,
            })),
        }
    }
}

/// Results on stdout, progress on stderr.
pub struct HumanReporter {
    /// Steps between lines where there is no bar.
    log_every: u64,
    /// Shown when the run begins.
    hints: Vec<&'static str>,
    bar: Option<ProgressBar>,
}

impl HumanReporter {
    /// A reporter that shows a bar if stderr is a terminal, else a line every `log_every` steps.
    pub fn new(log_every: u64, hints: Vec<&'static str>) -> Self {
        let bar = io::stderr().is_terminal().then(ProgressBar::no_length);
        Self { log_every, hints, bar }
    }

    /// Prints a result without tearing the bar.
    fn result(&self, text: &str) -> Result<()> {
        match &self.bar {
            Some(bar) => bar.suspend(|| write_out(text)),
            None => write_out(text),
        }
    }

    fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| write_note(text)),
            None => write_note(text),
        }
    }

    fn start(&mut self, start: &Start) {
        self.note(&format!("base     {}", start.base));
        start.matched.iter().for_each(|line| self.note(&format!("adapter  {line}")));
        self.note(&format!("         {} trainable values", HumanCount(start.trainables as u64)));
        self.note(&format!("data     {}; {}", start.data, count(start.eval_rows as u64, "held-out row")));
        let resumed = if start.done > 0 { format!(" ({} done)", start.done) } else { String::new() };
        self.note(&format!(
            "run      {}{resumed} of {}, {} at a time, up to {} each; {}",
            count(start.steps, "step"),
            count(start.batch as u64, "row"),
            start.micro_batch,
            count(start.seq_len as u64, "token"),
            start.output.display()
        ));
        self.hints.iter().for_each(|hint| self.note(&format!("hint: {hint}")));
        if start.eval_rows == 0 {
            self.note("hint: there is no held-out data; --eval-data or --eval-fraction gives an evaluation");
        }
        if let Some(bar) = &self.bar {
            bar.set_position(start.done);
            bar.set_length(start.steps);
        }
    }

    /// The plan, and from here on the bar.
    fn plan(&self, selection: &Selection<PlanConfig>) {
        self.note(&format!("memory   the plan\n{}", table::short(selection)));
        if let Some(bar) = &self.bar {
            let style = "{bar:32} {pos}/{len}  {msg}  {eta} left";
            bar.set_style(
                ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar.reset_eta();
            bar.enable_steady_tick(Duration::from_millis(250));
        }
    }

    fn step(&self, step: &Step) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(step.step);
                bar.set_message(format!("loss {:.4}  {:.0} tokens/s", step.loss, step.tokens_per_s));
            }
            None if self.log_every > 0
                && (step.step.is_multiple_of(self.log_every) || step.step == step.steps) =>
            {
                write_note(&format!(
                    "step {}/{}  loss {:.4}  lr {:.3e}  gradient norm {:.3}  {:.0} tokens/s",
                    step.step, step.steps, step.loss, step.lr, step.grad_norm, step.tokens_per_s
                ));
            }
            None => {}
        }
    }

    fn eval(&self, eval: &Eval) -> Result<()> {
        self.result(&format!(
            "step {}: evaluation loss {:.4}, perplexity {:.2} over {}{}\n",
            eval.step,
            eval.loss,
            eval.perplexity(),
            count(eval.tokens as u64, "token"),
            if eval.best == Some(true) { ", the best so far" } else { "" }
        ))
    }

    fn sample(&self, sample: &Sample) -> Result<()> {
        let (step, prompt, text) = (sample.step, one_line(&sample.prompt), one_line(&sample.text));
        self.result(&format!("step {step}: {prompt} => {text}\n"))
    }

    fn done(&self, done: &Done) -> Result<()> {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let speed = match done.tokens_per_s {
            0.0 => String::new(),
            speed => format!(", {speed:.0} tokens/s"),
        };
        let measured = match done.measured_bytes {
            None => String::new(),
            Some(bytes) => format!(", {} measured", size(bytes)),
        };
        write_out(&format!(
            "trained {}{speed}; peak memory {} planned{measured}\n",
            count(done.step, "step"),
            size(done.peak_bytes)
        ))
    }
}

impl Reporter for HumanReporter {
    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        match event {
            Event::Start(start) => self.start(start),
            Event::Plan(selection) => self.plan(selection),
            Event::Note(note) => self.note(&format!("hint: {note}")),
            Event::Step(step) => self.step(step),
            Event::Saved(_) => {}
            Event::Eval(eval) => return self.eval(eval),
            Event::Sample(sample) => return self.sample(sample),
            Event::Done(done) => return self.done(done),
        }
        Ok(())
    }
}

impl Drop for HumanReporter {
    /// Ends the bar of a run that ended early, so that the next output begins on a new line.
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
