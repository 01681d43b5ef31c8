//! The folder of a model as Transformers writes it: weights in one file or in shards, `config.json`, tokenizer files.

use std::{collections::BTreeMap, fs, path::Path};

use engraft_util::{
    atomic::{self, WriteError},
    safetensors::{Entry, Order, header},
};
use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::{
    error::{Error, Result},
    model::{Base, TokenizerFiles, arch::Tensor},
};

/// Element type of the weights that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightDtype {
    /// IEEE half precision: 11 significant bits, at most 65504.
    F16,
    /// IEEE single precision: 24 significant bits.
    F32,
    /// bfloat16: 8 significant bits, the range of F32.
    BF16,
}

/// Files beside the weights that are copied where a base has them: tokenizer, generation config.
const COPIED: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
];

/// Checks that `output` can become a new folder: it is not there, or empty.
///
/// # Errors
/// [`Error::Input`] when it is something else.
pub fn check_output(output: &Path) -> Result<()> {
    let refuse = |what: &str| {
        let output = output.display();
        Err(Error::input(format!("--output {output}: {what}; name a folder that is new or empty")))
    };
    match fs::read_dir(output) {
        Ok(mut entries) => match entries.next() {
            Some(_) => refuse("is not empty"),
            None => Ok(()),
        },
        Err(_) if output.symlink_metadata().is_err() => Ok(()),
        Err(_) => refuse("is no folder"),
    }
}

impl WeightDtype {
    /// Its name in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::F32 => "f32",
            Self::BF16 => "bf16",
        }
    }

    /// Its name in `config.json`.
    fn torch_name(self) -> &'static str {
        match self {
            Self::F16 => "float16",
            Self::F32 => "float32",
            Self::BF16 => "bfloat16",
        }
    }

    fn stored(self) -> Dtype {
        match self {
            Self::F16 => Dtype::F16,
            Self::F32 => Dtype::F32,
            Self::BF16 => Dtype::BF16,
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F16 | Self::BF16 => 2,
            Self::F32 => 4,
        }
    }

    /// Appends `values`, rounded to nearest even, as little-endian bytes.
    ///
    /// # Errors
    /// The first value that the type cannot hold.
    fn append(self, values: &[f32], bytes: &mut Vec<u8>) -> Result<(), f32> {
        let beyond = |value: &f32| match self {
            Self::F16 => !f16::from_f32(*value).is_finite(),
            Self::BF16 => !bf16::from_f32(*value).is_finite(),
            Self::F32 => !value.is_finite(),
        };
        if let Some(value) = values.iter().find(|value| beyond(value)) {
            return Err(*value);
        }
        match self {
            Self::F16 => bytes.extend(values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes())),
            Self::BF16 => bytes.extend(values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes())),
            Self::F32 => bytes.extend(values.iter().flat_map(|value| value.to_le_bytes())),
        }
        Ok(())
    }
}

/// The weights of a model that is written: which tensors, and which of them share a file.
pub(super) struct WeightFiles {
    dtype: WeightDtype,
    shards: Vec<Vec<Tensor>>,
}

impl WeightFiles {
    /// `tensors` in their order, in files of at most `most` bytes of tensors, or of a single larger tensor.
    pub(super) fn new(tensors: Vec<Tensor>, dtype: WeightDtype, most: u64) -> Self {
        let mut shards: Vec<Vec<Tensor>> = vec![Vec::new()];
        let mut filled = 0;
        for tensor in tensors {
            let bytes = (tensor.elements() * dtype.bytes()) as u64;
            if filled > 0 && filled + bytes > most {
                shards.push(Vec::new());
                filled = 0;
            }
            filled += bytes;
            if let Some(last) = shards.last_mut() {
                last.push(tensor);
            }
        }
        Self { dtype, shards }
    }

    /// Names of the weight files.
    pub(super) fn names(&self) -> Vec<String> {
        match self.shards.len() {
            1 => vec!["model.safetensors".to_owned()],
            count => {
                (1..=count).map(|number| format!("model-{number:05}-of-{count:05}.safetensors")).collect()
            }
        }
    }

    /// Bytes of all tensors.
    pub(super) fn bytes(&self) -> u64 {
        self.shards.iter().flatten().map(|tensor| (tensor.elements() * self.dtype.bytes()) as u64).sum()
    }

