//! Values that describe a training run or the text of a generation.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::data::Split;

/// The value of `--schedule`: the learning rate after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleName {
    /// Stays the same.
    Constant,
    /// Falls linearly to zero.
    Linear,
    /// Falls to zero along half a cosine.
    Cosine,
    /// Falls along half a cosine several times, from the top again each time.
    #[value(alias = "cosine_with_restarts")]
    CosineWithRestarts,
    /// Falls with one over the square root of the steps.
    #[value(alias = "inverse_sqrt")]
    InverseSqrt,
}

/// The value of `--optimizer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// AdamW with FP32 moments, or with 8-bit moments if nothing else fits the memory.
    Auto,
    /// AdamW with FP32 moments, 8 bytes per trainable value.
    Adamw,
    /// AdamW with 8-bit moments, about 2 bytes per trainable value.
    #[value(name = "adamw8bit")]
    Adamw8bit,
}

/// `--warmup`: a count of steps, or with a dot a fraction of all steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Warmup {
    /// Number of optimizer steps.
    Steps(u64),
    /// Fraction of all steps, in 0 .. 1.
    Fraction(f64),
}

impl FromStr for Warmup {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let number = if text.contains('.') {
            text.parse().ok().map(Self::Fraction)
        } else {
            text.parse().ok().map(Self::Steps)
        };
        number.ok_or_else(|| "give a number of steps such as 100, or a fraction such as 0.1".to_owned())
    }
}

/// The value of `eval --split`: the file to read if `--data` is a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SplitName {
    /// The file `train.*`.
    Train,
    /// The file `valid.*`.
    Valid,
    /// The file `test.*`.
    Test,
}

impl SplitName {
    /// The split of that name.
    pub fn split(self) -> Split {
        match self {
            Self::Train => Split::Train,
            Self::Valid => Split::Valid,
            Self::Test => Split::Test,
        }
    }
}

/// The value of `--input-ids`: token ids between commas, `15496,995`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TokenIds(pub Vec<u32>);

impl FromStr for TokenIds {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parsed: Result<Vec<u32>, _> = text.split(',').map(|piece| piece.trim().parse()).collect();
        parsed.map(Self).map_err(|_| "give token ids between commas, such as 15496,995".to_owned())
    }
}
