//! The launches of a decoder's layer, one by one: norms and products in shares, deltas of some rows, residuals and
//! activations; and that no result depends on the number of rows or the order of blocks. Its attention is in
//! `decoding_attention`.

use cuda_shim::{Launcher, kernels};
use engraft::kernels::{
    activation::{Activation as Function, reference::forward as value},
    layernorm::reference as layernorm,
};
use half::{bf16, f16};

use crate::{args, harness::*};

kernels!(
    decode_norm_product_f32_launch,
    decode_norm_product_row_f32_launch,
    decode_norm_product_f16_launch,
    decode_norm_product_row_f16_launch,
    decode_norm_product_bf16_launch,
    decode_norm_product_row_bf16_launch,
    decode_attend_f32_launch,
    decode_attend_f16_launch,
    decode_attend_bf16_launch,
    decode_add_f32_launch,
    decode_add_row_f32_launch,
    decode_add_f16_launch,
    decode_add_row_f16_launch,
    decode_add_bf16_launch,
    decode_add_row_bf16_launch,
    decode_add_activated_f32_launch,
    decode_add_activated_row_f32_launch,
    decode_add_activated_f16_launch,
    decode_add_activated_row_f16_launch,
    decode_add_activated_bf16_launch,
    decode_add_activated_row_bf16_launch,
);

/// The four kernels of a type of activations, each for a single row and for more.
pub type Kernels = [[Launcher; 2]; 4];
pub const F32: Kernels = [
    [decode_norm_product_row_f32_launch, decode_norm_product_f32_launch],
    [decode_attend_f32_launch; 2],
    [decode_add_row_f32_launch, decode_add_f32_launch],
    [decode_add_activated_row_f32_launch, decode_add_activated_f32_launch],
];
pub const F16: Kernels = [
    [decode_norm_product_row_f16_launch, decode_norm_product_f16_launch],
    [decode_attend_f16_launch; 2],
    [decode_add_row_f16_launch, decode_add_f16_launch],
    [decode_add_activated_row_f16_launch, decode_add_activated_f16_launch],
];
pub const BF16: Kernels = [
    [decode_norm_product_row_bf16_launch, decode_norm_product_bf16_launch],
    [decode_attend_bf16_launch; 2],
    [decode_add_row_bf16_launch, decode_add_bf16_launch],
    [decode_add_activated_row_bf16_launch, decode_add_activated_bf16_launch],
];

/// Columns of a tile.
const TILE: usize = 64;

