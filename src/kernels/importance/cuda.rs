//! CUDA side: one launch for all values, and one for each delta where scores are made or ranks taken away.

use super::{Smoothing, Triplets};
use crate::device::{
    View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image},
};

static IMAGE: Image = image!("importance");

pub fn smooth(
    gpu: &'static Gpu,
    values: View,
    gradient: View,
    mean: &ViewMut,
    uncertainty: &ViewMut,
    by: Smoothing,
) {
    let count = values.len();
    let complements = ((1.0 - by.betas.0) as f32, (1.0 - by.betas.1) as f32);
    let factors = [by.betas.0 as f32, by.betas.1 as f32, complements.0, complements.1, by.factor as f32];
    let factors = Argument::structure(factors);
    let arguments = arguments![values, gradient, mean, uncertainty, Argument::long(count), factors];
    gpu.launch(&IMAGE, "importance_smooth", Grid::row(count.div_ceil(1024), 256), arguments);
}

pub fn scores(gpu: &'static Gpu, mean: View, uncertainty: View, deltas: &[Triplets], scores: &ViewMut) {
    for delta in deltas {
        let [a, b, d] = [delta.a, delta.b, delta.d].map(Argument::long);
        let [rank, inputs, outputs] = [delta.rank, delta.inputs, delta.outputs].map(Argument::int);
        let to = scores.as_view().slice(delta.first, delta.rank);
        let arguments = arguments![mean, uncertainty, a, b, d, to, rank, inputs, outputs];
        gpu.launch(&IMAGE, "importance_scores", Grid::row(delta.rank, 256), arguments);
    }
}

pub fn keep(gpu: &'static Gpu, kept: View, deltas: &[Triplets], values: &ViewMut) {
    for delta in deltas {
        let rank = delta.rank;
        let (kept, d) = (kept.slice(delta.first, rank), values.as_view().slice(delta.d, rank));
        let arguments = arguments![kept, d, Argument::int(rank)];
        gpu.launch(&IMAGE, "importance_keep", Grid::row(rank.div_ceil(256), 256), arguments);
    }
}
