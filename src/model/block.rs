//! One transformer block: attention half and MLP half, forward and backward.
//!
//! Forward: `middle = x + attn(ln_1(x))`, `y = middle + mlp(ln_2(middle))`. The backward walks the same
//! lines upwards. What it needs and the forward did not keep (both layer norms' outputs, the activated
//! MLP) is computed again from what was kept, by the same functions, hence with the same bits.

use super::{BlockWeights, Config, Linear, Norm};
use crate::{
    device::{View, ViewMut},
    kernels::{
        activation,
        adapted_linear::{
            self, AdaptedLinear, BackwardBuffers, Dropout, ForwardBuffers, Layer, SavedProducts,
        },
        attention::{self, Heads, Prefix, Seen, Shape},
        gather::{gather, spread},
        layernorm,
    },
};

use super::{
    bindings::{LayerDeltas, Site},
    buffers::{BackwardWork, BlockBuffers, SharedScratch, Workspace},
    cache::LayerCache,
    policy::Keep,
};

/// Everything a block sees beside its input.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    /// Sizes and switches of the base.
    pub config: &'a Config,
    /// Index of the layer.
    pub layer: usize,
    /// Its frozen weights.
    pub weights: &'a BlockWeights,
    /// Its deltas.
    pub deltas: &'a LayerDeltas,
    /// The flat store that deltas point into.
    pub values: View<'a>,
    /// Keys and values of the prefix, `(p, 2 l c)`, and p.
    pub prompt: Option<(View<'a>, usize)>,
    /// First visible token of each token `(n)`.
    pub starts: View<'a>,
    /// Rows b and tokens t of this micro-batch.
    pub rows: usize,
    /// Tokens t of a row.
    pub tokens: usize,
    /// Dropout in front of every A; none behind attention where not all tokens are `wanted`.
    pub dropout: Dropout,
    /// The tokens whose output anything reads, `(m)` ascending; `None` where all are. Behind attention a block computes
    /// only these: its output, and the gradient of that, then are `(m, c)`.
    pub wanted: Option<View<'a>>,
    /// How many tokens of each row the cache has, where the device counts them `(1)`: for one further token a row.
    pub count: Option<View<'a>>,
}

/// A block's activations after its forward, to be consumed by its backward.
#[must_use = "activations that nobody differentiates were kept for nothing"]
pub struct Saved(BlockBuffers);

impl Saved {
    /// Gives the memory back without a backward: evaluation, or a block that will be recomputed.
    pub fn discard(self) -> BlockBuffers {
        self.0
    }
}

/// Where gradients of trainables go.
pub struct Gradients<'a> {
    /// Of the flat store.
    pub store: ViewMut<'a>,
    /// Of the prefix `(p, 2 l c)`; empty without one.
    pub prompt: ViewMut<'a>,
}

/// The first `n` rows of `width` of a buffer that may hold more.
macro_rules! rows {
    ($buffer:expr, $n:expr, $width:expr) => {
        $buffer.view().slice(0, $n * $width)
    };
    (mut $buffer:expr, $n:expr, $width:expr) => {
        $buffer.view_mut().slice(0, $n * $width)
    };
}
pub(super) use rows;

impl<'a> Block<'a> {
    /// n = b t.
    fn cells(&self) -> usize {
        self.rows * self.tokens
    }

    /// Tokens m behind attention.
    fn outputs(&self) -> usize {
        self.wanted.map_or(self.cells(), |wanted| wanted.len())
    }

    /// Tokens that `site` sees.
    fn seen_by(&self, site: Site) -> usize {
        if site == Site::CAttn { self.cells() } else { self.outputs() }
    }

    /// The wanted rows of `from (n, c)`: in `to (m, c)`, or `from` itself where all are.
    fn pick<'v>(&self, from: View<'v>, to: ViewMut<'v>) -> View<'v> {
        let Some(wanted) = self.wanted else { return from };
        let mut to = to;
        gather(from, wanted, to.reborrow(), self.config.width);
        to.into_view()
    }

