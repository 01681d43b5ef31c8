//! Every op on the device against its CPU side, on the same inputs, rounded to the type of the activations.

use crate::{
    Line, Report, allocation, decoding, embedding,
    inputs::{On, numbers, rounded},
    linears,
    runs::largest_error,
};
use engraft::{
    device::{
        Buffer,
        DType::{self, BF16, F16, F32},
        Device, View,
    },
    error::Result,
    kernels::{
        activation::{self, Activation},
        adamw, adamw8,
        attention::{self, CacheRows, Heads, Prefix, Seen, Shape},
        head_loss::{self, Supervised},
        layernorm,
        matmul::{self, Arithmetic, DenseGradients, DenseShape, InitialValue},
    },
    model::BaseDType,
};

/// Named outputs of an op.
pub type Outputs = Vec<(&'static str, Vec<f32>)>;
type Check = (&'static str, fn(On) -> Result<Outputs>);

use BaseDType::{Nf4, Q8};

const CHECKS: [Check; 49] = [
    ("embed", embedding::tables),
    ("delta of the embedding", embedding::deltas),
    ("virtual tokens", embedding::virtual_tokens),
    ("layernorm", layernorms),
    ("layernorm with trained gain and bias", trained_layernorms),
    ("activation", activations),
    ("frozen product, many rows", |on| products(on, 37)),
    ("frozen product, few rows", |on| products(on, 3)),
    ("product and activation, many rows", |on| activated(on, 37)),
    ("product and activation, few rows", |on| activated(on, 3)),
    ("dense product", dense),
    ("adapted linear, many rows", |on| linears::linears(on, 301)),
    ("adapted linear, a batch of rows", |on| linears::linears(on, 33)),
    ("adapted linear, few rows", |on| linears::linears(on, 5)),
    ("a delta on all columns, many rows", |on| linears::whole_deltas(on, 301)),
    ("a delta on all columns, few rows", |on| linears::whole_deltas(on, 7)),
    ("a norm and a delta after it, many rows", |on| linears::normed_deltas(on, 301)),
    ("a norm and a delta after it, few rows", |on| linears::normed_deltas(on, 7)),
    ("adapted linear with vectors, many rows", |on| linears::scaled_linears(on, 300)),
    ("adapted linear with vectors, few rows", |on| linears::scaled_linears(on, 6)),
    ("norms of columns", linears::column_norms),
    ("attention, heads of 64", |on| attentions(on, 64, 71)),
    ("attention, heads of 20", |on| attentions(on, 20, 71)),
    // More than 48 KiB of shared memory in a block.
    ("attention, heads of 1056", |on| attentions(on, 1056, 9)),
    ("attention of one query", one_query),
    ("layer of a decoder", decoding::layers),
    ("largest logit", decoding::largest),
    ("head and loss", heads),
    ("adamw, both kinds of moments", updates),
    ("allocation of ranks", allocation::ranks),
    ("embed, 8-bit base", |on| embedding::tables(on.kept_as(Q8))),
    ("virtual tokens, 8-bit base", |on| embedding::virtual_tokens(on.kept_as(Q8))),
    ("head and loss, 8-bit base", |on| heads(on.kept_as(Q8))),
    ("frozen product, many rows, 8-bit base", |on| products(on.kept_as(Q8), 37)),
    ("frozen product, few rows, 8-bit base", |on| products(on.kept_as(Q8), 3)),
    ("frozen product, one row, 8-bit base", |on| products(on.kept_as(Q8), 1)),
    ("frozen product, many rows, 4-bit base", |on| products(on.kept_as(Nf4), 37)),
    ("frozen product, few rows, 4-bit base", |on| products(on.kept_as(Nf4), 3)),
    ("frozen product, one row, 4-bit base", |on| products(on.kept_as(Nf4), 1)),
    ("product and activation, many rows, 8-bit base", |on| activated(on.kept_as(Q8), 37)),
    ("product and activation, many rows, 4-bit base", |on| activated(on.kept_as(Nf4), 37)),
    ("adapted linear, a batch of rows, 4-bit base", |on| linears::linears(on.kept_as(Nf4), 33)),
    ("a delta on all columns, many rows, 8-bit base", |on| linears::whole_deltas(on.kept_as(Q8), 301)),
    ("a delta on all columns, many rows, 4-bit base", |on| linears::whole_deltas(on.kept_as(Nf4), 301)),
    ("a delta on all columns, few rows, 8-bit base", |on| linears::whole_deltas(on.kept_as(Q8), 7)),
    ("a delta on all columns, few rows, 4-bit base", |on| linears::whole_deltas(on.kept_as(Nf4), 7)),
    ("norms of columns, 8-bit base", |on| linears::column_norms(on.kept_as(Q8))),
    ("norms of columns, 4-bit base", |on| linears::column_norms(on.kept_as(Nf4))),
    ("adapted linear with vectors, few rows, 4-bit base", |on| linears::scaled_linears(on.kept_as(Nf4), 6)),
];

/// Bounds for rounding results to the type of activations, and for sums in another order.
fn bound(activations: DType) -> f64 {
    match activations {
        F16 => 4e-3,
        BF16 => 3e-2,
        _ => 2e-5,
    }
}

pub fn check(device: Device, types: &[DType], report: &mut Report) -> Result<()> {
    for &dtype in types {
        for (what, run) in CHECKS {
            report.add(what, of_op(device, dtype, what, run));
        }
    }
    Ok(())
}

/// The largest error of each output of an op.
fn of_op(device: Device, dtype: DType, what: &str, run: fn(On) -> Result<Outputs>) -> Result<Vec<Line>> {
    let expected = run(On { device: Device::Cpu, stored: F32, rounded: dtype, kept: BaseDType::F16 })?;
    let found = run(On { device, stored: dtype, rounded: dtype, kept: BaseDType::F16 })?;
    device.check()?;
    let both = expected.iter().zip(&found);
    let line = |((part, expected), (_, found)): (&(_, Vec<f32>), &(_, Vec<f32>))| {
        Line::new(format!("{what}: {part}"), dtype, largest_error(expected, found), bound(dtype))
    };
    Ok(both.map(line).collect())
}

fn layernorms(on: On) -> Result<Outputs> {
    let mut outputs = Vec::new();
    for (n, c) in [(1, 768), (19, 1601), (7, 24)] {
        let (x, dy) = (on.activations(1, n * c)?, on.activations(2, n * c)?);
        let (gain, bias) = (on.frozen(3, c)?, on.frozen(4, c)?);
        let norm = layernorm::Norm { gain: gain.view(), bias: bias.view(), epsilon: 1e-5 };
        let (mut y, mut stats, mut dx) = (on.room(n * c)?, on.zeros(F32, 2 * n)?, on.activations(5, n * c)?);
        layernorm::forward(x.view(), norm, y.view_mut(), stats.view_mut());
        layernorm::backward(dy.view(), x.view(), stats.view(), norm, dx.view_mut());
        outputs.extend([("y", y.view().to_floats()), ("dx", dx.view().to_floats())]);
    }
    Ok(outputs)
}

/// With a gain, a bias and both in FP32, and their gradients.
fn trained_layernorms(on: On) -> Result<Outputs> {
    let mut outputs = Vec::new();
    for (n, c, with) in [(1, 768, [true, true]), (19, 1601, [true, false]), (600, 24, [false, true])] {
        let (x, dy) = (on.activations(1, n * c)?, on.activations(2, n * c)?);
        let (values, frozen) = (on.wide(3, 2 * c)?, on.frozen(4, c)?);
        let [gain, bias] = [0, c].map(|at| values.view().slice(at, c));
        let norm = layernorm::Norm {
            gain: if with[0] { gain } else { frozen.view() },
            bias: if with[1] { bias } else { frozen.view() },
            epsilon: 1e-5,
        };
        let (mut y, mut stats, mut dx) = (on.room(n * c)?, on.zeros(F32, 2 * n)?, on.activations(5, n * c)?);
        let mut grads = on.wide(6, 2 * c)?;
        layernorm::forward(x.view(), norm, y.view_mut(), stats.view_mut());
        layernorm::backward(dy.view(), x.view(), stats.view(), norm, dx.view_mut());
        let [gain, bias] = [0, 1].map(|at| with[at].then_some(at * c));
        let to = layernorm::ParameterGradients { grads: grads.view_mut(), gain, bias };
        layernorm::parameter_gradients(dy.view(), x.view(), stats.view(), to);
        outputs.extend([("y", y.view().to_floats()), ("dx", dx.view().to_floats())]);
        outputs.push(("gradients of gain and bias", grads.view().to_vec()));
    }
    Ok(outputs)
}

fn activations(on: On) -> Result<Outputs> {
    use Activation::{Gelu, GeluTanh, Relu, Silu, Tanh};
    let len = 4099;
    let mut outputs = Vec::new();
    for (name, kind) in
        [("gelu_new", GeluTanh), ("gelu", Gelu), ("relu", Relu), ("silu", Silu), ("tanh", Tanh)]
    {
        let wide: Vec<f32> = numbers(1, len).into_iter().map(|x| 6.0 * x).collect();
        let x = on.stored_as(rounded(wide, on.rounded))?;
        let (mut y, mut d) = (on.room(len)?, on.activations(2, len)?);
        activation::forward(kind, x.view(), y.view_mut());
        activation::backward(kind, x.view(), d.view_mut());
        outputs.extend([(name, y.view().to_floats()), (name, d.view().to_floats())]);
    }
    Ok(outputs)
}

fn products(on: On, n: usize) -> Result<Outputs> {
    let (rows, cols) = (200, 136);
    let (w, bias) = (on.weight(1, rows, cols)?, on.frozen(2, cols)?);
    let w = w.view();
    let (x, dy, residual) =
        (on.activations(3, n * rows)?, on.activations(4, n * cols)?, on.activations(5, n * cols)?);
    let (mut biased, mut added, mut dx) = (on.room(n * cols)?, on.room(n * cols)?, on.room(n * rows)?);
    let mut logits = on.zeros(F32, n * rows)?;
    matmul::frozen_nn(x.view(), w, InitialValue::Bias(bias.view()), biased.view_mut(), n);
    matmul::frozen_nn(x.view(), w, InitialValue::Residual(residual.view(), bias.view()), added.view_mut(), n);
    matmul::frozen_nt(dy.view(), w, InitialValue::Zero, dx.view_mut(), n);
    matmul::frozen_nt(dy.view(), w, InitialValue::Zero, logits.view_mut(), n);
    Ok(vec![
        ("x W + b", biased.view().to_floats()),
        ("residual + x W + b", added.view().to_floats()),
        ("dy W^T", dx.view().to_floats()),
        ("logits", logits.view().to_vec()),
    ])
}

/// With GELU in the product of a device where it takes part: in the layer of 136 columns, not in that of 61.
fn activated(on: On, n: usize) -> Result<Outputs> {
    let mut outputs = Vec::new();
    for (rows, cols, f) in
        [(200, 136, Activation::GeluTanh), (64, 61, Activation::GeluTanh), (40, 48, Activation::Gelu)]
    {
        let (w, back) = (on.weight(1, rows, cols)?, on.weight(2, cols, rows)?);
        let (w, back) = (w.view(), back.view());
        let (bias, x, dy) = (on.frozen(3, cols)?, on.activations(4, n * rows)?, on.activations(5, n * rows)?);
        let residual = on.activations(6, n * cols)?;
        for start in [InitialValue::Bias(bias.view()), InitialValue::Residual(residual.view(), bias.view())] {
            let (mut y, mut d) = (on.room(n * cols)?, on.room(n * cols)?);
            let mut activated = on.room(n * cols)?;
            matmul::frozen_nn_activated(x.view(), w, start, y.view_mut(), (f, activated.view_mut()), n);
            matmul::frozen_nt_derived(
                dy.view(),
                back,
                InitialValue::Zero,
                d.view_mut(),
                (f, residual.view()),
                n,
            );
            outputs.extend([("y", y.view().to_floats()), ("f(y)", activated.view().to_floats())]);
            outputs.push(("dy W^T f'(x)", d.view().to_floats()));
        }
    }
    Ok(outputs)
}

fn dense(on: On) -> Result<Outputs> {
    let (n, inputs, outputs) = (11, 37, 53);
    let (x, w, b, dy) = (
        on.wide(1, n * inputs)?,
        on.wide(2, inputs * outputs)?,
        on.wide(3, outputs)?,
        on.wide(4, n * outputs)?,
    );
    let (mut y, mut dw, mut db) =
        (on.zeros(F32, n * outputs)?, on.wide(5, inputs * outputs)?, on.wide(6, outputs)?);
    let mut dx = on.zeros(F32, n * inputs)?;
    let shape = DenseShape { n, inputs, outputs };
    matmul::dense_forward(x.view(), w.view(), b.view(), y.view_mut(), shape);
    let gradients = DenseGradients { dw: dw.view_mut(), db: db.view_mut(), dx: Some(dx.view_mut()) };
    matmul::dense_backward(dy.view(), x.view(), w.view(), gradients, shape);
    matmul::dense_input_gradient(dy.view(), w.view(), dx.view_mut(), shape, true);
    Ok([("y", y), ("dW", dw), ("db", db), ("dx", dx)].map(|(name, out)| (name, out.view().to_vec())).into())
}

/// Two rows of t tokens, of 71 in three documents, after a prefix of 5, and without one.
fn attentions(on: On, width: usize, t: usize) -> Result<Outputs> {
    let (batch, heads) = (2, 3);
    let c = heads * width;
    let starts: Vec<u32> = (0..(batch * t) as u32).map(|i| [0, 0, 20, 50][(i as usize % t) / 20]).collect();
    let starts = Buffer::on(on.device, &starts)?;
    let mut outputs = Vec::new();
    for p in [0, 5] {
        let shape =
            Shape { batch, queries: t, past: 0, heads, width, prefix: p, arithmetic: Arithmetic::F32 };
        let (qkv, dout) = (on.activations(1, batch * t * 3 * c)?, on.activations(2, batch * t * c)?);
        let (pk, pv) = (on.activations(3, p * c)?, on.activations(4, p * c)?);
        let prefix = (p > 0).then(|| Prefix { k: dense_heads(pk.view(), c), v: dense_heads(pv.view(), c) });
        let (mut out, mut lse) = (on.room(batch * t * c)?, on.zeros(F32, batch * heads * t)?);
        let parts = attention::packed(qkv.view(), t, c);
        attention::forward(parts, prefix, starts.view(), 0.4, shape, out.view_mut(), lse.view_mut());
        let (mut d_qkv, mut d_prefix) = (on.room(batch * t * 3 * c)?, on.zeros(F32, batch * 2 * p * c)?);
        let seen = Seen { qkv: qkv.view(), prefix, starts: starts.view(), out: out.view(), lse: lse.view() };
        attention::backward(dout.view(), seen, 0.4, shape, d_qkv.view_mut(), d_prefix.view_mut());
        outputs.extend([("out", out.view().to_floats()), ("lse", lse.view().to_vec())]);
        outputs.push(("d qkv", d_qkv.view().to_floats()));
        if p > 0 {
            let mut summed = on.wide(5, 2 * p * c)?;
            attention::sum_prefix(d_prefix.view(), shape, summed.view_mut(), (c, 0, p * c));
            outputs.push(("d prefix", summed.view().to_vec()));
        }
    }
    Ok(outputs)
}

fn dense_heads(data: View, c: usize) -> Heads {
    Heads { data, row: c, batch: 0 }
}

/// A query in each of two rows after a cache of 300 tokens, appended in two pieces, and a prefix; once more where the
/// device counts the tokens of each row and says where it is.
fn one_query(on: On) -> Result<Outputs> {
    let (batch, past, heads, width, p, capacity) = (2, 300, 2, 64, 5, 310);
    let c = heads * width;
    let mut caches = [on.room(batch * capacity * c)?, on.room(batch * capacity * c)?];
    for (seed, cache) in (10..).zip(&mut caches) {
        for (first, tokens) in [(0, past), (past, 1)] {
            let from = on.activations(seed + first as u64, batch * tokens * c)?;
            let from = Heads { data: from.view(), row: c, batch: tokens * c };
            attention::append(from, cache.view_mut(), (batch, tokens, c), (first * c, capacity * c));
        }
    }
    let (q, pk, pv) = (on.activations(1, batch * c)?, on.activations(3, p * c)?, on.activations(4, p * c)?);
    let starts = Buffer::on(on.device, &vec![0u32; batch])?;
    let prefix = Some(Prefix { k: dense_heads(pk.view(), c), v: dense_heads(pv.view(), c) });
    let [k, v] = caches.each_ref().map(|cache| dense_row(cache.view(), c, capacity));
    let query = Heads { data: q.view(), row: c, batch: c };
    let shape = Shape { batch, queries: 1, past, heads, width, prefix: p, arithmetic: Arithmetic::F32 };
    let (mut out, mut lse) = (on.room(batch * c)?, on.zeros(F32, batch * heads)?);
    let operands = (query, k, v);
    attention::forward(operands, prefix, starts.view(), 0.4, shape, out.view_mut(), lse.view_mut());
    let mut outputs = vec![("out", out.view().to_floats()), ("lse", lse.view().to_vec())];
    let counts = Buffer::on(on.device, &[past as u32, past as u32 - 40])?;
    // The rows of the other cache stand the other way round.
    let slots = Buffer::on(on.device, &[1u32, 0])?;
    let rows = CacheRows { counts: counts.view(), slots: slots.view() };
    let mut counted = [on.room(batch * capacity * c)?, on.room(batch * capacity * c)?];
    let [k, v] = caches.each_ref().map(|cache| dense_row(cache.view(), c, capacity));
    let [to_k, to_v] = &mut counted;
    // The tokens before, and the last one of each row after as many as are counted.
    for (row, slot) in [(0, 1), (1, 0)] {
        let place = (slot * capacity * c, 0);
        attention::append(row_of(k, row), to_k.view_mut(), (1, past, c), place);
        attention::append(row_of(v, row), to_v.view_mut(), (1, past, c), place);
    }
    let last =
        [k, v].map(|heads| Heads { data: heads.data.slice(past * c, heads.data.len() - past * c), ..heads });
    let to = (to_k.view_mut(), to_v.view_mut());
    attention::append_rows((last[0], last[1]), to, (batch, 1, c), capacity * c, rows);
    let [k, v] = counted.each_ref().map(|cache| dense_row(cache.view(), c, capacity));
    let (mut out, mut lse) = (on.room(batch * c)?, on.zeros(F32, batch * heads)?);
    let most = (Shape { past: capacity - 1, ..shape }, rows);
    attention::decode((query, k, v), prefix, starts.view(), 0.4, most, out.view_mut(), lse.view_mut());
    outputs.extend([("counted out", out.view().to_floats()), ("counted lse", lse.view().to_vec())]);
    Ok(outputs)
}

/// One row of a cache.
fn row_of(heads: Heads, row: usize) -> Heads {
    Heads { data: heads.data.slice(row * heads.batch, heads.batch), ..heads }
}

/// Keys or values of a cache of `capacity` tokens a row.
fn dense_row(data: View, c: usize, capacity: usize) -> Heads {
    Heads { data, row: c, batch: capacity * c }
}

fn heads(on: On) -> Result<Outputs> {
    let (n, c, v, chunk) = (41, 48, 1003, 16);
    let rows: Vec<u32> = (0..n as u32).filter(|row| row % 3 != 1).collect();
    let targets: Vec<i32> = rows.iter().map(|row| (row * 37 % v as u32) as i32).collect();
    let m = rows.len();
    let (rows, targets) = (Buffer::on(on.device, &rows)?, Buffer::on(on.device, &targets)?);
    let (hidden, table) = (on.activations(1, n * c)?, on.weight(2, v, c)?);
    let (mut gathered, mut losses) = (on.room(chunk * c)?, on.zeros(F32, m)?);
    let mut logits = on.zeros(F32, chunk * head_loss::stride(v, on.stored))?;
    let mut d_hidden = on.room(n * c)?;
    let input = Supervised {
        hidden: hidden.view(),
        rows: Some(rows.view()),
        targets: targets.view(),
        smoothing: 0.1,
    };
    let head = table.view();
    let work = head_loss::HeadScratch { gathered: gathered.view_mut(), logits: logits.view_mut() };
    head_loss::forward_backward(input, head, work, losses.view_mut(), Some((d_hidden.view_mut(), 3.0)));
    Ok(vec![("losses", losses.view().to_vec()), ("d hidden", d_hidden.view().to_floats())])
}

fn updates(on: On) -> Result<Outputs> {
    let segments = [100, adamw8::SMALLEST + 77, 70_003];
    let len: usize = segments.iter().sum();
    let coded: usize = len - 100;
    let pieces: Vec<adamw8::Piece> =
        segments.iter().flat_map(|&len| adamw8::pieces(len, len > 100)).collect();
    let blocks: usize = pieces.iter().map(|piece| piece.blocks()).sum();
    let (mut wide, mut narrow) = (on.wide(1, len)?, on.wide(1, len)?);
    let (mut first, mut second) = (on.zeros(F32, len)?, on.zeros(F32, len)?);
    let mut small = [on.zeros(F32, 100)?, on.zeros(F32, 100)?];
    let mut codes = [on.zeros(DType::U8, coded)?, on.zeros(DType::U8, coded)?];
    let mut scales = [on.zeros(F32, blocks)?, on.zeros(F32, blocks)?];
    let mut norms = Vec::new();
    for step in 1..=3 {
        let gradient = on.wide(10 + step, len)?;
        let clipping = adamw::clipping(gradient.view(), 1.0, 8.0);
        let update = adamw::Update {
            step,
            lr: 1e-2,
            betas: (0.9, 0.999),
            epsilon: 1e-8,
            weight_decay: 0.1,
            factor: clipping.factor(),
        };
        adamw::update(wide.view_mut(), gradient.view(), first.view_mut(), second.view_mut(), update);
        let ([a, b], [m, v], [m_scales, v_scales]) = (&mut small, &mut codes, &mut scales);
        let moments = adamw8::Moments {
            first: a.view_mut(),
            second: b.view_mut(),
            first_codes: m.view_mut(),
            first_scales: m_scales.view_mut(),
            second_codes: v.view_mut(),
            second_scales: v_scales.view_mut(),
        };
        adamw8::update(narrow.view_mut(), gradient.view(), moments, &pieces, update);
        norms.push(clipping.norm() as f32);
    }
    Ok(vec![
        ("norm", norms),
        ("values", wide.view().to_vec()),
        ("second moments", second.view().to_vec()),
        ("values, 8-bit moments", narrow.view().to_vec()),
    ])
}
