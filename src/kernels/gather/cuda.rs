//! CUDA side: one block for each row.

use crate::device::{
    View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
};

static IMAGE: Image = image!("gather");

pub fn gather(gpu: &'static Gpu, from: View, rows: View, to: ViewMut, c: usize) {
    assert!(from.dtype() == to.dtype() && to.len() >= rows.len() * c, "gather shapes");
    let arguments = arguments![from, rows, &to, Argument::int(c)];
    gpu.launch(&IMAGE, &named("gather", to.dtype()), Grid::row(rows.len(), 128), arguments);
}

pub fn scatter(gpu: &'static Gpu, from: View, rows: View, to: ViewMut, c: usize) {
    assert!(from.dtype() == to.dtype() && from.len() >= rows.len() * c, "scatter shapes");
    let arguments = arguments![from, rows, &to, Argument::int(c)];
    gpu.launch(&IMAGE, &named("scatter", to.dtype()), Grid::row(rows.len(), 128), arguments);
}
