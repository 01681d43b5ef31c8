//! Tiles of pairs of BF16 values.

use std::arch::x86_64::*;

use super::{ROWS, Simd, Tile};
use crate::device::cpu::simd::avx512::Avx512;

impl Tile {
    /// As [`Tile::rows`], where a float of x and of the panel is a pair of BF16 values, the earlier step in its low
    /// half: a step adds the products of both, in FP32. Meanwhile two rows of floats, with two for each step, are
    /// prefetched into the second-level cache.
    ///
    /// # Safety
    /// As [`Tile::rows`], and the CPU has AVX-512 BF16.
    #[inline]
    pub unsafe fn rows_of_pairs(&self, s: Avx512, rows: usize, next: [*const f32; 2]) {
        type S = Avx512;
        // SAFETY: the caller's promise.
        unsafe { sized!(self, s, rows, run_pairs, next) }
    }

    /// # Safety
    /// As [`Tile::rows_of_pairs`].
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn run_pairs<S: Simd<Floats = __m512>, const M: usize, const V: usize>(
        &self,
        s: S,
        next: [*const f32; 2],
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            self.steps::<S, M, V>(
                s,
                #[inline(always)]
                |x, w, sum| _mm512_dpbf16_ps(sum, pairs(x), pairs(w)),
                #[inline(always)]
                |i| {
                    for row in next {
                        // 4 steps are 8 floats of a row.
                        _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(8 * i).cast());
                    }
                },
            );
        }
    }
}

/// A vector of pairs of BF16 values, from the vector of floats that it is loaded as.
#[inline(always)]
fn pairs(vector: __m512) -> __m512bh {
    // SAFETY: both are 64 bytes, and every pattern of bits is valid.
    unsafe { std::mem::transmute(vector) }
}
