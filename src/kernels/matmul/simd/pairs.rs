//! AVX-512 BF16 side of the frozen products: both factors are rounded to BF16, and pairs of products are added in
//! FP32.
//!
//! Steps go in pairs: a float of a panel, and of the rows of x, holds two BF16 values that follow each other along the
//! depth. Sums are FP32, in the order of [`super::product`] pair by pair; numbers below 2^-126 count as 0.

use std::{arch::x86_64::*, ops::Range};

use super::{
    AHEAD, InitialValue, Output, Panel, PanelRange, ProductShape, RightFactor, WeightRow, begin, check,
    vector, weights::Weights,
};
use crate::{
    device::cpu::{
        Shared,
        simd::{
            Simd,
            avx512::Avx512,
            pairs::{interleaved, paired, round},
            tile::{ROWS, Tile},
        },
        tasks::{bands, each, parts},
        with_scratch, with_shared_scratch,
    },
    kernels::q8::BLOCK,
};

/// Weights of each column in a panel; even.
const DEPTH: usize = 768;
/// Columns that a task takes: 288 KiB of panel.
const WIDTH: usize = 192;
const LANES: usize = Avx512::LANES;
const COLUMNS: usize = Avx512::COLUMNS;
/// Floats of scratch of a task: the panel and rounded rows of x.
pub const SCRATCH: usize = DEPTH / 2 * (WIDTH + LANES + ROWS);
/// Fewest panels side by side for which x is rounded first, once for all tasks. With fewer each task rounds its own
/// part, ROWS rows at a time and prefetched: a separate pass over x waits for memory, and costs more than it saves
/// (MLP 3072 -> 768, four panels: 4% slower).
const SHARING: usize = 8;
/// Rows of x that such a task rounds at a time.
const ROUNDED: usize = 64;

/// Floats that the tasks of a product of `n` rows share.
pub fn shared(n: usize) -> usize {
    n * DEPTH / 2
}

/// `y (n, outer) = start + x (n, inner) V`, tasks as in [`super::product`].
///
/// # Safety
/// The CPU has AVX-512 F, BW and BF16; the weights are of this shape.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn product<W: Weights>(
    x: &[f32],
    v: RightFactor<W>,
    shape: ProductShape,
    start: InitialValue,
    y: &mut [f32],
) {
    // SAFETY: the caller's promise.
    let s = unsafe { Avx512::new() };
    shape.check(x, y);
    let RightFactor { weights, transposed, .. } = v;
    let ProductShape { n, inner, outer } = shape;
    check(start, n, outer);
    let out = Shared::new(y);
    let (tasks, width) = parts(outer, WIDTH);
    let (bands, height) = bands(tasks, n, ROWS);
    let sharing = tasks >= SHARING;
    with_shared_scratch(if sharing { shared(n) } else { 0 }, |all| {
        for k in (0..inner.max(1)).step_by(DEPTH) {
            let depth = DEPTH.min(inner - k);
            if sharing {
                round_all(s, x, inner, k..k + depth, &mut all[..n * (DEPTH / 2)]);
            }
            let all = &*all;
            each(tasks * bands, |task| {
                let (first, from) = (task / bands * width, task % bands * height);
                let (width, to) = (width.min(outer - first), n.min(from + height));
                let range = PanelRange { inner: k, depth, outer: first, width };
                let to_y = Output { y: out, outer, start: if k == 0 { start } else { InitialValue::Keep } };
                with_scratch(SCRATCH, |scratch| {
                    let (own, panel) = scratch.split_at_mut(DEPTH / 2 * ROWS);
                    // SAFETY: the caller found the instructions; these rows of the columns of y belong to this task,
                    // and the lengths of x, y and start were checked.
                    unsafe {
                        if transposed {
                            pack_columns(s, weights, range, panel);
                        } else {
                            pack_rows(s, weights, range, panel);
                        }
                        for row in (from..to).step_by(ROWS) {
                            let count = ROWS.min(to - row);
                            let left = if sharing {
                                let values = &all[row * DEPTH / 2..];
                                let next = values.as_ptr().wrapping_add(ROWS * DEPTH / 2);
                                RoundedRows { values, row, count, next, next_row: DEPTH / 2 }
                            } else {
                                for (i, to) in own.chunks_exact_mut(DEPTH / 2).enumerate().take(count) {
                                    round(s, &x[(row + i) * inner + k..][..depth], to);
                                }
                                // Without prefetching, rounding would wait for memory: a tenth of a step.
                                let next = x.as_ptr().wrapping_add((row + ROWS) * inner + k);
                                RoundedRows { values: &*own, row, count, next, next_row: inner }
                            };
                            tiles(s, left, Panel { range, values: panel }, to_y);
                        }
                    }
                });
            });
        }
    });
}

