//! Graphs: work of a device that is recorded once and then started as a whole, where starting it launch by launch
//! takes the host longer than the device needs to do it.
//!
//! A graph holds the launches with all their arguments. It stays valid while the buffers stay at their addresses;
//! values that change between replays are read from buffers.

#[cfg(not(feature = "cuda"))]
use std::convert::Infallible;

use super::Device;
#[cfg(feature = "cuda")]
use super::cuda;

/// Recorded launches of a device.
pub struct Graph {
    #[cfg(feature = "cuda")]
    inner: cuda::graph::Graph,
    #[cfg(not(feature = "cuda"))]
    inner: Infallible,
}

impl Graph {
    /// Records the launches of `work` on `device` instead of running them. `None` on a host, and where the device
    /// refuses; then `work` has computed nothing.
    ///
    /// `work` must allocate nothing and wait for nothing. Run it once before with buffers of the same sizes, so that
    /// kernels are loaded and scratch is allocated.
    pub fn new(device: Device, work: impl FnOnce()) -> Option<Self> {
        match device {
            Device::Cpu => {
                let _ = work;
                None
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Some(Self { inner: cuda::graph::Graph::new(gpu, work)? }),
        }
    }

    /// Starts the recorded work; false, with nothing started, where scratch has moved since.
    pub fn replay(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.inner.replay();
        #[cfg(not(feature = "cuda"))]
        match self.inner {}
    }
}
