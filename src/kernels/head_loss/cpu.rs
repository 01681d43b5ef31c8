//! CPU side of the step between the two products: a task takes one row of logits.

use super::simd;
use crate::device::cpu::{Shared, exp, simd::at_level, tasks::each, vectorised};

const LANES: usize = 16;

/// Inputs of a row's loss beside its logits.
pub struct Row {
    /// Target token of the row.
    pub target: usize,
    /// Label smoothing e: the part of the probability that is spread over all tokens.
    pub smoothing: f32,
    /// Factor of the gradient; `None` for the loss alone.
    pub factor: Option<f32>,
}

pub fn cross_entropy(
    z: &mut [f32],
    targets: &[i32],
    smoothing: f32,
    factor: Option<f32>,
    losses: &mut [f32],
) {
    let v = z.len() / targets.len();
    let (z, losses) = (Shared::new(z), Shared::new(losses));
    each(targets.len(), |row| {
        // SAFETY: this row and its loss belong to this task.
        let (z, loss) = unsafe { (z.range(row * v, v), losses.range(row, 1)) };
        let target = targets[row] as usize;
        if let Some(found) = at_level!(s => simd::cross_entropy(s, z, Row { target, smoothing, factor })) {
            loss[0] = found;
            return;
        }
        vectorised(
            #[inline(always)]
            || {
                let at_target = z[target];
                let (max, sum, total) = statistics(z, smoothing > 0.0);
                let lse = max + sum.ln();
                let mean = total / v as f32;
                loss[0] = (1.0 - smoothing) * (lse - at_target) + smoothing * (lse - mean);
                if let Some(factor) = factor {
                    let uniform = factor * smoothing / v as f32;
                    z.iter_mut().for_each(|z| *z = factor * exp(*z - lse) - uniform);
                    z[target] -= factor * (1.0 - smoothing);
                }
            },
        );
    });
}

/// Largest value and sum of exp(z - largest) of a row; with label smoothing also its sum.
#[inline(always)]
fn statistics(z: &[f32], with_total: bool) -> (f32, f32, f32) {
    let (body, rest) = z.as_chunks::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    for chunk in body {
        for lane in 0..LANES {
            most[lane] = if chunk[lane] > most[lane] { chunk[lane] } else { most[lane] };
        }
    }
    let max = most.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    let mut sums = [0f32; LANES];
    for chunk in body {
        for lane in 0..LANES {
            sums[lane] += exp(chunk[lane] - max);
        }
    }
    let sum = sums.iter().sum::<f32>() + rest.iter().map(|&z| exp(z - max)).sum::<f32>();
    let mut totals = [0f32; LANES];
    if with_total {
        for chunk in body {
            for lane in 0..LANES {
                totals[lane] += chunk[lane];
            }
        }
    }
    (max, sum, totals.iter().sum::<f32>() + rest.iter().sum::<f32>())
}
