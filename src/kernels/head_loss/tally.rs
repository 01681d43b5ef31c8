//! Sums of losses; those of a device are copied to the host without waiting for it.

use crate::device::{Device, View};

/// The losses of several micro-batches until they are summed: f64 over FP32 losses, in order.
#[derive(Default)]
pub struct Tally {
    sum: f64,
    #[cfg(feature = "cuda")]
    coming: Vec<Coming>,
}

/// Losses in pinned memory, valid after a wait for the device.
#[cfg(feature = "cuda")]
struct Coming {
    gpu: &'static crate::device::cuda::Gpu,
    pinned: crate::device::cuda::memory::Pinned,
    bytes: usize,
}

impl Tally {
    /// Adds all of `losses`, with the values that they have at this point of the device's work.
    pub fn add(&mut self, losses: View) {
        match losses.device() {
            Device::Cpu => self.sum += total(losses.host()),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => self
                .coming
                .extend(gpu.download_later(losses).map(|(pinned, bytes)| Coming { gpu, pinned, bytes })),
        }
    }

    /// The sum of all losses added, valid after a wait for the device ([`Device::check`]).
    pub fn sum(self) -> f64 {
        #[cfg(feature = "cuda")]
        let sum = self.coming.into_iter().fold(self.sum, |sum, Coming { gpu, pinned, bytes }| {
            // SAFETY: the copy to these bytes is done, nobody else has them, and pages are aligned for any number.
            let losses = unsafe { std::slice::from_raw_parts(pinned.head().cast::<f32>(), bytes / 4) };
            let sum = sum + total(losses);
            gpu.spare(pinned);
            sum
        });
        #[cfg(not(feature = "cuda"))]
        let sum = self.sum;
        sum
    }
}

fn total(losses: &[f32]) -> f64 {
    losses.iter().map(|&loss| f64::from(loss)).sum()
}
