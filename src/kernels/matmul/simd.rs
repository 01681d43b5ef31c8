//! The frozen products, vectorised: weights are widened once into packed panels, and a tile of the output stays in
//! registers for all steps of a panel.
//!
//! Every element of the output is `start`, plus for each stretch of a panel's depth one chain of fused
//! multiply-adds from the first weight to the last. Neither the number of rows, nor the position of a row or column
//! in a tile or task, changes a bit. Small batches take another path, see [`small_batch`].

use std::ops::Range;

use half::f16;

use self::weights::{Codes, CodesInStrips, F16Weights, ScaledRows, Weights};
use super::{Elements, InitialValue, Matrix, PanelRange, ProductShape};
use crate::{
    device::cpu::{
        Shared,
        simd::{
            Simd,
            product::SCRATCH as THIN,
            tile::{Begin, ROWS, Tile, pack_transposed_scaled},
        },
        tasks::{bands, each, parts},
        with_scratch,
    },
    kernels::q8::BLOCK,
};

mod four_bits;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod small_batch;
pub mod strips;
mod weights;

#[cfg(target_arch = "x86_64")]
pub use self::pairs::shared;

/// No scratch is shared: products of pairs need x86-64.
#[cfg(not(target_arch = "x86_64"))]
pub fn shared(_: usize) -> usize {
    0
}

/// Rows of weights that are fetched ahead of their widening: each begins in a page of its own, which the CPU does
/// not foresee.
const AHEAD: usize = 6;

/// Floats of scratch of a task.
pub fn scratch<S: Simd>(_: S) -> usize {
    // Dense layers of a prefix's network use it, too.
    const { assert!(THIN <= S::PANEL.0 * S::PANEL.1) };
    #[cfg(target_arch = "x86_64")]
    const {
        assert!(S::LANES < 16 || pairs::SCRATCH <= S::PANEL.0 * S::PANEL.1)
    };
    S::PANEL.0 * S::PANEL.1
}

/// The right factor V of a product.
#[derive(Clone, Copy)]
pub struct RightFactor<W> {
    /// V, or its transpose.
    weights: W,
    /// Whether V is the transpose of the weights.
    transposed: bool,
    /// Whether both factors are rounded to BF16.
    pairs: bool,
}

impl<'a> RightFactor<Matrix<'a>> {
    /// V is `w`, or its transpose.
    pub fn of(w: Matrix<'a>, transposed: bool) -> Self {
        Self { weights: w, transposed, pairs: w.arithmetic.in_pairs() }
    }
}

impl<W> RightFactor<W> {
    /// The same factor in another form.
    fn with<V>(&self, weights: V) -> RightFactor<V> {
        RightFactor { weights, transposed: self.transposed, pairs: self.pairs }
    }
}

/// `y (n, cols) = start + x (n, rows) W`, or transposed `y (n, rows) = start + x (n, cols) W^T`.
pub fn frozen<S: Simd>(
    s: S,
    x: &[f32],
    v: RightFactor<Matrix>,
    start: InitialValue,
    y: &mut [f32],
    n: usize,
) {
    let RightFactor { weights: w, transposed, pairs } = v;
    let (inner, outer) = if transposed { (w.cols, w.rows) } else { (w.rows, w.cols) };
    let shape = ProductShape { n, inner, outer };
    match w.host() {
        Elements::F16(values) => {
            with_rows(s, x, v.with(F16Weights::<false>(values, w.cols)), shape, start, y);
        }
        // Where rows would be rounded to BF16, those in strips are too.
        Elements::Strips(values, _)
            if !transposed && n <= if pairs { small_batch::ROWS } else { strips::ROWS } =>
        {
            strips::nn(s, x, values, shape, start, y);
        }
        Elements::Strips(values, rows) => {
            with_rows(s, x, v.with(F16Weights::<true>(values, rows)), shape, start, y);
        }
        Elements::Codes(codes, scales) => {
            let weights = Codes(codes, scales, w.cols);
            // As many rows as of codes in strips.
            if !transposed && n <= code_rows(pairs) {
                return small_batch::nn(s, x, weights, shape, start, y);
            }
            with_weights(s, x, v.with(weights), shape, start, y);
        }
        Elements::CodesInStrips(codes, scales, _) if !transposed && n <= code_rows(pairs) => {
            strips::nn_of_codes(s, x, (codes, scales), shape, start, y);
        }
        Elements::CodesInStrips(codes, scales, rows) => {
            with_weights(s, x, v.with(CodesInStrips(codes, scales, rows)), shape, start, y);
        }
        Elements::Nf4(matrix) if !transposed && n <= four_bits::rows::<S>(pairs) => {
            four_bits::nn(s, x, matrix, shape, start, y);
        }
        Elements::Nf4(matrix) => {
            four_bits::with_decoded(matrix, |weights| with_weights(s, x, v.with(weights), shape, start, y));
        }
    }
}

