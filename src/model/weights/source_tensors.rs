//! The tensors of a base as its files have them: one after another, in F32, not rounded to FP16 before.

use std::path::Path;

use half::{bf16, f16};
use safetensors::Dtype;

use super::{
    names::{self, Wanted},
    source::Source,
};
use crate::{
    error::{Error, Result},
    model::config::Config,
};

/// The tensors of a base, to be read one at a time.
pub struct SourceTensors {
    source: Source,
    wanted: Vec<Wanted>,
}

impl SourceTensors {
    /// Opens the weights in `folder`.
    ///
    /// # Errors
    /// [`Error::Input`] when they cannot be read, or are not those of `config`.
    pub fn from_folder(folder: &Path, config: &Config) -> Result<Self> {
        Self::checked(Source::open(folder)?, config)
    }

    /// Opens weights that are compiled into the program.
    ///
    /// # Errors
    /// As [`SourceTensors::from_folder`].
    pub fn from_embedded(bytes: &'static [u8], config: &Config) -> Result<Self> {
        Self::checked(Source::embedded(bytes)?, config)
    }

    fn checked(source: Source, config: &Config) -> Result<Self> {
        let wanted = names::wanted(config);
        source.check(&wanted, config.tied)?;
        Ok(Self { source, wanted })
    }

    /// All tensors of the base in canonical order, under their canonical names.
    pub fn tensors(&self) -> &[Wanted] {
        &self.wanted
    }

    /// Values of the tensor of that canonical name.
    ///
    /// # Errors
    /// [`Error::Input`] when there is none, or it cannot be read.
    pub fn read(&self, name: &str) -> Result<Vec<f32>> {
        let stored = self.source.tensors.get(name);
        let stored = stored.ok_or_else(|| Error::input(format!("the base has no tensor {name}")))?;
        let mut values = Vec::with_capacity(stored.shape.iter().product());
        self.source.read(stored, &mut |chunk| {
            extend(&mut values, chunk, stored.dtype);
            Ok(())
        })?;
        Ok(values)
    }
}

/// Appends the values of `chunk`; F64 is rounded.
fn extend(values: &mut Vec<f32>, chunk: &[u8], dtype: Dtype) {
    match dtype {
        Dtype::F16 => values.extend(chunk.as_chunks().0.iter().map(|&two| f16::from_le_bytes(two).to_f32())),
        Dtype::BF16 => {
            values.extend(chunk.as_chunks().0.iter().map(|&two| bf16::from_le_bytes(two).to_f32()));
        }
        Dtype::F64 => {
            values.extend(chunk.as_chunks().0.iter().map(|&eight| f64::from_le_bytes(eight) as f32));
        }
        _ => values.extend(chunk.as_chunks().0.iter().map(|&four| f32::from_le_bytes(four))),
    }
}
