//! Products of FP32 matrices with any strides, on one thread: the thin ones of low-rank deltas, those of a prefix's
//! network, attention of few queries.

use super::{
    LANES, load_or, store,
    tile::{Begin, COLUMNS, ROWS, Tile, pack_turned},
};
use crate::kernels::cpu::{Strides, with_scratch};

/// Steps and columns of the right matrix that are packed at a time: 768 KiB.
const DEPTH: usize = 512;
const WIDTH: usize = 384;

/// Floats of scratch for a product of `k` steps and `n` columns.
pub fn scratch(n: usize, k: usize) -> usize {
    k.min(DEPTH) * n.min(WIDTH).next_multiple_of(LANES)
}

/// A matrix in memory.
#[derive(Clone, Copy)]
pub struct Operand {
    /// Its first element.
    pub data: *const f32,
    /// Where the others are.
    pub strides: Strides,
}

impl Operand {
    fn at(self, row: usize, column: usize) -> *const f32 {
        self.data.wrapping_add(row * self.strides.row + column * self.strides.column)
    }
}

/// `dst (m, n) = dst or 0 + scale * lhs (m, k) rhs (k, n)`, rows of `dst` that far apart.
///
/// # Safety
/// The CPU has AVX-512 F; the matrices lie in valid memory, and nothing else uses `dst`.
#[target_feature(enable = "avx512f")]
pub unsafe fn product(
    (m, n, k): (usize, usize, usize),
    (dst, dst_row): (*mut f32, usize),
    keep: bool,
    lhs: Operand,
    rhs: Operand,
    scale: f32,
) {
    // Whole vectors of a row can be read where they are.
    let packed = rhs.strides.column != 1 || !n.is_multiple_of(LANES);
    with_scratch(if packed { scratch(n, k) } else { 0 }, |panel| {
        for j in (0..n).step_by(WIDTH) {
            let width = WIDTH.min(n - j);
            for step in (0..k.max(1)).step_by(DEPTH) {
                let depth = DEPTH.min(k - step);
                let begin = if keep || step > 0 { Begin::Keep } else { Begin::Zero };
                // SAFETY: the caller's promise.
                unsafe {
                    if packed {
                        pack(rhs, (step, depth), (j, width), panel);
                    }
                    for row in (0..m).step_by(ROWS) {
                        for group in (0..width).step_by(COLUMNS) {
                            let columns = COLUMNS.min(width - group);
                            let (panel, panel_row) = if packed {
                                (panel[group * depth..].as_ptr(), columns.next_multiple_of(LANES))
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
                            tile.rows(ROWS.min(m - row));
                        }
                    }
                }
            }
        }
    });
}

/// Copies `rhs[step .. + depth, j .. + width]` into groups of columns as [`pack_turned`] lays them out.
///
/// # Safety
/// The CPU has AVX-512 F; rhs is valid, and has its rows or its columns one after another.
#[target_feature(enable = "avx512f")]
unsafe fn pack(rhs: Operand, (step, depth): (usize, usize), (j, width): (usize, usize), panel: &mut [f32]) {
    // SAFETY: the caller's promise: `count` elements stand in a row from there.
    let run = |row: usize, column: usize, count: usize| unsafe {
        std::slice::from_raw_parts(rhs.at(row, column), count)
    };
    if rhs.strides.column != 1 {
        assert_eq!(rhs.strides.row, 1, "a matrix with neither rows nor columns in one piece");
        let load = |column: usize, at: usize, steps: usize| load_or(run(step + at, j + column, steps), 0.0);
        // SAFETY: the caller's promise.
        return unsafe { pack_turned(panel, (depth, width), load) };
    }
    for group in (0..width).step_by(COLUMNS) {
        let count = COLUMNS.min(width - group);
        let columns = count.next_multiple_of(LANES);
        let to = &mut panel[group * depth..][..columns * depth];
        for (at, to) in to.chunks_exact_mut(columns).enumerate() {
            let from = run(step + at, j + group, count);
            for (from, to) in from.chunks(LANES).zip(to.chunks_exact_mut(LANES)) {
                store(to, load_or(from, 0.0));
            }
        }
    }
}
