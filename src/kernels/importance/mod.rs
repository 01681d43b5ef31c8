//! The importance of triplets of a delta, by which AdaLoRA takes ranks away.
//!
//! With `i = |w g|` of a value w and its gradient g, after every update (Zhang et al. 2023, equations 9 and 10):
//!
//! ```text
//! m = b1 m + (1 - b1) i        u = b2 u + (1 - b2) |i - m|        s = m u
//! ```
//!
//! A triplet is element k of `d (r)` with row k of `A (r, in)` and column k of `B (out, r)`. Its score is s of the element
//! plus the means of s over the row and over the column (equation 7).

use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

/// The tensors of a delta in the flat buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Triplets {
    /// First value of `A (r, in)`.
    pub a: usize,
    /// First value of `B (out, r)`.
    pub b: usize,
    /// First value of `d (r)`.
    pub d: usize,
    /// Rank r.
    pub rank: usize,
    /// Inputs of the delta.
    pub inputs: usize,
    /// Outputs of the delta.
    pub outputs: usize,
    /// Number of the first triplet among those of all deltas.
    pub first: usize,
}

/// Numbers of one update of the means.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Smoothing {
    /// Decay b1 of m and b2 of u.
    pub betas: (f64, f64),
    /// Factor of the gradient: unscaling times clipping.
    pub factor: f64,
}

/// Takes the importance of `values` by `gradient` into m and u, all of one length.
pub fn smooth(values: View, gradient: View, mean: ViewMut, uncertainty: ViewMut, smoothing: Smoothing) {
    let len = values.len();
    assert!(gradient.len() == len && mean.len() == len && uncertainty.len() == len, "importance shapes");
    match values.device() {
        Device::Cpu => {
            cpu::smooth(values.host(), gradient.host(), mean.host(), uncertainty.host(), smoothing)
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::smooth(gpu, values, gradient, &mean, &uncertainty, smoothing),
    }
}

/// The scores of all triplets from m and u.
pub fn scores(mean: View, uncertainty: View, deltas: &[Triplets], scores: ViewMut) {
    match mean.device() {
        Device::Cpu => cpu::scores(mean.host(), uncertainty.host(), deltas, scores.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::scores(gpu, mean, uncertainty, deltas, &scores),
    }
}

/// Sets the elements of d to 0 whose triplets have a 0 in `kept`, where the others have a 1.
pub fn keep(kept: View, deltas: &[Triplets], values: ViewMut) {
    match kept.device() {
        Device::Cpu => cpu::keep(kept.host(), deltas, values.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::keep(gpu, kept, deltas, &values),
    }
}
