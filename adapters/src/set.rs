//! The adapters of one run, resolved against a base: which tensors exist, where, in one stable order.

use crate::{
    AdapterSpec, BaseDescription, Contribution, EmbeddingDelta, Error, Layout, Lora, NormVectors, Prefix,
    Prompt, RankAllocation, Result, SiteVectors,
    layout::Slots,
    methods::{Kind, Method},
};

/// Resolved adapters: the spec, the layout of one flat F32 store, and what each tensor does.
///
/// Tensors come method by method in the order of the registry, within a method in its own order (of a LoRA:
/// layer, site, part, A before B). The order depends on nothing but the spec and the base.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterSet {
    /// The spec that was resolved.
    pub spec: AdapterSpec,
    /// Place of each tensor in the flat store.
    pub layout: Layout,
    /// Low-rank deltas, method by method, ordered by layer, site, part.
    pub loras: Vec<Lora>,
    /// Vectors of linear sites, ordered by layer and site; at most one entry a site.
    pub vectors: Vec<SiteVectors>,
    /// Vectors of layer norms, ordered by layer and norm, the one before the head last; at most one entry a norm.
    pub norms: Vec<NormVectors>,
    /// The delta on the token embedding, if there is one.
    pub embedding: Option<EmbeddingDelta>,
    /// Learned keys and values, if there are any.
    pub prefix: Option<Prefix>,
    /// Learned embeddings in front of the tokens, if there are any.
    pub prompt: Option<Prompt>,
    /// How ranks of deltas are allocated in training, if they are.
    pub allocation: Option<RankAllocation>,
}

impl AdapterSet {
    /// Resolves a spec against a base.
    ///
    /// # Errors
    /// Any rule the spec breaks on this base: see [`Error`].
    pub fn new(spec: &AdapterSpec, base: &BaseDescription) -> Result<Self> {
        let methods = spec.methods();
        if methods.is_empty() {
            return Err(Error::Empty);
        }
        for (index, second) in methods.iter().map(|method| method.kind()).enumerate() {
            let same = |method: &&&dyn Method| method.kind().peft_type == second.peft_type;
            if let Some(first) = methods[..index].iter().find(same) {
                let (first, peft_type) = (first.kind().name, second.peft_type);
                return Err(Error::SameType { first, second: second.name, peft_type });
            }
        }
        let mut layout = Layout::default();
        let mut all = Contribution::default();
        for method in methods {
            let mut slots = Slots::new(&mut layout, method.kind().name);
            all.extend(method.resolve(base, &mut slots)?)?;
        }
        refuse_deltas_of_scaled_inputs(&all, &layout, base)?;
        refuse_different_dropouts(spec)?;
        let Contribution { loras, vectors, norms, embedding, prefix, prompt, allocation } = all;
        if prefix.is_some() && prompt.is_some() {
            return Err(Error::PrefixAndPrompt);
        }
        Ok(Self { spec: spec.clone(), layout, loras, vectors, norms, embedding, prefix, prompt, allocation })
    }

    /// Probability that an input element of its low-rank deltas is dropped.
    pub fn dropout(&self) -> f64 {
        self.spec.methods().iter().find_map(|method| method.dropout()).unwrap_or(0.0)
    }

    /// Number of values that are learned.
    pub fn trainables(&self) -> usize {
        self.layout.trainables()
    }

    /// Positions that its prefix takes; 0 without one.
    pub fn prefix_len(&self) -> usize {
        self.prefix.as_ref().map_or(0, |prefix| prefix.length)
    }

    /// Virtual tokens of its prompt; 0 without one.
    pub fn prompt_len(&self) -> usize {
        self.prompt.as_ref().map_or(0, |prompt| prompt.length)
    }

    /// What each method attaches to, a line for each thing: `attn.c_attn: layers 0-11`.
    pub fn matched(&self, base: &BaseDescription) -> Vec<String> {
        self.spec.methods().iter().flat_map(|method| method.matched(self, base)).collect()
    }

    /// Whether a delta belongs to a method of this kind.
    pub(crate) fn is_of(&self, lora: &Lora, kind: &Kind) -> bool {
        self.layout.tensors[lora.b].method == kind.name
    }

    /// The deltas of a method of this kind.
    pub(crate) fn loras_of(&self, kind: &Kind) -> impl Iterator<Item = &Lora> {
        self.loras.iter().filter(move |lora| self.is_of(lora, kind))
    }
}

/// All deltas of a model drop with one probability.
fn refuse_different_dropouts(spec: &AdapterSpec) -> Result<()> {
    let all: Vec<f64> = spec.methods().iter().filter_map(|method| method.dropout()).collect();
    match all.iter().find(|&&other| other != all[0]) {
        None => Ok(()),
        Some(&second) => Err(Error::DropoutsDiffer { first: all[0], second }),
    }
}

/// A method that scales the input of a module, and another one whose deltas would see it as it was: of PEFT's folders,
/// which are folded one after another, either the deltas see it scaled, or g of the one scales the deltas of the other.
fn refuse_deltas_of_scaled_inputs(all: &Contribution, layout: &Layout, base: &BaseDescription) -> Result<()> {
    for SiteVectors { layer, site, u, .. } in &all.vectors {
        let Some(u) = *u else { continue };
        let scales = layout.tensors[u].method;
        let of_site = all.loras.iter().filter(|lora| (lora.layer, lora.site) == (*layer, *site));
        if let Some(adds) = of_site.map(|lora| layout.tensors[lora.b].method).find(|&adds| adds != scales) {
            let module = base.sites[*site].module(*layer);
            return Err(Error::ScaledInputAndDelta { module, scales, adds });
        }
    }
    Ok(())
}

/// `layer 3`, `layers 0-11`, `layers 0, 2, 4-7`.
pub(crate) fn layer_ranges(layers: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &layer in layers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == layer => *last = layer,
            _ => ranges.push((layer, layer)),
        }
    }
    let text: Vec<String> = ranges
        .iter()
        .map(|&(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    format!("layer{} {}", if layers.len() == 1 { "" } else { "s" }, text.join(", "))
}

#[cfg(test)]
#[path = "set_tests.rs"]
mod tests;
