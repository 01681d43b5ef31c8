//! Deltas that are fused into a product: their kernels against products in f64, with factors that their type can hold,
//! so that only the roundings of results remain.

use cuda_shim::{Launcher, kernels};
use half::{bf16, f16};

use crate::{args, harness::*};

kernels!(
    delta_start_f16_launch,
    delta_start_bf16_launch,
    delta_pass_f16_launch,
    delta_pass_bf16_launch,
    delta_spread_f16_launch,
    delta_spread_bf16_launch,
);

/// Start, pass and spread, for `Activation::INDEX`, of which f32 has none.
const KERNELS: [[Launcher; 3]; 2] = [
    [delta_start_f16_launch, delta_pass_f16_launch, delta_spread_f16_launch],
    [delta_start_bf16_launch, delta_pass_bf16_launch, delta_spread_bf16_launch],
];

const SCALE: f32 = 1.7;

#[derive(Clone, Copy)]
struct Shape {
    n: usize,
    inputs: usize,
    outputs: usize,
    rank: usize,
}

/// `left (rows, inner) right (columns, inner)^T`.
fn product(left: &[f64], right: &[f64], inner: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    left.chunks(inner).flat_map(|a| right.chunks(inner).map(move |b| dot(a, b))).collect()
}

fn transposed(matrix: &[f64], columns: usize) -> Vec<f64> {
    (0..matrix.len())
        .map(|at| matrix[at % (matrix.len() / columns) * columns + at / (matrix.len() / columns)])
        .collect()
}

/// The first `rank` of `ranks` columns; the others must be 0.
fn cut(matrix: &[f64], ranks: usize, rank: usize) -> Vec<f64> {
    matrix
        .chunks(ranks)
        .flat_map(|row| {
            assert!(row[rank..].iter().all(|&more| more == 0.0), "ranks that the delta does not have");
            row[..rank].to_vec()
        })
        .collect()
}

fn check<T: Activation>(s: Shape, begins: [bool; 2], seed: u64) {
    let Shape { n, inputs, outputs, rank } = s;
    let [start, ..] = KERNELS[T::INDEX - 1];
    let ranks = rank.next_multiple_of(8);
    let x = rounded::<T>(seed, n * inputs);
    let (a, b) = (rounded::<T>(seed + 2, rank * inputs), rounded::<T>(seed + 3, outputs * rank));
    let (residual, bias) = (rounded::<T>(seed + 4, n * outputs), rounded::<f16>(seed + 5, outputs));
    let x_in = Device::<T>::of(&x);
    let (a_in, b_in) = (Device::<f32>::of(&a), Device::<f32>::of(&b));
    let (res_in, bias_in) = (Device::<T>::of(&residual), Device::<f16>::of(&bias));
    let [n_, in_, out_, rank_] = [n, inputs, outputs, rank].map(|size| size as i32);
    let grid = [n.div_ceil(32), 1, 1];

    let (xa, alone, y) = (
        Device::<T>::poisoned(n * ranks),
        Device::<T>::poisoned(n * ranks),
        Device::<T>::poisoned(n * outputs),
    );
    let [residual_at, bias_at] = begins;
    let residual_at = if residual_at { res_in.head() } else { std::ptr::null_mut() };
    let bias_at = if bias_at { bias_in.head() } else { std::ptr::null_mut() };
    let args = args![
        x_in.head(),
        a_in.head(),
        b_in.head(),
        xa.head(),
        residual_at,
        bias_at,
        y.head(),
        n_,
        in_,
        out_,
        rank_,
        SCALE
    ];
    run(start, grid, 128, 0, seed, args);
    let none = std::ptr::null_mut::<T>();
    let args = args![
        x_in.head(),
        a_in.head(),
        b_in.head(),
        alone.head(),
        none,
        std::ptr::null_mut::<f16>(),
        none,
        n_,
        in_,
        out_,
        rank_,
        SCALE
    ];
    run(start, grid, 128, 0, seed + 9, args);
    assert!(xa.get().iter().zip(alone.get()).all(|(a, b)| a.same(b)), "xa alone has other bits");
    let found = cut(&xa.wide(), ranks, rank);
    assert_close(&found, &product(&x, &a, inputs), T::ROUNDING + 1e-5, "xa");
    let delta = product(&found, &b, rank);
    let expected: Vec<f64> = (0..n * outputs)
        .map(|at| {
            let residual = if begins[0] { residual[at] } else { 0.0 };
            let bias = if begins[1] { bias[at % outputs] } else { 0.0 };
            residual + bias + f64::from(SCALE) * delta[at]
        })
        .collect();
    assert_close(&y.wide(), &expected, T::ROUNDING + 1e-5, "y");
}

/// Bytes of shared memory beside what the pass declares: three stages.
fn stages(ranks: usize) -> usize {
    3 * 2 * 32 * (256 + 8 + ranks)
}

