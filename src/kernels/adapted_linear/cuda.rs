//! CUDA side: tiled thin products; sums over rows go through shares that are added in order.

use super::device_scratch::{deltas as parts_of, row_shares};
use super::{Delta, Dropout, InitialValue, Matrix};
use crate::{
    device::{
        View, ViewMut,
        cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
    },
    kernels::matmul::{
        self,
        cuda::operands,
        device_scratch::{SMALL_BATCH, product_shares},
    },
};

static IMAGE: Image = image!("adapted_linear");

type Sizes = (usize, usize, usize);

/// A [`Dropout`] as the kernels take it, the delta's place mixed into its key.
#[derive(Clone, Copy)]
#[repr(C)]
struct Dropped {
    key: u64,
    p: f32,
    first_row: i32,
    seq_len: i32,
    stride: i32,
}

fn dropped(dropout: Dropout, delta: &Delta) -> Argument {
    Argument::structure(Dropped {
        key: dropout.key_of(delta.a),
        p: dropout.p,
        first_row: dropout.first_row as i32,
        seq_len: dropout.seq_len.max(1) as i32,
        stride: dropout.stride as i32,
    })
}

fn a_of<'a>(values: View<'a>, delta: &Delta, inputs: usize) -> View<'a> {
    values.slice(delta.a, delta.rank * inputs)
}

fn b_of<'a>(values: View<'a>, delta: &Delta) -> View<'a> {
    values.slice(delta.b, delta.rank * delta.columns.len())
}

#[allow(clippy::too_many_arguments, reason = "mirrors the op")]
pub fn forward(
    gpu: &'static Gpu,
    (x, weight, start): (View, Matrix, InitialValue),
    deltas: &[Delta],
    values: View,
    dropout: Dropout,
    low: ViewMut,
    y: ViewMut,
    n: usize,
) {
    if let ([delta], 1..=SMALL_BATCH) = (deltas, n) {
        return few(gpu, (x, weight, start), delta, values, dropout, low, y, n);
    }
    let mut y = y;
    matmul::frozen_nn(x, weight, start, y.reborrow(), n);
    add_deltas(gpu, x, deltas, values, dropout, low, y, (n, weight.rows, weight.cols));
}

/// Few rows and one delta, as most adapters have at a site: low beside the frozen product, B where its shares are added. Two
/// launches where there would be four, each as long as the little that it does.
#[allow(clippy::too_many_arguments, reason = "mirrors the op")]
fn few(
    gpu: &'static Gpu,
    (x, weight, start): (View, Matrix, InitialValue),
    delta: &Delta,
    values: View,
    dropout: Dropout,
    low: ViewMut,
    y: ViewMut,
    n: usize,
) {
    let (inputs, outputs, rank) = (weight.rows, weight.cols, delta.rank);
    assert!(x.len() >= n * inputs && y.len() >= n * outputs && low.len() >= n * rank, "shapes of a delta");
    let (residual, bias) = operands(start, &y);
    let splits = product_shares(inputs, outputs);
    gpu.scratch(4 * splits * n * outputs, |parts| {
        let [n_, rows, cols, rank_] = [n, inputs, outputs, rank].map(Argument::int);
        let (a, dropout) = (a_of(values, delta, inputs), dropped(dropout, delta));
        let arguments = arguments![x, weight.data, parts, n_, rows, cols, a, dropout, &low, rank_];
        let blocks = outputs.div_ceil(32) + (n * rank).div_ceil(8);
        gpu.launch(&IMAGE, &named("lora_few", y.dtype()), Grid::of((blocks, splits, 1), 256), arguments);
        let (b, splits) = (b_of(values, delta), Argument::int(splits));
        let [first, columns] = [delta.columns.start, delta.columns.len()].map(Argument::int);
        let arguments = arguments![
            parts,
            splits,
            residual,
            bias,
            &y,
            n_,
            cols,
            &low,
            b,
            delta.scale,
            first,
            columns,
            rank_
        ];
        let grid = Grid::row((n * outputs).div_ceil(256), 256);
        gpu.launch(&IMAGE, &named("lora_few_finish", y.dtype()), grid, arguments);
    });
}

#[allow(clippy::too_many_arguments, reason = "mirrors the op")]
pub fn add_deltas(
    gpu: &'static Gpu,
    x: View,
    deltas: &[Delta],
    values: View,
    dropout: Dropout,
    low: ViewMut,
    y: ViewMut,
    (n, inputs, outputs): Sizes,
) {
    let mut low = low;
    let mut start = 0;
    for delta in deltas {
        let low = low.reborrow().slice(start, n * delta.rank);
        start += n * delta.rank;
        thin(gpu, x, delta, values, dropout, &low, (n, inputs));
        let columns = delta.columns.len();
        let sizes = [n, outputs, delta.columns.start, columns, delta.rank].map(Argument::int);
        let [n_, outputs, first, columns_, rank] = sizes;
        let b = b_of(values, delta);
        let arguments = arguments![&low, b, delta.scale, &y, n_, outputs, first, columns_, rank];
        let grid = Grid::of((n.div_ceil(64), columns.div_ceil(64), 1), 256);
        gpu.launch(&IMAGE, &named("lora_add", y.dtype()), grid, arguments);
    }
}

