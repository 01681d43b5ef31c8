//! AVX-512 side of the cross-entropy of one row of logits.

use std::arch::x86_64::*;

use super::cpu::Row;
use crate::kernels::avx512::{LANES, exp, fold, replace};

/// Loss of a row; with a factor the row becomes its gradient.
///
/// # Safety
/// The CPU has AVX-512 F.
#[target_feature(enable = "avx512f")]
pub unsafe fn cross_entropy(z: &mut [f32], row: Row) -> f32 {
    let Row { target, smoothing, factor } = row;
    let at_target = z[target];
    let most = fold(z, f32::NEG_INFINITY, _mm512_set1_ps(f32::NEG_INFINITY), |most, z| {
        // The second operand wins over NaN: a row with one has a loss of NaN by its sum.
        _mm512_max_ps(z, most)
    });
    let mean = match smoothing > 0.0 {
        true => {
            let totals = fold(z, 0.0, _mm512_setzero_ps(), |totals, z| _mm512_add_ps(totals, z));
            _mm512_reduce_add_ps(totals) / z.len() as f32
        }
        false => 0.0,
    };
    let max = _mm512_reduce_max_ps(most);
    let power = |z: __m512| exp(_mm512_sub_ps(z, _mm512_set1_ps(max)));
    let mut sums = _mm512_setzero_ps();
    if factor.is_some() {
        let (whole, rest) = z.split_at_mut(z.len() / LANES * LANES);
        replace(whole, |z| {
            let power = power(z);
            sums = _mm512_add_ps(sums, power);
            power
        });
        replace(rest, power);
        sums = fold(rest, 0.0, sums, |sums, power| _mm512_add_ps(sums, power));
    } else {
        sums = fold(z, f32::NEG_INFINITY, sums, |sums, z| _mm512_add_ps(sums, power(z)));
    }
    let sum = _mm512_reduce_add_ps(sums);
    let lse = max + sum.ln();
    if let Some(factor) = factor {
        let uniform = _mm512_set1_ps(factor * smoothing / z.len() as f32);
        let share = _mm512_set1_ps(factor / sum);
        replace(z, |power| _mm512_fmsub_ps(share, power, uniform));
        z[target] -= factor * (1.0 - smoothing);
    }
    (1.0 - smoothing) * (lse - at_target) + smoothing * (lse - mean)
}
