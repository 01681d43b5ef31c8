//! Adapters as the blocks use them: sites by layer, and where the prefix comes from.

use std::{collections::BTreeMap, ops::Range};

use engraft_adapters::{AdapterSet, OutputScale, PrefixValues};

pub use super::arch::{SITES, Site};
use super::{
    Config,
    arch::Arch,
    norms::{NormBinding, NormBindings},
};
use crate::{
    error::{Error, Result},
    kernels::{
        adapted_linear::{BiasPlace, Delta, Scaling, SiteVectors, Vector},
        embed::EmbeddingDelta,
    },
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
    /// Layer norms.
    pub norms: NormBindings,
    /// The embedding of tokens.
    pub embedding: EmbeddingBinding,
    /// The prefix, if any set has one.
    pub prefix: Option<PrefixBinding>,
    /// Values of the sets, which the flat store begins with.
    pub len: usize,
    /// Output scales that follow from those values and the weights. They have the end of the flat store, one after
    /// another in this order, and so have their gradients.
    pub derived: Vec<DerivedScale>,
}

/// The output scale g of a site that is a learned vector m over the norms of the site's columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DerivedScale {
    /// Layer of the base.
    pub layer: usize,
    /// Index of the site.
    pub site: usize,
    /// m `(out)`.
    pub magnitude: Vector,
    /// Where g `(out)` begins in the flat store.
    pub at: usize,
    /// Number of columns, out.
    pub columns: usize,
    /// Values of the set that it belongs to.
    owner: Range<usize>,
}

/// The embedding of tokens with its adapters.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct EmbeddingBinding {
    /// Low-rank deltas of wte.
    pub deltas: Vec<EmbeddingDelta>,
    /// Virtual tokens in front of every document, if any set has them.
    pub prompt: Option<PromptBinding>,
}

/// Learned rows `(p, c)` of the embedding, those of ids v, v + 1, ..
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptBinding {
    /// p.
    pub length: usize,
    /// The rows in the flat store.
    pub rows: Vector,
}

impl EmbeddingBinding {
    /// Whether anything of it gets a gradient.
    pub fn trains(&self) -> bool {
        self.deltas.iter().any(EmbeddingDelta::trains)
            || self.prompt.is_some_and(|prompt| !prompt.rows.frozen)
    }

