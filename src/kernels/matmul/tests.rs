//! Every product against plain loops in f64, at odd shapes and on both sides of the small-batch border.

use std::sync::Arc;

use half::f16;

use super::{matrix::STRIP, *};
use crate::{
    device::{DType, Frozen, cpu::bf16},
    kernels::{nf4, q8},
    testing::{
        assert_close, central_differences, f16_numbers, numbers, skip, weighted, widened, with_threads,
    },
};

/// `y (n, outer)` by plain loops in f64; `w` is `V (inner, outer)`, or with `transposed` `V^T`.
fn plain(x: &[f32], w: &[f16], shape: ProductShape, transposed: bool) -> Vec<f64> {
    let ProductShape { n, inner, outer } = shape;
    let at = |i: usize, j: usize| if transposed { w[j * inner + i] } else { w[i * outer + j] };
    let element =
        |row: usize, j: usize| (0..inner).map(|i| f64::from(x[row * inner + i]) * at(i, j).to_f64()).sum();
    (0..n).flat_map(|row| (0..outer).map(move |j| (row, j))).map(|(row, j)| element(row, j)).collect()
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
        let weights = f16_numbers(1, rows * cols);
        let matrix = Matrix::f16(weights.as_slice().into(), rows, cols);
        let (bias, residual) = (f16_numbers(2, cols), numbers(3, n * cols));
        let x = numbers(4, n * rows);
        let mut y = vec![f32::NAN; n * cols];
        let start = InitialValue::Residual(residual.as_slice().into(), bias.as_slice().into());
        frozen_nn(x.as_slice().into(), matrix, start, y.as_mut_slice().into(), n);
        let mut expected = plain(&x, &weights, ProductShape { n, inner: rows, outer: cols }, false);
        for (at, value) in expected.iter_mut().enumerate() {
            *value += f64::from(residual[at]) + bias[at % cols].to_f64();
        }
        assert_close(&y, &expected, 2e-5, "nn");

        let dy = numbers(5, n * cols);
        let mut dx = numbers(6, n * rows);
        let before: Vec<f64> = dx.iter().map(|&v| f64::from(v)).collect();
        frozen_nt(dy.as_slice().into(), matrix, InitialValue::Keep, dx.as_mut_slice().into(), n);
        let product = plain(&dy, &weights, ProductShape { n, inner: cols, outer: rows }, true);
        let expected: Vec<f64> = before.iter().zip(product).map(|(a, b)| a + b).collect();
        assert_close(&dx, &expected, 2e-5, "nt");
    }
}

/// Against sums in f64 of rounded factors: rounding them, 2^-9 each, would be far beyond the bound. More rows than
/// the few that stay in FP32; odd depths, widths that are no vectors, several panels.
#[test]
fn products_of_bf16_match_sums_over_rounded_factors() {
    if !bf16() {
        // A process of their own runs them where the CPU has the instructions (device/cpu/level.rs).
        return skip("BF16 products are not in use here, only those of FP32", false);
    }
    let rounded = |x: f32| half::bf16::from_f32(x).to_f64();
    // The last has panels enough to share rounded rows, in several stretches.
    for (n, rows, cols) in
        [(25, 1, 1), (33, 17, 401), (40, 800, 270), (27, 1601, 49), (64, 768, 192), (130, 1601, 1700)]
    {
        let weights = f16_numbers(1, rows * cols);
        let matrix =
            Matrix { arithmetic: Arithmetic::Bf16, ..Matrix::f16(weights.as_slice().into(), rows, cols) };
        let weight = |i: usize, j: usize| rounded(weights[i * cols + j].to_f32());
        let check = |y: &[f32], (columns, depth): (usize, usize), exact: &dyn Fn(usize, usize) -> f64| {
            for (at, &y) in y.iter().enumerate().step_by(1 + y.len() / 3000) {
                let exact = exact(at / columns, at % columns);
                let error = (f64::from(y) - exact).abs();
                assert!(error < 2e-6 + 2e-7 * depth as f64, "element {at} is off by {error} of {exact}");
            }
        };

        let (bias, residual) = (f16_numbers(2, cols), numbers(3, n * cols));
        let x = numbers(4, n * rows);
        let mut y = vec![f32::NAN; n * cols];
        let start = InitialValue::Residual(residual.as_slice().into(), bias.as_slice().into());
        frozen_nn(x.as_slice().into(), matrix, start, y.as_mut_slice().into(), n);
        check(&y, (cols, rows), &|row, j| {
            let sum: f64 = (0..rows).map(|i| rounded(x[row * rows + i]) * weight(i, j)).sum();
            sum + f64::from(residual[row * cols + j]) + bias[j].to_f64()
        });

        let dy = numbers(5, n * cols);
        let mut dx = vec![0.5f32; n * rows];
        frozen_nt(dy.as_slice().into(), matrix, InitialValue::Keep, dx.as_mut_slice().into(), n);
        check(&dx, (rows, cols), &|row, i| {
            0.5 + (0..cols).map(|j| rounded(dy[row * cols + j]) * weight(i, j)).sum::<f64>()
        });
    }
}

