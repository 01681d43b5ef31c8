//! Activations after a layer and before it: the last step of its forward and of its backward, whatever its adapters.

use super::*;
use crate::{
    kernels::{activation::Activation, matmul::Matrix},
    testing::{f16_numbers, numbers},
};

const N: usize = 6;
const INPUTS: usize = 37;
const OUTPUTS: usize = 61;
const LEN: usize = 1000;

/// y, f(y), dx or the gradient of what the input was f of, and all gradients.
fn run(deltas: &[Delta], g: &[Scaling], f: Option<Activation>) -> [Vec<f32>; 4] {
    let (values, x, dy) = (numbers(1, LEN), numbers(2, N * INPUTS), numbers(3, N * OUTPUTS));
    let (weight, bias) = (f16_numbers(5, INPUTS * OUTPUTS), f16_numbers(6, OUTPUTS));
    let layer = Layer { weight: Matrix::f16(weight[..].into(), INPUTS, OUTPUTS), bias: bias[..].into() };
    let vectors = SiteVectors { g, ..SiteVectors::NONE };
    let linear =
        AdaptedLinear { vectors, ..AdaptedLinear::new(layer, deltas, values[..].into(), Dropout::NONE) };
    let room = |len: usize| vec![f32::NAN; len];
    let (mut xa, mut y, mut activated) = (room(xa_len(deltas, N)), room(N * OUTPUTS), room(N * OUTPUTS));
    let (mut product, mut d_product) = (room(N * OUTPUTS), room(N * OUTPUTS));
    let to = ForwardBuffers {
        product: Some(product.as_mut_slice().into()),
        activated: f.map(|f| (f, activated.as_mut_slice().into())),
        ..ForwardBuffers::new(xa.as_mut_slice().into(), y.as_mut_slice().into())
    };
    forward(linear, x[..].into(), None, N, to);
    let (mut grads, mut d_xa, mut dx) = (numbers(7, LEN), room(xa.len()), room(N * INPUTS));
    let z = before();
    let saved = SavedProducts {
        xa: xa[..].into(),
        product: Some(product[..].into()),
        input_of: f.map(|f| (f, z[..].into())),
    };
    let to = BackwardBuffers {
        d_product: Some(d_product.as_mut_slice().into()),
        ..BackwardBuffers::new(
            grads.as_mut_slice().into(),
            d_xa.as_mut_slice().into(),
            Some(dx.as_mut_slice().into()),
        )
    };
    backward(linear, dy[..].into(), x[..].into(), saved, N, to);
    [y, activated, dx, grads]
}

/// What the input is a function of.
fn before() -> Vec<f32> {
    numbers(8, N * INPUTS).into_iter().map(|value| 3.0 * value).collect()
}

#[test]
fn activations_are_the_last_steps_of_both_directions() {
    let f = Activation::GeluTanh;
    let delta = Delta { a: 0, b: 200, rank: 3, columns: 0..OUTPUTS, scale: 1.7, ..Delta::default() };
    let g = Scaling { vector: Vector::trained(500), columns: 3..40, tokens: None };
    for (deltas, g) in [(vec![], vec![]), (vec![delta.clone()], vec![]), (vec![delta], vec![g])] {
        let [y, _, dx, grads] = run(&deltas, &g, None);
        let [same_y, found, dz, same_grads] = run(&deltas, &g, Some(f));
        assert!(y == same_y && grads == same_grads);
        let (mut expected, mut expected_dz) = (vec![0.0; y.len()], dx);
        activation::forward(f, y[..].into(), expected.as_mut_slice().into());
        activation::backward(f, before()[..].into(), expected_dz.as_mut_slice().into());
        assert!(found == expected && dz == expected_dz);
    }
}
