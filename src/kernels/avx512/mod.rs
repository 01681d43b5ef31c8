//! What hand-written AVX-512 kernels share: exponentials, squares of floats turned over, tiles of products.
//!
//! Every function needs AVX-512 F, which [`level`](super::cpu::level) tells; all else is as in plain loops.

use std::arch::x86_64::*;

use half::f16;

pub mod product;
pub mod tile;

/// Floats of a vector.
pub const LANES: usize = 16;

/// The first `count` lanes.
#[inline]
pub fn first(count: usize) -> __mmask16 {
    if count >= LANES { !0 } else { (1 << count) - 1 }
}

/// e^x of each lane, to 1.5 ulp: x = n ln 2 + r, a polynomial of degree 6 on |r| <= ln 2 / 2 as in Cephes `expf`,
/// and a multiplication by 2^n that over- and underflows as it should.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn exp(x: __m512) -> __m512 {
    // 2^n is 0 below -150 and infinite above 129; NaN stays NaN, being the second operand.
    let x = _mm512_max_ps(_mm512_set1_ps(-104.0), _mm512_min_ps(_mm512_set1_ps(89.0), x));
    let n = _mm512_roundscale_ps::<8>(_mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E)));
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693_359_4), x);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.121_944_4e-4), r);
    let mut p = _mm512_set1_ps(1.987_569_1e-4);
    for coefficient in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(coefficient));
    }
    let value = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0));
    _mm512_scalef_ps(value, n)
}

/// 1 / x of each lane, x normal: the CPU's estimate (14 bits) and one step of Newton's method, to 1 ulp.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn reciprocal(x: __m512) -> __m512 {
    let estimate = _mm512_rcp14_ps(x);
    let error = _mm512_fnmadd_ps(x, estimate, _mm512_set1_ps(1.0));
    _mm512_fmadd_ps(estimate, error, estimate)
}

/// Up to LANES floats, `fill` behind them.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn load_or(values: &[f32], fill: f32) -> __m512 {
    // SAFETY: masked lanes alone are read.
    unsafe { _mm512_mask_loadu_ps(_mm512_set1_ps(fill), first(values.len()), values.as_ptr()) }
}

/// Writes as many lanes as there are values, LANES at most.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn store(values: &mut [f32], vector: __m512) {
    // SAFETY: masked lanes alone are written.
    unsafe { _mm512_mask_storeu_ps(values.as_mut_ptr(), first(values.len()), vector) }
}

/// Replaces values a vector at a time; lanes behind the last value are 0.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn replace(values: &mut [f32], mut with: impl FnMut(__m512) -> __m512) {
    // Masks only at the end: they would cost as much as an exponential.
    let (whole, rest) = values.as_chunks_mut::<LANES>();
    for values in whole {
        // SAFETY: a vector of floats.
        unsafe { _mm512_storeu_ps(values.as_mut_ptr(), with(_mm512_loadu_ps(values.as_ptr()))) }
    }
    if !rest.is_empty() {
        let vector = with(load_or(rest, 0.0));
        store(rest, vector);
    }
}

/// The same for two lists of one length side by side.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn replace_both(
    left: &mut [f32],
    right: &mut [f32],
    mut with: impl FnMut(__m512, __m512) -> (__m512, __m512),
) {
    let ((left, left_rest), (right, right_rest)) =
        (left.as_chunks_mut::<LANES>(), right.as_chunks_mut::<LANES>());
    for (left, right) in left.iter_mut().zip(right) {
        // SAFETY: two vectors of floats.
        unsafe {
            let (a, b) = with(_mm512_loadu_ps(left.as_ptr()), _mm512_loadu_ps(right.as_ptr()));
            _mm512_storeu_ps(left.as_mut_ptr(), a);
            _mm512_storeu_ps(right.as_mut_ptr(), b);
        }
    }
    if !left_rest.is_empty() {
        let (a, b) = with(load_or(left_rest, 0.0), load_or(right_rest, 0.0));
        store(left_rest, a);
        store(right_rest, b);
    }
}

/// Takes up values a vector at a time; lanes behind the last value are `fill`.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn fold<T>(values: &[f32], fill: f32, start: T, mut with: impl FnMut(T, __m512) -> T) -> T {
    let (whole, rest) = values.as_chunks::<LANES>();
    let mut state = start;
    for values in whole {
        // SAFETY: a vector of floats.
        state = with(state, unsafe { _mm512_loadu_ps(values.as_ptr()) });
    }
    if rest.is_empty() { state } else { with(state, load_or(rest, fill)) }
}

