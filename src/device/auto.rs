//! The device that is taken where nobody names one.

use std::path::Path;

use super::Device;
#[cfg(feature = "cuda")]
use super::cuda::Gpu;
use crate::error::{Error, Result};

/// The device that is taken where nobody names one.
#[derive(Debug)]
pub struct AutoDevice {
    /// The first CUDA device that can be opened, or else the CPU.
    pub device: Device,
    /// Why a CUDA device that seems to be here is not taken; `None` where there is none.
    pub refused: Option<Error>,
}

/// The file that NVIDIA's kernel module shows, in containers too.
const KERNEL_MODULE: &str = "/proc/driver/nvidia/version";

impl AutoDevice {
    /// Looks for a device and opens it.
    pub fn find() -> Self {
        #[cfg(feature = "cuda")]
        let answers = Gpu::seems_present();
        #[cfg(not(feature = "cuda"))]
        let answers = false;
        Self::of(answers || Path::new(KERNEL_MODULE).exists(), || Device::cuda(0))
    }

    fn of(seems_present: bool, open: impl FnOnce() -> Result<Device>) -> Self {
        let cpu = |refused| Self { device: Device::Cpu, refused };
        match seems_present.then(open) {
            None => cpu(None),
            Some(Err(cause)) => cpu(Some(cause)),
            Some(Ok(device)) => Self { device, refused: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_here_and_not_taken_is_told() {
        let refuse = || Err(Error::input("--device cuda:0: its driver is too old; update it"));
        let best = AutoDevice::of(true, refuse);
        assert_eq!(best.device, Device::Cpu);
        assert!(best.refused.unwrap().to_string().contains("update it"));
        // Without one nothing is opened and nothing is said.
        assert!(AutoDevice::of(false, refuse).refused.is_none());
        assert!(AutoDevice::of(true, || Ok(Device::Cpu)).refused.is_none());
    }
}
