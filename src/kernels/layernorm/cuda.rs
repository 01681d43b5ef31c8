//! CUDA side: a warp for each row, four rows in a block; sums over rows go through shares that are added in order.

use super::{Norm, ParameterGradients, device_scratch};
use crate::device::{
    DType, View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
};

static IMAGE: Image = image!("layernorm");

fn grid(n: usize) -> Grid {
    Grid::row(n.div_ceil(4), 128)
}

pub fn forward(gpu: &'static Gpu, x: View, norm: Norm, y: ViewMut, stats: ViewMut) {
    let c = norm.gain.len();
    let n = x.len() / c;
    assert!(y.len() == n * c && stats.len() == 2 * n && x.dtype() == y.dtype(), "layernorm shapes");
    let sizes = [Argument::int(n), Argument::int(c)];
    if norm.gain.dtype() == DType::F16 && norm.bias.dtype() == DType::F16 {
        let arguments = arguments![x, norm.gain, norm.bias, norm.epsilon, &y, &stats, sizes[0], sizes[1]];
        return gpu.launch(&IMAGE, &named("layernorm_forward", x.dtype()), grid(n), arguments);
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
        sizes[0],
        sizes[1]
    ];
    gpu.launch(&IMAGE, &named("layernorm_forward_trained", x.dtype()), grid(n), arguments);
}

pub fn backward(gpu: &'static Gpu, dy: View, x: View, stats: View, norm: Norm, dx: ViewMut) {
    let c = norm.gain.len();
    let n = x.len() / c;
    assert!(dy.len() == n * c && dx.len() == n * c && stats.len() == 2 * n, "layernorm shapes");
    let arguments = arguments![dy, x, stats, norm.gain, &dx, Argument::int(n), Argument::int(c)];
    let trained = norm.gain.dtype() == DType::F32;
    let kernel = if trained { "layernorm_backward_trained" } else { "layernorm_backward" };
    gpu.launch(&IMAGE, &named(kernel, x.dtype()), grid(n), arguments);
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
