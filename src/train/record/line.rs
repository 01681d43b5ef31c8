//! The lines of `metrics.jsonl`, one JSON object each: the one declaration that writer, reader and `--json` share.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::{
    data::DataReport,
    error::Error,
    observe::machine::Machine,
    train::events::{Done, Eval, Event, Interrupted, Sample, Saved, Stage, Start, Step},
};

/// A line with the time it was written at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stamped {
    /// Seconds since 1970-01-01 UTC.
    pub time: f64,
    /// The event, whose keys stand beside `time`.
    #[serde(flatten)]
    pub line: Line,
}

/// An event as it is written; the key `event` has the variant's name in small letters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Line {
    /// A process begins its part of the run.
    Start(StartLine),
    /// Counts of the data.
    Data(DataLine),
    /// What was planned.
    Plan(PlanLine),
    /// Something the user should know.
    Note(NoteLine),
    /// How far a stage is.
    Progress(ProgressLine),
    /// An optimizer step.
    Step(StepLine),
    /// Mean loss over the held-out rows, after an evaluation.
    Eval(EvalLine),
    /// A sampled text.
    Sample(SampleLine),
    /// A save was written.
    Save(SaveLine),
    /// The run was asked to stop.
    Interrupted(InterruptedLine),
    /// The run failed.
    Error(ErrorLine),
    /// The run is over.
    Done(DoneLine),
    /// A line of a later version.
    #[serde(other)]
    Unknown,
}

/// See [`Start`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the event")]
pub struct StartLine {
    /// Steps done before, in an earlier process.
    pub step: u64,
    pub steps: u64,
    /// Version of the program.
    pub engraft: String,
    pub base: String,
    pub method: String,
    pub matched: Vec<String>,
    pub trainables: usize,
    pub batch: usize,
    pub micro_batch: usize,
    pub seq_len: usize,
    pub output: String,
    pub machine: Machine,
    pub config: String,
}

/// See [`DataReport`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the event")]
pub struct DataLine {
    #[serde(flatten)]
    pub report: DataReport,
    pub eval_rows: usize,
}

/// A memory plan in short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanLine {
    /// Planned peak in bytes.
    pub peak_bytes: u64,
    /// The bytes that it had to fit into.
    pub budget_bytes: Option<u64>,
    /// Predicted time of a step, where speeds of this machine are known.
    pub seconds_per_step: Option<f64>,
    /// The choice in words.
    pub choice: String,
}

/// A sentence for the user.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the field is that of the event")]
pub struct NoteLine {
    pub text: String,
}

/// See [`Progress`](crate::train::events::StageProgress); only in the output of `--json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the event")]
pub struct ProgressLine {
    pub stage: String,
    pub done: u64,
    /// Null where it is unknown.
    pub total: Option<u64>,
}

/// See [`Step`]. A number that is not finite is null.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the event")]
pub struct StepLine {
    pub step: u64,
    pub loss: f64,
    pub smoothed_loss: f64,
    pub lr: f64,
    pub grad_norm: Option<f64>,
    pub tokens: usize,
    pub tokens_per_s: f64,
    pub seconds: f64,
    pub epoch: f64,
    pub elapsed: f64,
    pub remaining: f64,
    pub memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loss_scale: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub overflows: Option<u64>,
}

/// See [`Eval`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the event")]
pub struct EvalLine {
    pub step: u64,
    pub loss: f64,
    /// Null where e to the loss is beyond all numbers.
    pub perplexity: Option<f64>,
    pub tokens: usize,
    /// Whether the loss is the lowest so far.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub best: Option<bool>,
    pub seconds: f64,
    pub epoch: f64,
    pub elapsed: f64,
    pub memory_bytes: Option<u64>,
}

/// See [`Sample`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the event")]
pub struct SampleLine {
    pub step: u64,
    pub prompt: String,
    pub text: String,
    /// The text is the base's, without the adapter.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub base_alone: bool,
}

/// See [`Saved`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the event")]
pub struct SaveLine {
    pub step: u64,
    pub path: String,
    pub seconds: f64,
}

/// See [`Interrupted`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the event")]
pub struct InterruptedLine {
    pub step: u64,
    pub steps: u64,
    pub adapter: String,
    pub save: String,
}

/// An error that ended the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorLine {
    /// Steps done; null before the run began.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub step: Option<u64>,
    /// One sentence.
    pub message: String,
    /// What may help.
    pub hints: Vec<String>,
    /// Exit code of the program.
    pub exit_code: u8,
}

/// See [`Done`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the event")]
pub struct DoneLine {
    pub step: u64,
    pub adapter: String,
    pub peak_bytes: u64,
    pub measured_bytes: Option<u64>,
    pub counted_bytes: Option<u64>,
    pub planned_counted_bytes: Option<u64>,
    pub tokens_per_s: f64,
}

impl Stamped {
    /// `line`, written now.
    pub fn now(line: Line) -> Self {
        Self { time: now(), line }
    }

    /// The object on a line of its own.
    pub fn text(&self) -> String {
        // Nothing here fails to be JSON: keys are strings, and a number that is not finite is null.
        serde_json::to_string(self).map(|text| text + "\n").unwrap_or_default()
    }
}

/// Seconds since 1970-01-01 UTC, to a microsecond.
pub fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_micros() as f64 / 1e6
}

