//! GGUF files: the LoRA in one, and what one says of a model.

use std::{collections::BTreeMap, fs::File, io::BufReader, path::Path};

use candle_core::{
    Device,
    quantized::gguf_file::{Content, Value},
};
use engraft_util::panics;

use super::{Foreign, Format, Matrix, Pair, paired};
use crate::{
    convert::gguf::{META_BASE, META_DROPOUT, META_FINGERPRINT, names},
    error::{Error, Result},
};

/// Reads the LoRA in the file `path`.
pub(super) fn read(path: &Path) -> Result<Foreign> {
    let unreadable = |cause: String| unreadable(path, &cause);
    let (mut file, content) = open(path)?;
    let text = |key: &str| match content.metadata.get(key) {
        Some(Value::String(text)) => Some(text.clone()),
        _ => None,
    };
    let number = |key: &str| match content.metadata.get(key) {
        Some(Value::F32(number)) => Some(f64::from(*number)),
        _ => None,
    };
    refuse_other_kinds(path, &text)?;
    let mut tensors = Vec::new();
    for (name, info) in &content.tensor_infos {
        let &[rows, columns] = info.shape.dims() else {
            return Err(unreadable(format!(
                "{name} has shape {:?}, where a LoRA has matrices",
                info.shape.dims()
            )));
        };
        let values = panics::catch(|| {
            content
                .tensor(&mut file, name, &Device::Cpu)?
                .dequantize(&Device::Cpu)?
                .flatten_all()?
                .to_vec1::<f32>()
        });
        let values = values.ok_or_else(|| unreadable(format!("{name} is malformed")))?;
        let values = values.map_err(|cause| unreadable(format!("{name}: {}", first_line(&cause))))?;
        if rows.checked_mul(columns) != Some(values.len()) {
            return Err(unreadable(format!("{name} has shape {:?}, which is too large", info.shape.dims())));
        }
        tensors.push((name.clone(), Matrix { rows, columns, values }));
    }
    let named = |name: &str| {
        let (weight, is_a) = match name.strip_suffix(".lora_a") {
            Some(weight) => (weight, true),
            None => (name.strip_suffix(".lora_b")?, false),
        };
        let (layer, module) = names::module_of(weight)?;
        Some((layer, module.to_owned(), is_a))
    };
    let (mut pairs, mut others) = paired(path, tensors, &named)?;
    if !others.is_empty() {
        others.sort();
        return Err(Error::input(format!(
            "{}: {} is no part of a LoRA on the linear modules of a GPT-2; leave it out of the file",
            path.display(),
            others[0]
        )));
    }
    let mut hints = Vec::new();
    if is_transposed(&pairs) {
        hints.push(
            "A and B stand transposed in the file, as llama.cpp's converter writes them for a GPT-2"
                .to_owned(),
        );
        for Pair { a, b, .. } in &mut pairs {
            (*a, *b) = (b.transposed(), a.transposed());
        }
    }
    // Without an alpha llama.cpp takes a scale of 1.
    let alpha = number("adapter.lora.alpha").filter(|alpha| *alpha != 0.0);
    for pair in &mut pairs {
        pair.scale = Some(alpha.map_or(1.0, |alpha| alpha / pair.b.columns.max(1) as f64));
    }
    Ok(Foreign {
        path: path.to_owned(),
        format: Format::Gguf,
        pairs,
        base: text(META_BASE),
        fingerprint: text(META_FINGERPRINT),
        dropout: number(META_DROPOUT).unwrap_or_default(),
        hints,
    })
}

/// A model in a GGUF file, as its metadata and descriptions of tensors tell it.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFile {
    /// `general.architecture`.
    pub architecture: Option<String>,
    /// `general.name`.
    pub name: Option<String>,
    /// The whole numbers that the architecture has, such as `context_length`.
    pub sizes: BTreeMap<String, u64>,
    /// Number of tensors of each type.
    pub types: BTreeMap<String, usize>,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of values in them.
    pub parameters: usize,
    /// Number of tokens of the tokenizer; `None` without one.
    pub tokens: Option<usize>,
}

/// The model in the file `path`; `None` where it is no GGUF file, or an adapter.
///
/// # Errors
/// [`Error::Input`] for a GGUF file that cannot be read.
pub fn model(path: &Path) -> Result<Option<ModelFile>> {
    if Format::of(path) != Some(Format::Gguf) {
        return Ok(None);
    }
    let (_, content) = open(path)?;
    let text = |key: &str| content.metadata.get(key).and_then(|value| value.to_string().ok().cloned());
    if text("general.type").as_deref() == Some("adapter") {
        return Ok(None);
    }
    let architecture = text("general.architecture");
    let own = architecture.clone().unwrap_or_default();
    let sizes = content.metadata.iter().filter_map(|(key, value)| {
        let key = key.strip_prefix(&own)?.strip_prefix('.')?;
        Some((key.to_owned(), value.to_u64().ok()?))
    });
    let mut types = BTreeMap::new();
    for info in content.tensor_infos.values() {
        *types.entry(format!("{:?}", info.ggml_dtype)).or_insert(0) += 1;
    }
    let tokens =
        content.metadata.get("tokenizer.ggml.tokens").and_then(|value| Some(value.to_vec().ok()?.len()));
    Ok(Some(ModelFile {
        sizes: sizes.collect(),
        name: text("general.name"),
        architecture,
        types,
        tensors: content.tensor_infos.len(),
        parameters: content.tensor_infos.values().map(|info| info.shape.elem_count()).sum(),
        tokens,
    }))
}

fn open(path: &Path) -> Result<(BufReader<File>, Content)> {
    let mut file = BufReader::new(File::open(path).map_err(|cause| Error::reading(path, &cause))?);
    // Broken files may make the reader panic.
    let content =
        panics::catch(|| Content::read(&mut file)).ok_or_else(|| unreadable(path, "it is malformed"))?;
    let content = content.map_err(|cause| unreadable(path, &first_line(&cause)))?;
    Ok((file, content))
}

fn unreadable(path: &Path, cause: &str) -> Error {
    Error::input(format!("{}: is no valid GGUF file: {cause}; get it again", path.display()))
}

fn first_line(cause: &candle_core::Error) -> String {
    cause.to_string().lines().next().unwrap_or_default().to_owned()
}

fn refuse_other_kinds(path: &Path, text: &dyn Fn(&str) -> Option<String>) -> Result<()> {
    for (key, expected, remedy) in [
        ("general.type", "adapter", "a model cannot be read, give the folder that it was made from"),
        ("adapter.type", "lora", "give a LoRA"),
        ("general.architecture", names::ARCHITECTURE, "give an adapter of a GPT-2"),
    ] {
        let found = text(key).unwrap_or_else(|| "missing".to_owned());
        if found != expected {
            let path = path.display();
            return Err(Error::input(format!("{path}: {key} is {found}, not {expected}; {remedy}")));
        }
    }
    Ok(())
}

/// Whether every pair is the transpose of a LoRA: A `[rank, outputs]` and B `[inputs, rank]`. The names tell it, where
/// inputs and outputs differ: c_attn and c_fc have more outputs, mlp.c_proj more inputs.
fn is_transposed(pairs: &[Pair]) -> bool {
    let turned = |pair: &Pair| match pair.module.as_str() {
        "attn.c_attn" | "mlp.c_fc" => pair.a.columns > pair.b.rows,
        "mlp.c_proj" => pair.a.columns < pair.b.rows,
        _ => false,
    };
    let tells = |pair: &&Pair| pair.a.columns != pair.b.rows;
    pairs.iter().any(|pair| tells(&pair)) && pairs.iter().filter(tells).all(turned)
}
