//! Products of FP32 matrices with any strides, on one thread: the thin products of low-rank deltas, those of a
//! prefix's network, and attention of a few queries.

use std::ops::Range;

use super::{
    MOST, Simd, load_or, store,
    tile::{Begin, ROWS, Tile, pack_transposed},
};
use crate::device::cpu::{Strides, with_scratch};

/// Steps and columns of the right matrix that are packed at a time: 384 KiB, no more than a panel of frozen weights,
/// which a memory plan counts anyway.
const DEPTH: usize = 512;
const WIDTH: usize = 192;
/// Most floats of scratch that a product takes.
pub const SCRATCH: usize = DEPTH * WIDTH;

/// Most rows of the left matrix for which packing columns of the right one into a panel does not pay.
const SMALL_BATCH: usize = 4;
/// Columns summed side by side for such a small batch, each of at least LONG elements.
const SIDE: usize = 4;
const LONG: usize = 4 * MOST;

/// Floats of scratch for a product of `k` steps and `n` columns.
pub fn scratch(n: usize, k: usize) -> usize {
    k.min(DEPTH) * n.min(WIDTH).next_multiple_of(MOST)
}

/// A matrix in memory, by address and strides.
#[derive(Clone, Copy)]
pub struct Operand {
    /// Address of element (0, 0).
    pub data: *const f32,
    /// Distances to the other elements.
    pub strides: Strides,
}

impl Operand {
    fn at(self, row: usize, column: usize) -> *const f32 {
        self.data.wrapping_add(row * self.strides.row + column * self.strides.column)
    }
}

/// `dst (m, n) = dst or 0 + scale * lhs (m, k) rhs (k, n)`.
#[derive(Clone, Copy)]
pub struct Product {
    /// Rows m of lhs and dst.
    pub m: usize,
    /// Columns n of rhs and dst.
    pub n: usize,
    /// Terms k of each sum.
    pub k: usize,
    /// Address of the output.
    pub dst: *mut f32,
    /// Elements from a row of the output to the next.
    pub dst_row: usize,
    /// Whether the product is added to the output instead of replacing it.
    pub keep: bool,
    /// Left matrix `(m, k)`.
    pub lhs: Operand,
    /// Right matrix `(k, n)`.
    pub rhs: Operand,
    /// Factor of the product.
    pub scale: f32,
}

/// Computes a product.
///
/// # Safety
/// The matrices are valid for their strides, and nothing else uses `dst`.
pub unsafe fn product<S: Simd>(s: S, it: Product) {
    let Product { m, n, k, dst, dst_row, keep, lhs, rhs, scale } = it;
    if m <= SMALL_BATCH && lhs.strides.column == 1 && rhs.strides.row == 1 {
        // SAFETY: the caller's promise.
        return s.enter(
            #[inline(always)]
            move || unsafe { if k >= LONG { dots(s, it) } else { squares(s, it) } },
        );
    }
    // Whole vectors of a row can be read in place.
    let packed = rhs.strides.column != 1 || !n.is_multiple_of(S::LANES);
    with_scratch(if packed { scratch(n, k) } else { 0 }, |panel| {
        for j in (0..n).step_by(WIDTH) {
            let width = WIDTH.min(n - j);
            for step in (0..k.max(1)).step_by(DEPTH) {
                let depth = DEPTH.min(k - step);
                let begin = if keep || step > 0 { Begin::Keep } else { Begin::Zero };
                // SAFETY: the caller's promise.
                unsafe {
                    if packed {
                        s.enter(
                            #[inline(always)]
                            || pack(s, rhs, step..step + depth, j..j + width, panel),
                        );
                    }
                    for row in (0..m).step_by(ROWS) {
                        for group in (0..width).step_by(S::COLUMNS) {
                            let columns = S::COLUMNS.min(width - group);
                            let (panel, panel_row) = if packed {
                                (panel[group * depth..].as_ptr(), columns.next_multiple_of(S::LANES))
                            } else {
                                (rhs.at(step, j + group), rhs.strides.row)
                            };
                            let tile = Tile {
                                x: lhs.at(row, step),
                                x_row: lhs.strides.row,
                                x_step: lhs.strides.column,
                                panel,
                                panel_row,
                                depth,
                                y: dst.wrapping_add(row * dst_row + j + group),
                                y_row: dst_row,
                                columns,
                                begin,
                                scale,
                            };
                            tile.rows(s, ROWS.min(m - row));
                        }
                    }
                }
            }
        }
    });
}

