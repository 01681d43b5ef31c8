//! The adapters of one run, resolved against a base: which tensors exist, where, in one stable order.

use std::ops::Range;

use crate::{
    AdapterSpec, BaseDescription, Error, LoraSpec, PrefixSpec, Result,
    targets::{self, Selected},
};

/// Most values a set may hold (32 GiB of F32): beyond it a typing error is more likely than a wish.
const MOST_VALUES: usize = 1 << 33;

/// Resolved adapters: the spec, the layout of one flat F32 store, and what each tensor does.
///
/// The order is layer, site, part, A before B; the prefix comes last. It depends on nothing but the
/// spec and the base.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterSet {
    /// What was asked for.
    pub spec: AdapterSpec,
    /// Where each tensor lies in the flat store.
    pub layout: Layout,
    /// Low-rank deltas, ordered by layer, site, part.
    pub loras: Vec<Lora>,
    /// The prefix, if there is one.
    pub prefix: Option<Prefix>,
}

/// The tensors of one flat F32 store, back to back.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Layout {
    /// The tensors in their order in the store.
    pub tensors: Vec<TensorSlot>,
    /// Values in the store.
    pub len: usize,
}

/// A named tensor inside the flat store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSlot {
    /// Name, unique in the layout; that of the PEFT file where the file has the tensor.
    pub name: String,
    /// Shape, row-major.
    pub shape: Vec<usize>,
    /// Index of its first value in the store.
    pub offset: usize,
}

/// A low-rank delta on a module, or on a part of its output columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Lora {
    /// Layer.
    pub layer: usize,
    /// Index into [`BaseDescription::sites`].
    pub site: usize,
    /// Name of the part, `None` for the whole module.
    pub part: Option<String>,
    /// Output columns it adds to.
    pub columns: Range<usize>,
    /// Rank r.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Scale s of the delta.
    pub scale: f32,
    /// Index of A in the layout, [rank, inputs].
    pub a: usize,
    /// Index of B in the layout, [columns.len(), rank].
    pub b: usize,
}

/// Learned keys and values in front of every sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix {
    /// Virtual tokens, P.
    pub length: usize,
    /// How the values come about.
    pub values: PrefixValues,
}

/// What is learned of a prefix; each field is an index into the layout. d width, L layers.
///
/// Viewed as [P, 2L, heads, d / heads], index 2l is the key and 2l + 1 the value of layer l.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrefixValues {
    /// The keys and values themselves.
    Direct {
        /// [P, 2Ld].
        prompt: usize,
    },
    /// `tanh(embedding in_weight^T + in_bias) out_weight^T + out_bias`, [P, 2Ld].
    Projected {
        /// Hidden width.
        hidden: usize,
        /// [P, d].
        embedding: usize,
        /// [hidden, d].
        in_weight: usize,
        /// `[hidden]`.
        in_bias: usize,
        /// [2Ld, hidden].
        out_weight: usize,
        /// `[2Ld]`.
        out_bias: usize,
    },
}

impl TensorSlot {
    /// Values in the tensor.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the tensor has no values; no slot of a valid layout is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its values in the store.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.len()
    }
}

impl Layout {
    fn push(&mut self, name: String, shape: Vec<usize>) -> Result<usize> {
        let len = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
        let end = len.and_then(|len| self.len.checked_add(len)).filter(|&end| end <= MOST_VALUES);
        let Some(end) = end else { return Err(Error::TooLarge { tensor: name, shape }) };
        self.tensors.push(TensorSlot { name, shape, offset: self.len });
        self.len = end;
        Ok(self.tensors.len() - 1)
    }

    /// The slot of that name.
    pub fn slot(&self, name: &str) -> Option<&TensorSlot> {
        self.tensors.iter().find(|slot| slot.name == name)
    }
}

impl AdapterSet {
    /// Resolves a spec against a base.
    ///
    /// # Errors
    /// Any rule the spec breaks on this base: see [`Error`].
    pub fn new(spec: &AdapterSpec, base: &BaseDescription) -> Result<Self> {
        if spec.lora.is_none() && spec.prefix.is_none() {
            return Err(Error::Empty);
        }
        let mut layout = Layout::default();
        let loras = spec.lora.as_ref().map(|lora| resolve_lora(lora, base, &mut layout)).transpose()?;
        let prefix =
            spec.prefix.as_ref().map(|prefix| resolve_prefix(prefix, base, &mut layout)).transpose()?;
        Ok(Self { spec: spec.clone(), layout, loras: loras.unwrap_or_default(), prefix })
    }

