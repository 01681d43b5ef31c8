//! Loads of weights into registers: widened from FP16, or codes of 8 or 4 bits times their scale.

use half::f16;

use crate::{
    device::cpu::simd::{MOST, Simd, widened},
    kernels::{
        matmul::matrix::{STRIP, strip_start},
        q8::{self, BLOCK},
    },
};

/// A frozen matrix whose sizes its user knows.
pub trait Weights: Copy + Send + Sync {
    /// Weights in a cache line.
    const LINE: usize;
    /// Columns that one [`Weights::Factors`] serves.
    const STRIP: usize;
    /// The scales of a range of a row, times a number.
    type Factors: Copy;

    /// `x` times the scales of columns of `row` from `column` on.
    ///
    /// # Safety
    /// The matrix has this element.
    unsafe fn factors<S: Simd>(self, s: S, x: f32, row: usize, column: usize) -> Self::Factors;

    /// LANES values of `row` from `column` on, a multiple of LANES. `factors` are [`Weights::factors`] of 1 from a column
    /// `block` blocks before.
    ///
    /// # Safety
    /// The row has these values.
    unsafe fn values<S: Simd>(
        self,
        s: S,
        at: (usize, usize),
        factors: &Self::Factors,
        block: usize,
    ) -> S::Floats;

    /// `count` values of one block, scaled, LANES at most; the other lanes are 0.
    ///
    /// # Safety
    /// The row has these values.
    unsafe fn part<S: Simd>(self, s: S, row: usize, column: usize, count: usize) -> S::Floats;

    /// Where scales are left out of [`Weights::raw_part`]: those of `count` rows from `row` on, LANES at most, in the block
    /// of `column`.
    ///
    /// # Safety
    /// The matrix has these elements.
    #[inline(always)]
    unsafe fn row_factors<S: Simd>(
        self,
        _: S,
        _row: usize,
        _column: usize,
        _count: usize,
    ) -> Option<S::Floats> {
        None
    }

    /// [`Weights::part`], perhaps without the scale.
    ///
    /// # Safety
    /// The row has these values.
    #[inline(always)]
    unsafe fn raw_part<S: Simd>(self, s: S, row: usize, column: usize, count: usize) -> S::Floats {
        // SAFETY: the caller's promise.
        unsafe { self.part(s, row, column, count) }
    }

    /// Address of an element, perhaps outside the matrix; for prefetching.
    fn address(self, row: usize, column: usize) -> *const i8;
}

/// Weights whose scales belong to columns of a row: a value is a raw value times the factor of its block.
pub trait ScaledRows: Weights {
    /// The factor of the block that is `block` blocks after the first.
    fn factor(factors: &Self::Factors, block: usize) -> f32;

    /// LANES raw values of `row` from `column` on, a multiple of LANES.
    ///
    /// # Safety
    /// The row has these values.
    unsafe fn raw<S: Simd>(self, s: S, row: usize, column: usize) -> S::Floats;

    /// One value, scaled.
    fn value(self, row: usize, column: usize) -> f32;
}

/// FP16 with its number of columns, or with IN_STRIPS in strips with its number of rows, see
/// [`Layout`](crate::kernels::matmul::Layout); LANES columns from a multiple of LANES on lie in one strip.
#[derive(Clone, Copy)]
pub struct F16Weights<'a, const IN_STRIPS: bool>(pub &'a [f16], pub usize);

impl<const IN_STRIPS: bool> F16Weights<'_, IN_STRIPS> {
    /// PanelRange of an element.
    #[inline(always)]
    fn at(self, row: usize, column: usize) -> usize {
        if IN_STRIPS { strip_start(self.1, row, column) } else { row * self.1 + column }
    }
}

impl<const IN_STRIPS: bool> Weights for F16Weights<'_, IN_STRIPS> {
    const LINE: usize = STRIP;
    const STRIP: usize = usize::MAX;
    type Factors = f32;

    #[inline(always)]
    unsafe fn factors<S: Simd>(self, _: S, x: f32, _: usize, _: usize) -> f32 {
        x
    }

    #[inline(always)]
    unsafe fn values<S: Simd>(self, s: S, (row, column): (usize, usize), _: &f32, _: usize) -> S::Floats {
        // SAFETY: the caller's promise.
        unsafe { self.raw(s, row, column) }
    }

    #[inline(always)]
    unsafe fn part<S: Simd>(self, s: S, row: usize, column: usize, count: usize) -> S::Floats {
        widened(s, &self.0[self.at(row, column)..][..count])
    }

    #[inline(always)]
    fn address(self, row: usize, column: usize) -> *const i8 {
        self.0.as_ptr().wrapping_add(self.at(row, column)).cast()
    }
}

