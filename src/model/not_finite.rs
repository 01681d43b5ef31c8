//! What to do about a loss or logits that are not finite.
//!
//! Weights and adapters are finite when they are read. So the cause is a scale that is far too large, a learning
//! rate that was, or, rarely, numbers of a base that are finite and wrong.

use engraft_adapters::AdapterSet;

/// A larger scale of a low-rank delta is taken for the cause; usual ones are 0.1 to 64.
const LARGEST_USUAL: f32 = 1e3;

/// The largest scale of the deltas of adapters, each with the factor on its LoRA; 0 without any.
fn largest_scale(sets: &[(&AdapterSet, f32)]) -> f32 {
    let scales = sets.iter().flat_map(|(set, factor)| {
        let embedding = set.embedding.iter().map(|delta| delta.scale);
        set.loras.iter().map(|lora| lora.scale).chain(embedding).map(move |scale| (scale * factor).abs())
    });
    scales.fold(0.0, f32::max)
}

/// The end of a sentence about adapters in use; `lower` says how to lower a scale.
pub fn remedy_in_use(sets: &[(&AdapterSet, f32)], lower: &str) -> String {
    let scale = largest_scale(sets);
    match sets {
        [] => "check the base for damaged weights".to_owned(),
        _ if scale > LARGEST_USUAL => format!("the scale of the adapter is {scale:.3e}; {lower}"),
        _ => "the adapter's values are too large; train it again with a lower --lr".to_owned(),
    }
}

/// The end of a sentence about a training that has made `steps` steps.
pub fn remedy_in_training(set: &AdapterSet, steps: u64) -> String {
    let scale = largest_scale(&[(set, 1.0)]);
    match steps {
        _ if scale > LARGEST_USUAL => format!("the scale of the LoRA is {scale:.3e}; lower --alpha"),
        0 => "no step was made yet, so check the base and --init-adapter for damaged weights".to_owned(),
        _ => "lower --lr".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use engraft_adapters::{AdapterSpec, LoraSpec};

    use super::*;
    use crate::model::builtin::builtin;

    fn set(alpha: f64) -> AdapterSet {
        let lora = Some(LoraSpec { alpha, ..LoraSpec::default() });
        let base = builtin("gpt2").unwrap().unwrap().describe("gpt2", None);
        AdapterSet::new(&AdapterSpec { lora, ..AdapterSpec::default() }, &base).unwrap()
    }

    #[test]
    fn what_is_to_blame_is_named() {
        let (usual, huge) = (set(16.0), set(1e30));
        assert_eq!(remedy_in_training(&usual, 3), "lower --lr");
        assert!(remedy_in_training(&usual, 0).contains("--init-adapter"));
        assert_eq!(remedy_in_training(&huge, 3), "the scale of the LoRA is 1.250e29; lower --alpha");
        assert!(remedy_in_use(&[], "x").contains("check the base"));
        assert!(remedy_in_use(&[(&usual, 1.0)], "x").contains("lower --lr"));
        for sets in [[(&usual, 1e30)], [(&huge, -1.0)]] {
            assert!(remedy_in_use(&sets, "x").starts_with("the scale of the adapter is "), "{sets:?}");
        }
    }
}
