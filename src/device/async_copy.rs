//! Copies of buffers between a device and pinned memory of its host, while kernels work on other buffers.
//!
//! A slot is a buffer of the device that copies read or write. A copy waits for the kernels that were started before
//! it, and [`AsyncCopier::wait`] makes kernels wait for the copy. On a host a copy is done when
//! [`AsyncCopier::copy`] returns.

#[cfg(feature = "cuda")]
use super::cuda;
use super::{Device, View, ViewMut};
use crate::error::Result;

/// Copies between a device and its host, slot by slot.
pub enum AsyncCopier {
    /// The host, which copies at once.
    Host,
    /// A device, which copies while its kernels run.
    #[cfg(feature = "cuda")]
    Cuda(cuda::async_copy::AsyncCopier),
}

impl AsyncCopier {
    /// A copier of `slots` slots of `device`.
    ///
    /// # Errors
    /// [`Error::Failed`](crate::error::Error::Failed) when a device has no stream for it.
    pub fn new(device: Device, slots: usize) -> Result<Self> {
        match device {
            Device::Cpu => {
                let _ = slots;
                Ok(Self::Host)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Ok(Self::Cuda(cuda::async_copy::AsyncCopier::new(gpu, slots)?)),
        }
    }

    /// Copies `from` to `to` after all kernels started so far. One of the two is the buffer of `slot`, the other is on
    /// the other side. Write or free neither before a wait for the slot or the device.
    ///
    /// # Panics
    /// When they are not of one size.
    pub fn copy(&mut self, slot: usize, from: View, to: ViewMut) {
        assert!((from.dtype(), from.len()) == (to.dtype(), to.len()), "offloading sizes");
        match self {
            Self::Host => {
                let _ = slot;
                to.upload_bytes(from.bytes());
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(copier) => copier.copy(slot, from, to),
        }
    }

    /// Makes kernels that are started from now on wait for the last copy of `slot`.
    pub fn wait(&mut self, slot: usize) {
        match self {
            Self::Host => {
                let _ = slot;
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(copier) => copier.wait(slot),
        }
    }
}