impl Line {
    /// The lines of an event, with no line of progress.
    pub fn of(event: &Event<'_>) -> Vec<Self> {
        let line = match event {
            Event::Start(start) => return vec![Self::start(start), Self::data(start)],
            Event::Progress(_) => return Vec::new(),
            Event::Plan(selection) => Self::Plan(PlanLine {
                peak_bytes: selection.chosen.peak(),
                budget_bytes: selection.budget,
                seconds_per_step: selection.chosen.measured.then_some(selection.chosen.seconds),
                choice: selection.chosen.plan.config.to_string(),
            }),
            Event::Note(text) => Self::Note(NoteLine { text: (*text).to_owned() }),
            Event::Step(step) => Self::step_line(step),
            Event::Eval(eval) => Self::eval(eval),
            Event::Sample(Sample { step, prompt, text }) => {
                let (prompt, text) = (prompt.clone(), text.clone());
                Self::Sample(SampleLine { step: *step, prompt, text, base_alone: false })
            }
            Event::Saved(Saved { step, path, seconds }) => Self::Save(SaveLine {
                step: *step,
                path: path.display().to_string(),
                seconds: rounded(*seconds),
            }),
            Event::Interrupted(Interrupted { step, steps, adapter, save }) => {
                Self::Interrupted(InterruptedLine {
                    step: *step,
                    steps: *steps,
                    adapter: adapter.display().to_string(),
                    save: save.display().to_string(),
                })
            }
            Event::Done(done) => Self::done(done),
        };
        vec![line]
    }

    fn start(start: &Start) -> Self {
        Self::Start(StartLine {
            step: start.done,
            steps: start.steps,
            engraft: env!("CARGO_PKG_VERSION").to_owned(),
            base: start.base.clone(),
            method: start.method.clone(),
            matched: start.matched.clone(),
            trainables: start.trainables,
            batch: start.batch,
            micro_batch: start.micro_batch,
            seq_len: start.seq_len,
            output: start.output.display().to_string(),
            machine: start.machine.clone(),
            config: start.config.clone(),
        })
    }

    fn data(start: &Start) -> Self {
        Self::Data(DataLine { report: start.data, eval_rows: start.eval_rows })
    }

    fn step_line(step: &Step) -> Self {
        let scale = step.scale.is_dynamic().then_some(step.scale);
        Self::Step(StepLine {
            step: step.step,
            loss: step.loss,
            smoothed_loss: step.smoothed_loss,
            lr: step.lr,
            grad_norm: Some(step.grad_norm),
            tokens: step.tokens,
            tokens_per_s: step.tokens_per_s,
            seconds: rounded(step.seconds),
            epoch: rounded(step.epoch),
            elapsed: rounded(step.elapsed),
            remaining: rounded(step.remaining),
            memory_bytes: step.memory,
            loss_scale: scale.map(|scale| scale.factor()),
            overflows: scale.map(|scale| scale.skipped()),
        })
    }

    fn eval(eval: &Eval) -> Self {
        Self::Eval(EvalLine {
            step: eval.step,
            loss: eval.loss,
            perplexity: Some(eval.perplexity()),
            tokens: eval.tokens,
            best: eval.best,
            seconds: rounded(eval.seconds),
            epoch: rounded(eval.epoch),
            elapsed: rounded(eval.elapsed),
            memory_bytes: eval.memory,
        })
    }

    fn done(done: &Done) -> Self {
        Self::Done(DoneLine {
            step: done.step,
            adapter: done.adapter.display().to_string(),
            peak_bytes: done.peak_bytes,
            measured_bytes: done.measured_bytes,
            counted_bytes: done.counted.map(|both| both.counted),
            planned_counted_bytes: done.counted.map(|both| both.planned),
            tokens_per_s: done.tokens_per_s,
        })
    }

    /// How far `stage` is, for a program that waits for it.
    pub fn progress(stage: Stage, done: u64, total: u64) -> Self {
        let total = (total > 0).then_some(total);
        Self::Progress(ProgressLine { stage: stage.name().to_owned(), done, total })
    }

    /// An error that ended a run after `step` steps, or before it began. `None` where nothing failed.
    pub fn error(step: Option<u64>, error: &Error) -> Option<Self> {
        match error {
            Error::ClosedPipe | Error::Interrupted(_) => None,
            Error::Input(report) | Error::Failed(report) | Error::Memory(report) => {
                Some(Self::Error(ErrorLine {
                    step,
                    message: report.message.clone(),
                    hints: report.hints.clone(),
                    exit_code: error.exit_code(),
                }))
            }
        }
    }

    /// Steps done when the line was written, where it says so.
    pub fn step(&self) -> Option<u64> {
        match self {
            Self::Start(line) => Some(line.step),
            Self::Step(line) => Some(line.step),
            Self::Eval(line) => Some(line.step),
            Self::Sample(line) => Some(line.step),
            Self::Save(line) => Some(line.step),
            Self::Interrupted(line) => Some(line.step),
            Self::Error(line) => line.step,
            Self::Done(line) => Some(line.step),
            Self::Data(_) | Self::Plan(_) | Self::Note(_) | Self::Progress(_) | Self::Unknown => None,
        }
    }
}

/// Seconds and epochs to a millionth: more digits say nothing.
fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}