/// Largest batch in which rows of x are multiplied by scales before codes.
fn code_rows(pairs: bool) -> usize {
    if pairs { small_batch::ROWS } else { strips::ROWS_OF_CODES }
}

/// [`frozen`] for FP16.
fn with_rows<S: Simd, W: ScaledRows>(
    s: S,
    x: &[f32],
    v: RightFactor<W>,
    shape: ProductShape,
    start: InitialValue,
    y: &mut [f32],
) {
    if !v.transposed && shape.n <= small_batch::ROWS {
        return small_batch::nn(s, x, v.weights, shape, start, y);
    }
    with_weights(s, x, v, shape, start, y);
}

/// [`frozen`] for one form of weights; `x W` of any number of rows through panels.
fn with_weights<S: Simd, W: Weights>(
    s: S,
    x: &[f32],
    v: RightFactor<W>,
    shape: ProductShape,
    start: InitialValue,
    y: &mut [f32],
) {
    let RightFactor { weights: w, transposed, .. } = v;
    if transposed && shape.n <= small_batch::ROWS_TRANSPOSED {
        return small_batch::nt(s, x, w, shape, start, y);
    }
    #[cfg(target_arch = "x86_64")]
    if v.pairs {
        // SAFETY: the CPU has the instructions.
        return unsafe { pairs::product(x, v, shape, start, y) };
    }
    // SAFETY: the ranges of panels are inside a matrix of this shape.
    product(s, x, shape, start, y, |range, panel| unsafe {
        if transposed { pack_columns(s, w, range, panel) } else { pack_rows(s, w, range, panel) }
    });
}

/// `y (n, outer) = start + x (n, inner) V`, a task for each stretch of columns of V, and where these are fewer than
/// threads, for each band of rows in it.
fn product<S: Simd>(
    s: S,
    x: &[f32],
    shape: ProductShape,
    start: InitialValue,
    y: &mut [f32],
    pack: impl Fn(PanelRange, &mut [f32]) + Sync,
) {
    shape.check(x, y);
    let ProductShape { n, inner, outer } = shape;
    check(start, n, outer);
    let out = Shared::new(y);
    let (deep, wide) = S::PANEL;
    let (tasks, width) = parts(outer, wide);
    let (bands, height) = bands(tasks, n, ROWS);
    each(tasks * bands, |task| {
        let (first, row) = (task / bands * width, task % bands * height);
        let (width, rows) = (width.min(outer - first), row..n.min(row + height));
        with_scratch(deep * width.next_multiple_of(S::LANES), |panel| {
            for k in (0..inner.max(1)).step_by(deep) {
                let range = PanelRange { inner: k, depth: deep.min(inner - k), outer: first, width };
                pack(range, panel);
                let to = Output { y: out, outer, start: if k == 0 { start } else { InitialValue::Keep } };
                // SAFETY: these rows of columns first .. first + width of y belong to this task, and the lengths of
                // x, y and start were checked.
                unsafe {
                    tiles(s, LeftRows { x, inner, rows: rows.clone() }, Panel { range, values: panel }, to)
                }
            }
        });
    });
}

/// Asserts the lengths that tiles rely on unchecked.
fn check(start: InitialValue, n: usize, outer: usize) {
    let (residual, bias) = match start {
        InitialValue::Zero | InitialValue::Keep => return,
        InitialValue::Bias(bias) => (None, bias),
        InitialValue::Residual(residual, bias) => (Some(residual), bias),
    };
    assert!(bias.host::<f16>().len() >= outer, "a bias for every column");
    assert!(residual.is_none_or(|residual| residual.host::<f32>().len() >= n * outer), "a residual");
}

/// Widens `W[inner .., outer ..]` into groups of COLUMNS columns, `(depth, columns)` each; the last group
/// is as wide as its vectors, with zeros after its last column.
///
/// # Safety
/// The range is inside the weights.
unsafe fn pack_rows<S: Simd, W: Weights>(s: S, weights: W, range: PanelRange, panel: &mut [f32]) {
    const { assert!(S::PANEL.1 + BLOCK <= W::STRIP, "one set of factors for a row of a panel") };
    let PanelRange { inner, depth, outer, width } = range;
    assert!(panel.len() >= depth * width.next_multiple_of(S::LANES), "room for a panel");
    let to_panel = panel.as_mut_ptr();
    s.enter(
        #[inline(always)]
        move || {
            for k in 0..depth {
                for column in (outer..outer + width).step_by(W::LINE) {
                    s.fetch(weights.address(inner + k + AHEAD, column));
                }
                // SAFETY: the caller's promise.
                let factors = unsafe { weights.factors(s, 1.0, inner + k, outer) };
                let whole = width - width % S::COLUMNS;
                for group in (0..whole).step_by(S::COLUMNS) {
                    for v in 0..S::VECTORS {
                        let (column, to) =
                            (group + v * S::LANES, group * depth + k * S::COLUMNS + v * S::LANES);
                        // SAFETY: the caller's promise, and the panel has whole groups of this depth.
                        unsafe {
                            let row = WeightRow { row: inner + k, first: outer, factors: &factors };
                            s.store(to_panel.wrapping_add(to), vector(s, weights, row, column, S::LANES));
                        }
                    }
                }
                let left = width - whole;
                for (v, column) in (whole..width).step_by(S::LANES).enumerate() {
                    let to = whole * depth + k * left.next_multiple_of(S::LANES) + v * S::LANES;
                    // SAFETY: as above; the last group is as wide as its vectors.
                    unsafe {
                        let row = WeightRow { row: inner + k, first: outer, factors: &factors };
                        s.store(to_panel.wrapping_add(to), vector(s, weights, row, column, width - column));
                    }
                }
            }
        },
    );
}

