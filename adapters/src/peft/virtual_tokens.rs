//! What the PEFT files of virtual tokens have in common: of a prefix, of a prompt, and of what made one.

use serde_json::{Value, json};

use super::{Fields, Findings, TensorFile};
use crate::BaseDescription;

/// The one tensor in the file.
pub(crate) const TENSOR: &str = "prompt_embeddings";

/// The number of virtual tokens in a config, and the base that it says they are for.
#[derive(Debug)]
pub(crate) struct VirtualTokens {
    pub length: usize,
    layers: Option<usize>,
    heads: Option<usize>,
    width: Option<usize>,
}

impl VirtualTokens {
    /// Takes the fields; nothing without a number of virtual tokens.
    pub fn take(fields: &mut Fields) -> Option<Self> {
        let whole = "a whole number is expected";
        let submodules: Option<usize> = fields.take("num_transformer_submodules", whole);
        if let Some(count) = submodules.filter(|&count| count != 1) {
            fields.refuse("num_transformer_submodules", &json!(count), "1 is supported");
        }
        let length = fields.need("num_virtual_tokens", whole);
        let (layers, heads) = (fields.take("num_layers", whole), fields.take("num_attention_heads", whole));
        let width = fields.take("token_dim", whole);
        Some(Self { length: length?, layers, heads, width })
    }

    /// Checks that they are for `base`, and that the file has one tensor `[length, columns]` and nothing else.
    pub fn check(
        &self,
        columns: usize,
        tensors: &TensorFile,
        base: &BaseDescription,
        findings: &mut Findings,
    ) {
        if let Some(found) = self.layers.filter(|&found| found != base.layers) {
            findings.layers(found, base.layers);
        }
        for (name, found, expected) in
            [("num_attention_heads", self.heads, base.heads), ("token_dim", self.width, base.width)]
        {
            if let Some(found) = found.filter(|&found| found != expected) {
                findings.field(name, found, format!("the base has {expected}"));
            }
        }
        findings.tensor(tensors, TENSOR.to_owned(), &[self.length, columns]);
        findings.extras(tensors, &[TENSOR.to_owned()]);
    }

    /// The fields as they are written for `length` virtual tokens.
    pub fn fields(length: usize, base: &BaseDescription) -> [(&'static str, Value); 5] {
        [
            ("num_attention_heads", json!(base.heads)),
            ("num_layers", json!(base.layers)),
            ("num_transformer_submodules", json!(1)),
            ("num_virtual_tokens", json!(length)),
            ("token_dim", json!(base.width)),
        ]
    }
}
