//! Central differences of the REFERENCE twin, then the CPU side against it, with and without dropout.

use super::{reference::Shape, *};
use crate::testing::*;

#[test]
fn reference_backward_is_central_differences() {
    let s = Shape { n: 7, inputs: 5, outputs: 11, rank: 3, first: 4, columns: 6 };
    let (x, w, bias) = (doubles(1, 35), doubles(2, 55), doubles(3, 11));
    let (a, b, dy) = (doubles(4, 15), doubles(5, 18), doubles(6, 77));
    let factors: Vec<f64> = (0..35).map(|i| if i % 3 == 0 { 0.0 } else { 1.25 }).collect();
    let scale = 1.7;
    let (dx, da, db) = reference::backward(&dy, &x, &w, &a, &b, scale, &factors, s);
    let loss = |x: &[f64], a: &[f64], b: &[f64]| {
        weighted(&reference::forward(x, &w, &bias, a, b, scale, &factors, s), &dy)
    };
    assert_gradient(&x, &dx, "x", |x| loss(x, &a, &b));
    assert_gradient(&a, &da, "A", |a| loss(&x, a, &b));
    assert_gradient(&b, &db, "B", |b| loss(&x, &a, b));
}

/// Two deltas on different columns, against two single-delta references; one and seven rows as well, which are cut
/// along the columns.
#[test]
fn cpu_matches_reference() {
    for (n, p) in [(150, 0.0), (150, 0.3), (1, 0.0), (7, 0.0), (7, 0.3)] {
        let (inputs, outputs) = (37, 261);
        let deltas = [
            Delta { a: 5, b: 5 + 3 * 37, rank: 3, columns: 0..150, scale: 1.7, turned: false },
            Delta { a: 600, b: 600 + 5 * 37, rank: 5, columns: 241..261, scale: -0.4, turned: false },
        ];
        let dropout = Dropout { key: 99, p, first_row: 2, seq_len: 15, stride: 16 };
        let values = numbers(1, 1000);
        let (x, dy, residual) = (numbers(2, n * inputs), numbers(3, n * outputs), numbers(4, n * outputs));
        let (weight, bias) = (f16_numbers(5, inputs * outputs), f16_numbers(6, outputs));
        let layer = Layer { weight: Matrix::f16(weight[..].into(), inputs, outputs), bias: bias[..].into() };
        let (mut low, mut y) = (vec![0f32; n * 8], vec![0f32; n * outputs]);
        let residual_view = Some(View::from(&residual[..]));
        let (low_out, y_out) = (low.as_mut_slice().into(), y.as_mut_slice().into());
        forward(x[..].into(), layer, residual_view, &deltas, values[..].into(), dropout, low_out, y_out, n);

        let mut grads = numbers(7, 1000);
        let before = widened(&grads);
        let (mut d_low, mut dx) = (vec![0f32; n * 8], vec![0f32; n * inputs]);
        backward(
            dy[..].into(),
            x[..].into(),
            layer,
            &deltas,
            values[..].into(),
            grads.as_mut_slice().into(),
            dropout,
            low[..].into(),
            d_low.as_mut_slice().into(),
            Some(dx.as_mut_slice().into()),
            n,
        );

        let w: Vec<f64> = weight.iter().map(|v| v.to_f64()).collect();
        let zeros = vec![0f64; w.len()];
        let mut expected_y: Vec<f64> =
            widened(&residual).iter().enumerate().map(|(at, r)| r + bias[at % outputs].to_f64()).collect();
        let mut expected_dx = vec![0f64; n * inputs];
        let mut expected_grads = before;
        for (index, delta) in deltas.iter().enumerate() {
            let shape = Shape {
                n,
                inputs,
                outputs,
                rank: delta.rank,
                first: delta.columns.start,
                columns: delta.columns.len(),
            };
            // The frozen product counts once.
            let w = if index == 0 { &w } else { &zeros };
            let a = widened(&values[delta.a..][..delta.rank * inputs]);
            let b = widened(&values[delta.b..][..delta.rank * delta.columns.len()]);
            let factors: Vec<f64> = (0..n * inputs)
                .map(|at| match p {
                    0.0 => 1.0,
                    _ => f64::from(dropout.factor(delta.a, inputs, at / inputs, at % inputs)),
                })
                .collect();
            let scale = f64::from(delta.scale);
            let part =
                reference::forward(&widened(&x), w, &vec![0.0; outputs], &a, &b, scale, &factors, shape);
            expected_y.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            let (dx, da, db) =
                reference::backward(&widened(&dy), &widened(&x), w, &a, &b, scale, &factors, shape);
            expected_dx.iter_mut().zip(dx).for_each(|(sum, part)| *sum += part);
            for (start, part) in [(delta.a, da), (delta.b, db)] {
                expected_grads[start..].iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            }
        }
        assert_close(&y, &expected_y, 2e-5, "y");
        assert_close(&dx, &expected_dx, 2e-5, "dx");
        assert_close(&grads, &expected_grads, 5e-5, "gradients");
    }
}

