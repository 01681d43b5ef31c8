//! Events: points in the work of a stream that another stream, or the host, can wait for.

use cudarc::driver::{
    DriverError, result,
    sys::{self, CUevent_flags::CU_EVENT_DISABLE_TIMING, CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT},
};

use super::Gpu;

/// An event of a device.
pub struct Event {
    gpu: &'static Gpu,
    event: sys::CUevent,
}

// SAFETY: the driver takes events from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that is not recorded yet.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(gpu: &'static Gpu) -> Result<Self, DriverError> {
        gpu.bind()?;
        Ok(Self { gpu, event: result::event::create(CU_EVENT_DISABLE_TIMING)? })
    }

    /// Marks the end of all work that `stream` was given so far.
    pub fn record(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: both are alive.
        unsafe { result::event::record(self.event, stream) }
    }

    /// Makes work that `stream` is given from now on wait for the event.
    pub fn hold(&self, stream: sys::CUstream) -> Result<(), DriverError> {
        // SAFETY: both are alive.
        unsafe { result::stream::wait_event(stream, self.event, CU_EVENT_WAIT_DEFAULT) }
    }

    /// Waits until the event has happened; returns at once if it was never recorded.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: it is alive.
        unsafe { result::event::synchronize(self.event) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: created once, destroyed once.
            let _ = unsafe { result::event::destroy(self.event) };
        }
    }
}