/// More threads than panels cut the rows too.
#[test]
fn the_number_of_threads_changes_no_bit() {
    on_any_threads(Arithmetic::F32);
}

#[test]
fn the_number_of_threads_changes_no_bit_of_bf16() {
    on_any_threads(Arithmetic::Bf16);
}

fn on_any_threads(arithmetic: Arithmetic) {
    for (n, rows, cols) in [(37, 900, 530), (300, 800, 270), (131, 401, 64), (520, 33, 700), (301, 801, 1540)]
    {
        let weights = f16_numbers(1, rows * cols);
        let coded = Coded::of(&numbers(11, rows * cols), cols);
        let x = numbers(12, n * rows.max(cols));
        let four = nf4::quantise(&coded.values, nf4::Sizes { rows, cols });
        for matrix in [Matrix::f16(weights[..].into(), rows, cols), coded.matrix(), Matrix::nf4(four.view())]
        {
            let matrix = Matrix { arithmetic, ..matrix };
            let one = with_threads(1, || both(&x, matrix, n));
            for threads in [2, 3, 16] {
                assert!(with_threads(threads, || both(&x, matrix, n)) == one, "{n} rows, {threads} threads");
            }
        }
    }
}

/// A matrix `(rows, cols)` in codes, with its values.
struct Coded {
    codes: Vec<i8>,
    scales: Vec<f16>,
    values: Vec<f32>,
    rows: usize,
    cols: usize,
}

impl Coded {
    fn of(weights: &[f32], cols: usize) -> Self {
        let rows = weights.len() / cols;
        let (mut codes, mut scales) = (vec![0; weights.len()], Vec::new());
        for (row, codes) in weights.chunks(cols).zip(codes.chunks_mut(cols)) {
            let blocks = row.chunks(q8::BLOCK).zip(codes.chunks_mut(q8::BLOCK));
            scales.extend(blocks.map(|(values, codes)| q8::quantise(values, codes)));
        }
        let value = |at: usize| {
            let (row, column) = (at / cols, at % cols);
            f32::from(codes[at]) * scales[row * q8::blocks(cols) + column / q8::BLOCK].to_f32()
        };
        let values = (0..weights.len()).map(value).collect();
        Self { codes, scales, values, rows, cols }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::codes(self.codes[..].into(), self.scales[..].into(), self.rows, self.cols)
    }
}

/// `x W` of both directions, `x (n, rows)` and `x (n, cols)`, on top of what stands there.
fn both(x: &[f32], w: Matrix, n: usize) -> [Vec<f32>; 2] {
    let (mut y, mut z) = (numbers(7, n * w.cols), numbers(8, n * w.rows));
    frozen_nn(x[..n * w.rows].into(), w, InitialValue::Keep, y.as_mut_slice().into(), n);
    frozen_nt(x[..n * w.cols].into(), w, InitialValue::Keep, z.as_mut_slice().into(), n);
    [y, z]
}

