//! Values of `export`.

use serde::{Deserialize, Serialize};

use crate::convert::gguf::GgufType;

/// The value of `export --to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExportName {
    /// A folder of PEFT with a plain LoRA.
    Peft,
    /// A LoRA for llama.cpp; without an adapter the base.
    Gguf,
    /// A folder of mlx-lm.
    Mlx,
    /// A PyTorch file for loralib.
    Loralib,
    /// The base with adapters folded into it, for llama.cpp.
    MergedGguf,
}

impl ExportName {
    /// As it is written after `--to`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Peft => "peft",
            Self::Gguf => "gguf",
            Self::Mlx => "mlx",
            Self::Loralib => "loralib",
            Self::MergedGguf => "merged-gguf",
        }
    }
}

/// The value of `export --dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GgufTypeName {
    /// IEEE single precision: 24 significant bits.
    F32,
    /// IEEE half precision: 11 significant bits, at most 65504.
    F16,
    /// 8-bit codes.
    #[value(name = "q8_0")]
    #[serde(rename = "q8_0")]
    Q8_0,
    /// 4-bit codes; embedding and head in half precision.
    #[value(name = "q4_0")]
    #[serde(rename = "q4_0")]
    Q4_0,
}

impl GgufTypeName {
    /// The type of the tensors.
    pub fn dtype(self) -> GgufType {
        match self {
            Self::F32 => GgufType::F32,
            Self::F16 => GgufType::F16,
            Self::Q8_0 => GgufType::Q8_0,
            Self::Q4_0 => GgufType::Q4_0,
        }
    }
}
