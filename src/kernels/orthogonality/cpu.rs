//! CPU side: a task for each factor. A sum over n is made of parts, so that its rounding does not grow with n.

use super::Factor;
use crate::device::cpu::{Shared, tasks::each, vectorised};

/// Sums that one dot product keeps apart: a vector of the widest instruction set, twice.
const LANES: usize = 32;
/// Rows of a transposed factor whose products are added before they go into the sum.
const ROWS: usize = 64;

pub fn backward(values: &[f32], factors: &[Factor], weight: f32, gradient: &mut [f32], grams: &mut [f32]) {
    let (gradient, grams) = (Shared::new(gradient), Shared::new(grams));
    each(factors.len(), |task| {
        let Factor { at, rank, len, transposed, gram } = factors[task];
        let p = &values[at..at + rank * len];
        // SAFETY: factors lie apart, and so do their places in the scratch.
        let (to, scratch) =
            unsafe { (gradient.range(at, rank * len), grams.range(gram, Factor::scratch(rank))) };
        let (gram, part) = scratch.split_at_mut(rank * rank);
        vectorised(
            #[inline(always)]
            || {
                match transposed {
                    true => gram_of_columns(p, rank, gram, part),
                    false => gram_of_rows(p, rank, gram),
                }
                gram.iter_mut().step_by(rank + 1).for_each(|diagonal| *diagonal -= 1.0);
                let norm = gram.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
                if norm == 0.0 {
                    return;
                }
                let scale = (2.0 * f64::from(weight) / norm) as f32;
                gram.iter_mut().for_each(|x| *x *= scale);
                match transposed {
                    true => add_to_columns(p, rank, gram, to),
                    false => add_to_rows(p, rank, gram, to),
                }
            },
        );
    });
}

/// `gram (r, r) = P P^T` of `p (r, n)`.
#[inline(always)]
fn gram_of_rows(p: &[f32], rank: usize, gram: &mut [f32]) {
    let n = p.len() / rank;
    for i in 0..rank {
        for j in 0..=i {
            let sum = dot(&p[i * n..(i + 1) * n], &p[j * n..(j + 1) * n]);
            (gram[i * rank + j], gram[j * rank + i]) = (sum, sum);
        }
    }
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, rest_a), (b, rest_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f32>() + rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum::<f32>()
}

/// `gram (r, r) = P P^T` of `p (n, r)`, which is `P^T`; `part (r, r)` is scratch.
#[inline(always)]
fn gram_of_columns(p: &[f32], rank: usize, gram: &mut [f32], part: &mut [f32]) {
    gram.fill(0.0);
    for rows in p.chunks(ROWS * rank) {
        part.fill(0.0);
        for row in rows.chunks_exact(rank) {
            for (to, &x) in part.chunks_exact_mut(rank).zip(row) {
                to.iter_mut().zip(row).for_each(|(to, y)| *to += x * y);
            }
        }
        gram.iter_mut().zip(&*part).for_each(|(sum, part)| *sum += part);
    }
}

/// `to (r, n) += M P` with `m (r, r)`.
#[inline(always)]
fn add_to_rows(p: &[f32], rank: usize, m: &[f32], to: &mut [f32]) {
    let n = p.len() / rank;
    for (to, m) in to.chunks_exact_mut(n).zip(m.chunks_exact(rank)) {
        for (&m, row) in m.iter().zip(p.chunks_exact(n)) {
            to.iter_mut().zip(row).for_each(|(to, x)| *to += m * x);
        }
    }
}

/// `to (n, r) += P^T M` with a symmetric `m (r, r)`.
#[inline(always)]
fn add_to_columns(p: &[f32], rank: usize, m: &[f32], to: &mut [f32]) {
    for (to, row) in to.chunks_exact_mut(rank).zip(p.chunks_exact(rank)) {
        for (&x, m) in row.iter().zip(m.chunks_exact(rank)) {
            to.iter_mut().zip(m).for_each(|(to, m)| *to += x * m);
        }
    }
}
