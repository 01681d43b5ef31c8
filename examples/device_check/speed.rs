//! Speeds of the device that trainings do not show separately: products, attention, updates, single tokens.
//!
//! Each is the best of five series of repeats; the host waits for the device before and after a series. Causal attention is
//! counted as `calibrate::attention_flops` does.

use std::{path::Path, sync::Arc, time::Instant};

use engraft::{
    device::{
        Buffer,
        DType::{self, BF16, F16, F32},
        Device,
        arena::{Arenas, Placement},
    },
    error::Result,
    kernels::{
        attention::{self, Seen, Shape, packed},
        matmul::{self, Arithmetic, InitialValue, Matrix},
    },
    model::{AdapterBindings, Base, BaseSource, Decoder},
    optim::{AdamWOptions, Optimizer, OptimizerKind},
    plan::calibrate::attention_flops,
};
use engraft_adapters::{AdapterSet, LoraSpec, Segment, Targets};
use engraft_util::rng;
use half::{bf16, f16};

use crate::{
    Report,
    setup::{Size, load, start},
};

/// One measured figure.
pub struct Speed {
    /// Name of the measured work.
    pub what: String,
    /// The value, in `unit`.
    pub value: f64,
    /// Unit, such as `GFLOP/s`.
    pub unit: &'static str,
}

/// How large things are: enough to fill a device, or little enough for an interpreter.
struct Scale {
    repeats: usize,
    rows: usize,
    matrix: (usize, usize),
    attention: (usize, usize, usize),
    trainables: usize,
    tokens: usize,
    /// Samples that are made together.
    samples: usize,
}

const LARGE: Scale = Scale {
    repeats: 20,
    rows: 8192,
    matrix: (4096, 4096),
    attention: (32, 16, 1024),
    trainables: 10_000_000,
    tokens: 256,
    samples: 32,
};
const SMALL: Scale = Scale {
    repeats: 1,
    rows: 9,
    matrix: (32, 64),
    attention: (1, 2, 70),
    trainables: 5000,
    tokens: 4,
    samples: 3,
};

/// All figures; those of tokens are of the base in `folder`, or of the one that checks train on.
pub fn measure(
    device: Device,
    types: &[DType],
    size: Size,
    folder: Option<&Path>,
    report: &mut Report,
) -> Result<()> {
    let scale = if size.is_large() { LARGE } else { SMALL };
    for &dtype in types {
        report.time("products", products(device, dtype, &scale));
    }
    for &dtype in types.iter().filter(|dtype| **dtype != F32) {
        report.time("attention", attentions(device, dtype, &scale));
    }
    report.time("updates", updates(device, &scale));
    report.time("tokens", tokens(device, types[0], size, folder, &scale));
    Ok(())
}

/// Seconds of `work`, which runs once before for warm-up.
fn seconds(device: Device, repeats: usize, mut work: impl FnMut()) -> Result<f64> {
    work();
    device.check()?;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        (0..repeats).for_each(|_| work());
        device.check()?;
        best = best.min(start.elapsed().as_secs_f64() / repeats as f64);
    }
    Ok(best)
}

/// `len` numbers around zero in a type; a few of them are repeated.
fn numbers(device: Device, dtype: DType, len: usize) -> Result<Buffer> {
    let few: Vec<f32> = (0..4099).map(|at| rng::normal(1, at)).collect();
    let all = few.iter().copied().cycle().take(len);
    match dtype {
        F16 => Buffer::on(device, &all.map(f16::from_f32).collect::<Vec<_>>()),
        BF16 => Buffer::on(device, &all.map(bf16::from_f32).collect::<Vec<_>>()),
        _ => Buffer::on(device, &all.collect::<Vec<_>>()),
    }
}

fn zeros(device: Device, dtype: DType, len: usize) -> Result<Buffer> {
    let cut = |arena: &mut engraft::device::arena::Arena| arena.take("zeros", dtype, &[len]);
    Arenas::real(None).on(device).build("speed", Placement::Memory, cut)
}

fn products(device: Device, dtype: DType, scale: &Scale) -> Result<Vec<Speed>> {
    let (n, (rows, cols)) = (scale.rows, scale.matrix);
    // As a base is brought to a device.
    let kept = if dtype == BF16 { BF16 } else { F16 };
    let (x, weights) = (numbers(device, dtype, n * rows)?, numbers(device, kept, rows * cols)?);
    let mut y = zeros(device, dtype, n * cols)?;
    let matrix = Matrix::f16(weights.view(), rows, cols);
    let time = seconds(device, scale.repeats, || {
        matmul::frozen_nn(x.view(), matrix, InitialValue::Zero, y.view_mut(), n);
    })?;
    let what = format!("frozen product {n} x {rows} x {cols}, {dtype:?}");
    Ok(vec![Speed { what, value: 2e-12 * (n * rows * cols) as f64 / time, unit: "TFLOP/s" }])
}

