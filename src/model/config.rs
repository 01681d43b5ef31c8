//! A base's `config.json`: the sizes and switches of a GPT-2, checked once so that nothing else has to.

use std::{fmt, ops::Range, path::Path};

use engraft_adapters::{BaseDescription, NormDescription, PartDescription, SiteDescription};
use serde_json::{Map, Value};

pub use crate::kernels::activation::Activation;

use super::arch::{Arch, SiteShape, TOKEN_EMBEDDING};
use crate::error::{Error, Result};

/// No GPT-2 comes near these; beyond them a size is a damaged file, and products could overflow.
const MOST_LAYERS: usize = 10_000;
const MOST_OF_ANY: usize = 1 << 24;

/// The activation that Transformers calls `name`, if it is one of ours.
fn activation_named(name: &str) -> Option<Activation> {
    match name {
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Some(Activation::GeluTanh),
        "gelu" => Some(Activation::Gelu),
        "relu" => Some(Activation::Relu),
        "silu" | "swish" => Some(Activation::Silu),
        _ => None,
    }
}

/// The sizes and switches of a GPT-2; every size is at least 1 and `width` is a multiple of `heads`.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Number of blocks, l (`n_layer`).
    pub layers: usize,
    /// Width of the residual stream, c (`n_embd`).
    pub width: usize,
    /// Attention heads, h (`n_head`).
    pub heads: usize,
    /// Rows of the position embedding (`n_positions`).
    pub positions: usize,
    /// Rows of the token embedding, v (`vocab_size`).
    pub vocab: usize,
    /// Width inside the MLP (`n_inner`, 4 c when absent).
    pub inner: usize,
    /// Between the two matrices of the MLP (`activation_function`).
    pub activation: Activation,
    /// Added to the variance in every LayerNorm (`layer_norm_epsilon`).
    pub layer_norm_eps: f32,
    /// Whether scores are divided by the root of the head width (`scale_attn_weights`).
    pub scale_attn: bool,
    /// Whether scores of layer i are also divided by i + 1 (`scale_attn_by_inverse_layer_idx`).
    pub scale_attn_by_layer: bool,
    /// Whether the head is the token embedding (`tie_word_embeddings`).
    pub tied: bool,
    /// End-of-text; `None` when the file names none inside the vocabulary.
    pub eos_token: Option<u32>,
    /// Begin-of-text; `None` when the file names none inside the vocabulary.
    pub bos_token: Option<u32>,
}

impl Config {
    /// Reads the text of a `config.json`; `path` is what errors call it.
    ///
    /// # Errors
    /// [`Error::Input`] when the text is no JSON object, describes no GPT-2 with a language-model head,
    /// lacks a size, or holds one that cannot be.
    pub fn from_json(text: &str, path: &Path) -> Result<Self> {
        let keys: Map<String, Value> = serde_json::from_str(text).map_err(|cause| {
            Error::input(format!(
                "{}: is not a JSON object: {cause}; give the config.json of a GPT-2 model",
                path.display()
            ))
        })?;
        let fields = Fields { keys, path };
        fields.check_kind()?;
        let width = fields.size(&["n_embd", "hidden_size"], MOST_OF_ANY >> 2)?;
        let heads = fields.size(&["n_head", "num_attention_heads"], MOST_OF_ANY)?;
        if width % heads != 0 {
            return Err(fields.wrong("n_embd", width, &format!("a multiple of n_head ({heads})")));
        }
        let vocab = fields.size(&["vocab_size"], MOST_OF_ANY)?;
        Ok(Self {
            layers: fields.size(&["n_layer", "num_hidden_layers"], MOST_LAYERS)?,
            width,
            heads,
            positions: fields.size(&["n_positions", "max_position_embeddings", "n_ctx"], MOST_OF_ANY)?,
            vocab,
            inner: match fields.get("n_inner") {
                None => 4 * width,
                Some(_) => fields.size(&["n_inner"], MOST_OF_ANY)?,
            },
            activation: fields.activation()?,
            layer_norm_eps: fields.layer_norm_eps()?,
            scale_attn: fields.switch("scale_attn_weights", true)?,
            scale_attn_by_layer: fields.switch("scale_attn_by_inverse_layer_idx", false)?,
            tied: fields.switch("tie_word_embeddings", true)?,
            eos_token: fields.token("eos_token_id", vocab)?,
            bos_token: fields.token("bos_token_id", vocab)?,
        })
    }

    /// Width of one head, d.
    pub fn head_width(&self) -> usize {
        self.width / self.heads
    }

