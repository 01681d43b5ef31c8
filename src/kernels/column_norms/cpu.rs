//! CPU side: a task takes some columns and adds up their squares, a tile of rows after the other.

use std::ops::Range;

use super::AdaptedMatrix;
use crate::{
    device::cpu::{self, Shared, Strides, gemm, tasks::each, vectorised, with_scratch},
    kernels::adapted_linear::Delta,
};

/// Columns of a task: four strips of a matrix, or four cache lines of each of its rows.
const COLUMNS: usize = 128;
/// Rows of a tile, which stays in the first-level cache.
const ROWS: usize = 64;

/// Floats of scratch that a task uses, and floats that packing takes beside it.
pub fn scratch(ranks: usize) -> (usize, usize) {
    let packing = cpu::packing(ROWS, COLUMNS, ranks);
    let own = COLUMNS * (ROWS + ranks);
    // Our own packing is scratch like any other.
    if cpu::vectors() { (own + packing, 0) } else { (own, packing) }
}

/// The part of a delta that adds to some columns of a matrix.
struct Part<'a> {
    /// A `(r, in)`.
    a: &'a [f32],
    /// Rank r, the rows of A.
    rank: usize,
    scale: f32,
    /// Which of the task's columns it adds to.
    columns: Range<usize>,
}

pub fn forward(matrix: AdaptedMatrix, norms: &mut [f32]) {
    let outputs = matrix.weight.cols;
    let norms = Shared::new(norms);
    each(outputs.div_ceil(COLUMNS), |task| {
        let columns = task * COLUMNS..outputs.min((task + 1) * COLUMNS);
        // SAFETY: these columns belong to this task.
        let to = unsafe { norms.range(columns.start, columns.len()) };
        let ranks: usize = matrix.deltas.iter().map(|delta| delta.rank).sum();
        with_scratch(COLUMNS * (ROWS + ranks), |scratch| {
            let (tile, factors) = scratch.split_at_mut(COLUMNS * ROWS);
            let parts = parts(&matrix, &columns, factors);
            norms_of(&matrix, columns, &parts, factors, tile, to);
        });
    });
}

/// The deltas that add to `columns`, and for each of them `diag(d) B^T diag(e) (r, columns of the part)` in `factors`,
/// one after another.
fn parts<'a>(matrix: &AdaptedMatrix<'a>, columns: &Range<usize>, factors: &mut [f32]) -> Vec<Part<'a>> {
    let values: &'a [f32] = matrix.values.host();
    let (mut parts, mut left) = (Vec::new(), factors);
    for delta in matrix.deltas {
        let Delta { a, b, rank, columns: own, scale, d, e, .. } = delta;
        let both = own.start.max(columns.start)..own.end.min(columns.end);
        if both.is_empty() || *rank == 0 {
            continue;
        }
        let b = &values[*b..][..rank * own.len()];
        let d = d.map(|d| &values[d.at..][..*rank]);
        let e = e.map(|e| &values[e.at..][..own.len()]);
        let (factor, rest) = left.split_at_mut(rank * both.len());
        left = rest;
        for (r, row) in factor.chunks_exact_mut(both.len()).enumerate() {
            for (j, to) in both.clone().map(|column| column - own.start).zip(row) {
                *to = b[j * rank + r] * e.map_or(1.0, |e| e[j]) * d.map_or(1.0, |d| d[r]);
            }
        }
        let a = &values[*a..][..rank * matrix.weight.rows];
        let columns = both.start - columns.start..both.end - columns.start;
        parts.push(Part { a, rank: *rank, scale: *scale, columns });
    }
    parts
}

/// Norms of `columns`; `tile` has room for that many of [`ROWS`] rows.
fn norms_of(
    matrix: &AdaptedMatrix,
    columns: Range<usize>,
    parts: &[Part],
    factors: &[f32],
    tile: &mut [f32],
    to: &mut [f32],
) {
    let (elements, width) = (matrix.weight.host(), columns.len());
    let (inputs, outputs) = (matrix.weight.rows, matrix.weight.cols);
    to.fill(0.0);
    for first in (0..inputs).step_by(ROWS) {
        let count = ROWS.min(inputs - first);
        let tile = &mut tile[..count * width];
        elements.widen_rows(outputs, first..first + count, columns.clone(), tile);
        let mut factors = factors;
        for Part { a, rank, scale, columns } in parts {
            // SAFETY: the tile has these rows and columns, and is this task's own; the operands are only read.
            unsafe {
                gemm(
                    (count, columns.len(), *rank),
                    tile[columns.start..].as_mut_ptr(),
                    Strides::rows(width),
                    1.0,
                    a[first..].as_ptr(),
                    Strides::columns(inputs),
                    factors.as_ptr(),
                    Strides::rows(columns.len()),
                    *scale,
                );
            }
            factors = &factors[rank * columns.len()..];
        }
        add_squares(tile, to);
    }
    to.iter_mut().for_each(|sum| *sum = sum.sqrt());
}

/// Adds to each sum the squares of its column of a tile, which are summed by themselves first.
fn add_squares(tile: &[f32], sums: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            let mut squares = [0f32; COLUMNS];
            let squares = &mut squares[..sums.len()];
            for row in tile.chunks_exact(squares.len()) {
                squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
            }
            sums.iter_mut().zip(squares).for_each(|(sum, squares)| *sum += *squares);
        },
    );
}

pub fn output_scale(m: &[f32], norms: &[f32], g: &mut [f32]) {
    for ((g, m), n) in g.iter_mut().zip(m).zip(norms) {
        *g = if *n == 0.0 { 0.0 } else { m / n };
    }
}

pub fn output_scale_backward(dg: &[f32], norms: &[f32], dm: &mut [f32]) {
    for ((dm, dg), n) in dm.iter_mut().zip(dg).zip(norms) {
        *dm += if *n == 0.0 { 0.0 } else { dg / n };
    }
}
