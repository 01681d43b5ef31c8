//! AVX-512 side of the frozen products: weights are widened into packed panels once, and a tile of the
//! output stays in registers while it runs down a panel.
//!
//! Every element of the output is `start`, plus for each stretch of DEPTH weights one chain of fused
//! multiply-adds from the first weight to the last. Neither the number of rows, nor where a row or a column stands
//! in a tile or a task, changes a bit. Products of few rows are made otherwise, see [`few`].

use std::{arch::x86_64::*, ops::Range};

use half::f16;

use self::weights::{Codes, Halves, Weights};
use super::{Arithmetic, Elements, Matrix, Start};
use crate::kernels::{
    avx512::{
        LANES,
        tile::{Begin, COLUMNS, ROWS, Tile, pack_turned},
    },
    cpu::{Shared, bf16, with_scratch},
    q8::BLOCK,
    tasks::{bands, each, parts},
};

mod few;
mod pairs;
mod strips;
mod weights;

/// Weights of a column that a panel holds.
const DEPTH: usize = 768;
/// Columns that a task takes: its panel of DEPTH x WIDTH floats, 576 KiB, stays in a second-level cache.
const WIDTH: usize = 192;
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

/// `y (n, cols) = start + x (n, rows) W`, or turned `y (n, rows) = start + x (n, cols) W^T`.
///
/// # Safety
/// The CPU has AVX-512 F.
#[target_feature(enable = "avx512f")]
pub unsafe fn frozen(x: &[f32], (w, turned): (Matrix, bool), start: Start, y: &mut [f32], n: usize) {
    let shape = (n, w.rows, w.cols);
    let pairs = w.arithmetic == Arithmetic::Bf16 && bf16();
    // SAFETY: the CPU has the instructions; the matrix has its elements.
    unsafe {
        match w.host() {
            Elements::Halves(halves) => {
                form(x, (Halves::<false>(halves, w.cols), turned), shape, pairs, start, y);
            }
            // Where rows would be rounded to BF16, those in strips are too.
            Elements::Strips(halves, rows)
                if !turned && n <= if pairs { few::ROWS } else { strips::ROWS } =>
            {
                strips::nn(x, (halves, rows), (n, w.cols), start, y);
            }
            Elements::Strips(halves, rows) => {
                form(x, (Halves::<true>(halves, rows), turned), shape, pairs, start, y);
            }
            Elements::Codes(codes, scales) => {
                form(x, (Codes(codes, scales, w.cols), turned), shape, pairs, start, y);
            }
        }
    }
}

/// # Safety
/// The CPU has AVX-512 F, and BF16 where pairs are wanted; `w` is `(rows, cols)`.
#[target_feature(enable = "avx512f")]
unsafe fn form<W: Weights>(
    x: &[f32],
    (w, turned): (W, bool),
    (n, rows, cols): (usize, usize, usize),
    pairs: bool,
    start: Start,
    y: &mut [f32],
) {
    let (inner, outer) = if turned { (cols, rows) } else { (rows, cols) };
    // SAFETY: as promised; panels are cut from a matrix of this shape.
    unsafe {
        if turned && n <= few::ROWS_TURNED {
            few::nt(x, w, (n, rows, cols), start, y);
        } else if !turned && n <= few::ROWS {
            few::nn(x, w, (n, rows, cols), start, y);
        } else if pairs {
            pairs::product(x, (n, inner, outer), start, y, (w, turned));
        } else if turned {
            product(x, (n, inner, outer), start, y, |place, panel| pack_columns(w, place, panel));
        } else {
            product(x, (n, inner, outer), start, y, |place, panel| pack_rows(w, place, panel));
        }
    }
}

/// `y (n, outer) = start + x (n, inner) V`, a task for each stretch of columns of V, and where these are fewer than
/// threads, for each band of rows in it.
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
    let (bands, height) = bands(tasks, n, ROWS);
    each(tasks * bands, |task| {
        let (first, row) = (task / bands * width, task % bands * height);
        let (width, rows) = (width.min(outer - first), row..n.min(row + height));
        with_scratch(DEPTH * width.next_multiple_of(LANES), |panel| {
            for k in (0..inner.max(1)).step_by(DEPTH) {
                let place = Place { inner: k, depth: DEPTH.min(inner - k), outer: first, width };
                pack(place, panel);
                let start = if k == 0 { start } else { Start::Keep };
                // SAFETY: the instructions were found by the caller; these rows of columns first .. first + width of
                // y belong to this task, and the lengths of x, y and start were checked.
                unsafe { tiles(x, (rows.clone(), inner, outer), place, panel, start, out) }
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
/// The CPU has AVX-512 F; the place lies inside the weights.
#[target_feature(enable = "avx512f")]
unsafe fn pack_rows<W: Weights>(weights: W, place: Place, panel: &mut [f32]) {
    const { assert!(WIDTH + BLOCK <= W::STRIP, "one set of factors for a row of a panel") };
    let Place { inner, depth, outer, width } = place;
    assert!(panel.len() >= depth * width.next_multiple_of(LANES), "room for a panel");
    for k in 0..depth {
        for column in (outer..outer + width).step_by(W::LINE) {
            _mm_prefetch::<_MM_HINT_T0>(weights.address(inner + k + AHEAD, column));
        }
        // SAFETY: the caller's promise.
        let factors = unsafe { W::factors(1.0, weights.scales(inner + k, outer)) };
        for group in (0..width).step_by(COLUMNS) {
            let real = COLUMNS.min(width - group);
            let columns = real.next_multiple_of(LANES);
            let to = &mut panel[group * depth + k * columns..][..columns];
            for (v, to) in to.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                let (column, left) = (outer + group + v * LANES, real - v * LANES);
                // SAFETY: as above.
                let vector = unsafe {
                    match left {
                        LANES.. => {
                            W::times(weights.raw(inner + k, column), &factors, column / BLOCK - outer / BLOCK)
                        }
                        _ => weights.part(inner + k, column, left),
                    }
                };
                // SAFETY: as many floats as a vector has.
                unsafe { _mm512_storeu_ps(to.as_mut_ptr(), vector) };
            }
        }
    }
}

/// The same of the transpose: column `outer + j` of the panel is row `outer + j` of W.
///
/// # Safety
/// As [`pack_rows`].
#[target_feature(enable = "avx512f")]
unsafe fn pack_columns<W: Weights>(weights: W, place: Place, panel: &mut [f32]) {
    let Place { inner, depth, outer, width } = place;
    let load = |row: usize, step: usize, steps: usize| {
        if step.is_multiple_of(W::LINE) {
            // The same place in the next LANES rows.
            _mm_prefetch::<_MM_HINT_T0>(weights.address(outer + row + LANES, inner + step));
        }
        // SAFETY: as promised.
        unsafe { weights.part(outer + row, inner + step, steps) }
    };
    // SAFETY: the caller's promise.
    unsafe { pack_turned(panel, (depth, width), load) }
}

/// Some rows of y in the columns of a panel.
///
/// # Safety
/// The CPU has AVX-512 F; x is `(n, inner)`, y `(n, outer)`, `start` fits it, and the rows of these columns belong to the
/// caller.
#[target_feature(enable = "avx512f")]
unsafe fn tiles(
    x: &[f32],
    (rows, inner, outer): (Range<usize>, usize, usize),
    place: Place,
    panel: &[f32],
    start: Start,
    y: Shared,
) {
    for row in rows.clone().step_by(ROWS) {
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
            unsafe { tile.rows(ROWS.min(rows.end - row)) }
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
