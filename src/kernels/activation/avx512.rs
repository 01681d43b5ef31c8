//! AVX-512 side of the tanh form of GELU.

use std::arch::x86_64::*;

use super::reference;
use crate::kernels::avx512::{LANES, exp, load_or, reciprocal, store};

const K: f32 = reference::SQRT_2_OVER_PI as f32;
const CUBE: f32 = reference::CUBE as f32;

/// `y = x s` with `s = sigmoid(2u)`.
///
/// # Safety
/// The CPU has AVX-512 F.
#[target_feature(enable = "avx512f")]
pub unsafe fn gelu(x: &[f32], y: &mut [f32]) {
    for (x, y) in x.chunks(LANES).zip(y.chunks_mut(LANES)) {
        let x = load_or(x, 0.0);
        store(y, _mm512_mul_ps(x, gate(x, _mm512_mul_ps(x, x))));
    }
}

/// `d = d (s + x s (1 - s) 2 du/dx)`.
///
/// # Safety
/// The CPU has AVX-512 F.
#[target_feature(enable = "avx512f")]
pub unsafe fn gelu_backward(x: &[f32], d: &mut [f32]) {
    let one = _mm512_set1_ps(1.0);
    for (x, d) in x.chunks(LANES).zip(d.chunks_mut(LANES)) {
        let x = load_or(x, 0.0);
        let square = _mm512_mul_ps(x, x);
        let s = gate(x, square);
        let slope = _mm512_fmadd_ps(_mm512_set1_ps(6.0 * K * CUBE), square, _mm512_set1_ps(2.0 * K));
        let curve = _mm512_mul_ps(s, _mm512_sub_ps(one, s));
        // For large |x| the square overflows before s (1 - s) vanishes; x s (1 - s) is 0 there.
        let bent = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(curve, _mm512_setzero_ps());
        let change = _mm512_maskz_mul_ps(bent, _mm512_mul_ps(x, curve), slope);
        store(d, _mm512_mul_ps(load_or(d, 0.0), _mm512_add_ps(s, change)));
    }
}

/// sigmoid(2u), `u = K (x + CUBE x^3)`; below e^-87 it is 0.
#[inline]
#[target_feature(enable = "avx512f")]
fn gate(x: __m512, square: __m512) -> __m512 {
    let inside = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(-2.0 * K * CUBE), square), x, {
        _mm512_mul_ps(_mm512_set1_ps(-2.0 * K), x)
    });
    // Beyond 87 the sum would be infinite, and its reciprocal not 0 but NaN. NaN itself passes.
    let normal = _mm512_cmp_ps_mask::<_CMP_NGE_UQ>(inside, _mm512_set1_ps(87.0));
    _mm512_maskz_mov_ps(normal, reciprocal(_mm512_add_ps(_mm512_set1_ps(1.0), exp(inside))))
}
