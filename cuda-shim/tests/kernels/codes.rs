//! Kernels that read 8-bit and 4-bit codes, against the values that a CPU has for the same codes: their values to the bit,
//! products of few rows, rows of an embedding, norms of columns.

use cuda_shim::{Launcher, kernels};
use engraft::{
    device::DType,
    kernels::{adapted_linear::reference::Delta, column_norms, matmul::device_scratch::shares_of, nf4, q8},
};
use half::{bf16, f16};

use crate::{args, harness::*};

kernels!(
    q8_widen_f32_launch,
    q8_widen_f16_launch,
    q8_widen_bf16_launch,
    q8_gemv_nn_f32_launch,
    q8_gemv_nn_f16_launch,
    q8_gemv_nn_bf16_launch,
    q8_gemv_nt_f32_launch,
    q8_gemv_nt_f16_launch,
    q8_gemv_nt_bf16_launch,
    nf4_widen_f32_launch,
    nf4_widen_f16_launch,
    nf4_widen_bf16_launch,
    nf4_gemv_nn_f32_launch,
    nf4_gemv_nn_f16_launch,
    nf4_gemv_nn_bf16_launch,
    embed_q8_f32_launch,
    embed_q8_f16_launch,
    embed_q8_bf16_launch,
    column_norms_parts_q8_launch,
    column_norms_parts_nf4_launch,
    column_norms_factors_launch,
    column_norms_finish_launch,
);

const WIDEN: [[Launcher; 3]; 2] = [
    [q8_widen_f32_launch, q8_widen_f16_launch, q8_widen_bf16_launch],
    [nf4_widen_f32_launch, nf4_widen_f16_launch, nf4_widen_bf16_launch],
];
const NN: [[Launcher; 3]; 2] = [
    [q8_gemv_nn_f32_launch, q8_gemv_nn_f16_launch, q8_gemv_nn_bf16_launch],
    [nf4_gemv_nn_f32_launch, nf4_gemv_nn_f16_launch, nf4_gemv_nn_bf16_launch],
];
const NT: [Launcher; 3] = [q8_gemv_nt_f32_launch, q8_gemv_nt_f16_launch, q8_gemv_nt_bf16_launch];
const EMBED: [Launcher; 3] = [embed_q8_f32_launch, embed_q8_f16_launch, embed_q8_bf16_launch];

/// Rows and columns: one of either, no whole word, block, strip or vector, several steps of a block of threads, many scales
/// of 4-bit codes and factors of them.
const SHAPES: [(usize, usize); 9] =
    [(1, 1), (1, 70), (70, 1), (5, 3), (67, 61), (264, 40), (131, 296), (600, 130), (300, 64)];

/// As kernels take a matrix of 8-bit codes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Q8Argument {
    codes: *const i8,
    scales: *const f16,
    rows: i32,
    cols: i32,
}

/// As kernels take a matrix of 4-bit codes.
#[derive(Clone, Copy)]
#[repr(C)]
struct Nf4Argument {
    words: *const u8,
    scales: *const u8,
    nested: *const f32,
    rows: i32,
    cols: i32,
}

/// A matrix of codes of any value, and its values on a CPU.
struct Coded {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
    tensors: Tensors,
}

enum Tensors {
    Q8(Device<i8>, Device<f16>),
    Nf4(Device<u8>, Device<u8>, Device<f32>),
}

/// Values below 1, as those of the other tests of products.
fn q8_of((rows, cols): (usize, usize)) -> Coded {
    let blocks = q8::blocks(cols);
    let codes: Vec<i8> = (0..rows * cols).map(|i| (i * 37 % 255) as u8 as i8).collect();
    let scales: Vec<f16> =
        numbers(3, rows * blocks).iter().map(|x| f16::from_f64(x.abs() * 7e-3 + 1e-4)).collect();
    let mut values = vec![f32::NAN; rows * cols];
    for (row, to) in values.chunks_mut(cols).enumerate() {
        q8::widen(&codes[row * cols..][..cols], &scales[row * blocks..][..blocks], 0, to);
    }
    Coded { rows, cols, values, tensors: Tensors::Q8(Device::new(&codes), Device::new(&scales)) }
}

