//! Checks the results of the CPU kernels, then compares their speed with the peak of this machine.
//!
//!     cargo run --release --example kernel_lab [-- ROUNDS [NAME]]
//!
//! Every version of a frozen product is compared with sums in f64 first and then timed alternately with the others, so
//! that a busy machine slows all of them. A line gives the best of ROUNDS [default: 7] in GFLOP/s or GB/s, because other
//! work on the machine can only slow it, and its share of the peak, the best of the same rounds. NAME keeps only the
//! lines that contain it. Products of BF16 pairs are measured on CPUs where `--precision bf16` uses them.

use std::{env, hint::black_box, process::ExitCode, time::Instant};

use engraft::{
    device::{
        View, ViewMut,
        cpu::{Level, bf16, level, limit_level, on_pool},
    },
    kernels::{
        activation::{self, Activation},
        attention::{self, Seen, Shape},
        layernorm,
        matmul::{self, Arithmetic, InitialValue, Matrix},
        nf4, q8,
    },
};
use half::f16;
use rayon::prelude::*;

/// A measurement: its number of operations or bytes, and the code to time.
struct Line<'a> {
    name: String,
    work: f64,
    roof: Roof,
    run: Box<dyn FnMut() + Send + 'a>,
}

/// The peak that a measurement is compared with.
#[derive(Clone, Copy, PartialEq)]
enum Roof {
    /// Bytes read from memory.
    Bytes,
    /// Fused multiply-adds of a level.
    Operations(Level),
    /// Products of BF16 pairs.
    Pairs,
}

fn main() -> ExitCode {
    let mut arguments = env::args().skip(1);
    let rounds: usize = arguments.next().and_then(|rounds| rounds.parse().ok()).unwrap_or(7).max(1);
    let only = arguments.next().unwrap_or_default();
    on_pool(|| lab(rounds, &only))
}

fn lab(rounds: usize, only: &str) -> ExitCode {
    let best = level();
    println!("{} threads, level {best:?}; best of {rounds} rounds", rayon::current_num_threads());
    let mut right = true;
    let products = [
        ("c_attn 768 -> 2304", 2048, 768, 2304),
        ("mlp 768 -> 3072", 2048, 768, 3072),
        ("mlp 3072 -> 768", 2048, 3072, 768),
        ("head 768 -> 50257", 512, 768, 50257),
        ("XL 1600 -> 6400", 1024, 1600, 6400),
        ("prompt 768 -> 2304", 32, 768, 2304),
        ("XL decode 1600 -> 6400", 1, 1600, 6400),
        ("XL decode 6400 -> 1600", 1, 6400, 1600),
        ("XL decode 8 rows 1600 -> 6400", 8, 1600, 6400),
        ("XL decode 32 rows 1600 -> 6400", 32, 1600, 6400),
        ("decode 768 -> 2304", 1, 768, 2304),
        ("decode 3072 -> 768", 1, 3072, 768),
        ("decode 768 -> 50257", 1, 768, 50257),
        ("decode 8 rows 768 -> 3072", 8, 768, 3072),
        ("decode 32 rows 768 -> 3072", 32, 768, 3072),
        ("decode 32 rows 768 -> 50257", 32, 768, 50257),
    ];
    for (name, n, inputs, outputs) in products {
        // The head keeps its matrix as (vocabulary, width), a layer as (inputs, outputs).
        let layouts: &[bool] = if outputs > 50_000 { &[true] } else { &[false, true] };
        for &transposed in layouts {
            right &= product(&Product { name, only, n, inputs, outputs, transposed }, best, rounds);
        }
    }
    for level in Level::ALL.into_iter().filter(|&level| level <= best && level.is_there()) {
        limit_level(level);
        // Plain loops are compared with the peak of the best level, because the compiler may use it.
        others(only, level, if level == Level::Plain { best } else { level }, rounds);
    }
    if right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// `n` repeatable values in -1 .. 1.
fn numbers(n: usize) -> Vec<f32> {
    (0..n as u64)
        .map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 / (1 << 23) as f32 - 1.0)
        .collect()
}

