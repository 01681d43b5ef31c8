//! Products of small batches, as in decoding: memory-bound, so each weight is read once in its stored form and
//! widened in a register.
//!
//! In `nn` an element has the same bits as with panels; in `nt` it is LANES chains that are added at the end.

use std::ops::Range;

use super::{
    check,
    weights::{ScaledRows, Weights},
};
use crate::{
    device::cpu::{
        Shared,
        simd::{MOST, Simd, array, load_or},
        tasks::{cut, each},
        vectorised, with_scratch,
    },
    kernels::{
        matmul::{InitialValue, PanelRange, ProductShape, cpu::fill},
        q8::BLOCK,
    },
};

/// Largest batch for which this path beats packed panels, in `nn` and in `nt`.
pub const ROWS: usize = 24;
pub const ROWS_TRANSPOSED: usize = 24;
/// Rows of x that are multiplied with weights in registers at a time.
const TALL: usize = 8;
/// Floats of sums that a task keeps at a time: half of a first-level cache.
const NEAR: usize = 6144;
/// Rows of weights that are added to a sum before it is stored: with 32 vector registers, and with 16.
const DEEP: usize = 8;
const LESS_DEEP: usize = 4;
/// Rows of weights that are summed side by side.
const SIDE: usize = 4;
/// Rows of x that share a widened row of weights, where the batch and the registers are large enough: widening is a
/// fifth of the work then.
const HIGH: usize = 8;
/// Rows of weights that all rows of x are multiplied with before the next ones.
const STRETCH: usize = 96;
/// Rows of weights that are prefetched, for `rows` rows of FP16; other forms prefetch the same number of bytes.
const fn ahead<W: Weights>(rows: usize) -> usize {
    rows * W::LINE / 32
}

