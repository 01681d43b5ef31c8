//! The layout of a GPT-2, in one table: the linear layers of a block with their shapes, the norms, the heads, the
//! positions. Names of tensors, descriptions for adapters, memory plans, predicted times and sizes of scratch all read it.
//!
//! [`Config`] says how large a base is and which activation it has; this table says what it consists of. Another
//! architecture is another table, and a `Block` that computes it.

use std::ops::Range;

use super::Config;

/// A linear layer that every block has and that an adapter can attach to, in the order of the forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// `attn.c_attn`: queries, keys and values.
    CAttn,
    /// `attn.c_proj`: out of attention.
    AttnProj,
    /// `mlp.c_fc`: into the MLP.
    CFc,
    /// `mlp.c_proj`: out of the MLP.
    MlpProj,
}

/// Number of sites in a layer.
pub const SITES: usize = 4;

/// The shape of a [`Site`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SiteShape {
    /// The site that has this shape.
    pub site: Site,
    /// Module path within a layer, the same in checkpoints and in PEFT's files.
    pub name: &'static str,
    /// Short name, for tables of memory.
    pub label: &'static str,
    /// Features of x `(n, inputs)`.
    pub inputs: usize,
    /// Features of y `(n, outputs)`.
    pub outputs: usize,
    /// Whether it adds a bias `(outputs)`.
    pub bias: bool,
    /// Products that are fused into this one, by their output columns; empty for a product by itself.
    pub parts: Vec<(&'static str, Range<usize>)>,
}

impl SiteShape {
    /// Elements of the weight `(inputs, outputs)`.
    pub fn weights(&self) -> usize {
        self.inputs * self.outputs
    }

    /// Full module path with `{layer}` for the layer, as adapters name it.
    pub fn key(&self) -> String {
        format!("{LAYERS}{{layer}}.{}", self.name)
    }
}

/// How tokens know where they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions {
    /// A row of a learned embedding, added to that of the token.
    Learned,
}

/// A tensor of the base: its name and shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Name in a checkpoint; within a layer for the tensors of a block.
    pub name: String,
    /// Sizes, the outermost first; FP16 unless the base is kept in codes.
    pub shape: Vec<usize>,
}

impl Tensor {
    fn new(name: impl Into<String>, shape: &[usize]) -> Self {
        Self { name: name.into(), shape: shape.to_vec() }
    }

    /// Product of the sizes.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The names of a layer's tensors begin with this and its number.
const LAYERS: &str = "transformer.h.";

/// The layout of a base of some size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arch {
    /// Width c of the residual stream.
    pub width: usize,
    /// Heads h of queries.
    pub heads: usize,
    /// Heads of keys and of values.
    pub kv_heads: usize,
    /// Width d of a head.
    pub head_width: usize,
    /// How tokens know where they are.
    pub positions: Positions,
    /// The linear layers of a block, indexed by [`Site`].
    pub sites: [SiteShape; SITES],
    vocab: usize,
    rows_of_positions: usize,
    layers: usize,
    tied: bool,
}

/// The token embedding `(v, c)`, which is also the head of a tied base.
pub const TOKEN_EMBEDDING: &str = "transformer.wte.weight";
/// The learned position embedding `(positions, c)`.
pub const POSITION_EMBEDDING: &str = "transformer.wpe.weight";
/// The head `(v, c)` of a base that is not tied.
pub const HEAD: &str = "lm_head.weight";
/// The layer norms of a block, in the order in which a token meets them.
const LAYER_NORMS: [&str; 2] = ["ln_1", "ln_2"];
/// The layer norm after the last block.
const LAST_NORM: &str = "transformer.ln_f";

impl Arch {
    /// The layout of a GPT-2 with the sizes of `config`.
    pub fn of(config: &Config) -> Self {
        let (c, f, heads, d) = (config.width, config.inner, config.heads, config.head_width());
        let kv_heads = heads;
        let (q, kv) = (heads * d, kv_heads * d);
        let site = |site, name, label, inputs, outputs| SiteShape {
            site,
            name,
            label,
            inputs,
            outputs,
            bias: true,
            parts: Vec::new(),
        };
        let mut c_attn = site(Site::CAttn, "attn.c_attn", "c_attn", c, q + 2 * kv);
        c_attn.parts = vec![("q", 0..q), ("k", q..q + kv), ("v", q + kv..q + 2 * kv)];
        Self {
            width: c,
            heads,
            kv_heads,
            head_width: d,
            positions: Positions::Learned,
            sites: [
                c_attn,
                site(Site::AttnProj, "attn.c_proj", "attn.c_proj", q, c),
                site(Site::CFc, "mlp.c_fc", "c_fc", c, f),
                site(Site::MlpProj, "mlp.c_proj", "mlp.c_proj", f, c),
            ],
            vocab: config.vocab,
            rows_of_positions: config.positions,
            layers: config.layers,
            tied: config.tied,
        }
    }

    /// The shape of a site.
    pub fn site(&self, site: Site) -> &SiteShape {
        &self.sites[site as usize]
    }

    /// Columns of queries, keys and values side by side.
    pub fn qkv(&self) -> usize {
        self.site(Site::CAttn).outputs
    }

