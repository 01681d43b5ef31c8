//! CUDA side: a block for each token.

use super::Noise;
use crate::device::{
    View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
};

static IMAGE: Image = image!("noise");

pub fn add(gpu: &'static Gpu, noise: Noise, ids: View, x: ViewMut) {
    let (n, c) = (ids.len(), x.len() / ids.len());
    assert_eq!(x.len(), n * c, "noise shapes");
    let [first_row, seq_len, stride, vocab, c] =
        [noise.first_row, noise.seq_len, noise.stride, noise.vocab, c].map(Argument::int);
    let arguments = arguments![ids, &x, noise.key, noise.magnitude, first_row, seq_len, stride, vocab, c];
    gpu.launch(&IMAGE, &named("noise", x.dtype()), Grid::row(n, 128), arguments);
}
