//! Causal attention over packed documents and an optional prefix; no `(t, t)` matrix leaves a tile.
//!
//! For query `i` of a row, keys are the p prefix rows, all of them visible, and the tokens
//! `starts[i] ..= past + i`: `s_j = scale q_i k_j`, `p = softmax(s)`, `o_i = sum_j p_j v_j`
//! (Vaswani et al. 2017). The forward leaves `lse_i = ln sum_j exp(s_j)`, from which the backward
//! recomputes the probabilities tile by tile (Dao et al. 2022). Hidden keys are left out by selection, never by a
//! large negative number.

use super::matmul::Arithmetic;
use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;
pub mod device_scratch;
pub mod reference;
mod simd;
#[cfg(test)]
mod tests;

/// Floats of scratch of a CPU thread for `keys` keys, prefix included, and floats that packing takes for heads of
/// `width`.
pub fn scratch(keys: usize, width: usize) -> (usize, usize) {
    cpu::scratch(keys, width)
}

/// Vectors of all heads in memory: `(b, i, head, d)` is at
/// `b * batch + i * row + head * width + d`.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    /// The elements, from the first vector.
    pub data: View<'a>,
    /// Elements from a token to the next.
    pub row: usize,
    /// Elements from a row of the batch to the next; 0 for a prefix that all rows share.
    pub batch: usize,
}

/// Sizes and arithmetic of an attention call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rows b of the batch.
    pub batch: usize,
    /// Queries t in each row.
    pub queries: usize,
    /// Keys that precede the first query: the filled part of a cache.
    pub past: usize,
    /// Number of heads h.
    pub heads: usize,
    /// Width d of a head.
    pub width: usize,
    /// Number of prefix rows p.
    pub prefix: usize,
    /// Arithmetic of a CPU in products; everything else is FP32.
    pub arithmetic: Arithmetic,
}

/// Keys and values of a prefix, `(p, h, d)` each.
#[derive(Clone, Copy)]
pub struct Prefix<'a> {
    /// Keys `(p, h, d)`.
    pub k: Heads<'a>,
    /// Values `(p, h, d)`.
    pub v: Heads<'a>,
}

/// Inputs of a forward.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    q: Heads<'a>,
    k: Heads<'a>,
    v: Heads<'a>,
    prefix: Option<Prefix<'a>>,
    /// First visible token of each query, `(b, t)`.
    starts: View<'a>,
    /// Factor of the scores.
    scale: f32,
    shape: Shape,
}

/// Forward: `out (b, t, h d)` and `lse (b, h, t)`.
///
/// `starts (b, t)` is the first visible token of each query.
#[allow(clippy::too_many_arguments, reason = "three operands, a prefix, a mask, two outputs")]
pub fn forward(
    (q, k, v): (Heads, Heads, Heads),
    prefix: Option<Prefix>,
    starts: View,
    scale: f32,
    shape: Shape,
    out: ViewMut,
    lse: ViewMut,
) {
    match out.device() {
        Device::Cpu => {
            let inputs = Inputs { q, k, v, prefix, starts, scale, shape };
            cpu::forward(inputs, None, out.host(), lse.host());
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(gpu, (q, k, v), prefix, starts, scale, shape, out, lse),
    }
}

/// The rows of a cache that the rows of a batch continue, as 32-bit numbers in the memory of the device.
#[derive(Clone, Copy)]
pub struct CacheRows<'a> {
    /// Tokens in the cache for each row `(b)`.
    pub counts: View<'a>,
    /// Row of the cache for each row `(b)`.
    pub slots: View<'a>,
}

impl CacheRows<'_> {
    /// On a host: the cache's row of row `b`, and its number of tokens.
    fn of(&self, b: usize) -> (usize, usize) {
        (self.slots.host::<u32>()[b] as usize, self.counts.host::<u32>()[b] as usize)
    }
}

