//! One tensor in a file, by header alone.

use safetensors::Dtype;

/// One tensor as its file holds it.
#[derive(Debug, Clone)]
pub(super) struct StoredTensor {
    /// Index into the files of a source.
    pub(super) file: usize,
    /// The name in the file.
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// First byte in the file; 0 in a PyTorch file.
    pub(super) start: usize,
    pub(super) bytes: usize,
}
