//! Widening FP16 and the exponential function, with the same bits on every CPU.

use half::{f16, slice::HalfFloatSliceExt};

use super::simd::{at_level, widen_all};

/// Widens FP16 to FP32, exactly, so that every CPU gives the same bits.
pub fn widen(from: &[f16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "widen shapes");
    // `half` converts 8 values by a call of its own, which costs 7% of a training step and four fifths of decoding.
    if at_level!(s => widen_all(s, from, to)).is_none() {
        from.convert_to_f32_slice(to);
    }
}

/// One FP32 value of a frozen vector.
#[inline(always)]
pub fn wide(value: f16) -> f32 {
    value.to_f32()
}

/// e^x for x <= 0 or moderate x, to 2 ulp, in a form that compilers turn into vector code.
///
/// Range reduction x = n ln 2 + r and a degree-6 polynomial on |r| <= ln 2 / 2, as in Cephes `expf`.
/// Below -87.3 the result is 0 (no subnormal numbers), above 88.3 it is infinite.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest whole number without a library call.
    const ROUND: f32 = 12_582_912.0;
    let inside = x.clamp(-87.3, 88.3);
    let n = (inside * LOG2_E + ROUND) - ROUND;
    let r = (inside - n * LN2_HI) - n * LN2_LO;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let power = f32::from_bits(((n as i32 + 127) << 23) as u32);
    let value = (p * r * r + r + 1.0) * power;
    let value = if x > 88.3 { f32::INFINITY } else { value };
    if x < -87.3 { 0.0 } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        for step in -8700..8800 {
            let x = step as f32 * 0.01;
            let true_value = f64::from(x).exp();
            let error = (f64::from(exp(x)) - true_value).abs() / true_value;
            assert!(error < 2.5e-7, "exp({x}) is off by {error}");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn every_half_widens_as_its_plain_conversion() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).chain([f16::ONE; 5]).collect();
        let mut wide = vec![0f32; all.len()];
        widen(&all, &mut wide);
        for (half, wide) in all.iter().zip(wide) {
            assert!(half.to_f32() == wide || (half.is_nan() && wide.is_nan()), "{half:?}: {wide}");
        }
    }
}
