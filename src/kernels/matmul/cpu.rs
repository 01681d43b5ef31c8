//! CPU side: vector kernels at levels that have them. Elsewhere panels of weights are widened into per-thread scratch
//! and multiplied in FP32 by `gemm`, which is also the plain twin of the vector kernels.

use std::ops::Range;

use half::f16;

use super::{DenseShape, Elements, InitialValue, Matrix, PanelRange, ProductShape, matrix::STRIP, simd};
use crate::device::{
    View,
    cpu::{
        Shared, Strides, gemm,
        simd::at_level,
        tasks::{bands, cut, each, parts},
        wide, widen, with_scratch,
    },
};

/// Widened panels are at most INNER x OUTER floats (768 KiB): they stay in a second-level cache.
const INNER: usize = 384;
const OUTER: usize = 512;
/// Bands of rows are a multiple of this, so that `gemm` cuts a band as it cuts the whole.
const ROWS: usize = 48;
/// Largest batch whose product reads each weight once, in place: decoding is memory-bound.
const SMALL_BATCH: usize = 4;

/// Floats of scratch of a task, and floats that packing takes for a product of `n` rows.
pub fn scratch(n: usize) -> (usize, usize) {
    if let Some(scratch) = at_level!(s => simd::scratch(s)) {
        return (scratch, 0);
    }
    (INNER * OUTER, crate::device::cpu::packing(n, OUTER, INNER))
}

pub fn frozen_nn(x: &[f32], w: Matrix, start: InitialValue, y: &mut [f32], n: usize) {
    let factor = simd::RightFactor::of(w, false);
    if at_level!(s => simd::frozen(s, x, factor, start, y, n)).is_some() {
        return;
    }
    let shape = ProductShape { n, inner: w.rows, outer: w.cols };
    let weights = w.host();
    // A panel has rows of W, each cut to the columns of the range.
    let widen_panel = |range: PanelRange, panel: &mut [f32]| {
        let (rows, columns) =
            (range.inner..range.inner + range.depth, range.outer..range.outer + range.width);
        weights.widen_rows(w.cols, rows, columns, panel);
        Strides::rows(range.width)
    };
    let small_batch = |out: Shared, columns: Range<usize>| small_batch_nn(x, weights, out, shape, columns);
    product(x, shape, start, y, widen_panel, small_batch);
}

pub fn frozen_nt(x: &[f32], w: Matrix, start: InitialValue, y: &mut [f32], n: usize) {
    let factor = simd::RightFactor::of(w, true);
    if at_level!(s => simd::frozen(s, x, factor, start, y, n)).is_some() {
        return;
    }
    let shape = ProductShape { n, inner: w.cols, outer: w.rows };
    let weights = w.host();
    // A panel has rows of W, which are columns of V, each cut to the steps of the range: it is read transposed.
    let widen_panel = |range: PanelRange, panel: &mut [f32]| {
        let (rows, columns) =
            (range.outer..range.outer + range.width, range.inner..range.inner + range.depth);
        weights.widen_rows(w.cols, rows, columns, panel);
        Strides::columns(range.depth)
    };
    let small_batch = |out: Shared, columns: Range<usize>| small_batch_nt(x, weights, out, shape, columns);
    product(x, shape, start, y, widen_panel, small_batch);
}

