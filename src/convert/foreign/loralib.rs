//! A LoRA in a PyTorch file, as `lora_state_dict` of loralib gives it: `lora_A` and `lora_B` of each layer.
//!
//! A `Linear` has A [rank, inputs] and B [outputs, rank]. A `MergedLinear` has one A and one B for the parts that
//! `enable_lora` names: A stacks those of the parts, B has the columns of the parts below each other.

use std::path::Path;

use candle_core::{DType, pickle::PthTensors};
use engraft_util::panics;

use super::{Foreign, Format, Matrix, paired};
use crate::{
    error::{Error, Result},
    model::arch::layer_of,
};

/// Keys under which training scripts put a state dict into a larger object; loralib's own example has the first.
const KEYS: [&str; 3] = ["model_state_dict", "state_dict", "model"];

/// Reads the LoRA in the file `path`.
pub(super) fn read(path: &Path) -> Result<Foreign> {
    let unreadable = |cause: String| {
        Error::input(format!("{}: cannot be read as a PyTorch file: {cause}; save it again", path.display()))
    };
    let mut file = open(path, None).map_err(&unreadable)?;
    for key in KEYS {
        if file.tensor_infos().is_empty() {
            file = open(path, Some(key)).unwrap_or(file);
        }
    }
    let size = std::fs::metadata(path).map_err(|cause| Error::reading(path, &cause))?.len();
    let (mut tensors, mut others) = (Vec::new(), Vec::new());
    for (name, info) in file.tensor_infos() {
        let (Some(_), &[rows, columns]) = (named(name), info.layout.dims()) else {
            others.push(name.clone());
            continue;
        };
        if rows.saturating_mul(columns) as u64 > size {
            return Err(unreadable(format!("{name} is larger than the file")));
        }
        let values = panics::catch(|| file.get(name)?.map(|tensor| tensor.to_dtype(DType::F32)).transpose());
        let values = match values {
            Some(Ok(Some(tensor))) => tensor.flatten_all().and_then(|tensor| tensor.to_vec1::<f32>()),
            Some(Err(cause)) => Err(cause),
            _ => return Err(unreadable(format!("{name} is malformed"))),
        };
        let values = values.map_err(|cause| unreadable(first_line(&cause)))?;
        tensors.push((name.clone(), Matrix { rows, columns, values }));
    }
    let (pairs, _) = paired(path, tensors, &named)?;
    let mut hints = Vec::new();
    if !others.is_empty() && !pairs.is_empty() {
        others.sort();
        refuse_trained_biases(path, &others)?;
        hints.push(format!(
            "{} holds other tensors than those of a LoRA, which are passed over",
            path.display()
        ));
    }
    Ok(Foreign {
        path: path.to_owned(),
        format: Format::Loralib,
        pairs,
        base: None,
        fingerprint: None,
        dropout: 0.0,
        hints,
    })
}

fn open(path: &Path, key: Option<&str>) -> Result<PthTensors, String> {
    let read = panics::catch(|| PthTensors::new(path, key)).ok_or("its pickle is malformed")?;
    read.map_err(|cause| first_line(&cause))
}

fn first_line(cause: &candle_core::Error) -> String {
    cause.to_string().lines().next().unwrap_or_default().to_owned()
}

/// Layer, module, and whether it is A.
fn named(name: &str) -> Option<(usize, String, bool)> {
    let (module, is_a) = match name.strip_suffix(".lora_A") {
        Some(module) => (module, true),
        None => (name.strip_suffix(".lora_B")?, false),
    };
    // Data-parallel training puts `module.` before all names; a bare GPT2Model has no `transformer.`.
    let module = module.strip_prefix("module.").unwrap_or(module);
    let with_head = format!("transformer.{}", module.strip_prefix("transformer.").unwrap_or(module));
    let (layer, module) = layer_of(&with_head)?;
    Some((layer.parse().ok()?, module.to_owned(), is_a))
}

/// With `bias='all'` or `'lora_only'` the file has biases that the base does not have. One of a whole model has all of its
/// tensors, weights too, and its biases may be the base's.
fn refuse_trained_biases(path: &Path, others: &[String]) -> Result<()> {
    let is_whole = others.iter().any(|name| name.ends_with(".weight"));
    match others.iter().find(|name| name.ends_with(".bias") && !name.ends_with(".attn.bias")) {
        Some(name) if !is_whole => Err(Error::input(format!(
            "{}: has the trained bias {name}, which is not read; save the file with lora_state_dict(model, bias='none')",
            path.display()
        ))),
        _ => Ok(()),
    }
}
