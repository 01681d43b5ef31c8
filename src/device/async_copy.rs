//! Buffers that leave the memory of a device for that of its host and come back, while kernels work on others.
//!
//! A place is a buffer of the device that copies go from or to. For each place kernels and copies take turns: a copy
//! waits for the kernels that were started before it, and kernels are told to wait for it by [`Mover::wait`]. On a host
//! a copy is done when [`Mover::copy`] returns.

#[cfg(feature = "cuda")]
use super::cuda;
use super::{Device, View, ViewMut};
use crate::error::Result;

/// What copies.
pub enum Mover {
    /// A host by itself.
    Host,
    /// A device, beside its kernels.
    #[cfg(feature = "cuda")]
    Cuda(cuda::async_copy::Mover),
}

impl Mover {
    /// For `places` places of `device`.
    ///
    /// # Errors
    /// [`Error::Failed`](crate::error::Error::Failed) when a device has no stream for it.
    pub fn new(device: Device, places: usize) -> Result<Self> {
        match device {
            Device::Cpu => {
                let _ = places;
                Ok(Self::Host)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Ok(Self::Cuda(cuda::async_copy::Mover::new(gpu, places)?)),
        }
    }

    /// Copies `from`, of which one is `place` and the other waits beside the device, to `to`: behind all kernels started
    /// so far. Neither is written or freed before the place was waited for or the device was.
    ///
    /// # Panics
    /// When they are not of one size.
    pub fn copy(&mut self, place: usize, from: View, to: ViewMut) {
        assert!((from.dtype(), from.len()) == (to.dtype(), to.len()), "offloading sizes");
        match self {
            Self::Host => {
                let _ = place;
                to.upload_bytes(from.bytes());
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(mover) => mover.copy(place, from, to),
        }
    }

    /// Lets kernels that are started from now on wait for the last copy from or to `place`.
    pub fn wait(&mut self, place: usize) {
        match self {
            Self::Host => {
                let _ = place;
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(mover) => mover.wait(place),
        }
    }
}
