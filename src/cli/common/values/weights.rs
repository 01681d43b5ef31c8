//! Values that describe weights to be written.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::memory::bytes_of;
use crate::convert::WeightDtype;

/// The value of `merge --dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightDtypeName {
    /// IEEE half precision: 11 significant bits, at most 65504.
    F16,
    /// IEEE single precision: 24 significant bits.
    F32,
    /// bfloat16: 8 significant bits, the range of F32.
    Bf16,
}

impl WeightDtypeName {
    /// The type of the weights.
    pub fn dtype(self) -> WeightDtype {
        match self {
            Self::F16 => WeightDtype::F16,
            Self::F32 => WeightDtype::F32,
            Self::Bf16 => WeightDtype::BF16,
        }
    }
}

/// `--max-shard-size`: bytes of a weight file, such as `5GB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ShardSize(pub u64);

impl ShardSize {
    /// The default of Transformers.
    pub const USUAL: Self = Self(50_000_000_000);
}

impl FromStr for ShardSize {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        bytes_of(text).map(Self).ok_or_else(|| "give a size such as 5GB or 500MiB".to_owned())
    }
}

impl TryFrom<String> for ShardSize {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<ShardSize> for String {
    fn from(size: ShardSize) -> Self {
        match size.0 {
            bytes if bytes.is_multiple_of(1_000_000_000) => format!("{}GB", bytes / 1_000_000_000),
            bytes => bytes.to_string(),
        }
    }
}