/// Up to LANES halves, zeros behind them.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn widened(halves: &[f16]) -> __m512 {
    let mut padded = [f16::ZERO; LANES];
    let from = match halves.as_chunks::<LANES>().0.first() {
        Some(whole) => whole,
        None => {
            padded[..halves.len()].copy_from_slice(halves);
            &padded
        }
    };
    // SAFETY: a vector of halves.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.as_ptr().cast()) })
}

/// The transpose of a square of floats, in four rounds of pairs 1, 2, 4 and 8 apart.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn transposed(rows: [__m512; LANES]) -> [__m512; LANES] {
    let mut a = rows;
    for i in (0..LANES).step_by(2) {
        (a[i], a[i + 1]) =
            (_mm512_unpacklo_ps(rows[i], rows[i + 1]), _mm512_unpackhi_ps(rows[i], rows[i + 1]));
    }
    let mut b = a;
    for i in (0..LANES).step_by(4) {
        let pairs = |low: __m512, high: __m512| {
            let (low, high) = (_mm512_castps_pd(low), _mm512_castps_pd(high));
            let first = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            (first, _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)))
        };
        (b[i], b[i + 1]) = pairs(a[i], a[i + 2]);
        (b[i + 2], b[i + 3]) = pairs(a[i + 1], a[i + 3]);
    }
    // b[4 g + j] now holds, in quarter q, rows 4 g .. 4 g + 4 of column 4 q + j.
    let mut out = b;
    for j in 0..4 {
        let (p, q) = (b[j], b[4 + j]);
        let (r, s) = (b[8 + j], b[12 + j]);
        let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(p, q), _mm512_shuffle_f32x4::<0xdd>(p, q));
        let (even_2, odd_2) = (_mm512_shuffle_f32x4::<0x88>(r, s), _mm512_shuffle_f32x4::<0xdd>(r, s));
        out[j] = _mm512_shuffle_f32x4::<0x88>(even, even_2);
        out[8 + j] = _mm512_shuffle_f32x4::<0xdd>(even, even_2);
        out[4 + j] = _mm512_shuffle_f32x4::<0x88>(odd, odd_2);
        out[12 + j] = _mm512_shuffle_f32x4::<0xdd>(odd, odd_2);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(vector: __m512) -> [f32; LANES] {
        // SAFETY: both are 64 bytes of floats.
        unsafe { std::mem::transmute(vector) }
    }

    #[target_feature(enable = "avx512f")]
    fn check() {
        for step in -8800..8800 {
            let x = step as f32 * 0.01;
            let exact = f64::from(x).exp();
            let error = (f64::from(lanes(exp(_mm512_set1_ps(x)))[3]) - exact).abs() / exact;
            // Below 2^-126 numbers have fewer bits.
            assert!(error < 2.0e-7 || exact < 1.2e-38, "exp({x}) is off by {error}");
            let x = f64::from(x) + 0.003;
            let error = f64::from(lanes(reciprocal(_mm512_set1_ps(x as f32)))[9]) * f64::from(x as f32) - 1.0;
            assert!(error.abs() < 1.3e-7, "1 / {x} is off by {error}");
        }
        for (x, expected) in [(f32::NEG_INFINITY, 0.0), (f32::INFINITY, f32::INFINITY), (0.0, 1.0)] {
            assert_eq!(lanes(exp(_mm512_set1_ps(x)))[0], expected);
        }
        assert!(lanes(exp(_mm512_set1_ps(f32::NAN)))[0].is_nan());
        let square: [[f32; LANES]; LANES] =
            std::array::from_fn(|i| std::array::from_fn(|j| (i * LANES + j) as f32));
        let turned = transposed(square.map(|row| load_or(&row, 0.0)));
        for (i, vector) in turned.into_iter().enumerate() {
            assert_eq!(lanes(vector), std::array::from_fn(|j| square[j][i]));
        }
        assert_eq!(lanes(load_or(&[1.0, 2.0], 7.0))[..3], [1.0, 2.0, 7.0]);
        let mut values = [0f32; 3];
        store(&mut values, _mm512_set1_ps(4.0));
        assert_eq!(values, [4.0; 3]);
        assert_eq!(lanes(widened(&[f16::ONE; 3]))[1..4], [1.0, 1.0, 0.0]);
    }

    #[test]
    fn vectors_are_right() {
        if crate::kernels::cpu::avx512() {
            // SAFETY: the CPU has the instructions.
            unsafe { check() }
        }
    }
}