    /// Columns of the keys, and of the values, that a cache keeps of a token.
    pub fn kv(&self) -> usize {
        self.kv_heads * self.head_width
    }

    /// Most features that a site takes or yields.
    pub fn widest(&self) -> usize {
        self.sites.iter().map(|site| site.inputs.max(site.outputs)).max().unwrap_or(0)
    }

    /// The tensors of a block, named within their layer, in canonical order: of each half the norm, then its linear
    /// layers; weight before bias.
    pub fn block(&self) -> Vec<Tensor> {
        let [c_attn, attn_proj, c_fc, mlp_proj] = &self.sites;
        let mut tensors = Vec::new();
        for (norm, sites) in LAYER_NORMS.into_iter().zip([[c_attn, attn_proj], [c_fc, mlp_proj]]) {
            tensors.extend(self.norm(norm));
            for site in sites {
                tensors.push(Tensor::new(format!("{}.weight", site.name), &[site.inputs, site.outputs]));
                if site.bias {
                    tensors.push(Tensor::new(format!("{}.bias", site.name), &[site.outputs]));
                }
            }
        }
        tensors
    }

    /// Whether a tensor of a block is the weight of a site that a layer norm stands before.
    pub fn is_normed(&self, tensor: &Tensor) -> bool {
        let sites = [Site::CAttn, Site::CFc].map(|site| self.site(site).name);
        tensor.name.strip_suffix(".weight").is_some_and(|name| sites.contains(&name))
    }

    /// Name and full path, with `{layer}` for the layer, of the layer norms of a block, and of the one before the head.
    pub fn norms(&self) -> [(String, String); 3] {
        let [first, second] = LAYER_NORMS.map(|name| (name.to_owned(), format!("{LAYERS}{{layer}}.{name}")));
        let last = LAST_NORM.rsplit('.').next().unwrap_or(LAST_NORM);
        [first, second, (last.to_owned(), LAST_NORM.to_owned())]
    }

    /// Gain and bias of the layer norm `name`.
    fn norm(&self, name: &str) -> [Tensor; 2] {
        ["weight", "bias"].map(|part| Tensor::new(format!("{name}.{part}"), &[self.width]))
    }

    /// The embeddings: of tokens, and of positions if they are learned.
    pub fn embeddings(&self) -> Vec<Tensor> {
        let mut tensors = vec![Tensor::new(TOKEN_EMBEDDING, &[self.vocab, self.width])];
        match self.positions {
            Positions::Learned => {
                tensors.push(Tensor::new(POSITION_EMBEDDING, &[self.rows_of_positions, self.width]));
            }
        }
        tensors
    }

    /// The norm after the last block.
    pub fn last_norm(&self) -> [Tensor; 2] {
        self.norm(LAST_NORM)
    }

    /// The matrix of the head, wherever it is stored.
    pub fn head(&self) -> Tensor {
        Tensor::new(if self.tied { TOKEN_EMBEDDING } else { HEAD }, &[self.vocab, self.width])
    }

    /// The head, where it is a tensor of its own.
    pub fn own_head(&self) -> Option<Tensor> {
        (!self.tied).then(|| self.head())
    }

    /// All tensors in canonical order: embeddings, the blocks from the first to the last, the last norm, the head
    /// unless it is tied.
    pub fn tensors(&self) -> Vec<Tensor> {
        let blocks = (0..self.layers).flat_map(|layer| {
            self.block().into_iter().map(move |tensor| Tensor {
                name: format!("{LAYERS}{layer}.{}", tensor.name),
                shape: tensor.shape,
            })
        });
        self.embeddings().into_iter().chain(blocks).chain(self.last_norm()).chain(self.own_head()).collect()
    }
}

/// The number of the layer in the name of a tensor, and the name within the layer.
pub fn layer_of(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix(LAYERS)?.split_once('.')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::builtin::builtin;

    #[test]
    fn the_tensors_are_all_parameters_of_each_size() {
        for (name, parameters, tensors) in [
            ("gpt2", 124_439_808, 148),
            ("gpt2-medium", 354_823_168, 292),
            ("gpt2-large", 774_030_080, 436),
            ("gpt2-xl", 1_557_611_200, 580),
        ] {
            let list = Arch::of(&builtin(name).unwrap().unwrap()).tensors();
            assert_eq!(list.iter().map(Tensor::elements).sum::<usize>(), parameters, "{name}");
            assert_eq!(list.len(), tensors, "{name}");
        }
    }

    #[test]
    fn sites_stand_in_their_order_and_parts_fill_their_columns() {
        let arch = Arch::of(&builtin("gpt2-xl").unwrap().unwrap());
        for (index, site) in arch.sites.iter().enumerate() {
            assert_eq!(site.site as usize, index);
            let ends = site.parts.iter().map(|(_, columns)| columns.end);
            let starts = site.parts.iter().map(|(_, columns)| columns.start).chain([site.outputs]);
            assert!(site.parts.is_empty() || starts.eq([0].into_iter().chain(ends)), "{}", site.name);
        }
        assert_eq!((arch.qkv(), arch.kv(), arch.widest()), (4800, 1600, 6400));
    }
}
