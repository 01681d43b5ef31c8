//! CPU side: pieces of the flat buffers, or deltas, go to tasks. Means over rows and columns are summed in f64.

use super::{Smoothing, Triplets};
use crate::device::cpu::{Shared, tasks::each, vectorised};

/// Elements that a task takes.
const PIECE: usize = 1 << 15;

pub fn smooth(values: &[f32], gradient: &[f32], mean: &mut [f32], uncertainty: &mut [f32], by: Smoothing) {
    let len = values.len();
    let (b1, b2) = (by.betas.0 as f32, by.betas.1 as f32);
    let (c1, c2) = ((1.0 - by.betas.0) as f32, (1.0 - by.betas.1) as f32);
    let factor = by.factor as f32;
    let (mean, uncertainty) = (Shared::new(mean), Shared::new(uncertainty));
    each(len.div_ceil(PIECE), |task| {
        let start = task * PIECE;
        let count = PIECE.min(len - start);
        // SAFETY: this piece belongs to this task.
        let (mean, uncertainty) = unsafe { (mean.range(start, count), uncertainty.range(start, count)) };
        let (values, gradient) = (&values[start..start + count], &gradient[start..start + count]);
        vectorised(
            #[inline(always)]
            || {
                for (((w, g), m), u) in values.iter().zip(gradient).zip(mean).zip(uncertainty) {
                    let importance = (w * (g * factor)).abs();
                    *m = b1 * *m + c1 * importance;
                    *u = b2 * *u + c2 * (importance - *m).abs();
                }
            },
        );
    });
}

pub fn scores(mean: &[f32], uncertainty: &[f32], deltas: &[Triplets], scores: &mut [f32]) {
    let scores = Shared::new(scores);
    each(deltas.len(), |task| {
        let Triplets { a, b, d, rank, inputs, outputs, first } = deltas[task];
        // SAFETY: the scores of a delta belong to its task.
        let scores = unsafe { scores.range(first, rank) };
        let s = |at: usize| f64::from(mean[at] * uncertainty[at]);
        for (k, score) in scores.iter_mut().enumerate() {
            let row = (0..inputs).map(|i| s(a + k * inputs + i)).sum::<f64>() / inputs as f64;
            let column = (0..outputs).map(|o| s(b + o * rank + k)).sum::<f64>() / outputs as f64;
            *score = (s(d + k) + (row + column)) as f32;
        }
    });
}

pub fn keep(kept: &[f32], deltas: &[Triplets], values: &mut [f32]) {
    for delta in deltas {
        let of_delta = &kept[delta.first..delta.first + delta.rank];
        let d = &mut values[delta.d..delta.d + delta.rank];
        d.iter_mut().zip(of_delta).filter(|(_, kept)| **kept == 0.0).for_each(|(d, _)| *d = 0.0);
    }
}