/// Transposed factors give what the others give, within the bound of both: cut along columns and along rows.
#[test]
fn turned_factors_give_the_same() {
    let (inputs, outputs, rank, columns) = (37, 261, 5, 200);
    for n in [1, 4, 7, 30, 150] {
        let values = numbers(1, 5 + rank * (inputs + columns));
        let mut delta =
            Delta { a: 5, b: 5 + rank * inputs, rank, columns: 40..40 + columns, scale: 1.7, turned: false };
        let (x, bias) = (numbers(2, n * inputs), f16_numbers(6, outputs));
        let weight = f16_numbers(5, inputs * outputs);
        let layer = Layer { weight: Matrix::f16(weight[..].into(), inputs, outputs), bias: bias[..].into() };
        let of = |values: &[f32], delta: &Delta| {
            let (mut low, mut y) = (vec![0f32; n * rank], vec![0f32; n * outputs]);
            let (low_out, y_out) = (low.as_mut_slice().into(), y.as_mut_slice().into());
            let deltas = std::slice::from_ref(delta);
            forward(x[..].into(), layer, None, deltas, values.into(), Dropout::NONE, low_out, y_out, n);
            (low, y)
        };
        let (low, y) = of(&values, &delta);
        let mut turned = values.clone();
        for (start, rows, columns) in [(delta.a, rank, inputs), (delta.b, columns, rank)] {
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                turned[start + column * rows + row] = values[start + row * columns + column];
            }
        }
        delta.turned = true;
        let (turned_low, turned_y) = of(&turned, &delta);
        assert_close(&turned_low, &widened(&low), 2e-5, "low");
        assert_close(&turned_y, &widened(&y), 2e-5, "y");
    }
}

/// More threads than stretches of a gradient cut these finer.
#[test]
fn the_number_of_threads_changes_no_bit() {
    let (n, inputs, outputs, rank) = (150, 700, 900, 5);
    let values = numbers(1, rank * (inputs + outputs));
    let (x, dy) = (numbers(2, n * inputs), numbers(3, n * outputs));
    let (weight, bias) = (f16_numbers(5, inputs * outputs), f16_numbers(6, outputs));
    let layer = Layer { weight: Matrix::f16(weight[..].into(), inputs, outputs), bias: bias[..].into() };
    let delta = Delta { a: 0, b: rank * inputs, rank, columns: 100..900, scale: 1.7, turned: false };
    for p in [0.0, 0.3] {
        let dropout = Dropout { key: 99, p, first_row: 2, seq_len: 15, stride: 16 };
        let deltas = std::slice::from_ref(&delta);
        let run = || {
            let (mut low, mut y) = (vec![0f32; n * rank], vec![0f32; n * outputs]);
            let (low_out, y_out) = (low.as_mut_slice().into(), y.as_mut_slice().into());
            forward(x[..].into(), layer, None, deltas, values[..].into(), dropout, low_out, y_out, n);
            let (mut grads, mut d_low) = (vec![0f32; values.len()], vec![0f32; n * rank]);
            let mut dx = vec![0f32; n * inputs];
            backward(
                dy[..].into(),
                x[..].into(),
                layer,
                deltas,
                values[..].into(),
                grads.as_mut_slice().into(),
                dropout,
                low[..].into(),
                d_low.as_mut_slice().into(),
                Some(dx.as_mut_slice().into()),
                n,
            );
            [y, grads, dx]
        };
        let one = with_threads(1, run);
        for threads in [2, 3, 16] {
            assert!(with_threads(threads, run) == one, "{threads} threads, dropout {p}");
        }
    }
}

#[test]
fn dropout_keeps_the_expected_share_and_counts_rows_of_the_whole_step() {
    let whole = Dropout { key: 7, p: 0.3, first_row: 0, seq_len: 8, stride: 8 };
    let second_row = Dropout { first_row: 1, ..whole };
    let factors: Vec<f32> = (0..16 * 100).map(|at| whole.factor(0, 100, at / 100, at % 100)).collect();
    let kept = factors.iter().filter(|&&f| f != 0.0).count() as f64 / factors.len() as f64;
    assert!((kept - 0.7).abs() < 0.04, "{kept}");
    let again: Vec<f32> = (0..8 * 100).map(|at| second_row.factor(0, 100, at / 100, at % 100)).collect();
    assert_eq!(factors[800..], again);
    // A shorter padded length numbers the same tokens alike.
    let short = Dropout { seq_len: 5, first_row: 1, ..whole };
    assert_eq!(short.factor(0, 100, 3, 42), whole.factor(0, 100, 8 + 3, 42));
}
