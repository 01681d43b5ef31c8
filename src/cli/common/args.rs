//! Options that both programs have: the base and the device.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{
    options::{Check, OnResume, options, switch, unless, value},
    values::{BaseDtypeName, DeviceName, Precision, Switch},
};
use crate::error::{Error, Result};

options! {
    /// Which base, and how to find it.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case", default)]
    BaseArgs {}

    "Base" {
        /// Hub id (gpt2, openai-community/gpt2-xl, any GPT2LMHeadModel) or folder
        base: String =>
            value("NAME|DIR").otherwise("the embedded base").on_resume(OnResume::OwnRule).basic();
        /// Branch, tag or commit of a base from the hub
        revision: String => value("REV").on_resume(OnResume::OwnRule);
        /// Use the hub's local cache only
        offline: bool => switch().on_resume(OnResume::OfTheCall);
        /// Type of the base's matrices: f16, q8 (8 bits), or nf4 (4 bits, as in QLoRA)
        base_dtype: BaseDtypeName = BaseDtypeName::F16 => value("TYPE");
        /// Accept an adapter that was trained on another base
        allow_base_mismatch: bool => switch().on_resume(OnResume::Free);
    }
}

impl BaseArgs {
    /// Refuses a revision of a base that has none.
    ///
    /// # Errors
    /// [`Error::Input`] that names `--revision`.
    pub fn refuse_revision(&self) -> Result<()> {
        let Some(revision) = &self.revision else { return Ok(()) };
        match &self.base {
            None => Err(Error::input(
                "--revision: the embedded base has none; give --base with the name of a base on the hub",
            )),
            Some(base) if Path::new(base).is_dir() => Err(Error::input(format!(
                "--revision {revision}: --base {base} is a folder, which has no revisions; leave it out"
            ))),
            Some(_) => Ok(()),
        }
    }
}

/// A larger number of threads is taken for a typing error.
const MOST_THREADS: usize = 4096;

options! {
    /// Options of the device.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case", default)]
    ComputeArgs {}

    "Device and memory" {
        /// Device: cpu, cuda, cuda:N, or auto for CUDA if there is a device
        device: DeviceName = DeviceName::Auto => value("DEVICE").on_resume(OnResume::OwnRule).basic();
        /// Type of activations: f32, bf16 (on a CPU in products and attention, if it has fast BF16 products),
        /// or f16 (CUDA only)
        precision: Precision =>
            value("TYPE").otherwise("f32 on a CPU, f16 on CUDA").on_resume(OnResume::OwnRule);
        /// Number of threads; results do not depend on it
        threads: usize => value("N").otherwise("all cores").on_resume(OnResume::OfTheCall).check(Check {
            refused: |&threads| unless((1..=MOST_THREADS).contains(&threads), threads),
            fault: "is no number of threads",
            remedy: "give a whole number from 1 to 4096",
        });
        /// Read the layers of the base from its file when they are needed; auto: the memory plan decides, and
        /// without a plan (eval, generate) they stay in memory
        stream_base: Switch = Switch::Auto => value("WHEN").on_resume(OnResume::Free);
    }
}

impl ComputeArgs {
    /// Whether the base is streamed in a command without a memory plan.
    pub fn streams(&self) -> bool {
        self.stream_base().fixed().unwrap_or(false)
    }
}
