//! One pass over all values of a base: checked, hashed and, where a copy is needed, written as FP16 or as codes.

use std::{
    collections::BTreeMap,
    io::{Seek, SeekFrom, Write},
};

use half::f16;

use super::{
    base_dtype::{self, BaseDType, Coder, nested_of, scales_of},
    f16_convert::halves,
    names::{self, Wanted},
    source::Source,
};
use crate::{
    error::{Error, Result},
    kernels::nf4,
};

/// The beginning of fingerprints of this form; another form gets another number.
pub(super) const FORM: &str = "engraft1";

/// Told how far a pass is: bytes of FP16 values done, and those of all.
pub type OnBytes<'a> = &'a dyn Fn(u64, u64);

/// The fingerprint of a checked source, after looking at every value.
pub(super) fn fingerprint(
    source: &Source,
    wanted: &[Wanted],
    tied: bool,
    on_bytes: OnBytes,
) -> Result<String> {
    pass(Conversion { source, wanted, tied, on_bytes }, &mut |_, values| values(&mut |_| Ok(())))
}

/// What a pass goes over.
#[derive(Clone, Copy)]
pub(super) struct Conversion<'a> {
    pub(super) source: &'a Source,
    pub(super) wanted: &'a [Wanted],
    /// Whether the head is the token embedding.
    pub(super) tied: bool,
    pub(super) on_bytes: OnBytes<'a>,
}

/// Writes the wanted tensors to `file` as a safetensors file of `dtype`; returns the fingerprint of their FP16 values.
pub(super) fn convert(conversion: Conversion, dtype: BaseDType, file: &mut Sink) -> Result<String> {
    let parts = base_dtype::parts(conversion.wanted, dtype);
    let header = base_dtype::header(&parts)?;
    file.write_at(0, &header)?;
    let places: BTreeMap<&str, usize> =
        parts.iter().map(|part| (part.name.as_str(), header.len() + part.start)).collect();
    let place = |name: &str| places.get(name).copied().unwrap_or_default();
    pass(conversion, &mut |tensor, values| {
        let start = place(&tensor.name);
        match (tensor.shape.as_slice(), tensor.kept(dtype)) {
            (&[rows, cols], BaseDType::Nf4) => {
                // Blocks go down the columns, and one offset is of all scales: the whole matrix is needed, in FP32 41 MB
                // for the largest of gpt2-xl.
                let mut floats = Vec::with_capacity(rows * cols);
                values(&mut |bytes| {
                    floats.extend(bytes.as_chunks().0.iter().map(|&two| f16::from_le_bytes(two).to_f32()));
                    Ok(())
                })?;
                let coded = nf4::quantise(&floats, nf4::Sizes { rows, cols });
                let nested: Vec<u8> = coded.nested.iter().flat_map(|value| value.to_le_bytes()).collect();
                file.write_at(start, &coded.codes)?;
                file.write_at(place(&nested_of(&tensor.name)), &nested)?;
                file.write_at(place(&scales_of(&tensor.name)), &coded.scales)
            }
            (&[_, cols], BaseDType::Q8) => {
                let mut coder = Coder::new(file, cols, start, place(&scales_of(&tensor.name)));
                values(&mut |bytes| coder.take(bytes))?;
                coder.finish()
            }
            _ => {
                let mut at = start;
                values(&mut |bytes| {
                    file.write_at(at, bytes)?;
                    at += bytes.len();
                    Ok(())
                })
            }
        }
    })
}

/// A file, or memory, that a copy is written to.
pub(super) trait Room: Write + Seek {}

impl<T: Write + Seek> Room for T {}

/// A file that is being written, with the name that errors give it.
pub(super) struct Sink<'a> {
    pub(super) file: &'a mut dyn Room,
    pub(super) path: &'a std::path::Path,
    /// Bytes written so far.
    pub(super) at: usize,
}

impl Sink<'_> {
    /// Writes `bytes` at `place`.
    pub(super) fn write_at(&mut self, place: usize, bytes: &[u8]) -> Result<()> {
        let failed = |cause| Error::writing(self.path, &cause);
        if place != self.at {
            self.file.seek(SeekFrom::Start(place as u64)).map_err(failed)?;
        }
        self.file.write_all(bytes).map_err(failed)?;
        self.at = place + bytes.len();
        Ok(())
    }
}

/// Takes up the bytes of a tensor's values, part by part.
type Take<'a> = &'a mut dyn FnMut(&[u8]) -> Result<()>;
/// Hands out the values of a tensor.
type Values<'a> = &'a mut dyn FnMut(Take) -> Result<()>;

/// Hands every tensor with its values to `visit`, which has to take them all up; returns their fingerprint.
fn pass(conversion: Conversion, visit: &mut dyn FnMut(&Wanted, Values) -> Result<()>) -> Result<String> {
    let Conversion { source, wanted, tied, on_bytes } = conversion;
    let total = wanted.iter().map(|tensor| 2 * tensor.elements() as u64).sum();
    let mut done = 0;
    let mut hasher = blake3::Hasher::new();
    hasher.update(FORM.as_bytes()).update(b"\n");
    for tensor in wanted {
        hasher.update(tensor.name.as_bytes()).update(b"\n");
        hasher.update(&(tensor.shape.len() as u64).to_le_bytes());
        for &size in &tensor.shape {
            hasher.update(&(size as u64).to_le_bytes());
        }
        let Some(stored) = source.tensors.get(&tensor.name) else {
            return Err(Error::input(format!("{} is missing", tensor.name)));
        };
        visit(tensor, &mut |take| {
            halves(source, stored, &mut |bytes| {
                hasher.update(bytes);
                done += bytes.len() as u64;
                on_bytes(done, total);
                take(bytes)
            })
        })?;
    }
    if tied {
        check_tied_head(source)?;
    }
    Ok(format!("{FORM}:blake3:{}", hasher.finalize().to_hex()))
}

/// A tied model's file may repeat the embedding as a head, but not bring another one.
fn check_tied_head(source: &Source) -> Result<()> {
    let (Some(head), Some(wte)) =
        (source.tensors.get(names::HEAD), source.tensors.get(names::TOKEN_EMBEDDING))
    else {
        return Ok(());
    };
    let mut hashes = [blake3::Hasher::new(), blake3::Hasher::new()];
    for (hasher, stored) in hashes.iter_mut().zip([head, wte]) {
        halves(source, stored, &mut |bytes| {
            hasher.update(bytes);
            Ok(())
        })?;
    }
    if hashes[0].finalize() == hashes[1].finalize() {
        return Ok(());
    }
    Err(Error::input(format!(
        "{}: {} differs from {} although config.json ties them; set tie_word_embeddings to false in config.json \
         if the model has a head of its own",
        source.path(head).display(),
        head.name,
        wte.name
    )))
}
