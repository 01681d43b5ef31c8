//! A CUDA device: its context, its one stream, and how kernels are found and launched.
//!
//! All work of a device goes through one stream in program order, so that ops need no synchronisation. Ops return
//! nothing: the first failure is kept, and [`Gpu::check`] waits for the device and returns it. The driver and cuBLASLt
//! are loaded when a device is first opened, so that one program starts with and without them.

use std::{
    collections::HashMap,
    ffi::{CString, c_void},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
};

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use super::{
    DType, Element, View,
    kinds::{CUDA_CONTROL, CUDA_WORKSPACE},
};
use crate::error::{Error, Result};

pub mod async_copy;
mod blas;
mod event;
pub mod graph;
mod images;
mod launch;
pub mod memory;
mod open;
pub mod staging;

pub use blas::{Call, Epilogue, SideMatrix};
pub(crate) use images::image;
pub use images::{Code, Image, take_image};
pub(crate) use launch::arguments;
pub use launch::{Argument, Grid};
use memory::{Memory, Pinned};

/// Bytes of shared memory that a block has without asking for more.
const SHARED_WITHOUT_ASKING: usize = 48 << 10;

/// An opened device. It stays open as long as the process runs.
pub struct Gpu {
    ordinal: usize,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// Addresses of loaded kernels, by name.
    kernels: Mutex<HashMap<String, usize>>,
    /// Addresses of loaded images, by op.
    images: Mutex<HashMap<&'static str, usize>>,
    /// Bytes of shared memory a block that kernels were allowed beyond [`SHARED_WITHOUT_ASKING`], by address.
    allowed: Mutex<HashMap<usize, usize>>,
    /// Most bytes that they can be allowed.
    most_shared: usize,
    /// Whether every launch is waited for.
    waits: AtomicBool,
    /// Whether ops make each step a launch of its own.
    apart: AtomicBool,
    /// Launches, products and graphs that were started.
    launches: AtomicUsize,
    products: blas::Products,
    /// First unreported failure.
    failure: Mutex<Option<String>>,
    held: AtomicUsize,
    most: AtomicUsize,
    scratch: Mutex<Option<Memory>>,
    control: Mutex<Option<Memory>>,
    /// Constant tables of kernels, by name.
    tables: Mutex<HashMap<&'static str, Memory>>,
    /// Pinned memory of the host for reuse, unused now.
    spare: Mutex<Vec<Pinned>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PartialEq for Gpu {
    fn eq(&self, other: &Self) -> bool {
        self.ordinal == other.ordinal
    }
}
impl Eq for Gpu {}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuda:{}", self.ordinal)
    }
}

