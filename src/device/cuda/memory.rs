//! Memory of a device, pinned memory of its host, and the loader of frozen weights.

use cudarc::driver::{DriverError, result};

use super::{Gpu, Relaxed};
use crate::{
    device::Frozen,
    error::{Error, Result},
};

/// An allocation in a device's memory.
pub struct Memory {
    gpu: &'static Gpu,
    address: u64,
    len: usize,
}

impl Memory {
    /// `bytes` bytes of zeros for `what`; zero bytes allocate nothing.
    ///
    /// # Errors
    /// [`Error::Memory`] when the device has too little.
    pub fn zeroed(gpu: &'static Gpu, bytes: usize, what: &str) -> Result<Self> {
        Self::allocated(gpu, bytes, what, "use fewer or shorter rows at a time, or a smaller adapter")
    }

    /// `bytes` bytes for the weights of a base.
    ///
    /// # Errors
    /// As [`Memory::zeroed`].
    pub fn for_base(gpu: &'static Gpu, bytes: usize) -> Result<Self> {
        Self::allocated(gpu, bytes, "the base", "give --stream-base on, a smaller base, or --device cpu")
    }

    fn allocated(gpu: &'static Gpu, bytes: usize, what: &str, remedy: &str) -> Result<Self> {
        if bytes == 0 {
            return Ok(Self { gpu, address: 0, len: 0 });
        }
        let refused = |cause: DriverError| {
            // After a fault every call fails: what made it counts.
            if let Err(fault) = gpu.check() {
                return fault;
            }
            let free = gpu.free().map_or_else(String::new, |free| format!(" (free: {free})"));
            let cause = cause
                .error_string()
                .map_or_else(|_| cause.to_string(), |text| text.to_string_lossy().into_owned());
            Error::memory(format!(
                "{bytes} bytes for {what} cannot be allocated on CUDA device {}{free}: {cause}; {remedy}",
                gpu.ordinal
            ))
        };
        gpu.bind().map_err(refused)?;
        // SAFETY: nothing reads the memory before it is set to zero on the stream that all work goes through.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(refused)?;
        let memory = Self { gpu, address, len: bytes };
        let held = gpu.held.fetch_add(bytes, Relaxed) + bytes;
        gpu.most.fetch_max(held, Relaxed);
        gpu.clear(address, bytes);
        Ok(memory)
    }

    /// The device it belongs to.
    pub fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    /// Address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.is_empty() {
            return;
        }
        self.gpu.held.fetch_sub(self.len, Relaxed);
        if self.gpu.bind().is_ok() {
            // SAFETY: malloc_sync returned it and nobody has a view on it any more; the driver waits for work that
            // still uses it.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Pinned pages of the host, which the device reads and writes by itself.
pub struct Pinned {
    gpu: &'static Gpu,
    head: *mut u8,
    len: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}
// SAFETY: as above; it is written through what owns it.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` bytes with arbitrary content.
    ///
    /// # Errors
    /// [`Error::Memory`] when the host cannot pin so many.
    pub fn new(gpu: &'static Gpu, len: usize) -> Result<Self> {
        let refused = |cause| {
            Error::memory(format!(
                "{len} bytes of pinned memory cannot be allocated: {cause}; free some memory"
            ))
        };
        gpu.bind().map_err(refused)?;
        // SAFETY: written before it is read, as its users promise.
        let head = unsafe { result::malloc_host(len.max(1), 0) }.map_err(refused)?;
        Ok(Self { gpu, head: head.cast(), len })
    }

    /// `len` zeros for `what`, which kernels may use in place: with unified virtual addressing a device sees such
    /// pages at the host's addresses (CUDA C++ programming guide).
    ///
    /// # Errors
    /// [`Error::Failed`] when the host cannot pin so many. It is not [`Error::Memory`]: a plan that takes less of the
    /// device would pin more.
    pub fn zeroed(gpu: &'static Gpu, len: usize, what: &str) -> Result<Self> {
        let pinned = Self::new(gpu, len).map_err(|error| {
            Error::failed(format!(
                "{what}: {error}; --offload-inputs off and --offload-optimizer off keep all on the device"
            ))
        })?;
        // SAFETY: the pages belong to us and are `len` bytes.
        unsafe { pinned.head.write_bytes(0, len) };
        Ok(pinned)
    }

    /// The device that uses it.
    pub fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    /// Address of the first byte.
    pub fn head(&self) -> *mut u8 {
        self.head
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // Kernels may still use it; copies of other streams were waited for by those who started them.
            let _ = self.gpu.stream.synchronize();
            // SAFETY: malloc_host returned it.
            let _ = unsafe { result::free_host(self.head.cast()) };
        }
    }
}

/// Bytes that the loader copies at a time.
const PIECE: usize = 8 << 20;

/// Copies frozen weights to a device through pinned memory.
pub struct Loader(Pinned);

impl Loader {
    /// Allocates the pinned memory.
    ///
    /// # Errors
    /// As [`Pinned::new`].
    pub fn new(gpu: &'static Gpu) -> Result<Self> {
        Ok(Self(Pinned::new(gpu, PIECE)?))
    }

    /// Copies a tensor of the host to `address`, piece by piece: pages of a mapped file are read once and in order,
    /// and the host never holds a second copy of a tensor.
    ///
    /// # Errors
    /// [`Error::Failed`] when the device fails.
    pub fn load(&mut self, from: &Frozen, address: u64) -> Result<()> {
        let Self(pinned) = self;
        let mut done = 0;
        for piece in from.view().bytes().chunks(PIECE) {
            // SAFETY: a piece fits the pinned memory, which nothing reads any more.
            let sent = unsafe { std::slice::from_raw_parts_mut(pinned.head, piece.len()) };
            from.copy_for_device(piece, sent);
            pinned.gpu.upload(address + done as u64, sent);
            pinned.gpu.check()?;
            done += piece.len();
        }
        Ok(())
    }
}
