//! Staging of frozen weights through slots in the memory of a device: of many parts of one shape two are there at a
//! time, and the next one is copied while kernels work with the present one.

#[cfg(not(feature = "cuda"))]
use std::convert::Infallible;

#[cfg(feature = "cuda")]
use super::cuda;
use super::{Device, Frozen};
use crate::error::Result;

/// How many parts are on the device at a time: the one in use and the one after it.
pub const SLOTS: usize = 2;

/// The slots of a device, and the copier that fills them.
pub struct StagingSlots {
    #[cfg(feature = "cuda")]
    inner: cuda::staging::StagingSlots,
    #[cfg(not(feature = "cuda"))]
    inner: Infallible,
}

/// Bytes of a slot for a part made of these tensors, each aligned.
pub fn bytes(part: &[&Frozen]) -> usize {
    part.iter().map(|tensor| tensor.device_bytes()).sum()
}

impl StagingSlots {
    /// Slots for parts with the sizes of `part`; `None` on a host, whose kernels read weights in place.
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

    /// The tensors of `part` in the memory of `slot`.
    pub fn tensors(&self, slot: usize, part: &[&Frozen]) -> Vec<Frozen> {
        #[cfg(feature = "cuda")]
        return self.inner.tensors(slot, part);
        #[cfg(not(feature = "cuda"))]
        match (self.inner, slot, part) {}
    }

    /// Starts copying `part` into `slot`, after all kernels started so far, which may still read its old content.
    pub fn bring(&mut self, slot: usize, part: Vec<Frozen>) {
        #[cfg(feature = "cuda")]
        self.inner.bring(slot, part);
        #[cfg(not(feature = "cuda"))]
        match (self.inner, slot, part) {}
    }

    /// Makes kernels that are started from now on wait until `slot` holds the part brought last.
    pub fn wait(&mut self, slot: usize) {
        #[cfg(feature = "cuda")]
        self.inner.wait(slot);
        #[cfg(not(feature = "cuda"))]
        match (self.inner, slot) {}
    }
}
