//! The penalty on factors whose vectors are not orthonormal, and its gradient.
//!
//! ```text
//! R(P) = || P P^T - I ||_F        dR/dP = 2 / R (P P^T - I) P,  0 where R is
//! ```
//!
//! `P (r, n)` is a factor of a delta: A as it is saved, or `B (n, r)`, which is `P^T`. The loss of AdaLoRA has the mean of R
//! over all factors (Zhang et al. 2023, section 3.1, with squares; PEFT takes the root).

use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

/// A factor in the flat buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Factor {
    /// Its first value.
    pub at: usize,
    /// Number r of vectors.
    pub rank: usize,
    /// Length n of a vector.
    pub len: usize,
    /// Whether it is stored as `(n, r)`.
    pub transposed: bool,
    /// Its first value in the scratch of [`backward`].
    pub gram: usize,
}

impl Factor {
    /// Floats of scratch for a factor of rank `rank`: `P P^T - I`, and a part of its sums.
    pub fn scratch(rank: usize) -> usize {
        2 * rank * rank
    }
}

/// `gradient += weight dR/dP` for each of `factors`, which lie apart in `values` and `gradient`; `grams` is scratch.
pub fn backward(values: View, factors: &[Factor], weight: f32, gradient: ViewMut, grams: ViewMut) {
    match values.device() {
        Device::Cpu => cpu::backward(values.host(), factors, weight, gradient.host(), grams.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(gpu, values, factors, weight, &gradient, &grams),
    }
}
