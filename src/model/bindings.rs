//! Adapters as the blocks use them: deltas by layer and site, and where the prefix comes from.

use engraft_adapters::{AdapterSet, PrefixValues};

pub use super::arch::{SITES, Site};
use super::{Config, arch::Arch};
use crate::{
    error::{Error, Result},
    kernels::adapted_linear::Delta,
};

/// Deltas of one layer, by [`Site`].
pub type LayerDeltas = [Vec<Delta>; SITES];

/// Adapter sets bound to one flat store of values.
#[derive(Debug, Clone)]
pub struct AdapterBindings {
    /// Deltas by layer.
    pub layers: Vec<LayerDeltas>,
    /// The prefix, if any set has one.
    pub prefix: Option<PrefixBinding>,
    /// Length of the flat store.
    pub len: usize,
}

/// A prefix: its length and where its values lie in the flat store.
#[derive(Debug, Clone)]
pub struct PrefixBinding {
    /// p.
    pub length: usize,
    /// What is learned of it.
    pub source: PrefixSource,
}

/// What is learned of a prefix; numbers are places in the flat store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixSource {
    /// Keys and values themselves, `(p, 2 l c)`.
    Direct(usize),
    /// A small network that yields them.
    Projected(Projection),
}

/// Places of the network `tanh(E W1^T + b1) W2^T + b2` in the flat store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Projection {
    /// Hidden width.
    pub hidden: usize,
    /// E `(p, c)`.
    pub embedding: usize,
    /// W1 `(hidden, c)`.
    pub in_weight: usize,
    /// b1 `(hidden)`.
    pub in_bias: usize,
    /// W2 `(2 l c, hidden)`.
    pub out_weight: usize,
    /// b2 `(2 l c)`.
    pub out_bias: usize,
}

impl AdapterBindings {
    /// No adapter: the base alone.
    pub fn none(layers: usize) -> Self {
        Self { layers: vec![LayerDeltas::default(); layers], prefix: None, len: 0 }
    }

    /// Binds `sets`, whose values lie one after another, each LoRA multiplied by its factor.
    ///
    /// # Errors
    /// When more than one set brings a prefix.
    pub fn new(sets: &[(&AdapterSet, f32)], layers: usize) -> Result<Self> {
        let mut bindings = Self::none(layers);
        for (set, factor) in sets {
            bindings.add(set, *factor)?;
        }
        Ok(bindings)
    }

    fn add(&mut self, set: &AdapterSet, factor: f32) -> Result<()> {
        let at = |tensor: usize| self.len + set.layout.tensors[tensor].offset;
        for lora in &set.loras {
            self.layers[lora.layer][lora.site].push(Delta {
                a: at(lora.a),
                b: at(lora.b),
                rank: lora.rank,
                columns: lora.columns.clone(),
                scale: lora.scale * factor,
                ..Delta::default()
            });
        }
        if let Some(prefix) = &set.prefix {
            let source = match prefix.values {
                PrefixValues::Direct { prompt } => PrefixSource::Direct(at(prompt)),
                PrefixValues::Projected { hidden, embedding, in_weight, in_bias, out_weight, out_bias } => {
                    PrefixSource::Projected(Projection {
                        hidden,
                        embedding: at(embedding),
                        in_weight: at(in_weight),
                        in_bias: at(in_bias),
                        out_weight: at(out_weight),
                        out_bias: at(out_bias),
                    })
                }
            };
            let wired = PrefixBinding { length: prefix.length, source };
            if self.prefix.replace(wired).is_some() {
                return Err(Error::input(
                    "two of the adapters bring a prefix, and a model has room for one; leave one --adapter out",
                ));
            }
        }
        self.len += set.layout.len;
        Ok(())
    }

    /// Lays A and B of all deltas in `values` transposed, each where it was, for a CPU that generates.
    pub(super) fn turn(&mut self, values: &mut [f32], config: &Config) {
        let arch = Arch::of(config);
        for (site, delta) in self.layers.iter_mut().flat_map(|sites| sites.iter_mut().enumerate()) {
            let inputs = arch.sites[site].inputs;
            for delta in delta.iter_mut().filter(|delta| !delta.transposed) {
                let columns = delta.columns.len();
                turn(&mut values[delta.a..][..delta.rank * inputs], inputs);
                turn(&mut values[delta.b..][..columns * delta.rank], delta.rank);
                delta.transposed = true;
            }
        }
    }

    /// The lowest layer with anything trainable; below it no gradient is needed.
    pub fn lowest(&self) -> usize {
        let first = self.layers.iter().position(|sites| sites.iter().any(|deltas| !deltas.is_empty()));
        match (&self.prefix, first) {
            (Some(_), _) => 0,
            (None, first) => first.unwrap_or(self.layers.len()),
        }
    }

    /// Prefix rows, 0 without a prefix.
    pub fn prefix_len(&self) -> usize {
        self.prefix.as_ref().map_or(0, |prefix| prefix.length)
    }

    /// Sum of the ranks at `site` of `layer`.
    pub fn ranks(&self, layer: usize, site: usize) -> usize {
        self.layers[layer][site].iter().map(|delta| delta.rank).sum()
    }

    /// Whether any layer has an adapter at `site`.
    pub fn adapts(&self, site: Site) -> bool {
        self.layers.iter().any(|sites| !sites[site as usize].is_empty())
    }

    /// Largest sum of ranks of any site.
    pub fn most_ranks(&self) -> usize {
        let sites = (0..self.layers.len()).flat_map(|layer| (0..SITES).map(move |site| (layer, site)));
        sites.map(|(layer, site)| self.ranks(layer, site)).max().unwrap_or(0)
    }
}

/// Transposes a matrix of rows of `columns` elements.
fn turn(matrix: &mut [f32], columns: usize) {
    let (old, rows) = (matrix.to_vec(), matrix.len() / columns.max(1));
    for (at, value) in matrix.iter_mut().enumerate() {
        *value = old[at % rows * columns + at / rows];
    }
}
