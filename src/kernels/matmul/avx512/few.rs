//! Products of few rows, as decoding makes them: bound by memory, so each weight is read once, in FP16, and
//! widened in a register.
//!
//! An element is one chain of fused multiply-adds (`nn`), or LANES chains that are added up at the end (`nt`).

use std::arch::x86_64::*;

use half::f16;

use super::check;
use crate::kernels::{
    avx512::{LANES, load_or, widened},
    cpu::{Shared, cut, each},
    matmul::{Start, cpu::fill},
};

/// Rows up to which this is the faster way.
pub const ROWS: usize = 8;
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
    // A cache line belongs to one task.
    let (tasks, width) = cut(cols, LINE);
    each(tasks, |task| {
        let first = task * width;
        let width = width.min(cols - first);
        fill(start, out, n, cols, first, width);
        for k in (0..rows).step_by(DEEP) {
            // SAFETY: the caller found the instructions; the range was checked, these columns are this task's.
            unsafe {
                match DEEP.min(rows - k) {
                    DEEP => deep::<DEEP>(x, w, (n, rows, cols), k, (first, width), out),
                    left => {
                        (k..k + left).for_each(|k| deep::<1>(x, w, (n, rows, cols), k, (first, width), out))
                    }
                }
            }
        }
    });
}

/// Adds D rows of weights, from row `k` on, to columns `first .. first + width` of y.
///
/// # Safety
/// The CPU has AVX-512 F, and the columns belong to the caller.
#[target_feature(enable = "avx512f")]
unsafe fn deep<const D: usize>(
    x: &[f32],
    w: &[f16],
    (n, rows, cols): (usize, usize, usize),
    k: usize,
    (first, width): (usize, usize),
    y: Shared,
) {
    let body = width - width % LANES;
    for column in (0..body).step_by(LANES) {
        // SAFETY: D rows of weights and n rows of y have LANES elements from here on; prefetches may point
        // anywhere.
        unsafe {
            let weights: [__m512; D] = std::array::from_fn(|d| {
                let from = w.as_ptr().add((k + d) * cols + first + column);
                if column % LINE == 0 {
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(D * cols).cast());
                }
                _mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))
            });
            for row in 0..n {
                let x = x.as_ptr().add(row * rows + k);
                let y = y.at(row * cols + first + column);
                let mut sum = _mm512_loadu_ps(y);
                for (d, &weights) in weights.iter().enumerate() {
                    sum = _mm512_fmadd_ps(_mm512_set1_ps(*x.add(d)), weights, sum);
                }
                _mm512_storeu_ps(y, sum);
            }
        }
    }
    for column in first + body..first + width {
        for row in 0..n {
            // SAFETY: an element of the caller's columns.
            let y = unsafe { y.range(row * cols + column, 1) };
            for d in 0..D {
                y[0] = x[row * rows + k + d].mul_add(w[(k + d) * cols + column].to_f32(), y[0]);
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
