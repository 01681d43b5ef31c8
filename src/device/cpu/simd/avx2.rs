//! Vectors of AVX2 with FMA and F16C, which CPUs have together.

use std::arch::x86_64::*;

use half::f16;

use super::{MOST, Simd};

/// AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    pub unsafe fn new() -> Self {
        Self(())
    }
}

/// A table of 16 floats.
#[derive(Clone, Copy)]
pub struct Table {
    /// Its values.
    halves: [__m256; 2],
    /// The bytes of its values, lowest first, twice.
    planes: [__m256i; 4],
}

// SAFETY of everything below: a value of the type proves that the CPU has the instructions; the caller vouches for
// memory.
#[allow(clippy::undocumented_unsafe_blocks, reason = "one reason for all")]
unsafe impl Simd for Avx2 {
    type Floats = __m256;
    type Words = __m256i;
    type Table = Table;
    const LANES: usize = 8;
    const MANY_REGISTERS: bool = false;
    // 12 sums, two weights and an element of x.
    const VECTORS: usize = 2;
    const TALL: (usize, usize) = (6, 2);
    // Masked stores take 20 to 40 times the time of whole vectors on Zen 2 and 3.
    const MASKS: bool = false;
    // 384 KiB: second-level caches of most of these CPUs are 512 KiB and larger. A depth of 384 is 5% slower.
    const PANEL: (usize, usize) = (768, 128);

    #[inline(always)]
    fn enter<R>(self, body: impl FnOnce() -> R) -> R {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn with<R>(body: impl FnOnce() -> R) -> R {
            body()
        }
        unsafe { with(body) }
    }

    #[inline(always)]
    fn zero(self) -> __m256 {
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, vector: __m256) {
        unsafe { _mm256_storeu_ps(to, vector) }
    }

    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, count: usize, fill: f32) -> __m256 {
        unsafe {
            if count >= 8 {
                return _mm256_loadu_ps(from);
            }
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes);
            let values = _mm256_maskload_ps(from, mask);
            _mm256_blendv_ps(_mm256_set1_ps(fill), values, _mm256_castsi256_ps(mask))
        }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize, vector: __m256) {
        unsafe {
            if count >= 8 {
                return _mm256_storeu_ps(to, vector);
            }
            let mut lanes = [0f32; 8];
            _mm256_storeu_ps(lanes.as_mut_ptr(), vector);
            for (i, lane) in lanes.into_iter().enumerate().take(count) {
                *to.add(i) = lane;
            }
        }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fnma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    fn round(self, x: __m256) -> __m256 {
        unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
    }

    // In two steps, each a power of two that is a normal number: only the second one rounds.
    #[inline(always)]
    fn scale(self, x: __m256, n: __m256) -> __m256 {
        unsafe {
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            let power = |n: __m256i| {
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))))
            };
            _mm256_mul_ps(_mm256_mul_ps(x, power(half)), power(_mm256_sub_epi32(n, half)))
        }
    }

    // A division: estimates differ between Intel and AMD CPUs.
    #[inline(always)]
    fn reciprocal(self, x: __m256) -> __m256 {
        unsafe { _mm256_div_ps(_mm256_set1_ps(1.0), x) }
    }

    #[inline(always)]
    fn unless_equal(self, value: __m256, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_and_ps(_mm256_cmp_ps::<_CMP_NEQ_UQ>(a, b), value) }
    }

    #[inline(always)]
    fn unless_reaching(self, value: __m256, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_and_ps(_mm256_cmp_ps::<_CMP_NGE_UQ>(a, b), value) }
    }

    #[inline(always)]
    fn sum(self, x: __m256) -> f32 {
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    fn largest(self, x: __m256) -> f32 {
        unsafe {
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    unsafe fn widen(self, from: *const f16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn whole(self, from: *const i8) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn words(self, from: *const u8) -> __m256i {
        unsafe { _mm256_loadu_si256(from.cast()) }
    }

    #[inline(always)]
    fn table(self, values: &[f32; 16]) -> Table {
        unsafe {
            let halves = [_mm256_loadu_ps(values.as_ptr()), _mm256_loadu_ps(values.as_ptr().add(8))];
            let mut bytes = [[0u8; 16]; 4];
            for (i, value) in values.iter().enumerate() {
                for (plane, byte) in value.to_le_bytes().into_iter().enumerate() {
                    bytes[plane][i] = byte;
                }
            }
            let plane = |i: usize| _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes[i].as_ptr().cast()));
            Table { halves, planes: [plane(0), plane(1), plane(2), plane(3)] }
        }
    }

    // The permutation reads the lowest three bits of an index; the fourth, as the sign, chooses the half of the table.
    #[inline(always)]
    fn look_up(self, Table { halves: [low, high], .. }: Table, words: __m256i, n: usize) -> __m256 {
        unsafe {
            let bit = (8 * (n % 4) + 4 * (n / 4)) as i32;
            let index = _mm256_srl_epi32(words, _mm_cvtsi32_si128(bit));
            let upper = _mm256_sll_epi32(words, _mm_cvtsi32_si128(28 - bit));
            let (low, high) = (_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index));
            _mm256_blendv_ps(low, high, _mm256_castsi256_ps(upper))
        }
    }

    // A table of bytes for each of the four bytes of a float, whose results are interleaved: 15 operations for 32 values,
    // where a permutation of floats takes 20. Bytes of four words change places first, so that a vector of the result
    // belongs to one byte of each word.
    #[inline(always)]
    fn look_up_four(self, Table { planes, .. }: Table, words: __m256i, upper: bool) -> [__m256; 4] {
        unsafe {
            let words = if upper { _mm256_srli_epi16::<4>(words) } else { words };
            let codes = _mm256_and_si256(words, _mm256_set1_epi8(15));
            let order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let codes = _mm256_shuffle_epi8(codes, _mm256_broadcastsi128_si256(order));
            let [a, b, c, d] = planes;
            let (a, b) = (_mm256_shuffle_epi8(a, codes), _mm256_shuffle_epi8(b, codes));
            let (c, d) = (_mm256_shuffle_epi8(c, codes), _mm256_shuffle_epi8(d, codes));
            let (low, high) = (_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b));
            let (low_2, high_2) = (_mm256_unpacklo_epi8(c, d), _mm256_unpackhi_epi8(c, d));
            [
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(low, low_2)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(low, low_2)),
                _mm256_castsi256_ps(_mm256_unpacklo_epi16(high, high_2)),
                _mm256_castsi256_ps(_mm256_unpackhi_epi16(high, high_2)),
            ]
        }
    }

    // In three rounds of pairs 1, 2 and 4 apart.
    #[inline(always)]
    fn transposed(self, rows: [__m256; MOST]) -> [__m256; MOST] {
        unsafe {
            let mut a = rows;
            for i in (0..8).step_by(2) {
                a[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
                a[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
            }
            let mut b = a;
            for i in (0..8).step_by(4) {
                for j in 0..2 {
                    let (low, high) = (_mm256_castps_pd(a[i + j]), _mm256_castps_pd(a[i + j + 2]));
                    b[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
                    b[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
                }
            }
            let mut out = b;
            for j in 0..4 {
                out[j] = _mm256_permute2f128_ps::<0x20>(b[j], b[4 + j]);
                out[4 + j] = _mm256_permute2f128_ps::<0x31>(b[j], b[4 + j]);
            }
            out
        }
    }

    #[inline(always)]
    fn fetch<T>(self, address: *const T) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}
