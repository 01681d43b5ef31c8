//! AVX-512 side of the frozen products: FP16 weights are widened into packed panels once, and a tile of the
//! output stays in registers while it runs down a panel.
//!
//! Every element of the output is `start`, plus for each stretch of DEPTH weights one chain of fused
//! multiply-adds from the first weight to the last. Neither the number of rows, nor where a row or a column stands
//! in a tile or a task, changes a bit. Products of few rows are made otherwise, see [`few`].

use std::arch::x86_64::*;

use half::f16;

use super::{Arithmetic, Matrix, Start};
use crate::kernels::{
    avx512::{
        LANES, store,
        tile::{Begin, COLUMNS, ROWS, Tile, pack_turned},
        widened,
    },
    cpu::{Shared, bf16, each, parts, with_scratch},
};

mod few;
mod pairs;

/// Weights of a column that a panel holds.
const DEPTH: usize = 768;
/// Columns that a task takes: its panel of DEPTH x WIDTH floats, 576 KiB, stays in a second-level cache.
const WIDTH: usize = 192;
/// FP16 weights in a cache line.
const LINE: usize = 32;
/// Rows of weights that are fetched ahead of their widening: each begins in a page of its own, which the CPU does
/// not foresee.
const AHEAD: usize = 6;

/// Floats of scratch a task uses.
pub const SCRATCH: usize = DEPTH * (WIDTH + LANES);
const _: () = assert!(pairs::SCRATCH <= SCRATCH);

/// A panel's place in the weights: `outer` and `inner` as in `y (n, outer) = x (n, inner) V`.
#[derive(Clone, Copy)]
struct Place {
    inner: usize,
    depth: usize,
    outer: usize,
    width: usize,
}

/// `y (n, cols) = start + x (n, rows) W`.
///
/// # Safety
/// The CPU has AVX-512 F.
#[target_feature(enable = "avx512f")]
pub unsafe fn frozen_nn(x: &[f32], w: Matrix, start: Start, y: &mut [f32], n: usize) {
    let (weights, cols): (&[f16], usize) = (w.data.host(), w.cols);
    if n <= few::ROWS {
        // SAFETY: the CPU has the instructions.
        return unsafe { few::nn(x, weights, (n, w.rows, cols), start, y) };
    }
    if w.arithmetic == Arithmetic::Bf16 && bf16() {
        let weights = pairs::Weights { halves: weights, row: cols, turned: false };
        // SAFETY: the CPU has the instructions.
        return unsafe { pairs::product(x, (n, w.rows, cols), start, y, weights) };
    }
    // SAFETY: the CPU has the instructions; `pack_rows` checks its range.
    let pack = |place: Place, panel: &mut [f32]| unsafe { pack_rows(weights, cols, place, panel) };
    product(x, (n, w.rows, cols), start, y, pack);
}

/// `y (n, rows) = start + x (n, cols) W^T`.
///
/// # Safety
/// As [`frozen_nn`].
#[target_feature(enable = "avx512f")]
pub unsafe fn frozen_nt(x: &[f32], w: Matrix, start: Start, y: &mut [f32], n: usize) {
    let (weights, cols): (&[f16], usize) = (w.data.host(), w.cols);
    if n <= few::ROWS_TURNED {
        // SAFETY: the CPU has the instructions.
        return unsafe { few::nt(x, weights, (n, w.rows, cols), start, y) };
    }
    if w.arithmetic == Arithmetic::Bf16 && bf16() {
        let weights = pairs::Weights { halves: weights, row: cols, turned: true };
        // SAFETY: the CPU has the instructions.
        return unsafe { pairs::product(x, (n, cols, w.rows), start, y, weights) };
    }
    // SAFETY: as above.
    let pack = |place: Place, panel: &mut [f32]| unsafe { pack_columns(weights, cols, place, panel) };
    product(x, (n, cols, w.rows), start, y, pack);
}

/// `y (n, outer) = start + x (n, inner) V`, a task for each stretch of columns of V.
fn product(
    x: &[f32],
    (n, inner, outer): (usize, usize, usize),
    start: Start,
    y: &mut [f32],
    pack: impl Fn(Place, &mut [f32]) + Sync,
) {
    assert!(x.len() >= n * inner && y.len() >= n * outer, "shapes of a frozen product");
    check(start, n, outer);
    let out = Shared::new(y);
    let (tasks, width) = parts(outer, WIDTH);
    each(tasks, |task| {
        let first = task * width;
        let width = width.min(outer - first);
        with_scratch(DEPTH * width.next_multiple_of(LANES), |panel| {
            for k in (0..inner.max(1)).step_by(DEPTH) {
                let place = Place { inner: k, depth: DEPTH.min(inner - k), outer: first, width };
                pack(place, panel);
                let start = if k == 0 { start } else { Start::Keep };
                // SAFETY: the instructions were found by the caller; columns first .. first + width of y
                // belong to this task, and the lengths of x, y and start were checked.
                unsafe { tiles(x, (n, inner, outer), place, panel, start, out) }
            }
        });
    });
}

