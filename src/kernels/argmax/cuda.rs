//! CUDA side: a block for each row.

use crate::device::{
    View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image},
};

use super::NUMBERS;

static IMAGE: Image = image!("argmax");

pub fn forward(gpu: &'static Gpu, logits: View, to: ViewMut, v: usize) {
    let arguments = arguments![logits, &to, Argument::int(v)];
    gpu.launch(&IMAGE, "argmax", Grid::row(to.len() / NUMBERS, 1024), arguments);
}
