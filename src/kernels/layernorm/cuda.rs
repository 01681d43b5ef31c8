//! CUDA side: a block for each row, which it reads once; sums over rows go through shares that are added in order.

use super::{Norm, ParameterGradients, device_scratch};
use crate::device::{
    DType, View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
};

static IMAGE: Image = image!("layernorm");

/// Elements of a row whose runs of 8 the lanes of one warp hold.
const LINE: usize = 256;
/// Runs that a thread holds at most.
const RUNS: usize = 4;
/// Rows from which on blocks of few threads fill a large device.
const MANY_ROWS: usize = 1024;

/// Threads of a block that holds a row `(c)` of `n`; more than a device has where the row is too wide, and the launch
/// fails. It changes no bit.
fn row_threads(n: usize, c: usize) -> usize {
    let lines = c.div_ceil(LINE).max(1);
    let fewest = lines.div_ceil(RUNS);
    32 * if n < MANY_ROWS { lines.min(32).max(fewest) } else { fewest }
}

/// A block a row `(c)`, whose threads add up `values` values of it at a time.
fn grid(n: usize, c: usize, values: usize) -> Grid {
    Grid::row(n, row_threads(n, c)).with_shared(128 * values * c.div_ceil(LINE))
}

pub fn forward(gpu: &'static Gpu, x: View, norm: Norm, y: ViewMut, stats: ViewMut) {
    let c = norm.gain.len();
    let n = x.len() / c;
    assert!(y.len() == n * c && stats.len() == 2 * n && x.dtype() == y.dtype(), "layernorm shapes");
    let (grid, c) = (grid(n, c, 1), Argument::int(c));
    if norm.gain.dtype() == DType::F16 && norm.bias.dtype() == DType::F16 {
        let arguments = arguments![x, norm.gain, norm.bias, norm.epsilon, &y, &stats, c];
        return gpu.launch(&IMAGE, &named("layernorm_forward", x.dtype()), grid, arguments);
    }
    let frozen = |parameter: View<'_>| (parameter.dtype() == DType::F16).then(|| parameter.address());
    let trained = |parameter: View<'_>| (parameter.dtype() == DType::F32).then(|| parameter.address());
    let [gain, trained_gain, bias, trained_bias] =
        [frozen(norm.gain), trained(norm.gain), frozen(norm.bias), trained(norm.bias)]
            .map(|address| address.map_or(Argument::NULL, Argument::from));
    let parameters = [gain, trained_gain, bias, trained_bias];
    let arguments = arguments![
        x,
        parameters[0],
        parameters[1],
        parameters[2],
        parameters[3],
        norm.epsilon,
        &y,
        &stats,
        c
    ];
    gpu.launch(&IMAGE, &named("layernorm_forward_trained", x.dtype()), grid, arguments);
}

pub fn backward(gpu: &'static Gpu, dy: View, x: View, stats: View, norm: Norm, dx: ViewMut) {
    let c = norm.gain.len();
    let n = x.len() / c;
    assert!(dy.len() == n * c && dx.len() == n * c && stats.len() == 2 * n, "layernorm shapes");
    let arguments = arguments![dy, x, stats, norm.gain, &dx, Argument::int(c)];
    let trained = norm.gain.dtype() == DType::F32;
    let kernel = if trained { "layernorm_backward_trained" } else { "layernorm_backward" };
    gpu.launch(&IMAGE, &named(kernel, x.dtype()), grid(n, c, 2), arguments);
}

pub fn parameter_gradients(gpu: &'static Gpu, dy: View, x: View, stats: View, to: ParameterGradients) {
    let ParameterGradients { mut grads, gain, bias } = to;
    let n = stats.len() / 2;
    let c = x.len() / n;
    let shares = device_scratch::shares(n);
    let mut place =
        |at: Option<usize>| at.map_or(Argument::NULL, |at| Argument::from(&grads.reborrow().slice(at, c)));
    let (gain, bias) = (place(gain), place(bias));
    gpu.scratch(device_scratch::parameter_gradients(n, c), |parts| {
        let [n, columns, splits] = [n, c, shares].map(Argument::int);
        let arguments = arguments![dy, x, stats, parts, n, columns];
        let grid = Grid::of((c.div_ceil(256), shares, 1), 256);
        gpu.launch(&IMAGE, &named("layernorm_parameters", x.dtype()), grid, arguments);
        let arguments = arguments![parts, splits, gain, bias, columns];
        gpu.launch(&IMAGE, "layernorm_parameters_finish", Grid::row(c.div_ceil(256), 256), arguments);
    });
}
