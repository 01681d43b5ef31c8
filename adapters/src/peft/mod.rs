//! Adapters as PEFT 0.21.2 writes and reads them, strictly.
//!
//! A folder holds `adapter_config.json` and `adapter_model.safetensors`. Several methods together have no
//! single PEFT folder: each has a subfolder of its name. Data for which PEFT has no field (the base's
//! fingerprint, the parts of fused modules) is in the tensor file's metadata, which PEFT ignores. The fields
//! and tensors of a method are in its own file; here is what all methods share.

mod config;
mod describe;
pub(crate) mod modules;
mod pickled;
mod read;
pub(crate) mod selection;
mod tensors;
pub(crate) mod virtual_tokens;
mod write;

pub use describe::{Described, DescribedTensor, Description, describe};
pub use read::{Loaded, load};
pub use write::save;

pub(crate) use config::{Fields, OneOrMany, config_text, number};
pub(crate) use read::Findings;
pub(crate) use tensors::{Outgoing, TensorFile};
pub(crate) use write::{Files, check_count, check_finite};

/// File name of the config.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// File name of the tensors.
pub const TENSOR_FILE: &str = "adapter_model.safetensors";
/// File name of the tensors before PEFT wrote safetensors.
pub(crate) const PICKLE_FILE: &str = "adapter_model.bin";
/// Stands before each module path in the tensor file.
pub(crate) const MODULE_PREFIX: &str = "base_model.model.";
/// Metadata: fingerprint of the base the adapter was made for.
pub(crate) const META_FINGERPRINT: &str = "engraft.base_fingerprint";

#[cfg(test)]
#[path = "golden_tests.rs"]
mod golden_tests;
#[cfg(test)]
#[path = "peft_tests.rs"]
mod tests;

use std::path::{Path, PathBuf};

use crate::{Error, Result, methods};

/// The folders that hold an adapter's files: itself, or those of several methods below it.
pub(crate) fn folders(path: &Path) -> Result<Vec<PathBuf>> {
    std::fs::metadata(path).map_err(|cause| Error::read(path, cause))?;
    let not_an_adapter = |found: String| Error::NotAnAdapter { path: path.to_owned(), found };
    let below: Vec<PathBuf> = methods::kinds()
        .into_iter()
        .map(|kind| path.join(kind.name))
        .filter(|folder| folder.join(CONFIG_FILE).is_file())
        .collect();
    match (path.join(CONFIG_FILE).is_file(), below.is_empty()) {
        (true, true) => Ok(vec![path.to_owned()]),
        (false, false) => Ok(below),
        (true, false) => {
            let names = methods::list(|kind| format!("{}/", kind.name), " or ");
            Err(not_an_adapter(format!("it holds an adapter_config.json and also {names}")))
        }
        (false, true) => Err(not_an_adapter("it holds no adapter_config.json".to_owned())),
    }
}
