//! What llama.cpp calls the tensors of a GPT-2 (its `src/llama-arch.cpp`).

use crate::model::arch::layer_of;

/// Name of the architecture in metadata.
pub const ARCHITECTURE: &str = "gpt2";

/// Modules outside the layers, with their names in GGUF.
const OUTSIDE: [(&str, &str); 4] = [
    ("transformer.wte", "token_embd"),
    ("transformer.wpe", POSITIONS),
    ("transformer.ln_f", "output_norm"),
    ("lm_head", "output"),
];

/// Modules of a layer, with their names in GGUF.
const INSIDE: [(&str, &str); 6] = [
    ("ln_1", "attn_norm"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("ln_2", "ffn_norm"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
];

/// The position embedding, which llama.cpp reads in F32.
const POSITIONS: &str = "position_embd";

/// The name in GGUF of the tensor that our files call `name`.
pub(super) fn gguf_name(name: &str) -> Option<String> {
    let (module, kind) = name.rsplit_once('.')?;
    let named = |table: &[(&str, &'static str)], wanted: &str| {
        table.iter().find(|(ours, _)| *ours == wanted).map(|(_, theirs)| *theirs)
    };
    match layer_of(module) {
        Some((layer, module)) => Some(format!("blk.{layer}.{}.{kind}", named(&INSIDE, module)?)),
        None => Some(format!("{}.{kind}", named(&OUTSIDE, module)?)),
    }
}

/// Layer and module of the weight that GGUF calls `name`; `None` for a tensor that is no weight of a layer.
pub fn module_of(name: &str) -> Option<(usize, &'static str)> {
    let (layer, module) = name.strip_prefix("blk.")?.strip_suffix(".weight")?.split_once('.')?;
    let ours = INSIDE.iter().find(|(_, theirs)| *theirs == module)?.0;
    Some((layer.parse().ok()?, ours))
}

/// Whether it is the position embedding.
pub(super) fn is_positions(gguf_name: &str) -> bool {
    gguf_name.starts_with(POSITIONS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{arch::Arch, builtin::builtin};

    #[test]
    fn every_tensor_has_a_name() {
        let arch = Arch::of(&builtin("gpt2").unwrap().unwrap());
        let mut names: Vec<String> =
            arch.tensors().iter().map(|tensor| gguf_name(&tensor.name).unwrap()).collect();
        assert_eq!(names[0], "token_embd.weight");
        assert!(is_positions(&names[1]));
        for name in
            ["blk.3.attn_qkv.weight", "blk.11.ffn_down.bias", "blk.0.attn_norm.weight", "output_norm.bias"]
        {
            assert!(names.iter().any(|known| known == name), "{name}");
        }
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(gguf_name("lm_head.weight").unwrap(), "output.weight");
        assert_eq!(gguf_name("transformer.h.0.attn.masked"), None);
    }

    #[test]
    fn weights_of_layers_are_found_by_their_names() {
        assert_eq!(module_of("blk.12.ffn_up.weight"), Some((12, "mlp.c_fc")));
        for other in ["blk.12.ffn_up.bias", "token_embd.weight", "blk.x.ffn_up.weight", "blk.1.attn_q.weight"]
        {
            assert_eq!(module_of(other), None, "{other}");
        }
    }
}
