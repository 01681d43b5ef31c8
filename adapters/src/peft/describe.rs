//! Describes an adapter from its files, without comparing it with a base.

use std::{
    collections::BTreeSet,
    fmt,
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::{CONFIG_FILE, META_FINGERPRINT, config::Config, folders, tensors::TensorFile};
use crate::{AdapterSpec, Problem, Result};

/// The adapters in a folder.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Description {
    /// One entry for each method.
    pub adapters: Vec<Described>,
}

/// One adapter, as its files describe it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Described {
    /// Folder of its two files.
    pub folder: PathBuf,
    /// The one method, if it could be understood.
    pub spec: AdapterSpec,
    /// Name of the base it was made for.
    pub base: Option<String>,
    /// Revision of that base on the hub.
    pub revision: Option<String>,
    /// Fingerprint of that base's weights.
    pub fingerprint: Option<String>,
    /// Ranks that occur among its tensors (of parts fused by PEFT's layout: their sum).
    pub ranks: Vec<usize>,
    /// Values in all tensors of the file.
    pub parameters: usize,
    /// The tensors, sorted by name.
    pub tensors: Vec<DescribedTensor>,
    /// Reasons why this version cannot load it; empty if it can.
    pub unsupported: Vec<String>,
    /// What the files do not hold of how it was trained; mostly nothing.
    pub hint: Option<&'static str>,
}

/// A tensor in an adapter's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DescribedTensor {
    /// Name in the file.
    pub name: String,
    /// Element type, such as `F32`.
    pub dtype: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
}

/// Describes the adapter in a folder, or the methods below it. Tensor values are not read.
///
/// # Errors
/// When files cannot be read, as [`load`](super::load). Unsupported features are no error here.
pub fn describe(dir: &Path) -> Result<Description> {
    let adapters = folders(dir)?.into_iter().map(describe_folder).collect::<Result<_>>()?;
    Ok(Description { adapters })
}

fn describe_folder(folder: PathBuf) -> Result<Described> {
    let config = Config::read(&folder.join(CONFIG_FILE))?;
    let file = TensorFile::in_folder(&folder)?;
    let tensors: Vec<_> = file.tensors().into_iter().map(|(name, info)| tensor(name, info)).collect();
    let is_a =
        |name: &str| [".lora_A.weight", ".lora_A", ".lora_embedding_A"].iter().any(|end| name.ends_with(end));
    let a = tensors.iter().filter(|tensor| is_a(&tensor.name));
    let ranks: BTreeSet<usize> = a.filter_map(|tensor| tensor.shape.first().copied()).collect();
    let hint = config.stored.as_ref().and_then(|stored| stored.hint());
    Ok(Described {
        hint,
        spec: config.stored.map(|stored| stored.spec(&file)).unwrap_or_default(),
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

fn tensor(name: String, info: &safetensors::tensor::TensorInfo) -> DescribedTensor {
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
        for (name, text) in self.spec.methods().iter().flat_map(|method| method.lines()) {
            writeln!(f, "{name:<12} {text}")?;
        }
        let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "not named".to_owned());
        writeln!(f, "base         {}", or_none(&self.base))?;
        writeln!(f, "fingerprint  {}", or_none(&self.fingerprint))?;
        writeln!(f, "parameters   {}", self.parameters)?;
        if let Some(hint) = self.hint {
            writeln!(f, "hint         {hint}")?;
        }
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
