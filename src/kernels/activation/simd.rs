//! The tanh form of GELU in vectors.

use super::reference;
use crate::device::cpu::simd::{Simd, exp, load_or, store};

const K: f32 = reference::SQRT_2_OVER_PI as f32;
const CUBE: f32 = reference::CUBE as f32;

/// `y = x s` with `s = sigmoid(2u)`.
pub fn gelu<S: Simd>(s: S, x: &[f32], y: &mut [f32]) {
    s.enter(
        #[inline(always)]
        move || {
            for (x, y) in x.chunks(S::LANES).zip(y.chunks_mut(S::LANES)) {
                let x = load_or(s, x, 0.0);
                store(s, y, s.mul(x, gate(s, x, s.mul(x, x))));
            }
        },
    );
}

/// `d = d (s + x s (1 - s) 2 du/dx)`.
pub fn gelu_backward<S: Simd>(s: S, x: &[f32], d: &mut [f32]) {
    s.enter(
        #[inline(always)]
        move || {
            let one = s.splat(1.0);
            for (x, d) in x.chunks(S::LANES).zip(d.chunks_mut(S::LANES)) {
                let x = load_or(s, x, 0.0);
                let square = s.mul(x, x);
                let sigmoid = gate(s, x, square);
                let slope = s.fma(s.splat(6.0 * K * CUBE), square, s.splat(2.0 * K));
                let curve = s.mul(sigmoid, s.sub(one, sigmoid));
                // For large |x| the square overflows before s (1 - s) vanishes; x s (1 - s) is 0 there.
                let change = s.unless_equal(s.mul(s.mul(x, curve), slope), curve, s.zero());
                store(s, d, s.mul(load_or(s, d, 0.0), s.add(sigmoid, change)));
            }
        },
    );
}

/// sigmoid(2u), `u = K (x + CUBE x^3)`; below e^-87 it is 0.
#[inline(always)]
fn gate<S: Simd>(s: S, x: S::Floats, square: S::Floats) -> S::Floats {
    let inside = s.fma(s.mul(s.splat(-2.0 * K * CUBE), square), x, s.mul(s.splat(-2.0 * K), x));
    // Beyond 87 the sum would be infinite, and its reciprocal not 0 but NaN. NaN itself passes.
    s.unless_reaching(s.reciprocal(s.add(s.splat(1.0), exp(s, inside))), inside, s.splat(87.0))
}