#[repr(C)]
#[derive(Clone, Copy)]
struct Delta {
    a: *const f32,
    b: *const f32,
    scale: f32,
    first: i32,
    columns: i32,
    row: u8,
    rows: u8,
    rank: u16,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Parameter {
    frozen: *const f16,
    trained: *const f32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Open {
    parts: *const f32,
    xa: *const f32,
    bias: *const f16,
    splits: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Sizes {
    n: i32,
    inputs: i32,
    cols: i32,
    size: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Joint {
    parts: *mut f32,
    xa: *mut f32,
    tickets: *mut u32,
}

/// A delta with its factors.
pub struct Low {
    a: Vec<f64>,
    b: Vec<f64>,
    scale: f32,
    rank: usize,
    columns: std::ops::Range<usize>,
    rows: std::ops::Range<usize>,
    on: (Device<f32>, Device<f32>),
}

/// The deltas of a site (inputs, outputs).
pub struct Lows(Vec<Low>, usize);

impl Lows {
    /// None, or three: on all columns for all rows, and on some columns for the first and the last rows.
    pub fn new(seed: u64, n: usize, inputs: usize, outputs: usize, any: bool) -> Self {
        let low = |seed, rank: usize, columns: std::ops::Range<usize>, rows| {
            let (a, b) =
                (rounded::<f32>(seed, rank * inputs), rounded::<f32>(seed + 1, rank * columns.len()));
            let on = (Device::<f32>::of(&a), Device::<f32>::of(&b));
            Low { a, b, scale: 0.7, rank, columns, rows, on }
        };
        let third = outputs / 3;
        let all = || {
            vec![
                low(seed, 3, 0..outputs, 0..n),
                low(seed + 2, 11, 0..third, 0..n.div_ceil(2)),
                low(seed + 4, 2, third + 1..outputs, n / 2..n),
            ]
        };
        Self(if any { all() } else { Vec::new() }, inputs)
    }

    pub fn ranks(&self) -> usize {
        self.0.iter().map(|low| low.rank).sum()
    }

    fn raw(&self) -> [Delta; 8] {
        std::array::from_fn(|at| match self.0.get(at) {
            None => Delta {
                a: std::ptr::null(),
                b: std::ptr::null(),
                scale: 0.0,
                first: 0,
                columns: 0,
                row: 0,
                rows: 0,
                rank: 0,
            },
            Some(low) => Delta {
                a: low.on.0.head(),
                b: low.on.1.head(),
                scale: low.scale,
                first: low.columns.start as i32,
                columns: low.columns.len() as i32,
                row: low.rows.start as u8,
                rows: low.rows.len() as u8,
                rank: low.rank as u16,
            },
        })
    }

    /// x A^T of a row, by rank; NaN where the delta is not for the row.
    fn xa(&self, x: &[f64], row: usize) -> Vec<f64> {
        let of = |low: &Low| -> Vec<f64> {
            let dot = |r: usize| (0..self.1).map(|k| x[row * self.1 + k] * low.a[r * self.1 + k]).sum();
            (0..low.rank).map(|r| if low.rows.contains(&row) { dot(r) } else { f64::NAN }).collect()
        };
        self.0.iter().flat_map(of).collect()
    }

    /// What they add to an element.
    fn add(&self, x: &[f64], row: usize, column: usize) -> f64 {
        let xa = self.xa(x, row);
        let mut at = 0;
        let mut sum = 0.0;
        for low in &self.0 {
            if low.rows.contains(&row) && low.columns.contains(&column) {
                let b = &low.b[(column - low.columns.start) * low.rank..][..low.rank];
                let dot: f64 = b.iter().zip(&xa[at..]).map(|(b, xa)| b * xa).sum();
                sum += f64::from(low.scale) * dot;
            }
            at += low.rank;
        }
        sum
    }
}

/// x W + b + deltas, element by element.
fn product(x: &[f64], w: &[f64], bias: &[f64], deltas: &Lows, n: usize, cols: usize) -> Vec<f64> {
    let inputs = deltas.1;
    let element = |at: usize| {
        let (row, column) = (at / cols, at % cols);
        let sum: f64 = (0..inputs).map(|k| x[row * inputs + k] * w[k * cols + column]).sum();
        bias[column] + sum + deltas.add(x, row, column)
    };
    (0..n * cols).map(element).collect()
}

/// Values of a type that sums of products of unit size are made of.
fn weights<T: Activation>(seed: u64, rows: usize, cols: usize) -> Vec<f64> {
    let scale = 1.0 / (rows as f64).sqrt();
    numbers(seed, rows * cols).iter().map(|x| T::Weight::of(x * scale).wide()).collect()
}

fn tolerance<T: Activation>() -> f64 {
    2.0 * T::ROUNDING + 1e-5
}

/// A launch with the deltas of sites after the other arguments.
pub fn launch(
    kernel: Launcher,
    grid: [usize; 3],
    (threads, floats, seed): (usize, usize, u64),
    arguments: &mut [cuda_shim::Argument],
    sites: &[&Lows],
) {
    let mut all: Vec<cuda_shim::Argument> = Vec::new();
    for argument in arguments {
        all.push(std::mem::replace(argument, cuda_shim::Argument::new(0u64)));
    }
    for site in sites {
        all.extend(site.raw().map(cuda_shim::Argument::new));
    }
    run(kernel, grid, threads, 4 * floats, seed, &mut all);
}

/// A norm, a product and its deltas in shares; joined by hand. Returns the shares of the first row.
fn norm_product<T: Activation>(
    kernels: Kernels,
    n: usize,
    (c, cols): (usize, usize),
    size: usize,
    trained: bool,
    seed: u64,
) -> Vec<f64> {
    let x: Vec<f64> = numbers(1, n * c).iter().map(|x| T::of(3.0 * x + 1.0).wide()).collect();
    let (gain, bias, w) = (rounded::<f16>(2, c), rounded::<f16>(3, c), weights::<T>(4, c, cols));
    let deltas = Lows::new(10, n, c, cols, true);
    let (splits, ranks) = (c.div_ceil(size), deltas.ranks());
    let (x_in, w_in) = (Device::<T>::of(&x), Device::<T::Weight>::of(&w));
    let (half, wide) =
        ([&gain, &bias].map(|v| Device::<f16>::of(v)), [&gain, &bias].map(|v| Device::<f32>::of(v)));
    let parameter = |at: usize| match trained {
        true => Parameter { frozen: std::ptr::null(), trained: wide[at].head() },
        false => Parameter { frozen: half[at].head(), trained: std::ptr::null() },
    };
    let (parts, xa) =
        (Device::<f32>::poisoned(splits * n * cols), Device::<f32>::poisoned(splits * n * ranks));
    let sizes = [n, c, cols, size].map(|size| size as i32);
    launch(
        kernels[0][usize::from(n > 1)],
        [cols.div_ceil(TILE) + 1, splits, 1],
        (256, n * size, seed),
        args![
            x_in.head(),
            parameter(0),
            parameter(1),
            1e-5f32,
            w_in.head(),
            parts.head(),
            xa.head(),
            sizes[0],
            sizes[1],
            sizes[2],
            sizes[3]
        ],
        &[&deltas],
    );
    let (normed, _) = layernorm::forward(&x, &gain, &bias, 1e-5);
    let sum =
        |parts: &[f64], count: usize, at: usize| (0..splits).map(|s| parts[s * count + at]).sum::<f64>();
    let plain = Lows(Vec::new(), c);
    let expected = product(&normed, &w, &vec![0.0; cols], &plain, n, cols);
    let parts = parts.wide();
    let found: Vec<f64> = (0..n * cols).map(|at| sum(&parts, n * cols, at)).collect();
    assert_close(&found, &expected, 1e-5, "shares of a product");
    for row in 0..n {
        for (q, expected) in deltas.xa(&normed, row).into_iter().enumerate().filter(|(_, xa)| !xa.is_nan()) {
            let found = sum(&xa.wide(), n * ranks, row * ranks + q);
            assert!(
                (found - expected).abs() <= 2e-5 * (1.0 + expected.abs()),
                "x A^T: {found} against {expected}"
            );
        }
    }
    (0..splits).flat_map(|split| parts[split * n * cols..][..cols].to_vec()).collect()
}

#[test]
fn norms_and_products_in_shares_match_their_twins() {
    for (n, seed) in [(1, 1), (3, 2), (8, 3)] {
        norm_product::<f32>(F32, n, (72, 88), 128, false, seed);
        norm_product::<f32>(F32, n, (301, 136), 128, true, seed);
        norm_product::<f16>(F16, n, (264, 72), 128, false, seed);
        norm_product::<bf16>(BF16, n, (264, 72), 256, true, seed);
    }
}

/// What a product has left: random shares, and what they add up to.
pub struct Left {
    parts: (Device<f32>, Vec<f64>),
    xa: Device<f32>,
    bias: (Device<f16>, Vec<f64>),
    splits: usize,
}

impl Left {
    /// Shares of `y (n, cols)`, and of x A^T of the deltas.
    pub fn new(seed: u64, x: &[f64], deltas: &Lows, n: usize, cols: usize) -> Self {
        let (splits, ranks) = (3, deltas.ranks());
        let parts = rounded::<f32>(seed, splits * n * cols);
        // The first share is all of x A^T, less what the others have.
        let mut xa = rounded::<f32>(seed + 1, splits * n * ranks);
        for row in 0..n {
            for (q, all) in deltas.xa(x, row).into_iter().enumerate() {
                let at = row * ranks + q;
                xa[at] = all - xa[n * ranks + at] - xa[2 * n * ranks + at];
            }
        }
        let bias = rounded::<f16>(seed + 2, cols);
        Self {
            parts: (Device::of(&parts), parts),
            xa: Device::of(&xa),
            bias: (Device::of(&bias), bias),
            splits,
        }
    }

    pub fn open(&self) -> Open {
        let (parts, xa, bias) = (self.parts.0.head(), self.xa.head(), self.bias.0.head());
        Open { parts, xa, bias, splits: self.splits as i32 }
    }

    /// The sum with bias and deltas, an element.
    pub fn value(&self, x: &[f64], deltas: &Lows, n: usize, cols: usize, at: usize) -> f64 {
        let sum: f64 = (0..self.splits).map(|split| self.parts.1[split * n * cols + at]).sum();
        sum + self.bias.1[at % cols] + deltas.add(x, at / cols, at % cols)
    }
}

/// A product that is added to a residual; with a function, after one that was left in shares. Returns the result.
fn added<T: Activation>(
    kernels: Kernels,
    n: usize,
    (inputs, cols): (usize, usize),
    function: Option<(i32, Function)>,
    any: bool,
    seed: u64,
) -> Vec<f64> {
    let (size, width) = (128, 40);
    let (w, residual, bias) =
        (weights::<T>(4, inputs, cols), rounded::<T>(5, n * cols), rounded::<f16>(6, cols));
    let deltas = Lows::new(20, n, inputs, cols, any);
    let (splits, ranks) = (inputs.div_ceil(size), deltas.ranks());
    let (w_in, r, b) = (Device::<T::Weight>::of(&w), Device::<T>::of(&residual), Device::<f16>::of(&bias));
    let y = Device::<T>::poisoned(n * cols);
    let parts = Device::<f32>::poisoned(splits * n * cols);
    let tiles = cols.div_ceil(TILE);
    let xa = Device::<f32>::poisoned(tiles * splits * n * ranks);
    let tickets = Device::<u32>::new(&vec![0; tiles]);
    let sizes = Sizes { n: n as i32, inputs: inputs as i32, cols: cols as i32, size: size as i32 };
    let joint = Joint { parts: parts.head(), xa: xa.head(), tickets: tickets.head() };
    let grid = [tiles, splits, 1];
    // The input of the product before the one that is left, for its deltas.
    let (before, first) = (Lows::new(30, n, width, inputs, any), numbers(7, n * width));
    let left = Left::new(40, &first, &before, n, inputs);
    let x: Vec<f64> = match function {
        None => rounded::<T>(8, n * inputs),
        Some((_, function)) => {
            let inner = |at| T::of(left.value(&first, &before, n, inputs, at)).wide();
            (0..n * inputs).map(|at| T::of(value(function, inner(at))).wide()).collect()
        }
    };
    let x_in = Device::<T>::of(&x);
    match function {
        None => launch(
            kernels[2][usize::from(n > 1)],
            grid,
            (256, n * (size + ranks), seed),
            args![x_in.head(), w_in.head(), r.head(), b.head(), y.head(), sizes, joint],
            &[&deltas],
        ),
        Some((kind, _)) => launch(
            kernels[3][usize::from(n > 1)],
            grid,
            (256, n * (size + ranks + before.ranks()), seed),
            args![kind, left.open(), w_in.head(), r.head(), b.head(), y.head(), sizes, joint],
            &[&before, &deltas],
        ),
    }
    assert!(tickets.get().iter().all(|ticket| *ticket == 0), "a ticket is left");
    let sum = product(&x, &w, &bias, &deltas, n, cols);
    let expected: Vec<f64> = sum.iter().zip(&residual).map(|(a, b)| a + b).collect();
    // Inputs that fall on the other side of a border between two values of the type.
    let rounded = if function.is_some() { 2.0 * T::ROUNDING } else { 0.0 };
    assert_close(&y.wide(), &expected, tolerance::<T>() + rounded, "a product and its residual");
    y.wide()
}

#[test]
fn products_with_residuals_match_their_twins() {
    let functions = [
        (0, Function::GeluTanh),
        (1, Function::Gelu),
        (2, Function::Relu),
        (3, Function::Silu),
        (4, Function::Tanh),
    ];
    for (n, seed) in [(1, 1), (3, 2), (8, 3)] {
        added::<f32>(F32, n, (300, 136), None, true, seed);
        added::<f16>(F16, n, (72, 88), None, true, seed);
        added::<bf16>(BF16, n, (264, 72), None, false, seed);
        added::<f16>(F16, n, (264, 72), Some(functions[0]), true, seed);
        added::<bf16>(BF16, n, (136, 72), Some(functions[0]), true, seed);
    }
    for function in functions {
        added::<f32>(F32, 2, (136, 72), Some(function), true, 4);
    }
}

#[test]
fn blocks_in_any_order_give_the_same_bits() {
    for function in [None, Some((0, Function::GeluTanh))] {
        let [first, others @ ..] =
            [1, 2, 3, 4].map(|seed| added::<f32>(F32, 3, (600, 136), function, true, seed));
        assert!(others.iter().all(|other| *other == first));
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let shares = |n| norm_product::<f32>(F32, n, (301, 136), 128, false, 1);
    let whole = |n| added::<f32>(F32, n, (600, 136), None, false, 1)[..136].to_vec();
    let (alone, product) = (shares(1), whole(1));
    for n in [2, 8] {
        assert!(shares(n) == alone && whole(n) == product, "a row among {n}");
    }
}
