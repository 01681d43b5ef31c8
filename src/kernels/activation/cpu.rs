//! CPU side: vector loops for GPT-2's functions, the plain formula for the others.

use super::{Activation, reference, simd};
use crate::device::cpu::{Shared, exp, simd::at_level, tasks::each, vectorised};

/// Elements that a task takes.
const PIECE: usize = 1 << 14;
const K: f32 = reference::SQRT_2_OVER_PI as f32;
const CUBE: f32 = reference::CUBE as f32;

pub fn forward(kind: Activation, x: &[f32], y: &mut [f32]) {
    let tanh = kind == Activation::GeluTanh;
    if tanh && at_level!(s => pieces(x, y, |x, y| simd::gelu(s, x, y))).is_some() {
        return;
    }
    match kind {
        Activation::GeluTanh => map(x, y, |x, _| x * gate(x)),
        Activation::Relu => map(x, y, |x, _| x.max(0.0)),
        other => map(x, y, move |x, _| reference::forward(other, x)),
    }
}

pub fn backward(kind: Activation, x: &[f32], d: &mut [f32]) {
    let tanh = kind == Activation::GeluTanh;
    if tanh && at_level!(s => pieces(x, d, |x, d| simd::gelu_backward(s, x, d))).is_some() {
        return;
    }
    match kind {
        Activation::GeluTanh => map(x, d, |x, d| {
            // In the forward pass y = x s with s = sigmoid(2u), so dy/dx = s + x s (1 - s) 2 du/dx.
            let s = gate(x);
            let slope = 2.0 * K * (1.0 + 3.0 * CUBE * x * x);
            // For large |x| the square overflows before s (1 - s) vanishes; x s (1 - s) is 0 there.
            let curve = s * (1.0 - s);
            d * (s + if curve == 0.0 { 0.0 } else { x * curve * slope })
        }),
        Activation::Relu => map(x, d, |x, d| if x > 0.0 { d } else { 0.0 }),
        other => map(x, d, move |x, d| d * reference::derivative(other, x)),
    }
}

/// sigmoid(2u) of the tanh approximation.
#[inline(always)]
fn gate(x: f32) -> f32 {
    1.0 / (1.0 + exp(-2.0 * K * (x + CUBE * x * x * x)))
}

/// `y = f(x, y)`, compiled into a vector loop for each function.
fn map(x: &[f32], y: &mut [f32], f: impl Fn(f32, f32) -> f32 + Sync) {
    pieces(x, y, |x, y| {
        vectorised(
            #[inline(always)]
            || y.iter_mut().zip(x).for_each(|(y, &x)| *y = f(x, *y)),
        );
    });
}

/// Runs `f` on pieces of x and y in parallel.
fn pieces(x: &[f32], y: &mut [f32], f: impl Fn(&[f32], &mut [f32]) + Sync) {
    assert_eq!(x.len(), y.len(), "activation shapes");
    let len = x.len();
    let y = Shared::new(y);
    each(len.div_ceil(PIECE), |task| {
        let start = task * PIECE;
        let count = PIECE.min(len - start);
        // SAFETY: this piece belongs to this task.
        f(&x[start..start + count], unsafe { y.range(start, count) });
    });
}
