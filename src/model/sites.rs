//! The linear sites of a block with their adapters, forward and backward.

use std::ops::Range;

use super::{
    arch::{SITES, Site},
    bindings::SiteBinding,
    block::{Block, Gradients, rows},
    buffers::BlockBuffers,
    layers::RowGroup,
};
use crate::{
    device::{Buffer, View, ViewMut},
    kernels::{
        activation::{self, Activation},
        adapted_linear::{
            self, AdaptedLinear, BackwardBuffers, ForwardBuffers, Layer, NormedBackward, NormedForward,
            SavedProducts,
        },
    },
};

/// What the forward of a site writes beside its output.
pub struct SiteBuffers<'a> {
    /// `drop(x) A^T` of each site.
    pub xa: &'a mut [Buffer; SITES],
    /// What g multiplies at each site, where it is kept.
    pub products: &'a mut [Option<Buffer>; SITES],
    /// Buffer for `u * x`.
    pub scaled: &'a mut Option<Buffer>,
    /// A function of the site's output, and the place of its values.
    pub activated: Option<(Activation, ViewMut<'a>)>,
}

/// What the backward of a site writes beside the gradients of trainables.
pub struct SiteGradients<'a> {
    /// Buffer for the gradient of `drop(x) A^T`.
    pub d_xa: &'a mut Buffer,
    /// Buffer for `g * dy`.
    pub scaled: &'a mut Option<Buffer>,
    /// The gradient of the input, where it is asked for.
    pub dx: Option<ViewMut<'a>>,
    /// A function f and z, where the input was f(z): `dx` is the gradient of z.
    pub input_of: Option<(Activation, View<'a>)>,
}

impl<'a> SiteGradients<'a> {
    /// Of a site whose input is no function of what its gradient is asked of.
    pub fn new(d_xa: &'a mut Buffer, scaled: &'a mut Option<Buffer>, dx: Option<ViewMut<'a>>) -> Self {
        Self { d_xa, scaled, dx, input_of: None }
    }
}

/// What a layer norm and the site after it write as one op.
pub struct NormedBuffers<'a> {
    /// The norm's output, and what follows it.
    pub normed: &'a mut Buffer,
    /// Mean and rstd of each row.
    pub stats: ViewMut<'a>,
    /// `drop(x) A^T` of each site.
    pub xa: &'a mut [Buffer; SITES],
    /// A function of the site's output, and the place of its values.
    pub activated: Option<(Activation, ViewMut<'a>)>,
}

/// Operands of a site for one group of rows, whose tokens all of them begin with.
struct Operands<'a> {
    x: View<'a>,
    residual: Option<View<'a>>,
    xa: ViewMut<'a>,
    product: Option<ViewMut<'a>>,
    scaled: Option<ViewMut<'a>>,
    y: ViewMut<'a>,
    activated: Option<(Activation, ViewMut<'a>)>,
}

