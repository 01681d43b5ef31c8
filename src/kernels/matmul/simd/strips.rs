//! Products of some rows with a matrix in strips: tiles widen the weights themselves, and the matrix is read once,
//! from its first byte to its last.

use half::f16;

use super::{InitialValue, ProductShape, begin, check};
use crate::{
    device::cpu::{
        Shared,
        simd::{Simd, tile::Tile},
        tasks::{cut, each},
    },
    kernels::matmul::matrix::STRIP,
};

/// Largest batch for which this path is faster than panels.
pub const ROWS: usize = 72;

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
                        unsafe { tile.rows_of_f16(s, tall.min(n - row)) }
                    }
                }
            }
        }
    });
}
