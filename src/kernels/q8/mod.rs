//! 8-bit weights: integer codes, and a scale for each block of them.
//!
//! A matrix `(rows, cols)` is two arrays: codes `(rows, cols)` and FP16 scales `(rows, ceil(cols / BLOCK))`, one for
//! BLOCK consecutive codes of a row; the last block of a row may be shorter. `value = code * scale`, the scheme of
//! ggml's Q8_0. A product of 7 and 11 bits is exact in FP32, so kernels multiply by the exact value.

use half::f16;

use crate::device::cpu::{vectorised, wide};

#[cfg(feature = "cuda")]
pub(super) mod cuda;

/// Codes that share a scale.
pub const BLOCK: usize = 32;
/// Largest magnitude of a code.
const LARGEST: f32 = 127.0;

/// Number of scales in a row of `cols` codes.
pub fn blocks(cols: usize) -> usize {
    cols.div_ceil(BLOCK)
}

/// Writes the codes of a block of finite values and returns its scale; `|value - code * scale| <= scale / 2`.
///
/// The scale is the largest magnitude over 127, rounded to the nearest FP16. Where that is so small that 127 codes
/// do not reach the largest value, it is the next FP16 above; this happens only below FP16's normal numbers.
pub fn quantise(values: &[f32], codes: &mut [i8]) -> f16 {
    assert_eq!(values.len(), codes.len(), "a code for every value");
    let largest = vectorised(
        #[inline(always)]
        || values.iter().fold(0f32, |most, value| most.max(value.abs())),
    );
    let nearest = f16::from_f32(largest / LARGEST);
    let reaches = (LARGEST + 0.5) * nearest.to_f32() >= largest;
    let scale = if reaches { nearest } else { f16::from_bits(nearest.to_bits() + 1) };
    // A block of zeros has no scale to divide by.
    let divisor = if largest == 0.0 { 1.0 } else { scale.to_f32() };
    vectorised(
        #[inline(always)]
        || {
            for (code, value) in codes.iter_mut().zip(values) {
                *code = (value / divisor).round_ties_even().clamp(-LARGEST, LARGEST) as i8;
            }
        },
    );
    scale
}

/// Values of codes of a row from `column`; `scales` are those of the whole row.
pub fn widen(codes: &[i8], scales: &[f16], column: usize, to: &mut [f32]) {
    assert_eq!(codes.len(), to.len(), "a value for every code");
    let head = (BLOCK - column % BLOCK).min(codes.len());
    let scales = &scales[column / BLOCK..];
    vectorised(
        #[inline(always)]
        || {
            let part = |codes: &[i8], scale: f16, to: &mut [f32]| {
                let scale = wide(scale);
                to.iter_mut().zip(codes).for_each(|(to, &code)| *to = f32::from(code) * scale);
            };
            let (first, codes) = codes.split_at(head);
            let (to_first, to) = to.split_at_mut(head);
            if let Some(&scale) = scales.first() {
                part(first, scale, to_first);
            }
            for ((codes, to), &scale) in
                codes.chunks(BLOCK).zip(to.chunks_mut(BLOCK)).zip(scales.get(1..).unwrap_or_default())
            {
                part(codes, scale, to);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    fn there_and_back(values: &[f32]) -> (f16, Vec<i8>) {
        let mut codes = vec![0; values.len()];
        (quantise(values, &mut codes), codes)
    }

    #[test]
    fn a_value_is_at_most_half_a_step_away() {
        let mut seen = 0.0f64;
        // From the subnormal numbers of FP16 to the largest ones.
        for (seed, size) in [(1, 6e-8), (2, 1e-6), (3, 1e-5), (4, 1e-3), (5, 0.1), (6, 1.0), (7, 65504.0)] {
            for len in [1, 7, 31, BLOCK] {
                let values: Vec<f32> = numbers(seed * 100 + len as u64, len)
                    .iter()
                    .map(|x| f16::from_f32(x * size).to_f32())
                    .collect();
                let (scale, codes) = there_and_back(&values);
                let largest = values.iter().fold(0f32, |most, x| most.max(x.abs()));
                assert!(
                    largest == 0.0 || f64::from(largest) >= 120.0 * scale.to_f64() || scale.to_f32() < 1e-5
                );
                for (&value, &code) in values.iter().zip(&codes) {
                    let error = (f64::from(value) - f64::from(code) * scale.to_f64()).abs();
                    // The division rounds.
                    assert!(error <= 0.500_01 * scale.to_f64(), "{value} is {code} x {scale}");
                    seen = seen.max(error / scale.to_f64().max(1e-30));
                }
            }
        }
        assert!(seen > 0.4, "{seen}: nothing was rounded");
    }

    #[test]
    fn what_codes_can_say_is_kept_and_zeros_are_zeros() {
        for exponent in [-20, -10, 0, 8] {
            let scale = 2f32.powi(exponent);
            let values: Vec<f32> = (-127..=127).step_by(8).map(|code| code as f32 * scale).collect();
            let (found, codes) = there_and_back(&values);
            assert_eq!(found.to_f32(), scale);
            assert!(values.iter().zip(codes).all(|(&value, code)| value == f32::from(code) * scale));
        }
        assert_eq!(there_and_back(&[0.0, -0.0]), (f16::ZERO, vec![0, 0]));
    }

    #[test]
    fn any_part_of_a_row_widens_to_its_values() {
        let cols = 3 * BLOCK + 5;
        let codes: Vec<i8> = (0..cols).map(|i| (i * 37 % 255) as u8 as i8).collect();
        let scales = [0.5, 0.25, 3.0, 1e-6].map(f16::from_f32);
        for (start, end) in [(0, cols), (0, 5), (16, 33), (31, 97), (64, 64), (96, cols), (33, 60)] {
            let mut to = vec![f32::NAN; end - start];
            widen(&codes[start..end], &scales, start, &mut to);
            for (column, found) in (start..end).zip(to) {
                assert_eq!(f64::from(found), f64::from(codes[column]) * scales[column / BLOCK].to_f64());
            }
        }
    }
}
