//! Adapters as the blocks use them: deltas by layer and site, and where the prefix comes from.

use engraft_adapters::{AdapterSet, Lora, PrefixValues, SiteVectors};

pub use super::arch::{SITES, Site};
use super::{Config, arch::Arch};
use crate::{
    error::{Error, Result},
    kernels::adapted_linear::Delta,
};

/// Deltas of one layer, by [`Site`].
pub type LayerDeltas = [Vec<Delta>; SITES];

/// A tensor of the flat store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BoundTensor {
    /// Where it begins in the flat store.
    pub at: usize,
    /// Whether it gets no gradient.
    pub frozen: bool,
}

/// The parts of a delta beside its [`Delta`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeltaParts {
    /// d `(r)`: multiplies `drop(x) A^T`.
    pub d: Option<BoundTensor>,
    /// e `(columns)`: multiplies the columns of the delta.
    pub e: Option<BoundTensor>,
    /// Whether A gets no gradient.
    pub a_frozen: bool,
    /// Whether B gets no gradient.
    pub b_frozen: bool,
}

/// The output scale g of a site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BoundScale {
    /// The learned vector `(out)`.
    pub vector: BoundTensor,
    /// Whether g is the vector over the norms of the columns of the weight with its deltas, once a step.
    pub over_norms: bool,
    /// Whether g multiplies the bias too.
    pub with_bias: bool,
}

/// What a site of a layer has beside its deltas.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SiteBinding {
    /// One for each delta of the site, in their order.
    pub deltas: Vec<DeltaParts>,
    /// u `(in)`: multiplies the input of the frozen product.
    pub u: Option<BoundTensor>,
    /// g `(out)`: multiplies the output.
    pub g: Option<BoundScale>,
    /// A bias `(out)` in place of the base's.
    pub bias: Option<BoundTensor>,
}

impl SiteBinding {
    /// Whether deltas without vectors are all that the site has. The gradient of a frozen factor is computed
    /// and not used.
    fn is_plain(&self) -> bool {
        let plain = |parts: &DeltaParts| parts.d.is_none() && parts.e.is_none();
        self.deltas.iter().all(plain) && self.u.is_none() && self.g.is_none() && self.bias.is_none()
    }
}

