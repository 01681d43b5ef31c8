//! CUDA side: tensor cores for heads of width 64 in 16 bits, plain kernels for all others; the keys of a single query
//! are cut into shares.

use super::device_scratch::{KEYS, attention_backward, attention_decode, key_shares};
use super::{CacheRows, Heads, Prefix, Seen, Shape, packed};
use crate::device::{
    DType, View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
};

static IMAGE: Image = image!("attention");

/// Queries of a block of the tensor-core kernels; QUERIES in tiles.cuh.
const TENSOR_QUERIES: usize = 128;

/// [`Heads`] in the layout of shape.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct RawHeads {
    data: u64,
    row: i64,
    batch: i64,
}

impl RawHeads {
    pub const NONE: Self = Self { data: 0, row: 0, batch: 0 };

    pub fn of(heads: Heads) -> Self {
        Self { data: heads.data.address(), row: heads.row as i64, batch: heads.batch as i64 }
    }

    /// Whether eight neighbours can be read by one instruction.
    fn is_aligned(self) -> bool {
        self.data.is_multiple_of(16) && self.row % 8 == 0 && self.batch % 8 == 0
    }
}

/// [`Shape`] and the factor of the scores in the layout of shape.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawShape {
    batch: i32,
    queries: i32,
    past: i32,
    heads: i32,
    width: i32,
    prefix: i32,
    scale: f32,
}

pub fn raw_shape(shape: Shape, scale: f32) -> Argument {
    let Shape { batch, queries, past, heads, width, prefix, .. } = shape;
    let [batch, queries, past, heads, width, prefix] =
        [batch, queries, past, heads, width, prefix].map(|size| i32::try_from(size).unwrap_or(-1));
    Argument::structure(RawShape { batch, queries, past, heads, width, prefix, scale })
}

/// Queries, keys and values, then keys and values of the prefix.
struct Operands {
    heads: [RawHeads; 5],
    dtype: DType,
}

impl Operands {
    fn of((q, k, v): (Heads, Heads, Heads), prefix: Option<Prefix>) -> Self {
        let same = |heads: &Heads| heads.data.dtype() == q.data.dtype();
        assert!(same(&k) && same(&v) && prefix.is_none_or(|p| same(&p.k) && same(&p.v)), "attention types");
        let (pk, pv) = prefix.map_or((RawHeads::NONE, RawHeads::NONE), |prefix| {
            (RawHeads::of(prefix.k), RawHeads::of(prefix.v))
        });
        Self { heads: [RawHeads::of(q), RawHeads::of(k), RawHeads::of(v), pk, pv], dtype: q.data.dtype() }
    }

    /// Whether the tensor-core kernels take these operands.
    fn are_tiles(&self, shape: Shape) -> bool {
        self.dtype != DType::F32 && shape.width == 64 && self.heads.iter().all(|heads| heads.is_aligned())
    }

    fn arguments(&self) -> Vec<Argument> {
        self.heads.iter().map(|heads| Argument::structure(*heads)).collect()
    }
}

#[allow(clippy::too_many_arguments, reason = "mirrors the op")]
pub fn forward(
    gpu: &'static Gpu,
    qkv: (Heads, Heads, Heads),
    prefix: Option<Prefix>,
    starts: View,
    scale: f32,
    shape: Shape,
    out: ViewMut,
    lse: ViewMut,
) {
    let operands = Operands::of(qkv, prefix);
    let mut all = operands.arguments();
    all.extend_from_slice(arguments![starts, raw_shape(shape, scale)]);
    if shape.queries == 1 {
        return shares(gpu, &all, operands.dtype, (shape, None), scale, &out, &lse);
    }
    all.extend_from_slice(arguments![&out, &lse]);
    let (kernel, grid) = if operands.are_tiles(shape) {
        ("attention_forward_mma", tiles(shape.queries.div_ceil(TENSOR_QUERIES), shape))
    } else {
        ("attention_forward", tiles(shape.queries.div_ceil(4), shape).with_shared(32 * shape.width))
    };
    gpu.launch(&IMAGE, &named(kernel, operands.dtype), grid, &all);
}

/// A grid of `count` blocks for each head of each row.
fn tiles(count: usize, shape: Shape) -> Grid {
    Grid::of((count, shape.heads, shape.batch), 128)
}

#[allow(clippy::too_many_arguments, reason = "mirrors the op")]
pub fn decode(
    gpu: &'static Gpu,
    qkv: (Heads, Heads, Heads),
    prefix: Option<Prefix>,
    starts: View,
    scale: f32,
    (shape, rows): (Shape, CacheRows),
    out: ViewMut,
    lse: ViewMut,
) {
    assert!(shape.queries == 1, "one query a row of a cache");
    let operands = Operands::of(qkv, prefix);
    let mut all = operands.arguments();
    all.extend_from_slice(arguments![starts, raw_shape(shape, scale)]);
    shares(gpu, &all, operands.dtype, (shape, Some(rows)), scale, &out, &lse);
}