#[test]
fn products_with_codes_match_plain_loops() {
    for n in [1, 2, 3, 5, 8, 9, 33] {
        for (rows, cols) in [(5, 3), (17, 33), (1, 1), (50, 70), (800, 270), (13, 1601), (401, 40)] {
            let coded = Coded::of(&numbers(11, rows * cols), cols);
            let x = numbers(12, n * rows.max(cols));
            let [y, z] = both(&x, coded.matrix(), n);
            let at = |i: usize, j: usize| f64::from(coded.values[i * cols + j]);
            let sum = |row: usize, inner: usize, at: &dyn Fn(usize) -> f64| -> f64 {
                x[row * inner..][..inner].iter().enumerate().map(|(i, &x)| f64::from(x) * at(i)).sum()
            };
            let (before_y, before_z) = (numbers(7, n * cols), numbers(8, n * rows));
            let cells = |outer: usize| (0..n).flat_map(move |row| (0..outer).map(move |j| (row, j)));
            let expected: Vec<f64> = cells(cols)
                .map(|(row, j)| sum(row, rows, &|i| at(i, j)) + f64::from(before_y[row * cols + j]))
                .collect();
            assert_close(&y, &expected, 2e-5, "nn");
            let expected: Vec<f64> = cells(rows)
                .map(|(row, i)| sum(row, cols, &|j| at(i, j)) + f64::from(before_z[row * rows + i]))
                .collect();
            assert_close(&z, &expected, 2e-5, "nt");
        }
    }
}

/// Codes give their values exactly, so where FP16 has them too every bit is the same.
#[test]
fn codes_and_f16_of_the_same_values_give_the_same_bits() {
    for (rows, cols) in [(33, 70), (384, 400), (20, 1100)] {
        let mut weights: Vec<f32> =
            numbers(21, rows * cols).iter().map(|x| (x * 127.0).round() / 1024.0).collect();
        weights
            .chunks_mut(cols)
            .for_each(|row| row.chunks_mut(q8::BLOCK).for_each(|b| b[0] = 127.0 / 1024.0));
        let (coded, in_f16) =
            (Coded::of(&weights, cols), weights.iter().map(|&w| f16::from_f32(w)).collect::<Vec<_>>());
        assert_eq!(coded.values, weights);
        for n in [1, 4, 7, 8, 9, 33] {
            let x = numbers(22, n * rows.max(cols));
            assert_eq!(
                both(&x, coded.matrix(), n),
                both(&x, Matrix::f16(in_f16[..].into(), rows, cols), n),
                "{n} rows"
            );
        }
    }
}

/// Both directions against sums in f64 of the values that the codes stand for, on both sides of every border between
/// kernels.
#[test]
fn products_with_4_bits_match_plain_loops() {
    for n in [1, 2, 3, 4, 5, 8, 12, 13, 25, 48, 49, 60] {
        for (rows, cols) in [(5, 3), (64, 64), (17, 33), (1, 1), (150, 70), (840, 270), (13, 1601), (401, 40)]
        {
            let sizes = nf4::Sizes { rows, cols };
            let four = nf4::quantise(&numbers(11, rows * cols), sizes);
            let mut values = vec![f32::NAN; rows * cols];
            four.view().widen(0..rows, 0..cols, &mut values);
            let x = numbers(12, n * rows.max(cols));
            let [y, z] = both(&x, Matrix::nf4(four.view()), n);
            let at = |i: usize, j: usize| f64::from(values[i * cols + j]);
            let sum = |row: usize, inner: usize, at: &dyn Fn(usize) -> f64| -> f64 {
                x[row * inner..][..inner].iter().enumerate().map(|(i, &x)| f64::from(x) * at(i)).sum()
            };
            let (before_y, before_z) = (numbers(7, n * cols), numbers(8, n * rows));
            let cells = |outer: usize| (0..n).flat_map(move |row| (0..outer).map(move |j| (row, j)));
            let expected: Vec<f64> = cells(cols)
                .map(|(row, j)| sum(row, rows, &|i| at(i, j)) + f64::from(before_y[row * cols + j]))
                .collect();
            assert_close(&y, &expected, 2e-5, "nn");
            let expected: Vec<f64> = cells(rows)
                .map(|(row, i)| sum(row, cols, &|j| at(i, j)) + f64::from(before_z[row * rows + i]))
                .collect();
            assert_close(&z, &expected, 2e-5, "nt");
        }
    }
}

