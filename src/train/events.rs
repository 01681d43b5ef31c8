//! The events of a run. The loop prints nothing itself.

use std::path::PathBuf;

use super::PlanConfig;
use crate::{data::DataReport, error::Result, observe::machine::Machine, optim::LossScale, plan::Selection};

/// Receives events; an error it returns ends the run.
pub trait Reporter {
    /// Takes the next event of the run.
    ///
    /// # Errors
    /// When it cannot be delivered, such as to a closed pipe.
    fn event(&mut self, event: &Event<'_>) -> Result<()>;
}

/// An event of a training run.
#[derive(Debug)]
pub enum Event<'a> {
    /// How far a stage of the run is that may take seconds; sent many times a second.
    Progress(StageProgress),
    /// Everything is loaded and the run begins.
    Start(&'a Start),
    /// How memory will be used.
    Plan(&'a Selection<PlanConfig>),
    /// Something the user should know, without effect on the exit code.
    Note(&'a str),
    /// An optimizer step is done.
    Step(&'a Step),
    /// An evaluation is finished.
    Eval(&'a Eval),
    /// The adapter as it is continued a prompt.
    Sample(&'a Sample),
    /// A save is on disk.
    Saved(&'a Saved),
    /// The run was asked to stop, and everything to go on from is on disk.
    Interrupted(&'a Interrupted),
    /// The adapter is on disk and the run is over.
    Done(&'a Done),
}

impl Event<'_> {
    /// A stage begins whose length is not known.
    pub fn begun(stage: Stage) -> Self {
        Self::Progress(StageProgress { stage, done: 0, total: 0 })
    }
}

/// A part of a run that may take seconds, besides its optimizer steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Reading and tokenizing data, counted in bytes.
    Reading,
    /// Measuring the speed of the machine, choosing the plan and allocating its memory.
    Preparing,
    /// Forward passes over held-out rows, counted in rows.
    Evaluating,
    /// Writing a save and the adapter.
    Saving,
}

impl Stage {
    /// What the run does, for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reading => "reading data",
            Self::Preparing => "preparing",
            Self::Evaluating => "evaluating",
            Self::Saving => "saving",
        }
    }
}

/// How far a stage is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageProgress {
    /// The stage; one ends when the next begins, or another event arrives.
    pub stage: Stage,
    /// Units done, such as bytes or rows.
    pub done: u64,
    /// Units of the whole stage; 0 where that is unknown.
    pub total: u64,
}

/// A run before its first step.
#[derive(Debug)]
pub struct Start {
    /// Name of the base, a hub id or a folder.
    pub base: String,
    /// Kinds of adapter that are trained, such as `lora+prefix`.
    pub method: String,
    /// One line for each kind of site that is adapted.
    pub matched: Vec<String>,
    /// Number of trainable values.
    pub trainables: usize,
    /// Counts of the training data.
    pub data: DataReport,
    /// Number of held-out rows.
    pub eval_rows: usize,
    /// Steps done before, in an earlier process.
    pub done: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Rows per optimizer step.
    pub batch: usize,
    /// Rows per forward and backward pass.
    pub micro_batch: usize,
    /// Most tokens of a row.
    pub seq_len: usize,
    /// Path of the run folder.
    pub output: PathBuf,
    /// The machine that computes.
    pub machine: Machine,
    /// The effective options, as the text of `config.toml`.
    pub config: String,
}

/// The numbers of one optimizer step.
#[derive(Debug)]
pub struct Step {
    /// Steps done, this one included.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Mean loss over the supervised tokens of the step.
    pub loss: f64,
    /// Exponential moving average of the loss, see [`Smoothed`](super::pace::Smoothed).
    pub smoothed_loss: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
    /// Number of supervised tokens.
    pub tokens: usize,
    /// All input tokens over seconds.
    pub tokens_per_s: f64,
    /// Duration of the step in seconds.
    pub seconds: f64,
    /// Passes over the training rows so far.
    pub epoch: f64,
    /// Seconds of the run so far, without the time between two processes of it.
    pub elapsed: f64,
    /// Estimated seconds until the end of the run.
    pub remaining: f64,
    /// Resident memory of the process in bytes; `None` where the system does not tell.
    pub memory: Option<u64>,
    /// The loss scale after the step, and how often gradients overflowed so far.
    pub scale: LossScale,
}

/// The loss of one evaluation.
#[derive(Debug)]
pub struct Eval {
    /// Number of steps done.
    pub step: u64,
    /// Mean loss over the supervised tokens of the held-out rows.
    pub loss: f64,
    /// Number of supervised tokens.
    pub tokens: usize,
    /// Whether the loss is the lowest so far; `None` in a run that does not ask for it.
    pub best: Option<bool>,
    /// Duration of the evaluation in seconds.
    pub seconds: f64,
    /// Passes over the training rows so far.
    pub epoch: f64,
    /// Seconds of the run so far, without the time between two processes of it.
    pub elapsed: f64,
    /// Resident memory of the process in bytes; `None` where the system does not tell.
    pub memory: Option<u64>,
}

impl Eval {
    /// e to the mean loss.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// A text that was generated during training.
#[derive(Debug)]
pub struct Sample {
    /// Number of steps done.
    pub step: u64,
    /// The text before it.
    pub prompt: String,
    /// The text that follows.
    pub text: String,
}

/// A save that is on disk.
#[derive(Debug)]
pub struct Saved {
    /// Number of steps done.
    pub step: u64,
    /// Path of the save.
    pub path: PathBuf,
    /// Time that save and adapter took to write, in seconds.
    pub seconds: f64,
}

/// A run that was asked to stop.
#[derive(Debug)]
pub struct Interrupted {
    /// Number of steps done.
    pub step: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// Path of the adapter's folder.
    pub adapter: PathBuf,
    /// Path of the save.
    pub save: PathBuf,
}

/// Bytes of heap and arenas at their peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    /// What the plan says.
    pub planned: u64,
    /// What the allocator and the arenas counted.
    pub counted: u64,
}

/// The numbers of a finished run.
#[derive(Debug)]
pub struct Done {
    /// Number of steps done.
    pub step: u64,
    /// Path of the adapter's folder.
    pub adapter: PathBuf,
    /// Planned peak of memory in bytes.
    pub peak_bytes: u64,
    /// Measured peak of the process's resident memory; `None` where the system does not tell.
    pub measured_bytes: Option<u64>,
    /// Heap and arenas together at their peak, by the allocator's count, and the plan's bytes of them;
    /// `None` in a program that does not count.
    pub counted: Option<Counted>,
    /// Input tokens over seconds of this process's steps; 0 when it made none.
    pub tokens_per_s: f64,
}
