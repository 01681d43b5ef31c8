//! A block of one further token for each of a few rows, as one op where the device has it.

use super::{Block, rows};
use crate::{
    device::{Device, View, ViewMut},
    kernels::{
        decode_layer::{self, Buffers, Group, Layer, RowsDelta},
        matmul::device_scratch::SMALL_BATCH,
    },
    model::{
        arch::Site,
        buffers::BlockBuffers,
        cache::{CachedRows, LayerCache},
    },
};

impl Block<'_> {
    /// The block from `x (n, c)` to `y (n, c)`; false, with nothing done, where it has to be computed op by op.
    pub(super) fn decode(
        &self,
        x: View,
        buffers: &mut BlockBuffers,
        cache: &mut LayerCache,
        y: ViewMut,
    ) -> bool {
        let n = self.cells();
        if x.device() == Device::HOST || n > SMALL_BATCH {
            return false;
        }
        let Some(layer) = self.layer(cache.capacity()) else { return false };
        let (cache, tickets) = cache.parts();
        let to = Buffers {
            cache,
            mixed: rows!(mut buffers.outputs.mixed, n, self.config.width),
            middle: rows!(mut buffers.outputs.middle, n, self.config.width),
            y,
            tickets,
        };
        decode_layer::forward(&layer, x, to)
    }

    /// `None` where a row has more than one token, a site has vectors, or rows have norms of their own.
    fn layer(&self, capacity: usize) -> Option<Layer<'_>> {
        let first = self.groups.first()?;
        let own_norm = |site| self.groups.iter().any(|group| !self.norm(group, site).0.is_none());
        let mixed = self.groups.len() > 1 && [Site::CAttn, Site::CFc].into_iter().any(own_norm);
        if mixed || self.wanted.is_some() {
            return None;
        }
        let mut groups = Vec::with_capacity(self.groups.len());
        for group in self.groups {
            let Some(CachedRows::Each(at)) = group.cached else { return None };
            let prefix = self.prefix(group).zip(group.prefix.map(|(_, p)| p));
            groups.push(Group { first: group.first, rows: group.batch, prefix, at });
        }
        Some(Layer {
            heads: self.config.heads,
            scale: self.scale(),
            norms: [Site::CAttn, Site::CFc].map(|site| self.norm(first, site).1),
            sites: [
                self.site(Site::CAttn)?,
                self.site(Site::AttnProj)?,
                self.site(Site::CFc)?,
                self.site(Site::MlpProj)?,
            ],
            activation: self.config.activation,
            groups,
            capacity,
        })
    }

    /// A site with the deltas of all rows; `None` where it has vectors.
    fn site(&self, site: Site) -> Option<decode_layer::Site<'_>> {
        let linear = self.weights.linears()[site as usize];
        let mut deltas = Vec::new();
        for group in self.groups {
            let binding = self.binding(group, site);
            if !binding.has_no_vectors() {
                return None;
            }
            let (first, rows, values) = (group.first, group.batch, group.values);
            deltas.extend(binding.deltas.iter().map(|delta| RowsDelta { delta, values, first, rows }));
        }
        Some(decode_layer::Site { weight: linear.weight.view(), bias: linear.bias.view(), deltas })
    }
}