/// Weights in rows of `cols` as codes with their scales.
fn coded(weights: &[f16], cols: usize) -> (Vec<i8>, Vec<f16>) {
    let (mut codes, mut scales) = (vec![0; weights.len()], Vec::new());
    for (row, codes) in weights.chunks(cols).zip(codes.chunks_mut(cols)) {
        let row: Vec<f32> = row.iter().map(|half| half.to_f32()).collect();
        let blocks = row.chunks(q8::BLOCK).zip(codes.chunks_mut(q8::BLOCK));
        scales.extend(blocks.map(|(values, codes)| q8::quantise(values, codes)));
    }
    (codes, scales)
}

/// A matrix `(rows, cols)` in strips of `width` columns, without those that fill no strip.
fn strips<T: Copy>(values: &[T], rows: usize, cols: usize, width: usize) -> Vec<T> {
    let strips = (0..cols / width).flat_map(|strip| (0..rows).map(move |row| (strip, row)));
    let cols = values.len() / rows.max(1);
    strips.flat_map(|(strip, row)| values[row * cols + strip * width..][..width].iter().copied()).collect()
}

/// A frozen product to measure.
struct Product<'a> {
    /// Name of the layer.
    name: &'a str,
    /// Lines whose name does not contain this text are left out.
    only: &'a str,
    /// Rows of x.
    n: usize,
    inputs: usize,
    outputs: usize,
    /// Whether x is multiplied with the transpose, as in a backward.
    transposed: bool,
}

/// Measures a frozen product at all levels, with weights of FP16, 8 and 4 bits. Returns whether all results are right.
fn product(layer: &Product, best: Level, rounds: usize) -> bool {
    let &Product { name, only, n, inputs, outputs, transposed } = layer;
    let weights: Vec<f16> = numbers(inputs * outputs).into_iter().map(f16::from_f32).collect();
    let x = numbers(n * inputs);
    let (rows, cols) = if transposed { (outputs, inputs) } else { (inputs, outputs) };
    let halves = Matrix::f16(weights.as_slice().into(), rows, cols);
    let (codes, scales) = coded(&weights, cols);
    let codes = Matrix::codes(codes.as_slice().into(), scales.as_slice().into(), rows, cols);
    let wide: Vec<f32> = weights.iter().map(|half| half.to_f32()).collect();
    let four = nf4::quantise(&wide, nf4::Sizes { rows, cols });
    let four = Matrix::nf4(four.view());
    let call = |(at, matrix): (Level, Matrix), y: &mut [f32]| {
        limit_level(at);
        let (x, y): (View, ViewMut) = (x.as_slice().into(), y.into());
        if transposed {
            matmul::frozen_nt(x, matrix, InitialValue::Zero, y, n);
        } else {
            matmul::frozen_nn(x, matrix, InitialValue::Zero, y, n);
        }
    };
    let levels: Vec<Level> =
        Level::ALL.into_iter().filter(|&level| level <= best && level.is_there()).collect();
    let (halves_moved, codes_moved) =
        (strips(&weights, rows, cols, 32), strips(codes.data.host::<i8>(), rows, cols, 32));
    let scales_moved = strips(&scales, rows, cols / 32, 1);
    let layout = matmul::Layout::Strips;
    let halves_moved = Matrix { layout, ..Matrix::f16(halves_moved[..].into(), rows, cols) };
    let codes_moved =
        Matrix { layout, ..Matrix::codes(codes_moved[..].into(), scales_moved[..].into(), rows, cols) };
    let mut versions: Vec<(Level, Matrix, &str)> =
        levels.iter().flat_map(|&at| [(at, halves, ""), (at, codes, ", q8"), (at, four, ", nf4")]).collect();
    if cols.is_multiple_of(32) {
        let at_all = levels.iter().filter(|&&at| at != Level::Plain);
        versions.extend(
            at_all.flat_map(|&at| [(at, halves_moved, ", strips"), (at, codes_moved, ", q8 strips")]),
        );
    }
    limit_level(best);
    if bf16() && n > 8 {
        let pairs = |matrix| Matrix { arithmetic: Arithmetic::Bf16, ..matrix };
        let all = [(halves, ", bf16"), (codes, ", q8, bf16"), (four, ", nf4, bf16")];
        versions.extend(all.map(|(matrix, kept)| (best, pairs(matrix), kept)));
    }
    let layout = if transposed { "x W^T" } else { "x W" };
    let name = |at: Level, kept: &str| format!("{name} x {n}, {layout}, {at:?}{kept}");
    versions.retain(|&(at, _, kept)| name(at, kept).contains(only));
    let mut right = true;
    let mut y = vec![0f32; n * outputs];
    for &(at, matrix, kept) in &versions {
        y.fill(f32::NAN);
        call((at, matrix), &mut y);
        let values = matrix.to_floats();
        let weight =
            |i: usize, j: usize| if transposed { values[j * inputs + i] } else { values[i * outputs + j] };
        // A few hundred elements, the last ones among them.
        let wrong = (0..y.len()).rev().step_by(y.len() / 300 + 1).find(|at| {
            let (row, j) = (at / outputs, at % outputs);
            let exact: f64 =
                (0..inputs).map(|i| f64::from(x[row * inputs + i]) * f64::from(weight(i, j))).sum();
            // Sums of `inputs` products below 1; two factors rounded to 8 bits are off by 0.0009 (standard deviation).
            let bound = match matrix.arithmetic {
                Arithmetic::F32 => 1e-6 * inputs as f64,
                Arithmetic::Bf16 => 0.005 * (inputs as f64).sqrt(),
            };
            let error = (f64::from(y[*at]) - exact).abs();
            error.is_nan() || error > bound
        });
        if let Some(element) = wrong {
            println!("{}: element {element} is WRONG", name(at, kept));
            right = false;
        }
    }
    let few = n <= 8;
    let work = |matrix: &Matrix| match few {
        true => {
            let scales = matrix.scales.into_iter().flat_map(|scales| scales.tensors());
            (matrix.data.size() + scales.map(|scales| scales.size()).sum::<usize>()) as f64
        }
        false => 2.0 * (n * inputs * outputs) as f64,
    };
    let roof = |at: Level, matrix: &Matrix| match matrix.arithmetic {
        _ if few => Roof::Bytes,
        Arithmetic::Bf16 => Roof::Pairs,
        // `gemm` uses the best level.
        Arithmetic::F32 => Roof::Operations(if at == Level::Plain { best } else { at }),
    };
    let mut y: Vec<Vec<f32>> = versions.iter().map(|_| vec![0f32; n * outputs]).collect();
    let call = &call;
    let lines = versions
        .iter()
        .zip(&mut y)
        .map(|(&(at, matrix, kept), y)| Line {
            name: name(at, kept),
            work: work(&matrix),
            roof: roof(at, &matrix),
            run: Box::new(move || call((at, matrix), y)),
        })
        .collect();
    time(lines, rounds);
    right
}