/// `y (n, outer) = start + x (n, inner) W (inner, outer)`, a task for each range of columns.
pub fn nn<S: Simd, W: ScaledRows>(
    s: S,
    x: &[f32],
    w: W,
    shape: ProductShape,
    start: InitialValue,
    y: &mut [f32],
) {
    shape.check(x, y);
    let ProductShape { n, inner: rows, outer: cols } = shape;
    check(start, n, cols);
    let out = Shared::new(y);
    // No cache line is shared by two tasks.
    let (tasks, width) = cut(cols, W::LINE);
    let side = (NEAR / n.max(1)).next_multiple_of(W::LINE.max(BLOCK));
    each(tasks, |task| {
        let end = cols.min((task + 1) * width);
        with_scratch(n * side, |sums| {
            for first in (task * width..end).step_by(side) {
                let columns = first..end.min(first + side);
                fill(start, out, 0..n, cols, first, columns.len());
                let sums = &mut sums[..n * columns.len()];
                for k in (0..rows).step_by(S::PANEL.0) {
                    let depth = S::PANEL.0.min(rows - k);
                    let range = PanelRange { inner: k, depth, outer: first, width: columns.len() };
                    sums.fill(0.0);
                    // SAFETY: the weights have these rows and columns.
                    unsafe { stretch(s, x, w, shape, range, Shared::new(sums)) }
                    for (row, sums) in sums.chunks_exact(columns.len()).enumerate() {
                        // SAFETY: these columns belong to this task.
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

/// Adds the product of x with a part of W to `y (n, width)`.
///
/// # Safety
/// The weights have these rows and columns.
unsafe fn stretch<S: Simd, W: ScaledRows>(
    s: S,
    x: &[f32],
    w: W,
    ProductShape { n, inner: rows, .. }: ProductShape,
    range: PanelRange,
    y: Shared,
) {
    let deep = if S::MANY_REGISTERS { DEEP } else { LESS_DEEP };
    let (steps, columns) = (range.inner..range.inner + range.depth, range.outer..range.outer + range.width);
    for k in steps.clone().step_by(deep) {
        for row in (0..n).step_by(TALL) {
            let (x, columns) = (&x[row * rows..], columns.clone());
            let piece = Piece { x, w, rows, columns, first_row: row, y };
            // SAFETY: the caller's promise.
            unsafe {
                match deep.min(steps.end - k) {
                    left if left < deep => (k..k + left).for_each(|k| piece.rows::<S, 1>(s, k, n - row)),
                    DEEP => piece.rows::<S, DEEP>(s, k, n - row),
                    _ => piece.rows::<S, LESS_DEEP>(s, k, n - row),
                }
            }
        }
    }
}

/// A range of columns of a product, with its operands.
struct Piece<'a, W> {
    /// Rows of x, from the first.
    x: &'a [f32],
    w: W,
    /// Columns of the weights.
    rows: usize,
    columns: Range<usize>,
    /// The same columns in y.
    first_row: usize,
    /// `(.., columns)`.
    y: Shared,
}

impl<W: ScaledRows> Piece<'_, W> {
    /// [`Piece::deep`] of up to TALL of `n` rows.
    ///
    /// # Safety
    /// As [`Piece::deep`].
    unsafe fn rows<S: Simd, const D: usize>(&self, s: S, k: usize, n: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match n {
                0 => {}
                1 => self.deep::<S, D, 1>(s, k),
                2 => self.deep::<S, D, 2>(s, k),
                3 => self.deep::<S, D, 3>(s, k),
                4 => self.deep::<S, D, 4>(s, k),
                5 => self.deep::<S, D, 5>(s, k),
                6 => self.deep::<S, D, 6>(s, k),
                7 => self.deep::<S, D, 7>(s, k),
                _ => self.deep::<S, D, TALL>(s, k),
            }
        }
    }

    /// Adds the products with D rows of weights, from row `k`, to R rows of y.
    ///
    /// # Safety
    /// w is of this shape, there are R rows, and the columns belong to the caller.
    unsafe fn deep<S: Simd, const D: usize, const R: usize>(&self, s: S, k: usize) {
        let Self { x, w, rows, first_row, y, .. } = *self;
        let (first, width) = (self.columns.start, self.columns.len());
        let body = width - width % S::LANES;
        // By value: fields read through a reference would be read again after every store to y.
        s.enter(
            #[inline(always)]
            move || {
                let to = |r: usize, column: usize| y.at((first_row + r) * width + column);
                for strip in (0..body).step_by(W::STRIP) {
                    // Elements of x times the scales of the blocks that they are multiplied with.
                    // SAFETY: the weights have these rows and columns.
                    let zero = unsafe { w.factors(s, 0.0, k, first + strip) };
                    let mut factors = [[zero; D]; R];
                    for (r, factors) in factors.iter_mut().enumerate() {
                        for (d, factor) in factors.iter_mut().enumerate() {
                            // SAFETY: as above.
                            *factor = unsafe { w.factors(s, x[r * rows + k + d], k + d, first + strip) };
                        }
                    }
                    let end = body.min(strip.saturating_add(W::STRIP));
                    let pairs = end - (end - strip) % (2 * S::LANES);
                    // SAFETY: D rows of weights and R rows of y have the vectors up to `end`.
                    unsafe {
                        for column in (strip..pairs).step_by(2 * S::LANES) {
                            if first_row == 0 && column % W::LINE == 0 {
                                for d in 0..D {
                                    s.fetch(w.address(k + ahead::<W>(DEEP) + d, first + column));
                                }
                            }
                            let factors = BlockFactors { all: &factors, block: (column - strip) / BLOCK };
                            add::<S, W, D, R, 2>(s, w, k, first + column, factors, |r| to(r, column));
                        }
                        if pairs < end {
                            let factors = BlockFactors { all: &factors, block: (pairs - strip) / BLOCK };
                            add::<S, W, D, R, 1>(s, w, k, first + pairs, factors, |r| to(r, pairs));
                        }
                    }
                }
                for column in first + body..first + width {
                    for row in 0..R {
                        // SAFETY: an element of the caller's columns.
                        let y = unsafe { y.range((first_row + row) * width + column - first, 1) };
                        for d in 0..D {
                            y[0] = x[row * rows + k + d].mul_add(w.value(k + d, column), y[0]);
                        }
                    }
                }
            },
        );
    }
}

/// Elements of x times the scales of D rows of weights, for R rows of x, and the block whose scales apply.
struct BlockFactors<'a, F, const D: usize, const R: usize> {
    all: &'a [[F; D]; R],
    block: usize,
}

/// Adds the products with D rows of weights, from row `k`, to the V vectors at `y(row)` of R rows. The vectors belong
/// to one block.
///
/// # Safety
/// Weights and y have these vectors, and those of y belong to the caller.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
unsafe fn add<S: Simd, W: ScaledRows, const D: usize, const R: usize, const V: usize>(
    s: S,
    w: W,
    k: usize,
    column: usize,
    BlockFactors { all: factors, block }: BlockFactors<W::Factors, D, R>,
    y: impl Fn(usize) -> *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut weights = [[s.zero(); V]; D];
        for d in 0..D {
            for v in 0..V {
                weights[d][v] = w.raw(s, k + d, column + v * S::LANES);
            }
        }
        for r in 0..R {
            let y = y(r);
            let mut sums = [s.zero(); V];
            for v in 0..V {
                sums[v] = s.load(y.add(v * S::LANES));
            }
            for d in 0..D {
                let factor = s.splat(W::factor(&factors[r][d], block));
                for v in 0..V {
                    sums[v] = s.fma(factor, weights[d][v], sums[v]);
                }
            }
            for v in 0..V {
                s.store(y.add(v * S::LANES), sums[v]);
            }
        }
    }
}

/// `y (n, outer) = start + x (n, inner) W^T`, `W (outer, inner)`, a task for each range of rows of W.
pub fn nt<S: Simd, W: Weights>(
    s: S,
    x: &[f32],
    w: W,
    shape: ProductShape,
    start: InitialValue,
    y: &mut [f32],
) {
    shape.check(x, y);
    let ProductShape { n, inner: cols, outer: rows } = shape;
    check(start, n, rows);
    let out = Shared::new(y);
    let (tasks, length) = cut(rows, MOST);
    each(tasks, |task| {
        let first = task * length;
        let end = rows.min(first + length);
        fill(start, out, 0..n, rows, first, end - first);
        // A range of weights stays in the second-level cache for all rows of x, and those of a block in the first.
        let most = if n == 1 { end - first } else { STRETCH };
        for stretch in (first..end).step_by(most.max(1)) {
            let stretch = stretch..end.min(stretch + most);
            let mut row = 0;
            while row < n {
                let x = &x[row * cols..];
                let to = |i: usize, at: usize| out.at((row + i) * rows + at);
                // SAFETY: these columns of y belong to this task.
                row += unsafe {
                    match n - row {
                        HIGH.. if S::MANY_REGISTERS => {
                            blocks::<S, W, 2, HIGH>(s, x, w, cols, stretch.clone(), to)
                        }
                        4.. if S::MANY_REGISTERS => {
                            blocks::<S, W, SIDE, 4>(s, x, w, cols, stretch.clone(), to)
                        }
                        4.. => blocks::<S, W, 2, 4>(s, x, w, cols, stretch.clone(), to),
                        _ => blocks::<S, W, SIDE, 1>(s, x, w, cols, stretch.clone(), to),
                    }
                };
            }
        }
    });
}

/// Adds the products of the first R rows of x with rows `stretch` of weights, C at a time, to the elements at
/// `y(row, weights' row)`; returns R.
///
/// The C rows are far from each other: a Zen 4 reads four streams at 33 GB/s where it reads one at 20.
///
/// # Safety
/// The weights have these rows, and the elements of y belong to the caller.
unsafe fn blocks<S: Simd, W: Weights, const C: usize, const R: usize>(
    s: S,
    x: &[f32],
    w: W,
    depth: usize,
    stretch: Range<usize>,
    y: impl Fn(usize, usize) -> *mut f32,
) -> usize {
    let apart = stretch.len() / C;
    // SAFETY: the caller's promise.
    unsafe {
        for first in stretch.start..stretch.start + apart {
            Block { x, w, first, apart, depth }.add::<S, C, R>(s, |row| y(row, first));
        }
        for first in stretch.start + C * apart..stretch.end {
            Block { x, w, first, apart, depth }.add::<S, 1, R>(s, |row| y(row, first));
        }
    }
    R
}

/// Rows of x `(.., depth)`, and every `apart`-th row of weights `(.., depth)` from `first`.
#[derive(Clone, Copy)]
struct Block<'a, W> {
    x: &'a [f32],
    w: W,
    first: usize,
    apart: usize,
    depth: usize,
}

impl<W: Weights> Block<'_, W> {
    /// Adds the products of each of the first R rows of x with each of the first C rows of weights to C elements from
    /// `y(row)`, which are `apart` from each other.
    ///
    /// # Safety
    /// The weights have these rows, and the elements of y belong to the caller.
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers: 9 against 19 GB/s")]
    unsafe fn add<S: Simd, const C: usize, const R: usize>(&self, s: S, y: impl Fn(usize) -> *mut f32) {
        let Self { x: rows, w, first, apart, depth } = *self;
        assert!(rows.len() >= R * depth, "rows of a block");
        s.enter(
            #[inline(always)]
            move || {
                let mut sums = [[s.zero(); C]; R];
                let whole = depth - depth % S::LANES;
                for strip in (0..whole).step_by(W::STRIP) {
                    // SAFETY: the weights have these rows.
                    let mut factors = [unsafe { w.factors(s, 1.0, first, strip) }; C];
                    for (c, factors) in factors.iter_mut().enumerate().skip(1) {
                        // SAFETY: as above.
                        *factors = unsafe { w.factors(s, 1.0, first + c * apart, strip) };
                    }
                    for at in (strip..whole.min(strip.saturating_add(W::STRIP))).step_by(S::LANES) {
                        let block = (at - strip) / BLOCK;
                        // SAFETY: R rows of x and C of weights have a vector here.
                        unsafe {
                            let mut x = [s.zero(); R];
                            for r in 0..R {
                                x[r] = s.load(rows.as_ptr().add(r * depth + at));
                            }
                            for c in 0..C {
                                if at % W::LINE == 0 {
                                    s.fetch(w.address(first + ahead::<W>(SIDE) + c * apart, at));
                                }
                                let weights = w.values(s, (first + c * apart, at), &factors[c], block);
                                for r in 0..R {
                                    sums[r][c] = s.fma(x[r], weights, sums[r][c]);
                                }
                            }
                        }
                    }
                }
                // Without a rest nothing is read: even masked, the vector would be outside the last row.
                for c in 0..if whole < depth { C } else { 0 } {
                    // SAFETY: the weights have these rows.
                    let weights = unsafe { w.part(s, first + c * apart, whole, depth - whole) };
                    for r in 0..R {
                        let x = load_or(s, &rows[r * depth..][whole..depth], 0.0);
                        sums[r][c] = s.fma(x, weights, sums[r][c]);
                    }
                }
                let totals = totals(s, &sums);
                for (r, totals) in totals.iter().enumerate() {
                    for (c, total) in totals.iter().enumerate() {
                        // SAFETY: the caller's promise.
                        unsafe { *y(r).add(c * apart) += total };
                    }
                }
            },
        );
    }
}

/// The sum of the lanes of each vector, always in the order of [`Simd::sum`].
#[inline(always)]
fn totals<S: Simd, const C: usize, const R: usize>(s: S, sums: &[[S::Floats; C]; R]) -> [[f32; C]; R] {
    let mut totals = [[0f32; C]; R];
    let (all, sums) = (totals.as_flattened_mut(), sums.as_flattened());
    if sums.len() <= 4 {
        for (total, &sum) in all.iter_mut().zip(sums) {
            *total = s.sum(sum);
        }
        return totals;
    }
    for (totals, sums) in all.chunks_mut(S::LANES).zip(sums.chunks(S::LANES)) {
        let mut lanes = s.transposed(array(
            s.zero(),
            #[inline(always)]
            |i| if i < sums.len() { sums[i] } else { s.zero() },
        ));
        for half in [8, 4, 2, 1] {
            for i in 0..if half < S::LANES { half } else { 0 } {
                lanes[i] = s.add(lanes[i], lanes[i + half]);
            }
        }
        // SAFETY: no more sums than elements.
        unsafe { s.store_first(totals.as_mut_ptr(), totals.len(), lanes[0]) };
    }
    totals
}
