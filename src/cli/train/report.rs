//! Prints the events of a run: lines and a progress bar for people, or one JSON object per line.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use indicatif::{HumanCount, ProgressBar, ProgressState, ProgressStyle};

use crate::{
    cli::common::{
        output::{count, one_line, shortened_list, write_json, write_note, write_out},
        progress::{Patience, clock, has_bars, reading, sentence, spinner},
    },
    cli::train::table,
    data::{self, Watch},
    error::Result,
    plan::{Selection, size},
    train::{
        Event, PlanConfig, Reporter,
        events::{Done, Eval, Sample, Stage, StageProgress, Start, Step},
        record::{Line, Stamped},
    },
};

/// One JSON object per line on stdout.
pub struct JsonReporter {
    stage: Option<(Stage, Patience)>,
}

impl JsonReporter {
    /// A reporter that has said nothing yet.
    pub fn new() -> Self {
        Self { stage: None }
    }

    /// Tells of the reading of data, if it takes long.
    pub fn reading() -> Watch {
        let patience = Mutex::new(Patience::new());
        Watch::new(move |data::Progress { done, total }| {
            let mut patience = patience.lock().unwrap_or_else(PoisonError::into_inner);
            if patience.is_over() {
                // A closed pipe is noticed by the next event.
                let _ = write_line(Line::progress(Stage::Reading, done, total));
            }
        })
    }

    /// A line for a stage only if it takes long.
    fn progress(&mut self, progress: StageProgress) -> Result<()> {
        let StageProgress { stage, done, total } = progress;
        match patience(&mut self.stage, stage).is_over() {
            true => write_line(Line::progress(stage, done, total)),
            false => Ok(()),
        }
    }
}

/// The patience with `stage`, which may have just begun.
fn patience(current: &mut Option<(Stage, Patience)>, stage: Stage) -> &mut Patience {
    let fresh =
        current.take().filter(|(known, _)| *known == stage).unwrap_or_else(|| (stage, Patience::new()));
    &mut current.insert(fresh).1
}

/// Prints `line` as an object with the time.
pub fn write_line(line: Line) -> Result<()> {
    write_out(&Stamped::now(line).text())
}

impl Reporter for JsonReporter {
    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        if let Event::Progress(progress) = event {
            return self.progress(*progress);
        }
        self.stage = None;
        match event {
            Event::Plan(selection) => write_json(&table::event(selection)),
            Event::Note(note) => {
                write_note(&format!("hint: {note}"));
                Ok(())
            }
            _ => Line::of(event).into_iter().try_for_each(write_line),
        }
    }
}

/// Longest silence between two step lines where there is no bar.
const SILENCE: Duration = Duration::from_secs(60);

/// Results on stdout, progress on stderr.
pub struct HumanReporter {
    /// Steps between lines where there is no bar.
    log_every: u64,
    /// Shown when the run begins.
    hints: Vec<&'static str>,
    bar: Option<ProgressBar>,
    /// When the run should be over, in milliseconds after `began`: the bar counts down to it between steps.
    end: Arc<AtomicU64>,
    began: Instant,
    stage: Option<(Stage, Patience)>,
    /// The last step line.
    said: Instant,
    /// Beginning of the line about the run, which the plan completes.
    run: String,
    steps: u64,
    /// What the bar says of the last step.
    latest: String,
}

impl HumanReporter {
    /// A reporter that shows a bar if stderr is a terminal, else a line every `log_every` steps.
    pub fn new(log_every: u64, hints: Vec<&'static str>) -> Self {
        let now = Instant::now();
        Self {
            log_every,
            hints,
            bar: has_bars().then(spinner),
            end: Arc::default(),
            began: now,
            stage: None,
            said: now,
            run: String::new(),
            steps: 0,
            latest: String::new(),
        }
    }