/// Codes -1, 0 and 1, and scales that are powers of two: values that FP16 has too. Only with the same order of the same
/// sums every bit is the same.
#[test]
fn codes_of_4_bits_and_f16_of_the_same_values_give_the_same_bits() {
    for (rows, cols) in [(33, 70), (384, 400), (840, 130), (20, 1100)] {
        let sizes = nf4::Sizes { rows, cols };
        let ternary: Vec<f32> = numbers(21, rows * cols).iter().map(|x| (1.5 * x).round()).collect();
        let mut four = nf4::quantise(&ternary, sizes);
        // A scale is 1 times the factor of its 256, and nothing is added to it.
        four.scales.fill(255);
        four.nested[0] = 0.0;
        for (index, factor) in four.nested[1..].iter_mut().enumerate() {
            *factor = [0.25, 2.0, 0.5][index % 3];
        }
        let mut values = vec![f32::NAN; rows * cols];
        four.view().widen(0..rows, 0..cols, &mut values);
        let in_f16: Vec<f16> = values.iter().map(|&value| f16::from_f32(value)).collect();
        assert!(in_f16.iter().zip(&values).all(|(half, &value)| half.to_f32() == value));
        for n in [1, 3, 4, 7, 8, 12, 13, 24, 25, 48, 49, 60] {
            let x = numbers(22, n * rows.max(cols));
            let halves = Matrix::f16(in_f16[..].into(), rows, cols);
            assert_eq!(
                both(&x, Matrix::nf4(four.view()), n),
                both(&x, halves, n),
                "{rows} x {cols}, {n} rows"
            );
        }
    }
}

/// A token has the same bits alone and among others: with real scales, whose products with codes are rounded.
#[test]
fn the_number_of_rows_changes_no_bit_of_4_bits() {
    if !crate::device::cpu::vectors() {
        return skip("no vector kernels at this level", false);
    }
    let (n, rows, cols) = (60, 1601, 130);
    let four = nf4::quantise(&numbers(37, rows * cols), nf4::Sizes { rows, cols });
    let matrix = Matrix::nf4(four.view());
    let x = numbers(38, n * rows);
    let (bias, residual) = (f16_numbers(39, cols), numbers(40, n * cols));
    let of = |n: usize| {
        let mut y = vec![f32::NAN; n * cols];
        let start = InitialValue::Residual(residual[..n * cols].into(), bias.as_slice().into());
        frozen_nn(x[..n * rows].into(), matrix, start, y.as_mut_slice().into(), n);
        y
    };
    let all = of(n);
    for small in [1, 2, 3, 4, 8, 11, 12, 13, 24, 25, 48, 49] {
        assert!(of(small) == all[..small * cols], "{small} rows");
    }
}

/// `values (rows, cols)` in strips.
fn strips(values: &[f16], rows: usize, cols: usize) -> Vec<f16> {
    strips_of(STRIP, values, rows, cols)
}

/// The same in strips of any width.
fn strips_of<T: Copy>(width: usize, values: &[T], rows: usize, cols: usize) -> Vec<T> {
    let place = |at: usize| {
        let (strip, row, column) = (at / (rows * width), at / width % rows, at % width);
        row * cols + strip * width + column
    };
    (0..values.len()).map(|at| values[place(at)]).collect()
}

#[test]
fn codes_in_strips_give_the_same_bits_as_in_rows() {
    for (rows, cols) in [(1, 32), (17, 96), (800, 288), (1601, 64)] {
        let coded = Coded::of(&numbers(51, rows * cols), cols);
        let codes = strips_of(STRIP, &coded.codes, rows, cols);
        let scales = strips_of(1, &coded.scales, rows, cols / STRIP);
        let in_strips = Matrix::codes(codes[..].into(), scales[..].into(), rows, cols);
        let in_strips = Matrix { layout: Layout::Strips, ..in_strips };
        assert_eq!(in_strips.to_floats(), coded.values);
        let (bias, residual) = (f16_numbers(52, cols), numbers(53, 60 * cols));
        for n in [1, 2, 3, 5, 8, 12, 13, 24, 25, 32, 48, 49, 60] {
            let x = numbers(54, n * rows.max(cols));
            let of = |matrix: Matrix| {
                let mut y = vec![f32::NAN; n * cols];
                let start = InitialValue::Residual(residual[..n * cols].into(), bias.as_slice().into());
                frozen_nn(x[..n * rows].into(), matrix, start, y.as_mut_slice().into(), n);
                (y, both(&x, matrix, n))
            };
            assert!(of(in_strips) == of(coded.matrix()), "{rows} x {cols}, {n} rows of x");
        }
    }
    // From the middle of a strip to that of the next but one.
    let (rows, cols) = (70, 96);
    let coded = Coded::of(&numbers(55, rows * cols), cols);
    let codes = strips_of(STRIP, &coded.codes, rows, cols);
    let scales = strips_of(1, &coded.scales, rows, cols / STRIP);
    let mut piece = [0f32; 41];
    Elements::CodesInStrips(&codes, &scales, rows).widen(cols, (69, 50), &mut piece);
    assert_eq!(piece[..], coded.values[69 * cols + 50..][..41]);
}

