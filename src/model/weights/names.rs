//! The tensors of a GPT-2: their canonical names, shapes and order, and how stored names become canonical.
//!
//! A canonical name is the one `GPT2LMHeadModel` saves today: `transformer.` in front of everything but
//! `lm_head.weight`. Uploads of the bare `GPT2Model` lack the prefix.

use super::base_dtype::BaseDType;
use crate::model::config::Config;

/// The token embedding, which is also the head of a tied model.
pub(super) const WTE: &str = "transformer.wte.weight";
/// The position embedding.
const WPE: &str = "transformer.wpe.weight";
/// The head of a model that is not tied.
pub(super) const HEAD: &str = "lm_head.weight";

/// A tensor that a config asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
}

impl Wanted {
    pub(super) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether a base of `dtype` keeps it in codes: matrices that products are made with, and the embedding, which
    /// may be one of them.
    pub(super) fn is_coded(&self, dtype: BaseDType) -> bool {
        dtype == BaseDType::Q8 && self.shape.len() == 2 && self.name != WPE
    }
}

/// Everything `config` asks for, in canonical order: wte, wpe, the blocks from the first to the last
/// (in each ln_1, attention, ln_2, MLP; weight before bias), ln_f, and `lm_head.weight` unless tied.
pub(super) fn wanted(config: &Config) -> Vec<Wanted> {
    let c = config.width;
    let mut list = Vec::with_capacity(12 * config.layers + 5);
    let mut push = |name: String, shape: &[usize]| list.push(Wanted { name, shape: shape.to_vec() });
    push(WTE.into(), &[config.vocab, c]);
    push(WPE.into(), &[config.positions, c]);
    for layer in 0..config.layers {
        let parts: [(&str, &[usize], usize); 6] = [
            ("ln_1", &[c], c),
            ("attn.c_attn", &[c, 3 * c], 3 * c),
            ("attn.c_proj", &[c, c], c),
            ("ln_2", &[c], c),
            ("mlp.c_fc", &[c, config.inner], config.inner),
            ("mlp.c_proj", &[config.inner, c], c),
        ];
        for (part, weight, bias) in parts {
            push(format!("transformer.h.{layer}.{part}.weight"), weight);
            push(format!("transformer.h.{layer}.{part}.bias"), &[bias]);
        }
    }
    push("transformer.ln_f.weight".into(), &[c]);
    push("transformer.ln_f.bias".into(), &[c]);
    if !config.tied {
        push(HEAD.into(), &[config.vocab, c]);
    }
    list
}

/// The canonical form of a stored name.
pub(super) fn canonical(stored: &str) -> String {
    if stored.starts_with("transformer.") || stored.starts_with("lm_head.") {
        stored.to_owned()
    } else {
        format!("transformer.{stored}")
    }
}

/// Whether a canonical name is a causal-mask buffer that older versions of Transformers saved along.
pub(super) fn is_mask(name: &str) -> bool {
    let Some((layer, buffer)) = name.strip_prefix("transformer.h.").and_then(|rest| rest.split_once('.'))
    else {
        return false;
    };
    layer.bytes().all(|byte| byte.is_ascii_digit()) && matches!(buffer, "attn.bias" | "attn.masked_bias")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_and_masks() {
        assert_eq!(canonical("h.0.ln_1.bias"), "transformer.h.0.ln_1.bias");
        assert_eq!(canonical("transformer.wpe.weight"), "transformer.wpe.weight");
        assert_eq!(canonical(HEAD), HEAD);
        assert!(is_mask("transformer.h.11.attn.bias") && is_mask("transformer.h.0.attn.masked_bias"));
        assert!(!is_mask("transformer.h.0.attn.c_attn.bias") && !is_mask("transformer.h.x.attn.bias"));
    }
}