fn attentions(device: Device, dtype: DType, scale: &Scale) -> Result<Vec<Speed>> {
    let ((batch, heads, t), width) = (scale.attention, 64);
    let (c, n) = (heads * width, batch * t);
    let shape = Shape { batch, queries: t, past: 0, heads, width, prefix: 0, arithmetic: Arithmetic::F32 };
    let (qkv, dout) = (numbers(device, dtype, 3 * n * c)?, numbers(device, dtype, n * c)?);
    let starts = Buffer::on(device, &vec![0u32; n])?;
    let (mut out, mut lse) = (zeros(device, dtype, n * c)?, zeros(device, F32, n * heads)?);
    let (mut d_qkv, mut d_prefix) = (zeros(device, dtype, 3 * n * c)?, zeros(device, F32, 0)?);
    let forward = seconds(device, scale.repeats, || {
        let operands = packed(qkv.view(), t, c);
        attention::forward(operands, None, starts.view(), 0.125, shape, out.view_mut(), lse.view_mut());
    })?;
    let backward = seconds(device, scale.repeats, || {
        let (starts, out, lse) = (starts.view(), out.view(), lse.view());
        let seen = Seen { qkv: qkv.view(), prefix: None, starts, out, lse };
        attention::backward(dout.view(), seen, 0.125, shape, d_qkv.view_mut(), d_prefix.view_mut());
    })?;
    let (ahead, back) = attention_flops(heads, width, batch * t * (t + 1) / 2);
    let figure = |what: &str, flops: f64, time: f64| Speed {
        what: format!("attention {what} ({batch}, {heads}, {t}, {width}), {dtype:?}"),
        value: 1e-12 * flops / time,
        unit: "TFLOP/s",
    };
    Ok(vec![
        figure("forward", ahead, forward),
        figure("backward", back, backward),
        figure("both", ahead + back, forward + backward),
    ])
}

/// Time of norm, clipping and AdamW.
fn updates(device: Device, scale: &Scale) -> Result<Vec<Speed>> {
    let len = scale.trainables;
    // Tensors of the size of a LoRA of rank 64 on a matrix of 768 x 768.
    let segments: Vec<usize> = (0..len).step_by(49_152).map(|start| 49_152.min(len - start)).collect();
    let (mut values, mut gradient) = (numbers(device, F32, len)?, numbers(device, F32, len)?);
    let mut speeds = Vec::new();
    for kind in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
        for place in [Placement::Memory, Placement::Host] {
            let mut arenas = Arenas::real(None).on(device);
            let mut optimizer =
                Optimizer::new(kind, &Segment::of(&segments), AdamWOptions::default(), place, &mut arenas)?;
            let time = seconds(device, scale.repeats, || {
                optimizer.update(values.view_mut(), gradient.view_mut(), 1e-3, 1.0, 1.0);
            })?;
            let away = if place.is_away() { ", offloaded" } else { "" };
            let what = format!("update of {len} trainables, {}{away}", kind.name());
            speeds.push(Speed { what, value: 1e3 * time, unit: "ms" });
        }
    }
    Ok(speeds)
}

/// One sample with a LoRA of rank 16 on all sites, its launches recorded and one by one, and several at a time.
fn tokens(
    device: Device,
    activations: DType,
    size: Size,
    folder: Option<&Path>,
    scale: &Scale,
) -> Result<Vec<Speed>> {
    let base = match folder {
        Some(folder) => load(&BaseSource::Folder(folder.to_owned()), "base", device, activations)?,
        None => crate::setup::base(size, device, activations)?,
    };
    let (mut speeds, tokens) = (Vec::new(), scale.tokens.min(base.config.positions - 3));
    for (rows, recorded) in [(1, true), (1, false), (scale.samples, true)] {
        let mut decoder = decoder(&base, rows, tokens)?;
        if !recorded {
            decoder.never_record();
        }
        decoder.feed(&[1])?;
        decoder.fork(rows);
        let ids = vec![1; rows];
        // The first two load kernels and record.
        for _ in 0..2 {
            decoder.feed_each(&ids)?;
        }
        let start = Instant::now();
        for _ in 0..tokens {
            decoder.feed_each(&ids)?;
        }
        let value = (rows * tokens) as f64 / start.elapsed().as_secs_f64();
        let samples = if rows == 1 { "one sample".to_owned() } else { format!("{rows} samples") };
        let how = if recorded { "recorded" } else { "launch by launch" };
        let (layers, width) = (base.config.layers, base.config.width);
        let what = format!("{samples}, {layers} layers of {width}, rank 16, {how}");
        speeds.push(Speed { what, value, unit: "tokens/s" });
    }
    Ok(speeds)
}

/// A decoder of `rows` samples of up to `tokens` tokens after three more.
fn decoder(base: &Arc<Base>, rows: usize, tokens: usize) -> Result<Decoder> {
    let targets = "all-linear".parse::<Targets>().unwrap_or_else(|never| match never {});
    let lora = LoraSpec { rank: 16, targets, ..LoraSpec::default() };
    let set = AdapterSet::new(&lora.into(), &base.description())?;
    let bindings = AdapterBindings::new(&[(&set, 1.0)], base.config.layers)?;
    Decoder::new(Arc::clone(base), bindings, start(&set, base)?, rows, tokens + 3)
}
