//! The properties of a device that its plan depends on; the device need not be here.

use crate::{
    device::{DType, Device, DeviceKind, OwnMemory, arena::Placement},
    kernels::matmul::Arithmetic,
};

/// A device to plan for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedDevice {
    /// Memory, types and habits of its kind.
    pub kind: &'static DeviceKind,
    /// The host's cores, if they compute.
    pub cores: Option<Cores>,
}

/// The cores of the host, as kernels use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cores {
    /// Number of threads of the pool.
    pub threads: usize,
    /// Number type of factors in frozen products and attention.
    pub arithmetic: Arithmetic,
}

impl PlannedDevice {
    /// An opened device, as [`PlannedDevice::of_kind`].
    pub fn of(device: Device, arithmetic: Arithmetic) -> Self {
        Self::of_kind(device.kind(), arithmetic)
    }

    /// A device of `kind`. The host's cores are those of this process's pool and compute in `arithmetic`.
    pub fn of_kind(kind: &'static DeviceKind, arithmetic: Arithmetic) -> Self {
        let cores = || Cores { threads: rayon::current_num_threads(), arithmetic };
        Self { kind, cores: (kind == Device::HOST.kind()).then(cores) }
    }

    /// The device's own memory. If there is one, it is planned and the host's is only listed; `None`: the host's
    /// memory is planned, the process included.
    pub fn own_memory(self) -> Option<&'static OwnMemory> {
        self.kind.own_memory.as_ref()
    }

    /// Destination of buffers that are moved out of the planned memory.
    pub fn away(self) -> Placement {
        self.kind.offload_placement()
    }

    /// Placement of buffers from an arena at `place`; the memory of the host has one name in a plan.
    pub(super) fn place(self, place: Placement) -> Placement {
        match place {
            Placement::Memory if self.own_memory().is_none() => Placement::Host,
            place => place,
        }
    }

    /// Type of activations where none is asked for.
    pub fn activations(self) -> DType {
        self.kind.default_activations
    }
}
