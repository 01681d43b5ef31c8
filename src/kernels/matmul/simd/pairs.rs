//! AVX-512 BF16 side of the frozen products: both factors are rounded to BF16, pairs of products are added up in FP32.
//!
//! Steps go in pairs: a float of a panel, and of the rows of x beside it, is two BF16 values one after another along
//! the depth. x is rounded ROWS rows at a time. Sums are in FP32, in the order of [`super::product`] by pairs;
//! numbers below 2^-126 count as 0.

use std::arch::x86_64::*;

use super::{Place, Start, begin, check, weights::Weights};
use crate::kernels::{
    cpu::{Shared, with_scratch},
    simd::{
        Simd,
        avx512::Avx512,
        load_or, store,
        tile::{ROWS, Tile},
    },
    tasks::{bands, each, parts},
};

/// Weights of a column that a panel holds; even.
const DEPTH: usize = 768;
/// Columns that a task takes: 288 KiB of panel.
const WIDTH: usize = 192;
const LANES: usize = Avx512::LANES;
const COLUMNS: usize = Avx512::COLUMNS;
/// Floats of scratch a task uses: the panel and rounded rows of x.
pub const SCRATCH: usize = DEPTH / 2 * (WIDTH + LANES + ROWS);

/// `y (n, outer) = start + x (n, inner) V`, tasks as in [`super::product`]: the weights as they lie, or turned.
///
/// # Safety
/// The CPU has AVX-512 F and BF16; the weights are of this shape.
#[target_feature(enable = "avx512f,avx512bf16")]
pub unsafe fn product<W: Weights>(
    x: &[f32],
    (n, inner, outer): (usize, usize, usize),
    start: Start,
    y: &mut [f32],
    (weights, turned): (W, bool),
) {
    // SAFETY: the caller's promise.
    let s = unsafe { Avx512::new() };
    assert!(x.len() >= n * inner && y.len() >= n * outer, "shapes of a frozen product");
    check(start, n, outer);
    let out = Shared::new(y);
    let (tasks, width) = parts(outer, WIDTH);
    let (bands, height) = bands(tasks, n, ROWS);
    each(tasks * bands, |task| {
        let (first, from) = (task / bands * width, task % bands * height);
        let (width, to) = (width.min(outer - first), n.min(from + height));
        with_scratch(SCRATCH, |scratch| {
            let (rounded, panel) = scratch.split_at_mut(DEPTH / 2 * ROWS);
            for k in (0..inner.max(1)).step_by(DEPTH) {
                let place = Place { inner: k, depth: DEPTH.min(inner - k), outer: first, width };
                let start = if k == 0 { start } else { Start::Keep };
                // SAFETY: the caller found the instructions; these rows of the columns of y belong to this task, and
                // the lengths of x, y and start were checked.
                unsafe {
                    if turned {
                        pack_columns(s, weights, place, panel);
                    } else {
                        pack_rows(s, weights, place, panel);
                    }
                    for row in (from..to).step_by(ROWS) {
                        let rows = ROWS.min(to - row);
                        for (i, to) in rounded.chunks_exact_mut(DEPTH / 2).enumerate().take(rows) {
                            round(s, &x[(row + i) * inner + k..][..place.depth], to);
                        }
                        tiles(s, rounded, (row, rows), (place, panel), outer, start, out);
                    }
                }
            }
        });
    });
}

/// Rows `row .. row + rows` of y in the columns of a panel.
///
/// # Safety
/// As [`product`]; `rounded` are these rows of x, and the columns belong to the caller.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn tiles(
    s: Avx512,
    rounded: &[f32],
    (row, rows): (usize, usize),
    (place, panel): (Place, &[f32]),
    outer: usize,
    start: Start,
    y: Shared,
) {
    let pairs = place.depth.div_ceil(2);
    for group in (0..place.width).step_by(COLUMNS) {
        let columns = (place.width - group).min(COLUMNS);
        let cell = row * outer + place.outer + group;
        let tile = Tile {
            x: rounded.as_ptr(),
            x_row: DEPTH / 2,
            x_step: 1,
            panel: panel[group * pairs..].as_ptr(),
            panel_row: columns.next_multiple_of(LANES),
            depth: pairs,
            y: y.at(cell),
            y_row: outer,
            columns,
            begin: begin(start, cell, place.outer + group),
            scale: 1.0,
        };
        // SAFETY: the tile lies inside what the caller promised.
        unsafe { tile.rows_of_pairs(s, rows) }
    }
}

