//! A layer norm and the delta of the product after it: the three kernels against plain loops in f64, with factors that
//! their type can hold.

use cuda_shim::{Launcher, kernels};
use half::{bf16, f16};

use crate::{args, harness::*};

kernels!(
    delta_norm_f16_launch,
    delta_norm_bf16_launch,
    delta_norm_pass_f16_launch,
    delta_norm_pass_bf16_launch,
    delta_norm_back_f16_launch,
    delta_norm_back_bf16_launch,
);

/// Forward, pass and backward, for `Activation::INDEX`, of which f32 has none.
const KERNELS: [[Launcher; 3]; 2] = [
    [delta_norm_f16_launch, delta_norm_pass_f16_launch, delta_norm_back_f16_launch],
    [delta_norm_bf16_launch, delta_norm_pass_bf16_launch, delta_norm_back_bf16_launch],
];

const SCALE: f32 = 1.7;
const EPSILON: f32 = 1e-5;
/// Factor of B and divisor of xa in the product.
const BALANCE: f64 = 16.0;

#[derive(Clone, Copy)]
struct Shape {
    n: usize,
    c: usize,
    outputs: usize,
    rank: usize,
}

impl Shape {
    fn ranks(self) -> usize {
        self.rank.next_multiple_of(8)
    }

    fn threads(self) -> usize {
        32 * self.c.div_ceil(128)
    }
}

/// A layer norm's parameters and statistics of x (n, c), in f64.
struct Norm {
    gain: Vec<f64>,
    bias: Vec<f64>,
    stats: Vec<[f64; 2]>,
}

impl Norm {
    fn of(x: &[f64], c: usize, seed: u64) -> Self {
        let of_row = |row: &[f64]| {
            let mean = row.iter().sum::<f64>() / c as f64;
            let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / c as f64;
            [mean, 1.0 / (variance + f64::from(EPSILON)).sqrt()]
        };
        Self {
            gain: rounded::<f16>(seed, c).iter().map(|g| 1.0 + g / 2.0).map(|g| f16::of(g).wide()).collect(),
            bias: rounded::<f16>(seed + 1, c),
            stats: x.chunks(c).map(of_row).collect(),
        }
    }

    /// The normalised value of element `at`, without gain and bias.
    fn hat(&self, x: &[f64], at: usize) -> f64 {
        let [mean, rstd] = self.stats[at / self.gain.len()];
        (x[at] - mean) * rstd
    }

    fn normed(&self, x: &[f64]) -> Vec<f64> {
        let c = self.gain.len();
        (0..x.len()).map(|at| self.hat(x, at) * self.gain[at % c] + self.bias[at % c]).collect()
    }

    /// The same rounded to T, and how far apart the two numbers are that it may round to: 0 but where it lies so near
    /// the middle between them that the errors of an FP32 sum decide.
    fn rounded<T: Activation>(&self, x: &[f64]) -> Vec<(f64, f64)> {
        let (c, normed) = (self.gain.len(), self.normed(x));
        let one = |(at, value): (usize, f64)| {
            let ([mean, rstd], column) = (self.stats[at / c], at % c);
            let largest = (x[at].abs() + mean.abs()) * rstd * self.gain[column] + self.bias[column].abs();
            let error = 4.0 * f64::from(f32::EPSILON) * largest;
            let [low, high] = [value - error, value + error].map(|value| T::of(value).wide());
            (T::of(value).wide(), high - low)
        };
        normed.into_iter().enumerate().map(one).collect()
    }

    fn flat(&self) -> Vec<f64> {
        self.stats.iter().flatten().copied().collect()
    }
}

/// Activations whose rows have means and widths of their own.
fn activations<T: Activation>(seed: u64, n: usize, c: usize) -> Vec<f64> {
    let values = numbers(seed, n * c);
    let at = |at: usize| (at / c % 5) as f64 - 1.5 + values[at] * (1.0 + (at / c % 3) as f64);
    (0..n * c).map(|i| T::of(at(i)).wide()).collect()
}

/// `left (rows, inner) right (columns, inner)^T`.
fn product(left: &[f64], right: &[f64], inner: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    left.chunks(inner).flat_map(|a| right.chunks(inner).map(move |b| dot(a, b))).collect()
}

