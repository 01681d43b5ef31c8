//! The frozen products, vectorised: weights are widened once into packed panels, and a tile of the output stays in
//! registers for all steps of a panel.
//!
//! Every element of the output is `start`, plus for each stretch of a panel's depth one chain of fused
//! multiply-adds from the first weight to the last. Neither the number of rows, nor the position of a row or column
//! in a tile or task, changes a bit. Small batches take another path, see [`small_batch`].

use std::ops::Range;

use half::f16;

use self::weights::{Codes, F16Weights, Weights};
use super::{Elements, InitialValue, Matrix};
use crate::{
    device::cpu::{
        Shared,
        simd::{
            Simd,
            product::SCRATCH as THIN,
            tile::{Begin, ROWS, Tile, pack_transposed},
        },
        tasks::{bands, each, parts},
        with_scratch,
    },
    kernels::q8::BLOCK,
};

#[cfg(target_arch = "x86_64")]
mod pairs;
mod small_batch;
mod strips;
mod weights;

#[cfg(target_arch = "x86_64")]
pub use self::pairs::shared;

/// No scratch is shared: products of pairs need x86-64.
#[cfg(not(target_arch = "x86_64"))]
pub fn shared(_: usize) -> usize {
    0
}

/// Rows of weights that are fetched ahead of their widening: each begins in a page of its own, which the CPU does
/// not foresee.
const AHEAD: usize = 6;

/// Floats of scratch of a task.
pub fn scratch<S: Simd>(_: S) -> usize {
    // Dense layers of a prefix's network use it, too.
    const { assert!(THIN <= S::PANEL.0 * S::PANEL.1) };
    #[cfg(target_arch = "x86_64")]
    const {
        assert!(S::LANES < 16 || pairs::SCRATCH <= S::PANEL.0 * S::PANEL.1)
    };
    S::PANEL.0 * S::PANEL.1
}

/// A panel's range in the weights: `outer` and `inner` as in `y (n, outer) = x (n, inner) V`.
#[derive(Clone, Copy)]
struct PanelRange {
    inner: usize,
    depth: usize,
    outer: usize,
    width: usize,
}

/// `y (n, cols) = start + x (n, rows) W`, or transposed `y (n, rows) = start + x (n, cols) W^T`.
pub fn frozen<S: Simd>(
    s: S,
    x: &[f32],
    (w, transposed): (Matrix, bool),
    start: InitialValue,
    y: &mut [f32],
    n: usize,
) {
    let shape = (n, w.rows, w.cols);
    let pairs = w.arithmetic.in_pairs();
    match w.host() {
        Elements::F16(values) => {
            with_weights(s, x, (F16Weights::<false>(values, w.cols), transposed), shape, pairs, start, y);
        }
        // Where rows would be rounded to BF16, those in strips are too.
        Elements::Strips(values, rows)
            if !transposed && n <= if pairs { small_batch::ROWS } else { strips::ROWS } =>
        {
            strips::nn(s, x, (values, rows), (n, w.cols), start, y);
        }
        Elements::Strips(values, rows) => {
            with_weights(s, x, (F16Weights::<true>(values, rows), transposed), shape, pairs, start, y);
        }
        Elements::Codes(codes, scales) => {
            with_weights(s, x, (Codes(codes, scales, w.cols), transposed), shape, pairs, start, y);
        }
    }
}

/// [`frozen`] for one form of weights `w (rows, cols)`.
fn with_weights<S: Simd, W: Weights>(
    s: S,
    x: &[f32],
    (w, transposed): (W, bool),
    (n, rows, cols): (usize, usize, usize),
    pairs: bool,
    start: InitialValue,
    y: &mut [f32],
) {
    let (inner, outer) = if transposed { (cols, rows) } else { (rows, cols) };
    if transposed && n <= small_batch::ROWS_TRANSPOSED {
        return small_batch::nt(s, x, w, (n, rows, cols), start, y);
    }
    if !transposed && n <= small_batch::ROWS {
        return small_batch::nn(s, x, w, (n, rows, cols), start, y);
    }
    #[cfg(target_arch = "x86_64")]
    if pairs {
        // SAFETY: the CPU has the instructions.
        return unsafe { pairs::product(x, (n, inner, outer), start, y, (w, transposed)) };
    }
    let _ = pairs;
    // SAFETY: the ranges of panels are inside a matrix of this shape.
    product(s, x, (n, inner, outer), start, y, |range, panel| unsafe {
        if transposed { pack_columns(s, w, range, panel) } else { pack_rows(s, w, range, panel) }
    });
}

/// `y (n, outer) = start + x (n, inner) V`, a task for each stretch of columns of V, and where these are fewer than
/// threads, for each band of rows in it.
fn product<S: Simd>(
    s: S,
    x: &[f32],
    (n, inner, outer): (usize, usize, usize),
    start: InitialValue,
    y: &mut [f32],
    pack: impl Fn(PanelRange, &mut [f32]) + Sync,
) {
    assert!(x.len() >= n * inner && y.len() >= n * outer, "shapes of a frozen product");
    check(start, n, outer);
    let out = Shared::new(y);
    let (deep, wide) = S::PANEL;
    let (tasks, width) = parts(outer, wide);
    let (bands, height) = bands(tasks, n, ROWS);
    each(tasks * bands, |task| {
        let (first, row) = (task / bands * width, task % bands * height);
        let (width, rows) = (width.min(outer - first), row..n.min(row + height));
        with_scratch(deep * width.next_multiple_of(S::LANES), |panel| {
            for k in (0..inner.max(1)).step_by(deep) {
                let range = PanelRange { inner: k, depth: deep.min(inner - k), outer: first, width };
                pack(range, panel);
                let start = if k == 0 { start } else { InitialValue::Keep };
                // SAFETY: these rows of columns first .. first + width of y belong to this task, and the lengths of
                // x, y and start were checked.
                unsafe { tiles(s, x, (rows.clone(), inner, outer), range, panel, start, out) }
            }
        });
    });
}

