//! A whole layer of a decoder for one token of each of a few rows, in five launches of a device, where the ops one by one
//! take thirteen that wait for each other.
//!
//! ```text
//! q, k, v = ln_1(x) W + b + deltas           k and v go to the cache
//! middle  = x + attention(q, k, v) W + b + deltas
//! y       = middle + f(ln_2(middle) W + b + deltas) W + b + deltas
//! ```
//!
//! It computes what [`layernorm`](super::layernorm), [`adapted_linear`](super::adapted_linear),
//! [`attention::decode`](super::attention::decode) and [`activation`](super::activation) do, but does not round the outputs
//! of the norms. Rows may have deltas and a prefix of their own. A CPU has no such op, and
//! neither have more than 8 rows or deltas of a site, and deltas with d or e: [`forward`] says so.

#[cfg(feature = "cuda")]
mod cuda;
pub mod device_scratch;

use super::{
    activation::Activation,
    adapted_linear::Delta,
    attention::{CacheRows, Prefix},
    layernorm::Norm,
    matmul::{Matrix, device_scratch::SMALL_BATCH},
};
use crate::device::{DType, Device, View, ViewMut};

/// Most deltas of a site, over all groups of rows.
pub const MOST_DELTAS: usize = 8;
/// Largest sum of their ranks.
pub const MOST_RANKS: usize = 256;

/// A delta for some rows of the batch.
#[derive(Clone, Copy)]
pub struct RowsDelta<'a> {
    /// The delta, without d and e.
    pub delta: &'a Delta,
    /// The flat store that its factors are in.
    pub values: View<'a>,
    /// First of its rows.
    pub first: usize,
    /// Number of its rows.
    pub rows: usize,
}

/// A frozen linear layer with the deltas of all rows.
#[derive(Clone)]
pub struct Site<'a> {
    /// Conv1D weight `(in, out)`.
    pub weight: Matrix<'a>,
    /// FP16 bias `(out)`.
    pub bias: View<'a>,
    /// The deltas of all rows.
    pub deltas: Vec<RowsDelta<'a>>,
}

/// Rows that follow one another and have the same prefix.
#[derive(Clone, Copy)]
pub struct Group<'a> {
    /// First of its rows.
    pub first: usize,
    /// Number of its rows.
    pub rows: usize,
    /// Keys and values of the prefix, and their number p.
    pub prefix: Option<(Prefix<'a>, usize)>,
    /// Where the rows go on in the cache.
    pub at: CacheRows<'a>,
}

/// A layer as it sees the rows of a batch.
#[derive(Clone)]
pub struct Layer<'a> {
    /// Number of heads h.
    pub heads: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// The norms before attention and before the MLP, of all rows.
    pub norms: [Norm<'a>; 2],
    /// c_attn `(c, 3c)`, attn.c_proj `(c, c)`, c_fc `(c, f)`, mlp.c_proj `(f, c)`.
    pub sites: [Site<'a>; 4],
    /// The function between the last two.
    pub activation: Activation,
    /// All rows.
    pub groups: Vec<Group<'a>>,
    /// Most tokens that a row of the cache has room for.
    pub capacity: usize,
}

/// What a layer writes, beside its scratch.
pub struct Buffers<'a> {
    /// Keys and values of the layer, `(rows, capacity, c)` each.
    pub cache: (ViewMut<'a>, ViewMut<'a>),
    /// Output of attention `(n, c)`.
    pub mixed: ViewMut<'a>,
    /// Residual stream between the two halves `(n, c)`.
    pub middle: ViewMut<'a>,
    /// Output `(n, c)`.
    pub y: ViewMut<'a>,
    /// [`device_scratch::tickets`], U32, all 0.
    pub tickets: ViewMut<'a>,
}

impl Site<'_> {
    fn ranks(&self) -> usize {
        self.deltas.iter().map(|delta| delta.delta.rank).sum()
    }

    /// Whether the kernels take it beside activations of `dtype`.
    fn is_covered(&self, dtype: DType) -> bool {
        let wanted = if dtype == DType::BF16 { DType::BF16 } else { DType::F16 };
        let weight = self.weight.data.dtype() == wanted && self.weight.scales.is_none();
        let plain = |delta: &RowsDelta| {
            let Delta { tokens, .. } = delta.delta;
            !delta.delta.scales() && tokens.is_none() && !delta.delta.transposed && delta.delta.rank > 0
        };
        let deltas = self.deltas.len() <= MOST_DELTAS && self.deltas.iter().all(plain);
        weight && self.weight.cols.is_multiple_of(8) && deltas && self.ranks() <= MOST_RANKS
    }
}

/// Whether the kernels compute this layer for `x (n, c)`.
fn covers(layer: &Layer, x: View) -> bool {
    let n: usize = layer.groups.iter().map(|group| group.rows).sum();
    layer.sites.iter().all(|site| site.is_covered(x.dtype())) && (1..=SMALL_BATCH).contains(&n)
}

/// The layer of the rows `x (n, c)`, one token each; false, with nothing done, where it has to be computed op by op.
pub fn forward(layer: &Layer, x: View, to: Buffers) -> bool {
    match x.device() {
        _ if !covers(layer, x) => false,
        Device::Cpu => {
            let _ = to;
            false
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            cuda::forward(gpu, layer, x, to);
            true
        }
    }
}