    /// Shows the reading of data, in the bar of the run if there is one.
    pub fn reading(&self) -> Watch {
        let Some(bar) = self.bar.clone() else { return reading() };
        let began = Instant::now();
        Watch::new(move |data::Progress { done, total }| {
            bar.set_message(sentence(Stage::Reading.name(), done, total, began.elapsed().as_secs_f64()));
        })
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

    fn progress(&mut self, progress: StageProgress) {
        let StageProgress { stage, done, total } = progress;
        let patience = patience(&mut self.stage, stage);
        let text = sentence(stage.name(), done, total, patience.seconds());
        match &self.bar {
            Some(bar) => bar.set_message(text),
            None if patience.is_over() => write_note(&text),
            None => {}
        }
    }

    fn start(&mut self, start: &Start) {
        let values = HumanCount(start.trainables as u64);
        let matched = shortened_list(&start.matched, "; ");
        self.note(&format!("adapter  {} on {}, {values} values: {matched}", start.method, start.base));
        self.note(&format!("data     {}; {}", start.data, count(start.eval_rows as u64, "held-out row")));
        let resumed = if start.done > 0 { format!(" ({} done)", start.done) } else { String::new() };
        self.run = format!(
            "run      {}{resumed} of {}, {} at a time, up to {} each; in {}",
            count(start.steps, "step"),
            count(start.batch as u64, "row"),
            start.micro_batch,
            count(start.seq_len as u64, "token"),
            start.output.display()
        );
        if start.eval_rows == 0 {
            self.hints.push("there is no held-out data; --eval-data or --eval-fraction gives an evaluation");
        }
        self.steps = start.steps - start.done.min(start.steps);
        if let Some(bar) = &self.bar {
            bar.set_position(start.done);
            bar.set_length(start.steps);
        }
    }

    /// The rest of the line about the run, hints, and from here on the bar with steps.
    fn plan(&mut self, selection: &Selection<PlanConfig>) {
        let memory = size(selection.chosen.peak());
        let time = match selection.chosen.measured {
            true => format!(" and {}", clock(self.steps as f64 * selection.chosen.seconds)),
            false => String::new(),
        };
        self.note(&format!("{}; about {memory}{time}", self.run));
        for hint in std::mem::take(&mut self.hints) {
            self.note(&format!("hint: {hint}"));
        }
        if let Some(bar) = &self.bar {
            bar.set_message("");
            bar.reset_elapsed();
            bar.set_style(stepping(Arc::clone(&self.end), self.began));
        }
    }

    fn step(&mut self, step: &Step) {
        if let Some(bar) = &self.bar {
            let end = self.began.elapsed().as_secs_f64() + step.remaining;
            self.end.store((end * 1e3) as u64, Relaxed);
            self.latest = format!(
                "loss {:.4}  lr {:.2e}  {:.0} tok/s  epoch {:.2}",
                step.smoothed_loss, step.lr, step.tokens_per_s, step.epoch
            );
            bar.set_position(step.step);
            bar.set_message(self.latest.clone());
            return;
        }
        let due = step.step.is_multiple_of(self.log_every.max(1)) || step.step == step.steps;
        if self.log_every > 0 && (due || self.said.elapsed() >= SILENCE) {
            self.said = Instant::now();
            write_note(&format!(
                "step {}/{}  loss {:.4}  lr {:.3e}  gradient norm {:.3}  {:.0} tokens/s  {} left",
                step.step,
                step.steps,
                step.loss,
                step.lr,
                step.grad_norm,
                step.tokens_per_s,
                clock(step.remaining)
            ));
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

    /// A stage is over: the bar shows the last step again.
    fn end_stage(&mut self) {
        if let (Some(_), Some(bar)) = (self.stage.take(), &self.bar) {
            bar.set_message(self.latest.clone());
        }
    }
}

/// `━━━━━━╸─── 120/250  0:12, 0:34 left  loss ..`: the time left counts down to `end`, also between steps. What a narrow
/// terminal has no room for is cut off at the right.
fn stepping(end: Arc<AtomicU64>, began: Instant) -> ProgressStyle {
    let left = move |_: &ProgressState, out: &mut dyn std::fmt::Write| {
        let end = end.load(Relaxed) as f64 / 1e3;
        if end > 0.0 {
            let left = clock((end - began.elapsed().as_secs_f64()).max(0.0));
            let _ = write!(out, ", {left} left");
        }
    };
    let spent = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
        let _ = out.write_str(&clock(state.elapsed().as_secs_f64()));
    };
    ProgressStyle::with_template("{bar:10} {pos}/{len}  {spent}{left}  {wide_msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━╸─")
        .with_key("left", left)
        .with_key("spent", spent)
}

impl Reporter for HumanReporter {
    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        if let Event::Progress(progress) = event {
            self.progress(*progress);
            return Ok(());
        }
        self.end_stage();
        match event {
            Event::Start(start) => self.start(start),
            Event::Plan(selection) => self.plan(selection),
            Event::Note(note) => self.note(&format!("hint: {note}")),
            Event::Step(step) => self.step(step),
            Event::Progress(_) | Event::Saved(_) | Event::Interrupted(_) => {}
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
