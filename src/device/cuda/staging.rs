//! Copies of frozen weights into staging slots beside the kernels' work: a thread copies them from their file into
//! pinned memory, a separate stream from there to the device, and events keep both streams in order.
//!
//! For each slot the kernels' stream records `used` before a copy is requested, and the copy waits for it. The copying
//! stream records `copied`; kernels wait for it, and so does the thread before it writes the pinned memory again.

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
        staging::{SLOTS, bytes},
    },
    error::{Error, Result},
};

/// A slot's memory on the device, and the events that order its use.
struct Slot {
    memory: Arc<Memory>,
    used: Event,
    copied: Event,
}

/// A request to copy a part into a slot.
struct Errand {
    slot: usize,
    part: Vec<Frozen>,
}

/// The slots and the thread that fills them.
pub struct StagingSlots {
    gpu: &'static Gpu,
    slots: Arc<[Slot; SLOTS]>,
    errands: Option<Sender<Errand>>,
    /// Receives each slot whose copy was given to the device.
    started: Receiver<usize>,
    /// By slot: whether a copy was requested that no kernel waits for yet.
    open: [bool; SLOTS],
    /// By slot: requests that the thread has not reported.
    unreported: [usize; SLOTS],
    thread: Option<JoinHandle<()>>,
}

impl StagingSlots {
    /// As [`staging::StagingSlots::new`](crate::device::staging::StagingSlots::new).
    pub fn new(gpu: &'static Gpu, part: &[&Frozen]) -> Result<Self> {
        let len = bytes(part);
        let failed = |cause: DriverError| {
            Error::failed(format!(
                "CUDA device {}: a stream for weights cannot be opened: {cause}; use --stream-base off",
                gpu.ordinal()
            ))
        };
        let slot = || -> Result<Slot> {
            let memory = Arc::new(Memory::zeroed(gpu, len, "a block of the base")?);
            let event = || Event::new(gpu).map_err(failed);
            Ok(Slot { memory, used: event()?, copied: event()? })
        };
        let slots = Arc::new([slot()?, slot()?]);
        let pinned = [Pinned::new(gpu, len)?, Pinned::new(gpu, len)?];
        let stream = gpu.context.new_stream().map_err(failed)?;
        let (errands, inbox) = channel();
        let (report, started) = channel();
        let carrier = Carrier { gpu, slots: Arc::clone(&slots), pinned, stream };
        let work = move || carrier.work(&inbox, &report);
        let thread = std::thread::Builder::new().name("stages".into()).spawn(work).map_err(|cause| {
            Error::failed(format!(
                "a thread for reading ahead cannot be started: {cause}; use --stream-base off"
            ))
        })?;
        let (open, unreported) = ([false; SLOTS], [0; SLOTS]);
        Ok(Self { gpu, slots, errands: Some(errands), started, open, unreported, thread: Some(thread) })
    }

    /// As [`staging::StagingSlots::tensors`](crate::device::staging::StagingSlots::tensors).
    pub fn tensors(&self, slot: usize, part: &[&Frozen]) -> Vec<Frozen> {
        let starts = part.iter().scan(0, |next, tensor| {
            let start = *next;
            *next += tensor.device_bytes();
            Some(start)
        });
        let memory = &self.slots[slot].memory;
        part.iter().zip(starts).map(|(tensor, start)| tensor.on_device(Arc::clone(memory), start)).collect()
    }

    /// As [`staging::StagingSlots::bring`](crate::device::staging::StagingSlots::bring).
    pub fn bring(&mut self, slot: usize, part: Vec<Frozen>) {
        let recorded = self.gpu.bind().and_then(|()| self.slots[slot].used.record(self.gpu.stream()));
        self.gpu.attempt("streaming weights", recorded);
        if let Some(errands) = &self.errands
            && errands.send(Errand { slot, part }).is_ok()
        {
            self.open[slot] = true;
            self.unreported[slot] += 1;
        }
    }

    /// As [`staging::StagingSlots::wait`](crate::device::staging::StagingSlots::wait).
    pub fn wait(&mut self, slot: usize) {
        if !std::mem::take(&mut self.open[slot]) {
            return;
        }
        while self.unreported[slot] > 0 {
            let Ok(done) = self.started.recv() else {
                self.gpu.attempt::<()>("streaming weights", Err("the thread that reads them has ended"));
                return;
            };
            self.unreported[done] -= 1;
        }
        let held = self.gpu.bind().and_then(|()| self.slots[slot].copied.hold(self.gpu.stream()));
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

/// The state of the copying thread.
struct Carrier {
    gpu: &'static Gpu,
    slots: Arc<[Slot; SLOTS]>,
    pinned: [Pinned; SLOTS],
    stream: Arc<CudaStream>,
}

impl Carrier {
    fn work(self, inbox: &Receiver<Errand>, report: &Sender<usize>) {
        for errand in inbox {
            self.gpu.attempt("streaming weights", self.carry(&errand));
            // Nobody waits any more when the other end is gone.
            let _ = report.send(errand.slot);
        }
        // Pinned memory and slots outlive the copies.
        let _ = self.gpu.bind().and_then(|()| self.stream.synchronize());
    }

    fn carry(&self, Errand { slot, part }: &Errand) -> Result<(), DriverError> {
        let (Slot { memory, used, copied }, pinned) = (&self.slots[*slot], &self.pinned[*slot]);
        self.gpu.bind()?;
        copied.synchronize()?;
        let mut start = 0;
        for tensor in part {
            let view = tensor.view();
            let from = view.bytes();
            // SAFETY: pinned memory has the length of a slot, which was sized for parts like this one, and the last
            // copy from it is done.
            let to = unsafe { std::slice::from_raw_parts_mut(pinned.head().add(start), from.len()) };
            tensor.copy_for_device(from, to);
            start += tensor.device_bytes();
            // The pages of the file are not needed any more.
            tensor.region().release();
        }
        let stream = self.stream.cu_stream();
        used.hold(stream)?;
        // SAFETY: slot and pinned memory are that long and live until the stream is done; nobody writes the latter
        // before `copied` has come.
        unsafe {
            let sent = std::slice::from_raw_parts(pinned.head(), start);
            result::memcpy_htod_async(memory.address(), sent, stream)?;
        }
        copied.record(stream)
    }
}
