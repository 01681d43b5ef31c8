//! How parts of frozen weights get into their places beside the kernels' work: a thread copies them from their file
//! into pinned memory, a stream of its own from there to the device, and events keep both streams in order.
//!
//! For place i the kernels' stream records `used[i]` before a copy is asked for, and the copy waits for it; the
//! copying stream records `copied[i]`, for which kernels wait, and the thread before it writes the pinned memory again.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
};

use cudarc::driver::{CudaStream, DriverError, result};

use super::{
    Gpu,
    event::Event,
    memory::{Memory, Pinned},
};
use crate::{
    device::{
        Frozen,
        kinds::CUDA_ALIGNMENT,
        staging::{SLOTS, bytes},
    },
    error::{Error, Result},
};

/// A stretch of the device's memory, and the two moments that matter for it.
struct Slot {
    memory: Arc<Memory>,
    used: Event,
    copied: Event,
}

/// A part on its way.
struct Errand {
    place: usize,
    part: Vec<Frozen>,
}

/// The places, and the thread that fills them.
pub struct StagingSlots {
    gpu: &'static Gpu,
    places: Arc<[Slot; SLOTS]>,
    errands: Option<Sender<Errand>>,
    /// A place whose copy has been handed to the device.
    started: Receiver<usize>,
    /// Copies that were asked for and that no kernel waits for yet, by place.
    open: [bool; SLOTS],
    /// How many were asked for that the thread has not reported.
    unreported: [usize; SLOTS],
    thread: Option<JoinHandle<()>>,
}

impl StagingSlots {
    /// As [`stages::StagingSlots::new`](crate::device::staging::StagingSlots::new).
    pub fn new(gpu: &'static Gpu, part: &[&Frozen]) -> Result<Self> {
        let len = bytes(part);
        let failed = |cause: DriverError| {
            Error::failed(format!(
                "CUDA device {}: a stream for weights cannot be had: {cause}; use --stream-base off",
                gpu.ordinal()
            ))
        };
        let place = || -> Result<Slot> {
            let memory = Arc::new(Memory::zeroed(gpu, len, "a block of the base")?);
            let event = || Event::new(gpu).map_err(failed);
            Ok(Slot { memory, used: event()?, copied: event()? })
        };
        let places = Arc::new([place()?, place()?]);
        let pinned = [Pinned::new(gpu, len)?, Pinned::new(gpu, len)?];
        let stream = gpu.context.new_stream().map_err(failed)?;
        let (errands, inbox) = channel();
        let (report, started) = channel();
        let carrier = Carrier { gpu, places: Arc::clone(&places), pinned, stream };
        let work = move || carrier.work(&inbox, &report);
        let thread = std::thread::Builder::new().name("stages".into()).spawn(work).map_err(|cause| {
            Error::failed(format!(
                "a thread for reading ahead cannot be started: {cause}; use --stream-base off"
            ))
        })?;
        let (open, unreported) = ([false; SLOTS], [0; SLOTS]);
        Ok(Self { gpu, places, errands: Some(errands), started, open, unreported, thread: Some(thread) })
    }

    /// As [`stages::StagingSlots::tensors`](crate::device::staging::StagingSlots::tensors).
    pub fn tensors(&self, place: usize, part: &[&Frozen]) -> Vec<Frozen> {
        let starts = part.iter().scan(0, |next, tensor| {
            let start = *next;
            *next += tensor.bytes().next_multiple_of(CUDA_ALIGNMENT);
            Some(start)
        });
        let memory = &self.places[place].memory;
        part.iter().zip(starts).map(|(tensor, start)| tensor.on_device(Arc::clone(memory), start)).collect()
    }

    /// As [`stages::StagingSlots::bring`](crate::device::staging::StagingSlots::bring).
    pub fn bring(&mut self, place: usize, part: Vec<Frozen>) {
        let recorded = self.gpu.bind().and_then(|()| self.places[place].used.record(self.gpu.stream()));
        self.gpu.attempt("streaming weights", recorded);
        if let Some(errands) = &self.errands
            && errands.send(Errand { place, part }).is_ok()
        {
            self.open[place] = true;
            self.unreported[place] += 1;
        }
    }

    /// As [`stages::StagingSlots::wait`](crate::device::staging::StagingSlots::wait).
    pub fn wait(&mut self, place: usize) {
        if !std::mem::take(&mut self.open[place]) {
            return;
        }
        while self.unreported[place] > 0 {
            let Ok(done) = self.started.recv() else {
                self.gpu.attempt::<()>("streaming weights", Err("the thread that reads them has ended"));
                return;
            };
            self.unreported[done] -= 1;
        }
        let held = self.gpu.bind().and_then(|()| self.places[place].copied.hold(self.gpu.stream()));
        self.gpu.attempt("streaming weights", held);
    }
}

impl Drop for StagingSlots {
    fn drop(&mut self) {
        self.errands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread works with.
struct Carrier {
    gpu: &'static Gpu,
    places: Arc<[Slot; SLOTS]>,
    pinned: [Pinned; SLOTS],
    stream: Arc<CudaStream>,
}

impl Carrier {
    fn work(self, inbox: &Receiver<Errand>, report: &Sender<usize>) {
        for errand in inbox {
            self.gpu.attempt("streaming weights", self.carry(&errand));
            // Nobody waits any more when the other end is gone.
            let _ = report.send(errand.place);
        }
        // Pinned memory and places outlive the copies.
        let _ = self.gpu.bind().and_then(|()| self.stream.synchronize());
    }

    fn carry(&self, Errand { place, part }: &Errand) -> Result<(), DriverError> {
        let (Slot { memory, used, copied }, pinned) = (&self.places[*place], &self.pinned[*place]);
        self.gpu.bind()?;
        copied.synchronize()?;
        let mut start = 0;
        for tensor in part {
            let view = tensor.view();
            let from = view.bytes();
            // SAFETY: pinned memory is as long as a place, which was sized for parts like this one, and the last
            // copy from it is done.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), pinned.head().add(start), from.len()) };
            start += from.len().next_multiple_of(CUDA_ALIGNMENT);
            // Pages of the file have served.
            tensor.region().release();
        }
        let stream = self.stream.cu_stream();
        used.hold(stream)?;
        // SAFETY: place and pinned memory are that long and live until the stream is done; nobody writes the latter
        // before `copied` has come.
        unsafe {
            let sent = std::slice::from_raw_parts(pinned.head(), start);
            result::memcpy_htod_async(memory.address(), sent, stream)?;
        }
        copied.record(stream)
    }
}