    /// Largest rank of a delta; 0 without one.
    pub fn most_rank(&self) -> usize {
        self.deltas.iter().map(|delta| delta.rank).max().unwrap_or(0)
    }
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
        Self {
            layers: vec![LayerSites::default(); layers],
            norms: NormBindings::none(layers),
            embedding: EmbeddingBinding::default(),
            prefix: None,
            len: 0,
            derived: Vec::new(),
        }
    }

    /// Binds `sets`, whose values are one after another, each low-rank delta multiplied by its factor.
    ///
    /// # Errors
    /// When two sets bring what a model has room for once, or an output scale follows from norms of which another set's
    /// deltas are a part.
    pub fn new(sets: &[(&AdapterSet, f32)], layers: usize) -> Result<Self> {
        let mut bindings = Self::none(layers);
        for (set, factor) in sets {
            bindings.add(set, *factor)?;
        }
        bindings.place_derived()?;
        Ok(bindings)
    }

    /// Gives output scales that are derived their places after all values.
    fn place_derived(&mut self) -> Result<()> {
        let mut at = self.len;
        for derived in &mut self.derived {
            let site = &mut self.layers[derived.layer][derived.site];
            if site.deltas.iter().any(|delta| !derived.owner.contains(&delta.a)) {
                return Err(Error::input(
                    "one of the adapters scales a module by the norms of its columns (DoRA), and another one changes these columns; leave one --adapter out",
                ));
            }
            let vector = Vector { at, frozen: derived.magnitude.frozen };
            site.g = Some(Scaling { vector, columns: 0..derived.columns, tokens: None });
            derived.at = at;
            at += derived.columns;
        }
        Ok(())
    }

    /// Length of the flat store: the values, and what is derived from them.
    pub fn store_len(&self) -> usize {
        self.len + self.derived.iter().map(|derived| derived.columns).sum::<usize>()
    }

    fn add(&mut self, set: &AdapterSet, factor: f32) -> Result<()> {
        let first = self.len;
        let at = |tensor: usize| first + set.layout.tensors[tensor].offset;
        for vectors in &set.vectors {
            self.add_vectors(set, vectors)?;
        }
        for norm in &set.norms {
            let vector = |index: Option<usize>| index.map(|index| self.vector(set, index));
            let new = NormBinding { gain: vector(norm.gain), bias: vector(norm.bias) };
            match norm.layer {
                Some(layer) => self.norms.layers[layer][norm.norm].extend(new)?,
                None => self.norms.last.extend(new)?,
            }
        }
        for (number, lora) in set.loras.iter().enumerate() {
            let delta = self.delta(set, number, factor);
            self.layers[lora.layer][lora.site].deltas.push(delta);
        }
        if let Some(delta) = &set.embedding {
            self.embedding.deltas.push(EmbeddingDelta {
                a: self.vector(set, delta.a),
                b: self.vector(set, delta.b),
                rank: delta.rank,
                scale: delta.scale * factor,
            });
        }
        if let Some(prompt) = &set.prompt {
            let rows = self.vector(set, prompt.embeddings);
            let bound = PromptBinding { length: prompt.length, rows };
            if self.embedding.prompt.replace(bound).is_some() {
                return Err(Error::input(
                    "two of the adapters bring a prompt, and a model has room for one; leave one --adapter out",
                ));
            }
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
        if let (Some(OutputScale { over_norms: true, .. }), Some(Scaling { vector, columns, .. })) =
            (vectors.g, &g)
        {
            let (layer, site, columns) = (vectors.layer, vectors.site, columns.len());
            let owner = self.len..self.len + set.layout.len;
            // The place is known when all sets are bound.
            self.derived.push(DerivedScale { layer, site, magnitude: *vector, at: 0, columns, owner });
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

    /// The lowest layer that a backward comes to: the first with anything trainable, and the first of all where
    /// anything in front of the layers is.
    pub fn lowest(&self) -> usize {
        let mut layers = self.layers.iter().zip(&self.norms.layers);
        let first = layers.position(|(sites, norms)| {
            sites.iter().any(SiteBinding::trains) || norms.iter().any(NormBinding::trains)
        });
        let in_front = self.prefix.is_some() || self.embedding.trains();
        if in_front { 0 } else { first.unwrap_or(self.layers.len()) }
    }

    /// Prefix rows, 0 without a prefix.
    pub fn prefix_len(&self) -> usize {
        self.prefix.as_ref().map_or(0, |prefix| prefix.length)
    }

    /// Virtual tokens in front of every document, 0 without a prompt.
    pub fn prompt_len(&self) -> usize {
        self.embedding.prompt.map_or(0, |prompt| prompt.length)
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
    use engraft_adapters::{AdapterSpec, Group, Layout, Lora, NormVectors, Prompt, TensorSlot};

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
    fn output_scales_over_norms_come_after_the_values_of_all_sets() {
        let g = |vector| OutputScale { vector, over_norms: true, with_bias: false };
        let both = vec![
            engraft_adapters::SiteVectors { layer: 0, ..vectors(None, Some(g(4)), None) },
            vectors(None, Some(g(1)), None),
        ];
        let (own, other) = (AdapterSet { vectors: both, ..set() }, AdapterSet { loras: vec![], ..set() });
        let bindings = AdapterBindings::new(&[(&other, 1.0), (&own, 1.0)], 3).unwrap();
        assert_eq!((bindings.len, bindings.store_len()), (2 * 28, 2 * 28 + 4 + 8));
        let found = bindings.derived.iter().map(|one| (one.layer, one.magnitude, one.at, one.columns));
        let (frozen, trained) = (Vector::frozen(28 + 24), Vector::trained(28 + 6));
        assert_eq!(found.collect::<Vec<_>>(), [(0, frozen, 56, 4), (1, trained, 60, 8)]);
        let g = |layer: usize| bindings.layers[layer][2].g.clone().unwrap();
        assert_eq!((g(0).vector, g(0).columns), (Vector::frozen(56), 0..4));
        assert_eq!((g(1).vector, g(1).columns), (Vector::trained(60), 0..8));
        // Deltas of another set would be a part of the norms.
        for sets in [[(&own, 1.0), (&set(), 1.0)], [(&set(), 1.0), (&own, 1.0)]] {
            let error = AdapterBindings::new(&sets, 3).unwrap_err().to_string();
            assert!(error.contains("norms of its columns"), "{error}");
        }
    }

    #[test]
    fn norms_are_bound_once_and_count_for_the_lowest_layer() {
        let norm = |layer, gain, bias| NormVectors { layer, norm: 0, gain, bias };
        let of = |norms| AdapterSet { loras: vec![], norms, ..set() };
        let all =
            of(vec![norm(Some(1), Some(4), None), norm(Some(2), None, Some(3)), norm(None, Some(3), None)]);
        let bias = of(vec![norm(Some(1), None, Some(3)), norm(None, None, Some(3))]);
        let bindings = AdapterBindings::new(&[(&all, 1.0), (&bias, 1.0)], 3).unwrap();
        let [gain, first] = [Vector::frozen(24), Vector::trained(28 + 22)].map(Some);
        assert_eq!(bindings.norms.layers[1][0], NormBinding { gain, bias: first });
        assert_eq!(bindings.norms.last, NormBinding { gain: Some(Vector::trained(22)), bias: first });
        assert_eq!(bindings.norms.layers[1][1], NormBinding::default());
        assert_eq!(bindings.lowest(), 1);
        let lowest = |norms| AdapterBindings::new(&[(&of(norms), 1.0)], 3).unwrap().lowest();
        assert_eq!(lowest(all.norms.clone()), 2, "a frozen gain trains nothing");
        assert_eq!(lowest(vec![norm(None, Some(3), None)]), 3, "the last norm is in no layer");
        for twice in [&of(vec![norm(None, Some(3), None)]), &bias] {
            let error = AdapterBindings::new(&[(twice, 1.0), (twice, 1.0)], 3).unwrap_err().to_string();
            assert!(error.contains("same layer norm"), "{error}");
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
    fn the_embedding_is_bound_to_its_places_in_the_store() {
        let delta = engraft_adapters::EmbeddingDelta { rank: 2, scale: 1.5, a: 0, b: 1 };
        let prompt = Some(Prompt { length: 3, embeddings: 2 });
        let empty = AdapterSet { loras: vec![], ..set() };
        let deltas = AdapterSet { embedding: Some(delta), ..empty.clone() };
        let bindings = AdapterBindings::new(&[(&deltas, 1.0), (&deltas, 0.5)], 3).unwrap();
        let expected = EmbeddingDelta { a: Vector::frozen(0), b: Vector::trained(6), rank: 2, scale: 1.5 };
        let second =
            EmbeddingDelta { a: Vector::frozen(28), b: Vector::trained(34), scale: 0.75, ..expected };
        assert_eq!(bindings.embedding.deltas, [expected, second]);
        assert_eq!((bindings.lowest(), bindings.prompt_len()), (0, 0));
        let prompts = AdapterSet { prompt: prompt.clone(), ..empty.clone() };
        let bindings = AdapterBindings::new(&[(&deltas, 1.0), (&prompts, 0.5)], 3).unwrap();
        let rows = Vector::trained(28 + 14);
        assert_eq!(bindings.embedding.prompt, Some(PromptBinding { length: 3, rows }));
        assert_eq!((bindings.lowest(), bindings.prompt_len()), (0, 3));
        let error = AdapterBindings::new(&[(&prompts, 1.0), (&prompts, 1.0)], 3).unwrap_err().to_string();
        assert!(error.contains("bring a prompt"), "{error}");
        // Nothing in front of the layers is trained.
        let mut frozen = AdapterSet { prompt, ..empty };
        frozen.layout.tensors[2].group = 1;
        assert_eq!(AdapterBindings::new(&[(&frozen, 1.0)], 3).unwrap().lowest(), 3);
    }
}
