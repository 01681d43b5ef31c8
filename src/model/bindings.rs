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
    /// Low-rank deltas, in the order of the sets that they come from.
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
    /// Sites of each layer, from the first layer to the last.
    pub layers: Vec<LayerSites>,
    /// Trained gains and biases of all layer norms.
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
    /// Length p, in virtual tokens.
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
    /// Length p, in virtual tokens.
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
    /// Width of the projection's hidden layer.
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
            let before = bindings.clone();
            bindings.add(set, *factor)?;
            bindings.refuse_scaled_inputs(&before)?;
        }
        bindings.place_derived()?;
        Ok(bindings)
    }

    /// Refuses a set that scales the input of a module to which the sets `before` it add deltas, and the other way round:
    /// PEFT, with the one around the other, gives the deltas the scaled input, or scales them.
    fn refuse_scaled_inputs(&self, before: &Self) -> Result<()> {
        let mut sites = self.layers.iter().flatten().zip(before.layers.iter().flatten());
        let mixed = sites.any(|(site, old)| {
            let new_delta = site.deltas.len() > old.deltas.len();
            let new_u = site.u.is_some() && old.u.is_none();
            (old.u.is_some() && new_delta) || (new_u && !old.deltas.is_empty())
        });
        if mixed {
            return Err(Error::input(
                "one of the adapters scales the input of a module (IA3), and another one adds a delta to the module; leave one --adapter out",
            ));
        }
        Ok(())
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
#[path = "bindings_tests.rs"]
mod tests;
