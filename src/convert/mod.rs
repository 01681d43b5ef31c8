//! Models and adapters made into others: adapters folded into their base, and written as a plain model.
//!
//! [`Merge`] folds and writes, one tensor in memory at a time; [`compare`] says how far the logits of the result are from
//! those of base and adapters. The base itself is never changed. [`gguf`] writes models and LoRAs for llama.cpp, and
//! [`foreign`] reads LoRAs that are not in PEFT's files.

mod card;
mod compare;
mod folder;
pub mod foreign;
pub mod gguf;
mod lora_files;
mod merge;
mod pickle;

pub use card::write_card;
pub use compare::{LogitDifference, compare};
pub use folder::{WeightDtype, check_output};
pub use lora_files::{LoralibLayer, LoralibLayers, write_loralib, write_mlx};
pub use merge::{Merge, Merged};
