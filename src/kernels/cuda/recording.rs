//! Recorded work: a CUDA graph, captured from the stream.

use cudarc::driver::{
    DriverError,
    result::{graph, stream},
    sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL},
};

use super::{Gpu, lock};

/// As [`recording::Recording`](crate::kernels::recording::Recording).
pub struct Recording {
    gpu: &'static Gpu,
    whole: sys::CUgraphExec,
    /// Where scratch was.
    scratch: Option<u64>,
}

// SAFETY: the driver takes graphs from any thread, one at a time.
unsafe impl Send for Recording {}

impl Recording {
    /// As [`recording::Recording::new`](crate::kernels::recording::Recording::new).
    pub fn new(gpu: &'static Gpu, work: impl FnOnce()) -> Option<Self> {
        // What has failed so far is no fault of the recording.
        let before = lock(&gpu.failure).take();
        let captured = Self::capture(gpu, work);
        let failed = std::mem::replace(&mut *lock(&gpu.failure), before);
        // A launch that cannot be recorded fails by itself, too, and is then told.
        if failed.is_some() { None } else { captured.ok() }
    }

    fn capture(gpu: &'static Gpu, work: impl FnOnce()) -> Result<Self, DriverError> {
        gpu.bind()?;
        let scratch = gpu.scratch_address();
        // SAFETY: the stream is alive and records nothing else; a thread ends what it began.
        let captured = unsafe {
            stream::begin_capture(gpu.stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
            work();
            stream::end_capture(gpu.stream())?
        };
        // SAFETY: the graph was captured just now, and the instance does not need it.
        let whole = unsafe {
            let whole = graph::instantiate(captured, CUgraphInstantiate_flags(0));
            graph::destroy(captured)?;
            whole?
        };
        Ok(Self { gpu, whole, scratch })
    }

    /// As [`recording::Recording::replay`](crate::kernels::recording::Recording::replay).
    pub fn replay(&self) -> bool {
        if self.gpu.scratch_address() != self.scratch {
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