impl Gpu {
    /// Opens device `ordinal`, or returns it if it is open.
    ///
    /// # Errors
    /// [`Error::Input`] when there is no driver, no such device, or it is too old.
    pub fn open(ordinal: usize) -> Result<&'static Self> {
        static OPEN: Mutex<Vec<&'static Gpu>> = Mutex::new(Vec::new());
        let mut open = lock(&OPEN);
        if let Some(gpu) = open.iter().find(|gpu| gpu.ordinal == ordinal) {
            return Ok(gpu);
        }
        let gpu: &'static Self = Box::leak(Box::new(Self::new(ordinal)?));
        open.push(gpu);
        Ok(gpu)
    }

    /// Its number, from 0.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Its product name, as the driver tells it.
    pub fn name(&self) -> String {
        self.context.name().unwrap_or_else(|_| "CUDA device".to_owned())
    }

    /// Compute capability, as in `9.0`: results may differ between them.
    pub fn capability(&self) -> String {
        self.context
            .compute_capability()
            .map_or_else(|_| "?".to_owned(), |(major, minor)| format!("{major}.{minor}"))
    }

    /// Free bytes of the device; `None` when it does not answer.
    pub fn free(&self) -> Option<u64> {
        self.context.mem_get_info().ok().map(|(free, _)| free as u64)
    }

    /// Bytes that this process holds in arenas, weights and scratch of the device, now and at most.
    pub fn held(&self) -> (usize, usize) {
        (self.held.load(Relaxed), self.most.load(Relaxed))
    }

    /// Bytes of them that are scratch, the most that an op has taken so far.
    pub fn scratch_held(&self) -> usize {
        lock(&self.scratch).as_ref().map_or(0, Memory::len)
    }

    /// Most bytes of shared memory that a block can be allowed.
    pub fn most_shared(&self) -> usize {
        self.most_shared
    }

    /// Address of scratch; `None` before the first op that takes some.
    fn scratch_address(&self) -> Option<u64> {
        lock(&self.scratch).as_ref().map(Memory::address)
    }

    /// Waits for the device and reports the first failure since the last call.
    ///
    /// # Errors
    /// [`Error::Failed`] with the first failure.
    pub fn check(&self) -> Result<()> {
        self.attempt("waiting for it", self.bind().and_then(|()| self.stream.synchronize()));
        match lock(&self.failure).take() {
            None => Ok(()),
            Some(what) => Err(Error::failed(format!(
                "CUDA device {} failed: {what}; run again, with --device cpu if it fails again",
                self.ordinal
            ))),
        }
    }

    /// Makes the device this thread's current one.
    fn bind(&self) -> Result<(), DriverError> {
        self.context.bind_to_thread()
    }

    /// The stream that work of this thread goes to.
    fn stream(&self) -> sys::CUstream {
        graph::stream_of_recorder().unwrap_or_else(|| self.stream.cu_stream())
    }

    /// Keeps a failure for [`Gpu::check`], unless an earlier one is kept.
    fn attempt<T>(&self, what: &str, result: Result<T, impl std::fmt::Display>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(_) if graph::failed_in_recorder() => None,
            Err(cause) => {
                lock(&self.failure).get_or_insert_with(|| format!("{what}: {cause}"));
                None
            }
        }
    }

    /// Starts `kernel` of `image` on `grid`.
    ///
    /// The arguments must match the kernel's in number, order and size, and point at device memory large enough for
    /// its reads and writes. The compiler cannot check that.
    pub fn launch(&self, image: &'static Image, kernel: &str, grid: Grid, arguments: &[Argument]) {
        let (x, y, z) = grid.blocks;
        if x == 0 || y == 0 || z == 0 {
            return;
        }
        let Some(function) = self.kernel(image, kernel) else { return };
        if self.attempt(kernel, self.allow_shared(function, grid.shared)).is_none() {
            return;
        }
        let mut addresses: Vec<*mut c_void> = arguments.iter().map(Argument::address).collect();
        let blocks = (x as u32, y as u32, z as u32);
        // SAFETY: the function stays loaded; the ops promise that the arguments are those of the kernel.
        let started = unsafe {
            result::launch_kernel(
                function as sys::CUfunction,
                blocks,
                (grid.threads as u32, 1, 1),
                grid.shared as u32,
                self.stream(),
                &mut addresses,
            )
        };
        self.attempt(kernel, started);
        self.settle(kernel);
    }

    /// Waits after each launch from now on, so that a fault names the kernel or product that made it and not a later
    /// call. Slow; for finding faults.
    pub fn wait_after_each_launch(&self) {
        self.waits.store(true, Relaxed);
    }

    /// Has ops fuse steps into one launch where they can, as they do at first, or make each step a launch of its own.
    pub fn fuse(&self, fuses: bool) {
        self.apart.store(!fuses, Relaxed);
    }

    /// Whether ops may fuse steps.
    pub fn fuses(&self) -> bool {
        !self.apart.load(Relaxed)
    }

    /// Kernels and products that were started or recorded so far; starting a graph counts as one.
    pub fn launches(&self) -> usize {
        self.launches.load(Relaxed)
    }

    /// Counts `what` as started, and waits for it where every launch is waited for; recorded work is waited for as a whole.
    fn settle(&self, what: &str) {
        self.launches.fetch_add(1, Relaxed);
        if self.waits.load(Relaxed) && graph::stream_of_recorder().is_none() {
            self.attempt(what, self.stream.synchronize());
        }
    }

    /// Lets a kernel have `shared` bytes of shared memory a block.
    fn allow_shared(&self, function: usize, shared: usize) -> Result<(), String> {
        let mut allowed = lock(&self.allowed);
        if shared <= SHARED_WITHOUT_ASKING || allowed.get(&function).is_some_and(|bytes| *bytes >= shared) {
            return Ok(());
        }
        if shared > self.most_shared {
            return Err(format!(
                "a block needs {shared} bytes of shared memory and the device has {}; heads of this width need --device cpu",
                self.most_shared
            ));
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function stays loaded.
        let set = unsafe {
            result::function::set_function_attribute(function as sys::CUfunction, attribute, shared as i32)
        };
        set.map_err(|cause| cause.to_string())?;
        allowed.insert(function, shared);
        Ok(())
    }

    /// The address of a kernel, loaded at first use; binds the device to this thread.
    fn kernel(&self, image: &'static Image, name: &str) -> Option<usize> {
        self.attempt(name, self.bind())?;
        if let Some(function) = lock(&self.kernels).get(name) {
            return Some(*function);
        }
        let module = self.image(image)?;
        let c_name = self.attempt(name, CString::new(name))?;
        // SAFETY: the module stays loaded as long as the process runs.
        let function = unsafe { result::module::get_function(module as sys::CUmodule, c_name) };
        let function = self.attempt(name, function)? as usize;
        lock(&self.kernels).insert(name.to_owned(), function);
        Some(function)
    }

    fn image(&self, image: &'static Image) -> Option<usize> {
        let mut images = lock(&self.images);
        if let Some(module) = images.get(image.op) {
            return Some(*module);
        }
        let module = self.attempt(image.op, image.load())?;
        images.insert(image.op, module);
        Some(module)
    }

    /// Sets bytes to zero.
    pub(crate) fn clear(&self, address: u64, bytes: usize) {
        if bytes > 0 && self.attempt("clearing", self.bind()).is_some() {
            // SAFETY: views are inside memory of the device.
            let done = unsafe { result::memset_d8_async(address, 0, bytes, self.stream()) };
            self.attempt("clearing", done);
        }
    }

    /// Copies bytes of the host to the device. They may be reused at once: the driver keeps a copy of those still to
    /// be sent.
    pub(crate) fn upload(&self, address: u64, bytes: &[u8]) {
        if !bytes.is_empty() && self.attempt("uploading", self.bind()).is_some() {
            // SAFETY: views are inside memory of the device.
            let done = unsafe { result::memcpy_htod_async(address, bytes, self.stream()) };
            self.attempt("uploading", done);
        }
    }

    /// Copies bytes of the device to the host, and waits until they are there; zeros after a failure.
    pub(crate) fn download(&self, address: u64, bytes: usize) -> Vec<u8> {
        let mut host = vec![0u8; bytes];
        if bytes > 0 && self.attempt("downloading", self.bind()).is_some() {
            // SAFETY: views are inside memory of the device; the host's bytes live until it is done.
            let done = unsafe { result::memcpy_dtoh_async(&mut host, address, self.stream()) };
            self.attempt("downloading", done);
            self.attempt("downloading", self.stream.synchronize());
        }
        host
    }

    /// Starts a copy of values to pinned memory of the host; it is done after the next [`Gpu::check`].
    pub(crate) fn download_later(&'static self, from: View) -> Option<(Pinned, usize)> {
        let bytes = from.size();
        let fits = |pinned: &Pinned| pinned.len() >= bytes;
        let spare = {
            let mut spare = lock(&self.spare);
            spare.iter().position(fits).map(|at| spare.swap_remove(at))
        };
        let pinned = match spare {
            Some(pinned) => pinned,
            None => self.attempt("downloading", Pinned::new(self, bytes))?,
        };
        self.attempt("downloading", self.bind())?;
        // SAFETY: views are inside memory of the device; whoever holds the pinned memory reads it after a check.
        let done = unsafe {
            let host = std::slice::from_raw_parts_mut(pinned.head(), bytes);
            result::memcpy_dtoh_async(host, from.address(), self.stream())
        };
        self.attempt("downloading", done)?;
        Some((pinned, bytes))
    }

    /// Copies values to the host, and waits until they are there; any values after a failure.
    pub(crate) fn read_into<T: Element>(&'static self, from: View, to: &mut Vec<T>) {
        let Some((pinned, _)) = self.download_later(from) else { return to.resize(from.len(), T::default()) };
        self.attempt("downloading", self.stream.synchronize());
        // SAFETY: the copy is done, and the pages hold that many numbers and are aligned for them.
        to.extend_from_slice(unsafe { std::slice::from_raw_parts(pinned.head().cast::<T>(), from.len()) });
        self.spare(pinned);
    }

    /// Keeps pinned memory for reuse.
    pub(crate) fn spare(&self, pinned: Pinned) {
        lock(&self.spare).push(pinned);
    }

    /// Lends at least `bytes` of scratch with arbitrary content to launches, whose use of it ends with them. One
    /// allocation serves all ops: the stream runs them one after another.
    pub(crate) fn scratch(&'static self, bytes: usize, work: impl FnOnce(u64)) {
        if self.attempt("scratch", self.grow(bytes)).is_some()
            && let Some(memory) = lock(&self.scratch).as_ref()
        {
            work(memory.address());
        }
    }

    /// Allocates `bytes` of scratch, and the memory that every run needs.
    ///
    /// # Errors
    /// [`Error::Memory`] when the device has too little.
    pub fn reserve(&'static self, bytes: usize) -> Result<()> {
        self.lent(&self.products.workspace, CUDA_WORKSPACE, "products")?;
        self.lent(&self.control, CUDA_CONTROL, "control")?;
        self.grow(bytes)
    }

    /// Allocates scratch of `bytes`, after the work that uses the old one has finished.
    fn grow(&'static self, bytes: usize) -> Result<()> {
        let mut scratch = lock(&self.scratch);
        if scratch.as_ref().is_none_or(|memory| memory.len() < bytes) {
            // The driver waits for kernels that still use it.
            *scratch = None;
            *scratch = Some(Memory::zeroed(self, bytes, "scratch of kernels")?);
        }
        Ok(())
    }

    /// Lends the memory of the results that an update leaves for the host.
    pub(crate) fn control(&'static self, work: impl FnOnce(u64)) {
        self.lend(&self.control, CUDA_CONTROL, "control", |memory| work(memory.address()));
    }

    /// Lends a constant table of kernels, uploaded at first use.
    pub(crate) fn table(
        &'static self,
        name: &'static str,
        make: impl FnOnce() -> Vec<f32>,
        work: impl FnOnce(u64),
    ) {
        let mut tables = lock(&self.tables);
        if !tables.contains_key(name) {
            let values = make();
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
            let Some(memory) = self.attempt(name, Memory::zeroed(self, bytes.len(), name)) else { return };
            self.upload(memory.address(), &bytes);
            tables.insert(name, memory);
        }
        if let Some(memory) = tables.get(name) {
            work(memory.address());
        }
    }

    fn lend(
        &'static self,
        place: &Mutex<Option<Memory>>,
        bytes: usize,
        what: &'static str,
        work: impl FnOnce(&Memory),
    ) {
        if self.attempt(what, self.lent(place, bytes, what)).is_some()
            && let Some(memory) = lock(place).as_ref()
        {
            work(memory);
        }
    }

    /// Allocates the memory of `place` if it has none.
    fn lent(&'static self, place: &Mutex<Option<Memory>>, bytes: usize, what: &'static str) -> Result<()> {
        let mut place = lock(place);
        if place.is_none() {
            *place = Some(Memory::zeroed(self, bytes, what)?);
        }
        Ok(())
    }
}

/// The name of a kernel for activations of a type: `base_f32`, `base_f16` or `base_bf16`.
pub fn named(base: &str, activations: DType) -> String {
    let suffix = match activations {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        _ => "f32",
    };
    format!("{base}_{suffix}")
}