    /// The names and sizes that adapters need of this base; sites in the order of [`Site`](super::arch::Site).
    pub fn describe(&self, name: &str, fingerprint: Option<&str>) -> BaseDescription {
        let arch = Arch::of(self);
        let part = |(name, columns): &(&str, Range<usize>)| PartDescription {
            name: (*name).into(),
            columns: columns.clone(),
        };
        let site = |site: &SiteShape| SiteDescription {
            name: site.name.into(),
            key: site.key(),
            inputs: site.inputs,
            outputs: site.outputs,
            // A Conv1D: its weight is stored (inputs, outputs).
            fan_in_fan_out: true,
            parts: site.parts.iter().map(part).collect(),
        };
        BaseDescription {
            name: name.into(),
            revision: None,
            fingerprint: fingerprint.map(Into::into),
            layers: self.layers,
            heads: arch.heads,
            width: arch.width,
            positions: self.positions,
            vocab: self.vocab,
            sites: arch.sites.iter().map(site).collect(),
            token_embedding: TOKEN_EMBEDDING.strip_suffix(".weight").map(Into::into),
            norms: arch.norms().map(|(name, key)| NormDescription { name, key }).into(),
        }
    }
}

/// The keys of one file, with the file's name for errors.
struct Fields<'a> {
    keys: Map<String, Value>,
    path: &'a Path,
}