fn check_forward<T: Activation>(s: Shape, seed: u64) {
    let Shape { n, c, outputs, rank } = s;
    let (ranks, threads) = (s.ranks(), s.threads());
    let x = activations::<T>(seed, n, c);
    let norm = Norm::of(&x, c, seed + 1);
    let (a, b) = (rounded::<T>(seed + 3, rank * c), rounded::<T>(seed + 4, outputs * rank));
    let (x_in, a_in, b_in) = (Device::<T>::of(&x), Device::<f32>::of(&a), Device::<f32>::of(&b));
    let (gain, bias) = (Device::<f16>::of(&norm.gain), Device::<f16>::of(&norm.bias));
    let width = c + ranks;
    let (y, stats) = (Device::<T>::poisoned(n * width), Device::<f32>::poisoned(2 * n));
    let (xa, rows) = (Device::<T>::poisoned(n * ranks), Device::<T>::poisoned(ranks * outputs));
    let [n_, c_, out_, rank_] = [n, c, outputs, rank].map(|size| size as i32);
    let args = args![
        x_in.head(),
        gain.head(),
        bias.head(),
        EPSILON,
        y.head(),
        stats.head(),
        a_in.head(),
        xa.head(),
        b_in.head(),
        rows.head(),
        n_,
        c_,
        out_,
        rank_,
        SCALE
    ];
    let blocks = n.div_ceil(16) + (ranks * outputs / 8).div_ceil(threads);
    run(KERNELS[T::INDEX - 1][0], [blocks, 1, 1], threads, 0, seed, args);

    assert_close(&stats.wide(), &norm.flat(), 1e-5, "stats");
    let y = y.wide();
    let cut = |from: usize, to: usize| -> Vec<f64> {
        y.chunks(width).flat_map(|row| row[from..to].to_vec()).collect()
    };
    let normed = cut(0, c);
    assert_close(&normed, &norm.normed(&x), T::ROUNDING + 1e-5, "normed");
    // xa of the rows as they were rounded.
    let mut padded = a.clone();
    padded.resize(ranks * c, 0.0);
    let expected = product(&normed, &padded, c);
    assert_close(&xa.wide(), &expected, T::ROUNDING + 1e-5, "xa");
    let divided: Vec<f64> = xa.wide().iter().map(|xa| xa / BALANCE).collect();
    assert_close(&cut(c, width), &divided, 1e-6, "xa in the product");
    let expected: Vec<f64> = (0..ranks * outputs)
        .map(|at| (at / outputs, at % outputs))
        .map(|(r, column)| if r < rank { BALANCE * f64::from(SCALE) * b[column * rank + r] } else { 0.0 })
        .collect();
    assert_close(&rows.wide(), &expected, T::ROUNDING + 1e-6, "rows of B");
}

