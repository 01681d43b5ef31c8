//! The safetensors container: a checked header in, tensors read one at a time; streamed out with metadata. Of old adapters
//! the pickle in its place is read, too.
//!
//! Nothing is allocated from a number in the file before it was compared with the file's own length.

use std::{
    collections::HashMap,
    fmt,
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use candle_core::pickle::PthTensors;
use engraft_util::safetensors::{self as safetensors_file, Entry, Header, HeaderError, Order};
use half::{bf16, f16};
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};

use super::{PICKLE_FILE, TENSOR_FILE, pickled};
use crate::{Error, Result, TensorSlot};

/// Longest header read; one of an adapter of thousands of tensors has some hundred kilobytes.
const LONGEST_HEADER: u64 = 16 << 20;

/// An open tensor file whose header obeys every rule of the format.
#[derive(Debug)]
pub(crate) struct TensorFile {
    path: PathBuf,
    content: Content,
    header: Metadata,
}

enum Content {
    Safetensors {
        file: File,
        /// Position of the first tensor byte.
        start: u64,
    },
    Pickle(PthTensors),
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Safetensors { .. } => "safetensors",
            Self::Pickle(_) => "pickle",
        })
    }
}

impl TensorFile {
    /// The tensor file of a folder: the pickle only where there is no other.
    pub fn in_folder(folder: &Path) -> Result<Self> {
        let (path, pickle) = (folder.join(TENSOR_FILE), folder.join(PICKLE_FILE));
        if path.exists() || !pickle.exists() {
            return Self::open(&path);
        }
        let (tensors, header) = pickled::open(&pickle)?;
        Ok(Self { path: pickle, content: Content::Pickle(tensors), header })
    }

    pub fn open(path: &Path) -> Result<Self> {
        let read = |cause| Error::read(path, cause);
        let broken = |rule: String| Error::SafeTensors { path: path.to_owned(), rule };
        let mut file = File::open(path).map_err(read)?;
        let total = file.metadata().map_err(read)?.len();
        let header = Header::read(&mut file, total, LONGEST_HEADER);
        let header = header.map_err(|fault| {
            Error::stand_in(path).unwrap_or_else(|| match fault {
                HeaderError::Read(cause) => read(cause),
                HeaderError::Short { size } => {
                    broken(format!("it has {size} bytes, too few for a header length"))
                }
                HeaderError::Length { length, rest } => broken(format!(
                    "its header claims {length} bytes, {rest} follow (limit {LONGEST_HEADER})"
                )),
                HeaderError::Rule(cause) => broken(cause.to_string()),
                HeaderError::Data { described, held } => {
                    broken(format!("its header describes {described} bytes of tensors, the file has {held}"))
                }
            })
        })?;
        let content = Content::Safetensors { file, start: header.start };
        Ok(Self { path: path.to_owned(), content, header: header.metadata })
    }

    /// An entry of the `__metadata__` map.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.header.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// Name, type and shape of each tensor, by name.
    pub fn tensors(&self) -> Vec<(String, &TensorInfo)> {
        let mut all: Vec<_> = self.header.tensors().into_iter().collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.info(name)
    }

    /// Values of an F32, F16 or BF16 tensor; nothing for another type or name.
    pub fn read(&mut self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(info) = self.header.info(name) else { return Ok(None) };
        let (dtype, (begin, end)) = (info.dtype, info.data_offsets);
        if !is_readable(dtype) {
            return Ok(None);
        }
        let (file, start) = match &mut self.content {
            Content::Safetensors { file, start } => (file, *start),
            Content::Pickle(tensors) => return pickled::read(tensors, &self.path, name).map(Some),
        };
        let mut bytes = vec![0; end - begin];
        file.seek(SeekFrom::Start(start + begin as u64))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|cause| Error::read(&self.path, cause))?;
        Ok(Some(widen(dtype, &bytes)))
    }
}

/// Whether values of this type are read.
pub(crate) fn is_readable(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

fn widen(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let pairs = bytes.as_chunks::<2>().0.iter().copied();
    match dtype {
        Dtype::F16 => pairs.map(|pair| f16::from_le_bytes(pair).to_f32()).collect(),
        Dtype::BF16 => pairs.map(|pair| bf16::from_le_bytes(pair).to_f32()).collect(),
        _ => bytes.as_chunks::<4>().0.iter().map(|&four| f32::from_le_bytes(four)).collect(),
    }
}

/// An F32 tensor to be written; its values are made when their turn comes.
pub(crate) struct Outgoing<'a> {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: Box<dyn Fn() -> std::borrow::Cow<'a, [f32]> + 'a>,
}

impl<'a> Outgoing<'a> {
    /// A tensor of the flat store `values` that the file has as it is.
    pub fn plain(slot: &TensorSlot, values: &'a [f32]) -> Self {
        let range = slot.range();
        let values = Box::new(move || values[range.clone()].into());
        Self { name: slot.name.clone(), shape: slot.shape.clone(), values }
    }
}

/// Writes a tensor file: tensors sorted by name, metadata in the header.
pub(crate) fn write(
    out: &mut dyn Write,
    tensors: &[Outgoing],
    metadata: &HashMap<String, String>,
) -> io::Result<()> {
    let mut tensors: Vec<&Outgoing> = tensors.iter().collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    out.write_all(&header(&tensors, metadata)?)?;
    for tensor in tensors {
        for block in (tensor.values)().chunks(4096) {
            let bytes: Vec<u8> = block.iter().flat_map(|value| value.to_le_bytes()).collect();
            out.write_all(&bytes)?;
        }
    }
    Ok(())
}

/// Length and header; the same adapter gives the same bytes.
fn header(tensors: &[&Outgoing], metadata: &HashMap<String, String>) -> io::Result<Vec<u8>> {
    let strings = metadata.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let entry = |tensor: &&Outgoing| Entry {
        name: tensor.name.clone(),
        dtype: Dtype::F32,
        shape: tensor.shape.clone(),
        bytes: 4 * tensor.shape.iter().product::<usize>(),
    };
    let entries: Vec<Entry> = tensors.iter().map(entry).collect();
    safetensors_file::header(&strings, &entries, Order::Given, 8)
}

#[cfg(test)]
#[path = "tensors_tests.rs"]
mod tests;
