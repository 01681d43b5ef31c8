//! Measuring the rates: medians of a few calls of each kernel, within a budget of time.

use std::{
    fs::File,
    hint::black_box,
    io::{self, Write},
    path::Path,
    time::Instant,
};

use half::f16;
use memmap2::{Mmap, MmapMut};

use super::{ProductRate, RatePair, RatePoint, Rates, attention_flops};
use crate::{
    device::{View, ViewMut},
    kernels::{
        activation::{self, Activation},
        adamw::{self, Update},
        adapted_linear::{self, AdaptedLinear, Delta, Dropout, Layer},
        attention::{self, Seen, Shape},
        layernorm::{self, Norm},
        matmul::{self, Arithmetic, InitialValue, Matrix},
    },
};

/// A measurement is not repeated once this many seconds have gone by, and no product is begun that should
/// take much longer than this.
const BUDGET: f64 = 0.06;
/// Most calls of a measurement.
const REPEATS: usize = 5;
const PAGE: usize = 4096;

/// Sizes that the kernels are measured with.
pub struct Sizes {
    /// Rows of a product: few and many.
    pub rows: (usize, usize),
    /// Inputs and outputs of a linear layer.
    pub layer: (usize, usize),
    /// Rows and vocabulary of the head.
    pub head: (usize, usize),
    /// Queries, heads and width of attention.
    pub attention: (usize, usize, usize),
    /// Number of elements of pointwise ops.
    pub elements: usize,
    /// Bytes of the mapped file.
    pub file: usize,
}

impl Sizes {
    /// Those of GPT-2 medium, with a third of its vocabulary.
    pub const REAL: Self = Self {
        rows: (128, 1024),
        layer: (1024, 4096),
        head: (256, 16_384),
        attention: (512, 16, 64),
        elements: 2 << 20,
        file: 64 << 20,
    };
}

/// Median seconds of a call.
fn seconds(mut call: impl FnMut()) -> f64 {
    let begun = Instant::now();
    let mut times = Vec::with_capacity(REPEATS);
    loop {
        let start = Instant::now();
        call();
        // A clock may be too coarse for tiny sizes.
        let last = start.elapsed().as_secs_f64().max(1e-9);
        times.push(last);
        if times.len() == REPEATS || begun.elapsed().as_secs_f64() + last > BUDGET {
            break;
        }
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Values in -1 .. 1 that repeat after a prime number of elements.
fn values(len: usize) -> Vec<f32> {
    let pattern: Vec<f32> = (0..1021).map(|i| ((i * 389) % 1021) as f32 / 510.5 - 1.0).collect();
    pattern.iter().copied().cycle().take(len).collect()
}

fn halves(len: usize) -> Vec<f16> {
    let pattern: Vec<f16> = values(1021).into_iter().map(f16::from_f32).collect();
    pattern.iter().copied().cycle().take(len).collect()
}

fn view(values: &[f32]) -> View<'_> {
    values.into()
}

fn view_mut(values: &mut [f32]) -> ViewMut<'_> {
    values.into()
}

pub fn all(sizes: &Sizes, folder: Option<&Path>, arithmetic: Arithmetic) -> Rates {
    let (product_forward, product_backward, head) = products(sizes, arithmetic);
    let (layernorm, activation) = pointwise(sizes);
    Rates {
        product_forward,
        product_backward,
        thin: thin(sizes),
        attention: attention(sizes, arithmetic),
        head,
        layernorm,
        activation,
        adamw: adamw(sizes.elements),
        reading: reading(sizes.file, folder),
    }
}

type FrozenProduct = fn(View, Matrix, InitialValue, ViewMut, usize);

/// Forward, backward and head share their operands: 64 MiB at the real sizes.
fn products(sizes: &Sizes, arithmetic: Arithmetic) -> (ProductRate, ProductRate, f64) {
    let (inputs, outputs) = sizes.layer;
    let (head_rows, vocabulary) = sizes.head;
    let weights = halves((inputs * outputs).max(vocabulary * inputs));
    let x = values(sizes.rows.1 * inputs.max(outputs));
    let mut y = values((sizes.rows.1 * inputs.max(outputs)).max(head_rows * vocabulary));
    let matrix = |rows: usize, cols: usize| {
        let halves = Matrix::f16(View::from(&weights[..rows * cols]), rows, cols);
        Matrix { arithmetic, ..halves }
    };
    let (layer, head) = (matrix(inputs, outputs), matrix(vocabulary, inputs));

    let mut call = |forward: bool, w: Matrix, rows: usize| {
        let (product, across): (FrozenProduct, _) = if forward {
            (matmul::frozen_nn, (w.rows, w.cols))
        } else {
            (matmul::frozen_nt, (w.cols, w.rows))
        };
        let (from, to) = (rows * across.0, rows * across.1);
        let time = seconds(|| product(view(&x[..from]), w, InitialValue::Zero, view_mut(&mut y[..to]), rows));
        RatePoint { rows, flops: 2.0 * (rows * w.rows * w.cols) as f64 / time }
    };
    // Starts the threads and their scratch.
    for forward in [true, false] {
        call(forward, layer, sizes.rows.0);
    }
    let mut product = |forward: bool| {
        let few = call(forward, layer, sizes.rows.0);
        let rows = affordable(sizes.rows.1, 2 * sizes.rows.0, inputs * outputs, few.flops);
        ProductRate { few, many: call(forward, layer, rows) }
    };
    let (forward, backward) = (product(true), product(false));
    let rows = affordable(head_rows, 1, vocabulary * inputs, backward.many.flops);
    (forward, backward, call(false, head, rows).flops)
}

