//! What an adapter's files say of themselves, without a base to compare them with.

use std::{
    collections::BTreeSet,
    fmt,
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::{
    CONFIG_FILE, META_FINGERPRINT, META_LORA, TENSOR_FILE,
    config::{Config, Kind},
    folders,
    tensors::TensorFile,
};
use crate::{LoraSpec, PrefixSpec, Problem, Result};

/// The adapters in a folder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Description {
    /// One entry, or a LoRA and a prefix.
    pub adapters: Vec<Described>,
}

/// One adapter, as its files describe it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Described {
    /// Folder of its two files.
    pub folder: PathBuf,
    /// The LoRA, if it is one that could be understood.
    pub lora: Option<LoraSpec>,
    /// The prefix, if it is one that could be understood.
    pub prefix: Option<PrefixSpec>,
    /// Name of the base it was made for.
    pub base: Option<String>,
    /// Revision of that base.
    pub revision: Option<String>,
    /// Fingerprint of that base.
    pub fingerprint: Option<String>,
    /// Ranks that occur among its tensors (of parts fused by PEFT's layout: their sum).
    pub ranks: Vec<usize>,
    /// Values in all tensors of the file.
    pub parameters: usize,
    /// The tensors, by name.
    pub tensors: Vec<DescribedTensor>,
    /// What of it is not supported.
    pub unsupported: Vec<String>,
}

/// A tensor in an adapter's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DescribedTensor {
    /// Name.
    pub name: String,
    /// Type, such as `F32`.
    pub dtype: String,
    /// Shape.
    pub shape: Vec<usize>,
}

/// Describes the adapter in a folder, or the LoRA and the prefix below it. Tensor values are not read.
///
/// # Errors
/// Files that cannot be read, as [`load`](super::load) has them. What is not supported is no error here.
pub fn describe(dir: &Path) -> Result<Description> {
    let adapters = folders(dir)?.into_iter().map(describe_folder).collect::<Result<_>>()?;
    Ok(Description { adapters })
}

fn describe_folder(folder: PathBuf) -> Result<Described> {
    let config = Config::read(&folder.join(CONFIG_FILE))?;
    let file = TensorFile::open(&folder.join(TENSOR_FILE))?;
    let tensors: Vec<_> = file.tensors().into_iter().map(tensor).collect();
    let a = tensors.iter().filter(|tensor| tensor.name.ends_with(".lora_A.weight"));
    let ranks: BTreeSet<usize> = a.filter_map(|tensor| tensor.shape.first().copied()).collect();
    let (lora, prefix) = match config.kind {
        Some(Kind::Lora { spec, .. }) => (Some(own_spec(&file).unwrap_or(spec)), None),
        Some(Kind::Prefix(prefix)) => (None, Some(PrefixSpec { length: prefix.length, projection: None })),
        None => (None, None),
    };
    Ok(Described {
        lora,
        prefix,
        base: config.base_name,
        revision: config.revision,
        fingerprint: file.metadata(META_FINGERPRINT).map(str::to_owned),
        ranks: ranks.into_iter().collect(),
        parameters: tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum(),
        tensors,
        unsupported: config.problems.iter().map(Problem::to_string).collect(),
        folder,
    })
}

/// What was asked for before parts were fused.
fn own_spec(file: &TensorFile) -> Option<LoraSpec> {
    serde_json::from_str(file.metadata(META_LORA)?).ok()
}

fn tensor((name, info): (String, &safetensors::tensor::TensorInfo)) -> DescribedTensor {
    DescribedTensor { name, dtype: info.dtype.to_string(), shape: info.shape.clone() }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.adapters.iter().map(Described::to_string).collect();
        write!(f, "{}", texts.join("\n\n"))
    }
}

impl fmt::Display for Described {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "folder       {}", self.folder.display())?;
        if let Some(lora) = &self.lora {
            let root = if lora.rslora { " / sqrt(rank)" } else { " / rank" };
            writeln!(f, "kind         lora, rank {}, alpha {}, scale alpha{root}", lora.rank, lora.alpha)?;
            writeln!(f, "targets      {}", lora.targets)?;
        }
        if let Some(prefix) = &self.prefix {
            writeln!(f, "kind         prefix, {} virtual tokens", prefix.length)?;
        }
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "not named".to_owned());
        writeln!(f, "base         {}", or_none(&self.base))?;
        writeln!(f, "fingerprint  {}", or_none(&self.fingerprint))?;
        writeln!(f, "parameters   {}", self.parameters)?;
        for reason in &self.unsupported {
            writeln!(f, "unsupported  {reason}")?;
        }
        let lines: Vec<String> = self.tensors.iter().map(DescribedTensor::to_string).collect();
        write!(f, "{}", lines.join("\n"))
    }
}

impl fmt::Display for DescribedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  {} {} {:?}", self.name, self.dtype, self.shape)
    }
}
