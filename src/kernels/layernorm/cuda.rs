//! CUDA side: a warp for each row, four rows in a block.

use super::Norm;
use crate::device::{
    View, ViewMut,
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
    let arguments = arguments![x, norm.gain, norm.bias, norm.epsilon, &y, &stats, sizes[0], sizes[1]];
    gpu.launch(&IMAGE, &named("layernorm_forward", x.dtype()), grid(n), arguments);
}

pub fn backward(gpu: &'static Gpu, dy: View, x: View, stats: View, norm: Norm, dx: ViewMut) {
    let c = norm.gain.len();
    let n = x.len() / c;
    assert!(dy.len() == n * c && dx.len() == n * c && stats.len() == 2 * n, "layernorm shapes");
    let arguments = arguments![dy, x, stats, norm.gain, &dx, Argument::int(n), Argument::int(c)];
    gpu.launch(&IMAGE, &named("layernorm_backward", x.dtype()), grid(n), arguments);
}
