//! CPU side: one fused pass; pieces go to tasks.

use super::Update;
use crate::kernels::cpu::{Shared, each, vectorised};

/// Elements a task takes.
const PIECE: usize = 1 << 15;

pub fn square_sum(gradient: &[f32]) -> f64 {
    let mut parts = vec![0f64; gradient.len().div_ceil(PIECE)];
    let chunks: Vec<&[f32]> = gradient.chunks(PIECE).collect();
    rayon::scope(|scope| {
        for (part, chunk) in parts.iter_mut().zip(chunks) {
            scope.spawn(move |_| *part = chunk.iter().map(|&g| f64::from(g) * f64::from(g)).sum());
        }
    });
    parts.iter().sum()
}

pub fn update(values: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32], u: Update) {
    let len = values.len();
    assert!(gradient.len() == len && first.len() == len && second.len() == len, "adamw shapes");
    let (b1, b2) = (u.betas.0 as f32, u.betas.1 as f32);
    let (c1, c2) = ((1.0 - u.betas.0) as f32, (1.0 - u.betas.1) as f32);
    // beta^t in f64 and by powf: an integer power would stop at 2^31 steps.
    let correction = |beta: f64| 1.0 - beta.powf(u.step as f64);
    let step_size = (u.lr / correction(u.betas.0)) as f32;
    let root = (1.0 / correction(u.betas.1).sqrt()) as f32;
    let keep = (1.0 - u.lr * u.weight_decay) as f32;
    let (factor, epsilon) = (u.factor as f32, u.epsilon as f32);
    let (values, first, second) = (Shared::new(values), Shared::new(first), Shared::new(second));
    each(len.div_ceil(PIECE), |task| {
        let start = task * PIECE;
        let count = PIECE.min(len - start);
        // SAFETY: this piece belongs to this task.
        let (w, m, v) =
            unsafe { (values.range(start, count), first.range(start, count), second.range(start, count)) };
        vectorised(
            #[inline(always)]
            || {
                for (((w, g), m), v) in w.iter_mut().zip(&gradient[start..]).zip(m).zip(v) {
                    let g = g * factor;
                    *m = b1 * *m + c1 * g;
                    *v = b2 * *v + c2 * g * g;
                    *w = *w * keep - step_size * *m / (v.sqrt() * root + epsilon);
                }
            },
        );
    });
}
