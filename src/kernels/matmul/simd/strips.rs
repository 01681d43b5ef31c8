//! Products of some rows with a matrix in strips: tiles widen the weights themselves, and the matrix is read once,
//! from its first byte to its last.

use half::f16;

use super::{InitialValue, ProductShape, begin, check};
use crate::{
    device::cpu::{
        Shared,
        simd::{
            Simd,
            tile::{Begin, BlockScales, Tile},
        },
        tasks::{cut, each},
        widen, with_scratch,
    },
    kernels::{matmul::matrix::STRIP, q8::BLOCK},
};

/// Largest batch for which this path is faster than panels.
pub const ROWS: usize = 72;
/// The same of codes.
pub const ROWS_OF_CODES: usize = 48;

/// `y (n, outer) = start + x (n, inner) W (inner, outer)` with the values of W in strips, a task for each group of
/// strips.
pub fn nn<S: Simd>(s: S, x: &[f32], values: &[f16], shape: ProductShape, start: InitialValue, y: &mut [f32]) {
    shape.check(x, y);
    let ProductShape { n, inner: rows, outer: cols } = shape;
    assert!(values.len() >= rows * cols.next_multiple_of(STRIP), "strips of a matrix");
    check(start, n, cols);
    let out = Shared::new(y);
    let (deep, (tall, vectors)) = (S::PANEL.0, S::TALL);
    // Tiles of similar heights: 25 rows are 9, 8 and 8, not 12, 12 and 1.
    let tall = n.div_ceil(n.div_ceil(tall).max(1)).max(1);
    // A strip is a whole number of tiles wide.
    let columns = vectors * S::LANES;
    let (tasks, width) = cut(cols, STRIP);
    each(tasks, |task| {
        for first in (task * width..cols.min((task + 1) * width)).step_by(STRIP) {
            for k in (0..rows.max(1)).step_by(deep) {
                let start = if k == 0 { start } else { InitialValue::Keep };
                for row in (0..n).step_by(tall) {
                    for column in (first..cols.min(first + STRIP)).step_by(columns) {
                        let at = row * cols + column;
                        let tile = Tile {
                            x: x[row * rows + k..].as_ptr(),
                            x_row: rows,
                            x_step: 1,
                            panel: values
                                .as_ptr()
                                .wrapping_add(first * rows + k * STRIP + column - first)
                                .cast(),
                            panel_row: STRIP,
                            depth: deep.min(rows - k),
                            y: out.at(at),
                            y_row: cols,
                            columns: columns.min(cols - column),
                            begin: begin(start, at, column),
                            scale: 1.0,
                        };
                        // SAFETY: the tile is inside the checked lengths; these columns belong to this task.
                        unsafe { tile.rows_of_narrow::<S, f16>(s, (), tall.min(n - row), vectors) }
                    }
                }
            }
        }
    });
}

/// [`nn`] with 8-bit codes in strips. A strip of a row is a block with one scale, by which the rows of x are multiplied
/// first; so codes are only made floats. The bits are those of [`small_batch`](super::small_batch).
pub fn nn_of_codes<S: Simd>(
    s: S,
    x: &[f32],
    (codes, scales): (&[i8], &[f16]),
    shape: ProductShape,
    start: InitialValue,
    y: &mut [f32],
) {
    const { assert!(STRIP == BLOCK) };
    shape.check(x, y);
    let ProductShape { n, inner: rows, outer: cols } = shape;
    assert!(cols.is_multiple_of(STRIP) && codes.len() >= rows * cols, "strips of a matrix");
    assert!(scales.len() >= rows * (cols / STRIP), "a scale for every block");
    check(start, n, cols);
    let (out, deep) = (Shared::new(y), S::PANEL.0);
    // A sum is one chain: sums fill the registers as long as there are rows, and of the last few rows more vectors hide
    // the latency.
    let shape_of = |left: usize| match left {
        1..3 => (left, (STRIP / S::LANES).min(4)),
        _ => (left.min(S::TALL.0), S::TALL.1),
    };
    let (tasks, width) = cut(cols, STRIP);
    each(tasks, |task| {
        with_scratch((S::TALL.0 + 1) * deep, |scratch| {
            let (factors, scaled) = scratch.split_at_mut(deep);
            for first in (task * width..cols.min((task + 1) * width)).step_by(STRIP) {
                for k in (0..rows.max(1)).step_by(deep) {
                    let start = if k == 0 { start } else { InitialValue::Keep };
                    let depth = deep.min(rows - k);
                    let factors = &mut factors[..depth];
                    widen(&scales[first / STRIP * rows + k..][..depth], factors);
                    let mut row = 0;
                    while row < n {
                        let (tall, vectors) = shape_of(n - row);
                        // The rows of this tile alone, which stay in the first-level cache.
                        for (i, scaled) in scaled.chunks_exact_mut(depth.max(1)).enumerate().take(tall) {
                            multiply(s, &x[(row + i) * rows + k..][..depth], factors, scaled);
                        }
                        let columns = vectors * S::LANES;
                        for column in (first..first + STRIP).step_by(columns) {
                            let at = row * cols + column;
                            let tile = Tile {
                                x: scaled.as_ptr(),
                                x_row: depth,
                                x_step: 1,
                                panel: codes
                                    .as_ptr()
                                    .wrapping_add(first * rows + k * STRIP + column - first)
                                    .cast(),
                                panel_row: STRIP,
                                depth,
                                y: out.at(at),
                                y_row: cols,
                                columns,
                                begin: begin(start, at, column),
                                scale: 1.0,
                            };
                            // SAFETY: the tile is inside the checked lengths; these columns belong to this task.
                            unsafe { tile.rows_of_narrow::<S, i8>(s, (), tall, vectors) }
                        }
                        row += tall;
                    }
                }
            }
        });
    });
}