    fn ranks(&self, site: Site) -> usize {
        self.deltas[site as usize].iter().map(|delta| delta.rank).sum()
    }

    fn shape(&self, past: usize) -> Shape {
        Shape {
            batch: self.rows,
            queries: self.tokens,
            past,
            heads: self.config.heads,
            width: self.config.head_width(),
            prefix: self.prompt.map_or(0, |(_, p)| p),
            arithmetic: self.weights.c_attn.weight.arithmetic,
        }
    }

    /// Factor of the attention scores, as Transformers' `scale_attn_weights` and
    /// `scale_attn_by_inverse_layer_idx` say.
    fn scale(&self) -> f32 {
        let by_width = if self.config.scale_attn { (self.config.head_width() as f32).sqrt() } else { 1.0 };
        let by_layer = if self.config.scale_attn_by_layer { (self.layer + 1) as f32 } else { 1.0 };
        1.0 / (by_width * by_layer)
    }

    /// This layer's keys and values within the prefix: 2l and 2l + 1 of the 2L vectors of a row.
    fn prefix(&self) -> Option<Prefix<'a>> {
        let (prompt, _) = self.prompt?;
        let (row, c) = (2 * self.config.layers * self.config.width, self.config.width);
        let part =
            |index: usize| Heads { data: prompt.slice(index * c, prompt.len() - index * c), row, batch: 0 };
        Some(Prefix { k: part(2 * self.layer), v: part(2 * self.layer + 1) })
    }

    fn norm(&self, norm: &'a Norm) -> layernorm::Norm<'a> {
        layernorm::Norm {
            gain: norm.gain.view(),
            bias: norm.bias.view(),
            epsilon: self.config.layer_norm_eps,
        }
    }

    fn linear(
        &self,
        site: Site,
        x: View,
        residual: Option<View>,
        buffers: &mut [crate::device::Buffer],
        y: ViewMut,
    ) {
        let n = self.seen_by(site);
        let xa = rows!(mut buffers[site as usize], n, self.ranks(site));
        adapted_linear::forward(self.adapted(site), x, residual, n, ForwardBuffers::new(xa, y));
    }

    /// The layer at `site` with its deltas.
    fn adapted(&self, site: Site) -> AdaptedLinear<'a> {
        let layer = layer(self.site(site));
        AdaptedLinear::new(layer, &self.deltas[site as usize], self.values, self.dropout)
    }

    fn site(&self, site: Site) -> &'a Linear {
        match site {
            Site::CAttn => &self.weights.c_attn,
            Site::AttnProj => &self.weights.attn_proj,
            Site::CFc => &self.weights.c_fc,
            Site::MlpProj => &self.weights.mlp_proj,
        }
    }

    /// Forward from `x (n, c)` to `y (m, c)`; with a cache, keys and values are appended to it and
    /// attention reads from it.
    pub fn forward(
        &self,
        x: View,
        mut buffers: BlockBuffers,
        work: &mut Workspace,
        cache: Option<&mut LayerCache>,
        y: ViewMut,
    ) -> Saved {
        self.attention_half(x, &mut buffers, work, cache);
        if self.outputs() > 0 {
            self.mlp_half(&mut buffers, work, y);
        }
        Saved(buffers)
    }

    /// `middle = x + c_proj(attention(c_attn(ln_1(x))))`.
    fn attention_half(
        &self,
        x: View,
        kept: &mut BlockBuffers,
        work: &mut Workspace,
        cache: Option<&mut LayerCache>,
    ) {
        let (n, m, c) = (self.cells(), self.outputs(), self.config.width);
        self.queries_keys_values(x, kept, work);
        self.attend(kept, cache);
        if m == 0 {
            return;
        }
        let x = self.pick(x, rows!(mut work.normed, m, c));
        let mixed = self.pick(rows!(kept.outputs.mixed, n, c), work.room.activated_mut().slice(0, m * c));
        let middle = rows!(mut kept.outputs.middle, m, c);
        self.linear(Site::AttnProj, mixed, Some(x), &mut kept.small.low, middle);
    }

    /// `qkv = c_attn(ln_1(x))`.
    fn queries_keys_values(&self, x: View, kept: &mut BlockBuffers, work: &mut Workspace) {
        let (n, c) = (self.cells(), self.config.width);
        let (normed, stats) = (rows!(mut work.normed, n, c), rows!(mut kept.small.stats_1, n, 2));
        layernorm::forward(x, self.norm(&self.weights.ln_1), normed, stats);
        let qkv = rows!(mut kept.qkv, n, 3 * c);
        self.linear(Site::CAttn, rows!(work.normed, n, c), None, &mut kept.small.low, qkv);
    }

    fn attend(&self, kept: &mut BlockBuffers, cache: Option<&mut LayerCache>) {
        let (n, c) = (self.cells(), self.config.width);
        let qkv = rows!(kept.qkv, n, 3 * c);
        let (q, mut k, mut v) = attention::packed(qkv, self.tokens, c);
        let mut past = 0;
        if let Some(cache) = cache {
            past = cache.append((k, v), (self.rows, self.tokens, c), self.count);
            (k, v) = cache.heads(c);
        }
        if self.outputs() == 0 {
            return;
        }
        let mixed = rows!(mut kept.outputs.mixed, n, c);
        let lse = rows!(mut kept.small.lse, n, self.config.heads);
        let (prefix, scale, shape) = (self.prefix(), self.scale(), self.shape(past));
        match self.count {
            Some(count) => {
                attention::decode((q, k, v), prefix, self.starts, scale, (shape, count), mixed, lse)
            }
            None => attention::forward((q, k, v), prefix, self.starts, scale, shape, mixed, lse),
        }
    }

    /// `inner = c_fc(ln_2(middle))`.
    fn mlp_inside(&self, kept: &mut BlockBuffers, work: &mut Workspace) {
        let (n, c, f) = (self.outputs(), self.config.width, self.config.inner);
        let (normed, stats) = (rows!(mut work.normed, n, c), rows!(mut kept.small.stats_2, n, 2));
        layernorm::forward(rows!(kept.outputs.middle, n, c), self.norm(&self.weights.ln_2), normed, stats);
        let inner = rows!(mut kept.inner, n, f);
        self.linear(Site::CFc, rows!(work.normed, n, c), None, &mut kept.small.low, inner);
    }

    /// `y = middle + c_proj(f(c_fc(ln_2(middle))))`.
    fn mlp_half(&self, kept: &mut BlockBuffers, work: &mut Workspace, y: ViewMut) {
        let (n, c, f) = (self.outputs(), self.config.width, self.config.inner);
        self.mlp_inside(kept, work);
        activation::forward(
            self.config.activation,
            rows!(kept.inner, n, f),
            work.room.activated_mut().slice(0, n * f),
        );
        let middle = rows!(kept.outputs.middle, n, c);
        self.linear(
            Site::MlpProj,
            work.room.activated().slice(0, n * f),
            Some(middle),
            &mut kept.small.low,
            y,
        );
    }

    /// Computes again what a forward from `x (n, c)` filled `kept` with, without the parts that `keep` kept,
    /// by the same functions and hence with the same bits; the block's output is not computed again.
    pub fn again(&self, x: View, mut kept: BlockBuffers, work: &mut Workspace, keep: Keep) -> Saved {
        match keep {
            Keep::All | Keep::Attention => {}
            Keep::Outputs => self.queries_keys_values(x, &mut kept, work),
            Keep::Input => self.attention_half(x, &mut kept, work, None),
        }
        if keep != Keep::All {
            self.mlp_inside(&mut kept, work);
        }
        if keep == Keep::Input && !self.deltas[Site::MlpProj as usize].is_empty() {
            let (n, f) = (self.outputs(), self.config.inner);
            let kind = self.config.activation;
            activation::forward(kind, rows!(kept.inner, n, f), work.room.activated_mut().slice(0, n * f));
            let xa = rows!(mut kept.small.low[Site::MlpProj as usize], n, self.ranks(Site::MlpProj));
            let x = work.room.activated().slice(0, n * f);
            adapted_linear::xa(self.adapted(Site::MlpProj), x, xa, n);
        }
        Saved(kept)
    }

    /// Backward: `back.grad` holds the gradient of the block's output `(m, c)` on entry and that of its input
    /// `x (n, c)` on exit (left undefined unless `input_gradient`), and `to` grows by those of the trainables.
    pub fn backward(
        &self,
        x: View,
        saved: Saved,
        work: &mut Workspace,
        back: &mut BackwardWork,
        to: &mut Gradients,
        input_gradient: bool,
    ) -> BlockBuffers {
        let Saved(mut kept) = saved;
        self.mlp_half_backward(&mut kept, work, back, to);
        self.attention_half_backward(x, &mut kept, work, back, to, input_gradient);
        kept
    }

    /// In the forward pass this was `y = middle + c_proj(f(c_fc(ln_2(middle))))`.
    fn mlp_half_backward(
        &self,
        kept: &mut BlockBuffers,
        work: &mut Workspace,
        back: &mut BackwardWork,
        to: &mut Gradients,
    ) {
        let (n, c, f) = (self.outputs(), self.config.width, self.config.inner);
        let inner = rows!(kept.inner, n, f);
        let kind = self.config.activation;
        if !self.deltas[Site::MlpProj as usize].is_empty() {
            activation::forward(kind, inner, work.room.activated_mut().slice(0, n * f));
        }
        let (activated, d_activated) = work.room.wide_mut();
        // Nothing of it where no adapter needs it.
        let activated = activated.slice(0, activated.len().min(n * f));
        let d_activated = Some(d_activated.slice(0, n * f));
        self.linear_backward(
            Site::MlpProj,
            rows!(back.grad, n, c),
            activated,
            kept,
            &mut back.d_low,
            to,
            d_activated,
        );
        activation::backward(kind, inner, work.room.wide_mut().1.slice(0, n * f));

        let middle = rows!(kept.outputs.middle, n, c);
        let norm = self.norm(&self.weights.ln_2);
        if !self.deltas[Site::CFc as usize].is_empty() {
            layernorm::forward(
                middle,
                norm,
                rows!(mut work.normed, n, c),
                rows!(mut kept.small.stats_2, n, 2),
            );
        }
        let d_normed = rows!(mut back.narrow, n, c);
        let (d_inner, normed) = (work.room.wide().slice(0, n * f), rows!(work.normed, n, c));
        self.linear_backward(Site::CFc, d_inner, normed, kept, &mut back.d_low, to, Some(d_normed));
        let (d_normed, stats) = (rows!(back.narrow, n, c), rows!(kept.small.stats_2, n, 2));
        layernorm::backward(
            d_normed,
            rows!(kept.outputs.middle, n, c),
            stats,
            norm,
            rows!(mut back.grad, n, c),
        );
    }

    /// In the forward pass this was `middle = x + c_proj(attention(c_attn(ln_1(x))))`.
    fn attention_half_backward(
        &self,
        x: View,
        kept: &mut BlockBuffers,
        work: &mut Workspace,
        back: &mut BackwardWork,
        to: &mut Gradients,
        input_gradient: bool,
    ) {
        let (n, c) = (self.cells(), self.config.width);
        self.attention_output_backward(kept, work, back, to);
        self.attention_backward(kept, &mut work.room, back, to);

        let norm = self.norm(&self.weights.ln_1);
        let adapted = !self.deltas[Site::CAttn as usize].is_empty();
        if !adapted && !input_gradient {
            return;
        }
        if adapted {
            layernorm::forward(x, norm, rows!(mut work.normed, n, c), rows!(mut kept.small.stats_1, n, 2));
        }
        let d_normed = input_gradient.then(|| rows!(mut back.narrow, n, c));
        let (d_qkv, normed) = (work.room.wide().slice(0, n * 3 * c), rows!(work.normed, n, c));
        self.linear_backward(Site::CAttn, d_qkv, normed, kept, &mut back.d_low, to, d_normed);
        if input_gradient {
            let (d_normed, stats) = (rows!(back.narrow, n, c), rows!(kept.small.stats_1, n, 2));
            layernorm::backward(d_normed, x, stats, norm, rows!(mut back.grad, n, c));
        }
    }

    /// From the gradient of the middle `(m, c)` in `back.grad` to that of attention's output `(n, c)` in `back.narrow`;
    /// the former becomes `(n, c)`. No gradient comes from tokens that are not wanted.
    fn attention_output_backward(
        &self,
        kept: &BlockBuffers,
        work: &mut Workspace,
        back: &mut BackwardWork,
        to: &mut Gradients,
    ) {
        let (n, m, c) = (self.cells(), self.outputs(), self.config.width);
        let mixed = self.pick(rows!(kept.outputs.mixed, n, c), work.room.wide_mut().1.slice(0, m * c));
        let d_mixed =
            if self.wanted.is_some() { rows!(mut work.normed, m, c) } else { rows!(mut back.narrow, m, c) };
        let dy = rows!(back.grad, m, c);
        self.linear_backward(Site::AttnProj, dy, mixed, kept, &mut back.d_low, to, Some(d_mixed));
        if let Some(wanted) = self.wanted {
            spread(rows!(work.normed, m, c), wanted, rows!(mut back.narrow, n, c), c);
            // Both are (n, c) of one type.
            std::mem::swap(&mut work.normed, &mut back.grad);
            spread(rows!(work.normed, m, c), wanted, rows!(mut back.grad, n, c), c);
        }
    }

    /// From the gradient of attention's output in `back.narrow` to that of qkv in `room`.
    fn attention_backward(
        &self,
        kept: &BlockBuffers,
        room: &mut SharedScratch,
        back: &mut BackwardWork,
        to: &mut Gradients,
    ) {
        let (n, c, layers) = (self.cells(), self.config.width, self.config.layers);
        let shape = self.shape(0);
        let seen = Seen {
            qkv: rows!(kept.qkv, n, 3 * c),
            prefix: self.prefix(),
            starts: self.starts,
            out: rows!(kept.outputs.mixed, n, c),
            lse: rows!(kept.small.lse, n, self.config.heads),
        };
        let d_prefix = rows!(mut back.d_prefix, self.rows * 2 * shape.prefix, c);
        let d_qkv = room.wide_mut().1.slice(0, n * 3 * c);
        attention::backward(rows!(back.narrow, n, c), seen, self.scale(), shape, d_qkv, d_prefix);
        if shape.prefix > 0 {
            let places = (2 * layers * c, 2 * self.layer * c, (2 * self.layer + 1) * c);
            let parts = rows!(back.d_prefix, self.rows * 2 * shape.prefix, c);
            attention::sum_prefix(parts, shape, to.prompt.reborrow(), places);
        }
    }

    #[allow(clippy::too_many_arguments, reason = "an op's gradient, operands, saved state and target")]
    fn linear_backward(
        &self,
        site: Site,
        dy: View,
        x: View,
        kept: &BlockBuffers,
        d_low: &mut crate::device::Buffer,
        to: &mut Gradients,
        dx: Option<ViewMut>,
    ) {
        let (n, ranks) = (self.seen_by(site), self.ranks(site));
        let saved = SavedProducts { xa: rows!(kept.small.low[site as usize], n, ranks), product: None };
        let to = BackwardBuffers::new(to.store.reborrow(), rows!(mut d_low, n, ranks), dx);
        adapted_linear::backward(self.adapted(site), dy, x, saved, n, to);
    }
}

fn layer(linear: &Linear) -> Layer<'_> {
    Layer { weight: linear.weight.view(), bias: linear.bias.view() }
}
