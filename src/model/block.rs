//! One transformer block: attention half and MLP half, forward and backward.
//!
//! Forward: `middle = x + attn(ln_1(x))`, `y = middle + mlp(ln_2(middle))`. The backward walks the same
//! lines upwards. What it needs and the forward did not keep (both layer norms' outputs, the activated
//! MLP) is computed again from what was kept, by the same functions, hence with the same bits; but for the activated MLP
//! of a device whose product made it, from sums that were not rounded yet.

mod backward;
mod decode;

use std::ops::Range;

use super::{BlockWeights, Config};
use crate::{
    device::{View, ViewMut},
    kernels::{
        adapted_linear::{self, Dropout},
        attention::{self, Heads, Prefix, Shape},
        gather::gather,
    },
};

use super::{
    arch::Site,
    buffers::{BlockBuffers, Workspace},
    cache::{CachedRows, LayerCache},
    layers::RowGroup,
    policy::Keep,
    sites::{NormedBuffers, SiteBuffers},
};

/// All that a block reads beside its input.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    /// Sizes and switches of the base.
    pub config: &'a Config,
    /// Index of the layer.
    pub layer: usize,
    /// The frozen weights of the layer.
    pub weights: &'a BlockWeights,
    /// The rows, in the order of their tokens: n in all.
    pub groups: &'a [RowGroup<'a>],
    /// First visible token of each token `(n)`.
    pub starts: View<'a>,
    /// Dropout in front of every A; none after attention where not all tokens are `wanted`.
    pub dropout: Dropout,
    /// The tokens whose output anything reads, `(m)` ascending; `None` where all are. After attention a block computes
    /// only these: its output, and the gradient of that, then are `(m, c)`.
    pub wanted: Option<View<'a>>,
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
    pub prefix: ViewMut<'a>,
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

/// What the forward of a site of a block writes beside its output.
macro_rules! site_buffers {
    ($kept:expr, $workspace:expr) => {
        SiteBuffers {
            xa: &mut $kept.statistics.xa,
            products: &mut $kept.products,
            scaled: &mut $workspace.scaled,
            activated: None,
        }
    };
}

impl<'a> Block<'a> {
    /// Tokens n = b t of the pass.
    fn cells(&self) -> usize {
        self.groups.iter().map(RowGroup::len).sum()
    }

    /// Tokens m after attention.
    fn outputs(&self) -> usize {
        self.wanted.map_or_else(|| self.cells(), |wanted| wanted.len())
    }

    /// Tokens that `site` sees.
    pub(super) fn seen_by(&self, site: Site) -> usize {
        if site == Site::CAttn { self.cells() } else { self.outputs() }
    }

    /// The tokens of a group among those that `site` sees.
    pub(super) fn tokens_of(&self, group: &RowGroup, site: Site) -> Range<usize> {
        group.places(self.wanted.is_none() || site == Site::CAttn)
    }