fn check_backward<T: Activation>(s: Shape, share: usize, groups: usize, seed: u64) {
    let Shape { n, c, outputs, rank } = s;
    let (ranks, threads, shares) = (s.ranks(), s.threads(), n.div_ceil(share));
    let [_, pass, back] = KERNELS[T::INDEX - 1];
    let x = activations::<T>(seed, n, c);
    let norm = Norm::of(&x, c, seed + 1);
    let (a, dy, dx) =
        (rounded::<T>(seed + 3, rank * c), rounded::<T>(seed + 4, n * c), rounded::<T>(seed + 5, n * c));
    // Shares of d_xa: nothing in the ranks that the delta does not have.
    let parts: Vec<f64> = numbers(seed + 6, groups * n * ranks)
        .iter()
        .enumerate()
        .map(|(at, x)| if at % ranks < rank { f64::from(*x as f32) } else { 0.0 })
        .collect();
    // Added in FP32, in order, and rounded, as a device does it.
    let sum =
        |at: usize| parts.iter().skip(at).step_by(n * ranks).fold(0.0f32, |sum, &part| sum + part as f32);
    let d_xa: Vec<f64> = (0..n * ranks).map(|at| T::of(f64::from(sum(at))).wide()).collect();

    let (x_in, stats, parts_in) =
        (Device::<T>::of(&x), Device::<f32>::of(&norm.flat()), Device::<f32>::of(&parts));
    let (gain, bias) = (Device::<f16>::of(&norm.gain), Device::<f16>::of(&norm.bias));
    let of_a = Device::<f32>::poisoned(shares * c * ranks);
    let [n_, c_, rank_, share_, groups_, shares_] =
        [n, c, rank, share, groups, shares].map(|size| size as i32);
    let args = args![
        x_in.head(),
        stats.head(),
        gain.head(),
        bias.head(),
        parts_in.head(),
        groups_,
        of_a.head(),
        n_,
        c_,
        rank_,
        share_
    ];
    let stages = 3 * 2 * 32 * (256 + 8 + ranks);
    run(pass, [c.div_ceil(256), shares, 1], 128, stages, seed, args);

    // Gradients of both factors, which are added to.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Shares(u64, u64, i32, i32);
    let (da_before, db_before) = (numbers(seed + 7, rank * c), numbers(seed + 8, outputs * rank));
    let (da, db) = (Device::<f32>::of(&da_before), Device::<f32>::of(&db_before));
    let b_parts: Vec<f64> =
        numbers(seed + 9, 3 * outputs * ranks).into_iter().map(|x| f64::from(x as f32)).collect();
    let of_b = Device::<f32>::of(&b_parts);
    let (dy_in, a_in, dx_in) = (Device::<T>::of(&dy), Device::<f32>::of(&a), Device::<T>::of(&dx));
    let args = args![
        dy_in.head(),
        x_in.head(),
        stats.head(),
        gain.head(),
        dx_in.head(),
        parts_in.head(),
        groups_,
        a_in.head(),
        n_,
        c_,
        rank_,
        SCALE,
        Shares(of_b.head() as u64, db.head() as u64, 3, outputs as i32),
        Shares(of_a.head() as u64, da.head() as u64, shares_, c_)
    ];
    let sums = (outputs * rank).div_ceil(threads) + (c * rank).div_ceil(threads);
    run(back, [n.div_ceil(16) + sums, 1, 1], threads, 0, seed, args);

    let normed = norm.rounded::<T>(&x);
    for (at, found) in da.wide().into_iter().enumerate() {
        let (r, column) = (at / c, at % c);
        let terms = || (0..n).map(|row| (f64::from(SCALE) * d_xa[row * ranks + r], normed[row * c + column]));
        let expected = da_before[at] + terms().map(|(factor, (value, _))| factor * value).sum::<f64>();
        let either = terms().map(|(factor, (_, apart))| (factor * apart).abs()).sum::<f64>();
        let error = (found - expected).abs();
        assert!(error <= 1e-4 * (1.0 + expected.abs()) + either, "dA[{at}]: {found} against {expected}");
    }
    let expected: Vec<f64> = (0..outputs * rank)
        .map(|at| {
            let from = at / rank * ranks + at % rank;
            let sum: f64 = b_parts.iter().skip(from).step_by(outputs * ranks).sum();
            db_before[at] + f64::from(SCALE) * sum
        })
        .collect();
    assert_close(&db.wide(), &expected, 1e-5, "dB");
    let delta = |row: usize, column: usize| -> f64 {
        (0..rank).map(|r| d_xa[row * ranks + r] * a[r * c + column]).sum::<f64>() * f64::from(SCALE)
    };
    let g: Vec<f64> = (0..n * c).map(|at| (dy[at] + delta(at / c, at % c)) * norm.gain[at % c]).collect();
    let expected: Vec<f64> = (0..n * c)
        .map(|at| {
            let row = at / c * c..(at / c + 1) * c;
            let mean = g[row.clone()].iter().sum::<f64>() / c as f64;
            let mean_x = row.map(|i| g[i] * norm.hat(&x, i)).sum::<f64>() / c as f64;
            dx[at] + norm.stats[at / c][1] * (g[at] - mean - norm.hat(&x, at) * mean_x)
        })
        .collect();
    // dy with the delta is rounded, and so is the result.
    assert_close(&dx_in.wide(), &expected, 8.0 * T::ROUNDING, "dx");
}

/// Rows of one block and of several, whole and not; one warp and several, lines whole and not; ranks of one tile and
/// of two.
const SHAPES: [Shape; 5] = [
    Shape { n: 9, c: 24, outputs: 40, rank: 4 },
    Shape { n: 33, c: 104, outputs: 136, rank: 8 },
    Shape { n: 48, c: 136, outputs: 64, rank: 13 },
    Shape { n: 70, c: 264, outputs: 48, rank: 16 },
    Shape { n: 20, c: 768, outputs: 24, rank: 8 },
];

#[test]
fn a_norm_makes_the_delta_of_the_product_after_it() {
    for (at, shape) in SHAPES.into_iter().enumerate() {
        check_forward::<f16>(shape, 2000 + 20 * at as u64);
        check_forward::<bf16>(shape, 2010 + 20 * at as u64);
    }
}

#[test]
fn the_backward_of_a_norm_adds_the_delta_and_sums_both_factors() {
    for (at, shape) in SHAPES.into_iter().enumerate() {
        let (share, groups) = ([32, 64, 32, 96, 32][at], [1, 2, 3, 1, 9][at]);
        check_backward::<f16>(shape, share, groups, 2200 + 20 * at as u64);
        check_backward::<bf16>(shape, share, groups, 2210 + 20 * at as u64);
    }
}