/// [`nn`] from zero, with 8-bit codes in strips whose scales belong to columns: each to BLOCK rows of one column, `(blocks,
/// STRIP)` FP16 for each strip. Values are codes times scales, which FP32 holds exactly.
pub fn nn_of_columns<S: Simd>(
    s: S,
    x: &[f32],
    (codes, scales): (&[i8], &[f16]),
    shape: ProductShape,
    y: &mut [f32],
) {
    const { assert!(STRIP == BLOCK && S::PANEL.0.is_multiple_of(BLOCK)) };
    shape.check(x, y);
    let ProductShape { n, inner: rows, outer: cols } = shape;
    let (strips, blocks) = (cols.div_ceil(STRIP), rows.div_ceil(BLOCK));
    assert!(codes.len() >= strips * rows * STRIP, "strips of a matrix");
    assert!(scales.len() >= strips * blocks * STRIP, "scales of all strips");
    let (out, deep) = (Shared::new(y), S::PANEL.0);
    let (tall, vectors) = S::TALL;
    let columns = vectors * S::LANES;
    let (tasks, width) = cut(cols, STRIP);
    each(tasks, |task| {
        with_scratch(blocks * STRIP, |factors| {
            for first in (task * width..cols.min((task + 1) * width)).step_by(STRIP) {
                widen(&scales[first * blocks..][..blocks * STRIP], factors);
                for k in (0..rows.max(1)).step_by(deep) {
                    let begin = if k == 0 { Begin::Zero } else { Begin::Keep };
                    for row in (0..n).step_by(tall) {
                        for column in (first..cols.min(first + STRIP)).step_by(columns) {
                            let tile = Tile {
                                x: x[row * rows + k..].as_ptr(),
                                x_row: rows,
                                x_step: 1,
                                panel: codes
                                    .as_ptr()
                                    .wrapping_add(first * rows + k * STRIP + column - first)
                                    .cast(),
                                panel_row: STRIP,
                                depth: deep.min(rows - k),
                                y: out.at(row * cols + column),
                                y_row: cols,
                                columns: columns.min(cols - column),
                                begin,
                                scale: 1.0,
                            };
                            let scales = BlockScales::<STRIP>(factors[k + column - first..].as_ptr());
                            // SAFETY: the tile is inside the checked lengths; these columns belong to this task.
                            unsafe { tile.rows_of_narrow::<S, i8>(s, scales, tall.min(n - row), vectors) }
                        }
                    }
                }
            }
        });
    });
}

/// `to = a * b`, all of one length.
fn multiply<S: Simd>(s: S, a: &[f32], b: &[f32], to: &mut [f32]) {
    assert!(a.len() == to.len() && b.len() == to.len(), "three of one length");
    let whole = to.len() - to.len() % S::LANES;
    s.enter(
        #[inline(always)]
        || {
            for at in (0..whole).step_by(S::LANES) {
                // SAFETY: a vector of each.
                unsafe {
                    let product = s.mul(s.load(a.as_ptr().add(at)), s.load(b.as_ptr().add(at)));
                    s.store(to.as_mut_ptr().add(at), product);
                }
            }
        },
    );
    for at in whole..to.len() {
        to[at] = a[at] * b[at];
    }
}
