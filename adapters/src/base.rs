//! Description of the frozen base for adapters: plain data that the model fills in.

use std::ops::Range;

/// A frozen base as adapters see it: names, sizes and the modules an adapter can attach to.
#[derive(Debug, Clone, PartialEq)]
pub struct BaseDescription {
    /// Name or folder the base was loaded from; written as `base_model_name_or_path`.
    pub name: String,
    /// Revision of the base, where one was asked for.
    pub revision: Option<String>,
    /// Fingerprint of the base weights; adapters carry it, so that a wrong base is refused.
    pub fingerprint: Option<String>,
    /// Number L of layers.
    pub layers: usize,
    /// Number of attention heads in each layer.
    pub heads: usize,
    /// Width d of the residual stream.
    pub width: usize,
    /// Longest sequence in tokens, virtual tokens included.
    pub positions: usize,
    /// Number of tokens in the vocabulary.
    pub vocab: usize,
    /// Linear modules of a layer; the same in every layer, in one fixed order.
    pub sites: Vec<SiteDescription>,
    /// Full module path of the embedding of tokens, such as `transformer.wte`; `None` where no adapter attaches to it.
    pub token_embedding: Option<String>,
    /// Layer norms: first those that every layer has, in the order in which a token meets them, then the one
    /// before the head.
    pub norms: Vec<NormDescription>,
}

/// A layer norm that every layer has, or the one before the head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NormDescription {
    /// Name inside a layer or, of the one before the head, inside the model: `ln_1`, `ln_f`.
    pub name: String,
    /// Full module path: `transformer.h.{layer}.ln_1`, or `transformer.ln_f` without a layer.
    pub key: String,
}

/// A linear module that every layer has, and that an adapter can attach to.
#[derive(Debug, Clone, PartialEq)]
pub struct SiteDescription {
    /// Name inside a layer, such as `attn.c_attn`.
    pub name: String,
    /// Full module path with `{layer}` for the layer, such as `transformer.h.{layer}.attn.c_attn`.
    pub key: String,
    /// Width of the input.
    pub inputs: usize,
    /// Width of the output.
    pub outputs: usize,
    /// Whether the base stores the weight as [inputs, outputs]; A and B never depend on it.
    pub fan_in_fan_out: bool,
    /// Named ranges of output columns (`q`, `k`, `v` of a fused projection).
    pub parts: Vec<PartDescription>,
}

/// A named range of a site's output columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartDescription {
    /// Name of the part, such as `q`.
    pub name: String,
    /// Output columns of the site that belong to the part.
    pub columns: Range<usize>,
}

/// The weights of a base, for initial values that follow from them.
pub trait BaseWeights {
    /// Weight `[inputs, outputs]`, row-major, of site `site` (an index into [`BaseDescription::sites`]) in
    /// `layer`; `None` if the base cannot provide this matrix.
    fn matrix(&self, site: usize, layer: usize) -> Option<Vec<f32>>;

    /// Euclidean norms `[outputs]` of the columns of that weight; `None` as for [`BaseWeights::matrix`].
    fn column_norms(&self, site: usize, layer: usize) -> Option<Vec<f32>>;

    /// Bias `[outputs]` of that module; `None` as for [`BaseWeights::matrix`].
    fn bias(&self, site: usize, layer: usize) -> Option<Vec<f32>>;

    /// Layer norm `norm` of `layer`, in the order in which a token meets them, or without a layer the one before the
    /// head; `None` where the base has no such norm at hand.
    fn norm(&self, layer: Option<usize>, norm: usize) -> Option<NormWeights>;

    /// Rows `[ids, width]` of the token embedding, row-major; `None` where the base has no such rows at hand.
    fn token_embeddings(&self, ids: &[u32]) -> Option<Vec<f32>>;
}

/// The parameters of a layer norm.
#[derive(Debug, Clone, PartialEq)]
pub struct NormWeights {
    /// Factor of each feature, `[width]`.
    pub gain: Vec<f32>,
    /// Summand of each feature, `[width]`.
    pub bias: Vec<f32>,
}

impl NormDescription {
    /// Whether every layer has one.
    pub fn is_in_layers(&self) -> bool {
        self.key.contains("{layer}")
    }

    /// Full module path in `layer`; of the norm before the head always the same.
    pub fn module(&self, layer: usize) -> String {
        self.key.replace("{layer}", &layer.to_string())
    }

    /// Layer that a module path or a tensor name belongs to, if it is one of this norm's.
    pub(crate) fn layer_of(&self, name: &str) -> Option<usize> {
        layer_of(&self.key, name)
    }
}

impl SiteDescription {
    /// Full module path in one layer, such as `transformer.h.3.attn.c_attn`.
    pub fn module(&self, layer: usize) -> String {
        self.key.replace("{layer}", &layer.to_string())
    }

    /// Segment of the module path that holds the layers (`h` in `transformer.h.{layer}.attn.c_attn`).
    pub(crate) fn layers_segment(&self) -> &str {
        let before = self.key.split(".{layer}").next().unwrap_or_default();
        before.rsplit('.').next().unwrap_or_default()
    }

    /// Layer that a module path or a tensor name belongs to, if it is one of this site's.
    pub(crate) fn layer_of(&self, name: &str) -> Option<usize> {
        layer_of(&self.key, name)
    }
}

/// Layer that a module path or a tensor name belongs to, if it is one of the modules called `key`.
fn layer_of(key: &str, name: &str) -> Option<usize> {
    let (before, after) = key.split_once("{layer}")?;
    let (digits, rest) = name.split_once(before)?.1.split_once('.')?;
    let after = after.strip_prefix('.').unwrap_or(after);
    (rest == after || rest.starts_with(&format!("{after}."))).then(|| digits.parse().ok()).flatten()
}

impl BaseDescription {
    /// Name of the embedding of tokens, the end of its path: `wte`.
    pub(crate) fn token_embedding_name(&self) -> Option<&str> {
        self.token_embedding.as_ref().and_then(|path| path.rsplit('.').next())
    }

    /// Names that targets can have on this base: each site, followed by its parts.
    pub fn target_names(&self) -> Vec<String> {
        self.sites
            .iter()
            .map(|site| {
                let parts: Vec<_> = site.parts.iter().map(|part| part.name.as_str()).collect();
                if parts.is_empty() {
                    site.name.clone()
                } else {
                    format!("{} (parts {})", site.name, parts.join(", "))
                }
            })
            .collect()
    }
}