impl<const IN_STRIPS: bool> ScaledRows for F16Weights<'_, IN_STRIPS> {
    #[inline(always)]
    fn factor(factor: &f32, _: usize) -> f32 {
        *factor
    }

    #[inline(always)]
    unsafe fn raw<S: Simd>(self, s: S, row: usize, column: usize) -> S::Floats {
        // SAFETY: the caller's promise.
        unsafe { s.widen(self.0.as_ptr().add(self.at(row, column))) }
    }

    #[inline(always)]
    fn value(self, row: usize, column: usize) -> f32 {
        self.0[self.at(row, column)].to_f32()
    }
}

/// 8-bit codes in rows, their scales, and the number of columns.
#[derive(Clone, Copy)]
pub struct Codes<'a>(pub &'a [i8], pub &'a [f16], pub usize);

/// 8-bit codes in strips, their scales strip by strip, and the number of rows.
#[derive(Clone, Copy)]
pub struct CodesInStrips<'a>(pub &'a [i8], pub &'a [f16], pub usize);

impl CodesInStrips<'_> {
    #[inline(always)]
    fn scale(self, row: usize, column: usize) -> f32 {
        self.1[column / STRIP * self.2 + row].to_f32()
    }
}

/// Scales of a row in strips that are widened at a time: they are not neighbours.
const STRIPS: usize = 8;

// A strip of a row is one block.
impl Weights for CodesInStrips<'_> {
    const LINE: usize = STRIP;
    const STRIP: usize = STRIPS * BLOCK;
    type Factors = [f32; MOST];

    #[inline(always)]
    unsafe fn factors<S: Simd>(self, s: S, x: f32, row: usize, column: usize) -> [f32; MOST] {
        let Self(_, scales, rows) = self;
        let (mut halves, mut factors) = ([f16::ZERO; MOST], [0f32; MOST]);
        for (i, half) in halves.iter_mut().enumerate().take(STRIPS) {
            // Past the last strip there are none.
            *half = scales.get((column / STRIP + i) * rows + row).copied().unwrap_or_default();
        }
        let x = s.splat(x);
        for at in (0..STRIPS).step_by(S::LANES) {
            // SAFETY: the length of a vector.
            unsafe { s.store(factors[at..].as_mut_ptr(), s.mul(x, s.widen(halves[at..].as_ptr()))) };
        }
        factors
    }

    #[inline(always)]
    unsafe fn values<S: Simd>(
        self,
        s: S,
        (row, column): (usize, usize),
        factors: &[f32; MOST],
        block: usize,
    ) -> S::Floats {
        // SAFETY: the caller's promise.
        let codes = unsafe { s.whole(self.0.as_ptr().add(strip_start(self.2, row, column))) };
        // No check: `block` is one of the strip's.
        s.mul(codes, s.splat(factors[block % MOST]))
    }

    #[inline(always)]
    unsafe fn part<S: Simd>(self, s: S, row: usize, column: usize, count: usize) -> S::Floats {
        // SAFETY: the caller's promise.
        let codes = unsafe { self.raw_part(s, row, column, count) };
        s.mul(codes, s.splat(self.scale(row, column)))
    }

    #[inline(always)]
    unsafe fn row_factors<S: Simd>(self, s: S, row: usize, column: usize, count: usize) -> Option<S::Floats> {
        Some(widened(s, &self.1[column / STRIP * self.2 + row..][..count]))
    }

    #[inline(always)]
    unsafe fn raw_part<S: Simd>(self, s: S, row: usize, column: usize, count: usize) -> S::Floats {
        whole_part(s, &self.0[strip_start(self.2, row, column)..][..count])
    }

    #[inline(always)]
    fn address(self, row: usize, column: usize) -> *const i8 {
        self.0.as_ptr().wrapping_add(strip_start(self.2, row, column))
    }
}

