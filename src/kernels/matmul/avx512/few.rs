//! Products of few rows, as decoding makes them: bound by memory, so each weight is read once, in FP16, and
//! widened in a register.
//!
//! An element is one chain of fused multiply-adds (`nn`), or LANES chains that are added up at the end (`nt`).

use std::{arch::x86_64::*, ops::Range};

use half::f16;

use super::check;
use crate::kernels::{
    avx512::{LANES, load_or, widened},
    cpu::{Shared, cut, each},
    matmul::{Start, cpu::fill},
};

/// Rows up to which this is the faster way where a task takes columns, and where it takes rows of weights.
pub const ROWS: usize = 24;
pub const ROWS_TURNED: usize = 8;
/// Floats of y that a task works on at a time: half of a first-level cache.
const NEAR: usize = 6144;
/// Rows of weights that a sum takes up before it goes back to memory.
const DEEP: usize = 8;
/// Rows of weights whose sums run side by side.
const SIDE: usize = 4;
/// Cache lines of weights that are fetched ahead.
const AHEAD: usize = 8;
/// FP16 weights in a cache line.
const LINE: usize = 32;

/// `y (n, cols) = start + x (n, rows) W (rows, cols)`, a task for each stretch of columns.
///
/// # Safety
/// The CPU has AVX-512 F.
#[target_feature(enable = "avx512f")]
pub unsafe fn nn(x: &[f32], w: &[f16], (n, rows, cols): (usize, usize, usize), start: Start, y: &mut [f32]) {
    assert!(x.len() >= n * rows && w.len() >= rows * cols && y.len() >= n * cols, "shapes of few rows");
    check(start, n, cols);
    let out = Shared::new(y);
    // A cache line of weights belongs to one task.
    let (tasks, width) = cut(cols, LINE);
    let side = (NEAR / n.max(1)).next_multiple_of(LINE);
    each(tasks, |task| {
        let end = cols.min((task + 1) * width);
        for first in (task * width..end).step_by(side) {
            let columns = first..end.min(first + side);
            fill(start, out, n, cols, first, columns.len());
            for k in (0..rows).step_by(DEEP) {
                let piece = Piece { x, w, sizes: (n, rows, cols), columns: columns.clone(), y: out };
                // SAFETY: the caller found the instructions; the range was checked, these columns are this task's.
                unsafe {
                    match DEEP.min(rows - k) {
                        DEEP => piece.add::<DEEP>(k),
                        left => (k..k + left).for_each(|k| piece.add::<1>(k)),
                    }
                }
            }
        }
    });
}

/// Columns of y that a task works on, and what they are made of.
struct Piece<'a> {
    x: &'a [f32],
    w: &'a [f16],
    /// n, rows, cols.
    sizes: (usize, usize, usize),
    columns: Range<usize>,
    y: Shared,
}

impl Piece<'_> {
    /// Adds D rows of weights, from row `k` on.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, and the columns belong to the caller.
    #[target_feature(enable = "avx512f")]
    unsafe fn add<const D: usize>(&self, k: usize) {
        let (n, rows, cols) = self.sizes;
        let mut column = self.columns.start;
        // SAFETY: whole vectors inside the columns.
        unsafe {
            while column + 2 * LANES <= self.columns.end {
                self.vectors::<D, 2>(k, column);
                column += 2 * LANES;
            }
            if column + LANES <= self.columns.end {
                self.vectors::<D, 1>(k, column);
                column += LANES;
            }
        }
        for column in column..self.columns.end {
            for row in 0..n {
                // SAFETY: an element of the caller's columns.
                let y = unsafe { self.y.range(row * cols + column, 1) };
                for k in k..k + D {
                    y[0] = self.x[row * rows + k].mul_add(self.w[k * cols + column].to_f32(), y[0]);
                }
            }
        }
    }

    /// The same for V vectors of columns from `column` on: D x V vectors of weights stay in registers while the rows
    /// of x go by.
    ///
    /// # Safety
    /// As [`Piece::add`], and the vectors lie inside the columns.
    #[inline]
    #[target_feature(enable = "avx512f")]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
    unsafe fn vectors<const D: usize, const V: usize>(&self, k: usize, column: usize) {
        let (n, rows, cols) = self.sizes;
        // SAFETY: D rows of weights and n rows of y have V vectors from here on, x has D elements in n rows;
        // prefetches may point anywhere.
        unsafe {
            let weights: [[__m512; V]; D] = std::array::from_fn(|d| {
                let from = self.w.as_ptr().add((k + d) * cols + column);
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(D * cols).cast());
                std::array::from_fn(|v| _mm512_cvtph_ps(_mm256_loadu_si256(from.add(v * LANES).cast())))
            });
            for row in 0..n {
                let x = self.x.as_ptr().add(row * rows + k);
                let y = self.y.at(row * cols + column);
                let mut sums: [__m512; V] = std::array::from_fn(|v| _mm512_loadu_ps(y.add(v * LANES)));
                for d in 0..D {
                    let x = _mm512_set1_ps(*x.add(d));
                    for v in 0..V {
                        sums[v] = _mm512_fmadd_ps(x, weights[d][v], sums[v]);
                    }
                }
                for v in 0..V {
                    _mm512_storeu_ps(y.add(v * LANES), sums[v]);
                }
            }
        }
    }
}