/// Adapter sets bound to one flat store of values.
#[derive(Debug, Clone)]
pub struct AdapterBindings {
    /// Deltas by layer.
    pub layers: Vec<LayerDeltas>,
    /// Optional parts of the sites, by layer and site.
    pub sites: Vec<[SiteBinding; SITES]>,
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
        let sites = vec![<[SiteBinding; SITES]>::default(); layers];
        Self { layers: vec![LayerDeltas::default(); layers], sites, prefix: None, len: 0 }
    }

    /// Binds `sets`, whose values lie one after another, each LoRA multiplied by its factor.
    ///
    /// # Errors
    /// When more than one set brings a prefix, or a set has a part that the blocks do not compute.
    pub fn new(sets: &[(&AdapterSet, f32)], layers: usize) -> Result<Self> {
        let bindings = Self::bind(sets, layers)?;
        let part = bindings.sites.iter().flatten().any(|site| !site.is_plain());
        let whole =
            |set: &AdapterSet| !set.norms.is_empty() || set.embedding.is_some() || set.prompt.is_some();
        if part || sets.iter().any(|(set, _)| whole(set)) {
            return Err(Error::input(
                "an adapter has a part that the blocks of this model do not compute; leave its method out",
            ));
        }
        Ok(bindings)
    }

    /// As [`AdapterBindings::new`], with every part of the sites.
    fn bind(sets: &[(&AdapterSet, f32)], layers: usize) -> Result<Self> {
        let mut bindings = Self::none(layers);
        for (set, factor) in sets {
            bindings.add(set, *factor)?;
        }
        Ok(bindings)
    }

    fn add(&mut self, set: &AdapterSet, factor: f32) -> Result<()> {
        let first = self.len;
        let at = |tensor: usize| first + set.layout.tensors[tensor].offset;
        for vectors in &set.vectors {
            self.add_vectors(set, vectors)?;
        }
        for lora in &set.loras {
            let parts = self.delta_parts(set, lora);
            self.sites[lora.layer][lora.site].deltas.push(parts);
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

    /// Tensor `index` of a set whose values begin where those of the sets before it end.
    fn bound(&self, set: &AdapterSet, index: usize) -> BoundTensor {
        let slot = &set.layout.tensors[index];
        BoundTensor { at: self.len + slot.offset, frozen: !set.layout.groups[slot.group].trainable }
    }

    fn delta_parts(&self, set: &AdapterSet, lora: &Lora) -> DeltaParts {
        DeltaParts {
            d: lora.d.map(|d| self.bound(set, d)),
            e: lora.e.map(|e| self.bound(set, e)),
            a_frozen: self.bound(set, lora.a).frozen,
            b_frozen: self.bound(set, lora.b).frozen,
        }
    }

    fn add_vectors(&mut self, set: &AdapterSet, vectors: &SiteVectors) -> Result<()> {
        let tensor = |index: usize| self.bound(set, index);
        let (u, bias) = (vectors.u.map(tensor), vectors.bias.map(tensor));
        let g = vectors.g.map(|g| BoundScale {
            vector: tensor(g.vector),
            over_norms: g.over_norms,
            with_bias: g.with_bias,
        });
        let site = &mut self.sites[vectors.layer][vectors.site];
        let twice = (u.is_some() && site.u.is_some())
            || (g.is_some() && site.g.is_some())
            || (bias.is_some() && site.bias.is_some());
        if twice {
            return Err(Error::input(
                "two of the adapters scale the same module or replace its bias; leave one --adapter out",
            ));
        }
        (site.u, site.g, site.bias) = (site.u.or(u), site.g.or(g), site.bias.or(bias));
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
        let adapted = |layer: usize| {
            let vectors = |site: &SiteBinding| site.u.is_some() || site.g.is_some() || site.bias.is_some();
            self.layers[layer].iter().any(|deltas| !deltas.is_empty())
                || self.sites[layer].iter().any(vectors)
        };
        let first = (0..self.layers.len()).find(|&layer| adapted(layer));
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

#[cfg(test)]
mod tests {
    use engraft_adapters::{AdapterSpec, Group, Layout, OutputScale, TensorSlot};

    use super::*;

    /// A set by hand: deltas on two layers that share a frozen A, d, e, u, g and a bias.
    fn set() -> AdapterSet {
        let sizes =
            [("A", 6, 1), ("B0", 8, 0), ("B1", 8, 0), ("d", 2, 0), ("e", 4, 1), ("u", 3, 0), ("g", 4, 0)];
        let mut layout = Layout { groups: vec![Group::DEFAULT, Group::FROZEN], ..Layout::default() };
        for (name, len, group) in sizes {
            let (name, shape, offset) = (name.to_owned(), vec![len], layout.len);
            layout.tensors.push(TensorSlot { name, shape, offset, group, method: "by hand" });
            layout.len += len;
        }
        let lora = |layer: usize, b: usize| Lora {
            layer,
            site: 2,
            part: None,
            columns: 0..4,
            rank: 2,
            alpha: 1.0,
            scale: 0.5,
            a: 0,
            b,
            d: Some(3),
            e: (layer == 0).then_some(4),
        };
        let g = OutputScale { vector: 6, over_norms: true, with_bias: false };
        AdapterSet {
            spec: AdapterSpec::default(),
            layout,
            loras: vec![lora(0, 1), lora(1, 2)],
            vectors: vec![SiteVectors { layer: 1, site: 2, u: Some(5), g: Some(g), bias: Some(6) }],
            norms: Vec::new(),
            embedding: None,
            prefix: None,
            prompt: None,
        }
    }

    #[test]
    fn every_part_of_a_site_is_bound_to_its_place_in_the_store() {
        let set = set();
        let bindings =
            AdapterBindings::bind(&[(&set, 1.0), (&AdapterSet { vectors: vec![], ..set.clone() }, 1.0)], 3);
        let bindings = bindings.unwrap();
        assert_eq!(bindings.len, 2 * 35);
        let deltas = &bindings.layers[1][2];
        assert_eq!((deltas[0].a, deltas[0].b, deltas[1].a, deltas[1].b), (0, 14, 35, 49), "A is shared");
        let (trained, frozen) =
            (|at| BoundTensor { at, frozen: false }, |at| BoundTensor { at, frozen: true });
        let parts = DeltaParts { d: Some(trained(22)), e: Some(frozen(24)), a_frozen: true, b_frozen: false };
        assert_eq!(bindings.sites[0][2].deltas[0], parts);
        let site = &bindings.sites[1][2];
        assert_eq!((site.u, site.bias, site.deltas[1].e), (Some(trained(28)), Some(trained(31)), None));
        let g = BoundScale { vector: trained(31), over_norms: true, with_bias: false };
        assert_eq!(site.g, Some(g));
        assert_eq!((site.deltas[1].d, bindings.lowest()), (Some(trained(35 + 22)), 0));
        let twice = AdapterBindings::bind(&[(&set, 1.0), (&set, 1.0)], 3).unwrap_err().to_string();
        assert!(twice.contains("same module"), "{twice}");
    }

    #[test]
    fn a_part_that_the_blocks_do_not_compute_is_refused() {
        assert!(AdapterBindings::new(&[(&set(), 1.0)], 3).is_err());
        let mut plain = set();
        plain.vectors.clear();
        plain.loras.iter_mut().for_each(|lora| (lora.d, lora.e) = (None, None));
        assert!(AdapterBindings::new(&[(&plain, 1.0)], 3).is_ok());
        plain.loras[0].d = Some(3);
        assert!(AdapterBindings::new(&[(&plain, 1.0)], 3).is_err());
    }
}