/// Codes as floats, LANES at most; the other lanes are 0.
#[inline(always)]
fn whole_part<S: Simd>(s: S, codes: &[i8]) -> S::Floats {
    if codes.len() >= S::LANES {
        // SAFETY: a vector of codes.
        return unsafe { s.whole(codes.as_ptr()) };
    }
    let mut padded = [0; MOST];
    padded[..codes.len()].copy_from_slice(codes);
    // SAFETY: as above.
    unsafe { s.whole(padded.as_ptr()) }
}

/// Scales that are widened at a time.
const SCALES: usize = 16;

impl Weights for Codes<'_> {
    const LINE: usize = 64;
    const STRIP: usize = SCALES * BLOCK;
    type Factors = [f32; SCALES];

    #[inline(always)]
    unsafe fn factors<S: Simd>(self, s: S, x: f32, row: usize, column: usize) -> [f32; SCALES] {
        let Self(_, scales, cols) = self;
        let mut scales = &scales[row * q8::blocks(cols) + column / BLOCK..];
        let mut padded = [f16::ZERO; SCALES];
        if scales.len() < SCALES {
            padded[..scales.len()].copy_from_slice(scales);
            scales = &padded;
        }
        let (mut factors, x) = ([0f32; SCALES], s.splat(x));
        for at in (0..SCALES).step_by(S::LANES) {
            // SAFETY: the length of a vector. It may end with scales of the next row, which are not used.
            unsafe { s.store(factors[at..].as_mut_ptr(), s.mul(x, s.widen(scales[at..].as_ptr()))) };
        }
        factors
    }

    #[inline(always)]
    unsafe fn values<S: Simd>(
        self,
        s: S,
        (row, column): (usize, usize),
        factors: &[f32; SCALES],
        block: usize,
    ) -> S::Floats {
        // SAFETY: the caller's promise.
        unsafe { s.mul(self.raw(s, row, column), s.splat(Self::factor(factors, block))) }
    }

    #[inline(always)]
    unsafe fn part<S: Simd>(self, s: S, row: usize, column: usize, count: usize) -> S::Floats {
        let Self(_, scales, cols) = self;
        let scale = scales[row * q8::blocks(cols) + column / BLOCK];
        // SAFETY: the caller's promise, and a vector of scales.
        unsafe { s.mul(self.raw_part(s, row, column, count), s.widen([scale; MOST].as_ptr())) }
    }

    #[inline(always)]
    unsafe fn row_factors<S: Simd>(self, s: S, row: usize, column: usize, count: usize) -> Option<S::Floats> {
        let Self(_, scales, cols) = self;
        let mut factors = [f16::ZERO; MOST];
        let scales = scales[row * q8::blocks(cols) + column / BLOCK..].iter().step_by(q8::blocks(cols));
        factors.iter_mut().zip(scales).take(count).for_each(|(to, &scale)| *to = scale);
        // SAFETY: a vector of scales.
        Some(unsafe { s.widen(factors.as_ptr()) })
    }

    #[inline(always)]
    unsafe fn raw_part<S: Simd>(self, s: S, row: usize, column: usize, count: usize) -> S::Floats {
        let Self(codes, _, cols) = self;
        whole_part(s, &codes[row * cols + column..][..count])
    }

    #[inline(always)]
    fn address(self, row: usize, column: usize) -> *const i8 {
        let Self(codes, _, cols) = self;
        codes.as_ptr().wrapping_add(row * cols + column)
    }
}

impl ScaledRows for Codes<'_> {
    #[inline(always)]
    fn factor(factors: &[f32; SCALES], block: usize) -> f32 {
        // No check: `block` is one of the strip's.
        factors[block % SCALES]
    }

    #[inline(always)]
    unsafe fn raw<S: Simd>(self, s: S, row: usize, column: usize) -> S::Floats {
        let Self(codes, _, cols) = self;
        // SAFETY: the caller's promise.
        unsafe { s.whole(codes.as_ptr().add(row * cols + column)) }
    }

    #[inline(always)]
    fn value(self, row: usize, column: usize) -> f32 {
        let Self(codes, scales, cols) = self;
        f32::from(codes[row * cols + column]) * scales[row * q8::blocks(cols) + column / BLOCK].to_f32()
    }
}
