//! The properties of a device that its plan depends on; the device need not be here.

use crate::{
    device::{DType, Device, OwnMemory, arena::Placement},
    kernels::matmul::Arithmetic,
};

/// A device to plan for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedDevice {
    /// Memory beside the host's, which is then planned, and the host's only listed; `None`: the host's
    /// memory holds everything, the process included.
    pub own_memory: Option<&'static OwnMemory>,
    /// The host's cores, if they compute.
    pub cores: Option<Cores>,
}

/// The cores of the host, as kernels use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cores {
    /// Threads of the pool.
    pub threads: usize,
    /// Number type of factors in frozen products and attention.
    pub arithmetic: Arithmetic,
}

impl PlannedDevice {
    /// The host: the pool of this process, computing in `arithmetic`.
    pub fn host(arithmetic: Arithmetic) -> Self {
        let cores = Cores { threads: rayon::current_num_threads(), arithmetic };
        Self { own_memory: None, cores: Some(cores) }
    }

    /// A device with memory of its own.
    pub fn with_memory(memory: &'static OwnMemory) -> Self {
        Self { own_memory: Some(memory), cores: None }
    }

    /// `device`, whose products are in `arithmetic` where cores of the host compute them.
    pub fn of(device: Device, arithmetic: Arithmetic) -> Self {
        device.own_memory().map_or_else(|| Self::host(arithmetic), Self::with_memory)
    }

    /// Where buffers go that are moved out of the planned memory.
    pub fn away(self) -> Placement {
        if self.own_memory.is_some() { Placement::Host } else { Placement::Disk }
    }

    /// Where buffers of an arena at `place` are: the memory of the host has one name in a plan.
    pub(super) fn place(self, place: Placement) -> Placement {
        match place {
            Placement::Memory if self.own_memory.is_none() => Placement::Host,
            place => place,
        }
    }

    /// Type of activations where none is asked for.
    pub fn activations(self) -> DType {
        if self.cores.is_some() { DType::F32 } else { DType::F16 }
    }
}