/// Two vectors of floats as 32 BF16 values one after another: 16 pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn paired(low: __m512, high: __m512) -> __m512 {
    // SAFETY: both are 64 bytes in which every pattern means something.
    unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(high, low)) }
}

/// Rounds a row to pairs; a last one without a partner gets 0.
#[target_feature(enable = "avx512f,avx512bf16")]
fn round(s: Avx512, row: &[f32], to: &mut [f32]) {
    for (from, to) in row.chunks(2 * LANES).zip(to.chunks_mut(LANES)) {
        let (low, high) = from.split_at(LANES.min(from.len()));
        store(s, to, paired(load_or(s, low, 0.0), load_or(s, high, 0.0)));
    }
}

/// Rounds `V[inner .., outer ..]` into groups of COLUMNS columns, `(depth / 2, columns)` pairs each.
///
/// # Safety
/// The CPU has AVX-512 F and BF16; the weights have these rows and columns.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pack_rows<W: Weights>(s: Avx512, weights: W, place: Place, panel: &mut [f32]) {
    let Place { inner, depth, outer, width } = place;
    let pairs = depth.div_ceil(2);
    assert!(panel.len() >= pairs * width.next_multiple_of(LANES), "room for a panel");
    for pair in 0..pairs {
        for start in (0..width).step_by(LANES) {
            let part = |step: usize| {
                if step < depth {
                    // SAFETY: the weights have these rows and columns.
                    unsafe { weights.part(s, inner + step, outer + start, LANES.min(width - start)) }
                } else {
                    _mm512_setzero_ps()
                }
            };
            let (low, high) = (part(2 * pair), part(2 * pair + 1));
            let group = start / COLUMNS * COLUMNS;
            let columns = (width - group).min(COLUMNS).next_multiple_of(LANES);
            let to = &mut panel[group * pairs + pair * columns + start - group..][..LANES];
            // SAFETY: a vector of floats.
            unsafe { _mm512_storeu_ps(to.as_mut_ptr(), interleaved(low, high)) }
        }
    }
}

/// Pair i is value i of `low` and value i of `high`, rounded.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn interleaved(low: __m512, high: __m512) -> __m512 {
    // SAFETY: both are 32 bytes in which every pattern means something.
    let bits = |vector: __m512| -> __m256i { unsafe { std::mem::transmute(_mm512_cvtneps_pbh(vector)) } };
    let (low, high) = (_mm512_cvtepu16_epi32(bits(low)), _mm512_cvtepu16_epi32(bits(high)));
    _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32::<16>(high)))
}

/// The same of the transpose: column `outer + j` of the panel is row `outer + j` of the weights.
///
/// # Safety
/// The CPU has AVX-512 F and BF16; the weights have these rows and columns.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn pack_columns<W: Weights>(s: Avx512, weights: W, place: Place, panel: &mut [f32]) {
    let Place { inner, depth, outer, width } = place;
    let pairs = depth.div_ceil(2);
    assert!(panel.len() >= pairs * width.next_multiple_of(LANES), "room for a panel");
    for start in (0..width).step_by(LANES) {
        let group = start / COLUMNS * COLUMNS;
        let columns = (width - group).min(COLUMNS).next_multiple_of(LANES);
        for step in (0..depth).step_by(2 * LANES) {
            let mut square = [_mm512_setzero_ps(); LANES];
            for (i, vector) in square.iter_mut().enumerate().take(width - start) {
                let part = |step: usize| match depth.saturating_sub(step) {
                    0 => _mm512_setzero_ps(),
                    // SAFETY: the weights have these rows and columns.
                    left => unsafe { weights.part(s, outer + start + i, inner + step, left.min(LANES)) },
                };
                *vector = paired(part(step), part(step + LANES));
            }
            for (i, vector) in s.transposed(square).into_iter().enumerate().take((depth - step).div_ceil(2)) {
                let at = group * pairs + (step / 2 + i) * columns + start - group;
                // SAFETY: a vector of floats.
                unsafe { _mm512_storeu_ps(panel[at..][..LANES].as_mut_ptr(), vector) }
            }
        }
    }
}