#[test]
fn strips_give_the_same_bits_as_rows() {
    for (rows, cols) in [(1, 32), (17, 96), (800, 288), (1601, 64)] {
        let weights = f16_numbers(31, rows * cols);
        let in_rows = Matrix::f16(weights.as_slice().into(), rows, cols);
        let stripped = strips(&weights, rows, cols);
        let in_strips = Matrix { data: stripped.as_slice().into(), layout: Layout::Strips, ..in_rows };
        assert_eq!(in_strips.to_floats(), in_rows.to_floats());
        let (bias, residual) = (f16_numbers(32, cols), numbers(33, 100 * cols));
        for n in [1, 2, 5, 11, 12, 13, 25, 32, 72, 73, 100] {
            let x = numbers(34, n * rows.max(cols));
            let of = |matrix: Matrix| {
                let mut y = vec![f32::NAN; n * cols];
                let start = InitialValue::Residual(residual[..n * cols].into(), bias.as_slice().into());
                frozen_nn(x[..n * rows].into(), matrix, start, y.as_mut_slice().into(), n);
                (y, both(&x, matrix, n))
            };
            assert!(of(in_strips) == of(in_rows), "{rows} x {cols}, {n} rows of x");
        }
    }
}

/// For more rows than the small-batch path takes, both ways to make logits have the same bits.
#[test]
fn a_transposed_matrix_gives_the_same_bits() {
    let frozen = |bytes: Vec<u8>, dtype, len| Frozen::new(Arc::new(bytes), 0, dtype, len).unwrap();
    let halves = |values: &[f16]| values.iter().flat_map(|w| w.to_bits().to_le_bytes()).collect();
    for (rows, cols) in [(1, 5), (50, 17), (321, 800), (64, 33), (65, 1601)] {
        let weights = f16_numbers(41, rows * cols);
        let coded = Coded::of(&numbers(43, rows * cols), cols);
        let codes = coded.codes.iter().map(|&code| code as u8).collect();
        let in_codes = (
            frozen(codes, DType::I8, rows * cols),
            Some(Scales::Q8(frozen(halves(&coded.scales), DType::F16, coded.scales.len()))),
        );
        for (data, scales) in [(frozen(halves(&weights), DType::F16, rows * cols), None), in_codes] {
            let (layout, arithmetic) = (Layout::Rows, Arithmetic::F32);
            let matrix = FrozenMatrix { data, scales, rows, cols, layout, arithmetic };
            let Some(transposed) = TransposedMatrix::of(&matrix).unwrap() else {
                assert!(!crate::device::cpu::vectors());
                return skip("no vector kernels at this level, so no transposed head", false);
            };
            for n in [25, 32, 72, 73, 100] {
                let x = numbers(42, n * cols);
                let (mut y, mut z) = (vec![f32::NAN; n * rows], vec![f32::NAN; n * rows]);
                frozen_nt(x[..].into(), matrix.view(), InitialValue::Zero, y.as_mut_slice().into(), n);
                transposed.product(x[..].into(), z.as_mut_slice().into(), n);
                assert!(y == z, "{rows} x {cols}, {n} rows of x");
            }
        }
    }
}

#[test]
fn strips_are_read_from_any_column() {
    let (n, rows, cols) = (5, 70, 96);
    let (weights, x) = (f16_numbers(35, rows * cols), numbers(36, n * rows));
    let stripped = strips(&weights, rows, cols);
    let matrix = Matrix::f16(stripped.as_slice().into(), rows, cols);
    let elements = Matrix { layout: Layout::Strips, ..matrix }.host();
    let mut piece = [0f32; 41];
    // From the middle of a strip to that of the next but one.
    elements.widen(cols, (69, 50), &mut piece);
    let expected: Vec<f32> = weights[69 * cols + 50..][..41].iter().map(|w| w.to_f32()).collect();
    assert_eq!(piece[..], expected);
    let mut y = vec![0f32; n * cols];
    frozen_nn(
        x[..].into(),
        Matrix { layout: Layout::Strips, ..matrix },
        InitialValue::Zero,
        y.as_mut_slice().into(),
        n,
    );
    let shape = ProductShape { n, inner: rows, outer: cols };
    assert_close(&y, &plain(&x, &weights, shape, false), 2e-5, "strips");
}

