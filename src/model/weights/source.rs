//! Where tensors come from: safetensors files, shards, PyTorch files or embedded bytes, opened and
//! listed by header alone, then read in chunks.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    sync::Arc,
};

use engraft_util::{
    safetensors::{Header, HeaderError},
    shards,
};
use safetensors::Dtype;

use super::{
    base_dtype::{self, BaseDType},
    names::{self, Wanted},
    pickle::Pickle,
    stored::StoredTensor,
};
use crate::error::{Error, Result};

/// Bytes read at a time: a multiple of every element size, small beside any model.
const CHUNK: usize = 1 << 20;
/// The format's own bound on a header.
const LONGEST_HEADER: u64 = 100_000_000;
/// How many faults of one file are listed before the rest is only counted.
const LISTED: usize = 3;

/// A file that holds tensors.
pub(super) struct SourceFile {
    pub(super) path: PathBuf,
    pub(super) content: Content,
}

pub(super) enum Content {
    Safetensors,
    Pickle(Pickle),
    Embedded(&'static [u8]),
    /// Made in this process.
    Memory(Arc<Vec<u8>>),
}

/// All tensors of a base by canonical name, causal masks left out.
pub(super) struct Source {
    pub(super) files: Vec<SourceFile>,
    pub(super) tensors: BTreeMap<String, StoredTensor>,
}

impl Source {
    /// Opens what `folder` holds: one safetensors file, shards with an index, or PyTorch files.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let mut source = Self { files: Vec::new(), tensors: BTreeMap::new() };
        let file = |name: &str| Some(folder.join(name)).filter(|path| path.exists());
        if let Some(path) = file("model.safetensors") {
            source.add(path)?;
        } else if let Some(index) = file("model.safetensors.index.json") {
            shards(folder, &index)?.into_iter().try_for_each(|path| source.add(path))?;
        } else if let Some(path) = file("pytorch_model.bin") {
            source.add(path)?;
        } else if let Some(index) = file("pytorch_model.bin.index.json") {
            shards(folder, &index)?.into_iter().try_for_each(|path| source.add(path))?;
        } else {
            return Err(Error::input(format!(
                "{}: holds no model.safetensors, model.safetensors.index.json or pytorch_model.bin; \
                 give the folder of a GPT-2 model",
                folder.display()
            )));
        }
        Ok(source)
    }

    /// A single safetensors file, as the cache holds it.
    pub(super) fn open_file(path: PathBuf) -> Result<Self> {
        let mut source = Self { files: Vec::new(), tensors: BTreeMap::new() };
        source.add(path)?;
        Ok(source)
    }

    /// A safetensors file compiled into the program.
    pub(super) fn embedded(bytes: &'static [u8]) -> Result<Self> {
        Self::of_bytes(bytes, Content::Embedded(bytes))
    }

    /// A safetensors file made of the one compiled into the program.
    pub(super) fn in_memory(bytes: Vec<u8>) -> Result<Self> {
        let bytes = Arc::new(bytes);
        Self::of_bytes(&bytes, Content::Memory(Arc::clone(&bytes)))
    }

    fn of_bytes(bytes: &[u8], content: Content) -> Result<Self> {
        let mut source = Self { files: Vec::new(), tensors: BTreeMap::new() };
        let path = PathBuf::from("the embedded base");
        let header = read_header(&path, bytes.len() as u64, &mut { bytes })?;
        source.add_safetensors(&path, &header)?;
        source.files.push(SourceFile { path, content });
        Ok(source)
    }

    fn add(&mut self, path: PathBuf) -> Result<()> {
        let content = if path.extension().is_some_and(|extension| extension == "bin") {
            let pickle = Pickle::open(&path)?;
            let file = self.files.len();
            for stored in pickle.list(file)? {
                self.insert(&path, stored)?;
            }
            Content::Pickle(pickle)
        } else {
            let mut file = File::open(&path).map_err(|cause| Error::reading(&path, &cause))?;
            let size = file.metadata().map_err(|cause| Error::reading(&path, &cause))?.len();
            let header = read_header(&path, size, &mut file)?;
            self.add_safetensors(&path, &header)?;
            Content::Safetensors
        };
        self.files.push(SourceFile { path, content });
        Ok(())
    }

    fn add_safetensors(&mut self, path: &Path, header: &Header) -> Result<()> {
        let file = self.files.len();
        for (name, info) in header.metadata.tensors() {
            let (start, end) = info.data_offsets;
            self.insert(
                path,
                StoredTensor {
                    file,
                    name,
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    start: header.start as usize + start,
                    bytes: end - start,
                },
            )?;
        }
        Ok(())
    }

    fn insert(&mut self, path: &Path, stored: StoredTensor) -> Result<()> {
        let name = names::canonical(&stored.name);
        if names::is_mask(&name) {
            return Ok(());
        }
        if let Some(other) = self.tensors.insert(name, stored.clone()) {
            return Err(Error::input(format!(
                "{}: holds {} and {}, which are the same tensor; save the model again",
                path.display(),
                other.name,
                stored.name
            )));
        }
        Ok(())
    }

    /// The name of the file of `stored`, for errors.
    pub(super) fn path(&self, stored: &StoredTensor) -> &Path {
        &self.files[stored.file].path
    }

