//! One pass over all values of a base: checked, hashed and, where the source is not FP16, written as FP16.

use std::io::Write;

use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};

use super::{
    halves::halves,
    names::{self, Wanted},
    source::Source,
};
use crate::error::{Error, Result};

/// What fingerprints of this form begin with; another form gets another number.
pub(super) const FORM: &str = "engraft1";

/// The fingerprint of a checked source, after looking at every value.
pub(super) fn fingerprint(source: &Source, wanted: &[Wanted], tied: bool) -> Result<String> {
    pass(source, wanted, tied, &mut |_| Ok(()))
}

/// Writes the wanted tensors to `file` as an FP16 safetensors file; returns their fingerprint.
pub(super) fn convert(source: &Source, wanted: &[Wanted], tied: bool, file: &mut Sink) -> Result<String> {
    file.write(&header(wanted)?)?;
    pass(source, wanted, tied, &mut |bytes| file.write(bytes))
}

/// A file that is being written, with the name that errors give it.
pub(super) struct Sink<'a> {
    pub(super) file: &'a mut dyn Write,
    pub(super) path: &'a std::path::Path,
}

impl Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|cause| Error::writing(self.path, &cause))
    }
}

fn pass(
    source: &Source,
    wanted: &[Wanted],
    tied: bool,
    sink: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<String> {
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
        halves(source, stored, &mut |bytes| {
            hasher.update(bytes);
            sink(bytes)
        })?;
    }
    if tied {
        check_tied_head(source)?;
    }
    Ok(format!("{FORM}:blake3:{}", hasher.finalize().to_hex()))
}

/// A tied model's file may repeat the embedding as a head, but not bring another one.
fn check_tied_head(source: &Source) -> Result<()> {
    let (Some(head), Some(wte)) = (source.tensors.get(names::HEAD), source.tensors.get(names::WTE)) else {
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

/// The header of an FP16 file of the wanted tensors in canonical order, padded so that they begin on a
/// cache line.
fn header(wanted: &[Wanted]) -> Result<Vec<u8>> {
    let mut offset = 0;
    let tensors = wanted.iter().map(|tensor| {
        let start = offset;
        offset += 2 * tensor.len();
        let shape = tensor.shape.clone();
        (tensor.name.clone(), TensorInfo { dtype: Dtype::F16, shape, data_offsets: (start, offset) })
    });
    let format = Some([("format".to_owned(), "pt".to_owned())].into());
    let metadata = Metadata::new(format, tensors.collect())
        .map_err(|cause| Error::failed(format!("the header of the FP16 copy cannot be made: {cause}")))?;
    let mut text = serde_json::to_vec(&metadata)
        .map_err(|cause| Error::failed(format!("the header of the FP16 copy cannot be made: {cause}")))?;
    text.resize((8 + text.len()).next_multiple_of(64) - 8, b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    Ok(bytes)
}
