//! CUDA side: a thread takes 8 neighbouring elements.

use crate::device::{
    DType, View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image},
};

static IMAGE: Image = image!("elementwise");

pub fn cast(gpu: &'static Gpu, from: View, to: &ViewMut) {
    assert!(from.len() == to.len(), "cast shapes");
    cast_at(gpu, from, to.address(), to.dtype());
}

/// [`cast`] to elements of `dtype` at an address of the device.
pub fn cast_at(gpu: &'static Gpu, from: View, to: u64, dtype: DType) {
    let kernel = match (from.dtype(), dtype) {
        (DType::F32, DType::F16) => "cast_f32_f16",
        (DType::F32, DType::BF16) => "cast_f32_bf16",
        (DType::F16, DType::F32) => "cast_f16_f32",
        (DType::F16, DType::BF16) => "cast_f16_bf16",
        _ => "cast_bf16_f32",
    };
    gpu.launch(&IMAGE, kernel, Grid::pointwise(from.len()), arguments![from, to, Argument::long(from.len())]);
}

pub fn add(gpu: &'static Gpu, from: View, to: &ViewMut) {
    assert!(from.len() == to.len(), "sum shapes");
    let count = from.len();
    gpu.launch(&IMAGE, "add_f32", Grid::pointwise(count), arguments![from, to, Argument::long(count)]);
}