/// Every code of a weight, and of a scale in matrices with so many scales.
fn nf4_of((rows, cols): (usize, usize)) -> Coded {
    let sizes = nf4::Sizes { rows, cols };
    let mut coded =
        nf4::quantise(&numbers(5, rows * cols).iter().map(|&x| x as f32).collect::<Vec<_>>(), sizes);
    coded.scales.iter_mut().enumerate().for_each(|(i, code)| *code = (i * 7 % 256) as u8);
    coded.nested.iter_mut().enumerate().for_each(|(i, factor)| *factor = 0.37 / (i + 1) as f32 + 0.011);
    let mut values = vec![f32::NAN; rows * cols];
    coded.view().widen(0..rows, 0..cols, &mut values);
    let tensors =
        Tensors::Nf4(Device::new(&coded.codes), Device::new(&coded.scales), Device::new(&coded.nested));
    Coded { rows, cols, values, tensors }
}

impl Coded {
    /// The matrix from row `first` on, which begins a block.
    fn argument(&self, first: usize) -> cuda_shim::Argument {
        let (rows, cols) = (self.rows as i32, self.cols as i32);
        match &self.tensors {
            Tensors::Q8(codes, scales) => cuda_shim::Argument::new(Q8Argument {
                codes: codes.at(first * self.cols),
                scales: scales.at(first * q8::blocks(self.cols)),
                rows: rows - first as i32,
                cols,
            }),
            Tensors::Nf4(words, scales, nested) => cuda_shim::Argument::new(Nf4Argument {
                words: words.head(),
                scales: scales.head(),
                nested: nested.head(),
                rows,
                cols,
            }),
        }
    }

    /// Index of its kernels.
    fn kind(&self) -> usize {
        usize::from(matches!(self.tensors, Tensors::Nf4(..)))
    }

    fn dtype(&self) -> DType {
        [DType::I8, DType::U8][self.kind()]
    }

    fn wide(&self) -> Vec<f64> {
        self.values.iter().map(|&value| f64::from(value)).collect()
    }
}

fn both(shape: (usize, usize)) -> [Coded; 2] {
    [q8_of(shape), nf4_of(shape)]
}

/// Values from row `first` on have the bits that a CPU's have, rounded to T.
fn widened<T: Activation>(w: &Coded, first: usize, seed: u64) {
    let count = w.rows - first;
    let to = Device::<T>::poisoned(count * w.cols);
    let head = to.head();
    match w.kind() {
        0 => {
            let blocks = (count * w.cols.div_ceil(8)).div_ceil(256);
            run(
                WIDEN[0][T::INDEX],
                [blocks, 1, 1],
                256,
                0,
                seed,
                &mut [w.argument(first), cuda_shim::Argument::new(head)],
            );
        }
        _ => {
            let grid = [w.cols.div_ceil(64), count.div_ceil(256), 1];
            let [first, count] = [first, count].map(|x| cuda_shim::Argument::new(x as i32));
            let args = &mut [w.argument(0), cuda_shim::Argument::new(head), first, count];
            run(WIDEN[1][T::INDEX], grid, 256, 0, seed, args);
        }
    }
    let expected = w.values[first * w.cols..].iter().map(|&value| T::of(f64::from(value)));
    for (at, (found, expected)) in to.get().into_iter().zip(expected).enumerate() {
        let place = (first + at / w.cols, at % w.cols);
        assert!(
            found.same(expected),
            "{:?}, {place:?} of {} x {}: {found:?} is not {expected:?}",
            w.dtype(),
            w.rows,
            w.cols
        );
    }
}

#[test]
fn values_have_the_bits_of_a_cpu() {
    for shape in SHAPES {
        for w in both(shape) {
            for seed in SEEDS {
                widened::<f32>(&w, 0, seed);
            }
            widened::<f16>(&w, 0, 1);
            widened::<bf16>(&w, 0, 2);
            if w.rows > 64 {
                widened::<f16>(&w, 64, 1);
                widened::<f32>(&w, w.rows / 64 * 64 - usize::from(w.rows % 64 == 0) * 64, 3);
            }
        }
    }
}

