//! The pickle `adapter_model.bin`, in which PEFT kept tensors before it wrote safetensors.

use std::path::Path;

use candle_core::{DType, pickle::PthTensors};
use engraft_util::panics;
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};

use crate::{Error, Result};

/// The tensors of the pickle, described as those of a safetensors file are.
pub(super) fn open(path: &Path) -> Result<(PthTensors, Metadata)> {
    let size = std::fs::metadata(path).map_err(|cause| Error::read(path, cause))?.len();
    let tensors = guarded(path, || PthTensors::new(path, None))?;
    let mut described = Vec::new();
    let mut names: Vec<&String> = tensors.tensor_infos().keys().collect();
    names.sort();
    let mut start = 0;
    for name in names {
        let info = &tensors.tensor_infos()[name];
        let shape = info.layout.dims().to_vec();
        let dtype = dtype(info.dtype);
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, &size| bits.checked_mul(size));
        let Some(bytes) = bits.map(|bits| bits / 8).filter(|&bytes| bytes as u64 <= size) else {
            return Err(broken(path, format!("{name} has shape {shape:?}, more than the file holds")));
        };
        described.push((name.clone(), TensorInfo { dtype, shape, data_offsets: (start, start + bytes) }));
        start += bytes;
    }
    let header = Metadata::new(None, described).map_err(|cause| broken(path, cause.to_string()))?;
    Ok((tensors, header))
}

/// Values of a tensor that [`open`] has described.
pub(super) fn read(tensors: &PthTensors, path: &Path, name: &str) -> Result<Vec<f32>> {
    let values = guarded(path, || {
        let tensor = tensors.get(name)?.map(|tensor| tensor.to_dtype(DType::F32)).transpose()?;
        tensor.map(|tensor| tensor.flatten_all()?.to_vec1::<f32>()).transpose()
    })?;
    values.ok_or_else(|| broken(path, format!("{name} is gone")))
}

/// The reader of pickles indexes into what the file says and may panic on a hostile one.
fn guarded<T>(path: &Path, read: impl FnOnce() -> candle_core::Result<T>) -> Result<T> {
    match panics::catch(read) {
        Some(Ok(value)) => Ok(value),
        Some(Err(cause)) => {
            let cause = cause.to_string().lines().next().unwrap_or_default().to_owned();
            Err(Error::stand_in(path).unwrap_or_else(|| broken(path, cause)))
        }
        None => Err(broken(path, "its pickle is malformed".to_owned())),
    }
}

fn broken(path: &Path, cause: String) -> Error {
    Error::Pickle { path: path.to_owned(), cause }
}

fn dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F64 => Dtype::F64,
        DType::I64 => Dtype::I64,
        // Types that no adapter is read in; what such a one is called matters to no one.
        _ => Dtype::U8,
    }
}
