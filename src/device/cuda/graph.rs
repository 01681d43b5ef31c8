//! Recorded work: a CUDA graph, captured from a stream of its own that the recording thread's launches go to meanwhile.
//! Other threads go on with the device's stream, and what fails in one is not told to the other.

use std::{cell::RefCell, sync::Arc};

use cudarc::driver::{
    CudaStream, DriverError,
    result::{graph, stream},
    sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL},
};

use super::{Gpu, lock, memory::Memory};

/// As [`recording::Recording`](crate::device::graph::Recording).
pub struct Recording {
    gpu: &'static Gpu,
    whole: sys::CUgraphExec,
    /// Where scratch was.
    scratch: Option<u64>,
}

// SAFETY: the driver takes graphs from any thread, one at a time.
unsafe impl Send for Recording {}

/// Where a thread's launches go while it records, and whether one of them failed.
struct Recorder {
    stream: Arc<CudaStream>,
    failed: bool,
}

thread_local! {
    static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

/// The stream that this thread records from, if it does.
pub(super) fn stream_of_recorder() -> Option<sys::CUstream> {
    RECORDER.with_borrow(|recorder| recorder.as_ref().map(|recorder| recorder.stream.cu_stream()))
}

/// Notes a failure of a thread that records; false where this one does not.
pub(super) fn failed_in_recorder() -> bool {
    RECORDER.with_borrow_mut(|recorder| match recorder {
        Some(recorder) => {
            recorder.failed = true;
            true
        }
        None => false,
    })
}

/// The thread's launches go to the device's stream again, whatever happens.
struct Ended;

impl Drop for Ended {
    fn drop(&mut self) {
        RECORDER.take();
    }
}

impl Recording {
    /// As [`recording::Recording::new`](crate::device::graph::Recording::new).
    pub fn new(gpu: &'static Gpu, work: impl FnOnce()) -> Option<Self> {
        Self::capture(gpu, work).ok().flatten()
    }

    /// `None` where something failed on the way: a launch that cannot be recorded fails by itself, too, and is then told.
    fn capture(gpu: &'static Gpu, work: impl FnOnce()) -> Result<Option<Self>, DriverError> {
        gpu.bind()?;
        let (scratch, own) = (gpu.scratch_address(), gpu.context.new_stream()?);
        RECORDER.set(Some(Recorder { stream: Arc::clone(&own), failed: false }));
        let ended = Ended;
        // SAFETY: the stream is alive and nobody else's; a thread ends what it began.
        let captured = unsafe {
            stream::begin_capture(own.cu_stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
            work();
            stream::end_capture(own.cu_stream())?
        };
        let failed = RECORDER.take().is_none_or(|recorder| recorder.failed);
        drop(ended);
        // SAFETY: the graph was captured just now, and the instance does not need it.
        let whole = unsafe {
            let whole = graph::instantiate(captured, CUgraphInstantiate_flags(0));
            graph::destroy(captured)?;
            whole?
        };
        let recording = Self { gpu, whole, scratch };
        Ok((!failed).then_some(recording))
    }

    /// As [`recording::Recording::replay`](crate::device::graph::Recording::replay).
    pub fn replay(&self) -> bool {
        // Held until the work is started: nobody moves scratch in between.
        let scratch = lock(&self.gpu.scratch);
        if scratch.as_ref().map(Memory::address) != self.scratch {
            return false;
        }
        // SAFETY: the instance is alive, and its buffers are where they were.
        let started = self.gpu.bind().and_then(|()| unsafe { graph::launch(self.whole, self.gpu.stream()) });
        self.gpu.attempt("recorded work", started);
        true
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: it was made once and is dropped once; the driver lets it finish.
            let _ = unsafe { graph::exec_destroy(self.whole) };
        }
    }
}
