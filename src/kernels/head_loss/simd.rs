//! The cross-entropy of one row of logits, vectorised.

use super::cpu::Row;
use crate::device::cpu::simd::{Simd, exp, fold, replace};

/// Loss of a row; with a factor the row becomes its gradient.
pub fn cross_entropy<S: Simd>(s: S, z: &mut [f32], row: Row) -> f32 {
    s.enter(
        #[inline(always)]
        move || inside(s, z, row),
    )
}

#[inline(always)]
fn inside<S: Simd>(s: S, z: &mut [f32], row: Row) -> f32 {
    let Row { target, smoothing, factor } = row;
    let at_target = z[target];
    let most = fold(
        s,
        z,
        f32::NEG_INFINITY,
        s.splat(f32::NEG_INFINITY),
        // The loss of a row with NaN is NaN through the sum, for any value that is found largest.
        #[inline(always)]
        |most, z| s.max(z, most),
    );
    let mean = match smoothing > 0.0 {
        true => total(s, z, s.zero()) / z.len() as f32,
        false => 0.0,
    };
    let max = s.largest(most);
    let splat = s.splat(max);
    let mut sums = s.zero();
    let sum;
    if factor.is_some() {
        let (whole, rest) = z.split_at_mut(z.len() / S::LANES * S::LANES);
        replace(
            s,
            whole,
            #[inline(always)]
            |z| {
                let power = exp(s, s.sub(z, splat));
                sums = s.add(sums, power);
                power
            },
        );
        replace(
            s,
            rest,
            #[inline(always)]
            |z| exp(s, s.sub(z, splat)),
        );
        sum = total(s, rest, sums);
    } else {
        sums = fold(
            s,
            z,
            f32::NEG_INFINITY,
            sums,
            #[inline(always)]
            |sums, z| s.add(sums, exp(s, s.sub(z, splat))),
        );
        sum = s.sum(sums);
    }
    let lse = max + sum.ln();
    if let Some(factor) = factor {
        let uniform = s.splat(-factor * smoothing / z.len() as f32);
        let share = s.splat(factor / sum);
        replace(
            s,
            z,
            #[inline(always)]
            |power| s.fma(share, power, uniform),
        );
        z[target] -= factor * (1.0 - smoothing);
    }
    (1.0 - smoothing) * (lse - at_target) + smoothing * (lse - mean)
}

/// The sum of all values and of the lanes of `sums`.
#[inline(always)]
fn total<S: Simd>(s: S, values: &[f32], sums: S::Floats) -> f32 {
    s.sum(fold(
        s,
        values,
        0.0,
        sums,
        #[inline(always)]
        |sums, z| s.add(sums, z),
    ))
}
