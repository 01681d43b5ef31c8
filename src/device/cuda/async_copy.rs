//! Copies between a device's memory and pinned memory of the host, on a stream of their own beside the kernels' work.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, sys};

use super::{Gpu, event::Event};
use crate::{
    device::{View, ViewMut},
    error::{Error, Result},
};

/// Two events of a slot that copies read or write.
struct Slot {
    /// After the kernels that were started before the last copy.
    used: Event,
    /// Recorded after that copy; whoever reads its target waits for it.
    moved: Event,
    /// Whether a copy was started that no kernel waits for yet.
    open: bool,
}

/// As [`async_copy::AsyncCopier`](crate::device::async_copy::AsyncCopier).
pub struct AsyncCopier {
    gpu: &'static Gpu,
    stream: Arc<CudaStream>,
    slots: Vec<Slot>,
}

impl AsyncCopier {
    /// As [`async_copy::AsyncCopier::new`](crate::device::async_copy::AsyncCopier::new).
    pub fn new(gpu: &'static Gpu, slots: usize) -> Result<Self> {
        let made = || -> Result<_, DriverError> {
            gpu.bind()?;
            let slot = |_| {
                Ok::<_, DriverError>(Slot { used: Event::new(gpu)?, moved: Event::new(gpu)?, open: false })
            };
            Ok((gpu.context.new_stream()?, (0..slots).map(slot).collect::<Result<_, _>>()?))
        };
        let (stream, slots) = made().map_err(|cause| {
            Error::failed(format!(
                "CUDA device {}: a stream for offloading cannot be opened: {cause}; use --offload-inputs off",
                gpu.ordinal()
            ))
        })?;
        Ok(Self { gpu, stream, slots })
    }

    /// As [`async_copy::AsyncCopier::copy`](crate::device::async_copy::AsyncCopier::copy).
    pub fn copy(&mut self, slot: usize, from: View, to: ViewMut) {
        let done = self.start(slot, from, to);
        self.gpu.attempt("offloading", done);
    }

    fn start(&mut self, slot: usize, from: View, to: ViewMut) -> Result<(), DriverError> {
        let (stream, slot) = (self.stream.cu_stream(), &mut self.slots[slot]);
        self.gpu.bind()?;
        slot.used.record(self.gpu.stream())?;
        slot.used.hold(stream)?;
        // SAFETY: both views have one length and stay valid until the copy is done: whoever frees or writes them waits
        // for the device, or for the slot.
        unsafe { sys::cuMemcpyAsync(to.address(), from.address(), from.size(), stream).result()? };
        slot.moved.record(stream)?;
        slot.open = true;
        Ok(())
    }

    /// As [`async_copy::AsyncCopier::wait`](crate::device::async_copy::AsyncCopier::wait).
    pub fn wait(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        if std::mem::take(&mut slot.open) {
            let held = self.gpu.bind().and_then(|()| slot.moved.hold(self.gpu.stream()));
            self.gpu.attempt("offloading", held);
        }
    }
}

impl Drop for AsyncCopier {
    fn drop(&mut self) {
        // The buffers outlive the copies.
        let _ = self.gpu.bind().and_then(|()| self.stream.synchronize());
    }
}
