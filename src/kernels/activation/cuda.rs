//! CUDA side: a thread takes 8 neighbouring elements.

use super::Activation;
use crate::device::{
    View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
};

static IMAGE: Image = image!("activation");

/// The number of a function in `value.cuh`.
pub fn number(kind: Activation) -> i32 {
    match kind {
        Activation::GeluTanh => 0,
        Activation::Gelu => 1,
        Activation::Relu => 2,
        Activation::Silu => 3,
        Activation::Tanh => 4,
    }
}

pub fn forward(gpu: &'static Gpu, kind: Activation, x: View, y: ViewMut) {
    let count = y.len();
    assert!(x.len() >= count && x.dtype() == y.dtype(), "activation shapes");
    let arguments = arguments![number(kind), x, &y, Argument::long(count)];
    gpu.launch(&IMAGE, &named("activation_forward", x.dtype()), Grid::pointwise(count), arguments);
}

pub fn backward(gpu: &'static Gpu, kind: Activation, x: View, d: ViewMut) {
    let count = d.len();
    assert!(x.len() >= count && x.dtype() == d.dtype(), "activation shapes");
    let arguments = arguments![number(kind), x, &d, Argument::long(count)];
    gpu.launch(&IMAGE, &named("activation_backward", x.dtype()), Grid::pointwise(count), arguments);
}
