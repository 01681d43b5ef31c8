//! A whole layer of a decoder in its few launches against the ops one by one on the CPU, the choice of greedy decoding, and
//! how many launches a token takes.

use std::sync::Arc;

use engraft::{
    device::{
        Buffer, DType,
        DType::{F32, U32},
    },
    error::Result,
    kernels::{
        activation::{self, Activation},
        adapted_linear::{self, AdaptedLinear, Delta, Dropout, ForwardBuffers, xa_len},
        argmax::{self, Largest},
        attention::{self, CacheRows, Heads, Prefix, Shape},
        decode_layer::{self, Buffers, Group, Layer, RowsDelta, Site},
        layernorm,
        matmul::Arithmetic,
    },
    model::{Base, BaseDType},
};

use crate::{
    Line,
    inputs::{On, Weight},
    ops::Outputs,
    runs::decoder,
    setup::{Kind, Size},
};

const N: usize = 3;
const HEADS: usize = 3;
const WIDTH: usize = 16;
const C: usize = HEADS * WIDTH;
const F: usize = 112;
const CAPACITY: usize = 200;
const P: usize = 3;
const SCALE: f32 = 0.05;
/// Inputs and outputs of the sites.
const SHAPES: [(usize, usize); 4] = [(C, 3 * C), (C, C), (C, F), (F, C)];

/// Deltas of each site with their rows: q, k and v apart for the first two rows, all columns for all or the last.
fn deltas() -> ([Vec<Delta>; 4], usize) {
    let mut len = 1;
    let mut delta =
        |site: usize, rank: usize, columns: std::ops::Range<usize>, rows: std::ops::Range<usize>| {
            let (a, b) = (len, len + rank * SHAPES[site].0);
            len = b + rank * columns.len();
            Delta { a, b, rank, columns, scale: 0.4, tokens: Some(rows), ..Delta::default() }
        };
    let c_attn = (0..3).map(|part| delta(0, 3, part * C..(part + 1) * C, 0..2)).collect();
    let attn_proj = vec![delta(1, 17, 0..C, 2..3)];
    let c_fc = vec![delta(2, 5, 0..F, 0..2), delta(2, 2, 8..50, 2..3)];
    let mlp_proj = vec![delta(3, 4, 0..C, 0..3)];
    ([c_attn, attn_proj, c_fc, mlp_proj], len)
}

/// Tokens in the cache, and rows of it: none in one.
const COUNTS: [u32; N] = [150, 0, 37];
const SLOTS: [u32; N] = [2, 0, 1];

