//! Devices and the memory that kernels work on: frozen weights, buffers and views.
//!
//! A [`Frozen`] is read-only by type: nothing in the program can write a base weight. A [`Buffer`] is
//! the unique owner of a range of an [`Arena`](super::arena::Arena), so a `View` and a `ViewMut` of the
//! same range cannot coexist.

use std::{ptr::NonNull, sync::Arc};

use half::{bf16, f16};

#[cfg(feature = "cuda")]
use super::cuda::Gpu;
use super::{
    arena::{Arenas, Chunk, Place},
    pages::Region,
};
#[cfg(not(feature = "cuda"))]
use crate::error::Error;
use crate::error::Result;

pub use super::{
    frozen::{Bytes, Frozen},
    view::{View, ViewMut},
};

/// Element types of buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit floating point: activations on CPUs, trainables, statistics.
    F32,
    /// 16-bit IEEE floating point: frozen weights, and activations on CUDA devices.
    F16,
    /// The upper half of an F32: activations on CUDA devices where they are asked for.
    BF16,
    /// Token ids, positions.
    U32,
    /// Targets, with -100 for "no loss".
    I32,
    /// Codes of 8-bit moments.
    U8,
    /// Codes of 8-bit weights.
    I8,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 | Self::I32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::U8 | Self::I8 => 1,
        }
    }
}

/// Where buffers live and kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// The host's cores, through the global rayon pool.
    #[default]
    Cpu,
    /// An opened CUDA device.
    #[cfg(feature = "cuda")]
    Cuda(&'static Gpu),
}

impl Device {
    /// CUDA device `ordinal`.
    ///
    /// # Errors
    /// [`Error::Input`] when this program was built without CUDA, or the machine has no such device.
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: usize) -> Result<Self> {
        Gpu::open(ordinal).map(Self::Cuda)
    }

    /// CUDA device `ordinal`.
    ///
    /// # Errors
    /// [`Error::Input`] when this program was built without CUDA, or the machine has no such device.
    #[cfg(not(feature = "cuda"))]
    pub fn cuda(ordinal: usize) -> Result<Self> {
        Err(Error::input(format!(
            "--device cuda:{ordinal}: this program was built without CUDA; build it with `--features cuda`, or give --device cpu"
        )))
    }

    /// The first CUDA device that can be opened, or else the CPU.
    pub fn best() -> Self {
        #[cfg(feature = "cuda")]
        if Gpu::count() > 0
            && let Ok(device) = Self::cuda(0)
        {
            return device;
        }
        Self::Cpu
    }

    /// Whether its memory is the host's.
    pub fn is_host(self) -> bool {
        self == Self::Cpu
    }

    /// What results depend on besides the type of activations: the vector level of a CPU, the capability of a
    /// CUDA device.
    pub fn dispatch(self) -> String {
        match self {
            Self::Cpu => super::cpu::dispatch_level().to_owned(),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => format!("sm_{}", gpu.capability()),
        }
    }

    /// `cpu` or `cuda`.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => "cuda",
        }
    }

    /// Free bytes of a device that has memory of its own.
    pub fn free(self) -> Option<u64> {
        match self {
            Self::Cpu => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.free(),
        }
    }

    /// Waits until all that was asked of the device is done.
    ///
    /// # Errors
    /// [`Error::Failed`] when something failed since the last time.
    pub fn check(self) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.check(),
        }
    }

    /// Makes sure of `bytes` of scratch, so that no kernel has to ask for more; nothing on a CPU.
    ///
    /// # Errors
    /// [`Error::Memory`] when the device has not as many.
    pub fn reserve(self, bytes: usize) -> Result<()> {
        match self {
            Self::Cpu => {
                let _ = bytes;
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.reserve(bytes),
        }
    }
}

/// A Rust type that stands for a [`DType`] in host memory.
pub trait Element: Copy + Send + Sync + 'static {
    /// The matching run-time type.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Element for u32 {
    const DTYPE: DType = DType::U32;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for u8 {
    const DTYPE: DType = DType::U8;
}
impl Element for i8 {
    const DTYPE: DType = DType::I8;
}

/// A writable range of an arena, owned by nobody else.
pub struct Buffer {
    /// `None` while planning.
    pub(super) chunk: Option<Arc<Chunk>>,
    pub(super) head: NonNull<u8>,
    pub(super) dtype: DType,
    pub(super) len: usize,
}

// SAFETY: a Buffer is the only handle to its bytes (arenas never hand a range out twice), and the
// bytes are plain numbers, so moving or sharing it follows the rules of a Vec.
unsafe impl Send for Buffer {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A host buffer of its own, outside any plan, holding `values`. For tests and small tools.
    ///
    /// # Errors
    /// As [`Buffer::on`].
    pub fn from_slice<T: Element>(values: &[T]) -> Result<Self> {
        Self::on(Device::Cpu, values)
    }

    /// A buffer of its own, outside any plan, on `device` and holding `values`.
    ///
    /// # Errors
    /// [`Error::Memory`] when there is no memory for it.
    pub fn on<T: Element>(device: Device, values: &[T]) -> Result<Self> {
        let cut = |arena: &mut super::arena::Arena| arena.take("values", T::DTYPE, &[values.len()]);
        let mut buffer = Arenas::real(None).on(device).build("values", Place::Memory, cut)?;
        buffer.view_mut().upload(values);
        Ok(buffer)
    }

    fn device(&self) -> Device {
        self.chunk.as_ref().map_or(Device::Cpu, |chunk| chunk.device())
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its pages; `None` while planning, and on a device.
    pub fn region(&self) -> Option<Region> {
        self.part(0..self.len)
    }

    /// The pages of some of its elements.
    pub fn part(&self, elements: std::ops::Range<usize>) -> Option<Region> {
        let chunk = self.chunk.as_ref().filter(|chunk| chunk.device().is_host())?;
        let start = self.head.as_ptr() as usize - chunk.bytes().as_ptr() as usize;
        let size = self.dtype.size();
        Some(Region::of_chunk(Arc::clone(chunk), start + elements.start * size, elements.len() * size))
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Read access.
    ///
    /// # Panics
    /// On a buffer of a planning arena, which has no memory.
    pub fn view(&self) -> View<'_> {
        assert!(self.chunk.is_some(), "a planned buffer has no memory");
        let head = self.head.as_ptr();
        // SAFETY: the buffer owns its range, of which nothing is written while it is borrowed.
        unsafe { View::raw(head, self.dtype, self.len, self.device()) }
    }

    /// Write access.
    ///
    /// # Panics
    /// On a buffer of a planning arena, which has no memory.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        assert!(self.chunk.is_some(), "a planned buffer has no memory");
        let head = self.head.as_ptr();
        // SAFETY: the buffer owns its range, and is borrowed exclusively.
        unsafe { ViewMut::raw(head, self.dtype, self.len, self.device()) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({:?} x {})", self.dtype, self.len)
    }
}
