//! The penalty on factors that are not orthonormal, and the importance by which ranks are allocated.

use cuda_shim::kernels;
use engraft::kernels::{
    importance::{self, Smoothing, Triplets},
    orthogonality,
};

use crate::{args, harness::*};

kernels!(
    orthogonality_products_launch,
    orthogonality_backward_launch,
    importance_smooth_launch,
    importance_scores_launch,
    importance_keep_launch,
);

/// `p (r, n)` as `(n, r)`.
fn turned(p: &[f64], rank: usize) -> Vec<f64> {
    let n = p.len() / rank;
    (0..p.len()).map(|at| p[at % rank * n + at / rank]).collect()
}

/// `to` after the penalty's gradient times `weight` was added, for `p (r, n)` stored as it is or transposed.
fn penalised(p: &[f64], before: &[f64], rank: usize, weight: f32, transposed: bool) -> Vec<f64> {
    let len = p.len() / rank;
    let stored = |values: &[f64]| if transposed { turned(values, rank) } else { values.to_vec() };
    let (p, to) = (Device::<f32>::of(&stored(p)), Device::<f32>::of(&stored(before)));
    let gram = Device::<f32>::poisoned(rank * rank);
    let (rank_, len_, transposed_) = (rank as i32, len as i32, i32::from(transposed));
    let args = args![p.head(), gram.head(), rank_, len_, transposed_];
    run(orthogonality_products_launch, [rank, rank, 1], 128, 0, 1, args);
    let args = args![p.head(), gram.head(), weight, to.head(), rank_, len_, transposed_];
    run(orthogonality_backward_launch, [(rank * len).div_ceil(1024), 1, 1], 256, 0, 2, args);
    if transposed { turned(&to.wide(), len) } else { to.wide() }
}

#[test]
fn the_gradient_of_the_penalty_matches_the_twin() {
    for (rank, len) in [(1, 5), (3, 7), (12, 131), (40, 300)] {
        let (p, before) = (rounded::<f32>(1, rank * len), rounded::<f32>(2, rank * len));
        let twin = orthogonality::reference::backward(&p, rank);
        let expected: Vec<f64> = before.iter().zip(twin).map(|(a, b)| a + f64::from(0.3f32) * b).collect();
        for transposed in [false, true] {
            let found = penalised(&p, &before, rank, 0.3, transposed);
            assert_close(&found, &expected, 2e-6, "gradient");
        }
    }
    // Orthonormal vectors have none.
    let (p, before) = ([1.0, 0.0, 0.0, 0.0, 0.0, -1.0], [0.5; 6]);
    assert_eq!(penalised(&p, &before, 2, 1.0, false), before);
}

#[test]
fn importance_matches_the_twin() {
    let count = 2051;
    let by = Smoothing { betas: (0.85, 0.6), factor: f64::from(0.37f32) };
    let [values, gradient, m, u] = [1, 2, 3, 4].map(|seed| rounded::<f32>(seed, count));
    let (mut m, mut u): (Vec<f64>, Vec<f64>) =
        (m.iter().map(|x| x.abs()).collect(), u.iter().map(|x| x.abs()).collect());
    let [w, g, mean, uncertainty] = [&values, &gradient, &m, &u].map(|values| Device::<f32>::of(values));
    let complements = [(1.0 - by.betas.0) as f32, (1.0 - by.betas.1) as f32];
    let factors = [by.betas.0 as f32, by.betas.1 as f32, complements[0], complements[1], by.factor as f32];
    let args = args![w.head(), g.head(), mean.head(), uncertainty.head(), count as i64, factors];
    run(importance_smooth_launch, [count.div_ceil(1024), 1, 1], 256, 0, 1, args);
    importance::reference::smooth(&values, &gradient, &mut m, &mut u, by);
    assert_close(&mean.wide(), &m, 1e-6, "means");
    assert_close(&uncertainty.wide(), &u, 1e-6, "uncertainties");
}

#[test]
fn scores_match_the_twin_and_what_is_not_kept_becomes_0() {
    for (rank, inputs, outputs) in [(1, 3, 5), (3, 7, 11), (5, 300, 260)] {
        let (a, b) = (2, 2 + rank * inputs);
        let d = b + rank * outputs;
        let positive = |seed| rounded::<f32>(seed, d + rank).into_iter().map(f64::abs).collect::<Vec<_>>();
        let (m, u) = (positive(1), positive(2));
        let (mean, uncertainty) = (Device::<f32>::of(&m), Device::<f32>::of(&u));
        let scores = Device::<f32>::poisoned(rank);
        let [a_, b_, d_] = [a, b, d].map(|at| at as i64);
        let [rank_, inputs_, outputs_] = [rank, inputs, outputs].map(|size| size as i32);
        let args =
            args![mean.head(), uncertainty.head(), a_, b_, d_, scores.head(), rank_, inputs_, outputs_];
        run(importance_scores_launch, [rank, 1, 1], 256, 0, 1, args);
        let delta = Triplets { a, b, d, rank, inputs, outputs, first: 0 };
        assert_close(&scores.wide(), &importance::reference::scores(&m, &u, delta), 1e-6, "scores");
    }
    let kept = Device::<f32>::of(&[1.0, 0.0, 1.0, 0.0, 0.0]);
    let values = Device::<f32>::of(&[0.5, 1.5, -2.5, 3.5, -4.5]);
    run(importance_keep_launch, [1, 1, 1], 256, 0, 1, args![kept.head(), values.head(), 5]);
    assert_eq!(values.wide(), [0.5, 0.0, -2.5, 0.0, 0.0]);
}
