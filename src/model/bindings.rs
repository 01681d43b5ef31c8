//! Adapters as the blocks use them: sites by layer, and where the prefix comes from.

use std::collections::BTreeMap;

use engraft_adapters::{AdapterSet, PrefixValues};

pub use super::arch::{SITES, Site};
use super::{Config, arch::Arch};
use crate::{
    error::{Error, Result},
    kernels::adapted_linear::{BiasPlace, Delta, Scaling, SiteVectors, Vector},
};

/// The sites of one layer, by [`Site`].
pub type LayerSites = [SiteBinding; SITES];

/// A linear site of a layer with its adapters.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SiteBinding {
    /// Low-rank deltas.
    pub deltas: Vec<Delta>,
    /// u: multiplies the input of the frozen product.
    pub u: Option<Scaling>,
    /// g: multiplies the output.
    pub g: Option<Scaling>,
    /// A bias `(out)` in place of the base's.
    pub bias: Option<Vector>,
    /// Whether g multiplies the bias.
    pub bias_place: BiasPlace,
}

impl SiteBinding {
    /// Sum of the ranks of its deltas.
    pub fn ranks(&self) -> usize {
        self.deltas.iter().map(|delta| delta.rank).sum()
    }

    /// Its vectors, as the op takes them.
    pub fn vectors(&self) -> SiteVectors<'_> {
        SiteVectors {
            u: self.u.as_slice(),
            g: self.g.as_slice(),
            bias: self.bias,
            bias_place: self.bias_place,
        }
    }

    /// Whether deltas are all that the site has.
    pub fn has_no_vectors(&self) -> bool {
        self.u.is_none() && self.g.is_none() && self.bias.is_none()
    }

    /// Whether anything of it gets a gradient.
    pub fn trains(&self) -> bool {
        let scalings = self.u.iter().chain(&self.g).map(|scaling| scaling.vector);
        self.deltas.iter().any(Delta::trains) || scalings.chain(self.bias).any(|vector| !vector.frozen)
    }

    /// Whether its backward reads the input of the site.
    pub fn reads_input(&self) -> bool {
        !self.deltas.is_empty() || self.vectors().needs_dx()
    }
}

