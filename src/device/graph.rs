//! Work of a device that is recorded once and then started as a whole: what takes the host longer to start, launch by
//! launch, than the device to do.
//!
//! A recording holds the launches with all their arguments. It stays right for as long as the buffers stay where they
//! are, and whatever changes from one time to the next is read from them.

#[cfg(not(feature = "cuda"))]
use std::convert::Infallible;

use super::Device;
#[cfg(feature = "cuda")]
use super::cuda;

/// Recorded work.
pub struct Recording {
    #[cfg(feature = "cuda")]
    inner: cuda::graph::Recording,
    #[cfg(not(feature = "cuda"))]
    inner: Infallible,
}

impl Recording {
    /// Records what `work` starts on `device` instead of doing it. `None` where nothing can be recorded: on a host, and
    /// where the device refuses; `work` has done nothing then, or has not been called.
    ///
    /// The work allocates nothing and waits for nothing, and it has been done before by itself, with buffers as large:
    /// kernels are loaded and scratch is there.
    pub fn new(device: Device, work: impl FnOnce()) -> Option<Self> {
        match device {
            Device::Cpu => {
                let _ = work;
                None
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Some(Self { inner: cuda::graph::Recording::new(gpu, work)? }),
        }
    }

    /// Starts the work; false where scratch has moved since it was recorded, and nothing is done.
    pub fn replay(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.inner.replay();
        #[cfg(not(feature = "cuda"))]
        match self.inner {}
    }
}
