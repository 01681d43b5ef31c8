//! The largest logit of each row, which greedy decoding takes: a device then sends the host 8 bytes a row and not the
//! whole vocabulary.

use crate::device::{Device, View, ViewMut};

#[cfg(feature = "cuda")]
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

/// Numbers of a row in the result of [`forward`].
pub const NUMBERS: usize = 2;

/// The choice for a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Largest {
    /// The lowest id of the largest logit, or of a logit that is not finite.
    pub id: u32,
    /// That logit.
    pub logit: f32,
}

impl Largest {
    /// The choice in the numbers of a row.
    pub fn of(numbers: &[u32]) -> Option<Self> {
        let [id, bits] = numbers else { return None };
        Some(Self { id: *id, logit: f32::from_bits(*bits) })
    }
}

/// `to (rows, 2)`, U32: the id of the first logit that is not finite, or else the lowest id of the largest one, and the
/// bits of that logit, for each row of `logits (rows, v)`, FP32.
pub fn forward(logits: View, to: ViewMut, v: usize) {
    assert!(v > 0 && to.len() * v == logits.len() * NUMBERS, "shapes of an argmax");
    match to.device() {
        Device::Cpu => {
            let to: &mut [u32] = to.host();
            for (row, to) in logits.host::<f32>().chunks_exact(v).zip(to.chunks_exact_mut(NUMBERS)) {
                let Largest { id, logit } = reference::row(row);
                to.copy_from_slice(&[id, logit.to_bits()]);
            }
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(gpu, logits, to, v),
    }
}
