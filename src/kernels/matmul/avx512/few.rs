//! Products of few rows, as decoding makes them: bound by memory, so each weight is read once, as it is kept, and
//! widened in a register.
//!
//! In `nn` an element is what the tiles of panels make of it, in `nt` LANES chains that are added up at the end.

use std::{arch::x86_64::*, ops::Range};

use super::{DEPTH, check, weights::Weights};
use crate::kernels::{
    avx512::{LANES, load_or, transposed},
    cpu::{Shared, vectorised, with_scratch},
    matmul::{Start, cpu::fill},
    q8::BLOCK,
    tasks::{cut, each},
};

/// Rows up to which this is the faster way where a task takes columns, and where it takes rows of weights.
pub const ROWS: usize = 24;
pub const ROWS_TURNED: usize = 24;
/// Rows of x that meet weights in registers at a time.
const TALL: usize = 8;
/// Floats of sums that a task works on at a time: half of a first-level cache.
const NEAR: usize = 6144;
/// Rows of weights that a sum takes up before it goes back to memory.
const DEEP: usize = 8;
/// Rows of weights whose sums run side by side.
const SIDE: usize = 4;
/// Rows of x that meet a row of weights at a time where there are enough: widening is a fifth of the work then.
const HIGH: usize = 8;
/// Rows of weights that all rows of x meet before the next ones.
const STRETCH: usize = 96;
/// Rows of weights that are fetched ahead of `rows` in FP16: as many bytes of every form.
const fn ahead<W: Weights>(rows: usize) -> usize {
    rows * W::LINE / 32
}

/// `y (n, cols) = start + x (n, rows) W (rows, cols)`, a task for each stretch of columns.
///
/// # Safety
/// The CPU has AVX-512 F; w is of this shape.
#[target_feature(enable = "avx512f")]
pub unsafe fn nn<W: Weights>(
    x: &[f32],
    w: W,
    (n, rows, cols): (usize, usize, usize),
    start: Start,
    y: &mut [f32],
) {
    assert!(x.len() >= n * rows && y.len() >= n * cols, "shapes of few rows");
    check(start, n, cols);
    let out = Shared::new(y);
    // A cache line belongs to one task.
    let (tasks, width) = cut(cols, W::LINE);
    let side = (NEAR / n.max(1)).next_multiple_of(W::LINE.max(BLOCK));
    each(tasks, |task| {
        let end = cols.min((task + 1) * width);
        with_scratch(n * side, |sums| {
            for first in (task * width..end).step_by(side) {
                let columns = first..end.min(first + side);
                fill(start, out, 0..n, cols, first, columns.len());
                let sums = &mut sums[..n * columns.len()];
                for k in (0..rows).step_by(DEPTH) {
                    let steps = k..rows.min(k + DEPTH);
                    sums.fill(0.0);
                    // SAFETY: the caller found the instructions; the weights have these rows and columns.
                    unsafe { stretch(x, w, (n, rows), (steps, columns.clone()), Shared::new(sums)) }
                    for (row, sums) in sums.chunks_exact(columns.len()).enumerate() {
                        // SAFETY: these columns are this task's.
                        let y = unsafe { out.range(row * cols + first, columns.len()) };
                        vectorised(
                            #[inline(always)]
                            || y.iter_mut().zip(sums).for_each(|(y, sum)| *y += sum),
                        );
                    }
                }
            }
        });
    });
}

/// Adds `x[.., steps] W[steps, columns]` to `y (n, columns)`.
///
/// # Safety
/// The CPU has AVX-512 F; the weights have these rows and columns.
#[target_feature(enable = "avx512f")]
unsafe fn stretch<W: Weights>(
    x: &[f32],
    w: W,
    (n, rows): (usize, usize),
    (steps, columns): (Range<usize>, Range<usize>),
    y: Shared,
) {
    for k in steps.clone().step_by(DEEP) {
        for row in (0..n).step_by(TALL) {
            let (x, columns) = (&x[row * rows..], columns.clone());
            let piece = Piece { x, w, rows, columns, first_row: row, y };
            // SAFETY: the caller's promise.
            unsafe {
                match DEEP.min(steps.end - k) {
                    DEEP => piece.rows::<DEEP>(k, n - row),
                    left => (k..k + left).for_each(|k| piece.rows::<1>(k, n - row)),
                }
            }
        }
    }
}

/// Columns of a product, and what they are made of.
struct Piece<'a, W> {
    /// From the first row on.
    x: &'a [f32],
    w: W,
    /// Of the weights.
    rows: usize,
    columns: Range<usize>,
    /// Of y.
    first_row: usize,
    /// `(.., columns)`.
    y: Shared,
}

