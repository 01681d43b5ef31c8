//! The gradient of the penalty against differences, and against its twin.

use super::*;
use crate::testing::{assert_close, assert_gradient, numbers, widened, with_threads};

/// `p (r, n)` as `(n, r)`.
fn transposed(p: &[f32], rank: usize) -> Vec<f32> {
    let n = p.len() / rank;
    (0..p.len()).map(|at| p[at % rank * n + at / rank]).collect()
}

#[test]
fn the_gradient_is_that_of_differences() {
    for (rank, n) in [(1, 4), (3, 7), (5, 5), (4, 2)] {
        let p = widened(&numbers(rank as u64, rank * n));
        let gradient = reference::backward(&p, rank);
        assert_gradient(&p, &gradient, "a factor", |p| reference::penalty(p, rank));
    }
}

/// Both ways to store a factor, beside others, for any number of threads.
#[test]
fn it_adds_what_the_twin_says() {
    let shapes =
        [(3, 7, false), (3, 7, true), (1, 130, true), (12, 131, false), (12, 131, true), (40, 9, false)];
    let (mut factors, mut values) = (Vec::new(), Vec::new());
    let mut gram = 0;
    for (seed, (rank, len, is_transposed)) in (0u64..).zip(shapes) {
        values.extend([9.0; 2]); // of other tensors
        let p = numbers(seed, rank * len);
        factors.push(Factor { at: values.len(), rank, len, transposed: is_transposed, gram });
        values.extend(if is_transposed { transposed(&p, rank) } else { p });
        gram += Factor::scratch(rank);
    }
    let before = numbers(99, values.len());
    let run = |threads| {
        let (mut gradient, mut grams) = (before.clone(), vec![f32::NAN; gram]);
        with_threads(threads, || {
            let (to, scratch) = (gradient.as_mut_slice().into(), grams.as_mut_slice().into());
            backward(values.as_slice().into(), &factors, 0.3, to, scratch);
        });
        gradient
    };
    let found = run(1);
    assert!(found == run(3), "threads change bits");
    let mut expected = widened(&before);
    for (seed, factor) in (0u64..).zip(&factors) {
        let Factor { at, rank, len, transposed, .. } = *factor;
        let twin = reference::backward(&widened(&numbers(seed, rank * len)), rank);
        for (index, value) in twin.into_iter().enumerate() {
            let place = if transposed { index % len * rank + index / len } else { index };
            expected[at + place] += f64::from(0.3f32) * value;
        }
    }
    assert_close(&found, &expected, 2e-6, "gradient of the penalty");
}

#[test]
fn orthonormal_vectors_have_no_gradient() {
    let values = [1.0f32, 0.0, 0.0, 0.0, 0.0, -1.0];
    let factor = Factor { at: 0, rank: 2, len: 3, transposed: false, gram: 0 };
    let (mut gradient, mut grams) = (vec![0.5f32; 6], vec![0f32; 8]);
    let (to, scratch) = (gradient.as_mut_slice().into(), grams.as_mut_slice().into());
    backward(values[..].into(), &[factor], 1.0, to, scratch);
    assert_eq!(gradient, [0.5; 6]);
    assert_eq!(reference::backward(&values, 2), [0.0; 6]);
}
