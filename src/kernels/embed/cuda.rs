//! CUDA side: one block for each token.

use crate::device::{
    DType, View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
};

static IMAGE: Image = image!("embed");

pub fn forward(gpu: &'static Gpu, ids: View, positions: View, wte: View, wpe: View, x: ViewMut, c: usize) {
    let n = ids.len();
    assert!(positions.len() == n && x.len() == n * c, "embed shapes");
    let wanted = if x.dtype() == DType::BF16 { DType::BF16 } else { DType::F16 };
    assert_eq!(wte.dtype(), wanted, "a token embedding of another type");
    let arguments = arguments![ids, positions, wte, wpe, &x, Argument::int(c)];
    gpu.launch(&IMAGE, &named("embed", x.dtype()), Grid::row(n, 128), arguments);
}
