//! How weights come into a register: widened from FP16, or codes times their scale.

use std::arch::x86_64::*;

use half::f16;

use crate::kernels::{
    avx512::{LANES, widened},
    matmul::matrix::{STRIP, strip_start},
    q8::{self, BLOCK},
};

/// A frozen matrix, row-major, whose sizes its user knows. A value is a raw one times the factor of its block.
pub trait Weights: Copy + Send + Sync {
    /// Weights in a cache line.
    const LINE: usize;
    /// Columns that one [`Weights::Scales`] serves.
    const STRIP: usize;
    /// What belongs to a stretch of a row besides its elements.
    type Scales: Copy;
    /// A number times these.
    type Factors: Copy;

    /// For columns of `row` from `column` on.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, and the matrix this element.
    unsafe fn scales(self, row: usize, column: usize) -> Self::Scales;

    /// `x` times the scales.
    ///
    /// # Safety
    /// The CPU has AVX-512 F.
    unsafe fn factors(x: f32, scales: Self::Scales) -> Self::Factors;

    /// The one of the block that is `block` blocks behind the first.
    fn factor(factors: &Self::Factors, block: usize) -> f32;

    /// Raw values times their factor, which is [`Weights::factors`] of 1.
    ///
    /// # Safety
    /// The CPU has AVX-512 F.
    unsafe fn times(raw: __m512, factors: &Self::Factors, block: usize) -> __m512;

    /// LANES raw values of `row` from `column` on, a multiple of LANES.
    ///
    /// # Safety
    /// The CPU has AVX-512 F; the row has these values.
    unsafe fn raw(self, row: usize, column: usize) -> __m512;

    /// `count` values, scaled, and zeros behind them.
    ///
    /// # Safety
    /// The CPU has AVX-512 F; the row has these values.
    unsafe fn part(self, row: usize, column: usize, count: usize) -> __m512;

    /// One value.
    fn value(self, row: usize, column: usize) -> f32;

    /// Where an element would lie; perhaps outside.
    fn address(self, row: usize, column: usize) -> *const i8;
}

/// FP16: in rows of as many, or with IN_STRIPS in strips of so many rows, see [`Layout`](crate::kernels::matmul::Layout);
/// LANES columns from a multiple of LANES on lie in one strip.
#[derive(Clone, Copy)]
pub struct Halves<'a, const IN_STRIPS: bool>(pub &'a [f16], pub usize);

impl<const IN_STRIPS: bool> Halves<'_, IN_STRIPS> {
    /// Place of an element.
    #[inline]
    fn at(self, row: usize, column: usize) -> usize {
        if IN_STRIPS { strip_start(self.1, row, column) } else { row * self.1 + column }
    }
}

impl<const IN_STRIPS: bool> Weights for Halves<'_, IN_STRIPS> {
    const LINE: usize = STRIP;
    const STRIP: usize = usize::MAX;
    type Scales = ();
    type Factors = f32;

    #[inline]
    unsafe fn scales(self, _: usize, _: usize) {}

    #[inline]
    unsafe fn factors(x: f32, (): ()) -> f32 {
        x
    }

    #[inline]
    fn factor(factor: &f32, _: usize) -> f32 {
        *factor
    }

    #[inline]
    unsafe fn times(raw: __m512, _: &f32, _: usize) -> __m512 {
        raw
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn raw(self, row: usize, column: usize) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(self.0.as_ptr().add(self.at(row, column)).cast())) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn part(self, row: usize, column: usize, count: usize) -> __m512 {
        widened(&self.0[self.at(row, column)..][..count])
    }

    #[inline]
    fn value(self, row: usize, column: usize) -> f32 {
        self.0[self.at(row, column)].to_f32()
    }

    #[inline]
    fn address(self, row: usize, column: usize) -> *const i8 {
        self.0.as_ptr().wrapping_add(self.at(row, column)).cast()
    }
}

/// Codes and their scales, in rows of as many codes.
#[derive(Clone, Copy)]
pub struct Codes<'a>(pub &'a [i8], pub &'a [f16], pub usize);

impl Weights for Codes<'_> {
    const LINE: usize = 64;
    const STRIP: usize = LANES * BLOCK;
    type Scales = __m512;
    type Factors = [f32; LANES];

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn scales(self, row: usize, column: usize) -> __m512 {
        let Self(_, scales, cols) = self;
        let scales = &scales[row * q8::blocks(cols) + column / BLOCK..];
        // Scales of the next row may stand behind, and are used by nobody.
        widened(&scales[..scales.len().min(LANES)])
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn factors(x: f32, scales: __m512) -> [f32; LANES] {
        let mut factors = [0f32; LANES];
        // SAFETY: as many floats as a vector has.
        unsafe { _mm512_storeu_ps(factors.as_mut_ptr(), _mm512_mul_ps(_mm512_set1_ps(x), scales)) };
        factors
    }

    #[inline]
    fn factor(factors: &[f32; LANES], block: usize) -> f32 {
        // No check: a strip has LANES blocks.
        factors[block % LANES]
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn times(raw: __m512, factors: &[f32; LANES], block: usize) -> __m512 {
        _mm512_mul_ps(raw, _mm512_set1_ps(Self::factor(factors, block)))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn raw(self, row: usize, column: usize) -> __m512 {
        let Self(codes, _, cols) = self;
        // SAFETY: the caller's promise.
        let codes = unsafe { _mm_loadu_si128(codes.as_ptr().add(row * cols + column).cast()) };
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn part(self, row: usize, column: usize, count: usize) -> __m512 {
        let Self(codes, scales, cols) = self;
        let scale = widened(&scales[row * q8::blocks(cols) + column / BLOCK..][..1]);
        let codes = &codes[row * cols + column..][..count];
        let mut padded = [0; LANES];
        let codes = match codes.as_chunks::<LANES>().0.first() {
            Some(whole) => whole,
            None => {
                padded[..count].copy_from_slice(codes);
                &padded
            }
        };
        // SAFETY: a vector of codes.
        let codes = _mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(codes.as_ptr().cast()) });
        _mm512_mul_ps(_mm512_cvtepi32_ps(codes), _mm512_broadcastss_ps(_mm512_castps512_ps128(scale)))
    }

    #[inline]
    fn value(self, row: usize, column: usize) -> f32 {
        let Self(codes, scales, cols) = self;
        f32::from(codes[row * cols + column]) * scales[row * q8::blocks(cols) + column / BLOCK].to_f32()
    }

    #[inline]
    fn address(self, row: usize, column: usize) -> *const i8 {
        let Self(codes, _, cols) = self;
        codes.as_ptr().wrapping_add(row * cols + column)
    }
}
