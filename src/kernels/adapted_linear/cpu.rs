//! CPU side: thin products around the frozen one, in tasks over rows, columns or inputs.

use std::ops::Range;

use super::{Delta, Dropout};
use crate::device::cpu::{
    Shared, Strides, gemm,
    tasks::{cut, each, shares},
    vectors, with_scratch,
};

/// Rows a task takes; its slice of `y` stays in the second-level cache.
const ROWS: usize = 128;
/// Rows up to which a task takes columns of `y` instead: there would be one task.
const FEW: usize = 64;
/// Columns of y, and of A or rows of B, come in multiples of this many where there is a task for every thread.
const COLUMNS: usize = 64;
/// Columns of A or rows of B a task takes.
const OUTER: usize = 256;

/// Floats of scratch a task uses for `n` rows, sites up to `widest` and deltas up to `rank`, and floats that packing
/// takes beside it.
pub fn scratch(n: usize, widest: usize, rank: usize, dropout: bool) -> (usize, usize) {
    let packing = packing(n, widest, rank);
    let low = if n <= FEW { n * rank } else { 0 };
    match (dropout, vectors()) {
        (true, _) => ((ROWS.min(n) * widest).max(n * OUTER.min(widest)), packing),
        // Our own packing is scratch like any other.
        (false, true) => (low + packing, 0),
        (false, false) => (low, packing),
    }
}

fn packing(n: usize, widest: usize, rank: usize) -> usize {
    let sizes = [(ROWS, widest, rank), (ROWS, rank, widest), (OUTER, rank, n), (rank, OUTER, n)];
    sizes.into_iter().map(|(m, n, k)| crate::device::cpu::packing(m, n, k)).max().unwrap_or(0)
}

type Sizes = (usize, usize, usize);

pub fn add_deltas(
    x: &[f32],
    deltas: &[Delta],
    values: &[f32],
    dropout: Dropout,
    low: &mut [f32],
    y: &mut [f32],
    (n, inputs, outputs): Sizes,
) {
    let (low, y) = (Shared::new(low), Shared::new(y));
    let mut low_at = 0;
    for delta in deltas {
        let rank = delta.rank;
        let (a, b) = (&values[delta.a..][..rank * inputs], &values[delta.b..][..rank * delta.columns.len()]);
        let (a_strides, b_strides, b_column) = match delta.turned {
            true => (Strides::rows(rank), Strides::rows(delta.columns.len()), 1),
            false => (Strides::columns(inputs), Strides::columns(rank), rank),
        };
        // SAFETY: called for rows of low and elements of y that belong to the calling task.
        let add = |low: *const f32, rows: Range<usize>, columns: Range<usize>| unsafe {
            gemm(
                (rows.len(), columns.len(), rank),
                y.at(rows.start * outputs + delta.columns.start + columns.start),
                Strides::rows(outputs),
                1.0,
                low,
                Strides::rows(rank),
                b[columns.start * b_column..].as_ptr(),
                b_strides,
                delta.scale,
            );
        };
        if n <= FEW && dropout.p == 0.0 {
            let (tasks, width) = cut(delta.columns.len(), COLUMNS);
            each(tasks, |task| {
                // Making `low` in every task costs less than waiting for one that makes it.
                with_scratch(n * rank, |own| {
                    // SAFETY: n x rank floats of this task.
                    unsafe { thin(x, (a, a_strides), own.as_mut_ptr(), (n, rank, inputs)) };
                    add(own.as_ptr(), 0..n, task * width..delta.columns.len().min((task + 1) * width));
                    if task == 0 {
                        // SAFETY: only this task writes low.
                        unsafe { low.range(low_at, n * rank) }.copy_from_slice(own);
                    }
                });
            });
        } else {
            each(n.div_ceil(ROWS), |task| {
                let rows = task * ROWS..n.min((task + 1) * ROWS);
                let low_here = low.at(low_at + rows.start * rank);
                with_dropped(x, delta, dropout, inputs, rows.clone(), 0..inputs, |x| {
                    // SAFETY: these rows of low belong to this task; the operands are only read.
                    unsafe { thin(x, (a, a_strides), low_here, (rows.len(), rank, inputs)) };
                    add(low_here, rows, 0..delta.columns.len());
                });
            });
        }
        low_at += n * rank;
    }
}

