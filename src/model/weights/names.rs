//! The tensors that a base must have, and how stored names become canonical.
//!
//! A canonical name is the one `GPT2LMHeadModel` saves today: `transformer.` in front of everything but
//! `lm_head.weight`. Uploads of the bare `GPT2Model` lack the prefix.

use super::base_dtype::BaseDType;
pub(super) use crate::model::arch::{HEAD, TOKEN_EMBEDDING, Tensor as Wanted};
use crate::model::{
    arch::{Arch, layer_of},
    config::Config,
};

impl Wanted {
    /// The type in which a base of `dtype` keeps it.
    pub(super) fn kept(&self, dtype: BaseDType) -> BaseDType {
        if self.shape.len() == 2 { dtype.of_matrix(&self.name) } else { BaseDType::F16 }
    }
}

/// Everything `config` asks for, in canonical order.
pub(super) fn wanted(config: &Config) -> Vec<Wanted> {
    Arch::of(config).tensors()
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
    let Some((layer, buffer)) = layer_of(name) else { return false };
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
