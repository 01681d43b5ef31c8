//! CUDA side: two launches for each factor, the products of its vectors and what they add.

use super::Factor;
use crate::device::{
    View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image},
};

static IMAGE: Image = image!("orthogonality");

pub fn backward(
    gpu: &'static Gpu,
    values: View,
    factors: &[Factor],
    weight: f32,
    gradient: &ViewMut,
    grams: &ViewMut,
) {
    for &Factor { at, rank, len, transposed, gram } in factors {
        let p = values.slice(at, rank * len);
        let to = gradient.as_view().slice(at, rank * len);
        let grams = grams.as_view().slice(gram, rank * rank);
        let (rank_, len_, transposed) =
            (Argument::int(rank), Argument::int(len), Argument::int(usize::from(transposed)));
        let products = arguments![p, grams, rank_, len_, transposed];
        gpu.launch(&IMAGE, "orthogonality_products", Grid::of((rank, rank, 1), 128), products);
        let sums = arguments![p, grams, weight, to, rank_, len_, transposed];
        gpu.launch(&IMAGE, "orthogonality_backward", Grid::row((rank * len).div_ceil(1024), 256), sums);
    }
}
