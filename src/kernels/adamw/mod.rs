//! One pass over a flat FP32 store: the squared norm of a gradient, and the AdamW update.
//!
//! Update `t` (from 1), with `g = factor * gradient` (Loshchilov and Hutter 2019, as in PyTorch):
//! `w -= lr decay w`; `m = b1 m + (1 - b1) g`; `v = b2 v + (1 - b2) g^2`;
//! `w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)`.

use super::device::{Device, View, ViewMut};

pub(super) mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

/// Numbers of one update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Number of this update, from 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// What the gradient is multiplied with first: unscaling and clipping.
    pub factor: f64,
}

/// Sum of the squares of `gradient`, in f64, in an order that depends on its length alone.
pub fn square_sum(gradient: View) -> f64 {
    match gradient.device() {
        Device::Cpu => cpu::square_sum(gradient.host()),
    }
}

/// Updates `values` and both moments in place.
pub fn update(values: ViewMut, gradient: View, first: ViewMut, second: ViewMut, update: Update) {
    match gradient.device() {
        Device::Cpu => cpu::update(values.host(), gradient.host(), first.host(), second.host(), update),
    }
}

/// `to += from`.
pub fn add(from: View, to: ViewMut) {
    match from.device() {
        Device::Cpu => to.host::<f32>().iter_mut().zip(from.host::<f32>()).for_each(|(to, from)| *to += from),
    }
}
