//! The base and the data that are compiled into the programs, so that a first run needs no network.

use engraft_adapters::Kinds;

/// The `config.json` of the base.
pub const CONFIG: &str = include_str!("../examples/base/config.json");

/// The `tokenizer.json` of the base.
pub const TOKENIZER: &[u8] = include_bytes!("../examples/base/tokenizer.json");

/// Bytes on a cache line: views of FP16 tensors need at least their own alignment.
#[repr(align(64))]
struct Aligned<T: ?Sized>(T);

static MODEL: &Aligned<[u8]> = &Aligned(*include_bytes!("../examples/base/model.safetensors"));

/// The `model.safetensors` of the base, FP16.
pub fn model() -> &'static [u8] {
    &MODEL.0
}

/// Options of `engraft train` when neither base nor data is given, as config files: the first one that is for a
/// method of the run is taken.
const DEFAULTS: [(&[&str], &str); 4] = [
    (&["lora", "dora"], include_str!("../examples/data/places/engraft.toml")),
    (&["vera", "ia3", "ln_tuning", "prefix"], include_str!("../examples/data/places/prefix.toml")),
    (&["adalora"], include_str!("../examples/data/places/adalora.toml")),
    (&["prompt_tuning"], include_str!("../examples/data/places/prompt_tuning.toml")),
];

/// The text of the config file for a run with these methods.
pub fn defaults(kinds: &Kinds) -> &'static str {
    let of = |names: &[&str]| names.iter().any(|name| kinds.contains(name));
    DEFAULTS.iter().find(|(names, _)| of(names)).unwrap_or(&DEFAULTS[0]).1
}

/// The example data to train on, `{"prompt", "completion"}` lines.
pub const TRAIN_DATA: &[u8] = include_bytes!("../examples/data/places/train.jsonl");

/// The held-out rows of the example data.
pub const VALID_DATA: &[u8] = include_bytes!("../examples/data/places/valid.jsonl");

/// The rows of the example data that no run reads.
pub const TEST_DATA: &[u8] = include_bytes!("../examples/data/places/test.jsonl");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_method_has_its_options() {
        for kind in engraft_adapters::kinds() {
            assert!(DEFAULTS.iter().any(|(names, _)| names.contains(&kind.name)), "{}", kind.name);
        }
        let of = |kinds: &str| defaults(&kinds.parse().unwrap());
        assert!(of("lora") != of("prefix") && of("lora+prefix") == of("lora"));
    }
}
