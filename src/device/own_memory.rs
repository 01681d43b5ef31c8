//! Memory that a device has beside the host's, by numbers that hold whether such a device is here or not.

use super::{Device, fixed};

/// What a plan must know of memory that only a device reads and writes.
#[derive(Debug, PartialEq, Eq)]
pub struct OwnMemory {
    /// What driver and libraries are called in tables.
    pub runtime_name: &'static str,
    /// Bytes that driver and libraries take of it in every process.
    pub runtime: u64,
    /// Every tensor of a base begins at a multiple of this many bytes.
    pub align: usize,
}

impl OwnMemory {
    /// Of a CUDA device. The runtime is not measured here: about 300 MiB of context and modules on recent
    /// devices, and 32 MiB of cuBLAS workspace.
    pub const CUDA: &'static Self =
        &Self { runtime_name: "CUDA context, libraries", runtime: 352 << 20, align: fixed::ALIGN };
}

impl Device {
    /// Its memory beside the host's; `None` of a device that computes in the host's memory.
    pub fn own_memory(self) -> Option<&'static OwnMemory> {
        match self {
            Self::Cpu => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => Some(OwnMemory::CUDA),
        }
    }
}
