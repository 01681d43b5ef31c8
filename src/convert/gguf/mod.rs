//! GGUF files for llama.cpp: a base, with or without adapters folded into it, and LoRAs.
//!
//! llama.cpp stores the weights of a linear layer as rows of inputs, so those of a GPT-2, which are `[inputs, outputs]`, are
//! transposed. A and B of a LoRA are rows of inputs and of ranks already, and stay as they are.

mod adapter;
mod file;
mod model;
pub mod names;
mod tokenizer;

pub use adapter::{GgufAdapter, META_BASE, META_DROPOUT, META_FINGERPRINT};
pub use file::GgufType;
pub use model::{GgufModel, WrittenModel};
