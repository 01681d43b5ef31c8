//! CUDA graphs: captured from a separate stream, to which the launches of the capturing thread go meanwhile. Other
//! threads keep using the device's stream, and a failure in one thread is not reported to another.

use std::{cell::RefCell, sync::Arc};

use cudarc::driver::{
    CudaStream, DriverError,
    result::{graph, stream},
    sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL},
};

use super::{Gpu, lock, memory::Memory};

/// As [`graph::Graph`](crate::device::graph::Graph).
pub struct Graph {
    gpu: &'static Gpu,
    whole: sys::CUgraphExec,
    /// Address of scratch when the graph was captured.
    scratch: Option<u64>,
}

// SAFETY: the driver takes graphs from any thread, one at a time.
unsafe impl Send for Graph {}

/// The stream of a thread that captures, and whether one of its launches failed.
struct Capture {
    stream: Arc<CudaStream>,
    failed: bool,
}

thread_local! {
    static RECORDER: RefCell<Option<Capture>> = const { RefCell::new(None) };
}

/// The stream that this thread captures from, if it does.
pub(super) fn stream_of_recorder() -> Option<sys::CUstream> {
    RECORDER.with_borrow(|recorder| recorder.as_ref().map(|recorder| recorder.stream.cu_stream()))
}

/// Notes a failure of a thread that captures; false where this one does not.
pub(super) fn failed_in_recorder() -> bool {
    RECORDER.with_borrow_mut(|recorder| match recorder {
        Some(recorder) => {
            recorder.failed = true;
            true
        }
        None => false,
    })
}

/// Ends the capture on drop: the thread's launches go to the device's stream again.
struct Ended;

impl Drop for Ended {
    fn drop(&mut self) {
        RECORDER.take();
    }
}

impl Graph {
    /// As [`graph::Graph::new`](crate::device::graph::Graph::new).
    pub fn new(gpu: &'static Gpu, work: impl FnOnce()) -> Option<Self> {
        Self::capture(gpu, work).ok().flatten()
    }

    /// `None` where a launch or the driver failed; a launch that cannot be captured fails again without capture, and
    /// is reported then.
    fn capture(gpu: &'static Gpu, work: impl FnOnce()) -> Result<Option<Self>, DriverError> {
        gpu.bind()?;
        let (scratch, own) = (gpu.scratch_address(), gpu.context.new_stream()?);
        RECORDER.set(Some(Capture { stream: Arc::clone(&own), failed: false }));
        let ended = Ended;
        // SAFETY: the stream is alive and used by this thread alone, which ends the capture that it began.
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
        let graph = Self { gpu, whole, scratch };
        Ok((!failed).then_some(graph))
    }

    /// As [`graph::Graph::replay`](crate::device::graph::Graph::replay).
    pub fn replay(&self) -> bool {
        // Locked until the work is started, so that nobody moves scratch in between.
        let scratch = lock(&self.gpu.scratch);
        if scratch.as_ref().map(Memory::address) != self.scratch {
            return false;
        }
        // SAFETY: the instance is alive, and its buffers have the addresses of the capture.
        let started = self.gpu.bind().and_then(|()| unsafe { graph::launch(self.whole, self.gpu.stream()) });
        self.gpu.attempt("recorded work", started);
        self.gpu.settle("recorded work");
        true
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: created once, destroyed once; the driver lets it finish.
            let _ = unsafe { graph::exec_destroy(self.whole) };
        }
    }
}