/// The other ops of a training step, at the sizes of gpt2 with 4 x 512 tokens.
fn others(only: &str, at: Level, level: Level, rounds: usize) {
    let (b, t, h, d) = (4, 512, 12, 64);
    let (n, c) = (b * t, h * d);
    let qkv = numbers(3 * n * c);
    let starts = vec![0u32; n];
    let (mut out, mut lse) = (vec![0f32; n * c], vec![0f32; b * h * t]);
    let shape =
        Shape { batch: b, queries: t, past: 0, heads: h, width: d, prefix: 0, arithmetic: Arithmetic::F32 };
    let scale = 0.125;
    let packed = attention::packed(qkv.as_slice().into(), t, c);
    let starts: View = starts.as_slice().into();
    let mut arithmetics = vec![(Arithmetic::F32, "", Roof::Operations(level))];
    if bf16() {
        arithmetics.push((Arithmetic::Bf16, ", bf16", Roof::Pairs));
    }
    attention::forward(packed, None, starts, scale, shape, (&mut out[..]).into(), (&mut lse[..]).into());
    let (seen_out, seen_lse, dout) = (out.clone(), lse.clone(), numbers(n * c));
    let seen = Seen {
        qkv: qkv.as_slice().into(),
        prefix: None,
        starts,
        out: seen_out.as_slice().into(),
        lse: seen_lse.as_slice().into(),
    };
    let mut written: Vec<_> =
        arithmetics.iter().map(|_| (out.clone(), lse.clone(), vec![0f32; 3 * n * c])).collect();
    let wide = numbers(4 * n * c);
    let mut activated = vec![0f32; 4 * n * c];
    let x = numbers(n * c);
    let ones = vec![f16::ONE; c];
    let (mut normed, mut stats) = (vec![0f32; n * c], vec![0f32; 2 * n]);
    let mut lines = Vec::new();
    // Half of the (t, t) products are needed: 2 forward and 5 backward, of 2 d operations each.
    let half = (b * h * t * t / 2 * 2 * d) as f64;
    let dout = &dout;
    for ((arithmetic, kept, roof), (out, lse, d_qkv)) in arithmetics.into_iter().zip(&mut written) {
        let shape = Shape { arithmetic, ..shape };
        lines.push(Line {
            name: format!("attention forward 4 x 512, {at:?}{kept}"),
            work: 2.0 * half,
            roof,
            run: Box::new(move || {
                let (out, lse) = ((&mut out[..]).into(), (&mut lse[..]).into());
                attention::forward(packed, None, starts, scale, shape, out, lse);
            }),
        });
        lines.push(Line {
            name: format!("attention backward 4 x 512, {at:?}{kept}"),
            work: 5.0 * half,
            roof,
            run: Box::new(move || {
                let (d_qkv, nothing): (ViewMut, &mut [f32]) = ((&mut d_qkv[..]).into(), &mut []);
                attention::backward(dout.as_slice().into(), seen, scale, shape, d_qkv, nothing.into());
            }),
        });
    }
    lines.push(Line {
        name: format!("GELU 2048 x 3072, {at:?}"),
        work: 8.0 * wide.len() as f64,
        roof: Roof::Bytes,
        run: Box::new(|| {
            activation::forward(Activation::GeluTanh, wide.as_slice().into(), (&mut activated[..]).into());
        }),
    });
    lines.push(Line {
        name: format!("layer norm 2048 x 768, {at:?}"),
        work: 8.0 * x.len() as f64,
        roof: Roof::Bytes,
        run: Box::new(|| {
            let ones: View = ones.as_slice().into();
            let norm = layernorm::Norm { gain: ones, bias: ones, epsilon: 1e-5 };
            layernorm::forward(x.as_slice().into(), norm, (&mut normed[..]).into(), (&mut stats[..]).into());
        }),
    });
    lines.retain(|line| line.name.contains(only));
    time(lines, rounds);
}

