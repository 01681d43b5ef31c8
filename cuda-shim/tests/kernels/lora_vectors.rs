//! Kernels of the vectors of an adapted layer: d and e of a delta, u and g of a layer, a trained bias.

use cuda_shim::{Launcher, kernels};
use engraft::kernels::adapted_linear::reference::{self, Delta, Site};
use half::{bf16, f16};

use crate::{args, harness::*};

kernels!(
    lora_scaled_b_launch,
    lora_db_scaled_launch,
    lora_de_launch,
    lora_dd_launch,
    scale_columns_f32_launch,
    scale_columns_f16_launch,
    scale_columns_bf16_launch,
    sum_columns_f32_launch,
    sum_columns_f16_launch,
    sum_columns_bf16_launch,
    add_bias_f32_launch,
    add_bias_f16_launch,
    add_bias_bf16_launch,
);
const SCALE: [Launcher; 3] = [scale_columns_f32_launch, scale_columns_f16_launch, scale_columns_bf16_launch];
const SUM: [Launcher; 3] = [sum_columns_f32_launch, sum_columns_f16_launch, sum_columns_bf16_launch];
const ADD: [Launcher; 3] = [add_bias_f32_launch, add_bias_f16_launch, add_bias_bf16_launch];

fn plus(before: &[f64], part: &[f64]) -> Vec<f64> {
    before.iter().zip(part).map(|(a, b)| a + b).collect()
}

/// Gradients of B, d and e from the shares of `dy^T xa`, and B as the other kernels read it.
fn check_factors(n: usize, columns: usize, rank: usize, splits: usize, seed: u64) {
    let (inputs, scale) = (rank, 1.7f32);
    // With A the unit matrix, x is xa.
    let a: Vec<f64> = (0..rank * rank).map(|at| f64::from(u8::from(at % (rank + 1) == 0))).collect();
    let (x, dy) = (rounded::<f32>(1, n * rank), rounded::<f32>(2, n * columns));
    let (b, d, e) = (rounded::<f32>(3, columns * rank), rounded::<f32>(4, rank), rounded::<f32>(5, columns));
    let (w, bias) = (vec![0.0; inputs * columns], vec![0.0; columns]);
    for (with_d, with_e) in [(true, true), (true, false), (false, true)] {
        let (d_used, e_used) = (with_d.then_some(&d[..]), with_e.then_some(&e[..]));
        let delta = Delta {
            a: &a,
            b: &b,
            rank,
            columns: 0..columns,
            tokens: 0..n,
            scale: f64::from(scale),
            d: d_used,
            e: e_used,
            dropped: None,
        };
        let (outputs, deltas) = (columns, vec![delta]);
        let site =
            Site { n, inputs, outputs, w: &w, bias: &bias, u: None, g: None, bias_inside: false, deltas };
        let found = reference::backward(&site, &x, &dy);

        let mut shares = vec![0.0; splits * columns * rank];
        for token in 0..n {
            let share = &mut shares[token * splits / n * columns * rank..][..columns * rank];
            for (at, share) in share.iter_mut().enumerate() {
                *share += dy[token * columns + at / rank] * x[token * rank + at % rank];
            }
        }
        let parts = Device::<f32>::of(&shares);
        let [b_in, d_in, e_in] = [&b, &d, &e].map(|values| Device::<f32>::of(values));
        let d_head = if with_d { d_in.head() } else { std::ptr::null_mut() };
        let e_head = if with_e { e_in.head() } else { std::ptr::null_mut() };
        let [columns_, rank_, splits_] = [columns, rank, splits].map(|size| size as i32);

        let scaled = Device::<f32>::poisoned(columns * rank);
        let args = args![b_in.head(), d_head, e_head, scaled.head(), columns_, rank_];
        run(lora_scaled_b_launch, [(columns * rank).div_ceil(256), 1, 1], 256, 0, seed, args);
        let expected: Vec<f64> = (0..columns * rank)
            .map(|at| b[at] * d_used.map_or(1.0, |d| d[at % rank]) * e_used.map_or(1.0, |e| e[at / rank]))
            .collect();
        assert_close(&scaled.wide(), &expected, 1e-6, "e * B * d");

        let before = [6, 7, 8].map(|seed| rounded::<f32>(seed, columns * rank));
        let [db, de, dd] = [&before[0][..], &before[1][..columns], &before[2][..rank]].map(Device::<f32>::of);
        let args = args![parts.head(), splits_, scale, d_head, e_head, db.head(), columns_, rank_];
        run(lora_db_scaled_launch, [(columns * rank).div_ceil(256), 1, 1], 256, 0, seed, args);
        let args = args![parts.head(), splits_, scale, b_in.head(), d_head, de.head(), columns_, rank_];
        run(lora_de_launch, [columns.div_ceil(8), 1, 1], 256, 0, seed, args);
        let args = args![parts.head(), splits_, scale, b_in.head(), e_head, dd.head(), columns_, rank_];
        run(lora_dd_launch, [rank, 1, 1], 256, 0, seed, args);
        let found = &found.deltas[0];
        assert_close(&db.wide(), &plus(&before[0], &found.b), 2e-5, "dB");
        assert_close(&de.wide(), &plus(&before[1], &found.e), 2e-5, "de");
        assert_close(&dd.wide(), &plus(&before[2], &found.d), 2e-5, "dd");
    }
}

