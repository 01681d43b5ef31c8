//! Copies between a device's memory and pinned memory of the host, on a stream of their own beside the kernels' work.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DriverError, sys};

use super::{Gpu, event::Event};
use crate::{
    device::{View, ViewMut},
    error::{Error, Result},
};

/// Two moments of a place that copies go from or to.
struct Place {
    /// The kernels that were started before the last copy was asked for.
    used: Event,
    /// That copy.
    moved: Event,
    /// Whether a copy was asked for that no kernel waits for yet.
    open: bool,
}

/// As [`mover::Mover`](crate::device::async_copy::Mover).
pub struct Mover {
    gpu: &'static Gpu,
    stream: Arc<CudaStream>,
    places: Vec<Place>,
}

impl Mover {
    /// As [`mover::Mover::new`](crate::device::async_copy::Mover::new).
    pub fn new(gpu: &'static Gpu, places: usize) -> Result<Self> {
        let made = || -> Result<_, DriverError> {
            gpu.bind()?;
            let place = |_| {
                Ok::<_, DriverError>(Place { used: Event::new(gpu)?, moved: Event::new(gpu)?, open: false })
            };
            Ok((gpu.context.new_stream()?, (0..places).map(place).collect::<Result<_, _>>()?))
        };
        let (stream, places) = made().map_err(|cause| {
            Error::failed(format!(
                "CUDA device {}: a stream for offloading cannot be had: {cause}; use --offload-inputs off",
                gpu.ordinal()
            ))
        })?;
        Ok(Self { gpu, stream, places })
    }

    /// As [`mover::Mover::copy`](crate::device::async_copy::Mover::copy).
    pub fn copy(&mut self, place: usize, from: View, to: ViewMut) {
        let done = self.start(place, from, to);
        self.gpu.attempt("offloading", done);
    }

    fn start(&mut self, place: usize, from: View, to: ViewMut) -> Result<(), DriverError> {
        let (stream, place) = (self.stream.cu_stream(), &mut self.places[place]);
        self.gpu.bind()?;
        place.used.record(self.gpu.stream())?;
        place.used.hold(stream)?;
        // SAFETY: both views are as long and stay where they are until the stream is done with them: whoever frees or
        // writes them waits for the device, or for the place.
        unsafe { sys::cuMemcpyAsync(to.address(), from.address(), from.size(), stream).result()? };
        place.moved.record(stream)?;
        place.open = true;
        Ok(())
    }

    /// As [`mover::Mover::wait`](crate::device::async_copy::Mover::wait).
    pub fn wait(&mut self, place: usize) {
        let place = &mut self.places[place];
        if std::mem::take(&mut place.open) {
            let held = self.gpu.bind().and_then(|()| place.moved.hold(self.gpu.stream()));
            self.gpu.attempt("offloading", held);
        }
    }
}

impl Drop for Mover {
    fn drop(&mut self) {
        // What copies read and write outlives them.
        let _ = self.gpu.bind().and_then(|()| self.stream.synchronize());
    }
}
