//! AdamW whose two moments are held in 8 bits, block by block.
//!
//! Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization": a block of [`BLOCK`] elements
//! has one FP32 scale, the largest absolute value in it, and a code of 8 bits an element, an index
//! into a fixed book of 256 values in -1 ..= 1 (`codebook.rs`); an element is `book[code] * scale`.
//! The signed book serves the first moment, the unsigned one the second.
//!
//! An update of a block: decode both moments, update as [`super::adamw`] does, with `w` moved by the
//! fresh FP32 moments, and encode them again. `scale = min(max |x|, f32::MAX)`; the code is that of the
//! value nearest to `x / scale`, of two equally near ones that closer to zero. A second moment above
//! zero never gets the code of zero, but that of the smallest value (3.25e-7): `m / sqrt(v)` of an element
//! whose gradients are small beside its neighbours' would grow by up to `1 / sqrt(1 - b2)`, 32 times.
//!
//! Blocks begin anew with every tensor, whose last block may be shorter. A tensor below [`SMALLEST`]
//! elements keeps FP32 moments. An element's two moments take 2 + 8/256 bytes instead of 8.

use super::adamw::Update;
use crate::device::{Device, View, ViewMut};

mod codebook;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod reference;
#[cfg(test)]
mod tests;

/// Elements that share a scale.
pub const BLOCK: usize = 256;
/// Fewest elements of a tensor with 8-bit moments.
pub const SMALLEST: usize = 4096;
/// Most elements of a piece, which a task takes: 128 blocks.
const PIECE: usize = 1 << 15;

/// Consecutive elements of one tensor: whole blocks, except at the end of the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Number of elements; a multiple of 256 except at the end of a tensor.
    pub len: usize,
    /// Whether the moments are 8-bit.
    pub coded: bool,
}

impl Piece {
    /// Number of scales of each moment: blocks of an 8-bit piece, else 0.
    pub fn blocks(self) -> usize {
        if self.coded { self.len.div_ceil(BLOCK) } else { 0 }
    }
}

/// The pieces of a tensor of `len` elements, in order; 8-bit if `coded`.
pub fn pieces(len: usize, coded: bool) -> impl Iterator<Item = Piece> {
    (0..len).step_by(PIECE).map(move |start| Piece { len: PIECE.min(len - start), coded })
}

/// Both moments of consecutive pieces; each list holds the parts of its pieces one after another.
pub struct Moments<'a> {
    /// First moments of FP32 pieces, F32.
    pub first: ViewMut<'a>,
    /// Second moments of FP32 pieces, F32.
    pub second: ViewMut<'a>,
    /// First moments of 8-bit pieces: codes, U8.
    pub first_codes: ViewMut<'a>,
    /// One scale for each of these blocks, F32.
    pub first_scales: ViewMut<'a>,
    /// Second moments of 8-bit pieces: codes, U8.
    pub second_codes: ViewMut<'a>,
    /// One scale for each of these blocks, F32.
    pub second_scales: ViewMut<'a>,
}

/// Updates `values` and both moments of `pieces` in place.
pub fn update(values: ViewMut, gradient: View, moments: Moments, pieces: &[Piece], update: Update) {
    match gradient.device() {
        Device::Cpu => cpu::update(values.host(), gradient.host(), moments, pieces, update),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::update(gpu, values, gradient, moments, pieces, update),
    }
}