/// `low` of a forward alone, with the same sums in the same order.
pub fn low(
    gpu: &'static Gpu,
    x: View,
    deltas: &[Delta],
    values: View,
    dropout: Dropout,
    low: ViewMut,
    sizes: (usize, usize),
) {
    let mut low = low;
    let mut start = 0;
    for delta in deltas {
        let count = sizes.0 * delta.rank;
        thin(gpu, x, delta, values, dropout, &low.reborrow().slice(start, count), sizes);
        start += count;
    }
}

/// `low (n, r) = drop(x) A^T`.
fn thin(
    gpu: &'static Gpu,
    x: View,
    delta: &Delta,
    values: View,
    dropout: Dropout,
    low: &ViewMut,
    (n, inputs): (usize, usize),
) {
    let rank = delta.rank;
    let sizes = [n, inputs, rank].map(Argument::int);
    let (a, dropout) = (a_of(values, delta, inputs), dropped(dropout, delta));
    let arguments = arguments![x, a, dropout, low, sizes[0], sizes[1], sizes[2]];
    let (kernel, grid) = if n <= SMALL_BATCH {
        ("lora_low_few", Grid::of((rank.div_ceil(4), n, 1), 128))
    } else {
        ("lora_low", Grid::of((n.div_ceil(64), rank.div_ceil(16), 1), 256))
    };
    gpu.launch(&IMAGE, &named(kernel, x.dtype()), grid, arguments);
}

#[allow(clippy::too_many_arguments, reason = "mirrors the op")]
pub fn backward_deltas(
    gpu: &'static Gpu,
    dy: View,
    x: View,
    deltas: &[Delta],
    (values, grads): (View, ViewMut),
    dropout: Dropout,
    (low, d_low): (View, ViewMut),
    dx: Option<ViewMut>,
    sizes: Sizes,
) {
    let (mut grads, mut d_low) = (grads, d_low);
    let (n, inputs, outputs) = sizes;
    let mut start = 0;
    for delta in deltas {
        let count = n * delta.rank;
        let (low, d_low) = (low.slice(start, count), d_low.reborrow().slice(start, count));
        start += count;
        let [n_, outputs_, first, columns, rank] =
            [n, outputs, delta.columns.start, delta.columns.len(), delta.rank].map(Argument::int);
        let b = b_of(values, delta);
        let arguments = arguments![dy, b, delta.scale, &d_low, n_, outputs_, first, columns, rank];
        let grid = Grid::of((n.div_ceil(64), delta.rank.div_ceil(16), 1), 256);
        gpu.launch(&IMAGE, &named("lora_d_low", dy.dtype()), grid, arguments);
        b_gradient(gpu, dy, low, delta, grads.reborrow(), sizes);
        a_gradient(gpu, x, d_low.as_view(), delta, dropout, grads.reborrow(), sizes);
        if let Some(dx) = &dx {
            let a = a_of(values, delta, inputs);
            let arguments =
                arguments![&d_low, a, dropped(dropout, delta), dx, n_, Argument::int(inputs), rank];
            let grid = Grid::of((n.div_ceil(64), inputs.div_ceil(64), 1), 256);
            gpu.launch(&IMAGE, &named("lora_dx", dx.dtype()), grid, arguments);
        }
    }
}

/// `dB (columns, r) += scale * dy[:, columns]^T low`.
fn b_gradient(gpu: &'static Gpu, dy: View, low: View, delta: &Delta, grads: ViewMut, (n, _, outputs): Sizes) {
    let (columns, rank, splits) = (delta.columns.len(), delta.rank, row_shares(n));
    gpu.scratch(parts_of(n, columns, rank), |parts| {
        let [n, outputs, first, count, r] =
            [n, outputs, delta.columns.start, columns, rank].map(Argument::int);
        let arguments = arguments![dy, low, parts, n, outputs, first, count, r];
        let grid = Grid::of((columns.div_ceil(64), rank.div_ceil(16), splits), 256);
        gpu.launch(&IMAGE, &named("lora_db", dy.dtype()), grid, arguments);
        sum(gpu, parts, splits, delta.scale, grads.slice(delta.b, columns * rank));
    });
}

/// `dA (r, in) += d_low^T drop(x)`.
fn a_gradient(
    gpu: &'static Gpu,
    x: View,
    d_low: View,
    delta: &Delta,
    dropout: Dropout,
    grads: ViewMut,
    (n, inputs, _): Sizes,
) {
    let (rank, splits) = (delta.rank, row_shares(n));
    gpu.scratch(parts_of(n, inputs, rank), |parts| {
        let sizes = [n, inputs, rank].map(Argument::int);
        let arguments = arguments![x, d_low, dropped(dropout, delta), parts, sizes[0], sizes[1], sizes[2]];
        let grid = Grid::of((inputs.div_ceil(64), rank.div_ceil(16), splits), 256);
        gpu.launch(&IMAGE, &named("lora_da", x.dtype()), grid, arguments);
        sum(gpu, parts, splits, 1.0, grads.slice(delta.a, rank * inputs));
    });
}

/// `gradient += scale * sum of shares`.
fn sum(gpu: &'static Gpu, parts: u64, splits: usize, scale: f32, gradient: ViewMut) {
    let count = gradient.len();
    let arguments = arguments![parts, Argument::int(splits), scale, &gradient, Argument::long(count)];
    gpu.launch(&IMAGE, "sum_parts", Grid::row(count.div_ceil(256), 256), arguments);
}
