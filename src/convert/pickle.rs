//! Writes a PyTorch state dict of F32 tensors: a zip archive of a pickle, which describes them, and of their bytes.
//!
//! The pickle is protocol 2 with the operations that `torch.load(weights_only=True)` allows. A tensor is a call of
//! `torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)`, and its storage a persistent id
//! `("storage", FloatStorage, key, "cpu", elements)`, whose bytes are the member `data/KEY` of the archive.

use std::{
    io::{self, Cursor, Write},
    path::Path,
};

use engraft_util::atomic;
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

use crate::error::Result;

/// The folder in the archive that holds its members.
const ARCHIVE: &str = "archive";
/// Where PyTorch begins the bytes of a storage.
const ALIGNMENT: u16 = 64;

/// A tensor of a state dict.
pub(super) struct StateTensor<'a> {
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<usize>,
    pub values: &'a [f32],
}

/// Writes the file `output` in one step; its bytes come back.
///
/// # Errors
/// When it cannot be written.
pub(super) fn write_state_dict(output: &Path, tensors: &[StateTensor]) -> Result<u64> {
    let bytes = archive(tensors).map_err(|cause| atomic::WriteError::new(output, cause))?;
    atomic::write(output, &bytes)?;
    Ok(bytes.len() as u64)
}

fn archive(tensors: &[StateTensor]) -> io::Result<Vec<u8>> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let options = options.with_alignment(ALIGNMENT);
    let mut member = |name: &str, bytes: &[u8]| -> io::Result<()> {
        zip.start_file(format!("{ARCHIVE}/{name}"), options)?;
        zip.write_all(bytes)
    };
    member("data.pkl", &pickle(tensors))?;
    member("byteorder", b"little")?;
    for (key, tensor) in tensors.iter().enumerate() {
        let bytes: Vec<u8> = tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        member(&format!("data/{key}"), &bytes)?;
    }
    // PyTorch's version of the archive.
    member("version", b"3\n")?;
    Ok(zip.finish()?.into_inner())
}

/// The dict of all tensors, in their order.
fn pickle(tensors: &[StateTensor]) -> Vec<u8> {
    let mut out = b"\x80\x02}(".to_vec(); // protocol 2, an empty dict, a mark
    for (key, tensor) in tensors.iter().enumerate() {
        text(&mut out, &tensor.name);
        out.extend(b"ctorch._utils\n_rebuild_tensor_v2\n(("); // the function, marks of two tuples
        text(&mut out, "storage");
        out.extend(b"ctorch\nFloatStorage\n");
        text(&mut out, &key.to_string());
        text(&mut out, "cpu");
        number(&mut out, tensor.values.len());
        out.extend(b"tQK\x00("); // end of the persistent id, offset 0, a tuple of sizes
        tensor.shape.iter().for_each(|&size| number(&mut out, size));
        out.extend(b"t("); // .. and one of strides
        for at in 0..tensor.shape.len() {
            number(&mut out, tensor.shape[at + 1..].iter().product());
        }
        out.extend(b"t\x89ccollections\nOrderedDict\n)RtR"); // False, OrderedDict(), end of the arguments, the call
    }
    out.extend(b"u."); // all items into the dict, the end
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(b'X');
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A whole number; tensors of adapters have far below 2^31 elements.
fn number(out: &mut Vec<u8>, number: usize) {
    out.push(b'J');
    out.extend((number as i32).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use candle_core::pickle;

    use super::*;

    #[test]
    fn candle_reads_the_tensors_that_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("adapter.pt");
        let values: Vec<f32> = (0..30).map(|at| at as f32 * 0.5 - 3.0).collect();
        let tensors = [
            StateTensor { name: "h.0.lora_A".into(), shape: vec![3, 7], values: &values[..21] },
            StateTensor { name: "h.0.lora_B".into(), shape: vec![9, 1], values: &values[21..] },
        ];
        let bytes = write_state_dict(&file, &tensors).unwrap();
        assert_eq!(bytes, std::fs::metadata(&file).unwrap().len());
        let mut read = pickle::read_all(&file).unwrap();
        read.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(read.len(), 2);
        for ((name, tensor), expected) in read.iter().zip(&tensors) {
            assert_eq!((name, tensor.dims()), (&expected.name, &expected.shape[..]));
            assert_eq!(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap(), expected.values);
        }
    }
}