impl<W: Weights> Piece<'_, W> {
    /// [`Piece::deep`] for up to TALL of `n` rows.
    ///
    /// # Safety
    /// As [`Piece::deep`].
    #[target_feature(enable = "avx512f")]
    unsafe fn rows<const D: usize>(&self, k: usize, n: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match n {
                0 => {}
                1 => self.deep::<D, 1>(k),
                2 => self.deep::<D, 2>(k),
                3 => self.deep::<D, 3>(k),
                4 => self.deep::<D, 4>(k),
                5 => self.deep::<D, 5>(k),
                6 => self.deep::<D, 6>(k),
                7 => self.deep::<D, 7>(k),
                _ => self.deep::<D, TALL>(k),
            }
        }
    }

    /// Adds D rows of weights, from row `k` on, to R rows of y.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, w is of this shape, there are R rows, and the columns belong to the caller.
    #[target_feature(enable = "avx512f")]
    unsafe fn deep<const D: usize, const R: usize>(&self, k: usize) {
        let Self { x, w, rows, .. } = *self;
        let (first, width) = (self.columns.start, self.columns.len());
        let body = width - width % LANES;
        let to = |r: usize, column: usize| self.y.at((self.first_row + r) * width + column);
        for strip in (0..body).step_by(W::STRIP) {
            // SAFETY: the weights have these rows and columns.
            let scales: [W::Scales; D] = std::array::from_fn(|d| unsafe { w.scales(k + d, first + strip) });
            // Elements of x, times the scale of each block that they will meet.
            let factors: [[W::Factors; D]; R] = std::array::from_fn(|r| {
                // SAFETY: as above.
                std::array::from_fn(|d| unsafe { W::factors(x[r * rows + k + d], scales[d]) })
            });
            let end = body.min(strip.saturating_add(W::STRIP));
            let pairs = end - (end - strip) % (2 * LANES);
            // SAFETY: D rows of weights and R rows of y have the vectors up to `end`; prefetches may point anywhere.
            unsafe {
                for column in (strip..pairs).step_by(2 * LANES) {
                    if self.first_row == 0 && column % W::LINE == 0 {
                        for d in 0..D {
                            _mm_prefetch::<_MM_HINT_T0>(w.address(k + ahead::<W>(DEEP) + d, first + column));
                        }
                    }
                    let factors = (&factors, (column - strip) / BLOCK);
                    add::<W, D, R, 2>(w, k, first + column, factors, |r| to(r, column));
                }
                if pairs < end {
                    let factors = (&factors, (pairs - strip) / BLOCK);
                    add::<W, D, R, 1>(w, k, first + pairs, factors, |r| to(r, pairs));
                }
            }
        }
        for column in first + body..first + width {
            for row in 0..R {
                // SAFETY: an element of the caller's columns.
                let y = unsafe { self.y.range((self.first_row + row) * width + column - first, 1) };
                for d in 0..D {
                    y[0] = x[row * rows + k + d].mul_add(w.value(k + d, column), y[0]);
                }
            }
        }
    }
}

/// Adds D rows of weights, from row `k` on, to the V vectors at `y(row)` of R rows; the vectors lie in one block.
///
/// # Safety
/// The CPU has AVX-512 F, weights and y have these vectors, and those of y belong to the caller.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
unsafe fn add<W: Weights, const D: usize, const R: usize, const V: usize>(
    w: W,
    k: usize,
    column: usize,
    (factors, block): (&[[W::Factors; D]; R], usize),
    y: impl Fn(usize) -> *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let weights: [[__m512; V]; D] =
            std::array::from_fn(|d| std::array::from_fn(|v| w.raw(k + d, column + v * LANES)));
        for r in 0..R {
            let y = y(r);
            let mut sums: [__m512; V] = std::array::from_fn(|v| _mm512_loadu_ps(y.add(v * LANES)));
            for d in 0..D {
                let factor = _mm512_set1_ps(W::factor(&factors[r][d], block));
                for v in 0..V {
                    sums[v] = _mm512_fmadd_ps(factor, weights[d][v], sums[v]);
                }
            }
            for v in 0..V {
                _mm512_storeu_ps(y.add(v * LANES), sums[v]);
            }
        }
    }
}

/// `y (n, rows) = start + x (n, cols) W^T`, a task for each stretch of rows of W.
///
/// # Safety
/// As [`nn`].
#[target_feature(enable = "avx512f")]
pub unsafe fn nt<W: Weights>(
    x: &[f32],
    w: W,
    (n, rows, cols): (usize, usize, usize),
    start: Start,
    y: &mut [f32],
) {
    assert!(x.len() >= n * cols && y.len() >= n * rows, "shapes of few rows");
    check(start, n, rows);
    let out = Shared::new(y);
    let (tasks, length) = cut(rows, LANES);
    each(tasks, |task| {
        let first = task * length;
        let end = rows.min(first + length);
        fill(start, out, 0..n, rows, first, end - first);
        // A stretch of weights stays in the second-level cache for all rows of x, and those of a block in the first.
        for stretch in (first..end).step_by(STRETCH) {
            let stretch = stretch..end.min(stretch + STRETCH);
            let mut row = 0;
            while row < n {
                let x = &x[row * cols..];
                let to = |i: usize, at: usize| out.at((row + i) * rows + at);
                // SAFETY: the caller found the instructions; these columns of y are this task's.
                row += unsafe {
                    match n - row {
                        HIGH.. => blocks::<W, 2, HIGH>(x, w, cols, stretch.clone(), to),
                        4.. => blocks::<W, SIDE, 4>(x, w, cols, stretch.clone(), to),
                        _ => blocks::<W, SIDE, 1>(x, w, cols, stretch.clone(), to),
                    }
                };
            }
        }
    });
}