/// Adapter sets bound to one flat store of values.
#[derive(Debug, Clone)]
pub struct AdapterBindings {
    /// Sites by layer.
    pub layers: Vec<LayerSites>,
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
        Self { layers: vec![LayerSites::default(); layers], prefix: None, len: 0 }
    }

    /// Binds `sets`, whose values lie one after another, each LoRA multiplied by its factor.
    ///
    /// # Errors
    /// When more than one set brings a prefix, or a set has a part that the blocks do not compute.
    pub fn new(sets: &[(&AdapterSet, f32)], layers: usize) -> Result<Self> {
        let mut bindings = Self::none(layers);
        for (set, factor) in sets {
            bindings.add(set, *factor)?;
        }
        Ok(bindings)
    }

    fn add(&mut self, set: &AdapterSet, factor: f32) -> Result<()> {
        let first = self.len;
        let at = |tensor: usize| first + set.layout.tensors[tensor].offset;
        let whole = !set.norms.is_empty() || set.embedding.is_some() || set.prompt.is_some();
        let derived = set.vectors.iter().any(|vectors| vectors.g.is_some_and(|g| g.over_norms));
        if whole || derived {
            return Err(Error::input(
                "an adapter has a part that the blocks of this model do not compute; leave its method out",
            ));
        }
        for vectors in &set.vectors {
            self.add_vectors(set, vectors)?;
        }
        for (number, lora) in set.loras.iter().enumerate() {
            let delta = self.delta(set, number, factor);
            self.layers[lora.layer][lora.site].deltas.push(delta);
        }
        if let Some(prefix) = &set.prefix {
            let source = match prefix.values {
                PrefixValues::Direct { values } => PrefixSource::Direct(at(values)),
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
    fn vector(&self, set: &AdapterSet, index: usize) -> Vector {
        let slot = &set.layout.tensors[index];
        Vector { at: self.len + slot.offset, frozen: !set.layout.groups[slot.group].trainable }
    }

    fn add_vectors(&mut self, set: &AdapterSet, vectors: &engraft_adapters::SiteVectors) -> Result<()> {
        let scaling = |index: usize| Scaling {
            vector: self.vector(set, index),
            columns: 0..set.layout.tensors[index].len(),
            tokens: None,
        };
        let (u, g) = (vectors.u.map(scaling), vectors.g.map(|g| scaling(g.vector)));
        let bias = vectors.bias.map(|bias| self.vector(set, bias));
        let site = &mut self.layers[vectors.layer][vectors.site];
        let twice = (u.is_some() && site.u.is_some())
            || (g.is_some() && site.g.is_some())
            || (bias.is_some() && site.bias.is_some());
        if twice {
            return Err(Error::input(
                "two of the adapters scale the same module or replace its bias; leave one --adapter out",
            ));
        }
        if vectors.g.is_some_and(|g| g.with_bias) {
            site.bias_place = BiasPlace::Inside;
        }
        (site.u, site.g, site.bias) = (site.u.take().or(u), site.g.take().or(g), site.bias.or(bias));
        Ok(())
    }

    /// Delta `number` of a set.
    fn delta(&self, set: &AdapterSet, number: usize, factor: f32) -> Delta {
        let lora = &set.loras[number];
        let (a, b) = (self.vector(set, lora.a), self.vector(set, lora.b));
        let shares_a = set.loras.iter().filter(|other| other.a == lora.a).count() > 1;
        Delta {
            a: a.at,
            b: b.at,
            rank: lora.rank,
            columns: lora.columns.clone(),
            scale: lora.scale * factor,
            d: lora.d.map(|d| self.vector(set, d)),
            e: lora.e.map(|e| self.vector(set, e)),
            a_frozen: a.frozen,
            b_frozen: b.frozen,
            // A number that no A has.
            mask: shares_a.then(|| self.len + set.layout.len + number),
            ..Delta::default()
        }
    }

    /// Lays A and B of all deltas in `values` transposed, each where it was, for a CPU that generates. Deltas that read
    /// the same values in different shapes are left as they are, and so are all others: there is one store.
    pub(super) fn transpose_factors(&mut self, values: &mut [f32], config: &Config) {
        let arch = Arch::of(config);
        let mut factors = BTreeMap::new();
        for (site, shape) in self.layers.iter().flat_map(|sites| sites.iter().zip(&arch.sites)) {
            for delta in &site.deltas {
                let (a, b) = ((delta.rank, shape.inputs), (delta.columns.len(), delta.rank));
                let alike = [(delta.a, a), (delta.b, b)]
                    .into_iter()
                    .all(|(at, shape)| *factors.entry(at).or_insert(shape) == shape);
                if !alike || delta.transposed {
                    return;
                }
            }
        }
        for (at, (rows, columns)) in factors {
            transpose(&mut values[at..][..rows * columns], columns);
        }
        let sites = self.layers.iter_mut().flatten();
        sites.flat_map(|site| &mut site.deltas).for_each(|delta| delta.transposed = true);
    }

    /// The lowest layer with anything trainable; below it no gradient is needed.
    pub fn lowest(&self) -> usize {
        let first = self.layers.iter().position(|sites| sites.iter().any(SiteBinding::trains));
        match (&self.prefix, first) {
            (Some(_), _) => 0,
            (None, first) => first.unwrap_or(self.layers.len()),
        }
    }

    /// Prefix rows, 0 without a prefix.
    pub fn prefix_len(&self) -> usize {
        self.prefix.as_ref().map_or(0, |prefix| prefix.length)
    }

    /// Whether the backward of any layer reads the input of `site`.
    pub fn reads_input(&self, site: Site) -> bool {
        self.layers.iter().any(|sites| sites[site as usize].reads_input())
    }

    /// Columns of the room that vectors take in a forward, or in both directions of a `training`: of the widest input
    /// with a u and the widest output with a g. 0 without any.
    pub fn scaled_width(&self, arch: &Arch, training: bool) -> usize {
        let sites = self.layers.iter().flat_map(|sites| sites.iter().zip(&arch.sites));
        let widths = sites.map(|(site, shape)| {
            let vectors = site.vectors();
            let input = if vectors.needs_scaled_x() { shape.inputs } else { 0 };
            let output = if training && vectors.needs_d_product() { shape.outputs } else { 0 };
            input.max(output)
        });
        widths.max().unwrap_or(0)
    }

    /// Largest sum of ranks of any site.
    pub fn most_ranks(&self) -> usize {
        self.layers.iter().flatten().map(SiteBinding::ranks).max().unwrap_or(0)
    }

    /// Largest rank of a delta; 0 without one.
    pub fn most_rank(&self) -> usize {
        self.deltas().map(|delta| delta.rank).max().unwrap_or(0)
    }

    /// Whether a delta has d or e.
    pub fn scales_deltas(&self) -> bool {
        self.deltas().any(Delta::scales)
    }

    fn deltas(&self) -> impl Iterator<Item = &Delta> {
        self.layers.iter().flatten().flat_map(|site| &site.deltas)
    }
}

/// Transposes a matrix of rows of `columns` elements.
fn transpose(matrix: &mut [f32], columns: usize) {
    let (old, rows) = (matrix.to_vec(), matrix.len() / columns.max(1));
    for (at, value) in matrix.iter_mut().enumerate() {
        *value = old[at % rows * columns + at / rows];
    }
}

#[cfg(test)]
mod tests {
    use engraft_adapters::{AdapterSpec, Group, Layout, Lora, NormVectors, OutputScale, Prompt, TensorSlot};

    use super::*;

    /// A set by hand: deltas on two layers that share a frozen A and d; one has a frozen e.
    fn set() -> AdapterSet {
        let sizes = [("A", 6, 1), ("B0", 8, 0), ("B1", 8, 0), ("d", 2, 0), ("e", 4, 1)];
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
        AdapterSet {
            spec: AdapterSpec::default(),
            layout,
            loras: vec![lora(0, 1), lora(1, 2)],
            vectors: Vec::new(),
            norms: Vec::new(),
            embedding: None,
            prefix: None,
            prompt: None,
        }
    }

    #[test]
    fn every_part_of_a_delta_is_bound_to_its_place_in_the_store() {
        let set = set();
        let bindings = AdapterBindings::new(&[(&set, 1.0), (&set, 0.5)], 3).unwrap();
        assert_eq!((bindings.len, bindings.lowest()), (2 * 28, 0));
        let [first, second] = [0, 1].map(|layer| &bindings.layers[layer][2].deltas);
        let expected = Delta {
            a: 0,
            b: 6,
            rank: 2,
            columns: 0..4,
            scale: 0.5,
            d: Some(Vector::trained(22)),
            e: Some(Vector::frozen(24)),
            a_frozen: true,
            mask: Some(28),
            ..Delta::default()
        };
        assert_eq!(first[0], expected);
        assert_eq!((second[0].a, second[0].b, second[0].e), (0, 14, None), "A is shared");
        assert_ne!(second[0].mask, first[0].mask, "one mask each");
        assert_eq!((second[1].a, second[1].b, second[1].scale), (28, 42, 0.25));
        assert_eq!(second[1].d, Some(Vector::trained(28 + 22)));
    }

    fn vectors(
        u: Option<usize>,
        g: Option<OutputScale>,
        bias: Option<usize>,
    ) -> engraft_adapters::SiteVectors {
        engraft_adapters::SiteVectors { layer: 1, site: 2, u, g, bias }
    }

    #[test]
    fn vectors_of_a_site_are_bound_once() {
        let g = OutputScale { vector: 4, over_norms: false, with_bias: true };
        let scales = AdapterSet { loras: vec![], vectors: vec![vectors(Some(3), Some(g), None)], ..set() };
        let bias = AdapterSet { loras: vec![], vectors: vec![vectors(None, None, Some(4))], ..set() };
        let bindings = AdapterBindings::new(&[(&scales, 1.0), (&bias, 1.0)], 3).unwrap();
        let site = &bindings.layers[1][2];
        let scaling = |vector, len| Some(Scaling { vector, columns: 0..len, tokens: None });
        assert_eq!(site.u, scaling(Vector::trained(22), 2));
        assert_eq!(site.g, scaling(Vector::frozen(24), 4));
        assert_eq!((site.bias, site.bias_place), (Some(Vector::frozen(28 + 24)), BiasPlace::Inside));
        assert_eq!(bindings.lowest(), 1);
        for twice in [&scales, &bias] {
            let error = AdapterBindings::new(&[(twice, 1.0), (twice, 1.0)], 3).unwrap_err().to_string();
            assert!(error.contains("same module"), "{error}");
        }
    }

    #[test]
    fn deltas_that_share_nothing_have_the_masks_of_their_factors() {
        let mut set = set();
        set.loras.pop();
        let bindings = AdapterBindings::new(&[(&set, 1.0)], 3).unwrap();
        assert_eq!(bindings.layers[0][2].deltas[0].mask, None);
    }

    #[test]
    fn the_lowest_layer_is_the_first_with_anything_trainable() {
        let mut set = set();
        set.loras[0].d = None;
        set.layout.tensors[1].group = 1;
        assert_eq!(AdapterBindings::new(&[(&set, 1.0)], 3).unwrap().lowest(), 1);
        set.layout.groups[1] = Group::DEFAULT;
        assert_eq!(AdapterBindings::new(&[(&set, 1.0)], 3).unwrap().lowest(), 0);
    }

    #[test]
    fn shared_factors_are_transposed_once() {
        let config =
            Config { width: 3, inner: 4, ..crate::model::builtin::builtin("gpt2").unwrap().unwrap() };
        let mut bindings = AdapterBindings::new(&[(&set(), 1.0)], 3).unwrap();
        let mut values: Vec<f32> = (0..28u8).map(f32::from).collect();
        let before = values.clone();
        bindings.transpose_factors(&mut values, &config);
        assert_eq!(values[..6], [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(values[6..14], [6.0, 8.0, 10.0, 12.0, 7.0, 9.0, 11.0, 13.0]);
        assert_eq!(values[22..], before[22..], "vectors have no other layout");
        assert!(bindings.layers.iter().flatten().flat_map(|site| &site.deltas).all(|delta| delta.transposed));
        let mut other = AdapterBindings::new(&[(&set(), 1.0)], 3).unwrap();
        other.layers[1][2].deltas[0].a = 6;
        let mut values = before.clone();
        other.transpose_factors(&mut values, &config);
        assert_eq!(values, before, "B of one delta is A of the other, in another shape");
    }

    #[test]
    fn a_part_that_the_blocks_do_not_compute_is_refused() {
        let refused = |set: &AdapterSet| AdapterBindings::new(&[(set, 1.0)], 3).is_err();
        assert!(!refused(&set()));
        let g = OutputScale { vector: 4, over_norms: true, with_bias: false };
        assert!(refused(&AdapterSet { vectors: vec![vectors(None, Some(g), None)], ..set() }));
        let norm = NormVectors { layer: None, norm: 0, gain: Some(5), bias: None };
        assert!(refused(&AdapterSet { norms: vec![norm], ..set() }));
        assert!(refused(&AdapterSet { prompt: Some(Prompt { length: 1, embeddings: 5 }), ..set() }));
    }
}
