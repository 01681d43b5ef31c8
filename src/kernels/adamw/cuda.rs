//! CUDA side: the norm stays on the device, where the update finds the factor of clipping and whether the gradient
//! is finite.

use super::device_scratch::norm;
use super::{Update, cpu::Factors};
use crate::device::{
    View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image},
};

static IMAGE: Image = image!("adamw");

/// Elements whose squares one block adds.
const PART: usize = 1 << 15;

/// Bytes of the results of [`clipping`]: sum of squares (f64), norm and factor (f32), whether to skip (u32), padding.
const CONTROL: usize = 24;

pub fn clipping(gpu: &'static Gpu, gradient: View, clip: f64, loss_scale: f64) {
    let count = gradient.len();
    let blocks = count.div_ceil(PART);
    gpu.control(|control| {
        gpu.scratch(norm(count), |parts| {
            let arguments = arguments![gradient, Argument::long(count), parts];
            gpu.launch(&IMAGE, "square_sum_parts", Grid::row(blocks, 256), arguments);
            let arguments = arguments![parts, Argument::int(blocks), loss_scale as f32, clip, control];
            gpu.launch(&IMAGE, "square_sum_finish", Grid::row(1, 256), arguments);
        });
    });
}

/// Sum of squares of the last [`clipping`], and its norm after unscaling: not finite where the update was skipped.
pub fn control(gpu: &'static Gpu) -> (f64, f64) {
    let mut bytes = Vec::new();
    gpu.control(|control| bytes = gpu.download(control, CONTROL));
    let word = |at: usize| bytes.get(at..).and_then(|rest| rest.first_chunk::<4>()).copied();
    let (Some(sum), Some(norm), Some(skip)) = (bytes.first_chunk::<8>(), word(8), word(16)) else {
        // The download failed, which the next check reports.
        return (f64::NAN, f64::NAN);
    };
    let unscaled = if skip == [0; 4] { f64::from(f32::from_ne_bytes(norm)) } else { f64::NAN };
    (f64::from_ne_bytes(*sum), unscaled)
}

pub fn update(
    gpu: &'static Gpu,
    values: ViewMut,
    gradient: View,
    first: ViewMut,
    second: ViewMut,
    u: Update,
) {
    let count = values.len();
    assert!(gradient.len() == count && first.len() == count && second.len() == count, "adamw shapes");
    let factors = Argument::structure(Factors::new(u).on_device());
    gpu.control(|control| {
        let arguments =
            arguments![&values, gradient, &first, &second, Argument::long(count), factors, control];
        gpu.launch(&IMAGE, "adamw", Grid::row(count.div_ceil(1024), 256), arguments);
    });
}
