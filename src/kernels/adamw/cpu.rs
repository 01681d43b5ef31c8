//! CPU side: one fused pass; pieces go to tasks.

use super::Update;
use crate::device::cpu::{Shared, tasks::each, vectorised};

/// Elements that a task takes.
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

/// Numbers that all elements of an update share, in FP32.
#[derive(Clone, Copy)]
pub struct Factors {
    betas: (f32, f32),
    complements: (f32, f32),
    step_size: f32,
    root: f32,
    keep: f32,
    factor: f32,
    epsilon: f32,
}

impl Factors {
    pub fn new(u: Update) -> Self {
        // beta^t in f64 and by powf: an integer power would stop at 2^31 steps.
        let correction = |beta: f64| 1.0 - beta.powf(u.step as f64);
        Self {
            betas: (u.betas.0 as f32, u.betas.1 as f32),
            complements: ((1.0 - u.betas.0) as f32, (1.0 - u.betas.1) as f32),
            step_size: (u.lr / correction(u.betas.0)) as f32,
            root: (1.0 / correction(u.betas.1).sqrt()) as f32,
            keep: (1.0 - u.lr * u.weight_decay) as f32,
            factor: u.factor as f32,
            epsilon: u.epsilon as f32,
        }
    }

    /// The fields in the order of `Factors` in adamw.cuh, without the factor, which the device computes.
    #[cfg(feature = "cuda")]
    pub fn on_device(self) -> [f32; 8] {
        let Self { betas: (b1, b2), complements: (c1, c2), step_size, root, keep, epsilon, .. } = self;
        [b1, b2, c1, c2, step_size, root, keep, epsilon]
    }

    /// Updates slices of one length; call it inside [`vectorised`].
    #[inline(always)]
    pub fn apply(self, w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
        let Self { betas: (b1, b2), complements: (c1, c2), .. } = self;
        for (((w, g), m), v) in w.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * self.factor;
            *m = b1 * *m + c1 * g;
            *v = b2 * *v + c2 * g * g;
            *w = *w * self.keep - self.step_size * *m / (v.sqrt() * self.root + self.epsilon);
        }
    }
}

pub fn update(values: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32], u: Update) {
    let len = values.len();
    assert!(gradient.len() == len && first.len() == len && second.len() == len, "adamw shapes");
    let factors = Factors::new(u);
    let (values, first, second) = (Shared::new(values), Shared::new(first), Shared::new(second));
    each(len.div_ceil(PIECE), |task| {
        let start = task * PIECE;
        let count = PIECE.min(len - start);
        // SAFETY: this piece belongs to this task.
        let (w, m, v) =
            unsafe { (values.range(start, count), first.range(start, count), second.range(start, count)) };
        vectorised(
            #[inline(always)]
            || factors.apply(w, &gradient[start..], m, v),
        );
    });
}
