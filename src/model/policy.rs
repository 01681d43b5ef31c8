//! Policies: they trade memory against time and change no result.

use std::fmt;

use crate::device::{DType, arena::Placement};

/// Which activations blocks keep from their forward for their backward; the rest is computed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recompute {
    /// Every block keeps all its activations.
    #[default]
    None,
    /// Every block computes the inside of its MLP again.
    Mlp,
    /// Every block computes its two wide linear layers again, c_attn and c_fc; attention is kept.
    Linear,
    /// Every k-th block keeps only its input, the others keep all; 1 is the same as all.
    Every(usize),
    /// Every block keeps only its input.
    All,
}

/// As the option is written.
impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Mlp => f.write_str("mlp"),
            Self::Linear => f.write_str("linear"),
            Self::Every(every) => write!(f, "every:{every}"),
            Self::All => f.write_str("all"),
        }
    }
}

impl Recompute {
    /// The activations that block `layer` keeps.
    pub fn keeps(self, layer: usize) -> Keep {
        match self {
            Self::None => Keep::All,
            Self::Mlp => Keep::Attention,
            Self::Linear => Keep::Outputs,
            Self::Every(k) if !(layer + 1).is_multiple_of(k.max(1)) => Keep::All,
            Self::Every(_) | Self::All => Keep::Input,
        }
    }
}

/// How much of a block is kept, from everything to nothing but its input; c width, t tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// Everything, 9c floats a token.
    All,
    /// Without the inside of the MLP, 5c floats; 4c^2 products a token are computed again.
    Attention,
    /// Without queries, keys and values either, 2c floats; 7c^2 products are computed again.
    Outputs,
    /// Nothing beside the input; 8c^2 products and attention are computed again.
    Input,
}

/// Choices that trade memory against time. Recompute, streaming and places change no bit of a result; chunks
/// of the head change its rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Which activations blocks compute again.
    pub recompute: Recompute,
    /// Rows of logits in memory at a time.
    pub head_rows: usize,
    /// Whether weights are in memory only while they are used.
    pub stream: bool,
    /// Where the inputs of blocks wait for the backward.
    pub inputs: Placement,
    /// Where the optimizer keeps its moments.
    pub moments: Placement,
    /// Type of activations; F32 on CPUs.
    pub activations: DType,
}

impl Policy {
    /// Rows of logits where nothing else is asked for: 103 MB at GPT-2's vocabulary. The head is widened
    /// twice for each chunk; with half as many rows a step of gpt2 at 4 x 512 is 2% slower.
    pub const HEAD_ROWS: usize = 512;
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            recompute: Recompute::None,
            head_rows: Self::HEAD_ROWS,
            stream: false,
            inputs: Placement::Memory,
            moments: Placement::Memory,
            activations: DType::F32,
        }
    }
}