impl<'a> Block<'a> {
    pub(super) fn binding(&self, group: &RowGroup<'a>, site: Site) -> &'a SiteBinding {
        &group.sites[self.layer][site as usize]
    }

    fn any(&self, site: Site, is: impl Fn(&SiteBinding) -> bool) -> bool {
        self.groups.iter().any(|group| is(self.binding(group, site)))
    }

    /// Whether the backward of `site` reads its input.
    pub(super) fn reads_input(&self, site: Site) -> bool {
        self.any(site, SiteBinding::reads_input)
    }

    /// Whether anything at `site` gets a gradient.
    pub(super) fn trains(&self, site: Site) -> bool {
        self.any(site, SiteBinding::trains)
    }

    /// Whether any row has a delta at `site`.
    pub(super) fn has_deltas(&self, site: Site) -> bool {
        self.any(site, |binding| !binding.deltas.is_empty())
    }

    /// Whether the backward of `site` reads what g multiplies.
    pub(super) fn keeps_product(&self, site: Site) -> bool {
        self.any(site, |binding| binding.vectors().keeps_product())
    }

    /// Whether the backward of `site` computes the gradient of its input whoever asks for it.
    pub(super) fn needs_dx(&self, site: Site) -> bool {
        self.any(site, |binding| binding.vectors().needs_dx())
    }

    /// Largest sum of ranks of any rows.
    pub(super) fn ranks(&self, site: Site) -> usize {
        self.groups.iter().map(|group| self.binding(group, site).ranks()).max().unwrap_or(0)
    }

    /// The layer at `site` with the adapters of `group`.
    pub(super) fn adapted(&self, group: &RowGroup<'a>, site: Site) -> AdaptedLinear<'a> {
        let (linear, binding) = (self.weights.linears()[site as usize], self.binding(group, site));
        AdaptedLinear {
            layer: Layer { weight: linear.weight.view(), bias: linear.bias.view() },
            deltas: &binding.deltas,
            vectors: binding.vectors(),
            values: group.values,
            dropout: self.dropout,
        }
    }

    /// `y` of a site, plus `residual`; and what is activated of it.
    pub(super) fn linear(
        &self,
        site: Site,
        x: View,
        residual: Option<View>,
        buffers: SiteBuffers,
        y: ViewMut,
    ) {
        let (n, ranks) = (self.seen_by(site), self.ranks(site));
        let SiteBuffers { xa: all_xa, products, scaled, activated } = buffers;
        let mut xa = rows!(mut all_xa[site as usize], n, ranks);
        let [first, others @ ..] = self.groups else { return };
        let linear = self.adapted(first, site);
        let (inputs, outputs) = (linear.layer.weight.rows, linear.layer.weight.cols);
        let mut scaled = scaled.as_mut().map(Buffer::view_mut);
        let mut y = y;
        if others.is_empty() {
            let product = products[site as usize].as_mut().map(|product| rows!(mut product, n, outputs));
            return forward(linear, n, Operands { x, residual, xa, product, scaled, y, activated });
        }
        let tokens = |group| {
            let Range { start, end } = self.tokens_of(group, site);
            (start, end - start)
        };
        if self.any(site, |binding| !binding.has_no_vectors()) {
            // The vectors of a group are in a store of its own, so each group has a product of its own.
            for group in self.groups {
                let (start, n) = tokens(group);
                let of = Operands {
                    x: x.slice(start * inputs, n * inputs),
                    residual: residual.map(|residual| residual.slice(start * outputs, n * outputs)),
                    xa: xa.reborrow().slice(start * ranks, n * ranks),
                    product: None,
                    scaled: scaled.as_mut().map(ViewMut::reborrow),
                    y: y.reborrow().slice(start * outputs, n * outputs),
                    activated: None,
                };
                if n > 0 {
                    forward(self.adapted(group, site), n, of);
                }
            }
            return activate(activated, y.as_view());
        }
        let frozen = AdaptedLinear { deltas: &[], ..linear };
        let to = ForwardBuffers::new(xa.reborrow().slice(0, 0), y.reborrow());
        if !self.has_deltas(site) {
            return adapted_linear::forward(frozen, x, residual, n, ForwardBuffers { activated, ..to });
        }
        adapted_linear::forward(frozen, x, residual, n, to);
        for group in self.groups {
            let (start, n) = tokens(group);
            adapted_linear::add_deltas(
                self.adapted(group, site),
                x.slice(start * inputs, n * inputs),
                xa.reborrow().slice(start * ranks, n * ranks),
                y.reborrow().slice(start * outputs, n * outputs),
                n,
            );
        }
        activate(activated, y.as_view());
    }

    /// `y` of a site and of the norm before it as one op, where the device has that: false, with nothing done,
    /// elsewhere.
    pub(super) fn normed_linear(&self, site: Site, x: View, buffers: NormedBuffers, y: ViewMut) -> bool {
        let [group] = self.groups else { return false };
        let (n, ranks) = (self.seen_by(site), self.ranks(site));
        let NormedBuffers { normed, stats, xa, activated } = buffers;
        let xa = rows!(mut xa[site as usize], n, ranks);
        let to = NormedForward { normed: normed.view_mut(), stats, xa, y, activated };
        adapted_linear::forward_normed(self.adapted(group, site), self.norm(group, site).1, x, n, to)
    }

    /// The backward of a site and of the norm of `x` before it as one op, where the device has that: `dx` grows by the
    /// gradient of x, and `d_normed` is workspace. False, with nothing done, elsewhere.
    pub(super) fn normed_linear_backward(
        &self,
        site: Site,
        of: (View, View, View),
        kept: &[Buffer; SITES],
        (d_normed, dx): (ViewMut, ViewMut),
        to: &mut Gradients,
    ) -> bool {
        let (n, ranks, group) = (self.seen_by(site), self.ranks(site), self.group());
        let saved = SavedProducts::new(rows!(kept[site as usize], n, ranks));
        let to = NormedBackward { grads: to.store.reborrow(), d_normed, dx };
        adapted_linear::backward_normed(self.adapted(group, site), self.norm(group, site).1, of, saved, n, to)
    }

    /// Backward of a site in a pass of one group; `kept` is what its forward left.
    pub(super) fn linear_backward(
        &self,
        site: Site,
        dy: View,
        x: View,
        kept: &BlockBuffers,
        buffers: SiteGradients,
        to: &mut Gradients,
    ) {
        let (n, ranks) = (self.seen_by(site), self.ranks(site));
        let linear = self.adapted(self.group(), site);
        let outputs = linear.layer.weight.cols;
        let product = kept.products[site as usize].as_ref().map(|product| rows!(product, n, outputs));
        let SiteGradients { d_xa, scaled, dx, input_of } = buffers;
        let xa = rows!(kept.statistics.xa[site as usize], n, ranks);
        let saved = SavedProducts { xa, product, input_of };
        let d_product = scaled.as_mut().filter(|_| linear.vectors.needs_d_product());
        let to = BackwardBuffers {
            d_product: d_product.map(|d_product| rows!(mut d_product, n, outputs)),
            ..BackwardBuffers::new(to.store.reborrow(), rows!(mut d_xa, n, ranks), dx)
        };
        adapted_linear::backward(linear, dy, x, saved, n, to);
    }
}

/// Writes the function of y that is asked for, if any is.
fn activate(activated: Option<(Activation, ViewMut)>, y: View) {
    if let Some((f, to)) = activated {
        activation::forward(f, y, to);
    }
}

/// [`adapted_linear::forward`] with the buffers that the vectors of `linear` ask for.
fn forward(linear: AdaptedLinear, n: usize, of: Operands) {
    let Operands { x, residual, xa, product, scaled, y, activated } = of;
    let inputs = linear.layer.weight.rows;
    let to = ForwardBuffers {
        xa,
        y,
        scaled_x: scaled
            .filter(|_| linear.vectors.needs_scaled_x())
            .map(|scaled| scaled.slice(0, n * inputs)),
        product: product.filter(|_| linear.vectors.keeps_product()),
        activated,
    };
    adapted_linear::forward(linear, x, residual, n, to);
}