#[test]
fn gradients_of_d_and_e_match_the_twin() {
    for (seed, (n, columns, rank)) in (1..).zip([(7, 11, 3), (1, 40, 16), (70, 301, 19), (5, 9, 67)]) {
        for splits in [1, 3] {
            check_factors(n, columns, rank, splits.min(n), seed);
        }
    }
}

/// A block of tokens and columns within rows of `width`.
fn check_columns<T: Activation>(n: usize, width: usize, first: usize, columns: usize, seed: u64) {
    let (x, y, v) = (rounded::<T>(1, n * width), rounded::<T>(2, n * width), rounded::<f32>(3, columns));
    let (x_in, v_in, to) = (Device::<T>::of(&x), Device::<f32>::of(&v), Device::<T>::of(&y));
    let [n_, columns_, width_] = [n, columns, width].map(|size| size as i32);
    let grid = [(n * columns.div_ceil(8)).div_ceil(256), 1, 1];
    let inside = |at: usize| (first..first + columns).contains(&(at % width));
    let of = |f: &dyn Fn(usize) -> f64| -> Vec<f64> {
        (0..n * width).map(|at| if inside(at) { f(at) } else { y[at] }).collect()
    };
    let args = args![x_in.at(first), v_in.head(), to.at(first), n_, columns_, width_];
    run(SCALE[T::INDEX], grid, 256, 0, seed, args);
    let expected = of(&|at| x[at] * v[at % width - first]);
    assert_close(&to.wide(), &expected, T::ROUNDING, "x * v");
    let args = args![to.at(first), v_in.head(), to.at(first), n_, columns_, width_];
    run(SCALE[T::INDEX], grid, 256, 0, seed, args);
    let expected = of(&|at| x[at] * v[at % width - first].powi(2));
    assert_close(&to.wide(), &expected, 2.0 * T::ROUNDING, "x * v * v in place");
    let args = args![x_in.at(first), std::ptr::null_mut::<f32>(), to.at(first), n_, columns_, width_];
    run(SCALE[T::INDEX], grid, 256, 0, seed, args);
    assert_eq!(to.wide(), of(&|at| x[at]), "a copy");

    let y_in = Device::<T>::of(&y);
    for (splits, product) in [(1, true), (3, true), (3, false)] {
        let parts = Device::<f32>::poisoned(splits * columns);
        let y_head = if product { y_in.at(first) } else { std::ptr::null_mut() };
        let args = args![x_in.at(first), y_head, parts.head(), n_, columns_, width_];
        run(SUM[T::INDEX], [columns.div_ceil(256), splits, 1], 256, 0, seed, args);
        let mut sums = vec![0.0; columns];
        for at in (0..n * width).filter(|&at| inside(at)) {
            sums[at % width - first] += x[at] * if product { y[at] } else { 1.0 };
        }
        let found: Vec<f64> = (0..columns).map(|j| parts.wide()[j..].iter().step_by(columns).sum()).collect();
        assert_close(&found, &sums, 1e-5, "sums of columns");
    }
}

fn check_bias<T: Activation>(n: usize, width: usize, seed: u64) {
    let (y, residual) = (rounded::<T>(1, n * width), rounded::<T>(2, n * width));
    let (half, trained) = (rounded::<f16>(3, width), rounded::<f32>(4, width));
    let (half_in, trained_in) = (Device::<f16>::of(&half), Device::<f32>::of(&trained));
    let res_in = Device::<T>::of(&residual);
    for (bias, with_residual) in [(0, true), (1, true), (2, true), (1, false), (2, false)] {
        let to = Device::<T>::of(&y);
        let half_head = if bias == 1 { half_in.head() } else { std::ptr::null_mut() };
        let trained_head = if bias == 2 { trained_in.head() } else { std::ptr::null_mut() };
        let res_head = if with_residual { res_in.head() } else { std::ptr::null_mut() };
        let args = args![to.head(), half_head, trained_head, res_head, n as i32, width as i32];
        run(ADD[T::INDEX], [(n * width).div_ceil(256), 1, 1], 256, 0, seed, args);
        let of = |at: usize| [0.0, half[at % width], trained[at % width]][bias];
        let expected: Vec<f64> = (0..n * width)
            .map(|at| y[at] + of(at) + if with_residual { residual[at] } else { 0.0 })
            .collect();
        assert_close(&to.wide(), &expected, T::ROUNDING + 1e-6, "a bias and a residual");
    }
}

#[test]
fn passes_over_columns_match_plain_loops() {
    // Odd and aligned; more columns than a block takes.
    for (seed, (n, width, first, columns)) in
        (1..).zip([(7, 61, 13, 29), (1, 72, 0, 72), (33, 320, 16, 288), (5, 403, 3, 400)])
    {
        check_columns::<f32>(n, width, first, columns, seed);
        check_columns::<f16>(n, width, first, columns, seed);
        check_columns::<bf16>(n, width, first, columns, seed);
        check_bias::<f32>(n, width, seed);
        check_bias::<f16>(n, width, seed);
        check_bias::<bf16>(n, width, seed);
    }
}
