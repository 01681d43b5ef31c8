//! Central differences of the REFERENCE twin, then the CPU side against it.

use super::*;
use crate::testing::*;

#[test]
fn reference_backward_is_central_differences() {
    let (gain, bias) = (doubles(1, 5), doubles(2, 5));
    let (x, dy) = (doubles(3, 35), doubles(4, 35));
    let (_, stats) = reference::forward(&x, &gain, &bias, 1e-3);
    let dx = reference::backward(&dy, &x, &stats, &gain);
    assert_gradient(&x, &dx, "x", |x| weighted(&reference::forward(x, &gain, &bias, 1e-3).0, &dy));
    let (d_gain, d_bias) = reference::parameter_gradients(&dy, &x, &stats, 5);
    let loss = |gain: &[f64], bias: &[f64]| weighted(&reference::forward(&x, gain, bias, 1e-3).0, &dy);
    assert_gradient(&gain, &d_gain, "gain", |gain| loss(gain, &bias));
    assert_gradient(&bias, &d_bias, "bias", |bias| loss(&gain, bias));
}

#[test]
fn cpu_matches_reference() {
    for (n, c) in [(7, 5), (33, 48), (70, 770)] {
        let (gain, bias) = (f16_numbers(1, c), f16_numbers(2, c));
        let norm = Norm { gain: gain[..].into(), bias: bias[..].into(), epsilon: 1e-5 };
        let (x, dy) = (numbers(3, n * c), numbers(4, n * c));
        let (mut y, mut stats) = (vec![0f32; n * c], vec![0f32; 2 * n]);
        forward(x[..].into(), norm, y.as_mut_slice().into(), stats.as_mut_slice().into());
        let wide_gain: Vec<f64> = gain.iter().map(|v| v.to_f64()).collect();
        let wide_bias: Vec<f64> = bias.iter().map(|v| v.to_f64()).collect();
        let (expected, wide_stats) = reference::forward(&widened(&x), &wide_gain, &wide_bias, 1e-5);
        assert_close(&y, &expected, 2e-6, "y");
        assert_close(&stats, &wide_stats, 2e-6, "stats");

        let mut dx = numbers(5, n * c);
        let before = widened(&dx);
        backward(dy[..].into(), x[..].into(), stats[..].into(), norm, dx.as_mut_slice().into());
        let gradient = reference::backward(&widened(&dy), &widened(&x), &wide_stats, &wide_gain);
        let expected: Vec<f64> = before.iter().zip(gradient).map(|(a, b)| a + b).collect();
        assert_close(&dx, &expected, 4e-6, "dx");
    }
}

/// Trained values give the bits of frozen ones, with either of both and with one.
#[test]
fn parameters_may_be_wide() {
    let (n, c) = (33, 48);
    let (gain, bias) = (f16_numbers(1, c), f16_numbers(2, c));
    let [wide_gain, wide_bias] =
        [&gain, &bias].map(|half| half.iter().map(|v| v.to_f32()).collect::<Vec<_>>());
    let (x, dy) = (numbers(3, n * c), numbers(4, n * c));
    let run = |gain: View, bias: View| {
        let norm = Norm { gain, bias, epsilon: 1e-5 };
        let (mut y, mut stats, mut dx) = (vec![0f32; n * c], vec![0f32; 2 * n], numbers(5, n * c));
        forward(x[..].into(), norm, y.as_mut_slice().into(), stats.as_mut_slice().into());
        backward(dy[..].into(), x[..].into(), stats[..].into(), norm, dx.as_mut_slice().into());
        (y, dx)
    };
    let expected = run(gain[..].into(), bias[..].into());
    for (gain, bias) in [
        (View::from(&wide_gain[..]), View::from(&wide_bias[..])),
        (gain[..].into(), wide_bias[..].into()),
        (wide_gain[..].into(), bias[..].into()),
    ] {
        assert!(run(gain, bias) == expected);
    }
}

#[test]
fn gradients_of_parameters_match_reference_with_any_number_of_threads() {
    for (n, c) in [(1, 5), (7, 5), (130, 64), (300, 150)] {
        let (x, dy, gain, bias) =
            (numbers(3, n * c), numbers(4, n * c), f16_numbers(1, c), f16_numbers(2, c));
        let norm = Norm { gain: gain[..].into(), bias: bias[..].into(), epsilon: 1e-5 };
        let (mut y, mut stats) = (vec![0f32; n * c], vec![0f32; 2 * n]);
        forward(x[..].into(), norm, y.as_mut_slice().into(), stats.as_mut_slice().into());
        let (d_gain, d_bias) =
            reference::parameter_gradients(&widened(&dy), &widened(&x), &widened(&stats), c);
        for (gain, bias) in [(Some(3), Some(3 + c)), (Some(3), None), (None, Some(3))] {
            let run = || {
                let mut grads = numbers(6, 3 + 2 * c);
                let to = ParameterGradients { grads: grads.as_mut_slice().into(), gain, bias };
                parameter_gradients(dy[..].into(), x[..].into(), stats[..].into(), to);
                grads
            };
            let mut expected = widened(&numbers(6, 3 + 2 * c));
            for (at, gradient) in [(gain, &d_gain), (bias, &d_bias)] {
                let places = at.into_iter().flat_map(|at| at..at + c);
                places.zip(gradient).for_each(|(at, gradient)| expected[at] += gradient);
            }
            let found = with_threads(1, run);
            assert_close(&found, &expected, 5e-6, "gradients of gain and bias");
            for threads in [2, 3, 16] {
                assert_eq!(found, with_threads(threads, run), "{threads} threads");
            }
        }
    }
}