/// `x W` of few rows, in the shares that a device cuts it into and in others.
fn straight<T: Activation>(w: &Coded, n: usize, splits: usize, seed: u64) {
    let Coded { rows, cols, .. } = *w;
    let x = rounded::<T>(1, n * rows);
    let (x_in, parts) = (Device::<T>::of(&x), Device::<f32>::poisoned(splits * n * cols));
    let columns = [128, 64][w.kind()];
    let (x_at, parts_at) = (cuda_shim::Argument::new(x_in.head()), cuda_shim::Argument::new(parts.head()));
    let args = &mut [x_at, w.argument(0), parts_at, cuda_shim::Argument::new(n as i32)];
    run(NN[w.kind()][T::INDEX], [cols.div_ceil(columns), splits, 1], 256, 0, seed, args);
    let values = w.wide();
    let product = |at: usize| (0..rows).map(|i| x[at / cols * rows + i] * values[i * cols + at % cols]).sum();
    let parts = parts.wide();
    let found: Vec<f64> = (0..n * cols).map(|at| parts.iter().skip(at).step_by(n * cols).sum()).collect();
    assert_close(&found, &(0..n * cols).map(product).collect::<Vec<f64>>(), 1e-5, "x w");
}

#[test]
fn products_of_few_rows_match_sums() {
    for (shape, n) in SHAPES.into_iter().zip([1, 3, 8, 2, 1, 8, 5, 8, 1]) {
        for w in both(shape) {
            let usual = shares_of(w.dtype(), w.rows, w.cols);
            for splits in [1, usual, usual + 2] {
                straight::<f32>(&w, n, splits, 1);
                straight::<f16>(&w, n, splits, 2);
                straight::<bf16>(&w, n, splits, 3);
            }
        }
    }
}

/// `x W^T` of few rows, rows of y apart.
fn transposed<T: Activation>(w: &Coded, n: usize) {
    let Coded { rows, cols, .. } = *w;
    let ld = rows + 3;
    let x = rounded::<T>(1, n * cols);
    let (x_in, y) = (Device::<T>::of(&x), Device::<f32>::of(&vec![9.0; n * ld]));
    let (x_at, y_at) = (cuda_shim::Argument::new(x_in.head()), cuda_shim::Argument::new(y.head()));
    let [n_, ld_] = [cuda_shim::Argument::new(n as i32), cuda_shim::Argument::new(ld as i64)];
    run(NT[T::INDEX], [rows.div_ceil(8), 1, 1], 256, 0, 2, &mut [x_at, w.argument(0), y_at, n_, ld_]);
    let values = w.wide();
    let value = |at: usize| match (at / ld, at % ld) {
        (row, out) if out < rows => (0..cols).map(|i| x[row * cols + i] * values[out * cols + i]).sum(),
        _ => 9.0,
    };
    assert_close(&y.wide(), &(0..n * ld).map(value).collect::<Vec<f64>>(), 1e-5, "x w^T");
}

#[test]
fn transposed_products_of_few_rows_match_sums() {
    for (shape, n) in SHAPES.into_iter().zip([1, 3, 8, 2, 1, 8, 5, 8, 1]) {
        let w = q8_of(shape);
        transposed::<f32>(&w, n);
        transposed::<f16>(&w, n);
        transposed::<bf16>(&w, n);
    }
}