    /// Writes the files into `folder`. `values` yields those of each tensor, in order.
    ///
    /// # Errors
    /// [`Stop`] of either kind.
    pub(super) fn write(
        &self,
        folder: &Path,
        values: &mut dyn FnMut(&Tensor) -> Result<Vec<f32>>,
    ) -> Result<(), Stop> {
        for (name, shard) in self.names().iter().zip(&self.shards) {
            let mut stopped = None;
            let written = atomic::create(&folder.join(name), |out| {
                out.write_all(&self.header(shard)?)?;
                for tensor in shard {
                    match self.encode(tensor, values) {
                        Ok(bytes) => out.write_all(&bytes)?,
                        Err(error) => {
                            stopped = Some(error);
                            return Err(std::io::Error::other("its values cannot be had"));
                        }
                    }
                }
                Ok(())
            });
            written.map_err(|cause| stopped.map_or(Stop::Write(cause), Stop::Other))?;
        }
        if self.shards.len() > 1 {
            write_json(&folder.join("model.safetensors.index.json"), &self.index())?;
        }
        Ok(())
    }

    fn header(&self, shard: &[Tensor]) -> std::io::Result<Vec<u8>> {
        let entry = |tensor: &Tensor| Entry {
            name: tensor.name.clone(),
            dtype: self.dtype.stored(),
            shape: tensor.shape.clone(),
            bytes: tensor.elements() * self.dtype.bytes(),
        };
        let entries: Vec<Entry> = shard.iter().map(entry).collect();
        header(&[("format", "pt")].into(), &entries, Order::Given, 64)
    }

    fn encode(
        &self,
        tensor: &Tensor,
        values: &mut dyn FnMut(&Tensor) -> Result<Vec<f32>>,
    ) -> Result<Vec<u8>> {
        let values = values(tensor)?;
        let mut bytes = Vec::with_capacity(values.len() * self.dtype.bytes());
        match self.dtype.append(&values, &mut bytes) {
            Ok(()) => Ok(bytes),
            Err(value) => Err(Error::input(format!(
                "--dtype {}: {} becomes {value}, which it cannot hold; give --dtype f32, or a smaller scale of the \
                 adapter",
                self.dtype.name(),
                tensor.name
            ))),
        }
    }

    /// Which file holds which tensor.
    fn index(&self) -> Value {
        let names = self.names();
        let places = names.iter().zip(&self.shards);
        let map: BTreeMap<&str, &str> = places
            .flat_map(|(name, shard)| shard.iter().map(move |tensor| (tensor.name.as_str(), name.as_str())))
            .collect();
        json!({ "metadata": { "total_size": self.bytes() }, "weight_map": map })
    }
}

/// Why a folder is not finished.
pub(super) enum Stop {
    /// It cannot be written.
    Write(WriteError),
    /// What should be written cannot be had.
    Other(Error),
}

impl From<WriteError> for Stop {
    fn from(error: WriteError) -> Self {
        Self::Write(error)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// `config` of a base as the config of a model of `dtype`; an `untied` one has a head of its own.
///
/// # Errors
/// [`Error::Input`] when it is no JSON object.
pub(super) fn changed_config(config: &str, dtype: WeightDtype, untied: bool) -> Result<Value> {
    let mut config: Value = serde_json::from_str(config)
        .map_err(|cause| Error::input(format!("the base's config.json is no JSON: {cause}; correct it")))?;
    let Some(fields) = config.as_object_mut() else {
        return Err(Error::input("the base's config.json is no JSON object; correct it"));
    };
    // Transformers before 4.56 knows the type by the older name.
    for name in ["dtype", "torch_dtype"] {
        if name == "dtype" || fields.contains_key(name) {
            fields.insert(name.to_owned(), json!(dtype.torch_name()));
        }
    }
    // A bare GPT2Model has no head; what is written has one, or ties it.
    fields.insert("architectures".to_owned(), json!(["GPT2LMHeadModel"]));
    if untied {
        fields.insert("tie_word_embeddings".to_owned(), json!(false));
    }
    Ok(config)
}

/// Writes `value` as the JSON file `path`.
pub(super) fn write_json(path: &Path, value: &Value) -> Result<(), Stop> {
    let text = serde_json::to_string_pretty(value).unwrap_or_default() + "\n";
    Ok(atomic::create(path, |out| out.write_all(text.as_bytes()))?)
}

/// Copies the files of the tokenizer, and others that belong to a model, into `folder`.
///
/// # Errors
/// When one cannot be read or written.
pub(super) fn copy_companions(base: &Base, folder: &Path) -> Result<(), Stop> {
    let put = |name: &str, bytes: &[u8]| atomic::create(&folder.join(name), |out| out.write_all(bytes));
    match base.tokenizer_files() {
        TokenizerFiles::Bytes(bytes) => put(COPIED[0], bytes)?,
        TokenizerFiles::Folder(from) => {
            for name in COPIED {
                let path = from.join(name);
                if path.is_file() {
                    let bytes = fs::read(&path).map_err(|cause| Error::reading(&path, &cause))?;
                    put(name, &bytes)?;
                }
            }
        }
    }
    Ok(())
}