    /// Whether the tensors are FP16 in mappable files at even offsets, so that no copy is needed.
    pub(super) fn is_mappable(&self, wanted: &[Wanted]) -> bool {
        wanted.iter().filter_map(|tensor| self.tensors.get(&tensor.name)).all(|stored| {
            let mapped = !matches!(self.files[stored.file].content, Content::Pickle(_));
            mapped && stored.dtype == Dtype::F16 && stored.start.is_multiple_of(2)
        })
    }

    /// Whether the tensors are those of a copy of `dtype`, where a mapping can have them.
    pub(super) fn is_copy(&self, wanted: &[Wanted], dtype: BaseDType) -> bool {
        base_dtype::parts(wanted, dtype).iter().all(|part| {
            self.tensors.get(&part.name).is_some_and(|stored| {
                let aligned = stored.start.is_multiple_of(base_dtype::size(part.dtype));
                aligned && stored.dtype == part.dtype && stored.shape == part.shape
            })
        })
    }

    /// Whether exactly the wanted tensors are there, in shape and with a type that FP16 can take up.
    ///
    /// # Errors
    /// One error with every tensor that is missing, of another shape, of another type, or unknown.
    pub(super) fn check(&self, wanted: &[Wanted], tied: bool) -> Result<()> {
        let mut faults: Vec<String> = wanted.iter().filter_map(|tensor| self.fault(tensor)).collect();
        let known: std::collections::BTreeSet<&str> =
            wanted.iter().map(|tensor| tensor.name.as_str()).collect();
        for (name, stored) in &self.tensors {
            if tied && name == names::HEAD {
                // A tied model may repeat its embedding; that both are equal is checked with the values.
                let embedding = wanted.iter().find(|tensor| tensor.name == names::TOKEN_EMBEDDING);
                faults.extend(embedding.and_then(|wte| shape_or_type_fault(stored, &wte.shape)));
            } else if !known.contains(name.as_str()) {
                faults.push(format!("{} is no tensor of this GPT-2", stored.name));
            }
        }
        if faults.is_empty() {
            return Ok(());
        }
        let path = self.files.first().map(|file| file.path.display().to_string()).unwrap_or_default();
        let more = faults.len().saturating_sub(LISTED);
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        let listed = faults[..faults.len().min(LISTED)].join("; ");
        Err(Error::input(format!(
            "{path}: does not hold the model of its config.json: {listed}{more}; \
             use a config.json and weights that belong together"
        )))
    }

    fn fault(&self, tensor: &Wanted) -> Option<String> {
        let Some(stored) = self.tensors.get(&tensor.name) else {
            return Some(format!("{} is missing", tensor.name));
        };
        shape_or_type_fault(stored, &tensor.shape)
    }

    /// Hands the bytes of a tensor to `sink` in file order and element type, in chunks of whole elements.
    pub(super) fn read(
        &self,
        stored: &StoredTensor,
        sink: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let SourceFile { path, content } = &self.files[stored.file];
        match content {
            Content::Pickle(pickle) => pickle.read(stored, sink),
            Content::Embedded(bytes) => {
                bytes[stored.start..stored.start + stored.bytes].chunks(CHUNK).try_for_each(sink)
            }
            Content::Memory(bytes) => {
                bytes[stored.start..stored.start + stored.bytes].chunks(CHUNK).try_for_each(sink)
            }
            Content::Safetensors => {
                let mut file = File::open(path).map_err(|cause| Error::reading(path, &cause))?;
                file.seek(SeekFrom::Start(stored.start as u64))
                    .map_err(|cause| Error::reading(path, &cause))?;
                let mut buffer = vec![0; CHUNK.min(stored.bytes)];
                let mut left = stored.bytes;
                while left > 0 {
                    let chunk = &mut buffer[..CHUNK.min(left)];
                    file.read_exact(chunk).map_err(|cause| Error::reading(path, &cause))?;
                    sink(chunk)?;
                    left -= chunk.len();
                }
                Ok(())
            }
        }
    }
}

fn shape_or_type_fault(stored: &StoredTensor, shape: &[usize]) -> Option<String> {
    if stored.shape != shape {
        return Some(format!("{} has shape {:?} where {shape:?} is expected", stored.name, stored.shape));
    }
    let float = matches!(stored.dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64);
    (!float).then(|| format!("{} is {:?} where F16, BF16, F32 or F64 is expected", stored.name, stored.dtype))
}

/// The header of the safetensors file at `path`, of `size` bytes.
fn read_header(path: &Path, size: u64, file: &mut dyn Read) -> Result<Header> {
    Header::read(file, size, LONGEST_HEADER).map_err(|fault| {
        let what = match fault {
            HeaderError::Read(cause) => return Error::reading(path, &cause),
            HeaderError::Short { size } => format!("has {size} bytes, which is no safetensors file"),
            HeaderError::Length { length, .. } => {
                format!("names a header of {length} bytes in a file of {size}")
            }
            HeaderError::Rule(cause) => format!("has a header that cannot be right: {cause}"),
            HeaderError::Data { described, held } => {
                format!("holds {held} bytes of tensors where its header names {described}")
            }
        };
        Error::damaged(path, || {
            Error::input(format!("{}: {what}; the file is damaged, get it again", path.display()))
        })
    })
}

/// The files that an index names, each once, inside `folder`.
fn shards(folder: &Path, index: &Path) -> Result<Vec<PathBuf>> {
    shards::names(index)?.into_iter().map(|name| Ok(folder.join(name))).collect()
}
