//! Every product against plain loops in f64, at odd shapes and on both sides of the few-rows border.

use half::f16;

use super::*;
use crate::kernels::testing::{assert_close, halves, numbers};

fn plain(x: &[f32], w: &[f16], (n, k, m): (usize, usize, usize), transposed: bool) -> Vec<f64> {
    let at = |i: usize, j: usize| if transposed { w[j * k + i] } else { w[i * m + j] };
    let cell = |row: usize, j: usize| (0..k).map(|i| f64::from(x[row * k + i]) * at(i, j).to_f64()).sum();
    (0..n).flat_map(|row| (0..m).map(move |j| (row, j))).map(|(row, j)| cell(row, j)).collect()
}

#[test]
fn frozen_products_match_plain_loops() {
    for (n, rows, cols) in [
        (1, 5, 3),
        (3, 900, 300),
        (4, 17, 33),
        (5, 17, 33),
        (7, 800, 270),
        (9, 1, 1),
        (8, 50, 70),
        (19, 800, 270),
        (33, 17, 401),
    ] {
        let weights = halves(1, rows * cols);
        let matrix = Matrix::new(weights.as_slice().into(), rows, cols);
        let (bias, residual) = (halves(2, cols), numbers(3, n * cols));
        let x = numbers(4, n * rows);
        let mut y = vec![f32::NAN; n * cols];
        let start = Start::Residual(residual.as_slice().into(), bias.as_slice().into());
        frozen_nn(x.as_slice().into(), matrix, start, y.as_mut_slice().into(), n);
        let mut expected = plain(&x, &weights, (n, rows, cols), false);
        for (at, value) in expected.iter_mut().enumerate() {
            *value += f64::from(residual[at]) + bias[at % cols].to_f64();
        }
        assert_close(&y, &expected, 2e-5, "nn");

        let dy = numbers(5, n * cols);
        let mut dx = numbers(6, n * rows);
        let before: Vec<f64> = dx.iter().map(|&v| f64::from(v)).collect();
        frozen_nt(dy.as_slice().into(), matrix, Start::Keep, dx.as_mut_slice().into(), n);
        let product = plain(&dy, &weights, (n, cols, rows), true);
        let expected: Vec<f64> = before.iter().zip(product).map(|(a, b)| a + b).collect();
        assert_close(&dx, &expected, 2e-5, "nt");
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let (n, rows, cols) = (37, 900, 530);
    let (weights, x) = (halves(1, rows * cols), numbers(2, n * rows));
    let matrix = Matrix::new(weights.as_slice().into(), rows, cols);
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut y = vec![0f32; n * cols];
        pool.install(|| frozen_nn(x.as_slice().into(), matrix, Start::Zero, y.as_mut_slice().into(), n));
        y
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn dense_gradients_are_central_differences() {
    let (n, inputs, outputs) = (5, 7, 11);
    let (x, w, b) = (numbers(1, n * inputs), numbers(2, inputs * outputs), numbers(3, outputs));
    let dy = numbers(4, n * outputs);
    // The map is linear in each argument, so its f64 derivative is exact: d/dw = dy^T x and so on.
    let mut y = vec![0f32; n * outputs];
    dense_forward(x[..].into(), w[..].into(), b[..].into(), y.as_mut_slice().into(), (n, inputs, outputs));
    let expected: Vec<f64> = (0..n * outputs)
        .map(|at| {
            let (row, j) = (at / outputs, at % outputs);
            let sum: f64 =
                (0..inputs).map(|i| f64::from(x[row * inputs + i]) * f64::from(w[j * inputs + i])).sum();
            sum + f64::from(b[j])
        })
        .collect();
    assert_close(&y, &expected, 1e-5, "y");

    let (mut dw, mut db, mut dx) = (vec![0.5f32; w.len()], vec![0.25f32; b.len()], vec![f32::NAN; x.len()]);
    let gradients = (dw.as_mut_slice().into(), db.as_mut_slice().into());
    let shape = (n, inputs, outputs);
    dense_backward(
        dy[..].into(),
        x[..].into(),
        w[..].into(),
        gradients,
        Some(dx.as_mut_slice().into()),
        shape,
    );
    let expected: Vec<f64> = (0..w.len())
        .map(|at| {
            let (j, i) = (at / inputs, at % inputs);
            (0..n).map(|r| f64::from(dy[r * outputs + j]) * f64::from(x[r * inputs + i])).sum::<f64>() + 0.5
        })
        .collect();
    assert_close(&dw, &expected, 1e-5, "dw");
    let expected: Vec<f64> =
        (0..outputs).map(|j| (0..n).map(|r| f64::from(dy[r * outputs + j])).sum::<f64>() + 0.25).collect();
    assert_close(&db, &expected, 1e-5, "db");
    let expected: Vec<f64> = (0..x.len())
        .map(|at| {
            let (row, i) = (at / inputs, at % inputs);
            (0..outputs).map(|j| f64::from(dy[row * outputs + j]) * f64::from(w[j * inputs + i])).sum()
        })
        .collect();
    assert_close(&dx, &expected, 1e-5, "dx");
}
