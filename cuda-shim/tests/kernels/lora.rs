//! The thin products of a low-rank delta, forward and backward, with and without dropout, against the twin of
//! the whole adapted layer with a frozen weight of zeros.

use cuda_shim::{Launcher, kernels};
use engraft::kernels::adapted_linear::reference::{self, Delta, Gradients, Site};
use engraft_util::rng;
use half::{bf16, f16};

use crate::{args, harness::*};

macro_rules! deltas {
    ($($type:ident: $xa:ident $small_batch:ident $add:ident $d_xa:ident $da:ident $db:ident $dx:ident
        $both:ident $finish:ident;)*) => {
        kernels!($($xa, $small_batch, $add, $d_xa, $da, $db, $dx, $both, $finish,)* sum_parts_launch, lora_join_launch);
        const KERNELS: [Kernels; 3] = [$(Kernels {
            xa: $xa, small_batch: $small_batch, add: $add, d_xa: $d_xa, da: $da, db: $db, dx: $dx, both: $both, finish: $finish,
        }),*];
    };
}
deltas!(
    f32: lora_xa_f32_launch lora_xa_small_batch_f32_launch lora_add_f32_launch lora_d_xa_f32_launch
        lora_da_f32_launch lora_db_f32_launch lora_dx_f32_launch lora_small_batch_f32_launch lora_small_batch_finish_f32_launch;
    f16: lora_xa_f16_launch lora_xa_small_batch_f16_launch lora_add_f16_launch lora_d_xa_f16_launch
        lora_da_f16_launch lora_db_f16_launch lora_dx_f16_launch lora_small_batch_f16_launch lora_small_batch_finish_f16_launch;
    bf16: lora_xa_bf16_launch lora_xa_small_batch_bf16_launch lora_add_bf16_launch lora_d_xa_bf16_launch
        lora_da_bf16_launch lora_db_bf16_launch lora_dx_bf16_launch lora_small_batch_bf16_launch
        lora_small_batch_finish_bf16_launch;
);

#[derive(Clone, Copy)]
struct Kernels {
    xa: Launcher,
    small_batch: Launcher,
    add: Launcher,
    d_xa: Launcher,
    da: Launcher,
    db: Launcher,
    dx: Launcher,
    both: Launcher,
    finish: Launcher,
}

/// The struct that the kernels take.
#[repr(C)]
#[derive(Clone, Copy)]
struct Dropout {
    key: u64,
    p: f32,
    first_row: i32,
    seq_len: i32,
    stride: i32,
}

impl Dropout {
    /// The factor of an element, as `adapted_linear::Dropout` defines it.
    fn factor(self, inputs: usize, row: usize, column: usize) -> f64 {
        let [first, t, stride] = [self.first_row, self.seq_len, self.stride].map(|size| size as usize);
        let token = (first + row / t) * stride + row % t;
        match rng::uniform(self.key, (token * inputs + column) as u64) >= self.p {
            true => f64::from(1.0 / (1.0 - self.p)),
            false => 0.0,
        }
    }
}

const SCALE: f32 = 1.7;

/// Sizes of a layer with one delta on `columns` outputs from `first` on.
#[derive(Clone, Copy)]
struct Shape {
    n: usize,
    inputs: usize,
    outputs: usize,
    rank: usize,
    first: usize,
    columns: usize,
}

impl Shape {
    /// The twin's layer with this delta.
    fn site<'a>(self, w: &'a [f64], bias: &'a [f64], delta: Delta<'a, f64>) -> Site<'a, f64> {
        let Shape { n, inputs, outputs, .. } = self;
        Site { n, inputs, outputs, w, bias, u: None, g: None, bias_inside: false, deltas: vec![delta] }
    }

    fn delta<'a>(self, a: &'a [f64], b: &'a [f64], dropped: &'a [f64]) -> Delta<'a, f64> {
        Delta {
            a,
            b,
            rank: self.rank,
            columns: self.first..self.first + self.columns,
            tokens: 0..self.n,
            scale: f64::from(SCALE),
            d: None,
            e: None,
            dropped: Some(dropped),
        }
    }
}

