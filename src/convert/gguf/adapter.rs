//! A LoRA as GGUF: A and B of each weight as they are, one alpha for all.
//!
//! llama.cpp computes `y += alpha / rank (x A^T) B^T`, where the rank is that of each pair and the alpha that of the file
//! (0 would mean a scale of 1). Where a module has another scale than the first one, its B is multiplied.

use std::path::Path;

use engraft_adapters::{BaseDescription, PlainLora};
use engraft_util::atomic;

use super::{
    file::{Described, GgufType, Meta, header, write_tensor},
    names::{ARCHITECTURE, gguf_name},
};
use crate::error::{Error, Result};

/// Metadata: name of the base that the adapter was made for.
pub const META_BASE: &str = "general.base_model.0.name";
/// Metadata: fingerprint of that base, as in the metadata of our PEFT files.
pub const META_FINGERPRINT: &str = "engraft.base_fingerprint";
/// Metadata: probability that an input element of the deltas is dropped in training.
pub const META_DROPOUT: &str = "engraft.lora_dropout";

/// A LoRA to be written as GGUF.
pub struct GgufAdapter<'a> {
    /// Its deltas, one for each module.
    pub deltas: Vec<PlainLora>,
    /// Dropout of its training.
    pub dropout: f64,
    /// The base that it was made for.
    pub base: &'a BaseDescription,
    /// Type of A and B.
    pub dtype: GgufType,
}

impl GgufAdapter<'_> {
    /// Writes the file `output` in one step; its bytes come back.
    ///
    /// # Errors
    /// [`Input`](Error::Input) for a value that the type cannot hold; [`Failed`](Error::Failed) when the file cannot be
    /// written. It is not there then.
    pub fn write(self, output: &Path) -> Result<u64> {
        let Self { deltas, dropout, base, dtype } = self;
        let (deltas, alpha) = with_one_alpha(deltas);
        let (mut tensors, mut values) = (Vec::new(), Vec::new());
        for delta in &deltas {
            let site = &base.sites[delta.site];
            let weight = format!("{}.weight", site.module(delta.layer));
            let name = gguf_name(&weight)
                .ok_or_else(|| Error::input(format!("{weight}: has no name in GGUF; leave it out")))?;
            for (end, shape, of) in [
                ("a", vec![delta.rank, site.inputs], &delta.a),
                ("b", vec![site.outputs, delta.rank], &delta.b),
            ] {
                let name = format!("{name}.lora_{end}");
                let bytes = dtype.encode(of).map_err(|value| {
                    Error::input(format!(
                        "--dtype {}: {name} has the value {value}, which it cannot hold; give --dtype f32",
                        dtype.name()
                    ))
                })?;
                tensors.push(Described { name, shape, kind: dtype });
                values.push(bytes);
            }
        }
        let head = header(&metadata(base, alpha, dropout, dtype), &tensors);
        let bytes = tensors.iter().map(|tensor| tensor.bytes().next_multiple_of(32)).sum::<usize>();
        atomic::write_with(output, |out| {
            out.write_all(&head)?;
            values.iter().try_for_each(|bytes| write_tensor(out, bytes))
        })?;
        Ok((head.len() + bytes) as u64)
    }
}

/// The deltas as one alpha for all of them gives them their scales, and that alpha, which is not 0.
fn with_one_alpha(deltas: Vec<PlainLora>) -> (Vec<PlainLora>, f32) {
    let alpha = deltas.iter().map(|delta| delta.alpha as f32).find(|alpha| *alpha != 0.0).unwrap_or(1.0);
    let same = |delta: PlainLora| {
        let scale = f64::from(alpha) / delta.rank as f64;
        if delta.alpha as f32 == alpha { delta } else { delta.with_scale(scale) }
    };
    (deltas.into_iter().map(same).collect(), alpha)
}

fn metadata(base: &BaseDescription, alpha: f32, dropout: f64, dtype: GgufType) -> Vec<(String, Meta)> {
    let mut entries = vec![
        ("general.architecture", Meta::from(ARCHITECTURE)),
        ("general.type", "adapter".into()),
        ("adapter.type", "lora".into()),
        ("adapter.lora.alpha", Meta::F32(alpha)),
        ("general.file_type", Meta::U32(dtype.file_type())),
        ("general.base_model.count", Meta::U32(1)),
        (META_BASE, base.name.as_str().into()),
    ];
    entries.extend(base.fingerprint.as_deref().map(|print| (META_FINGERPRINT, print.into())));
    if dropout != 0.0 {
        entries.push((META_DROPOUT, Meta::F32(dropout as f32)));
    }
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delta(rank: usize, alpha: f64) -> PlainLora {
        PlainLora { layer: 0, site: 0, part: None, rank, alpha, a: vec![1.0; 2 * rank], b: vec![3.0; rank] }
    }

    #[test]
    fn one_alpha_gives_every_module_its_scale() {
        let (deltas, alpha) =
            with_one_alpha(vec![delta(2, 0.0), delta(2, 8.0), delta(4, 8.0), delta(3, -6.0)]);
        assert_eq!(alpha, 8.0);
        let scaled_b: Vec<f32> =
            deltas.iter().map(|delta| alpha / delta.rank as f32 * delta.b[0] / 3.0).collect();
        assert_eq!(scaled_b, [0.0, 4.0, 2.0, -2.0]);
        // 0 in a file means 1.
        let (deltas, alpha) = with_one_alpha(vec![delta(2, 0.0)]);
        assert_eq!((alpha, deltas[0].b[0]), (1.0, 0.0));
    }
}