/// Adds the products of the first R rows of x with rows `stretch` of weights, S at a time, to the elements at
/// `y(row, weights' row)`; returns R.
///
/// # Safety
/// The CPU has AVX-512 F, the weights have these rows, and the elements of y belong to the caller.
#[target_feature(enable = "avx512f")]
unsafe fn blocks<W: Weights, const S: usize, const R: usize>(
    x: &[f32],
    w: W,
    depth: usize,
    stretch: Range<usize>,
    y: impl Fn(usize, usize) -> *mut f32,
) -> usize {
    let whole = stretch.end - stretch.len() % S;
    // SAFETY: the caller's promise.
    unsafe {
        for first in (stretch.start..whole).step_by(S) {
            Block { x, w, first, depth }.add::<S, R>(|row| y(row, first));
        }
        for first in whole..stretch.end {
            Block { x, w, first, depth }.add::<1, R>(|row| y(row, first));
        }
    }
    R
}

/// Rows of x `(.., depth)` beside rows of weights `(.., depth)` from `first` on.
#[derive(Clone, Copy)]
struct Block<'a, W> {
    x: &'a [f32],
    w: W,
    first: usize,
    depth: usize,
}

impl<W: Weights> Block<'_, W> {
    /// Adds the products of each of the first R rows of x with each of the first S rows of weights to the S elements
    /// at `y(row)`.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, the weights have these rows, and the elements of y belong to the caller.
    #[target_feature(enable = "avx512f")]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers: 9 against 19 GB/s")]
    unsafe fn add<const S: usize, const R: usize>(&self, y: impl Fn(usize) -> *mut f32) {
        let Self { w, first, depth, .. } = *self;
        assert!(self.x.len() >= R * depth, "rows of a block");
        let mut sums = [[_mm512_setzero_ps(); S]; R];
        let whole = depth - depth % LANES;
        for strip in (0..whole).step_by(W::STRIP) {
            // SAFETY: the weights have these rows.
            let factors: [W::Factors; S] =
                std::array::from_fn(|s| unsafe { W::factors(1.0, w.scales(first + s, strip)) });
            for at in (strip..whole.min(strip.saturating_add(W::STRIP))).step_by(LANES) {
                let block = (at - strip) / BLOCK;
                // SAFETY: R rows of x and S of weights have a vector here; prefetches may point anywhere.
                unsafe {
                    let x: [__m512; R] =
                        std::array::from_fn(|r| _mm512_loadu_ps(self.x.as_ptr().add(r * depth + at)));
                    for s in 0..S {
                        if at % W::LINE == 0 {
                            _mm_prefetch::<_MM_HINT_T0>(w.address(first + ahead::<W>(SIDE) + s, at));
                        }
                        let weights = W::times(w.raw(first + s, at), &factors[s], block);
                        for r in 0..R {
                            sums[r][s] = _mm512_fmadd_ps(x[r], weights, sums[r][s]);
                        }
                    }
                }
            }
        }
        // Not even zeros are added where there is no rest: a vector of them lies outside the last row.
        for s in 0..if whole < depth { S } else { 0 } {
            // SAFETY: the weights have these rows.
            let weights = unsafe { w.part(first + s, whole, depth - whole) };
            for r in 0..R {
                let x = load_or(&self.x[r * depth..][whole..depth], 0.0);
                sums[r][s] = _mm512_fmadd_ps(x, weights, sums[r][s]);
            }
        }
        let totals = totals(sums.as_flattened());
        for (r, totals) in totals[..R * S].chunks_exact(S).enumerate() {
            for (s, total) in totals.iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe { *y(r).add(s) += total };
            }
        }
    }
}

/// The sum of the lanes of each of up to LANES vectors, which always has the same order: lane i and i + 8, then of
/// these i and i + 4, and so on.
#[inline]
#[target_feature(enable = "avx512f")]
fn totals(sums: &[__m512]) -> [f32; LANES] {
    let mut totals = [0f32; LANES];
    if sums.len() <= 4 {
        for (total, &sum) in totals.iter_mut().zip(sums) {
            *total = _mm512_reduce_add_ps(sum);
        }
        return totals;
    }
    let mut square = [_mm512_setzero_ps(); LANES];
    square[..sums.len()].copy_from_slice(sums);
    let mut lanes = transposed(square);
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = _mm512_add_ps(lanes[i], lanes[i + half]);
        }
    }
    // SAFETY: as many floats as a vector has.
    unsafe { _mm512_storeu_ps(totals.as_mut_ptr(), lanes[0]) };
    totals
}
