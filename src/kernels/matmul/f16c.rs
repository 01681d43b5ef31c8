//! Products of few rows on CPUs with AVX and F16C and no AVX-512: widened weights stay in registers, of `x W` some rows a
//! turn, so that sums are read and written once for them. The plain loops' twins to the last bit: products are rounded
//! before they are added, in the same order.

use std::arch::x86_64::*;

use half::f16;

use super::cpu::{FEW, PIECE};
use crate::kernels::cpu::Shared;

/// Rows of weights a turn.
const TURN: usize = 4;
/// Rows of weights that are fetched ahead of their widening: each begins in a page of its own, which a CPU does not foresee.
const AHEAD: usize = 6;
/// Floats of a vector.
const LANES: usize = 8;

/// Whether the CPU has the instructions.
pub fn is_there() -> bool {
    is_x86_feature_detected!("avx") && is_x86_feature_detected!("f16c")
}

/// Adds columns `j .. j + jn` of `x (n, rows) W (rows, cols)` to those of `y (n, cols)`, n at most FEW.
///
/// # Safety
/// The CPU has AVX and F16C; the matrices have these sizes, and the columns of y belong to the caller.
#[target_feature(enable = "avx,f16c")]
pub unsafe fn nn(
    x: &[f32],
    w: &[f16],
    y: Shared,
    (n, rows, cols): (usize, usize, usize),
    (j, jn): (usize, usize),
) {
    assert!(
        n <= FEW && x.len() >= n * rows && w.len() >= rows * cols && j + jn <= cols,
        "shapes of few rows"
    );
    for k in (0..rows).step_by(TURN) {
        let turn = TURN.min(rows - k);
        for ahead in k + AHEAD..(k + AHEAD + turn).min(rows) {
            for line in w[ahead * cols + j..][..jn].chunks(4 * LANES) {
                _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast());
            }
        }
        // SAFETY: the caller's promise; these rows are there.
        unsafe {
            match turn {
                TURN => some::<TURN>(x, w, y, (n, rows, cols), k, (j, jn)),
                _ => (k..k + turn).for_each(|k| some::<1>(x, w, y, (n, rows, cols), k, (j, jn))),
            }
        }
    }
}

/// The same of rows `k .. k + T` of W alone.
///
/// # Safety
/// As [`nn`]; W has these rows.
#[inline]
#[target_feature(enable = "avx,f16c")]
unsafe fn some<const T: usize>(
    x: &[f32],
    w: &[f16],
    y: Shared,
    (n, rows, cols): (usize, usize, usize),
    k: usize,
    (j, jn): (usize, usize),
) {
    let factor = |row: usize, step: usize| x[row * rows + k + step];
    let weights: [&[f16]; T] = std::array::from_fn(|step| &w[(k + step) * cols + j..][..jn]);
    let mut factors = [[_mm256_setzero_ps(); T]; FEW];
    for (row, factors) in factors.iter_mut().enumerate().take(n) {
        *factors = std::array::from_fn(|step| _mm256_set1_ps(factor(row, step)));
    }
    let whole = jn / LANES * LANES;
    for at in (0..whole).step_by(LANES) {
        // SAFETY: LANES values from there on are in each row.
        let wide: [__m256; T] = std::array::from_fn(|step| unsafe {
            _mm256_cvtph_ps(_mm_loadu_si128(weights[step].as_ptr().add(at).cast()))
        });
        for (row, factors) in factors.iter().enumerate().take(n) {
            let to = y.at(row * cols + j + at);
            // SAFETY: LANES columns of the caller's.
            unsafe {
                let mut sum = _mm256_loadu_ps(to);
                for step in 0..T {
                    sum = _mm256_add_ps(sum, _mm256_mul_ps(factors[step], wide[step]));
                }
                _mm256_storeu_ps(to, sum);
            }
        }
    }
    for row in 0..n {
        // SAFETY: columns of the caller's.
        let y = unsafe { y.range(row * cols + j + whole, jn - whole) };
        for (at, y) in y.iter_mut().enumerate() {
            for (step, weights) in weights.iter().enumerate() {
                *y += factor(row, step) * weights[whole + at].to_f32();
            }
        }
    }
}

