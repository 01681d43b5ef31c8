//! A run as its `metrics.jsonl` tells it, also while it goes on.

use std::path::{Path, PathBuf};

use crate::{
    error::Result,
    train::record::{
        DataLine, DoneLine, ErrorLine, EvalLine, InterruptedLine, Line, PlanLine, SampleLine, Stamped,
        StartLine, metrics, now,
    },
};

/// The numbers of a step that are drawn.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    pub step: f64,
    pub loss: f64,
    pub smoothed: f64,
    pub lr: f64,
    pub grad_norm: f64,
    pub tokens_per_s: f64,
    /// Bytes; not a number where unknown.
    pub memory: f64,
}

/// How a run stands.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// Nothing says that it ended; the last line is that many seconds old.
    Going(f64),
    Interrupted(InterruptedLine),
    Failed(ErrorLine),
    Done(DoneLine),
}

/// All that `metrics.jsonl` tells about a run.
#[derive(Debug)]
pub struct History {
    /// The run folder, as it was named.
    pub folder: PathBuf,
    /// The newest beginning: a resumed run has several.
    pub start: Option<StartLine>,
    /// When the first process began, in seconds since 1970.
    pub began: f64,
    /// Steps at which it was resumed.
    pub resumed: Vec<u64>,
    pub data: Option<DataLine>,
    pub plan: Option<PlanLine>,
    pub steps: Vec<Point>,
    pub evals: Vec<EvalLine>,
    pub samples: Vec<SampleLine>,
    /// Each sentence once.
    pub notes: Vec<String>,
    /// Seconds of training, without the time between two processes.
    pub elapsed: f64,
    /// Estimated seconds until the end.
    pub remaining: f64,
    pub epoch: f64,
    /// Input tokens per second of each step, weighted by its time.
    tokens: (f64, f64),
    pub state: State,
}

impl History {
    /// Reads the record of the run in `folder`.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn read(folder: &Path) -> Result<Self> {
        let mut history = Self {
            folder: folder.to_owned(),
            start: None,
            began: 0.0,
            resumed: Vec::new(),
            data: None,
            plan: None,
            steps: Vec::new(),
            evals: Vec::new(),
            samples: Vec::new(),
            notes: Vec::new(),
            elapsed: 0.0,
            remaining: 0.0,
            epoch: 0.0,
            tokens: (0.0, 0.0),
            state: State::Going(0.0),
        };
        let mut last = 0.0;
        metrics::read(folder, &mut |Stamped { time, line }| {
            if history.began == 0.0 {
                history.began = time;
            }
            last = time;
            history.take(line);
        })?;
        if let State::Going(age) = &mut history.state {
            *age = (now() - last).max(0.0);
        }
        Ok(history)
    }

    fn take(&mut self, line: Line) {
        match line {
            Line::Start(start) => {
                if start.step > 0 {
                    self.resumed.push(start.step);
                }
                self.start = Some(start);
                self.state = State::Going(0.0);
            }
            Line::Data(data) => self.data = Some(data),
            Line::Plan(plan) => self.plan = Some(plan),
            Line::Note(note) if !self.notes.contains(&note.text) => self.notes.push(note.text),
            Line::Step(step) => {
                (self.elapsed, self.remaining, self.epoch) = (step.elapsed, step.remaining, step.epoch);
                self.tokens.0 += step.tokens_per_s * step.seconds;
                self.tokens.1 += step.seconds;
                self.steps.push(Point {
                    step: step.step as f64,
                    loss: step.loss,
                    smoothed: step.smoothed_loss,
                    lr: step.lr,
                    grad_norm: step.grad_norm.unwrap_or(f64::NAN),
                    tokens_per_s: step.tokens_per_s,
                    memory: step.memory_bytes.map_or(f64::NAN, |bytes| bytes as f64),
                });
            }
            Line::Eval(eval) => {
                self.elapsed = eval.elapsed;
                self.evals.retain(|earlier| earlier.step != eval.step);
                self.evals.push(eval);
            }
            // The sample after a run may be that of its last step.
            Line::Sample(sample) if self.samples.contains(&sample) => {}
            Line::Sample(sample) => self.samples.push(sample),
            Line::Interrupted(line) => self.state = State::Interrupted(line),
            Line::Error(line) => self.state = State::Failed(line),
            Line::Done(line) => self.state = State::Done(line),
            Line::Note(_) | Line::Save(_) | Line::Progress(_) | Line::Unknown => {}
        }
    }

    /// The folder's own name.
    pub fn name(&self) -> String {
        let absolute = std::path::absolute(&self.folder).unwrap_or_else(|_| self.folder.clone());
        let name = absolute.file_name().unwrap_or(absolute.as_os_str());
        name.to_string_lossy().into_owned()
    }

    /// Optimizer steps done.
    pub fn done(&self) -> u64 {
        let begun = self.start.as_ref().map_or(0, |start| start.step);
        self.steps.last().map_or(begun, |point| point.step as u64)
    }

    /// Optimizer steps of the whole run.
    pub fn planned_steps(&self) -> u64 {
        self.start.as_ref().map_or(0, |start| start.steps)
    }

    /// Input tokens over the seconds of all recorded steps; `None` without one.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let (tokens, seconds) = self.tokens;
        (seconds > 0.0).then(|| tokens / seconds)
    }

    /// The newest evaluation, and the one before the first step.
    pub fn last_eval(&self) -> Option<&EvalLine> {
        self.evals.last()
    }

    /// Highest resident memory that is on record, in bytes.
    pub fn peak(&self) -> Option<u64> {
        let measured = match &self.state {
            State::Done(done) => done.measured_bytes,
            _ => None,
        };
        let seen = self.steps.iter().map(|point| point.memory).filter(|bytes| bytes.is_finite());
        measured.or_else(|| seen.map(|bytes| bytes as u64).max())
    }

    /// Options of the run, name and value as in `config.toml`.
    pub fn options(&self) -> Vec<(&str, &str)> {
        let config = self.start.as_ref().map_or("", |start| start.config.as_str());
        let lines = config.lines().filter(|line| !line.trim_start().starts_with('#'));
        lines
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.trim(), value.trim()))
            .collect()
    }

    /// The state in a few words.
    pub fn state_text(&self) -> String {
        match &self.state {
            State::Done(_) => "finished".to_owned(),
            State::Interrupted(_) => "interrupted".to_owned(),
            State::Failed(_) => "failed".to_owned(),
            // Twice the slowest silence of a run that works.
            State::Going(age) if *age < 120.0 => "running".to_owned(),
            State::Going(age) => format!("silent for {}", span(*age)),
        }
    }
}

/// Seconds as `3 h`, `12 min` or `9.1 s`.
pub fn span(seconds: f64) -> String {
    match seconds {
        s if s < 60.0 => format!("{s:.1} s"),
        s if s < 3600.0 => format!("{:.0} min {:.0} s", (s / 60.0).floor(), (s % 60.0).floor()),
        s if s < 172_800.0 => format!("{:.0} h {:.0} min", (s / 3600.0).floor(), (s / 60.0 % 60.0).floor()),
        s => format!("{:.0} days", s / 86_400.0),
    }
}
