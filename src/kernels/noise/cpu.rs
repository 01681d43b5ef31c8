//! CPU side: a task takes some tokens.

use super::Noise;
use crate::device::cpu::{Shared, tasks::each};

/// Tokens that a task takes.
const TOKENS: usize = 32;

pub fn add(noise: Noise, ids: &[u32], x: &mut [f32]) {
    let (n, c) = (ids.len(), x.len() / ids.len());
    assert_eq!(x.len(), n * c, "noise shapes");
    let x = Shared::new(x);
    each(n.div_ceil(TOKENS), |task| {
        let tokens = (0..n).zip(ids).skip(task * TOKENS).take(TOKENS);
        for (token, &id) in tokens {
            if id as usize >= noise.vocab {
                continue;
            }
            // SAFETY: this token belongs to this task.
            let x = unsafe { x.range(token * c, c) };
            for (index, x) in (noise.index(token, c)..).zip(x) {
                *x += noise.of(index);
            }
        }
    });
}