/// Adds columns `i .. i + rn` of `x (n, cols) W^T` to those of `y (n, rows)`, n at most FEW.
///
/// # Safety
/// As [`nn`].
#[target_feature(enable = "avx,f16c")]
pub unsafe fn nt(
    x: &[f32],
    w: &[f16],
    y: Shared,
    (n, rows, cols): (usize, usize, usize),
    (i, rn): (usize, usize),
) {
    assert!(
        n <= FEW && x.len() >= n * cols && w.len() >= rows * cols && i + rn <= rows,
        "shapes of few rows"
    );
    for weight_row in i..i + rn {
        let weights = &w[weight_row * cols..][..cols];
        for (index, piece) in weights.chunks(PIECE).enumerate() {
            let k = index * PIECE;
            let (whole, rest) = piece.as_chunks::<{ 2 * LANES }>();
            let mut sums = [[_mm256_setzero_ps(); 2]; FEW];
            for (at, halves) in whole.iter().enumerate() {
                _mm_prefetch::<_MM_HINT_T0>(halves.as_ptr().wrapping_add(2 * cols).cast());
                // SAFETY: two vectors of halves, and as many floats of each row of x.
                unsafe {
                    let wide: [__m256; 2] = std::array::from_fn(|v| {
                        _mm256_cvtph_ps(_mm_loadu_si128(halves.as_ptr().add(v * LANES).cast()))
                    });
                    for (row, sums) in sums.iter_mut().enumerate().take(n) {
                        let x = x.as_ptr().add(row * cols + k + at * 2 * LANES);
                        for v in 0..2 {
                            let product = _mm256_mul_ps(_mm256_loadu_ps(x.add(v * LANES)), wide[v]);
                            sums[v] = _mm256_add_ps(sums[v], product);
                        }
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate().take(n) {
                // SAFETY: both are 64 bytes of floats.
                let lanes: [f32; 2 * LANES] = unsafe { std::mem::transmute(*sums) };
                let x = &x[row * cols + k + whole.len() * 2 * LANES..];
                let rest: f32 = x.iter().zip(rest).map(|(x, w)| x * w.to_f32()).sum();
                // SAFETY: a column of the caller's.
                let y = unsafe { y.range(row * rows + weight_row, 1) };
                y[0] += lanes.iter().sum::<f32>() + rest;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::cpu::dot, *};
    use crate::kernels::testing::{halves, numbers};

    #[test]
    fn few_rows_are_the_plain_loops_to_the_last_bit() {
        if !is_there() {
            return;
        }
        for (rows, cols) in [(1, 3), (4, 8), (5, 17), (14, 70), (23, 800)] {
            let (w, x) = (halves(1, rows * cols), numbers(2, FEW * rows));
            for n in 1..=FEW {
                let before = numbers(3, n * cols);
                let (first, count) = (cols / 3, cols - cols / 2);
                let mut y = before.clone();
                // SAFETY: the CPU has the instructions, and nobody else the columns.
                unsafe { nn(&x, &w, Shared::new(&mut y), (n, rows, cols), (first, count)) };
                for (at, (&found, &before)) in y.iter().zip(&before).enumerate() {
                    let (row, column) = (at / cols, at % cols);
                    let inside = (first..first + count).contains(&column);
                    let mut sum = before;
                    (0..rows).for_each(|k| sum += x[row * rows + k] * w[k * cols + column].to_f32());
                    assert_eq!(found, if inside { sum } else { before }, "{n} rows, {rows} x {cols}: {at}");
                }
            }
        }
    }

    #[test]
    fn few_rows_of_the_transpose_are_the_plain_loops_to_the_last_bit() {
        if !is_there() {
            return;
        }
        for (rows, cols) in [(1, 3), (7, 16), (5, 17), (14, 70), (9, 768), (6, 1601)] {
            let (w, x) = (halves(1, rows * cols), numbers(2, FEW * cols));
            let wide: Vec<f32> = w.iter().map(|w| w.to_f32()).collect();
            for n in 1..=FEW {
                let before = numbers(3, n * rows);
                let (first, count) = (rows / 3, rows - rows / 2);
                let mut y = before.clone();
                // SAFETY: the CPU has the instructions, and nobody else the columns.
                unsafe { nt(&x, &w, Shared::new(&mut y), (n, rows, cols), (first, count)) };
                for (at, (&found, &before)) in y.iter().zip(&before).enumerate() {
                    let (row, column) = (at / rows, at % rows);
                    let mut sum = before;
                    if (first..first + count).contains(&column) {
                        let pairs =
                            x[row * cols..][..cols].chunks(PIECE).zip(wide[column * cols..].chunks(PIECE));
                        pairs.for_each(|(x, w)| sum += dot(x, &w[..x.len()]));
                    }
                    assert_eq!(found, sum, "{n} rows, {rows} x {cols}: {at}");
                }
            }
        }
    }
}
