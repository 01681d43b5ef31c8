//! The configs of the four GPT-2 models, so that memory can be planned without any file.

use std::path::Path;

use super::Config;
use crate::error::Result;

/// Name on the hub, layers, width, heads (Radford et al. 2019).
const SIZES: [(&str, usize, usize, usize); 4] = [
    ("gpt2", 12, 768, 12),
    ("gpt2-medium", 24, 1024, 16),
    ("gpt2-large", 36, 1280, 20),
    ("gpt2-xl", 48, 1600, 25),
];

/// Owner of the models on the hub; the bare names lead there too.
const OWNER: &str = "openai-community/";

/// The config of the GPT-2 called `name` on the hub; `None` for any other name.
///
/// # Errors
/// None that an input could bring about.
pub fn builtin(name: &str) -> Result<Option<Config>> {
    let bare = name.strip_prefix(OWNER).unwrap_or(name);
    let Some((_, layers, width, heads)) = SIZES.iter().find(|(size, ..)| *size == bare) else {
        return Ok(None);
    };
    let text = serde_json::json!({
        "model_type": "gpt2", "n_layer": layers, "n_embd": width, "n_head": heads,
        "n_positions": 1024, "vocab_size": 50257, "eos_token_id": 50256, "bos_token_id": 50256,
    });
    Config::from_json(&text.to_string(), Path::new("the built-in config.json")).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_four_sizes_and_no_other() {
        for (name, parameters) in [
            ("gpt2", 124_439_808),
            ("gpt2-medium", 354_823_168),
            ("openai-community/gpt2-large", 774_030_080),
            ("gpt2-xl", 1_557_611_200usize),
        ] {
            let config = builtin(name).unwrap().unwrap();
            let c = config.width;
            let block = 4 * c * c + 2 * c * config.inner + 9 * c + config.inner;
            let all = (config.vocab + config.positions + 2) * c + config.layers * block;
            assert_eq!(all, parameters, "{name}");
        }
        assert_eq!(builtin("gpt2-tiny").unwrap(), None);
        assert_eq!(builtin("somebody/gpt2").unwrap(), None);
    }
}
