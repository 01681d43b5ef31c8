//! CPU side: a task normalises a group of rows and widens gain and bias once, or sums the gradients of some columns.

use half::f16;

use super::{Norm, ParameterGradients};
use crate::device::{
    DType, View,
    cpu::{Shared, tasks::each, vectorised, widen, with_scratch},
};

/// Rows that a task takes: enough to repay the widening, and not too many for all threads to get some.
const ROWS: usize = 32;
/// Partial sums of a row; the order of additions depends on the width alone.
const LANES: usize = 16;
/// Columns of gain and bias that a task sums.
const COLUMNS: usize = 64;
/// Rows that are summed by themselves before they are added to a gradient.
const SUMMED: usize = 128;

pub fn forward(x: &[f32], norm: Norm, y: &mut [f32], stats: &mut [f32]) {
    let c = norm.gain.len();
    let n = x.len() / c;
    assert!(x.len() == n * c && y.len() == x.len() && stats.len() == 2 * n, "layernorm shapes");
    let (y, stats) = (Shared::new(y), Shared::new(stats));
    each(n.div_ceil(ROWS), |task| {
        with_parameters(norm, |gain, bias| {
            for row in task * ROWS..n.min((task + 1) * ROWS) {
                // SAFETY: this row belongs to this task.
                let (y, stats) = unsafe { (y.range(row * c, c), stats.range(row * 2, 2)) };
                let (mean, rstd) = vectorised(
                    #[inline(always)]
                    || normalise(&x[row * c..][..c], gain, bias, norm.epsilon, y),
                );
                stats.copy_from_slice(&[mean, rstd]);
            }
        });
    });
}

pub fn backward(dy: &[f32], x: &[f32], stats: &[f32], norm: Norm, dx: &mut [f32]) {
    let c = norm.gain.len();
    let n = x.len() / c;
    assert!(dy.len() == n * c && dx.len() == dy.len() && stats.len() == 2 * n, "layernorm shapes");
    let dx = Shared::new(dx);
    each(n.div_ceil(ROWS), |task| {
        with_parameters(norm, |gain, _| {
            for row in task * ROWS..n.min((task + 1) * ROWS) {
                // SAFETY: this row belongs to this task.
                let dx = unsafe { dx.range(row * c, c) };
                let (dy, x) = (&dy[row * c..][..c], &x[row * c..][..c]);
                vectorised(
                    #[inline(always)]
                    || add_gradient(dy, x, gain, (stats[2 * row], stats[2 * row + 1]), dx),
                );
            }
        });
    });
}

fn with_parameters(norm: Norm, body: impl FnOnce(&[f32], &[f32])) {
    let c = norm.gain.len();
    with_scratch(2 * c, |scratch| {
        let (gain, bias) = scratch.split_at_mut(c);
        wide(norm.gain, gain);
        wide(norm.bias, bias);
        body(gain, bias);
    });
}

/// A parameter in FP32, which a trained one is.
fn wide(parameter: View, to: &mut [f32]) {
    match parameter.dtype() {
        DType::F16 => widen(parameter.host::<f16>(), to),
        _ => to.copy_from_slice(parameter.host()),
    }
}

pub fn parameter_gradients(dy: &[f32], x: &[f32], stats: &[f32], to: ParameterGradients) {
    let n = stats.len() / 2;
    let c = x.len() / n;
    let ParameterGradients { grads, gain, bias } = to;
    let grads = Shared::new(grads.host());
    each(c.div_ceil(COLUMNS), |task| {
        let first = task * COLUMNS;
        let count = COLUMNS.min(c - first);
        for rows in (0..n).step_by(SUMMED) {
            let (mut d_gain, mut d_bias) = ([0f32; COLUMNS], [0f32; COLUMNS]);
            for row in rows..n.min(rows + SUMMED) {
                let (dy, x) = (&dy[row * c + first..][..count], &x[row * c + first..][..count]);
                let (mean, rstd) = (stats[2 * row], stats[2 * row + 1]);
                vectorised(
                    #[inline(always)]
                    || {
                        let sums = d_gain.iter_mut().zip(&mut d_bias);
                        for (((d_gain, d_bias), dy), x) in sums.zip(dy).zip(x) {
                            *d_gain += dy * ((x - mean) * rstd);
                            *d_bias += dy;
                        }
                    },
                );
            }
            for (at, sums) in [(gain, &d_gain), (bias, &d_bias)] {
                let Some(at) = at else { continue };
                // SAFETY: these columns belong to this task.
                let to = unsafe { grads.range(at + first, count) };
                to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
            }
        }
    });
}

#[inline(always)]
fn normalise(x: &[f32], gain: &[f32], bias: &[f32], epsilon: f32, y: &mut [f32]) -> (f32, f32) {
    let width = x.len() as f32;
    let mean = sum(x, x, |a, _| a) / width;
    let variance = sum(x, x, |a, _| (a - mean) * (a - mean)) / width;
    let rstd = 1.0 / (variance + epsilon).sqrt();
    for (((y, x), gain), bias) in y.iter_mut().zip(x).zip(gain).zip(bias) {
        *y = (x - mean) * rstd * gain + bias;
    }
    (mean, rstd)
}

/// In the forward pass `y = x_hat * gain + bias`; the formula is that of [`super::reference::backward`],
/// with both means in one pass.
#[inline(always)]
fn add_gradient(dy: &[f32], x: &[f32], gain: &[f32], (mean, rstd): (f32, f32), dx: &mut [f32]) {
    let width = x.len() as f32;
    let mut g_sums = [0f32; LANES];
    let mut gx_sums = [0f32; LANES];
    let whole = x.len() - x.len() % LANES;
    for start in (0..whole).step_by(LANES) {
        for lane in 0..LANES {
            let g = dy[start + lane] * gain[start + lane];
            g_sums[lane] += g;
            gx_sums[lane] += g * ((x[start + lane] - mean) * rstd);
        }
    }
    for i in whole..x.len() {
        let g = dy[i] * gain[i];
        g_sums[0] += g;
        gx_sums[0] += g * ((x[i] - mean) * rstd);
    }
    let mean_g = g_sums.iter().sum::<f32>() / width;
    let mean_gx = gx_sums.iter().sum::<f32>() / width;
    for (((dx, dy), x), gain) in dx.iter_mut().zip(dy).zip(x).zip(gain) {
        let x_hat = (x - mean) * rstd;
        *dx += rstd * (dy * gain - mean_g - x_hat * mean_gx);
    }
}

#[inline(always)]
fn sum(a: &[f32], b: &[f32], of: impl Fn(f32, f32) -> f32) -> f32 {
    let mut sums = [0f32; LANES];
    let (a_body, a_rest) = a.as_chunks::<LANES>();
    let (b_body, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_body.iter().zip(b_body) {
        for lane in 0..LANES {
            sums[lane] += of(a[lane], b[lane]);
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(&a, &b)| of(a, b)).sum();
    sums.iter().sum::<f32>() + rest
}