pub fn layers(on: On) -> Result<Outputs> {
    let (deltas, len) = deltas();
    let values = on.wide(1, len)?;
    let matrices: Vec<Weight> =
        (2..).zip(SHAPES).map(|(seed, (rows, cols))| on.weight(seed, rows, cols)).collect::<Result<_>>()?;
    let biases: Vec<Buffer> =
        (6..).zip(SHAPES).map(|(seed, (_, cols))| on.frozen(seed, cols)).collect::<Result<_>>()?;
    let gains = [on.frozen(10, C)?, on.frozen(11, C)?];
    let x = on.activations(12, N * C)?;
    let cells = N * CAPACITY * C;
    let (mut k, mut v) = (on.activations(13, cells)?, on.activations(14, cells)?);
    let (pk, pv) = (on.activations(15, P * C)?, on.activations(16, P * C)?);
    let (counts, slots) = (Buffer::on(on.device, &COUNTS)?, Buffer::on(on.device, &SLOTS)?);
    let heads = |view| Heads { data: view, row: C, batch: 0 };
    let group = |first: usize, rows: usize, prefix| Group {
        first,
        rows,
        prefix,
        at: CacheRows { counts: counts.view().slice(first, rows), slots: slots.view().slice(first, rows) },
    };
    let prefix = Prefix { k: heads(pk.view()), v: heads(pv.view()) };
    // The op is told the rows beside a delta.
    let plain = deltas.each_ref().map(|all| -> Vec<Delta> {
        all.iter().map(|delta| Delta { tokens: None, ..delta.clone() }).collect()
    });
    let site = |at: usize| Site {
        weight: matrices[at].view(),
        bias: biases[at].view(),
        deltas: plain[at]
            .iter()
            .zip(&deltas[at])
            .map(|(delta, own)| {
                let rows = own.tokens.clone().unwrap_or(0..N);
                RowsDelta { delta, values: values.view(), first: rows.start, rows: rows.len() }
            })
            .collect(),
    };
    let norm =
        |at: usize| layernorm::Norm { gain: gains[at].view(), bias: gains[1 - at].view(), epsilon: 1e-5 };
    let layer = Layer {
        heads: HEADS,
        scale: SCALE,
        norms: [norm(0), norm(1)],
        sites: [site(0), site(1), site(2), site(3)],
        activation: Activation::GeluTanh,
        groups: vec![group(0, 2, Some((prefix, P))), group(2, 1, None)],
        capacity: CAPACITY,
    };
    let (mut mixed, mut middle, mut y) = (on.room(N * C)?, on.room(N * C)?, on.room(N * C)?);
    let mut tickets = on.zeros(U32, decode_layer::device_scratch::tickets(N, C, HEADS))?;
    let to = Buffers {
        cache: (k.view_mut(), v.view_mut()),
        mixed: mixed.view_mut(),
        middle: middle.view_mut(),
        y: y.view_mut(),
        tickets: tickets.view_mut(),
    };
    if !decode_layer::forward(&layer, x.view(), to) {
        let linears = [0, 1, 2, 3].map(|at| {
            let layer = adapted_linear::Layer { weight: layer.sites[at].weight, bias: biases[at].view() };
            AdaptedLinear::new(layer, &deltas[at], values.view(), Dropout::NONE)
        });
        let mut xa = on.zeros(F32, deltas.iter().map(|all| xa_len(all, N)).max().unwrap_or(0))?;
        let (mut normed, mut stats, mut lse) =
            (on.room(N * C)?, on.zeros(F32, 2 * N)?, on.zeros(F32, N * HEADS)?);
        let (mut qkv, mut inner, mut activated) = (on.room(N * 3 * C)?, on.room(N * F)?, on.room(N * F)?);
        let mut linear = |at: usize, x: &Buffer, residual: Option<&Buffer>, y: &mut Buffer| {
            let xa = xa.view_mut().slice(0, xa_len(&deltas[at], N));
            let to = ForwardBuffers::new(xa, y.view_mut());
            adapted_linear::forward(linears[at], x.view(), residual.map(Buffer::view), N, to);
        };
        layernorm::forward(x.view(), norm(0), normed.view_mut(), stats.view_mut());
        linear(0, &normed, None, &mut qkv);
        let starts = Buffer::on(on.device, &[0u32; N])?;
        for Group { first, rows, prefix, at } in &layer.groups {
            let of_group = qkv.view().slice(first * 3 * C, rows * 3 * C);
            let (q, new_k, new_v) = attention::packed(of_group, 1, C);
            let to = (k.view_mut(), v.view_mut());
            attention::append_rows((new_k, new_v), to, (*rows, 1, C), CAPACITY * C, *at);
            let all = |cache| Heads { data: cache, row: C, batch: CAPACITY * C };
            let shape = Shape {
                batch: *rows,
                queries: 1,
                past: CAPACITY - 1,
                heads: HEADS,
                width: WIDTH,
                prefix: prefix.map_or(0, |(_, p)| p),
                arithmetic: Arithmetic::F32,
            };
            let out = mixed.view_mut().slice(first * C, rows * C);
            let lse = lse.view_mut().slice(first * HEADS, rows * HEADS);
            let starts = starts.view().slice(*first, *rows);
            let operands = (q, all(k.view()), all(v.view()));
            let prefix = prefix.map(|(prefix, _)| prefix);
            attention::decode(operands, prefix, starts, SCALE, (shape, *at), out, lse);
        }
        linear(1, &mixed, Some(&x), &mut middle);
        layernorm::forward(middle.view(), norm(1), normed.view_mut(), stats.view_mut());
        linear(2, &normed, None, &mut inner);
        activation::forward(Activation::GeluTanh, inner.view(), activated.view_mut());
        linear(3, &activated, Some(&middle), &mut y);
    }
    let new = |cache: &Buffer| -> Vec<f32> {
        let all = cache.view().to_floats();
        let cells =
            SLOTS.iter().zip(COUNTS).map(|(slot, count)| (*slot as usize * CAPACITY + count as usize) * C);
        cells.flat_map(|at| all[at..at + C].to_vec()).collect()
    };
    Ok(vec![
        ("new keys", new(&k)),
        ("new values", new(&v)),
        ("attention", mixed.view().to_floats()),
        ("middle", middle.view().to_floats()),
        ("y", y.view().to_floats()),
        (
            "tickets that are left",
            tickets.view().to_vec::<u32>().into_iter().map(|x| x as f32 + 1.0).collect(),
        ),
    ])
}

/// The largest logits, the first of equal ones and the first that is not finite.
pub fn largest(on: On) -> Result<Outputs> {
    let (rows, v) = (4, 2053);
    let mut logits = on.wide(1, rows * v)?.view().to_vec::<f32>();
    (logits[1800], logits[70], logits[v + 9], logits[2 * v + 1999]) = (4.0, 4.0, f32::NAN, f32::INFINITY);
    let (logits, mut to) = (Buffer::on(on.device, &logits)?, on.zeros(U32, rows * argmax::NUMBERS)?);
    argmax::forward(logits.view(), to.view_mut(), v);
    let numbers = to.view().to_vec::<u32>();
    let found: Vec<Largest> = numbers.chunks(argmax::NUMBERS).filter_map(Largest::of).collect();
    let finite = |x: f32| if x.is_finite() { x } else { 9.0 };
    Ok(vec![
        ("id", found.iter().map(|largest| largest.id as f32).collect()),
        ("logit", found.iter().map(|largest| finite(largest.logit)).collect()),
    ])
}

/// Greedy decoding of one row, a token at a time: five launches a layer, and embedding, last norm, head and choice. On a base
/// of codes the ops one by one: four a site, two norms, the activation, the cache and two of attention.
pub fn launches(base: &Arc<Base>, size: Size) -> Result<Vec<Line>> {
    let device = base.device;
    let mut decoder = decoder(base, Kind::Both, size)?;
    decoder.never_record();
    let of_layer = if base.dtype == BaseDType::F16 { 5 } else { 4 * 4 + 2 + 1 + 1 + 2 };
    let wanted = of_layer * base.config.layers + 4;
    let mut most = 0;
    for id in [1, 2, 3] {
        let before = device.launches();
        decoder.feed_each_greedily(&[id])?;
        most = most.max(device.launches() - before);
    }
    let is_cpu = most == 0 && base.activations == DType::F32;
    let other = if is_cpu { 0.0 } else { (most as f64 - wanted as f64).abs() };
    let what = format!("generation: launches of a token, {most}, instead of {wanted}");
    Ok(vec![Line::new(what, base.activations, other, 0.0)])
}
