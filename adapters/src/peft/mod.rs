//! Adapters as PEFT 0.21.2 writes and reads them, strictly.
//!
//! A folder holds `adapter_config.json` and `adapter_model.safetensors`. A LoRA and a prefix together
//! have no single PEFT folder: they are the folders `lora/` and `prefix/` below one. What PEFT has no
//! field for (the base's fingerprint, the parts of fused modules) is in the tensor file's metadata,
//! which PEFT passes over without a word.

mod config;
mod describe;
mod modules;
mod read;
mod tensors;
mod write;

pub use describe::{Described, DescribedTensor, Description, describe};
pub use read::{Loaded, load};
pub use write::save;

/// File name of the config.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// File name of the tensors.
pub const TENSOR_FILE: &str = "adapter_model.safetensors";
/// Subfolder of the LoRA where a prefix belongs to it.
pub const LORA_FOLDER: &str = "lora";
/// Subfolder of the prefix where a LoRA belongs to it.
pub const PREFIX_FOLDER: &str = "prefix";
/// In front of each module path in the tensor file.
pub(crate) const LORA_PREFIX: &str = "base_model.model.";
/// The one tensor of a prefix, [P, 2Ld].
pub(crate) const PROMPT: &str = "prompt_embeddings";
/// Metadata: fingerprint of the base the adapter was made for.
pub(crate) const META_FINGERPRINT: &str = "engraft.base_fingerprint";
/// Metadata: the LoRA spec as JSON, where parts were fused and the config cannot say so.
pub(crate) const META_LORA: &str = "engraft.lora";

#[cfg(test)]
#[path = "golden_tests.rs"]
mod golden_tests;
#[cfg(test)]
#[path = "peft_tests.rs"]
mod tests;

use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The folders that hold an adapter's files: itself, or `lora/` and `prefix/` below it.
fn folders(path: &Path) -> Result<Vec<PathBuf>> {
    std::fs::metadata(path).map_err(|cause| Error::read(path, cause))?;
    let not_an_adapter = |found| Error::NotAnAdapter { path: path.to_owned(), found };
    let below: Vec<PathBuf> = [LORA_FOLDER, PREFIX_FOLDER]
        .iter()
        .map(|name| path.join(name))
        .filter(|folder| folder.join(CONFIG_FILE).is_file())
        .collect();
    match (path.join(CONFIG_FILE).is_file(), below.is_empty()) {
        (true, true) => Ok(vec![path.to_owned()]),
        (false, false) => Ok(below),
        (true, false) => Err(not_an_adapter("it holds an adapter_config.json beside lora/ or prefix/")),
        (false, true) => Err(not_an_adapter("it holds no adapter_config.json")),
    }
}