/// What the tiles read without looking.
fn check(start: Start, n: usize, outer: usize) {
    let (residual, bias) = match start {
        Start::Zero | Start::Keep => return,
        Start::Bias(bias) => (None, bias),
        Start::Residual(residual, bias) => (Some(residual), bias),
    };
    assert!(bias.host::<f16>().len() >= outer, "a bias for every column");
    assert!(residual.is_none_or(|residual| residual.host::<f32>().len() >= n * outer), "a residual");
}

/// Widens `W[inner .., outer ..]` into groups of COLUMNS columns, `(depth, columns)` each; the last group
/// is as wide as its vectors, zeros behind its last column.
///
/// # Safety
/// The CPU has AVX-512 F.
#[target_feature(enable = "avx512f")]
unsafe fn pack_rows(weights: &[f16], stride: usize, place: Place, panel: &mut [f32]) {
    let Place { inner, depth, outer, width } = place;
    assert!(panel.len() >= depth * width.next_multiple_of(LANES), "room for a panel");
    for k in 0..depth {
        let row = &weights[(inner + k) * stride + outer..][..width];
        for line in (0..width).step_by(LINE) {
            _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().wrapping_add(AHEAD * stride + line).cast());
        }
        for (group, halves) in row.chunks(COLUMNS).enumerate() {
            let columns = halves.len().next_multiple_of(LANES);
            let to = &mut panel[group * COLUMNS * depth + k * columns..][..columns];
            let (whole, rest) = halves.as_chunks::<LANES>();
            for (from, to) in whole.iter().zip(to.as_chunks_mut::<LANES>().0) {
                // SAFETY: a vector of halves, and one of floats.
                unsafe {
                    let wide = _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()));
                    _mm512_storeu_ps(to.as_mut_ptr(), wide);
                }
            }
            if !rest.is_empty() {
                store(&mut to[whole.len() * LANES..], widened(rest));
            }
        }
    }
}

/// The same of the transpose: column `outer + j` of the panel is row `outer + j` of W.
///
/// # Safety
/// The CPU has AVX-512 F.
#[target_feature(enable = "avx512f")]
unsafe fn pack_columns(weights: &[f16], stride: usize, place: Place, panel: &mut [f32]) {
    let Place { inner, depth, outer, width } = place;
    let load = |row: usize, step: usize, steps: usize| {
        let from = &weights[(outer + row) * stride + inner + step..][..steps];
        if step.is_multiple_of(LINE) {
            // The same place in the next LANES rows.
            _mm_prefetch::<_MM_HINT_T0>(from.as_ptr().wrapping_add(LANES * stride).cast());
        }
        widened(from)
    };
    // SAFETY: the caller's promise.
    unsafe { pack_turned(panel, (depth, width), load) }
}

/// All rows of y in the columns of a panel.
///
/// # Safety
/// The CPU has AVX-512 F; x is `(n, inner)`, y `(n, outer)`, `start` fits it, and the columns belong to the
/// caller.
#[target_feature(enable = "avx512f")]
unsafe fn tiles(
    x: &[f32],
    (n, inner, outer): (usize, usize, usize),
    place: Place,
    panel: &[f32],
    start: Start,
    y: Shared,
) {
    for row in (0..n).step_by(ROWS) {
        for group in (0..place.width).step_by(COLUMNS) {
            let columns = (place.width - group).min(COLUMNS);
            let tile = Tile {
                x: x[row * inner + place.inner..].as_ptr(),
                x_row: inner,
                x_step: 1,
                panel: panel[group * place.depth..].as_ptr(),
                panel_row: columns.next_multiple_of(LANES),
                depth: place.depth,
                y: y.at(row * outer + place.outer + group),
                y_row: outer,
                columns,
                begin: begin(start, row * outer + place.outer + group, place.outer + group),
                scale: 1.0,
            };
            // SAFETY: the tile lies inside what the caller promised.
            unsafe { tile.rows(ROWS.min(n - row)) }
        }
    }
}

/// `start` as a tile reads it that begins at `cell` of the output, in column `column`.
fn begin(start: Start, cell: usize, column: usize) -> Begin {
    match start {
        Start::Zero => Begin::Zero,
        Start::Keep => Begin::Keep,
        Start::Bias(bias) => Begin::Bias(bias.host::<f16>()[column..].as_ptr()),
        Start::Residual(residual, bias) => {
            Begin::Residual(residual.host::<f32>()[cell..].as_ptr(), bias.host::<f16>()[column..].as_ptr())
        }
    }
}