/// A pass whose blocks have `share` rows each, and what follows it.
fn check_back<T: Activation>(s: Shape, share: usize, seed: u64) {
    let Shape { n, inputs, outputs, rank } = s;
    let [_, pass, spread] = KERNELS[T::INDEX - 1];
    let (ranks, groups, shares) = (rank.next_multiple_of(8), outputs.div_ceil(256), n.div_ceil(share));
    let (xa, dy) = (rounded::<T>(seed, n * ranks), rounded::<T>(seed + 1, n * outputs));
    let (a, b) = (rounded::<T>(seed + 2, rank * inputs), rounded::<T>(seed + 3, outputs * rank));
    let before = numbers(seed + 4, outputs * rank);
    let (xa_in, dy_in) = (Device::<T>::of(&xa), Device::<T>::of(&dy));
    let (a_in, b_in) = (Device::<f32>::of(&a), Device::<f32>::of(&b));
    let (parts, sums) =
        (Device::<f32>::poisoned(groups * n * ranks), Device::<f32>::poisoned(shares * outputs * ranks));
    let [n_, in_, out_, rank_, share_, groups_, shares_] =
        [n, inputs, outputs, rank, share, groups, shares].map(|size| size as i32);
    let args =
        args![dy_in.head(), xa_in.head(), b_in.head(), parts.head(), sums.head(), n_, out_, rank_, share_];
    run(pass, [groups, shares, 1], 128, stages(ranks), seed, args);

    let spread_to = |d_xa: &Device<T>, dx: *mut T, db: *mut f32, seed: u64| {
        let sums_blocks = if db.is_null() { 0 } else { (outputs * rank).div_ceil(128) };
        let args = args![
            parts.head(),
            groups_,
            a_in.head(),
            d_xa.head(),
            dx,
            n_,
            in_,
            rank_,
            SCALE,
            sums.head(),
            shares_,
            out_,
            db
        ];
        run(spread, [n.div_ceil(32) + sums_blocks, 1, 1], 128, 0, seed, args);
    };
    let (d_xa, dx, db) =
        (Device::<T>::poisoned(n * ranks), Device::<T>::poisoned(n * inputs), Device::<f32>::of(&before));
    spread_to(&d_xa, dx.head(), db.head(), seed);
    let found = cut(&d_xa.wide(), ranks, rank);
    let expected = product(&dy, &transposed(&b, rank), outputs);
    assert_close(&found, &expected, T::ROUNDING + 1e-5, "d xa");
    let expected: Vec<f64> =
        product(&found, &transposed(&a, inputs), rank).into_iter().map(|d| f64::from(SCALE) * d).collect();
    assert_close(&dx.wide(), &expected, T::ROUNDING + 1e-5, "dx");
    let sum = product(&transposed(&dy, outputs), &transposed(&xa, ranks), n);
    let expected: Vec<f64> = (0..outputs * rank)
        .map(|at| before[at] + f64::from(SCALE) * sum[at / rank * ranks + at % rank])
        .collect();
    assert_close(&db.wide(), &expected, 1e-4, "dB");

    let d_alone = Device::<T>::poisoned(n * ranks);
    spread_to(&d_alone, std::ptr::null_mut(), std::ptr::null_mut(), seed + 9);
    assert!(d_xa.get().iter().zip(d_alone.get()).all(|(a, b)| a.same(b)), "d xa alone has other bits");
}

/// One tile and several, whole and not; ranks of one tile and of two, whole and not; terms below a step and of several.
const SHAPES: [Shape; 4] = [
    Shape { n: 9, inputs: 24, outputs: 40, rank: 4 },
    Shape { n: 33, inputs: 104, outputs: 136, rank: 8 },
    Shape { n: 64, inputs: 72, outputs: 256, rank: 13 },
    Shape { n: 70, inputs: 200, outputs: 48, rank: 16 },
];

#[test]
fn fused_deltas_are_those_of_their_rounded_factors() {
    for (at, shape) in SHAPES.into_iter().enumerate() {
        for begins in [[false, false], [true, true], [at % 2 == 0, at % 2 == 1]] {
            let seed = 20 * at as u64;
            check::<f16>(shape, begins, seed + 1);
            check::<bf16>(shape, begins, seed + 2);
        }
    }
}

/// More than two stages in a share, shares of few rows and of all, whole blocks of columns and not.
#[test]
fn a_pass_makes_both_gradients_from_one_read() {
    let wide = Shape { n: 201, inputs: 40, outputs: 328, rank: 7 };
    for (at, (shape, share)) in SHAPES
        .into_iter()
        .zip([32, 64, 32, 96])
        .chain([(wide, 128), (Shape { rank: 15, ..wide }, 224)])
        .enumerate()
    {
        let seed = 1000 + 20 * at as u64;
        check_back::<f16>(shape, share, seed + 1);
        check_back::<bf16>(shape, share, seed + 2);
    }
}