/// The product of a small batch with a matrix whose columns are contiguous. An element is LANES chains of fused
/// multiply-adds that are added at the end.
///
/// # Safety
/// As [`product`]; rows of lhs and columns of rhs are contiguous.
#[inline(always)]
unsafe fn dots<S: Simd>(s: S, it: Product) {
    let Product { m, n, k, dst, dst_row, keep, lhs, rhs, scale } = it;
    for j in (0..n).step_by(SIDE) {
        let side = SIDE.min(n - j);
        for row in 0..m {
            // Where fewer than SIDE columns are left, some are computed again.
            let columns: [*const f32; SIDE] = std::array::from_fn(|i| rhs.at(0, j + i.min(side - 1)));
            let mut sums = [s.zero(); SIDE];
            for at in (0..k).step_by(S::LANES) {
                let count = S::LANES.min(k - at);
                // SAFETY: the caller's promise; only these elements are read, prefetches may point anywhere.
                unsafe {
                    let x = s.load_first(lhs.at(row, at), count, 0.0);
                    for (sum, column) in sums.iter_mut().zip(columns) {
                        let y = s.load_first(column.add(at), count, 0.0);
                        s.fetch(column.wrapping_add(at + SIDE * rhs.strides.column));
                        *sum = s.fma(x, y, *sum);
                    }
                }
            }
            for (i, sum) in sums.into_iter().enumerate().take(side) {
                // SAFETY: an element of dst.
                let y = unsafe { &mut *dst.add(row * dst_row + j + i) };
                let start = if keep { *y } else { 0.0 };
                *y = scale.mul_add(s.sum(sum), start);
            }
        }
    }
}

/// [`dots`] for short columns: LANES of them are transposed in registers. An element is one chain from step 0 to the
/// last.
///
/// # Safety
/// As [`dots`].
#[inline(always)]
unsafe fn squares<S: Simd>(s: S, it: Product) {
    let Product { m, n, k, dst, dst_row, keep, lhs, rhs, scale } = it;
    for j in (0..n).step_by(S::LANES) {
        let columns = S::LANES.min(n - j);
        let mut sums = [s.zero(); SMALL_BATCH];
        for at in (0..k).step_by(S::LANES) {
            let steps = S::LANES.min(k - at);
            let mut square = [s.zero(); MOST];
            for (i, vector) in square.iter_mut().enumerate().take(columns) {
                // SAFETY: the caller's promise; only these elements are read, prefetches may point anywhere.
                unsafe {
                    let from = rhs.at(at, j + i);
                    s.fetch(from.wrapping_add(S::LANES * rhs.strides.column));
                    *vector = s.load_first(from, steps, 0.0);
                }
            }
            let square = s.transposed(square);
            for (row, sum) in sums.iter_mut().enumerate().take(m) {
                for (step, &vector) in square.iter().enumerate().take(steps) {
                    // SAFETY: an element of lhs.
                    let x = s.splat(unsafe { *lhs.at(row, at + step) });
                    *sum = s.fma(x, vector, *sum);
                }
            }
        }
        for (row, &sum) in sums.iter().enumerate().take(m) {
            // SAFETY: elements of dst.
            unsafe {
                let y = dst.add(row * dst_row + j);
                let start = if keep { s.load_first(y, columns, 0.0) } else { s.zero() };
                let value = s.fma(s.splat(scale), sum, start);
                s.store_first(y, columns, value);
            }
        }
    }
}