impl Fields<'_> {
    /// The value of `key`; JSON's null counts as absent.
    fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, found: impl fmt::Display, wanted: &str) -> Error {
        Error::input(format!(
            "{}: {key} is {found}, but must be {wanted}; use the config.json that belongs to the weights",
            self.path.display()
        ))
    }

    /// Refuses everything that is no GPT-2 with a language-model head.
    fn check_kind(&self) -> Result<()> {
        let architectures =
            self.get("architectures").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        // Headless uploads are the same model with the head tied.
        let ours = |name: &Value| matches!(name.as_str(), Some("GPT2LMHeadModel" | "GPT2Model"));
        let refused = match self.get("model_type") {
            Some(Value::String(kind)) if kind == "gpt2" => None,
            Some(kind) => Some(format!("model_type is {kind}")),
            None if architectures.iter().any(ours) => None,
            None => Some("model_type is missing".to_owned()),
        };
        let refused = refused.or_else(|| match architectures.iter().find(|name| !ours(name)) {
            Some(name) if !architectures.iter().any(ours) => Some(format!("the architecture is {name}")),
            _ => None,
        });
        if let Some(found) = refused {
            return Err(Error::input(format!(
                "{}: {found}, but only GPT-2 with a language-model head (model_type \"gpt2\", \
                 GPT2LMHeadModel) can be a base; choose such a model",
                self.path.display()
            )));
        }
        if self.switch("add_cross_attention", false)? {
            return Err(self.wrong(
                "add_cross_attention",
                "true",
                "false: a base has no encoder to attend to",
            ));
        }
        Ok(())
    }

    /// A size from 1 to `most` under the first of `names` that is there.
    fn size(&self, names: &[&str], most: usize) -> Result<usize> {
        let Some((name, value)) = names.iter().find_map(|name| Some((name, self.get(name)?))) else {
            return Err(Error::input(format!(
                "{}: {} is missing; use the config.json that belongs to the weights",
                self.path.display(),
                names.first().copied().unwrap_or_default()
            )));
        };
        match value.as_u64().and_then(|size| usize::try_from(size).ok()) {
            Some(size) if (1..=most).contains(&size) => Ok(size),
            _ => Err(self.wrong(name, value, &format!("a whole number from 1 to {most}"))),
        }
    }

    fn switch(&self, name: &str, default: bool) -> Result<bool> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(self.wrong(name, other, "true or false")),
        }
    }

    fn activation(&self) -> Result<Activation> {
        let value = self.get("activation_function");
        let Some(value) = value else { return Ok(Activation::GeluTanh) };
        value.as_str().and_then(activation_named).ok_or_else(|| {
            Error::input(format!(
                "{}: activation_function is {value}, which is not supported; choose a base with gelu_new, \
                 gelu_pytorch_tanh, gelu_fast, gelu, relu, silu or swish",
                self.path.display()
            ))
        })
    }

    fn layer_norm_eps(&self) -> Result<f32> {
        let Some(value) = self.get("layer_norm_epsilon") else { return Ok(1e-5) };
        match value.as_f64().map(|eps| eps as f32) {
            Some(eps) if eps > 0.0 && eps < 1.0 => Ok(eps),
            _ => Err(self.wrong("layer_norm_epsilon", value, "a number between 0 and 1")),
        }
    }

    /// A token id; the first of a list. Small test models name GPT-2's 50256 whatever their vocabulary:
    /// an id outside it stands for none.
    fn token(&self, name: &str, vocab: usize) -> Result<Option<u32>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let first = value.as_array().map_or(Some(value), |list| list.first());
        match first.and_then(Value::as_u64) {
            Some(id) => Ok(u32::try_from(id).ok().filter(|&id| (id as usize) < vocab)),
            None => Err(self.wrong(name, value, "a token id")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(changes: &[(&str, Value)]) -> Result<Config> {
        let mut keys: Map<String, Value> = serde_json::from_str(
            r#"{"model_type":"gpt2","architectures":["GPT2LMHeadModel"],"n_layer":2,"n_embd":12,"n_head":3,
                "n_positions":16,"vocab_size":37,"n_inner":null,"eos_token_id":36}"#,
        )
        .unwrap();
        for (key, value) in changes {
            if *value == Value::String("absent".into()) {
                keys.remove(*key);
            } else {
                keys.insert((*key).into(), value.clone());
            }
        }
        Config::from_json(&serde_json::to_string(&keys).unwrap(), Path::new("m/config.json"))
    }

    #[test]
    fn defaults_are_those_of_gpt2() {
        let config = parse(&[]).unwrap();
        assert_eq!((config.layers, config.width, config.heads, config.head_width()), (2, 12, 3, 4));
        assert_eq!((config.inner, config.activation), (48, Activation::GeluTanh));
        assert_eq!((config.layer_norm_eps, config.eos_token, config.bos_token), (1e-5, Some(36), None));
        assert!(config.scale_attn && !config.scale_attn_by_layer && config.tied);
    }

    #[test]
    fn every_switch_is_read() {
        let config = parse(&[
            ("n_inner", 20.into()),
            ("activation_function", "swish".into()),
            ("layer_norm_epsilon", 1e-3.into()),
            ("scale_attn_weights", false.into()),
            ("scale_attn_by_inverse_layer_idx", true.into()),
            ("tie_word_embeddings", false.into()),
            ("eos_token_id", 50256.into()),
            ("bos_token_id", serde_json::json!([3, 4])),
        ])
        .unwrap();
        assert_eq!((config.inner, config.activation, config.layer_norm_eps), (20, Activation::Silu, 1e-3));
        assert!(!config.scale_attn && config.scale_attn_by_layer && !config.tied);
        assert_eq!((config.eos_token, config.bos_token), (None, Some(3)));
    }

    #[test]
    fn nonsense_is_refused_by_file_key_and_value() {
        let cases: &[(&str, Value, &str)] = &[
            ("n_layer", 0.into(), "m/config.json: n_layer is 0"),
            ("n_layer", 1_000_000_000.into(), "n_layer is 1000000000"),
            ("n_embd", 13.into(), "n_embd is 13, but must be a multiple of n_head (3)"),
            ("n_head", (-3).into(), "n_head is -3"),
            ("vocab_size", "absent".into(), "vocab_size is missing"),
            ("n_positions", 1.5.into(), "n_positions is 1.5"),
            ("activation_function", "quick_gelu".into(), "\"quick_gelu\", which is not supported; choose"),
            ("layer_norm_epsilon", 0.into(), "layer_norm_epsilon is 0"),
            ("tie_word_embeddings", "yes".into(), "tie_word_embeddings is \"yes\""),
            ("model_type", "llama".into(), "model_type is \"llama\""),
            ("architectures", serde_json::json!(["GPT2ForSequenceClassification"]), "the architecture is"),
            ("add_cross_attention", true.into(), "add_cross_attention is true"),
        ];
        for (key, value, wanted) in cases {
            let error = parse(&[(key, value.clone())]).unwrap_err();
            assert!(error.to_string().contains(wanted), "{error}");
            assert_eq!(error.exit_code(), 2);
        }
        let error = Config::from_json("[1]", Path::new("m/config.json")).unwrap_err();
        assert!(error.to_string().starts_with("m/config.json: is not a JSON object"), "{error}");
    }

    #[test]
    fn sites_name_their_keys_and_parts() {
        let base = parse(&[("n_inner", 20.into())]).unwrap().describe("tiny", Some("x"));
        let sizes: Vec<_> =
            base.sites.iter().map(|site| (site.name.as_str(), site.inputs, site.outputs)).collect();
        assert_eq!(
            sizes,
            [("attn.c_attn", 12, 36), ("attn.c_proj", 12, 12), ("mlp.c_fc", 12, 20), ("mlp.c_proj", 20, 12)]
        );
        assert_eq!(base.sites[0].key, "transformer.h.{layer}.attn.c_attn");
        let norms: Vec<_> = base.norms.iter().map(|norm| norm.module(2)).collect();
        assert_eq!(norms, ["transformer.h.2.ln_1", "transformer.h.2.ln_2", "transformer.ln_f"]);
        assert_eq!(base.sites[0].parts[1], PartDescription { name: "k".into(), columns: 12..24 });
    }
}
