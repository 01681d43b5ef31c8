//! A LoRA in a folder of mlx-lm: `adapters.safetensors` and `adapter_config.json`, one scale for all modules.

use std::{fs, path::Path};

use candle_core::{DType, Device, safetensors::MmapedSafetensors};
use serde::Deserialize;

use super::{Foreign, Format, Matrix, paired};
use crate::error::{Error, Result};

/// File name of the tensors.
pub const TENSORS: &str = "adapters.safetensors";
/// File name of the config.
const CONFIG: &str = "adapter_config.json";
/// What the names of layers begin with; the number of the layer follows.
const LAYERS: &str = "model.h.";

/// The part of the config that says what the tensors mean.
#[derive(Deserialize)]
struct Config {
    #[serde(default = "lora")]
    fine_tune_type: String,
    lora_parameters: Parameters,
    /// The base that was trained; mlx-lm writes all options of a training into the file.
    model: Option<String>,
}

#[derive(Deserialize)]
struct Parameters {
    scale: f64,
    #[serde(default)]
    dropout: f64,
}

fn lora() -> String {
    "lora".to_owned()
}

/// Reads the LoRA in the folder `path`.
pub(super) fn read(path: &Path) -> Result<Foreign> {
    let config_file = path.join(CONFIG);
    let text = fs::read_to_string(&config_file).map_err(|cause| Error::reading(&config_file, &cause))?;
    let config: Config = serde_json::from_str(&text).map_err(|cause| {
        let file = config_file.display();
        Error::input(format!("{file}: is no config of an mlx-lm adapter: {cause}; save the adapter again"))
    })?;
    if config.fine_tune_type != "lora" {
        return Err(Error::input(format!(
            "{}: fine_tune_type is {}, not lora; give a LoRA",
            config_file.display(),
            config.fine_tune_type
        )));
    }
    let tensor_file = path.join(TENSORS);
    let unreadable = |cause: candle_core::Error| {
        let cause = cause.to_string();
        let cause = cause.lines().next().unwrap_or_default();
        Error::input(format!("{}: cannot be read: {cause}; save the adapter again", tensor_file.display()))
    };
    // SAFETY: the file is read here and not kept; one cut short by others meanwhile would end the program, not corrupt it.
    let file = unsafe { MmapedSafetensors::new(&tensor_file) }.map_err(unreadable)?;
    let mut tensors = Vec::new();
    for (name, view) in file.tensors() {
        let &[rows, columns] = view.shape() else { continue };
        let tensor = file
            .load(&name, &Device::Cpu)
            .and_then(|tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>());
        let matrix = Matrix { rows, columns, values: tensor.map_err(unreadable)? };
        // Both stand transposed there: lora_a [inputs, rank], lora_b [rank, outputs].
        tensors.push((name, matrix.transposed()));
    }
    let named = |name: &str| {
        let (module, is_a) = match name.strip_suffix(".lora_a") {
            Some(module) => (module, true),
            None => (name.strip_suffix(".lora_b")?, false),
        };
        let (layer, module) = module.strip_prefix(LAYERS)?.split_once('.')?;
        Some((layer.parse().ok()?, module.to_owned(), is_a))
    };
    let (mut pairs, mut others) = paired(path, tensors, &named)?;
    if !others.is_empty() {
        others.sort();
        return Err(Error::input(format!(
            "{}: {} is no part of a LoRA on the linear modules of a GPT-2; leave it out of the file",
            tensor_file.display(),
            others[0]
        )));
    }
    let Parameters { scale, dropout } = config.lora_parameters;
    pairs.iter_mut().for_each(|pair| pair.scale = Some(scale));
    Ok(Foreign {
        path: path.to_owned(),
        format: Format::Mlx,
        pairs,
        base: config.model,
        fingerprint: None,
        dropout,
        hints: Vec::new(),
    })
}
