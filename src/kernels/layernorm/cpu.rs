//! CPU side: a task normalises a group of rows and widens gain and bias once.

use half::f16;

use super::Norm;
use crate::device::cpu::{Shared, tasks::each, vectorised, widen, with_scratch};

/// Rows that a task takes: enough to repay the widening, and not too many for all threads to get some.
const ROWS: usize = 32;
/// Partial sums of a row; the order of additions depends on the width alone.
const LANES: usize = 16;

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
        widen(norm.gain.host::<f16>(), gain);
        widen(norm.bias.host::<f16>(), bias);
        body(gain, bias);
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