/// Runs all lines and the roofs alternately, and prints the best of each.
fn time(mut lines: Vec<Line>, rounds: usize) {
    let mut seconds = vec![Vec::new(); lines.len()];
    let all = [Roof::Bytes, Roof::Pairs].into_iter().chain(Level::ALL.map(Roof::Operations));
    let mut roofs: Vec<(Roof, Vec<f64>)> = all
        .filter(|&roof| lines.iter().any(|line| line.roof == roof))
        .map(|roof| (roof, Vec::new()))
        .collect();
    for _ in 0..rounds {
        for (roof, rates) in &mut roofs {
            rates.push(if *roof == Roof::Bytes { bytes_roof() } else { operations_roof(*roof) });
        }
        for (line, seconds) in lines.iter_mut().zip(&mut seconds) {
            (line.run)();
            // Short ones are repeated for about 20 ms.
            let start = Instant::now();
            let mut count = 0;
            while count == 0 || start.elapsed().as_secs_f64() < 0.02 {
                (line.run)();
                count += 1;
            }
            seconds.push(start.elapsed().as_secs_f64() / f64::from(count));
        }
    }
    for (line, seconds) in lines.iter().zip(&seconds) {
        let rate = line.work / seconds.iter().copied().fold(f64::INFINITY, f64::min);
        let rates = roofs.iter().find(|(roof, _)| *roof == line.roof).map_or(&[][..], |(_, rates)| rates);
        let roof = rates.iter().copied().fold(f64::NAN, f64::max);
        let unit = if line.roof == Roof::Bytes { "GB/s" } else { "GFLOP/s" };
        println!(
            "{:44} {:8.1} {unit:7} {:4.0}% of {:.0}",
            line.name,
            rate / 1e9,
            100.0 * rate / roof,
            roof / 1e9
        );
    }
}

/// Peak operations per second of all threads, for multiply-adds or products of pairs, with sums that stay in registers.
fn operations_roof(roof: Roof) -> f64 {
    const STEPS: usize = 1 << 21;
    let threads = rayon::current_num_threads();
    let start = Instant::now();
    let operations: usize =
        (0..threads).into_par_iter().with_max_len(1).map(|_| 2 * STEPS * chains(roof, STEPS)).sum();
    operations as f64 / start.elapsed().as_secs_f64()
}