/// `y (n, outer) = start + x (n, inner) V`, a task for each panel of columns of V, and where these are fewer than
/// threads, for each band of rows in it.
///
/// `widen_panel(range, panel)` widens that part of V and returns its strides; `small_batch(y, columns)` adds these
/// columns of the product of a small batch.
fn product(
    x: &[f32],
    shape: ProductShape,
    start: InitialValue,
    y: &mut [f32],
    widen_panel: impl Fn(PanelRange, &mut [f32]) -> Strides + Sync,
    small_batch: impl Fn(Shared, Range<usize>) + Sync,
) {
    shape.check(x, y);
    let ProductShape { n, inner, outer } = shape;
    let out = Shared::new(y);
    if n <= SMALL_BATCH {
        // Wide ranges of columns: each row begins in a page of its own.
        let (tasks, width) = cut(outer, STRIP);
        return each(tasks, |task| {
            let j = task * width;
            let jn = width.min(outer - j);
            fill(start, out, 0..n, outer, j, jn);
            small_batch(out, j..j + jn);
        });
    }
    let (tasks, width) = parts(outer, OUTER);
    let (bands, height) = bands(tasks, n, ROWS);
    each(tasks * bands, |task| {
        let (j, row) = (task / bands * width, task % bands * height);
        let (jn, rows) = (width.min(outer - j), row..n.min(row + height));
        fill(start, out, rows.clone(), outer, j, jn);
        with_scratch(INNER * width, |panel| {
            for k in (0..inner).step_by(INNER) {
                let kn = INNER.min(inner - k);
                let strides = widen_panel(PanelRange { inner: k, depth: kn, outer: j, width: jn }, panel);
                // SAFETY: these rows of columns j .. j + jn of y belong to this task; x and panel are only read.
                unsafe {
                    gemm(
                        (rows.len(), jn, kn),
                        out.at(row * outer + j),
                        Strides::rows(outer),
                        1.0,
                        x[row * inner + k..].as_ptr(),
                        Strides::rows(inner),
                        panel.as_ptr(),
                        strides,
                        1.0,
                    );
                }
            }
        });
    });
}

/// Writes the initial value into columns `j .. j + jn` of some rows.
pub(super) fn fill(start: InitialValue, out: Shared, rows: Range<usize>, cols: usize, j: usize, jn: usize) {
    for row in rows {
        // SAFETY: these columns belong to the calling task.
        let y = unsafe { out.range(row * cols + j, jn) };
        let bias = |bias: View, y: &mut [f32]| {
            y.iter_mut().zip(&bias.host::<f16>()[j..]).for_each(|(y, &b)| *y += wide(b));
        };
        match start {
            InitialValue::Keep => {}
            InitialValue::Zero => y.fill(0.0),
            InitialValue::Bias(b) => widen(&b.host::<f16>()[j..j + jn], y),
            InitialValue::Residual(residual, b) => {
                y.copy_from_slice(&residual.host::<f32>()[row * cols + j..][..jn]);
                bias(b, y);
            }
        }
    }
}

/// A row of weights is widened in pieces of this many floats, which stay in the first-level cache.
const PIECE: usize = 768;

/// Adds columns of `x W` to y, `W (inner, outer)`.
fn small_batch_nn(x: &[f32], w: Elements, out: Shared, shape: ProductShape, columns: Range<usize>) {
    let ProductShape { n, inner, outer } = shape;
    let mut piece = [0f32; PIECE];
    for k in 0..inner {
        for first in columns.clone().step_by(PIECE) {
            let piece = &mut piece[..PIECE.min(columns.end - first)];
            w.widen(outer, (k, first), piece);
            for row in 0..n {
                let factor = x[row * inner + k];
                // SAFETY: these columns belong to the calling task.
                let y = unsafe { out.range(row * outer + first, piece.len()) };
                crate::device::cpu::vectorised(
                    #[inline(always)]
                    || y.iter_mut().zip(&*piece).for_each(|(y, w)| *y += factor * w),
                );
            }
        }
    }
}

/// Adds columns of `x W^T` to y, `W (outer, inner)`.
fn small_batch_nt(x: &[f32], w: Elements, out: Shared, shape: ProductShape, columns: Range<usize>) {
    let ProductShape { n, inner, outer } = shape;
    let mut piece = [0f32; PIECE];
    for weight_row in columns {
        for k in (0..inner).step_by(PIECE) {
            let kn = PIECE.min(inner - k);
            w.widen(inner, (weight_row, k), &mut piece[..kn]);
            for row in 0..n {
                let sum = dot(&x[row * inner + k..][..kn], &piece[..kn]);
                // SAFETY: this column belongs to the calling task.
                let y = unsafe { out.range(row * outer + weight_row, 1) };
                y[0] += sum;
            }
        }
    }
}

