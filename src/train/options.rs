//! The options of one training run, as plain values.

use std::{collections::BTreeMap, path::PathBuf};

use super::{AdapterOptions, Constraints, PrefixStart, PromptStart, Sampling};
use crate::{
    data::ReadOptions,
    observe::machine::Machine,
    optim::{AdamWOptions, schedule::Schedule},
    plan::budget::Limit,
};

/// Everything a run needs, except the base and its tokenizer.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Requested properties of the adapter.
    pub adapter: AdapterOptions,
    /// An adapter to start from.
    pub init_adapter: Option<PathBuf>,
    /// Whether that adapter may have been trained on another base.
    pub allow_base_mismatch: bool,
    /// The initial value of a new prefix.
    pub prefix_start: PrefixStart,
    /// The initial value of a new prompt.
    pub prompt_start: PromptStart,
    /// Source of the training data.
    pub data: DataSource,
    /// Held-out files.
    pub eval_data: Vec<PathBuf>,
    /// Part of the training rows that is held out instead, in [0, 1); 0: nothing is held out at all.
    pub eval_fraction: Option<f64>,
    /// How data files are read.
    pub read: ReadOptions,
    /// Longest row in tokens; `None`: 256, or what the base's positions leave.
    pub seq_len: Option<usize>,
    /// Whether a row holds several documents; `None`: where that leaves many rows.
    pub pack: Option<bool>,
    /// Whether each line of a text file is a document.
    pub line_by_line: bool,
    /// Whether prompts have a loss.
    pub train_on_prompt: bool,
    /// Whether rows are shuffled in every epoch.
    pub shuffle: bool,
    /// Rows b per optimizer step.
    pub batch: usize,
    /// Number of steps or epochs.
    pub length: Length,
    /// Learning rate after the warm-up, and how it falls.
    pub schedule: Schedule,
    /// Length of the learning rate's warm-up.
    pub warmup: Warmup,
    /// Betas, eps and weight decay.
    pub adamw: AdamWOptions,
    /// Largest global gradient norm; 0 for any.
    pub clip: f64,
    /// Part of the target probability spread over the vocabulary.
    pub label_smoothing: f64,
    /// Alpha of NEFTune's noise on the embeddings; 0 for none.
    pub neftune: f64,
    /// The fixed parts of the memory plan; a fixed micro-batch divides `batch`.
    pub constraints: Constraints,
    /// Most memory that the plan may take.
    pub memory: Limit,
    /// JSON file for memory over time.
    pub memory_trace: Option<PathBuf>,
    /// Bytes of memory that are free, as the system says; asked before the first step and between steps.
    pub free_memory: fn() -> Option<u64>,
    /// Folder for the measured speeds of this machine.
    pub cache: Option<PathBuf>,
    /// Seed of initial values, order of the data and dropout.
    pub seed: u64,
    /// Steps between saves; 0: only at the end.
    pub save_every: u64,
    /// Newest saves that are kept.
    pub keep: usize,
    /// Steps between evaluations; 0: only before and after.
    pub eval_every: u64,
    /// Most held-out rows that an evaluation reads; `None` for all.
    pub eval_max_rows: Option<usize>,
    /// Whether the adapter with the lowest evaluation loss is kept beside the last one.
    pub save_best: bool,
    /// Evaluations in a row without a lower loss after which the run stops; `None`: it goes on.
    pub patience: Option<u64>,
    /// Texts that are generated during training; `None`: no text.
    pub sampling: Option<Sampling>,
    /// Go on where the folder's newest save stops.
    pub resume: bool,
    /// Go on from the save of this step instead of the newest one.
    pub resume_from: Option<u64>,
    /// Options that change results, name -> value as written; a resumed run must have the same.
    pub identity: BTreeMap<String, String>,
    /// Text of the folder's `config.toml`.
    pub config_text: String,
    /// The machine that the run computes on.
    pub machine: Machine,
}

/// A source of training data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DataSource {
    /// The example data in the program.
    Embedded,
    /// Text, JSONL, or folders of them.
    Files(Vec<PathBuf>),
}

/// The length of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Length {
    /// After that many optimizer steps.
    Steps(u64),
    /// After that many passes over the training rows, rounded up to a step.
    Epochs(f64),
    /// After one pass, or as many as it takes for a number of steps that trains something.
    FromData,
}

/// Length of the learning rate's warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Warmup {
    /// Number of optimizer steps.
    Steps(u64),
    /// That part of all steps, in [0, 1), rounded up.
    Fraction(f64),
}

impl Warmup {
    /// Warm-up steps of a run of `steps` steps.
    pub fn steps(self, steps: u64) -> u64 {
        match self {
            Self::Steps(warmup) => warmup,
            Self::Fraction(part) => (part * steps as f64).ceil() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_round_up() {
        assert_eq!(Warmup::Fraction(0.1).steps(25), 3);
        assert_eq!(Warmup::Steps(4).steps(2), 4);
    }
}