/// Rows of a table of codes plus positions, and rows of a prompt for ids beyond it.
fn embedded<T: Activation>(c: usize) {
    let (vocab, positions, length) = (23, 11, 2);
    let w = q8_of((vocab, c));
    let ids: Vec<u32> = (0..29).map(|i| i * 7 % (vocab + length) as u32).collect();
    let places: Vec<u32> = (0..29).map(|i| i * 5 % positions as u32).collect();
    let (wpe, prompt) = (rounded::<f16>(1, positions * c), rounded::<f32>(2, length * c));
    let (ids_in, places_in) = (Device::<u32>::new(&ids), Device::<u32>::new(&places));
    let (wpe_in, prompt_in) = (Device::<f16>::of(&wpe), Device::<f32>::of(&prompt));
    let x = Device::<T>::poisoned(ids.len() * c);
    let [ids_at, places_at] = [ids_in.head(), places_in.head()].map(cuda_shim::Argument::new);
    let (wpe_at, prompt_at) =
        (cuda_shim::Argument::new(wpe_in.head()), cuda_shim::Argument::new(prompt_in.head()));
    let (x_at, vocab_) = (cuda_shim::Argument::new(x.head()), cuda_shim::Argument::new(vocab as i32));
    let args = &mut [ids_at, places_at, w.argument(0), wpe_at, prompt_at, x_at, vocab_];
    run(EMBED[T::INDEX], [ids.len(), 1, 1], 128, 0, 1, args);
    let values = w.wide();
    let value = |at: usize| {
        let (id, place) = (ids[at / c] as usize, places[at / c] as usize);
        let token = if id < vocab { values[id * c + at % c] } else { prompt[(id - vocab) * c + at % c] };
        token + wpe[place * c + at % c]
    };
    let expected: Vec<f64> = (0..ids.len() * c).map(value).collect();
    assert_close(&x.wide(), &expected, T::ROUNDING + 1e-7, "x");
}

#[test]
fn an_embedding_of_codes_is_read_by_rows() {
    for c in [1, 8, 61, 1100] {
        embedded::<f32>(c);
        embedded::<f16>(c);
        embedded::<bf16>(c);
    }
}

/// Norms of the columns of codes plus a delta of this rank.
fn norms(w: &Coded, rank: usize, seed: u64) {
    let Coded { rows: inputs, cols: outputs, .. } = *w;
    let (a, b) = (rounded::<f32>(1, rank * inputs), rounded::<f32>(2, outputs * rank));
    let (a_in, b_in) = (Device::<f32>::of(&a), Device::<f32>::of(&b));
    let (a_all, b_all) = (Device::<f32>::poisoned(rank * inputs), Device::<f32>::poisoned(rank * outputs));
    if rank > 0 {
        let null: *mut f32 = std::ptr::null_mut();
        let [rank_, inputs_, outputs_] = [rank, inputs, outputs].map(|size| size as i32);
        let args = args![
            a_in.head(),
            b_in.head(),
            null,
            null,
            0.3f32,
            a_all.head(),
            b_all.head(),
            rank_,
            inputs_,
            outputs_,
            0i32,
            outputs_
        ];
        let blocks = (rank * inputs.max(outputs)).div_ceil(256);
        run(column_norms_factors_launch, [blocks, 1, 1], 256, 0, seed, args);
    }
    let share = column_norms::device_scratch::share(inputs);
    let splits = inputs.div_ceil(share);
    let (parts, found) = (Device::<f32>::poisoned(splits * outputs), Device::<f32>::poisoned(outputs));
    let [a_at, b_at, parts_at] = [a_all.head(), b_all.head(), parts.head()].map(cuda_shim::Argument::new);
    let [rank_, share_] = [rank, share].map(|size| cuda_shim::Argument::new(size as i32));
    let kernel = [column_norms_parts_q8_launch, column_norms_parts_nf4_launch][w.kind()];
    let args = &mut [w.argument(0), a_at, b_at, parts_at, rank_, share_];
    run(kernel, [outputs.div_ceil(64), splits, 1], 256, 0, seed, args);
    let args = args![parts.head(), splits as i32, found.head(), outputs as i32];
    run(column_norms_finish_launch, [outputs.div_ceil(256), 1, 1], 256, 0, seed, args);
    let delta = Delta {
        a: &a,
        b: &b,
        rank,
        columns: 0..outputs,
        tokens: 0..0,
        scale: f64::from(0.3f32),
        d: None,
        e: None,
        dropped: None,
    };
    let deltas = if rank > 0 { vec![delta] } else { Vec::new() };
    let expected = column_norms::reference::forward(&w.wide(), (inputs, outputs), &deltas);
    assert_close(&found.wide(), &expected, 2e-6, "norms");
}

#[test]
fn norms_of_columns_of_codes_match_the_twin() {
    for (shape, rank) in SHAPES.into_iter().zip([0, 3, 0, 2, 19, 5, 8, 3, 0]) {
        for w in both(shape) {
            norms(&w, rank, 1);
            norms(&w, rank, 3);
        }
    }
}