    /// The only group of a pass with a backward.
    pub(super) fn group(&self) -> &RowGroup<'a> {
        assert!(self.groups.len() == 1, "a backward has rows of one length and the same adapters");
        &self.groups[0]
    }

    /// The wanted rows of `from (n, c)`: in `to (m, c)`, or `from` itself where all are.
    fn pick<'v>(&self, from: View<'v>, to: ViewMut<'v>) -> View<'v> {
        let Some(wanted) = self.wanted else { return from };
        let mut to = to;
        gather(from, wanted, to.reborrow(), self.config.width);
        to.into_view()
    }

    fn shape(&self, group: &RowGroup, past: usize) -> Shape {
        Shape {
            batch: group.batch,
            queries: group.tokens,
            past,
            heads: self.config.heads,
            width: self.config.head_width(),
            prefix: group.prefix.map_or(0, |(_, p)| p),
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
    fn prefix(&self, group: &RowGroup<'a>) -> Option<Prefix<'a>> {
        let (prefix, _) = group.prefix?;
        let (row, c) = (2 * self.config.layers * self.config.width, self.config.width);
        let part =
            |index: usize| Heads { data: prefix.slice(index * c, prefix.len() - index * c), row, batch: 0 };
        Some(Prefix { k: part(2 * self.layer), v: part(2 * self.layer + 1) })
    }

    /// Forward from `x (n, c)` to `y (m, c)`; with a cache, keys and values are appended to it and
    /// attention reads from it.
    pub fn forward(
        &self,
        x: View,
        mut buffers: BlockBuffers,
        workspace: &mut Workspace,
        mut cache: Option<&mut LayerCache>,
        y: ViewMut,
    ) -> Saved {
        let mut y = y;
        if let Some(cache) = &mut cache
            && self.decode(x, &mut buffers, cache, y.reborrow())
        {
            return Saved(buffers);
        }
        self.attention_half(x, &mut buffers, workspace, cache);
        if self.outputs() > 0 {
            self.mlp_half(&mut buffers, workspace, y);
        }
        Saved(buffers)
    }

    /// `middle = x + c_proj(attention(c_attn(ln_1(x))))`.
    fn attention_half(
        &self,
        x: View,
        kept: &mut BlockBuffers,
        workspace: &mut Workspace,
        cache: Option<&mut LayerCache>,
    ) {
        let (n, m, c) = (self.cells(), self.outputs(), self.config.width);
        self.queries_keys_values(x, kept, workspace);
        self.attend(kept, cache);
        if m == 0 {
            return;
        }
        let x = self.pick(x, rows!(mut workspace.normed, m, c));
        let mixed =
            self.pick(rows!(kept.outputs.mixed, n, c), workspace.shared.activated_mut().slice(0, m * c));
        let middle = rows!(mut kept.outputs.middle, m, c);
        self.linear(Site::AttnProj, mixed, Some(x), site_buffers!(kept, workspace), middle);
    }

    /// `qkv = c_attn(ln_1(x))`.
    fn queries_keys_values(&self, x: View, kept: &mut BlockBuffers, workspace: &mut Workspace) {
        let (n, c) = (self.cells(), self.config.width);
        let mut qkv = rows!(mut kept.qkv, n, self.weights.c_attn.weight.view().cols);
        let buffers = NormedBuffers {
            normed: &mut workspace.normed,
            stats: rows!(mut kept.statistics.stats_1, n, 2),
            xa: &mut kept.statistics.xa,
            activated: None,
        };
        if self.normed_linear(Site::CAttn, x, buffers, qkv.reborrow()) {
            return;
        }
        let (normed, stats) = (rows!(mut workspace.normed, n, c), rows!(mut kept.statistics.stats_1, n, 2));
        self.normalise(Site::CAttn, x, normed, stats);
        self.linear(Site::CAttn, rows!(workspace.normed, n, c), None, site_buffers!(kept, workspace), qkv);
    }

    /// Attention of all rows over their keys and values, with a cache after those that it has; the new ones are appended.
    fn attend(&self, kept: &mut BlockBuffers, mut cache: Option<&mut LayerCache>) {
        for group in self.groups {
            self.attend_group(group, kept, cache.as_deref_mut());
        }
    }

    fn attend_group(&self, group: &RowGroup, kept: &mut BlockBuffers, cache: Option<&mut LayerCache>) {
        let (first, n, c, h) = (group.first, group.len(), self.config.width, self.config.heads);
        let (q, mut k, mut v) =
            attention::packed(kept.qkv.view().slice(first * 3 * c, n * 3 * c), group.tokens, c);
        let (mut past, mut each) = (0, None);
        if let (Some(cache), Some(at)) = (cache, group.cached) {
            cache.append(k, v, group.batch, group.tokens, at);
            (k, v) = cache.heads(at);
            past = cache.most_past(at);
            if let CachedRows::Each(rows) = at {
                each = Some(rows);
            }
        }
        if self.tokens_of(group, Site::AttnProj).is_empty() {
            return;
        }
        let mixed = kept.outputs.mixed.view_mut().slice(first * c, n * c);
        let lse = kept.statistics.lse.view_mut().slice(first * h, n * h);
        let starts = self.starts.slice(first, n);
        let (prefix, scale, shape) = (self.prefix(group), self.scale(), self.shape(group, past));
        match each {
            Some(rows) => attention::decode((q, k, v), prefix, starts, scale, (shape, rows), mixed, lse),
            None => attention::forward((q, k, v), prefix, starts, scale, shape, mixed, lse),
        }
    }

    /// `inner = c_fc(ln_2(middle))`, and f of it if `activates`.
    fn mlp_inside(&self, kept: &mut BlockBuffers, workspace: &mut Workspace, activates: bool) {
        let (n, c, f) = (self.outputs(), self.config.width, self.config.inner);
        let (middle, mut inner) = (rows!(kept.outputs.middle, n, c), rows!(mut kept.inner, n, f));
        let activated = workspace.shared.activated_mut().slice(0, n * f);
        let mut activated = activates.then_some((self.config.activation, activated));
        let buffers = NormedBuffers {
            normed: &mut workspace.normed,
            stats: rows!(mut kept.statistics.stats_2, n, 2),
            xa: &mut kept.statistics.xa,
            activated: activated.as_mut().map(|(f, to)| (*f, to.reborrow())),
        };
        if self.normed_linear(Site::CFc, middle, buffers, inner.reborrow()) {
            return;
        }
        let (normed, stats) = (rows!(mut workspace.normed, n, c), rows!(mut kept.statistics.stats_2, n, 2));
        self.normalise(Site::CFc, middle, normed, stats);
        let to = SiteBuffers { activated, ..site_buffers!(kept, workspace) };
        self.linear(Site::CFc, rows!(workspace.normed, n, c), None, to, inner);
    }

    /// `y = middle + c_proj(f(c_fc(ln_2(middle))))`.
    fn mlp_half(&self, kept: &mut BlockBuffers, workspace: &mut Workspace, y: ViewMut) {
        let (n, c, f) = (self.outputs(), self.config.width, self.config.inner);
        self.mlp_inside(kept, workspace, true);
        let middle = rows!(kept.outputs.middle, n, c);
        self.linear(
            Site::MlpProj,
            workspace.shared.activated().slice(0, n * f),
            Some(middle),
            site_buffers!(kept, workspace),
            y,
        );
    }

    /// Computes again what a forward from `x (n, c)` filled `kept` with, without the parts that `keep` kept,
    /// by the same functions and hence with the same bits; the block's output is not computed again.
    pub fn again(&self, x: View, mut kept: BlockBuffers, workspace: &mut Workspace, keep: Keep) -> Saved {
        match keep {
            Keep::All | Keep::Attention => {}
            Keep::Outputs => self.queries_keys_values(x, &mut kept, workspace),
            Keep::Input => self.attention_half(x, &mut kept, workspace, None),
        }
        let product = self.keeps_product(Site::MlpProj);
        let projects = keep == Keep::Input && (product || self.has_deltas(Site::MlpProj));
        if keep != Keep::All {
            // A product without the activation could have other bits than the forward's.
            let activates = projects || x.device().kind().activates_in_products;
            self.mlp_inside(&mut kept, workspace, activates);
        }
        if projects {
            let (n, c, f) = (self.outputs(), self.config.width, self.config.inner);
            let x = workspace.shared.activated().slice(0, n * f);
            if product {
                // Nothing reads the output, nor what was in its place.
                let y = rows!(mut workspace.normed, n, c);
                self.linear(Site::MlpProj, x, None, site_buffers!(kept, workspace), y);
            } else {
                let xa = rows!(mut kept.statistics.xa[Site::MlpProj as usize], n, self.ranks(Site::MlpProj));
                adapted_linear::xa(self.adapted(self.group(), Site::MlpProj), x, xa, n);
            }
        }
        Saved(kept)
    }
}