    /// Number of values that are learned.
    pub fn trainables(&self) -> usize {
        self.layout.len
    }

    /// What was matched, a line per site, part and rank: `attn.c_attn: layers 0-11`.
    pub fn matched(&self, base: &BaseDescription) -> Vec<String> {
        type Kind<'a> = (usize, Option<&'a str>, usize); // site, part, rank
        let mut lines: Vec<(Kind, Vec<usize>)> = Vec::new();
        for lora in &self.loras {
            let key = (lora.site, lora.part.as_deref(), lora.rank);
            match lines.iter_mut().find(|(known, _)| *known == key) {
                Some((_, layers)) => layers.push(lora.layer),
                None => lines.push((key, vec![lora.layer])),
            }
        }
        let default_rank = self.spec.lora.as_ref().map(|lora| lora.rank);
        let mut lines: Vec<String> = lines
            .into_iter()
            .map(|((site, part, rank), layers)| {
                let part = part.map(|part| format!(".{part}")).unwrap_or_default();
                let rank = if Some(rank) == default_rank { String::new() } else { format!(" (rank {rank})") };
                format!("{}{part}: {}{rank}", base.sites[site].name, layer_ranges(&layers))
            })
            .collect();
        if let Some(prefix) = &self.prefix {
            let layers: Vec<_> = (0..base.layers).collect();
            lines.push(format!("prefix of {} virtual tokens: {}", prefix.length, layer_ranges(&layers)));
        }
        lines
    }
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

fn resolve_lora(spec: &LoraSpec, base: &BaseDescription, layout: &mut Layout) -> Result<Vec<Lora>> {
    let chosen = targets::select(&spec.targets, spec.layers.as_deref(), base)?;
    let values = targets::ranks_and_alphas(spec, &chosen, base)?;
    chosen
        .iter()
        .zip(values)
        .map(|(&one, (rank, alpha))| push_lora(spec, one, rank, alpha, base, layout))
        .collect()
}

fn push_lora(
    spec: &LoraSpec,
    one: Selected,
    rank: usize,
    alpha: f64,
    base: &BaseDescription,
    layout: &mut Layout,
) -> Result<Lora> {
    let site = &base.sites[one.site];
    let part = one.part.map(|part| &site.parts[part]);
    let columns = part.map_or(0..site.outputs, |part| part.columns.clone());
    let prefix = format!("{}{}", crate::peft::LORA_PREFIX, one.path(base));
    Ok(Lora {
        layer: one.layer,
        site: one.site,
        part: part.map(|part| part.name.clone()),
        rank,
        alpha,
        scale: spec.scale(rank, alpha) as f32,
        a: layout.push(format!("{prefix}.lora_A.weight"), vec![rank, site.inputs])?,
        b: layout.push(format!("{prefix}.lora_B.weight"), vec![columns.len(), rank])?,
        columns,
    })
}

fn resolve_prefix(spec: &PrefixSpec, base: &BaseDescription, layout: &mut Layout) -> Result<Prefix> {
    let length = spec.length;
    if length == 0 || length >= base.positions {
        return Err(Error::PrefixLength { length, positions: base.positions });
    }
    let (d, out) = (base.width, 2 * base.layers * base.width);
    let mut push = |name: &str, shape: &[usize]| layout.push(name.to_owned(), shape.to_vec());
    let values = match spec.projection {
        None => PrefixValues::Direct { prompt: push(crate::peft::PROMPT, &[length, out])? },
        Some(0) => return Err(Error::ZeroProjection),
        Some(hidden) => PrefixValues::Projected {
            hidden,
            embedding: push("prompt_encoder.embedding.weight", &[length, d])?,
            in_weight: push("prompt_encoder.transform.0.weight", &[hidden, d])?,
            in_bias: push("prompt_encoder.transform.0.bias", &[hidden])?,
            out_weight: push("prompt_encoder.transform.2.weight", &[out, hidden])?,
            out_bias: push("prompt_encoder.transform.2.bias", &[out])?,
        },
    };
    Ok(Prefix { length, values })
}

#[cfg(test)]
#[path = "set_tests.rs"]
mod tests;