/// The first product of [`add_deltas`] alone, in the same tasks.
pub fn low(
    x: &[f32],
    deltas: &[Delta],
    values: &[f32],
    dropout: Dropout,
    low: &mut [f32],
    (n, inputs): (usize, usize),
) {
    let low = Shared::new(low);
    let mut low_at = 0;
    for delta in deltas {
        let rank = delta.rank;
        let a = &values[delta.a..][..rank * inputs];
        each(n.div_ceil(ROWS), |task| {
            let rows = task * ROWS..n.min((task + 1) * ROWS);
            with_dropped(x, delta, dropout, inputs, rows.clone(), 0..inputs, |x| {
                // SAFETY: these rows of low belong to this task; the operands are only read.
                unsafe {
                    let a = (a, Strides::columns(inputs));
                    thin(x, a, low.at(low_at + rows.start * rank), (rows.len(), rank, inputs));
                }
            });
        });
        low_at += n * rank;
    }
}

/// `low (rows, r) = x (rows, in) A^T`.
///
/// # Safety
/// `low` points at that many floats, which nothing else uses meanwhile.
unsafe fn thin(x: &[f32], (a, a_strides): (&[f32], Strides), low: *mut f32, (rows, rank, inputs): Sizes) {
    // SAFETY: promised by the caller.
    unsafe {
        gemm(
            (rows, rank, inputs),
            low,
            Strides::rows(rank),
            0.0,
            x.as_ptr(),
            Strides::rows(inputs),
            a.as_ptr(),
            a_strides,
            1.0,
        );
    }
}

#[allow(clippy::too_many_arguments, reason = "mirrors the op")]
pub fn backward_deltas(
    dy: &[f32],
    x: &[f32],
    deltas: &[Delta],
    (values, grads): (&[f32], &mut [f32]),
    dropout: Dropout,
    (low, d_low): (&[f32], &mut [f32]),
    mut dx: Option<&mut [f32]>,
    sizes: Sizes,
) {
    let n = sizes.0;
    let mut low_at = 0;
    for delta in deltas {
        let count = n * delta.rank;
        let (low, d_low) = (&low[low_at..][..count], &mut d_low[low_at..][..count]);
        low_gradient(dy, delta, values, d_low, sizes);
        b_gradient(dy, delta, low, grads, sizes);
        a_gradient(x, delta, dropout, d_low, grads, sizes);
        if let Some(dx) = &mut dx {
            add_dx(delta, values, dropout, d_low, dx, sizes);
        }
        low_at += count;
    }
}

/// `d_low (n, r) = scale * dy[:, columns] B`.
fn low_gradient(dy: &[f32], delta: &Delta, values: &[f32], d_low: &mut [f32], (n, _, outputs): Sizes) {
    let rank = delta.rank;
    let b = &values[delta.b..][..rank * delta.columns.len()];
    let d_low = Shared::new(d_low);
    each(n.div_ceil(ROWS), |task| {
        let rows = task * ROWS..n.min((task + 1) * ROWS);
        // SAFETY: these rows of d_low belong to this task; the operands are only read.
        unsafe {
            gemm(
                (rows.len(), rank, delta.columns.len()),
                d_low.at(rows.start * rank),
                Strides::rows(rank),
                0.0,
                dy[rows.start * outputs + delta.columns.start..].as_ptr(),
                Strides::rows(outputs),
                b.as_ptr(),
                Strides::rows(rank),
                delta.scale,
            );
        }
    });
}