/// Copies `rhs[steps, columns]` into groups of columns, in the layout of [`pack_transposed`].
///
/// # Safety
/// rhs is valid, and its rows or its columns are contiguous.
#[inline(always)]
unsafe fn pack<S: Simd>(s: S, rhs: Operand, steps: Range<usize>, columns: Range<usize>, panel: &mut [f32]) {
    let (step, depth, j, width) = (steps.start, steps.len(), columns.start, columns.len());
    if rhs.strides.column != 1 {
        assert_eq!(rhs.strides.row, 1, "a matrix with neither rows nor columns in one piece");
        return pack_transposed(
            s,
            panel,
            depth,
            width,
            #[inline(always)]
            |column, at, steps| {
                // SAFETY: the caller's promise: the column has these elements.
                load_or(s, unsafe { std::slice::from_raw_parts(rhs.at(step + at, j + column), steps) }, 0.0)
            },
        );
    }
    for group in (0..width).step_by(S::COLUMNS) {
        let count = S::COLUMNS.min(width - group);
        let columns = count.next_multiple_of(S::LANES);
        let to = &mut panel[group * depth..][..columns * depth];
        for (at, to) in to.chunks_exact_mut(columns).enumerate() {
            // SAFETY: the same of a row.
            let from = unsafe { std::slice::from_raw_parts(rhs.at(step + at, j + group), count) };
            for (from, to) in from.chunks(S::LANES).zip(to.chunks_exact_mut(S::LANES)) {
                store(s, to, load_or(s, from, 0.0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::simd::at_level;

    fn numbers(n: usize, seed: u64) -> Vec<f32> {
        (0..n as u64).map(|i| engraft_util::rng::uniform(seed, i) - 0.5).collect()
    }

    /// A product against sums in f64; the right matrix is stored by columns where `by_columns`.
    fn check(m: usize, n: usize, k: usize, by_columns: bool, keep: bool) {
        let (lhs, rhs, before) = (numbers(m * k, 1), numbers(n * k, 2), numbers(m * (n + 3), 3));
        let strides = if by_columns { Strides::columns(k) } else { Strides::rows(n) };
        let mut y = before.clone();
        let operand = |data: &[f32], strides| Operand { data: data.as_ptr(), strides };
        let (lhs_operand, rhs_operand) = (operand(&lhs, Strides::rows(k)), operand(&rhs, strides));
        let (dst, dst_row) = (y.as_mut_ptr(), n + 3);
        let it = Product { m, n, k, dst, dst_row, keep, lhs: lhs_operand, rhs: rhs_operand, scale: 1.5 };
        // SAFETY: the matrices have these sizes.
        let made = at_level!(s => unsafe { product(s, it) });
        assert!(made.is_some());
        for (at, (&y, &before)) in y.iter().zip(&before).enumerate() {
            let (i, j) = (at / (n + 3), at % (n + 3));
            if j >= n {
                assert_eq!(y, before, "{m} x {n} x {k}: after row {i}");
                continue;
            }
            let element = |step: usize| rhs[step * strides.row + j * strides.column];
            let sum: f64 = (0..k).map(|step| f64::from(lhs[i * k + step]) * f64::from(element(step))).sum();
            let expected = 1.5 * sum + if keep { f64::from(before) } else { 0.0 };
            let error = (f64::from(y) - expected).abs();
            assert!(
                error < 3e-7 * (k + 1) as f64,
                "{m} x {n} x {k}, by columns {by_columns}: {i} {j} off by {error}"
            );
        }
    }

    #[test]
    fn products_are_right_in_all_shapes_and_layouts() {
        if !crate::device::cpu::vectors() {
            return crate::testing::skip("no vector kernels at this level", false);
        }
        for m in [1, 3, SMALL_BATCH, SMALL_BATCH + 1, 8, 9, 17] {
            for n in [1, 5, 16, 33, 64, 401] {
                for k in [0, 1, 16, 19, LONG - 1, LONG, LONG + 7, 530] {
                    for (by_columns, keep) in [(false, false), (false, true), (true, false), (true, true)] {
                        check(m, n, k, by_columns, keep);
                    }
                }
            }
        }
    }
}
