//! AVX-512 side of the cross-entropy of one row of logits.

use std::arch::x86_64::*;

use super::cpu::Row;
use crate::kernels::avx512::{LANES, exp, load_or, store};

/// Loss of a row; with a factor the row becomes its gradient.
///
/// # Safety
/// The CPU has AVX-512 F.
#[target_feature(enable = "avx512f")]
pub unsafe fn cross_entropy(z: &mut [f32], row: Row) -> f32 {
    let Row { target, smoothing, factor } = row;
    let at_target = z[target];
    let mut most = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut totals = _mm512_setzero_ps();
    for z in z.chunks(LANES) {
        // The second operand wins over NaN: a row with one has a loss of NaN by its sum.
        most = _mm512_max_ps(load_or(z, f32::NEG_INFINITY), most);
        totals = _mm512_add_ps(totals, load_or(z, 0.0));
    }
    let max = _mm512_reduce_max_ps(most);
    let mut sums = [_mm512_setzero_ps(); 2];
    for (index, z) in z.chunks(LANES).enumerate() {
        let power = exp(_mm512_sub_ps(load_or(z, f32::NEG_INFINITY), _mm512_set1_ps(max)));
        sums[index % 2] = _mm512_add_ps(sums[index % 2], power);
    }
    let lse = max + _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1])).ln();
    let mean = _mm512_reduce_add_ps(totals) / z.len() as f32;
    if let Some(factor) = factor {
        let uniform = _mm512_set1_ps(factor * smoothing / z.len() as f32);
        let (lse, factor) = (_mm512_set1_ps(lse), _mm512_set1_ps(factor));
        for z in z.chunks_mut(LANES) {
            let probability = exp(_mm512_sub_ps(load_or(z, 0.0), lse));
            store(z, _mm512_fmsub_ps(factor, probability, uniform));
        }
    }
    if let Some(factor) = factor {
        z[target] -= factor * (1.0 - smoothing);
    }
    (1.0 - smoothing) * (lse - at_target) + smoothing * (lse - mean)
}