fn check<T: Activation>(s: Shape, p: f32, splits: usize, seed: u64) {
    let kernels = KERNELS[T::INDEX];
    let Shape { n, inputs, outputs, rank, first, columns } = s;
    let dropout = Dropout { key: rng::key(&[seed]), p, first_row: 2, seq_len: 15, stride: 16 };
    let (x, dy) = (rounded::<T>(1, n * inputs), rounded::<T>(2, n * outputs));
    let (a, b) = (rounded::<f32>(3, rank * inputs), rounded::<f32>(4, columns * rank));
    let (y, dx, da, db) = (
        rounded::<T>(5, n * outputs),
        rounded::<T>(6, n * inputs),
        rounded::<f32>(7, a.len()),
        rounded::<f32>(8, b.len()),
    );
    let factors: Vec<f64> = (0..n * inputs)
        .map(|at| if p == 0.0 { 1.0 } else { dropout.factor(inputs, at / inputs, at % inputs) })
        .collect();

    let (x_in, a_in, b_in) = (Device::<T>::of(&x), Device::<f32>::of(&a), Device::<f32>::of(&b));
    let (xa, y_out) = (Device::<f32>::poisoned(n * rank), Device::<T>::of(&y));
    let [n_, in_, out_, rank_, first_, columns_] =
        [n, inputs, outputs, rank, first, columns].map(|x| x as i32);
    let (tiles, ranks) = (n.div_ceil(64), rank.div_ceil(16));
    let parts = Device::<f32>::poisoned(splits * n * rank);
    let args = args![x_in.head(), a_in.head(), dropout, parts.head(), n_, in_, rank_];
    run(kernels.xa, [tiles, ranks, splits], 256, 0, seed, args);
    join(&parts, splits, &xa, n * rank);
    if n <= 8 {
        let small = Device::<f32>::poisoned(n * rank);
        let args = args![x_in.head(), a_in.head(), dropout, small.head(), n_, in_, rank_];
        run(kernels.small_batch, [rank.div_ceil(4), n, 1], 128, 0, seed, args);
        assert_close(&small.wide(), &xa.wide(), 1e-6, "xa of few rows");
        // With the frozen product, whose shares are added with B.
        let (w, bias, residual) = (
            rounded::<T::Weight>(9, inputs * outputs),
            rounded::<f16>(10, outputs),
            rounded::<T>(11, n * outputs),
        );
        let (w_in, bias_in, res_in) =
            (Device::<T::Weight>::of(&w), Device::<f16>::of(&bias), Device::<T>::of(&residual));
        let (parts, both) =
            (Device::<f32>::poisoned(splits * n * outputs), Device::<f32>::poisoned(n * rank));
        let args = args![
            x_in.head(),
            w_in.head(),
            parts.head(),
            n_,
            in_,
            out_,
            a_in.head(),
            dropout,
            both.head(),
            rank_
        ];
        run(kernels.both, [outputs.div_ceil(32) + (n * rank).div_ceil(8), splits, 1], 256, 0, seed, args);
        assert_eq!(both.wide(), small.wide(), "xa with a product");
        let y = Device::<T>::poisoned(n * outputs);
        let args = args![
            parts.head(),
            splits as i32,
            res_in.head(),
            bias_in.head(),
            y.head(),
            n_,
            out_,
            both.head(),
            b_in.head(),
            SCALE,
            first_,
            columns_,
            rank_
        ];
        run(kernels.finish, [(n * outputs).div_ceil(256), 1, 1], 256, 0, seed, args);
        let whole = reference::forward(&s.site(&w, &bias, s.delta(&a, &b, &factors)), &x);
        let expected: Vec<f64> = residual.iter().zip(whole).map(|(r, y)| r + y).collect();
        assert_close(&y.wide(), &expected, T::ROUNDING + 1e-5, "y of few rows");
    }
    let args = args![xa.head(), b_in.head(), SCALE, y_out.head(), n_, out_, first_, columns_, rank_];
    run(kernels.add, [tiles, columns.div_ceil(64), 1], 256, 0, seed, args);
    let zeros = vec![0.0; inputs * outputs];
    let site = s.site(&zeros, &zeros[..outputs], s.delta(&a, &b, &factors));
    let part = reference::forward(&site, &x);
    let expected: Vec<f64> = y.iter().zip(part).map(|(y, part)| y + part).collect();
    assert_close(&y_out.wide(), &expected, T::ROUNDING + 1e-5, "y");

    let (dy_in, d_xa) = (Device::<T>::of(&dy), Device::<f32>::poisoned(n * rank));
    let parts = Device::<f32>::poisoned(splits * n * rank);
    let args = args![dy_in.head(), b_in.head(), SCALE, parts.head(), n_, out_, first_, columns_, rank_];
    run(kernels.d_xa, [tiles, ranks, splits], 256, 0, seed, args);
    join(&parts, splits, &d_xa, n * rank);
    let (da_out, db_out, dx_out) = (Device::<f32>::of(&da), Device::<f32>::of(&db), Device::<T>::of(&dx));
    let parts = Device::<f32>::poisoned(splits * a.len());
    let args = args![x_in.head(), d_xa.head(), dropout, parts.head(), n_, in_, rank_];
    run(kernels.da, [inputs.div_ceil(64), ranks, splits], 256, 0, seed, args);
    sum(&parts, splits, 1.0, &da_out, a.len());
    let parts = Device::<f32>::poisoned(splits * b.len());
    let args = args![dy_in.head(), xa.head(), parts.head(), n_, out_, first_, columns_, rank_];
    run(kernels.db, [columns.div_ceil(64), ranks, splits], 256, 0, seed, args);
    sum(&parts, splits, SCALE, &db_out, b.len());
    let args = args![d_xa.head(), a_in.head(), dropout, dx_out.head(), n_, in_, rank_];
    run(kernels.dx, [tiles, inputs.div_ceil(64), 1], 256, 0, seed, args);

    let Gradients { x: dx_part, deltas, .. } = reference::backward(&site, &x, &dy);
    let [found] = <[_; 1]>::try_from(deltas).ok().expect("one delta");
    let plus =
        |before: &[f64], part: Vec<f64>| before.iter().zip(part).map(|(a, b)| a + b).collect::<Vec<_>>();
    assert_close(&dx_out.wide(), &plus(&dx, dx_part), T::ROUNDING + 1e-5, "dx");
    assert_close(&da_out.wide(), &plus(&da, found.a), 2e-5, "dA");
    assert_close(&db_out.wide(), &plus(&db, found.b), 2e-5, "dB");
}

