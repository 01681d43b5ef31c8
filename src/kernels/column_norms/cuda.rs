//! CUDA side: the factors of all deltas are written one after another, so that one kernel reads each weight once.

use super::{AdaptedMatrix, device_scratch};
use crate::{
    device::{
        DType, View, ViewMut,
        cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
    },
    kernels::matmul::Layout,
};

static IMAGE: Image = image!("column_norms");

pub fn forward(gpu: &'static Gpu, matrix: AdaptedMatrix, norms: ViewMut) {
    let (weight, ranks) = (matrix.weight, matrix.ranks());
    let (inputs, outputs) = (weight.rows, weight.cols);
    assert!(
        matches!(weight.data.dtype(), DType::F16 | DType::BF16)
            && weight.layout == Layout::Rows
            && weight.data.len() >= inputs * outputs,
        "shapes of a frozen matrix"
    );
    let share = device_scratch::share(inputs);
    let splits = inputs.div_ceil(share);
    gpu.scratch(device_scratch::norms((inputs, outputs), ranks), |a| {
        let b = a + 4 * (ranks * inputs) as u64;
        let parts = b + 4 * (ranks * outputs) as u64;
        write_factors(gpu, matrix, (a, b));
        let [inputs_, outputs_, ranks_, share_] = [inputs, outputs, ranks, share].map(Argument::int);
        let grid = Grid::of((outputs.div_ceil(64), splits, 1), 256);
        let arguments = arguments![weight.data, a, b, parts, ranks_, inputs_, outputs_, share_];
        gpu.launch(&IMAGE, &named("column_norms_parts", weight.data.dtype()), grid, arguments);
        let arguments = arguments![parts, Argument::int(splits), &norms, outputs_];
        gpu.launch(&IMAGE, "column_norms_finish", Grid::row(outputs.div_ceil(256), 256), arguments);
    });
}

/// A of all deltas `(ranks, in)`, and `s diag(d) B^T diag(e) (ranks, out)`, 0 outside of a delta's columns.
fn write_factors(gpu: &'static Gpu, matrix: AdaptedMatrix, (mut to_a, mut to_b): (u64, u64)) {
    let AdaptedMatrix { weight, deltas, values } = matrix;
    for delta in deltas.iter().filter(|delta| delta.rank > 0) {
        let (rank, columns) = (delta.rank, &delta.columns);
        let a = values.slice(delta.a, rank * weight.rows);
        let b = values.slice(delta.b, rank * columns.len());
        let d = delta.d.map(|d| values.slice(d.at, rank));
        let e = delta.e.map(|e| values.slice(e.at, columns.len()));
        let [rank_, inputs, outputs, first, count] =
            [rank, weight.rows, weight.cols, columns.start, columns.len()].map(Argument::int);
        let arguments = arguments![a, b, d, e, delta.scale, to_a, to_b, rank_, inputs, outputs, first, count];
        let grid = Grid::row((rank * weight.rows.max(weight.cols)).div_ceil(256), 256);
        gpu.launch(&IMAGE, "column_norms_factors", grid, arguments);
        to_a += 4 * (rank * weight.rows) as u64;
        to_b += 4 * (rank * weight.cols) as u64;
    }
}

pub fn output_scale(gpu: &'static Gpu, m: View, norms: View, g: ViewMut) {
    let arguments = arguments![m, norms, &g, Argument::int(g.len())];
    gpu.launch(&IMAGE, "output_scale", Grid::row(g.len().div_ceil(256), 256), arguments);
}

pub fn output_scale_backward(gpu: &'static Gpu, dg: View, norms: View, dm: ViewMut) {
    let arguments = arguments![dg, norms, &dm, Argument::int(dm.len())];
    gpu.launch(&IMAGE, "output_scale_backward", Grid::row(dm.len().div_ceil(256), 256), arguments);
}