/// Asserts the lengths that tiles rely on unchecked.
fn check(start: InitialValue, n: usize, outer: usize) {
    let (residual, bias) = match start {
        InitialValue::Zero | InitialValue::Keep => return,
        InitialValue::Bias(bias) => (None, bias),
        InitialValue::Residual(residual, bias) => (Some(residual), bias),
    };
    assert!(bias.host::<f16>().len() >= outer, "a bias for every column");
    assert!(residual.is_none_or(|residual| residual.host::<f32>().len() >= n * outer), "a residual");
}

/// Widens `W[inner .., outer ..]` into groups of COLUMNS columns, `(depth, columns)` each; the last group
/// is as wide as its vectors, with zeros after its last column.
///
/// # Safety
/// The range is inside the weights.
unsafe fn pack_rows<S: Simd, W: Weights>(s: S, weights: W, range: PanelRange, panel: &mut [f32]) {
    const { assert!(S::PANEL.1 + BLOCK <= W::STRIP, "one set of factors for a row of a panel") };
    let PanelRange { inner, depth, outer, width } = range;
    assert!(panel.len() >= depth * width.next_multiple_of(S::LANES), "room for a panel");
    s.enter(
        #[inline(always)]
        move || {
            for k in 0..depth {
                for column in (outer..outer + width).step_by(W::LINE) {
                    s.fetch(weights.address(inner + k + AHEAD, column));
                }
                // SAFETY: the caller's promise.
                let factors = unsafe { weights.factors(s, 1.0, inner + k, outer) };
                for group in (0..width).step_by(S::COLUMNS) {
                    let real = S::COLUMNS.min(width - group);
                    let columns = real.next_multiple_of(S::LANES);
                    let to = &mut panel[group * depth + k * columns..][..columns];
                    for (v, to) in to.chunks_exact_mut(S::LANES).enumerate() {
                        let (column, left) = (group + v * S::LANES, real - v * S::LANES);
                        // SAFETY: as above, and as many floats as a vector has.
                        unsafe {
                            let vector = vector(s, weights, (inner + k, &factors), (outer, column), left);
                            s.store(to.as_mut_ptr(), vector);
                        }
                    }
                }
            }
        },
    );
}

/// LANES weights of a row from `outer + column`, or the last `left` ones and zeros; its factors begin at `outer`.
///
/// # Safety
/// The row has these weights.
#[inline(always)]
unsafe fn vector<S: Simd, W: Weights>(
    s: S,
    weights: W,
    (row, factors): (usize, &W::Factors),
    (outer, column): (usize, usize),
    left: usize,
) -> S::Floats {
    let column = outer + column;
    // SAFETY: the caller's promise.
    unsafe {
        if left >= S::LANES {
            W::times(s, weights.raw(s, row, column), factors, column / BLOCK - outer / BLOCK)
        } else {
            weights.part(s, row, column, left)
        }
    }
}

/// [`pack_rows`] of the transpose: column `outer + j` of the panel is row `outer + j` of W.
///
/// # Safety
/// As [`pack_rows`].
unsafe fn pack_columns<S: Simd, W: Weights>(s: S, weights: W, range: PanelRange, panel: &mut [f32]) {
    let PanelRange { inner, depth, outer, width } = range;
    s.enter(
        #[inline(always)]
        move || {
            pack_transposed(
                s,
                panel,
                (depth, width),
                #[inline(always)]
                |row, step, steps| {
                    if step.is_multiple_of(W::LINE) {
                        // The same columns of the next LANES rows.
                        s.fetch(weights.address(outer + row + S::LANES, inner + step));
                    }
                    // SAFETY: the caller's promise.
                    unsafe { weights.part(s, outer + row, inner + step, steps) }
                },
            );
        },
    );
}

/// Computes some rows of y in the columns of a panel.
///
/// # Safety
/// x is `(n, inner)`, y `(n, outer)`, `start` fits it, and the rows of these columns belong to the
/// caller.
unsafe fn tiles<S: Simd>(
    s: S,
    x: &[f32],
    (rows, inner, outer): (Range<usize>, usize, usize),
    range: PanelRange,
    panel: &[f32],
    start: InitialValue,
    y: Shared,
) {
    for row in rows.clone().step_by(ROWS) {
        for group in (0..range.width).step_by(S::COLUMNS) {
            let columns = (range.width - group).min(S::COLUMNS);
            let tile = Tile {
                x: x[row * inner + range.inner..].as_ptr(),
                x_row: inner,
                x_step: 1,
                panel: panel[group * range.depth..].as_ptr(),
                panel_row: columns.next_multiple_of(S::LANES),
                depth: range.depth,
                y: y.at(row * outer + range.outer + group),
                y_row: outer,
                columns,
                begin: begin(start, row * outer + range.outer + group, range.outer + group),
                scale: 1.0,
            };
            // SAFETY: the tile is inside the memory that the caller promised.
            unsafe { tile.rows(s, ROWS.min(rows.end - row)) }
        }
    }
}

/// `start` for a tile whose first element is `cell` of the output, in column `column`.
fn begin(start: InitialValue, cell: usize, column: usize) -> Begin {
    match start {
        InitialValue::Zero => Begin::Zero,
        InitialValue::Keep => Begin::Keep,
        InitialValue::Bias(bias) => Begin::Bias(bias.host::<f16>()[column..].as_ptr()),
        InitialValue::Residual(residual, bias) => {
            Begin::Residual(residual.host::<f32>()[cell..].as_ptr(), bias.host::<f16>()[column..].as_ptr())
        }
    }
}