/// `dB (columns, r) += scale * dy[:, columns]^T low`.
fn b_gradient(dy: &[f32], delta: &Delta, low: &[f32], grads: &mut [f32], (n, _, outputs): Sizes) {
    let rank = delta.rank;
    let gradient = Shared::new(&mut grads[delta.b..][..rank * delta.columns.len()]);
    let (tasks, height) = shares(delta.columns.len(), OUTER, COLUMNS);
    each(tasks, |task| {
        let j = task * height;
        let count = height.min(delta.columns.len() - j);
        // SAFETY: these rows of dB belong to this task; the operands are only read.
        unsafe {
            gemm(
                (count, rank, n),
                gradient.at(j * rank),
                Strides::rows(rank),
                1.0,
                dy[delta.columns.start + j..].as_ptr(),
                Strides::columns(outputs),
                low.as_ptr(),
                Strides::rows(rank),
                delta.scale,
            );
        }
    });
}

/// `dA (r, in) += d_low^T drop(x)`.
fn a_gradient(
    x: &[f32],
    delta: &Delta,
    dropout: Dropout,
    d_low: &[f32],
    grads: &mut [f32],
    (n, inputs, _): Sizes,
) {
    let rank = delta.rank;
    let gradient = Shared::new(&mut grads[delta.a..][..rank * inputs]);
    let (tasks, width) = shares(inputs, OUTER, COLUMNS);
    each(tasks, |task| {
        let columns = task * width..inputs.min((task + 1) * width);
        with_dropped(x, delta, dropout, inputs, 0..n, columns.clone(), |x| {
            let stride = if dropout.p == 0.0 { inputs } else { columns.len() };
            // SAFETY: these columns of dA belong to this task; the operands are only read.
            unsafe {
                gemm(
                    (rank, columns.len(), n),
                    gradient.at(columns.start),
                    Strides::rows(inputs),
                    1.0,
                    d_low.as_ptr(),
                    Strides::columns(rank),
                    x.as_ptr(),
                    Strides::rows(stride),
                    1.0,
                );
            }
        });
    });
}

/// `dx += drop'(d_low A)`: the factors of the forward, replayed.
fn add_dx(
    delta: &Delta,
    values: &[f32],
    dropout: Dropout,
    d_low: &[f32],
    dx: &mut [f32],
    (n, inputs, _): Sizes,
) {
    let rank = delta.rank;
    let a = &values[delta.a..][..rank * inputs];
    let dx = Shared::new(dx);
    each(n.div_ceil(ROWS), |task| {
        let rows = task * ROWS..n.min((task + 1) * ROWS);
        let add = |to: *mut f32, keep: f32| {
            // SAFETY: `to` points at these rows of dx or at scratch of that size, both this task's own.
            unsafe {
                gemm(
                    (rows.len(), inputs, rank),
                    to,
                    Strides::rows(inputs),
                    keep,
                    d_low[rows.start * rank..].as_ptr(),
                    Strides::rows(rank),
                    a.as_ptr(),
                    Strides::rows(inputs),
                    1.0,
                );
            }
        };
        if dropout.p == 0.0 {
            return add(dx.at(rows.start * inputs), 1.0);
        }
        with_scratch(rows.len() * inputs, |part| {
            add(part.as_mut_ptr(), 0.0);
            for (row, part) in rows.clone().zip(part.chunks_exact(inputs)) {
                // SAFETY: this row belongs to this task.
                let dx = unsafe { dx.range(row * inputs, inputs) };
                for (i, (dx, part)) in dx.iter_mut().zip(part).enumerate() {
                    *dx += part * dropout.factor(delta.a, inputs, row, i);
                }
            }
        });
    });
}

/// Lends rows x columns of `drop(x)`: `x` itself, with its row stride, where there is no dropout;
/// else a dense copy.
fn with_dropped(
    x: &[f32],
    delta: &Delta,
    dropout: Dropout,
    inputs: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    body: impl FnOnce(&[f32]),
) {
    if dropout.p == 0.0 {
        return body(&x[rows.start * inputs + columns.start..]);
    }
    let width = columns.len();
    with_scratch(rows.len() * width, |dropped| {
        for (row, dropped) in rows.zip(dropped.chunks_exact_mut(width)) {
            for (column, dropped) in columns.clone().zip(dropped) {
                *dropped = x[row * inputs + column] * dropout.factor(delta.a, inputs, row, column);
            }
        }
        body(dropped);
    });
}
