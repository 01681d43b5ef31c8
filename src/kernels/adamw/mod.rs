//! One pass over a flat FP32 store: the squared norm of a gradient, and the AdamW update.
//!
//! Update `t` (from 1), with `g = factor * gradient` (Loshchilov and Hutter 2019, as in PyTorch):
//! `w -= lr decay w`; `m = b1 m + (1 - b1) g`; `v = b2 v + (1 - b2) g^2`;
//! `w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)`.

#[cfg(feature = "cuda")]
use super::elementwise;
#[cfg(feature = "cuda")]
use crate::device::cuda::Gpu;
use crate::device::{Device, View, ViewMut};

pub(super) mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;
pub mod device_scratch;
pub mod reference;
#[cfg(test)]
mod tests;

/// Numbers of one update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Number of this update, from 1.
    pub step: u64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, times the learning rate.
    pub weight_decay: f64,
    /// Factor of the gradient: unscaling times clipping.
    pub factor: f64,
}

/// Sum of the squares of `gradient`, in f64, in an order that depends on its length alone.
pub fn square_sum(gradient: View) -> f64 {
    match gradient.device() {
        Device::Cpu => cpu::square_sum(gradient.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            cuda::clipping(gpu, gradient, 0.0, 1.0);
            cuda::control(gpu).0
        }
    }
}

/// The norm of a gradient and the factor that follows from it: known on the host, or left on a device where the
/// update finds them.
#[derive(Debug, Clone, Copy)]
pub struct Clipping(Norm);

#[derive(Debug, Clone, Copy)]
enum Norm {
    /// Norm of the unscaled gradient, and the factor for unscaling and clipping.
    Known { norm: f64, factor: f64 },
    /// In the memory of the device. An [`update`] of a gradient that is not finite then changes nothing.
    #[cfg(feature = "cuda")]
    OnDevice(&'static Gpu),
}

impl Clipping {
    /// The value for [`Update::factor`]; 1 where the device multiplies with its own.
    pub fn factor(self) -> f64 {
        match self.0 {
            Norm::Known { factor, .. } => factor,
            #[cfg(feature = "cuda")]
            Norm::OnDevice(_) => 1.0,
        }
    }

    /// Whether an update may be asked for: not of a gradient that is known not to be finite.
    pub fn allows_update(self) -> bool {
        match self.0 {
            Norm::Known { norm, .. } => norm.is_finite(),
            #[cfg(feature = "cuda")]
            Norm::OnDevice(_) => true,
        }
    }

    /// The norm of the unscaled gradient, waiting for a device that still computes it.
    pub fn norm(self) -> f64 {
        match self.0 {
            Norm::Known { norm, .. } => norm,
            #[cfg(feature = "cuda")]
            Norm::OnDevice(gpu) => cuda::control(gpu).1,
        }
    }
}

/// The factor of clipping a gradient of that norm to `clip` (0: none), as in PyTorch's `clip_grad_norm_`.
pub fn factor(norm: f64, clip: f64) -> f64 {
    if clip > 0.0 { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 }
}

/// Norm of `gradient / loss_scale`, and `1 / loss_scale` times the factor of clipping to `clip` (0: none),
/// `min(1, clip / (norm + 1e-6))` as in PyTorch's `clip_grad_norm_`.
pub fn clipping(gradient: View, clip: f64, loss_scale: f64) -> Clipping {
    match gradient.device() {
        Device::Cpu => {
            let norm = cpu::square_sum(gradient.host()).sqrt() / loss_scale;
            Clipping(Norm::Known { norm, factor: factor(norm, clip) / loss_scale })
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            cuda::clipping(gpu, gradient, clip, loss_scale);
            Clipping(Norm::OnDevice(gpu))
        }
    }
}

/// Updates `values` and both moments in place.
pub fn update(values: ViewMut, gradient: View, first: ViewMut, second: ViewMut, update: Update) {
    match gradient.device() {
        Device::Cpu => cpu::update(values.host(), gradient.host(), first.host(), second.host(), update),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::update(gpu, values, gradient, first, second, update),
    }
}

/// `to += from`, FP32 of one length.
pub fn add(from: View, to: ViewMut) {
    match from.device() {
        Device::Cpu => to.host::<f32>().iter_mut().zip(from.host::<f32>()).for_each(|(to, from)| *to += from),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => elementwise::cuda::add(gpu, from, &to),
    }
}
