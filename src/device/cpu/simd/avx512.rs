//! Vectors of AVX-512 F.

use std::arch::x86_64::*;

use half::f16;

use super::{MOST, Simd};

/// AVX-512 F.
#[derive(Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The CPU has AVX-512 F.
    pub unsafe fn new() -> Self {
        Self(())
    }
}

/// A mask of the first `count` lanes.
#[inline(always)]
fn first(count: usize) -> __mmask16 {
    if count >= 16 { !0 } else { (1 << count) - 1 }
}

// SAFETY of everything below: a value of the type proves that the CPU has the instructions; the caller vouches for
// memory.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all")]
unsafe impl Simd for Avx512 {
    type Floats = __m512;
    type Words = __m512i;
    type Table = __m512;
    const LANES: usize = 16;
    const MANY_REGISTERS: bool = true;
    // 24 sums, with a weight of each vector and elements of x. 8 rows of 3 vectors, 12 of 2 and 14 of 2 are 1 to 2%
    // slower.
    const VECTORS: usize = 4;
    // Again 24 sums, of the two vectors that a cache line holds.
    const TALL: (usize, usize) = (12, 2);
    const MASKS: bool = true;
    // 576 KiB.
    const PANEL: (usize, usize) = (768, 192);

    #[inline(always)]
    fn enter<R>(self, body: impl FnOnce() -> R) -> R {
        #[inline(never)]
        #[target_feature(enable = "avx512f")]
        fn with<R>(body: impl FnOnce() -> R) -> R {
            body()
        }
        unsafe { with(body) }
    }

    #[inline(always)]
    fn zero(self) -> __m512 {
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, vector: __m512) {
        unsafe { _mm512_storeu_ps(to, vector) }
    }

    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, count: usize, fill: f32) -> __m512 {
        unsafe { _mm512_mask_loadu_ps(_mm512_set1_ps(fill), first(count), from) }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize, vector: __m512) {
        unsafe { _mm512_mask_storeu_ps(to, first(count), vector) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fnma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn round(self, x: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<8>(x) }
    }

    #[inline(always)]
    fn scale(self, x: __m512, n: __m512) -> __m512 {
        unsafe { _mm512_scalef_ps(x, n) }
    }

    // The CPU's estimate, which has 14 bits, and one step of Newton's method.
    #[inline(always)]
    fn reciprocal(self, x: __m512) -> __m512 {
        unsafe {
            let estimate = _mm512_rcp14_ps(x);
            let error = _mm512_fnmadd_ps(x, estimate, _mm512_set1_ps(1.0));
            _mm512_fmadd_ps(estimate, error, estimate)
        }
    }

    #[inline(always)]
    fn unless_equal(self, value: __m512, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(a, b), value) }
    }

    #[inline(always)]
    fn unless_reaching(self, value: __m512, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NGE_UQ>(a, b), value) }
    }

    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(x) }
    }

    #[inline(always)]
    fn largest(self, x: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(x) }
    }

    #[inline(always)]
    unsafe fn widen(self, from: *const f16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn whole(self, from: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn words(self, from: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    fn table(self, values: &[f32; 16]) -> __m512 {
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }

    // The permutation reads the lowest four bits of an index.
    #[inline(always)]
    fn look_up(self, table: __m512, words: __m512i, n: usize) -> __m512 {
        unsafe {
            let index = _mm512_srl_epi32(words, _mm_cvtsi32_si128((8 * (n % 4) + 4 * (n / 4)) as i32));
            _mm512_permutexvar_ps(index, table)
        }
    }

    // In four rounds of pairs 1, 2, 4 and 8 apart.
    #[inline(always)]
    fn transposed(self, rows: [__m512; MOST]) -> [__m512; MOST] {
        unsafe {
            let mut a = rows;
            for i in (0..16).step_by(2) {
                a[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
                a[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
            }
            let mut b = a;
            for i in (0..16).step_by(4) {
                for j in 0..2 {
                    let (low, high) = (_mm512_castps_pd(a[i + j]), _mm512_castps_pd(a[i + j + 2]));
                    b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
                    b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
                }
            }
            // b[4 g + j] now holds, in quarter q, rows 4 g .. 4 g + 4 of column 4 q + j.
            let mut out = b;
            for j in 0..4 {
                let (p, q) = (b[j], b[4 + j]);
                let (r, s) = (b[8 + j], b[12 + j]);
                let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(p, q), _mm512_shuffle_f32x4::<0xdd>(p, q));
                let (even_2, odd_2) =
                    (_mm512_shuffle_f32x4::<0x88>(r, s), _mm512_shuffle_f32x4::<0xdd>(r, s));
                out[j] = _mm512_shuffle_f32x4::<0x88>(even, even_2);
                out[8 + j] = _mm512_shuffle_f32x4::<0xdd>(even, even_2);
                out[4 + j] = _mm512_shuffle_f32x4::<0x88>(odd, odd_2);
                out[12 + j] = _mm512_shuffle_f32x4::<0xdd>(odd, odd_2);
            }
            out
        }
    }

    #[inline(always)]
    fn fetch<T>(self, address: *const T) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}
