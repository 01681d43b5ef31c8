//! What a plan must know of the device that would compute; it need not be here.

use crate::{
    device::{DType, Device, DeviceKind, OwnMemory, arena::Placement},
    kernels::matmul::Arithmetic,
};

/// A device to plan for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedDevice {
    /// Its kind.
    pub kind: &'static DeviceKind,
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
    /// What frozen products and attention are computed in.
    pub arithmetic: Arithmetic,
}

impl PlannedDevice {
    /// The host: the pool of this process, computing in `arithmetic`.
    pub fn host(arithmetic: Arithmetic) -> Self {
        let cores = Cores { threads: rayon::current_num_threads(), arithmetic };
        Self { kind: DeviceKind::CPU, own_memory: None, cores: Some(cores) }
    }

    /// `device`, whose products are in `arithmetic` where cores of the host compute them.
    pub fn of(device: Device, arithmetic: Arithmetic) -> Self {
        Self::of_kind(device.kind(), arithmetic)
    }

    /// A device of `kind`, whose products are in `arithmetic` where cores of the host compute them.
    pub fn of_kind(kind: &'static DeviceKind, arithmetic: Arithmetic) -> Self {
        match &kind.own_memory {
            None => Self::host(arithmetic),
            own_memory @ Some(_) => Self { kind, own_memory: own_memory.as_ref(), cores: None },
        }
    }

    /// Where what is moved out of the planned memory goes.
    pub fn away(self) -> Placement {
        self.kind.offload_placement()
    }

    /// Where what an arena places at `place` is: the memory of the host has one name in a plan.
    pub(super) fn place(self, place: Placement) -> Placement {
        match place {
            Placement::Memory if self.own_memory.is_none() => Placement::Host,
            place => place,
        }
    }

    /// Type of activations where none is asked for.
    pub fn activations(self) -> DType {
        self.kind.default_activations
    }
}