fn sum(parts: &Device<f32>, splits: usize, scale: f32, gradient: &Device<f32>, count: usize) {
    let args = args![parts.head(), splits as i32, scale, gradient.head(), count as i64];
    run(sum_parts_launch, [count.div_ceil(256), 1, 1], 256, 0, 1, args);
}

fn join(parts: &Device<f32>, splits: usize, to: &Device<f32>, count: usize) {
    let args = args![parts.head(), splits as i32, to.head(), count as i64];
    run(lora_join_launch, [count.div_ceil(256), 1, 1], 256, 0, 1, args);
}

/// Odd sizes of one tile, and one row; whole vectors of several tiles, terms after one step, more ranks than a tile has;
/// terms of three steps, for three shares.
const SHAPES: [Shape; 5] = [
    Shape { n: 1, inputs: 72, outputs: 40, rank: 16, first: 0, columns: 40 },
    Shape { n: 7, inputs: 37, outputs: 61, rank: 3, first: 13, columns: 29 },
    Shape { n: 150, inputs: 80, outputs: 144, rank: 8, first: 48, columns: 72 },
    Shape { n: 70, inputs: 67, outputs: 101, rank: 19, first: 20, columns: 81 },
    Shape { n: 33, inputs: 170, outputs: 190, rank: 16, first: 7, columns: 150 },
];

#[test]
fn deltas_match_their_twin() {
    for (at, s) in SHAPES.into_iter().enumerate() {
        for (p, splits) in [(0.0, 1), (0.3, 3)] {
            let seed = 1 + at as u64;
            check::<f32>(s, p, splits, seed);
            check::<f16>(s, p, splits, seed + 7);
            check::<bf16>(s, p, splits, seed + 14);
        }
    }
}
