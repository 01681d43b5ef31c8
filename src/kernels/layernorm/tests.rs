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
