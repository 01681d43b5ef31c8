//! BF16 values two by two: a vector of floats carries LANES pairs, each with its earlier value in the low half.
//!
//! They are loaded, stored and transposed as floats are, and never added or multiplied as floats.

use std::arch::x86_64::*;

use super::{Simd, avx512::Avx512, load_or, store};

const LANES: usize = Avx512::LANES;

/// Rounds two vectors of floats to 32 consecutive BF16 values: 16 pairs of neighbours.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub fn paired(low: __m512, high: __m512) -> __m512 {
    // SAFETY: both are 64 bytes, and every pattern of bits is valid.
    unsafe { std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(high, low)) }
}

/// Pair i consists of value i of `low` and value i of `high`, rounded.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub fn interleaved(low: __m512, high: __m512) -> __m512 {
    const ORDER: [u16; 2 * LANES] = {
        let mut order = [0; 2 * LANES];
        let mut i = 0;
        while i < LANES {
            order[2 * i] = i as u16;
            order[2 * i + 1] = (LANES + i) as u16;
            i += 1;
        }
        order
    };
    // SAFETY: 2 LANES numbers of 16 bits are a vector.
    let order = unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) };
    let values = _mm512_castps_si512(paired(low, high));
    _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, values))
}

/// Rounds a row to pairs of neighbours; the partner of an odd last value is 0.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub fn round(s: Avx512, row: &[f32], to: &mut [f32]) {
    let mut vectors = row.chunks_exact(2 * LANES);
    let (whole, rest) = to.split_at_mut(row.len() / 2 / LANES * LANES);
    for (from, to) in vectors.by_ref().zip(whole.chunks_exact_mut(LANES)) {
        // SAFETY: both have these elements.
        unsafe {
            let from = from.as_ptr();
            s.store(to.as_mut_ptr(), paired(s.load(from), s.load(from.add(LANES))));
        }
    }
    let left = vectors.remainder();
    if !left.is_empty() {
        let (low, high) = left.split_at(LANES.min(left.len()));
        store(s, &mut rest[..left.len().div_ceil(2)], paired(load_or(s, low, 0.0), load_or(s, high, 0.0)));
    }
}

/// The same in place for whole vectors: the pairs fill the first half of the row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub fn round_in_place(s: Avx512, row: &mut [f32]) {
    assert!(row.len().is_multiple_of(LANES), "whole vectors");
    for at in (0..row.len()).step_by(2 * LANES) {
        let low = load_or(s, &row[at..], 0.0);
        let high = load_or(s, &row[row.len().min(at + LANES)..], 0.0);
        store(s, &mut row[at / 2..][..LANES], paired(low, high));
    }
}
