//! PyTorch's `pytorch_model.bin`: listed from the pickle inside the zip, read one tensor at a time.

use std::path::{Path, PathBuf};

use candle_core::{CpuStorage, DType, Storage, Tensor, pickle::PthTensors};
use engraft_util::panics;
use safetensors::Dtype;

use super::stored::StoredTensor;
use crate::error::{Error, Result};

/// Values handed on at a time.
const CHUNK: usize = 1 << 18;

/// A PyTorch file, opened.
pub(super) struct Pickle {
    path: PathBuf,
    size: u64,
    tensors: PthTensors,
}

impl Pickle {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let size = std::fs::metadata(path).map_err(|cause| Error::reading(path, &cause))?.len();
        let tensors = guarded(path, || PthTensors::new(path, None));
        let tensors = tensors.map_err(|error| Error::damaged(path, || error))?;
        Ok(Self { path: path.to_owned(), size, tensors })
    }

    /// Every tensor in the file, as part of file number `file`.
    pub(super) fn list(&self, file: usize) -> Result<Vec<StoredTensor>> {
        let infos = self.tensors.tensor_infos();
        infos
            .iter()
            .map(|(name, info)| {
                let shape = info.layout.dims().to_vec();
                let bytes = shape
                    .iter()
                    .try_fold(info.dtype.size_in_bytes(), |bytes, &size| bytes.checked_mul(size))
                    .filter(|&bytes| bytes as u64 <= self.size);
                let bytes = bytes.ok_or_else(|| {
                    Error::input(format!(
                        "{}: {name} has shape {shape:?}, more than the file holds; \
                         the file is damaged, get it again",
                        self.path.display()
                    ))
                })?;
                Ok(StoredTensor {
                    file,
                    name: name.clone(),
                    dtype: dtype(info.dtype),
                    shape,
                    start: 0,
                    bytes,
                })
            })
            .collect()
    }

    /// Hands the tensor's values to `sink` as little-endian bytes of its own type, in row-major order.
    pub(super) fn read(
        &self,
        stored: &StoredTensor,
        sink: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let tensor =
            guarded(&self.path, || self.tensors.get(&stored.name)?.map(|t| t.contiguous()).transpose())?;
        let Some(tensor) = tensor else {
            return Err(unreadable(&self.path, &format!("{} is gone", stored.name)));
        };
        if tensor.dims() != stored.shape {
            return Err(unreadable(&self.path, &format!("{} changed its shape", stored.name)));
        }
        send(&tensor, sink).unwrap_or_else(|| {
            Err(unreadable(&self.path, &format!("{} is {:?}", stored.name, tensor.dtype())))
        })
    }
}

/// Sends the values of a contiguous host tensor; `None` for a type that no base has.
fn send(tensor: &Tensor, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Option<Result<()>> {
    let (storage, layout) = tensor.storage_and_layout();
    let (start, end) = layout.contiguous_offsets()?;
    let Storage::Cpu(storage) = &*storage else { return None };
    Some(match storage {
        CpuStorage::F16(values) => bytes_of(&values[start..end], |value| value.to_le_bytes(), sink),
        CpuStorage::BF16(values) => bytes_of(&values[start..end], |value| value.to_le_bytes(), sink),
        CpuStorage::F32(values) => bytes_of(&values[start..end], |value| value.to_le_bytes(), sink),
        CpuStorage::F64(values) => bytes_of(&values[start..end], |value| value.to_le_bytes(), sink),
        _ => return None,
    })
}

fn bytes_of<T: Copy, const N: usize>(
    values: &[T],
    to_bytes: impl Fn(T) -> [u8; N],
    sink: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let mut bytes = Vec::with_capacity(CHUNK.min(values.len()) * N);
    values.chunks(CHUNK).try_for_each(|chunk| {
        bytes.clear();
        bytes.extend(chunk.iter().flat_map(|&value| to_bytes(value)));
        sink(&bytes)
    })
}

/// The reader of pickles indexes into what the file says and may panic on a hostile one.
fn guarded<T>(path: &Path, read: impl FnOnce() -> candle_core::Result<T>) -> Result<T> {
    match panics::catch(read) {
        Some(Ok(value)) => Ok(value),
        Some(Err(cause)) => Err(unreadable(path, cause.to_string().lines().next().unwrap_or_default())),
        None => Err(unreadable(path, "its pickle is malformed")),
    }
}

fn unreadable(path: &Path, cause: &str) -> Error {
    Error::input(format!(
        "{}: cannot be read as a PyTorch (1.6 or later) state dict: {cause}; \
         save the model as model.safetensors",
        path.display()
    ))
}

fn dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::U32 => Dtype::U32,
        DType::I64 => Dtype::I64,
        // No base has another type in a tensor that counts; what it is called matters to no one.
        _ => Dtype::U8,
    }
}