/// A sequence says the same alone and among others.
#[test]
fn the_number_of_rows_changes_no_bit() {
    if !crate::device::cpu::vectors() {
        return skip("no vector kernels at this level", false);
    }
    let (n, rows, cols) = (40, 1601, 130);
    let (weights, x) = (f16_numbers(37, rows * cols), numbers(38, n * rows));
    let matrix = Matrix::f16(weights.as_slice().into(), rows, cols);
    let (bias, residual) = (f16_numbers(39, cols), numbers(40, n * cols));
    let of = |n: usize| {
        let mut y = vec![f32::NAN; n * cols];
        let start = InitialValue::Residual(residual[..n * cols].into(), bias.as_slice().into());
        frozen_nn(x[..n * rows].into(), matrix, start, y.as_mut_slice().into(), n);
        y
    };
    let all = of(n);
    for small in [1, 3, 8, 9, 24, 25] {
        assert!(of(small) == all[..small * cols], "{small} rows");
    }
    // Turned, up to 24 rows.
    let transposed = |n: usize| {
        let mut z = numbers(41, n * rows);
        frozen_nt(x[..n * cols].into(), matrix, InitialValue::Keep, z.as_mut_slice().into(), n);
        z
    };
    let all = transposed(24);
    for small in [1, 3, 4, 7, 8, 13] {
        assert!(transposed(small) == all[..small * rows], "{small} rows, transposed");
    }
}

/// `y (n, outputs) = x (n, inputs) W^T + b` in f64, `w (outputs, inputs)`.
fn dense_in_f64(x: &[f64], w: &[f64], b: &[f64], inputs: usize) -> Vec<f64> {
    let product = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
    let rows = x.chunks(inputs);
    rows.flat_map(|x| w.chunks(inputs).zip(b).map(move |(w, b)| product(x, w) + b)).collect()
}

#[test]
fn dense_gradients_are_central_differences() {
    let (n, inputs, outputs) = (5, 7, 11);
    let (x, w, b) = (numbers(1, n * inputs), numbers(2, inputs * outputs), numbers(3, outputs));
    let dy = numbers(4, n * outputs);
    let [wide_x, wide_w, wide_b, wide_dy] = [&x, &w, &b, &dy].map(|values| widened(values));
    let shape = DenseShape { n, inputs, outputs };
    let mut y = vec![0f32; n * outputs];
    dense_forward(x[..].into(), w[..].into(), b[..].into(), y.as_mut_slice().into(), shape);
    assert_close(&y, &dense_in_f64(&wide_x, &wide_w, &wide_b, inputs), 1e-5, "y");

    // Gradients of w and b are added to, that of x is written.
    let (mut dw, mut db, mut dx) = (vec![0.5f32; w.len()], vec![0.25f32; b.len()], vec![f32::NAN; x.len()]);
    let [dw_to, db_to, dx_to] = [&mut dw, &mut db, &mut dx].map(|to| to.as_mut_slice().into());
    let gradients = DenseGradients { dw: dw_to, db: db_to, dx: Some(dx_to) };
    dense_backward(dy[..].into(), x[..].into(), w[..].into(), gradients, shape);
    let loss = |x: &[f64], w: &[f64], b: &[f64]| weighted(&dense_in_f64(x, w, b, inputs), &wide_dy);
    let above =
        |before: f64, differences: Vec<f64>| differences.iter().map(|d| before + d).collect::<Vec<_>>();
    let expected = central_differences(&wide_w, |w| loss(&wide_x, w, &wide_b));
    assert_close(&dw, &above(0.5, expected), 1e-5, "dw");
    let expected = central_differences(&wide_b, |b| loss(&wide_x, &wide_w, b));
    assert_close(&db, &above(0.25, expected), 1e-5, "db");
    let expected = central_differences(&wide_x, |x| loss(x, &wide_w, &wide_b));
    assert_close(&dx, &expected, 1e-5, "dx");
}
