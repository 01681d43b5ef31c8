//! Devices and the memory that kernels work on: frozen weights, arenas, buffers and views.
//!
//! A [`Frozen`] is read-only by type: nothing in the program can write a base weight. A [`Buffer`] is
//! the unique owner of a range of an [`Arena`](arena::Arena), so a `View` and a `ViewMut` of the
//! same range cannot coexist. [`cpu`] and `cuda` hold the code that all kernels of a vendor share. [`DeviceKind`]
//! answers every question that other rooms have about a device.

pub mod accelerators;
pub mod arena;
pub mod async_copy;
mod auto;
mod buffer;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(any(feature = "cuda", test))]
mod cuda_requirements;
mod dtype;
pub mod frozen;
#[cfg(any(feature = "cuda", test))]
pub mod gemm_layout;
pub mod graph;
mod kinds;
pub mod page_cache;
pub mod rates;
pub mod staging;
mod view;

use std::path::Path;

#[cfg(feature = "cuda")]
use self::cuda::Gpu;
#[cfg(not(feature = "cuda"))]
use crate::error::Error;
use crate::error::Result;

pub use self::{
    auto::AutoDevice,
    buffer::Buffer,
    dtype::{DType, Element},
    frozen::{Bytes, Frozen},
    kinds::{DeviceKind, OwnMemory},
    view::{View, ViewMut},
};

pub(crate) use self::kinds::{DELTA_ROWS, HEAD_ROWS};

/// Where buffers live and kernels run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// The cores of the host, through the global rayon pool.
    #[default]
    Cpu,
    /// An opened CUDA device.
    #[cfg(feature = "cuda")]
    Cuda(&'static Gpu),
}

impl Device {
    /// The host itself: files are mapped into its memory, and every machine has it.
    pub const HOST: Self = Self::Cpu;

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

    /// For developers: has `code` taken instead of the embedded code of the op that `path` is called like, and returns the
    /// op. To be called before a device is opened.
    ///
    /// # Errors
    /// [`Error::Input`] when there is no such op, and of a program that was built without CUDA.
    #[cfg(feature = "cuda")]
    pub fn take_kernels(path: &Path, code: &[u8]) -> Result<&'static str> {
        cuda::take_image(path, code)
    }

    /// For developers: has `code` taken instead of the embedded code of the op that `path` is called like, and returns the
    /// op. To be called before a device is opened.
    ///
    /// # Errors
    /// [`Error::Input`] when there is no such op, and of a program that was built without CUDA.
    #[cfg(not(feature = "cuda"))]
    pub fn take_kernels(path: &Path, code: &[u8]) -> Result<&'static str> {
        let _ = code;
        Err(Error::input(format!(
            "{}: this program was built without CUDA and takes no kernels; build it with `--features cuda`",
            path.display()
        )))
    }

    /// Whether the host reads and writes its buffers by address, without a copy.
    pub fn is_host_visible(self) -> bool {
        match self {
            Self::Cpu => true,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => false,
        }
    }

    /// Properties that change the bits of results: the vector level of a CPU and whether it has the products of
    /// the type `activations`; the capability of a CUDA device.
    pub fn dispatch(self, activations: DType) -> String {
        match self {
            Self::Cpu => {
                let pairs = activations == DType::BF16 && cpu::bf16();
                cpu::dispatch_level().to_owned() + if pairs { "+bf16" } else { "" }
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => {
                let _ = activations;
                format!("sm_{}", gpu.capability())
            }
        }
    }

    /// Properties of its kind.
    pub fn kind(self) -> &'static DeviceKind {
        match self {
            Self::Cpu => DeviceKind::CPU,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => DeviceKind::CUDA,
        }
    }

    /// The device's own memory; `None` for a device that computes in the host's memory.
    pub fn own_memory(self) -> Option<&'static OwnMemory> {
        self.kind().own_memory.as_ref()
    }

    /// Free bytes of a device that has memory of its own; `None` of one that has not, or that does not answer.
    pub fn free(self) -> Option<u64> {
        match self {
            Self::Cpu => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.free(),
        }
    }

    /// Waits until the device has done all work that it was given.
    ///
    /// # Errors
    /// [`Error::Failed`] with the first failure since the last call.
    pub fn check(self) -> Result<()> {
        match self {
            Self::Cpu => Ok(()),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.check(),
        }
    }

    /// Has every launch waited for from now on, so that a fault names what made it; does nothing on a CPU. Slow; for
    /// finding faults.
    pub fn wait_after_each_launch(self) {
        match self {
            Self::Cpu => {}
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.wait_after_each_launch(),
        }
    }

    /// Has ops of a device fuse steps into one launch where they can, as they do at first, or make each step a launch of
    /// its own; does nothing on a CPU. The two differ by rounding (docs/NUMERICS.md); for tests that compare them.
    pub fn fuse_ops(self, fuses: bool) {
        match self {
            Self::Cpu => {
                let _ = fuses;
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.fuse(fuses),
        }
    }

    /// Kernels and products that were started or recorded so far; starting a graph counts as one. 0 on a CPU.
    pub fn launches(self) -> usize {
        match self {
            Self::Cpu => 0,
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => gpu.launches(),
        }
    }

    /// Allocates `bytes` of scratch now, so that no kernel has to; does nothing on a CPU.
    ///
    /// # Errors
    /// [`Error::Memory`] when the device has too little.
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
