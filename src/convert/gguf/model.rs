//! A base as GGUF, with or without adapters folded into it, written one tensor at a time.

use std::{borrow::Cow, io, path::Path};

use engraft_adapters::Folding;
use engraft_util::atomic;

use super::{
    file::{Described, GgufType, Meta, header, write_tensor},
    names::{ARCHITECTURE, gguf_name, is_positions},
    tokenizer,
};
use crate::{
    convert::merge::{Values, tensors},
    data::Tokenizer,
    error::{Error, Result},
    model::{
        Activation, Base,
        arch::{HEAD, Tensor, layer_of},
        weights::OnBytes,
    },
};

/// A model to be written as GGUF.
pub struct GgufModel<'a> {
    /// The base; its files are read anew, in their own precision.
    pub base: &'a Base,
    /// What is folded into it; perhaps nothing.
    pub folding: &'a Folding<'a>,
    /// The base's tokenizer.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Type of the matrices.
    pub dtype: GgufType,
}

/// A model that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenModel {
    /// Tensors in the file.
    pub tensors: usize,
    /// How many of them an adapter changed, or brought about.
    pub changed: usize,
    /// Bytes of the file.
    pub bytes: u64,
    /// Matrices in F16 instead of Q8_0, because their rows have no whole blocks of 32.
    pub in_f16: usize,
    /// Why the file has no tokenizer, as the end of a sentence.
    pub without_tokenizer: Option<String>,
}

impl GgufModel<'_> {
    /// Writes the file `output` in one step. `on_bytes` hears how many bytes are done, and of how many.
    ///
    /// # Errors
    /// [`Input`](Error::Input) for a base that llama.cpp computes in another way, or that cannot be read, and for a weight
    /// that the type cannot hold; [`Failed`](Error::Failed) when the file cannot be written. It is not there then.
    pub fn write(&self, output: &Path, on_bytes: OnBytes) -> Result<WrittenModel> {
        self.check_base()?;
        let source = self.base.source_tensors()?;
        let untied = self.base.config.tied && self.folding.changes_embedding();
        let tensors = tensors(&source, untied);
        let described = tensors.iter().map(|tensor| self.described(tensor)).collect::<Result<Vec<_>>>()?;
        let (metadata, without_tokenizer) = self.metadata();
        let head = header(&metadata, &described);
        let padded = |tensor: &Described| tensor.bytes().next_multiple_of(32) as u64;
        let total = head.len() as u64 + described.iter().map(padded).sum::<u64>();
        let mut values = Values::new(self.base, self.folding, &source, untied);
        let (mut done, mut stopped) = (head.len() as u64, None);
        let written = atomic::write_with(output, |out| {
            out.write_all(&head)?;
            for (tensor, described) in tensors.iter().zip(&described) {
                let bytes = values.of(tensor).and_then(|values| self.encode(tensor, described, values));
                match bytes {
                    Ok(bytes) => write_tensor(out, &bytes)?,
                    Err(error) => {
                        stopped = Some(error);
                        return Err(io::Error::other("its values cannot be had"));
                    }
                }
                done += padded(described);
                on_bytes(done, total);
            }
            Ok(())
        });
        written.map_err(|error| stopped.unwrap_or_else(|| error.into()))?;
        let fell_back = |tensor: &&Described| {
            self.dtype.is_coded() && tensor.kind == GgufType::F16 && !stays_in_f16(self.dtype, &tensor.name)
        };
        let in_f16 = described.iter().filter(fell_back).count();
        Ok(WrittenModel {
            tensors: tensors.len(),
            changed: values.changed,
            bytes: total,
            in_f16,
            without_tokenizer,
        })
    }

    /// Refuses switches of a GPT-2 for which llama.cpp has no key.
    fn check_base(&self) -> Result<()> {
        let config = &self.base.config;
        let what = if config.activation != Activation::GeluTanh {
            "activation_function other than gelu_new"
        } else if !config.scale_attn {
            "scale_attn_weights false"
        } else if config.scale_attn_by_layer {
            "scale_attn_by_inverse_layer_idx true"
        } else {
            return Ok(());
        };
        Err(Error::input(format!(
            "--base {}: its config.json has {what}, which llama.cpp does not compute in a GPT-2; use the base with \
             engraft or Transformers",
            self.base.name
        )))
    }

    fn described(&self, tensor: &Tensor) -> Result<Described> {
        let name = gguf_name(&tensor.name)
            .ok_or_else(|| Error::input(format!("{}: has no name in GGUF; leave it out", tensor.name)))?;
        let shape = match is_transposed(tensor) {
            true => tensor.shape.iter().rev().copied().collect(),
            false => tensor.shape.clone(),
        };
        let is_matrix = shape.len() > 1 && !is_positions(&name);
        let width = shape.last().copied().unwrap_or_default();
        let kind = match is_matrix {
            true if stays_in_f16(self.dtype, &name) => GgufType::F16,
            true => self.dtype.of_rows(width),
            false => GgufType::F32,
        };
        Ok(Described { name, shape, kind })
    }

    fn encode(&self, tensor: &Tensor, described: &Described, values: Vec<f32>) -> Result<Vec<u8>> {
        let values: Cow<[f32]> = match (is_transposed(tensor), &tensor.shape[..]) {
            (true, &[inputs, outputs]) => transposed(&values, inputs, outputs).into(),
            _ => values.into(),
        };
        described.kind.encode(&values).map_err(|value| {
            Error::input(format!(
                "--dtype {}: {} becomes {value}, which it cannot hold; give --dtype f32, or a smaller scale of the adapter",
                described.kind.name(),
                tensor.name
            ))
        })
    }

    /// The metadata, and why there is no tokenizer among them.
    fn metadata(&self) -> (Vec<(String, Meta)>, Option<String>) {
        let config = &self.base.config;
        let name = self.base.name.trim_end_matches('/');
        let name = name.rsplit('/').next().unwrap_or(name);
        let general = [
            ("architecture", Meta::from(ARCHITECTURE)),
            ("type", "model".into()),
            ("name", name.into()),
            ("file_type", Meta::U32(self.dtype.file_type())),
            ("quantization_version", Meta::U32(2)),
        ];
        let sizes = [
            ("block_count", Meta::from(config.layers)),
            ("context_length", config.positions.into()),
            ("embedding_length", config.width.into()),
            ("feed_forward_length", config.inner.into()),
            ("attention.head_count", config.heads.into()),
            ("attention.layer_norm_epsilon", Meta::F32(config.layer_norm_eps)),
            ("vocab_size", config.vocab.into()),
        ];
        let general = general.into_iter().map(|(key, value)| (format!("general.{key}"), value));
        let sizes = sizes.into_iter().map(|(key, value)| (format!("{ARCHITECTURE}.{key}"), value));
        let (entries, without) = match tokenizer::of(self.tokenizer, config) {
            Ok(entries) => (entries, None),
            Err(why) => (tokenizer::none(), Some(why)),
        };
        (general.chain(sizes).chain(entries).collect(), without)
    }
}