/// One query a row: its keys are shared out, and the shares joined. Rows of a cache say how many of the tokens that may
/// precede a query do.
fn shares(
    gpu: &'static Gpu,
    operands: &[Argument],
    dtype: DType,
    (shape, rows): (Shape, Option<CacheRows>),
    scale: f32,
    out: &ViewMut,
    lse: &ViewMut,
) {
    let Shape { batch, past, heads, width, prefix, .. } = shape;
    let keys = prefix + past + 1;
    let splits = key_shares(keys);
    let (counts, slots) = (rows.map(|rows| rows.counts), rows.map(|rows| rows.slots));
    gpu.scratch(attention_decode(batch, keys, heads, width), |parts| {
        let most = Argument::int(KEYS);
        let mut all = operands.to_vec();
        all.extend_from_slice(arguments![counts, slots, most, parts]);
        let grid = tiles(splits, shape).with_shared(4 * (9 * width + 8));
        gpu.launch(&IMAGE, &named("attention_decode", dtype), grid, &all);
        let arguments =
            arguments![parts, Argument::int(splits), raw_shape(shape, scale), counts, most, out, lse];
        gpu.launch(
            &IMAGE,
            &named("attention_decode_finish", dtype),
            Grid::of((heads, batch, 1), 128),
            arguments,
        );
    });
}

pub fn backward(
    gpu: &'static Gpu,
    dout: View,
    seen: Seen,
    scale: f32,
    shape: Shape,
    d_qkv: ViewMut,
    d_prefix: ViewMut,
) {
    let Shape { batch, queries, heads, width, prefix, .. } = shape;
    let operands = Operands::of(packed(seen.qkv, queries, heads * width), seen.prefix);
    let dtype = operands.dtype;
    assert!(dout.dtype() == dtype && d_qkv.dtype() == dtype && shape.past == 0, "attention types");
    let aligned = [dout.address(), d_qkv.address()].iter().all(|address| address.is_multiple_of(16));
    let mma = operands.are_tiles(shape) && aligned;
    gpu.scratch(attention_backward(batch * queries, heads), |delta| {
        let mut all = operands.arguments();
        all.extend_from_slice(arguments![seen.starts, raw_shape(shape, scale), dout]);
        let rest = arguments![seen.lse, delta, &d_qkv];
        if mma {
            // It makes delta, too.
            let all = [&all[..], arguments![seen.out], rest].concat();
            let grid = tiles(queries.div_ceil(TENSOR_QUERIES), shape);
            gpu.launch(&IMAGE, &named("attention_dq_mma", dtype), grid, &all);
        } else {
            let sizes = [batch, queries, heads, width].map(Argument::int);
            let arguments = arguments![dout, seen.out, delta, sizes[0], sizes[1], sizes[2], sizes[3]];
            let grid = Grid::row((batch * queries * heads).div_ceil(4), 128);
            gpu.launch(&IMAGE, &named("attention_delta", dtype), grid, arguments);
            let grid = tiles(queries.div_ceil(4), shape).with_shared(48 * width);
            gpu.launch(&IMAGE, &named("attention_dq", dtype), grid, &[&all[..], rest].concat());
        }
        all.extend_from_slice(rest);
        all.push(if prefix == 0 { Argument::NULL } else { Argument::from(&d_prefix) });
        let (kernel, grid) = if mma {
            ("attention_dkv_mma", tiles(prefix.div_ceil(64) + queries.div_ceil(64), shape))
        } else {
            ("attention_dkv", tiles((prefix + queries).div_ceil(4), shape).with_shared(64 * width))
        };
        gpu.launch(&IMAGE, &named(kernel, dtype), grid, &all);
    });
}

pub fn sum_prefix(
    gpu: &'static Gpu,
    parts: View,
    shape: Shape,
    gradient: ViewMut,
    (row, k, v): (usize, usize, usize),
) {
    let c = shape.heads * shape.width;
    let sizes = [shape.batch, shape.prefix, c].map(Argument::int);
    let places = [row, k, v].map(Argument::long);
    let arguments =
        arguments![parts, &gradient, sizes[0], sizes[1], sizes[2], places[0], places[1], places[2]];
    let grid = Grid::row((2 * shape.prefix * c).div_ceil(256), 256);
    gpu.launch(&IMAGE, "attention_sum_prefix", grid, arguments);
}

/// Keys, and values where there are any.
pub fn append(
    gpu: &'static Gpu,
    (keys, values): (Heads, Option<Heads>),
    (to_keys, to_values): (ViewMut, Option<ViewMut>),
    (rows, tokens, c): (usize, usize, usize),
    (first, batch): (usize, usize),
    at: Option<CacheRows>,
) {
    let dtype = to_keys.dtype();
    let alike = |heads: &Heads| heads.data.dtype() == dtype;
    let to_alike = to_values.as_ref().is_none_or(|to| to.dtype() == dtype);
    assert!(alike(&keys) && values.as_ref().is_none_or(alike) && to_alike, "attention types");
    let both = 1 + usize::from(values.is_some());
    let sizes = [rows, tokens, c].map(Argument::int);
    let heads = [Some(keys), values].map(|h| Argument::structure(h.map_or(RawHeads::NONE, RawHeads::of)));
    let places = [first, batch].map(Argument::long);
    let (counts, slots) = (at.map(|rows| rows.counts), at.map(|rows| rows.slots));
    let to_values = to_values.as_ref().map_or(Argument::NULL, Argument::from);
    let arguments = arguments![
        heads[0], heads[1], &to_keys, to_values, sizes[0], sizes[1], sizes[2], places[0], places[1], counts,
        slots
    ];
    let grid = Grid::of(((tokens * c).div_ceil(2048), rows, both), 256);
    gpu.launch(&IMAGE, &named("attention_append", dtype), grid, arguments);
}
