//! CUDA side of the step between the two products: one block for each row.
//!
//! With 16-bit activations the gradient of a row of logits takes the first bytes of that row's own logits: in 16-bit
//! numbers, the distance of its rows is twice that of the logits.
//!
//! Where a block may have a whole row in shared memory, the row is read from the device's memory once: 201 KB at GPT-2's
//! vocabulary, which devices of compute capability 9.0 and 10.x have. Elsewhere, and where no gradient is asked for, it
//! is read for the sum of exponentials and read again for the gradient.

use super::{padded, stride};
use crate::{
    device::{
        DType, View, ViewMut,
        cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
    },
    kernels::matmul::{self, InitialValue, Matrix},
};

static IMAGE: Image = image!("head_loss");

/// Bytes of shared memory that the kernels declare, and some to spare.
const DECLARED: usize = 1 << 10;

/// Distance of the gradient's rows, in its elements.
fn gradient_stride(v: usize, activations: DType) -> usize {
    stride(v, activations) * DType::F32.size() / activations.size()
}

pub fn cross_entropy(
    gpu: &'static Gpu,
    z: ViewMut,
    (v, activations): (usize, DType),
    targets: View,
    smoothing: f32,
    factor: Option<f32>,
    losses: ViewMut,
) {
    let m = targets.len();
    assert!(z.len() >= m * stride(v, activations) && losses.len() == m, "cross-entropy shapes");
    let row = DType::F32.size() * v.next_multiple_of(8);
    let once = factor.is_some() && gpu.fuses() && row + DECLARED <= gpu.most_shared();
    let (kernel, grid) = match once {
        true => ("cross_entropy_once", Grid::row(m, 1024).with_shared(row)),
        false => ("cross_entropy", Grid::row(m, 512)),
    };
    let dz = if factor.is_some() { Argument::from(&z) } else { Argument::NULL };
    let arguments = arguments![
        &z,
        Argument::long(stride(v, activations)),
        targets,
        smoothing,
        factor.unwrap_or(0.0),
        &losses,
        dz,
        Argument::long(gradient_stride(v, activations)),
        Argument::int(v),
    ];
    gpu.launch(&IMAGE, &named(kernel, activations), grid, arguments);
}

pub fn hidden_gradient(gpu: &'static Gpu, dz: View, head: Matrix, d_hidden: ViewMut, count: usize) {
    let activations = d_hidden.dtype();
    let dz = dz.typed(activations);
    let ld = gradient_stride(head.rows, activations);
    matmul::cuda::frozen_nn(gpu, (dz, ld), padded(head, activations), InitialValue::Zero, d_hidden, count);
}