/// Runs `steps` steps of independent chains, more than two units with a latency of 4 need, and returns the multiply-adds
/// of a step.
fn chains(roof: Roof, steps: usize) -> usize {
    // Variables, because an array of vectors is kept in memory.
    macro_rules! chains {
        ($steps:expr, $zero:expr, $fma:expr, $lanes:literal: $($sum:ident)*) => {{
            $(let mut $sum = $zero;)*
            for _ in 0..$steps {
                $($sum = $fma($sum);)*
            }
            $(black_box($sum);)*
            $lanes * [$(stringify!($sum)),*].len()
        }};
    }
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::*;
        #[target_feature(enable = "avx512f")]
        fn avx512(steps: usize) -> usize {
            let factor = _mm512_set1_ps(black_box(0.5));
            chains!(steps, _mm512_setzero_ps(), |sum| _mm512_fmadd_ps(sum, factor, factor), 16: a b c d e f g h i j k l m n o p)
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2(steps: usize) -> usize {
            let factor = _mm256_set1_ps(black_box(0.5));
            chains!(steps, _mm256_setzero_ps(), |sum| _mm256_fmadd_ps(sum, factor, factor), 8: a b c d e f g h i j k l)
        }
        #[target_feature(enable = "avx512f,avx512bf16")]
        fn pairs(steps: usize) -> usize {
            // SAFETY: both are 64 bytes in which every pattern means something; these are pairs of 0.5.
            let factor: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi32(black_box(0x3f00_3f00))) };
            chains!(steps, _mm512_setzero_ps(), |sum| _mm512_dpbf16_ps(sum, factor, factor), 32: a b c d e f g h i j k l m n o p)
        }
        match roof {
            // SAFETY: levels are those that the CPU has.
            Roof::Operations(Level::Avx512) => return unsafe { avx512(steps) },
            // SAFETY: as above.
            Roof::Operations(Level::Avx2) => return unsafe { avx2(steps) },
            // SAFETY: the CPU has the instructions where it makes products of pairs.
            Roof::Pairs => return unsafe { pairs(steps) },
            _ => {}
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        use std::arch::aarch64::*;
        #[target_feature(enable = "neon")]
        fn neon(steps: usize) -> usize {
            let factor = vdupq_n_f32(black_box(0.5));
            chains!(steps, vdupq_n_f32(0.0), |sum| vfmaq_f32(factor, sum, factor), 4: a b c d e f g h i j k l m n o p)
        }
        if roof == Roof::Operations(Level::Neon) {
            // SAFETY: all CPUs of the architecture have it.
            return unsafe { neon(steps) };
        }
    }
    let _ = roof;
    let factor = black_box(0.5f32);
    chains!(steps, 0f32, |sum: f32| sum.mul_add(factor, factor), 1: a b c d e f g h)
}

/// Bytes per second that all threads read from 256 MiB.
fn bytes_roof() -> f64 {
    use std::sync::OnceLock;
    static MEMORY: OnceLock<Vec<u64>> = OnceLock::new();
    let memory = MEMORY.get_or_init(|| vec![1; 32 << 20]);
    let start = Instant::now();
    let piece = memory.len() / (4 * rayon::current_num_threads());
    let sum: u64 = memory
        .par_chunks(piece)
        .map(|piece| {
            // Four streams per thread: one stream does not fill all outstanding cache misses of a core.
            let mut sums = [0u64; 8];
            let mut streams = piece.chunks_exact(piece.len() / 4).map(|stream| stream.as_chunks::<8>().0);
            if let (Some(a), Some(b), Some(c), Some(d)) =
                (streams.next(), streams.next(), streams.next(), streams.next())
            {
                for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
                    for (i, sum) in sums.iter_mut().enumerate() {
                        *sum = sum.wrapping_add(a[i] ^ b[i] ^ c[i] ^ d[i]);
                    }
                }
            }
            sums.into_iter().fold(0, u64::wrapping_add)
        })
        .sum();
    black_box(sum);
    (8 * memory.len()) as f64 / start.elapsed().as_secs_f64()
}
