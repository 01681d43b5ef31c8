//! Frozen weights that take turns in the memory of a device: of many parts of one shape two are there at a time, and
//! the next one is copied while kernels work with the present one.

#[cfg(not(feature = "cuda"))]
use std::convert::Infallible;

#[cfg(feature = "cuda")]
use super::cuda;
use super::{Device, Frozen, kinds::CUDA_ALIGNMENT};
use crate::error::Result;

/// How many parts are on the device at a time: the one in use and the one after it.
pub const SLOTS: usize = 2;

/// The places, and what moves parts into them.
pub struct StagingSlots {
    #[cfg(feature = "cuda")]
    inner: cuda::staging::StagingSlots,
    #[cfg(not(feature = "cuda"))]
    inner: Infallible,
}

/// Bytes of a place for a part of these tensors.
pub fn bytes(part: &[&Frozen]) -> usize {
    part.iter().map(|tensor| tensor.bytes().next_multiple_of(CUDA_ALIGNMENT)).sum()
}

impl StagingSlots {
    /// Places for parts like `part`; none on a host, which works with weights where they lie.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::error::Error::Memory) when device or host have too little memory.
    pub fn new(device: Device, part: &[&Frozen]) -> Result<Option<Self>> {
        match device {
            Device::Cpu => {
                let _ = part;
                Ok(None)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Ok(Some(Self { inner: cuda::staging::StagingSlots::new(gpu, part)? })),
        }
    }

    /// The tensors of a part as they lie in `place`.
    pub fn tensors(&self, place: usize, part: &[&Frozen]) -> Vec<Frozen> {
        #[cfg(feature = "cuda")]
        return self.inner.tensors(place, part);
        #[cfg(not(feature = "cuda"))]
        match (self.inner, place, part) {}
    }

    /// Begins to copy `part` into `place`, behind all kernels that were started so far. They may still read what is
    /// there.
    pub fn bring(&mut self, place: usize, part: Vec<Frozen>) {
        #[cfg(feature = "cuda")]
        self.inner.bring(place, part);
        #[cfg(not(feature = "cuda"))]
        match (self.inner, place, part) {}
    }

    /// Lets kernels that are started from now on wait until `place` holds what was brought last.
    pub fn wait(&mut self, place: usize) {
        #[cfg(feature = "cuda")]
        self.inner.wait(place);
        #[cfg(not(feature = "cuda"))]
        match (self.inner, place) {}
    }
}