/// Whether our file has it as `[inputs, outputs]`: the matrices of the layers, unlike embeddings and head.
fn is_transposed(tensor: &Tensor) -> bool {
    tensor.shape.len() == 2 && tensor.name != HEAD && layer_of(&tensor.name).is_some()
}

/// `values` [rows, columns] as [columns, rows], in squares that stay in the cache.
fn transposed(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    const SIDE: usize = 32;
    let mut out = vec![0.0; values.len()];
    for row in (0..rows).step_by(SIDE) {
        for column in (0..columns).step_by(SIDE) {
            for r in row..rows.min(row + SIDE) {
                for c in column..columns.min(column + SIDE) {
                    out[c * rows + r] = values[r * columns + c];
                }
            }
        }
    }
    out
}

/// Whether a matrix keeps 16 bits in a file of `dtype`: with 4 bits the embedding, and the head, which lose most by it.
fn stays_in_f16(dtype: GgufType, name: &str) -> bool {
    dtype == GgufType::Q4_0 && ["token_embd.weight", "output.weight"].contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_matrices_are_transposed() {
        let (rows, columns) = (37, 70);
        let values: Vec<f32> = (0..rows * columns).map(|at| at as f32).collect();
        let found = transposed(&values, rows, columns);
        for (at, value) in found.iter().enumerate() {
            assert_eq!(*value, values[at % rows * columns + at / rows]);
        }
        assert_eq!(transposed(&found, columns, rows), values);
    }
}