/// Rounds columns of `x (n, inner)` to `to (n, DEPTH / 2)` pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round_all(s: Avx512, x: &[f32], inner: usize, columns: Range<usize>, to: &mut [f32]) {
    let n = to.len() / (DEPTH / 2);
    let to = Shared::new(to);
    each(n.div_ceil(ROUNDED), |task| {
        for row in task * ROUNDED..n.min((task + 1) * ROUNDED) {
            // SAFETY: this row belongs to this task; the CPU has the instructions.
            unsafe {
                round(s, &x[row * inner..][columns.clone()], to.range(row * DEPTH / 2, DEPTH / 2));
            }
        }
    });
}

/// Rounded rows of x: `count` rows from row `row`.
struct RoundedRows<'a> {
    /// Their pairs `(count, DEPTH / 2)`.
    values: &'a [f32],
    row: usize,
    count: usize,
    /// Address of the rows that follow, which are prefetched.
    next: *const f32,
    /// Floats from one of those to the next.
    next_row: usize,
}

/// Computes rows of y in the columns of a panel.
///
/// # Safety
/// As [`product`]; the columns belong to the caller.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn tiles(s: Avx512, left: RoundedRows, panel: Panel, to: Output) {
    let RoundedRows { values: rounded, row, count, next, next_row } = left;
    let (Panel { range, values }, Output { y, outer, start }) = (panel, to);
    let pairs = range.depth.div_ceil(2);
    for group in (0..range.width).step_by(COLUMNS) {
        let columns = (range.width - group).min(COLUMNS);
        let at = row * outer + range.outer + group;
        let tile = Tile {
            x: rounded.as_ptr(),
            x_row: DEPTH / 2,
            x_step: 1,
            panel: values[group * pairs..].as_ptr(),
            panel_row: columns.next_multiple_of(LANES),
            depth: pairs,
            y: y.at(at),
            y_row: outer,
            columns,
            begin: begin(start, at, range.outer + group),
            scale: 1.0,
        };
        // SAFETY: the tile is inside the memory that the caller promised.
        unsafe {
            tile.rows_of_pairs(
                s,
                count,
                [0, 1].map(|row| next.wrapping_add((2 * group / COLUMNS + row) * next_row)),
            )
        }
    }
}

/// Rounds `V[inner .., outer ..]` into groups of COLUMNS columns, `(depth / 2, columns)` pairs each.
///
/// # Safety
/// The CPU has AVX-512 F, BW and BF16; the weights have these rows and columns.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack_rows<W: Weights>(s: Avx512, weights: W, range: PanelRange, panel: &mut [f32]) {
    const { assert!(WIDTH + BLOCK <= W::STRIP, "one set of factors for a row of a panel") };
    let PanelRange { inner, depth, outer, width } = range;
    let pairs = depth.div_ceil(2);
    assert!(panel.len() >= pairs * width.next_multiple_of(LANES), "room for a panel");
    for pair in 0..pairs {
        let row = inner + 2 * pair;
        for column in (outer..outer + width).step_by(W::LINE) {
            for row in [row, row + 1] {
                s.fetch(weights.address(row + AHEAD, column));
            }
        }
        // The last row of an odd depth has no partner.
        let both = 2 * pair + 1 < depth;
        let next = row + usize::from(both);
        // SAFETY: the weights have these rows and columns.
        let factors = unsafe { [row, next].map(|row| weights.factors(s, 1.0, row, outer)) };
        for group in (0..width).step_by(COLUMNS) {
            let real = COLUMNS.min(width - group);
            let columns = real.next_multiple_of(LANES);
            let to = &mut panel[group * pairs + pair * columns..][..columns];
            for (v, to) in to.chunks_exact_mut(LANES).enumerate() {
                let (column, left) = (group + v * LANES, real - v * LANES);
                // SAFETY: as above, and as many floats as a vector has.
                unsafe {
                    let first = outer;
                    let low = WeightRow { row, first, factors: &factors[0] };
                    let low = vector(s, weights, low, column, left);
                    let high = if both {
                        vector(s, weights, WeightRow { row: next, first, factors: &factors[1] }, column, left)
                    } else {
                        s.zero()
                    };
                    s.store(to.as_mut_ptr(), interleaved(low, high));
                }
            }
        }
    }
}

/// [`pack_rows`] of the transpose: column `outer + j` of the panel is row `outer + j` of the weights.
///
/// # Safety
/// The CPU has AVX-512 F, BW and BF16; the weights have these rows and columns.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack_columns<W: Weights>(s: Avx512, weights: W, range: PanelRange, panel: &mut [f32]) {
    let PanelRange { inner, depth, outer, width } = range;
    let pairs = depth.div_ceil(2);
    assert!(panel.len() >= pairs * width.next_multiple_of(LANES), "room for a panel");
    for start in (0..width).step_by(LANES) {
        let group = start / COLUMNS * COLUMNS;
        let columns = (width - group).min(COLUMNS).next_multiple_of(LANES);
        for step in (0..depth).step_by(2 * LANES) {
            let mut square = [_mm512_setzero_ps(); LANES];
            if step.is_multiple_of(W::LINE) {
                for row in 0..LANES.min(width - start) {
                    // The same columns of the next LANES rows.
                    s.fetch(weights.address(outer + start + row + LANES, inner + step));
                }
            }
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