/// `rows`, halved down to `least` while a product of them would take far longer than the budget.
fn affordable(rows: usize, least: usize, weights: usize, flops: f64) -> usize {
    let mut rows = rows;
    while rows / 2 >= least && 2.0 * (rows * weights) as f64 / flops > 4.0 * BUDGET {
        rows /= 2;
    }
    rows
}

/// `x A^T` of a delta, in FLOP/s.
fn thin(sizes: &Sizes) -> f64 {
    const RANK: usize = 16;
    let (n, inputs) = (sizes.rows.1, sizes.layer.0);
    let (x, a, mut xa) = (values(n * inputs), values(RANK * inputs), values(n * RANK));
    let delta = Delta { rank: RANK, ..Delta::default() };
    let nothing = View::from(&[][..] as &[f16]);
    let layer = Layer { weight: Matrix::f16(nothing, inputs, 0), bias: nothing };
    let linear = AdaptedLinear::new(layer, std::slice::from_ref(&delta), view(&a), Dropout::NONE);
    let time = seconds(|| adapted_linear::xa(linear, view(&x), view_mut(&mut xa), n));
    2.0 * (n * inputs * RANK) as f64 / time
}

fn attention(sizes: &Sizes, arithmetic: Arithmetic) -> RatePair {
    let (queries, heads, width) = sizes.attention;
    let shape = Shape { batch: 1, queries, past: 0, heads, width, prefix: 0, arithmetic };
    let c = heads * width;
    let scale = 1.0 / (width as f32).sqrt();
    let qkv = values(queries * 3 * c);
    let starts = vec![0u32; queries];
    let (mut out, mut lse) = (values(queries * c), values(heads * queries));
    let parts = || attention::packed(view(&qkv), queries, c);
    let starts = || View::from(&starts[..]);
    let forward = seconds(|| {
        let (out, lse) = (view_mut(&mut out), view_mut(&mut lse));
        attention::forward(parts(), None, starts(), scale, shape, out, lse);
    });
    let (dout, mut d_qkv) = (values(queries * c), values(queries * 3 * c));
    let seen = Seen { qkv: view(&qkv), prefix: None, starts: starts(), out: view(&out), lse: view(&lse) };
    let backward = seconds(|| {
        attention::backward(view(&dout), seen, scale, shape, view_mut(&mut d_qkv), view_mut(&mut []));
    });
    let flops = attention_flops(heads, width, queries * (queries + 1) / 2);
    RatePair { forward: flops.0 / forward, backward: flops.1 / backward }
}

/// Layer norm and activation, in bytes/s.
fn pointwise(sizes: &Sizes) -> (RatePair, RatePair) {
    let c = sizes.layer.0.min(sizes.elements);
    let rows = sizes.elements / c;
    let elements = rows * c;
    let x = values(elements);
    let (mut y, mut dx, mut stats) = (values(elements), values(elements), values(2 * rows));
    let (gain, bias) = (halves(c), halves(c));
    let norm = Norm { gain: View::from(&gain[..]), bias: View::from(&bias[..]), epsilon: 1e-5 };
    let bytes = |each: usize, seconds: f64| (each * elements) as f64 / seconds;

    let forward = seconds(|| layernorm::forward(view(&x), norm, view_mut(&mut y), view_mut(&mut stats)));
    let backward = seconds(|| {
        // The gradient is reset before it can grow from repeat to repeat; a row costs nothing.
        dx[..c].fill(0.0);
        layernorm::backward(view(&y), view(&x), view(&stats), norm, view_mut(&mut dx));
    });
    let layernorm = RatePair { forward: bytes(8, forward), backward: bytes(16, backward) };
    let kind = Activation::GeluTanh;
    let forward = seconds(|| activation::forward(kind, view(&x), view_mut(&mut y)));
    let backward = seconds(|| activation::backward(kind, view(&x), view_mut(&mut y)));
    (layernorm, RatePair { forward: bytes(8, forward), backward: bytes(12, backward) })
}

/// Elements/s of an AdamW update with FP32 moments.
fn adamw(elements: usize) -> f64 {
    let (mut values, gradient) = (values(elements), values(elements));
    let (mut first, mut second) = (vec![1e-3; elements], vec![1e-3; elements]);
    let update =
        Update { step: 100, lr: 1e-3, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.01, factor: 1.0 };
    let time = seconds(|| {
        let moments = (view_mut(&mut first), view_mut(&mut second));
        adamw::update(view_mut(&mut values), view(&gradient), moments.0, moments.1, update);
    });
    elements as f64 / time
}

/// Bytes/s of touching each page of a fresh mapping. If no temporary file can be written, of memory
/// without a file: the system's work for a page is alike.
fn reading(bytes: usize, folder: Option<&Path>) -> f64 {
    let file = temporary(bytes, folder).ok();
    let time = seconds(|| {
        let touched = match &file {
            // SAFETY: the file has no name, so no other process can change it.
            Some(file) => unsafe { Mmap::map(file) }.map(|pages| touch(&pages)),
            None => MmapMut::map_anon(bytes.max(1)).map(|pages| touch(&pages)),
        };
        black_box(touched.unwrap_or(0));
    });
    bytes as f64 / time
}

/// A file without a name, in `folder` if that can be written; its pages are in memory then.
fn temporary(bytes: usize, folder: Option<&Path>) -> io::Result<File> {
    let here = folder.and_then(|folder| tempfile::tempfile_in(folder).ok());
    let mut file = here.map_or_else(tempfile::tempfile, Ok)?;
    let piece = [0x55; 16 * PAGE];
    for start in (0..bytes).step_by(piece.len()) {
        file.write_all(&piece[..piece.len().min(bytes - start)])?;
    }
    Ok(file)
}

fn touch(pages: &[u8]) -> u64 {
    pages.iter().step_by(PAGE).map(|&byte| u64::from(byte)).sum()
}