/// A row of weights from column `first` on.
struct WeightRow<'a, F> {
    row: usize,
    first: usize,
    /// The factors of its columns.
    factors: &'a F,
}

/// LANES weights of a row from its column `column`, or the last `left` ones and zeros.
///
/// # Safety
/// The row has these weights.
#[inline(always)]
unsafe fn vector<S: Simd, W: Weights>(
    s: S,
    weights: W,
    WeightRow { row, first, factors }: WeightRow<W::Factors>,
    column: usize,
    left: usize,
) -> S::Floats {
    let column = first + column;
    // SAFETY: the caller's promise.
    unsafe {
        if left >= S::LANES {
            weights.values(s, (row, column), factors, column / BLOCK - first / BLOCK)
        } else {
            weights.part(s, row, column, left)
        }
    }
}

/// [`pack_rows`] of the transpose: column `outer + j` of the panel is row `outer + j` of W.
///
/// # Safety
/// As [`pack_rows`].
unsafe fn pack_columns<S: Simd, W: Weights>(s: S, weights: W, range: PanelRange, panel: &mut [f32]) {
    const { assert!(S::PANEL.0.is_multiple_of(BLOCK), "panels begin with blocks") };
    let PanelRange { inner, depth, outer, width } = range;
    s.enter(
        #[inline(always)]
        move || {
            pack_transposed_scaled(
                s,
                panel,
                depth,
                width,
                #[inline(always)]
                |row, step, steps| {
                    if step.is_multiple_of(W::LINE) {
                        // The same columns of the next LANES rows.
                        s.fetch(weights.address(outer + row + S::LANES, inner + step));
                    }
                    // SAFETY: the caller's promise.
                    unsafe { weights.raw_part(s, outer + row, inner + step, steps) }
                },
                BLOCK,
                #[inline(always)]
                // SAFETY: as above.
                |row, step, rows| unsafe { weights.row_factors(s, outer + row, inner + step, rows) },
            );
        },
    );
}

/// Packed weights, and the part of V that they are.
#[derive(Clone, Copy)]
struct Panel<'a> {
    range: PanelRange,
    values: &'a [f32],
}

/// Some rows of `x (n, inner)`.
struct LeftRows<'a> {
    x: &'a [f32],
    inner: usize,
    rows: Range<usize>,
}

/// The output `y (n, outer)`, and the value that a product is added to.
#[derive(Clone, Copy)]
struct Output<'a> {
    y: Shared,
    outer: usize,
    start: InitialValue<'a>,
}

/// Computes some rows of y in the columns of a panel.
///
/// # Safety
/// x and y have these sizes, `start` fits y, and the rows of these columns belong to the caller.
unsafe fn tiles<S: Simd>(s: S, left: LeftRows, panel: Panel, to: Output) {
    let (LeftRows { x, inner, rows }, Panel { range, values }) = (left, panel);
    let Output { y, outer, start } = to;
    for row in rows.clone().step_by(ROWS) {
        for group in (0..range.width).step_by(S::COLUMNS) {
            let columns = (range.width - group).min(S::COLUMNS);
            let tile = Tile {
                x: x[row * inner + range.inner..].as_ptr(),
                x_row: inner,
                x_step: 1,
                panel: values[group * range.depth..].as_ptr(),
                panel_row: columns.next_multiple_of(S::LANES),
                depth: range.depth,
                y: y.at(row * outer + range.outer + group),
                y_row: outer,
                columns,
                begin: begin(start, row * outer + range.outer + group, range.outer + group),
                scale: 1.0,
            };
            // SAFETY: the tile is inside the memory that the caller promised.
            unsafe { tile.rows(s, ROWS.min(rows.end - row)) }
        }
    }
}

/// `start` for a tile whose first element is element `at` of the output, in column `column`.
fn begin(start: InitialValue, at: usize, column: usize) -> Begin {
    match start {
        InitialValue::Zero => Begin::Zero,
        InitialValue::Keep => Begin::Keep,
        InitialValue::Bias(bias) => Begin::Bias(bias.host::<f16>()[column..].as_ptr()),
        InitialValue::Residual(residual, bias) => {
            Begin::Residual(residual.host::<f32>()[at..].as_ptr(), bias.host::<f16>()[column..].as_ptr())
        }
    }
}
