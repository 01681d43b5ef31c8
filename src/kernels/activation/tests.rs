//! Derivatives by central differences; the vector code against the plain formula over a wide range.

use super::*;
use crate::testing::*;

const ALL: [Activation; 5] =
    [Activation::GeluTanh, Activation::Gelu, Activation::Relu, Activation::Silu, Activation::Tanh];

#[test]
fn derivatives_are_central_differences() {
    for kind in ALL {
        for step in -40..40 {
            let x = f64::from(step) * 0.13 + 0.005;
            let slope = reference::derivative(kind, x);
            assert_gradient(&[x], &[slope], "x", |x| reference::forward(kind, x[0]));
        }
    }
}

#[test]
fn cpu_matches_reference() {
    for kind in ALL {
        let x: Vec<f32> =
            (-4000..4000).map(|step| step as f32 * 0.005).chain([-300.0, 300.0, 1e5, -1e5]).collect();
        let mut y = vec![0f32; x.len()];
        forward(kind, x[..].into(), y.as_mut_slice().into());
        let expected: Vec<f64> = widened(&x).into_iter().map(|x| reference::forward(kind, x)).collect();
        assert_close(&y, &expected, 1e-6, "y");

        let mut d = numbers(1, x.len());
        let expected: Vec<f64> = d
            .iter()
            .zip(&x)
            .map(|(&d, &x)| f64::from(d) * reference::derivative(kind, f64::from(x)))
            .collect();
        backward(kind, x[..].into(), d.as_mut_slice().into());
        assert_close(&d, &expected, 4e-6, "d");
    }
}

#[test]
fn gelu_of_infinities_stays_sane() {
    let x = [f32::MAX, -f32::MAX, 1e20, -1e20];
    let mut y = [0f32; 4];
    forward(Activation::GeluTanh, x[..].into(), y.as_mut_slice().into());
    assert_eq!(y, [f32::MAX, 0.0, 1e20, 0.0]);
    let mut d = [1f32; 4];
    backward(Activation::GeluTanh, x[..].into(), d.as_mut_slice().into());
    assert_eq!(d, [1.0, 0.0, 1.0, 0.0]);
}