/// `y (n, rows) = start + x (n, cols) W^T`, a task for each stretch of rows of W.
///
/// # Safety
/// The CPU has AVX-512 F.
#[target_feature(enable = "avx512f")]
pub unsafe fn nt(x: &[f32], w: &[f16], (n, rows, cols): (usize, usize, usize), start: Start, y: &mut [f32]) {
    assert!(x.len() >= n * cols && w.len() >= rows * cols && y.len() >= n * rows, "shapes of few rows");
    check(start, n, rows);
    let out = Shared::new(y);
    let (tasks, length) = cut(rows, LANES);
    each(tasks, |task| {
        let first = task * length;
        let end = rows.min(first + length);
        fill(start, out, n, rows, first, end - first);
        for at in (first..end).step_by(SIDE) {
            let mut row = 0;
            while row < n {
                let block = Block { x: &x[row * cols..], w: &w[at * cols..], depth: cols };
                let to = |i: usize| out.at((row + i) * rows + at);
                // SAFETY: the caller found the instructions; these columns of y are this task's.
                row += unsafe {
                    match (end - at >= SIDE, n - row) {
                        (true, 4..) => block.add::<SIDE, 4>(to),
                        (true, _) => block.add::<SIDE, 1>(to),
                        (false, _) => {
                            for i in at..end {
                                let single = Block { w: &w[i * cols..], ..block };
                                single.add::<1, 1>(|_| out.at(row * rows + i));
                            }
                            1
                        }
                    }
                };
            }
        }
    });
}

/// Rows of x `(.., depth)` beside rows of weights `(.., depth)`.
#[derive(Clone, Copy)]
struct Block<'a> {
    x: &'a [f32],
    w: &'a [f16],
    depth: usize,
}

impl Block<'_> {
    /// Adds the products of each of the first R rows of x with each of the first S rows of weights to the S elements
    /// at `y(row)`; returns R.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, and the elements of y belong to the caller.
    #[target_feature(enable = "avx512f")]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers: 9 against 19 GB/s")]
    unsafe fn add<const S: usize, const R: usize>(&self, y: impl Fn(usize) -> *mut f32) -> usize {
        let depth = self.depth;
        assert!(self.x.len() >= R * depth && self.w.len() >= S * depth, "rows of a block");
        let mut sums = [[_mm512_setzero_ps(); S]; R];
        let whole = depth - depth % LANES;
        for at in (0..whole).step_by(LANES) {
            // SAFETY: R rows of x and S of weights have a vector here; prefetches may point anywhere.
            unsafe {
                let x: [__m512; R] =
                    std::array::from_fn(|r| _mm512_loadu_ps(self.x.as_ptr().add(r * depth + at)));
                for s in 0..S {
                    let from = self.w.as_ptr().add(s * depth + at);
                    if at % LINE == 0 {
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD * LINE).cast());
                    }
                    let weights = _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()));
                    for r in 0..R {
                        sums[r][s] = _mm512_fmadd_ps(x[r], weights, sums[r][s]);
                    }
                }
            }
        }
        for s in 0..S {
            let weights = widened(&self.w[s * depth..][whole..depth]);
            for r in 0..R {
                let x = load_or(&self.x[r * depth..][whole..depth], 0.0);
                sums[r][s] = _mm512_fmadd_ps(x, weights, sums[r][s]);
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            for (s, sum) in sums.into_iter().enumerate() {
                // SAFETY: the caller's promise.
                unsafe { *y(r).add(s) += _mm512_reduce_add_ps(sum) };
            }
        }
        R
    }
}
