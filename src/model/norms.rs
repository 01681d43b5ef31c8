//! Layer norms with the base's gains and biases, or with those of adapters in place of them.

use std::ops::Range;

use super::{Norm, arch::Site, block::Block, layers::RowGroup};
use crate::{
    device::{View, ViewMut},
    error::{Error, Result},
    kernels::{
        adapted_linear::Vector,
        layernorm::{self, ParameterGradients},
    },
};

/// Number of norms in a layer: before attention and before the MLP.
pub const NORMS: usize = 2;

/// Trained vectors `(c)` that replace those of a norm of the base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NormBinding {
    /// Factor of each feature.
    pub gain: Option<Vector>,
    /// Summand of each feature.
    pub bias: Option<Vector>,
}

/// The norms of all layers, and the one before the head.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NormBindings {
    /// By layer, in the order in which a token meets them.
    pub layers: Vec<[NormBinding; NORMS]>,
    /// Of the norm before the head.
    pub last: NormBinding,
}

/// Where the gradient of a vector is added, if it has one.
fn trained(vector: Option<Vector>) -> Option<usize> {
    vector.filter(|vector| !vector.frozen).map(|vector| vector.at)
}

impl NormBinding {
    /// Whether the norm is the base's.
    pub(super) fn is_none(&self) -> bool {
        self.gain.is_none() && self.bias.is_none()
    }

    /// Whether anything of it gets a gradient.
    pub fn trains(&self) -> bool {
        trained(self.gain).or(trained(self.bias)).is_some()
    }

    /// Takes what another set has.
    ///
    /// # Errors
    /// When both have it.
    pub fn extend(&mut self, other: Self) -> Result<()> {
        if (self.gain.is_some() && other.gain.is_some()) || (self.bias.is_some() && other.bias.is_some()) {
            return Err(Error::input(
                "two of the adapters bring the same layer norm; leave one --adapter out",
            ));
        }
        (self.gain, self.bias) = (self.gain.or(other.gain), self.bias.or(other.bias));
        Ok(())
    }

    /// The norm as the op takes it: of `norm` what is not bound.
    pub fn of<'a>(&self, norm: &'a Norm, values: View<'a>, epsilon: f32) -> layernorm::Norm<'a> {
        let c = norm.gain.view().len();
        let vector = |bound: Option<Vector>| bound.map(|vector| values.slice(vector.at, c));
        layernorm::Norm {
            gain: vector(self.gain).unwrap_or_else(|| norm.gain.view()),
            bias: vector(self.bias).unwrap_or_else(|| norm.bias.view()),
            epsilon,
        }
    }

    /// Adds the gradients of what is trained to `grads`, from `dy (n, c)`, and `x` and `stats` of the forward.
    pub fn gradients(&self, dy: View, x: View, stats: View, grads: ViewMut) {
        let to = ParameterGradients { grads, gain: trained(self.gain), bias: trained(self.bias) };
        if self.trains() {
            layernorm::parameter_gradients(dy, x, stats, to);
        }
    }
}

impl NormBindings {
    /// Those of the base, for `layers` layers.
    pub fn none(layers: usize) -> Self {
        Self { layers: vec![Default::default(); layers], last: NormBinding::default() }
    }
}

/// `y (n, c)` and `stats (n, 2)` of `x (n, c)`, whose rows are of `groups`: each with its norm, and its tokens. The groups
/// share one call unless one of them has a norm of its own.
pub fn normalise<'g, 'a, 'n>(
    groups: &'g [RowGroup<'a>],
    of: impl Fn(&'g RowGroup<'a>) -> (NormBinding, layernorm::Norm<'n>, Range<usize>),
    x: View,
    y: ViewMut,
    stats: ViewMut,
) {
    let Some(first) = groups.first() else { return };
    let alone = groups.len() == 1 || groups.iter().all(|group| of(group).0.is_none());
    if alone {
        return layernorm::forward(x, of(first).1, y, stats);
    }
    let (mut y, mut stats) = (y, stats);
    for group in groups {
        let (_, norm, Range { start, end }) = of(group);
        let (c, n) = (norm.gain.len(), end - start);
        if n > 0 {
            let (y, stats) = (y.reborrow().slice(start * c, n * c), stats.reborrow().slice(start * 2, n * 2));
            layernorm::forward(x.slice(start * c, n * c), norm, y, stats);
        }
    }
}

impl<'a> Block<'a> {
    /// The norm before `site` with the vectors of `group`.
    pub(super) fn norm(&self, group: &RowGroup<'a>, site: Site) -> (NormBinding, layernorm::Norm<'a>) {
        let (norm, index) = match site {
            Site::CAttn | Site::AttnProj => (&self.weights.ln_1, 0),
            Site::CFc | Site::MlpProj => (&self.weights.ln_2, 1),
        };
        let binding = group.norms.layers[self.layer][index];
        (binding, binding.of(norm, group.values, self.config.layer_norm_eps))
    }

    /// The norm before `site`, of all tokens that the site sees.
    pub(super) fn normalise(&self, site: Site, x: View, y: ViewMut, stats: ViewMut) {
        let of = |group: &RowGroup<'a>| {
            let (binding, norm) = self.norm(group, site);
            (binding, norm, self.tokens_of(group, site))
        };
        normalise(self.groups, of, x, y, stats);
    }
}
