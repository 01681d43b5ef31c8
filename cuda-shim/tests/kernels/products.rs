//! Products of small batches, initial values of outputs, and sums over rows, against their twins.

use cuda_shim::{Launcher, kernels};
use half::{bf16, f16};

use crate::{args, harness::*};

kernels!(
    product_start_f32_launch,
    product_start_f16_launch,
    product_start_bf16_launch,
    dense_start_launch,
    column_sum_launch,
    gemv_nt_f32_launch,
    gemv_nt_f16_launch,
    gemv_nt_bf16_launch,
    gemv_nn_f32_launch,
    gemv_nn_f16_launch,
    gemv_nn_bf16_launch,
    gemv_nn_finish_f32_launch,
    gemv_nn_finish_f16_launch,
    gemv_nn_finish_bf16_launch,
);

/// Rows and columns of a weight: odd, whole vectors, more than a block's share of each.
const SHAPES: [(usize, usize); 4] = [(5, 3), (37, 61), (264, 40), (131, 296)];

fn start<T: Activation>(kernel: Launcher) {
    for (n, c) in [(7, 5), (3, 16), (5, 701)] {
        let (residual, bias) = (rounded::<T>(1, n * c), rounded::<f16>(2, c));
        let (r, b) = (Device::<T>::of(&residual), Device::<f16>::of(&bias));
        for (with_residual, with_bias) in [(true, true), (true, false), (false, true), (false, false)] {
            let y = Device::<T>::poisoned(n * c);
            let residual_at = if with_residual { r.head() } else { std::ptr::null_mut() };
            let bias_at = if with_bias { b.head() } else { std::ptr::null_mut() };
            let args = args![residual_at, bias_at, y.head(), n as i32, c as i32];
            run(kernel, [(n * c).div_ceil(2048), 1, 1], 256, 0, 1, args);
            let value = |at: usize| {
                let bias = if with_bias { bias[at % c] } else { 0.0 };
                bias + if with_residual { residual[at] } else { 0.0 }
            };
            assert_close(&y.wide(), &(0..n * c).map(value).collect::<Vec<_>>(), T::ROUNDING, "start");
        }
    }
}

#[test]
fn outputs_start_with_residual_and_bias() {
    start::<f32>(product_start_f32_launch);
    start::<f16>(product_start_f16_launch);
    start::<bf16>(product_start_bf16_launch);
}

#[test]
fn dense_layers_start_with_their_bias_and_sum_columns() {
    let (n, c) = (7, 301);
    let (bias, dy, before) = (rounded::<f32>(1, c), rounded::<f32>(2, n * c), rounded::<f32>(3, c));
    let (b, y) = (Device::<f32>::of(&bias), Device::<f32>::poisoned(n * c));
    run(
        dense_start_launch,
        [(n * c).div_ceil(2048), 1, 1],
        256,
        0,
        1,
        args![b.head(), y.head(), n as i32, c as i32],
    );
    assert_eq!(y.wide(), bias.repeat(n));
    let (d, db) = (Device::<f32>::of(&dy), Device::<f32>::of(&before));
    run(
        column_sum_launch,
        [c.div_ceil(256), 1, 1],
        256,
        0,
        1,
        args![d.head(), db.head(), n as i32, c as i32],
    );
    let expected: Vec<f64> =
        (0..c).map(|i| before[i] + (0..n).map(|row| dy[row * c + i]).sum::<f64>()).collect();
    assert_close(&db.wide(), &expected, 1e-6, "db");
}

fn transposed<T: Activation>(kernel: Launcher) {
    for ((rows, cols), n) in SHAPES.into_iter().zip([1, 3, 8, 2]) {
        let (x, w) = (rounded::<T>(1, n * cols), rounded::<T::Weight>(2, rows * cols));
        let ld = rows + 3;
        let (x_in, w_in, y) =
            (Device::<T>::of(&x), Device::<T::Weight>::of(&w), Device::<f32>::of(&vec![9.0; n * ld]));
        let sizes = (n as i32, rows as i32, cols as i32, ld as i64);
        let args = args![x_in.head(), w_in.head(), y.head(), sizes.0, sizes.1, sizes.2, sizes.3];
        run(kernel, [rows.div_ceil(8), 1, 1], 256, 0, 2, args);
        let value = |at: usize| match (at / ld, at % ld) {
            (row, out) if out < rows => (0..cols).map(|i| x[row * cols + i] * w[out * cols + i]).sum(),
            _ => 9.0,
        };
        assert_close(&y.wide(), &(0..n * ld).map(value).collect::<Vec<f64>>(), 1e-5, "x w^T");
    }
}

fn straight<T: Activation>(kernel: Launcher, finish: Launcher) {
    for (((rows, cols), n), splits) in SHAPES.into_iter().zip([1, 3, 8, 2]).zip([1, 3, 2, 4]) {
        let (x, w) = (rounded::<T>(1, n * rows), rounded::<T::Weight>(2, rows * cols));
        let (residual, bias) = (rounded::<T>(3, n * cols), rounded::<f16>(4, cols));
        let (x_in, w_in, y) =
            (Device::<T>::of(&x), Device::<T::Weight>::of(&w), Device::<T>::poisoned(n * cols));
        let parts = Device::<f32>::poisoned(splits * n * cols);
        let args = args![x_in.head(), w_in.head(), parts.head(), n as i32, rows as i32, cols as i32];
        run(kernel, [cols.div_ceil(32), splits, 1], 256, 0, 2, args);
        let (r, b) = (Device::<T>::of(&residual), Device::<f16>::of(&bias));
        let args = args![parts.head(), splits as i32, r.head(), b.head(), y.head(), n as i32, cols as i32];
        run(finish, [(n * cols).div_ceil(256), 1, 1], 256, 0, 2, args);
        let value = |at: usize| {
            let product: f64 = (0..rows).map(|i| x[at / cols * rows + i] * w[i * cols + at % cols]).sum();
            residual[at] + bias[at % cols] + product
        };
        let expected: Vec<f64> = (0..n * cols).map(value).collect();
        assert_close(&y.wide(), &expected, T::ROUNDING + 1e-5, "x w");
    }
}

#[test]
fn products_of_few_rows_match_sums() {
    transposed::<f32>(gemv_nt_f32_launch);
    transposed::<f16>(gemv_nt_f16_launch);
    transposed::<bf16>(gemv_nt_bf16_launch);
    straight::<f32>(gemv_nn_f32_launch, gemv_nn_finish_f32_launch);
    straight::<f16>(gemv_nn_f16_launch, gemv_nn_finish_f16_launch);
    straight::<bf16>(gemv_nn_bf16_launch, gemv_nn_finish_bf16_launch);
}
