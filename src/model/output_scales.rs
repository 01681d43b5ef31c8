//! Output scales that follow from trainables and weights: a learned vector over the norms of a site's columns (DoRA).
//!
//! They are derived once after the values have changed, in a pass over the layers that have any, for which a streamed
//! base is streamed once more. Their places, and those of their gradients, are at the end of the flat buffers, so a site
//! does not know that its g is derived. The norms stay until the gradient of a step is complete.

use engraft_adapters::AdapterSet;

use crate::{
    device::{
        Buffer,
        DType::F32,
        ViewMut,
        arena::{Arenas, Placement},
        cpu::on_pool,
    },
    error::Result,
    kernels::column_norms::{self, AdaptedMatrix},
};

use super::{
    Base,
    bindings::{AdapterBindings, DerivedScale},
    weight_streamer::{Input, Stage, WeightStreamer},
};

/// Largest sum of ranks at a site whose output scale is derived from the norms of its columns.
pub fn derived_ranks(set: &AdapterSet) -> Option<usize> {
    let derived = set.vectors.iter().filter(|vectors| vectors.g.is_some_and(|g| g.over_norms));
    let ranks = derived.map(|vectors| {
        let place = (vectors.layer, vectors.site);
        let loras = set.loras.iter().filter(|lora| (lora.layer, lora.site) == place);
        loras.map(|lora| lora.rank).sum()
    });
    ranks.max()
}

/// The norms that output scales are derived from.
pub struct OutputScales {
    /// Norms of the columns of all derived scales, in the order of [`AdapterBindings::derived`].
    norms: Buffer,
}

impl OutputScales {
    /// Memory for the norms from `arenas`; `None` where the bindings derive no scale.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    pub fn new(bindings: &AdapterBindings, arenas: &mut Arenas) -> Result<Option<Self>> {
        let len = bindings.store_len() - bindings.len;
        if len == 0 {
            return Ok(None);
        }
        let norms = arenas
            .build("trainables", Placement::Memory, |arena| arena.take("norms of columns", F32, &[len]))?;
        Ok(Some(Self { norms }))
    }

    /// Derives all scales from the values in `store`, and writes them to its end.
    pub fn derive(
        &mut self,
        base: &Base,
        streamer: &mut WeightStreamer,
        bindings: &AdapterBindings,
        store: ViewMut,
    ) {
        let (values, mut scales) = store.split_at(bindings.len);
        let values = values.into_view();
        let mut layers: Vec<usize> = bindings.derived.iter().map(|derived| derived.layer).collect();
        layers.sort_unstable();
        layers.dedup();
        on_pool(|| {
            for (index, &layer) in layers.iter().enumerate() {
                let next = layers.get(index + 1).map(|&next| Stage::Block(next));
                streamer.enter(&base.weights, Stage::Block(layer), next, Input::default());
                let linears = streamer.block(&base.weights, layer).linears();
                for derived in bindings.derived.iter().filter(|derived| derived.layer == layer) {
                    let DerivedScale { site, magnitude, at, columns, .. } = *derived;
                    let place = at - bindings.len;
                    let mut norms = self.norms.view_mut().slice(place, columns);
                    let deltas = &bindings.layers[layer][site].deltas;
                    let matrix = AdaptedMatrix { weight: linears[site].weight.view(), deltas, values };
                    column_norms::forward(matrix, norms.reborrow());
                    let m = values.slice(magnitude.at, columns);
                    column_norms::output_scale(m, norms.as_view(), scales.reborrow().slice(place, columns));
                }
            }
            streamer.leave(&base.weights, None);
        });
    }

    /// Adds to the gradients of all learned vectors what follows from those of the scales at the end of `gradient`.
    pub fn backward(&self, bindings: &AdapterBindings, gradient: ViewMut) {
        let (mut gradient, scales) = gradient.split_at(bindings.len);
        let trained = bindings.derived.iter().filter(|derived| !derived.magnitude.frozen);
        for DerivedScale { magnitude, at, columns, .. } in trained {
            let place = at - bindings.len;
            let norms = self.norms.view().slice(place, *columns);
            let to = gradient.reborrow().slice(magnitude.at, *columns);
            column_norms::output_scale_backward(scales.as_view().slice(place, *columns), norms, to);
        }
    }
}