/// Scalar product with 16 running sums, in an order that depends on the length alone.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    crate::device::cpu::vectorised(
        #[inline(always)]
        || {
            let mut sums = [0f32; 16];
            let (a_body, a_rest) = a.as_chunks::<16>();
            let (b_body, b_rest) = b.as_chunks::<16>();
            for (a, b) in a_body.iter().zip(b_body) {
                for lane in 0..16 {
                    sums[lane] += a[lane] * b[lane];
                }
            }
            let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
            sums.iter().sum::<f32>() + rest
        },
    )
}

pub fn dense_forward(x: &[f32], w: &[f32], b: &[f32], y: &mut [f32], shape: DenseShape) {
    let DenseShape { n, inputs, outputs } = shape;
    assert!(x.len() == n * inputs && w.len() == inputs * outputs && y.len() == n * outputs, "dense shapes");
    let out = Shared::new(y);
    let (tasks, width) = parts(outputs, OUTER);
    each(tasks, |task| {
        let j = task * width;
        let jn = width.min(outputs - j);
        for row in 0..n {
            // SAFETY: these columns belong to this task.
            unsafe { out.range(row * outputs + j, jn) }.copy_from_slice(&b[j..j + jn]);
        }
        // SAFETY: as above; x and w are only read.
        unsafe {
            gemm(
                (n, jn, inputs),
                out.at(j),
                Strides::rows(outputs),
                1.0,
                x.as_ptr(),
                Strides::rows(inputs),
                w[j * inputs..].as_ptr(),
                Strides::columns(inputs),
                1.0,
            );
        }
    });
}

pub fn dense_backward(dy: &[f32], x: &[f32], dw: &mut [f32], db: &mut [f32], shape: DenseShape) {
    let DenseShape { n, inputs, outputs } = shape;
    assert!(dy.len() == n * outputs && x.len() == n * inputs && dw.len() == inputs * outputs, "dense shapes");
    for row in dy.chunks_exact(outputs) {
        db.iter_mut().zip(row).for_each(|(db, dy)| *db += dy);
    }
    let gradient = Shared::new(dw);
    let (tasks, height) = parts(outputs, OUTER);
    each(tasks, |task| {
        let j = task * height;
        let jn = height.min(outputs - j);
        // SAFETY: rows j .. j + jn of dw belong to this task; dy and x are only read.
        unsafe {
            gemm(
                (jn, inputs, n),
                gradient.at(j * inputs),
                Strides::rows(inputs),
                1.0,
                dy[j..].as_ptr(),
                Strides::columns(outputs),
                x.as_ptr(),
                Strides::rows(inputs),
                1.0,
            );
        }
    });
}

pub fn dense_input_gradient(dy: &[f32], w: &[f32], dx: &mut [f32], shape: DenseShape, accumulate: bool) {
    let DenseShape { n, inputs, outputs } = shape;
    assert!(dy.len() == n * outputs && w.len() == inputs * outputs && dx.len() == n * inputs, "dense shapes");
    let out = Shared::new(dx);
    let (tasks, width) = parts(inputs, OUTER);
    each(tasks, |task| {
        let i = task * width;
        let width = width.min(inputs - i);
        // SAFETY: columns i .. i + width of dx belong to this task; dy and w are only read.
        unsafe {
            gemm(
                (n, width, outputs),
                out.at(i),
                Strides::rows(inputs),
                if accumulate { 1.0 } else { 0.0 },
                dy.as_ptr(),
                Strides::rows(outputs),
                w[i..].as_ptr(),
                Strides::rows(inputs),
                1.0,
            );
        }
    });
}