/// Forward of one query for each row, `out (b, 1, h d)` and `lse (b, h, 1)`. The query follows the tokens that the
/// cache has of its row, `shape.past` at most; k and v are the whole cache. The launches are the same for all counts
/// and slots, so a graph can record them.
#[allow(clippy::too_many_arguments, reason = "mirrors the forward")]
pub fn decode(
    (q, k, v): (Heads, Heads, Heads),
    prefix: Option<Prefix>,
    starts: View,
    scale: f32,
    (shape, rows): (Shape, CacheRows),
    out: ViewMut,
    lse: ViewMut,
) {
    match out.device() {
        Device::Cpu => {
            let inputs = Inputs { q, k, v, prefix, starts, scale, shape };
            cpu::forward(inputs, Some(rows), out.host(), lse.host());
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::decode(gpu, (q, k, v), prefix, starts, scale, (shape, rows), out, lse),
    }
}

/// Inputs and outputs of the forward that the backward reads.
#[derive(Clone, Copy)]
pub struct Seen<'a> {
    /// Packed queries, keys and values `(b, t, 3 h d)`.
    pub qkv: View<'a>,
    /// The prefix, if there is one.
    pub prefix: Option<Prefix<'a>>,
    /// First visible token `(b, t)`.
    pub starts: View<'a>,
    /// The forward's output `(b, t, h d)`.
    pub out: View<'a>,
    /// The forward's log-sum-exp `(b, h, t)`.
    pub lse: View<'a>,
}

impl<'a> Seen<'a> {
    /// The inputs of the forward.
    fn inputs(&self, scale: f32, shape: Shape) -> Inputs<'a> {
        let (q, k, v) = packed(self.qkv, shape.queries, shape.heads * shape.width);
        Inputs { q, k, v, prefix: self.prefix, starts: self.starts, scale, shape }
    }
}

/// Backward over packed qkv: writes `d_qkv (b, t, 3 h d)`, and for a prefix `d_prefix (b, 2, p, h d)`,
/// with a part for each row of the batch (keys, then values), which [`sum_prefix`] adds in order.
pub fn backward(dout: View, seen: Seen, scale: f32, shape: Shape, d_qkv: ViewMut, d_prefix: ViewMut) {
    match d_qkv.device() {
        Device::Cpu => cpu::backward(dout.host(), seen, scale, shape, d_qkv.host(), d_prefix.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward(gpu, dout, seen, scale, shape, d_qkv, d_prefix),
    }
}

/// Adds the parts of [`backward`] over the batch to a gradient whose prefix rows are `row` apart: keys from element
/// `k`, values from element `v`.
pub fn sum_prefix(parts: View, shape: Shape, gradient: ViewMut, (row, k, v): (usize, usize, usize)) {
    match parts.device() {
        Device::Cpu => cpu::sum_prefix(parts.host(), shape, gradient.host(), (row, k, v)),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::sum_prefix(gpu, parts, shape, gradient, (row, k, v)),
    }
}

/// Copies `(rows, tokens, c)` keys or values into a cache whose rows stand `place.1` apart, from element
/// `place.0` of each row on.
pub fn append(from: Heads, to: ViewMut, sizes: (usize, usize, usize), place: (usize, usize)) {
    match to.device() {
        Device::Cpu => cpu::append(from, to.host(), sizes, place),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::append(gpu, (from, None), (to, None), sizes, place, None),
    }
}

/// The same of keys and values, after the tokens that the cache has of each row; rows of it stand `batch` apart.
pub fn append_rows(
    (k, v): (Heads, Heads),
    (to_k, to_v): (ViewMut, ViewMut),
    sizes: (usize, usize, usize),
    batch: usize,
    at: CacheRows,
) {
    match to_k.device() {
        Device::Cpu => {
            cpu::append_rows(k, to_k.host(), sizes, batch, at);
            cpu::append_rows(v, to_v.host(), sizes, batch, at);
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            cuda::append(gpu, (k, Some(v)), (to_k, Some(to_v)), sizes, (0, batch), Some(at));
        }
    }
}

/// The three parts of packed `qkv (b, t, 3c)`.
pub fn packed(qkv: View, tokens: usize, width: usize) -> (Heads, Heads, Heads) {
    let part = |index: usize| Heads {
        data: qkv.slice(index * width, qkv.len() - index * width),
        row: 3 * width,
        batch: tokens * 3 * width,
    };
    (part(0), part(1), part(2))
}
