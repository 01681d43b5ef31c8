//! Frozen weights: tensors of the base, read-only by type.
//!
//! A [`Frozen`] has no write access, so nothing in the program can change a base weight.

use std::sync::Arc;

#[cfg(feature = "cuda")]
use super::{
    cuda::memory::{Loader, Memory},
    device_scratch::ALIGN,
};
use super::{
    device::{DType, Device},
    pages::Region,
    view::View,
};
use crate::error::{Error, Result};

/// Bytes that outlive every view on them: a mapped file, or data compiled into the program.
pub trait Bytes: Send + Sync {
    /// All of them.
    fn bytes(&self) -> &[u8];

    /// The mapping whose pages can be fetched and released, for bytes of a file.
    fn mapping(&self) -> Option<&memmap2::Mmap> {
        None
    }
}

impl Bytes for memmap2::Mmap {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn mapping(&self) -> Option<&memmap2::Mmap> {
        Some(self)
    }
}

impl Bytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

impl Bytes for &'static [u8] {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// A read-only tensor of the base: a range of a mapped file, of embedded bytes, or of a device's memory.
#[derive(Clone)]
pub struct Frozen {
    source: Source,
    start: usize,
    dtype: DType,
    len: usize,
}

#[derive(Clone)]
enum Source {
    Host(Arc<dyn Bytes>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<Memory>),
}

impl Frozen {
    /// The `len` elements of `dtype` that begin `start` bytes into `source`.
    ///
    /// # Errors
    /// When the range leaves the source or is not aligned for `dtype`.
    pub fn new(source: Arc<dyn Bytes>, start: usize, dtype: DType, len: usize) -> Result<Self> {
        let bytes = source.bytes();
        let inside = len
            .checked_mul(dtype.size())
            .and_then(|size| start.checked_add(size))
            .is_some_and(|end| end <= bytes.len());
        let address = bytes.as_ptr() as usize;
        if !inside || !(address + start).is_multiple_of(dtype.size()) {
            return Err(Error::input(format!(
                "a tensor of {len} elements at byte {start} does not fit a source of {} bytes; the file is damaged",
                bytes.len()
            )));
        }
        Ok(Self { source: Source::Host(source), start, dtype, len })
    }

    /// Brings tensors of the host to `device`, into one stretch of its memory; nothing to do for the host.
    ///
    /// # Errors
    /// [`Error::Memory`] when the device has too little, [`Error::Failed`] when it fails.
    pub fn bring(tensors: &mut [&mut Self], device: Device) -> Result<()> {
        match device {
            Device::Cpu => {
                let _ = tensors;
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => {
                let total = tensors.iter().map(|tensor| tensor.bytes().next_multiple_of(ALIGN)).sum();
                let memory = Arc::new(Memory::for_base(gpu, total)?);
                let mut loader = Loader::new(gpu)?;
                let mut start = 0;
                for tensor in tensors {
                    loader.load(tensor.view(), memory.address() + start as u64)?;
                    let next = start + tensor.bytes().next_multiple_of(ALIGN);
                    **tensor = Self { source: Source::Cuda(Arc::clone(&memory)), start, ..**tensor };
                    start = next;
                }
                Ok(())
            }
        }
    }

    /// The tensor of this type and size that begins `start` bytes into the memory of a device.
    #[cfg(feature = "cuda")]
    pub(super) fn on_device(&self, memory: Arc<Memory>, start: usize) -> Self {
        debug_assert!(start + self.bytes() <= memory.len());
        Self { source: Source::Cuda(memory), start, ..*self }
    }

    /// Where it lies.
    pub fn device(&self) -> Device {
        match &self.source {
            Source::Host(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Source::Cuda(memory) => Device::Cuda(memory.gpu()),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Read access.
    pub fn view(&self) -> View<'_> {
        let head = match &self.source {
            Source::Host(source) => source.bytes()[self.start..].as_ptr(),
            #[cfg(feature = "cuda")]
            Source::Cuda(memory) => std::ptr::without_provenance(memory.address() as usize + self.start),
        };
        // SAFETY: the range was checked to lie inside the source, which lives as long and is never written.
        unsafe { View::raw(head, self.dtype, self.len, self.device()) }
    }

    /// Bytes of the tensor.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// Its pages; none of a tensor on a device.
    pub fn region(&self) -> Region {
        match &self.source {
            Source::Host(source) => Region::of_file(Arc::clone(source), self.start, self.bytes()),
            #[cfg(feature = "cuda")]
            Source::Cuda(_) => Region::of_file(Arc::new(Vec::new()), 0, 0),
        }
    }
}

impl std::fmt::Debug for Frozen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frozen({:?} x {})", self.dtype, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frozen_range_outside_its_source_is_refused() {
        let source: Arc<dyn Bytes> = Arc::new(vec![0u8; 10]);
        assert!(Frozen::new(source.clone(), 0, DType::F16, 5).is_ok());
        assert!(Frozen::new(source.clone(), 4, DType::F16, 5).is_err());
        assert!(Frozen::new(source, 0, DType::F16, usize::MAX).is_err());
    }
}
