//! The base and the data that are compiled into the programs, so that a first run needs no network.

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

/// Options of `engraft train` when neither base nor data is given, as a config file.
pub const DEFAULTS: &str = include_str!("../examples/data/places/engraft.toml");

/// The same if the run trains no LoRA, as with `--method prefix` or `ln_tuning`.
pub const PREFIX_DEFAULTS: &str = include_str!("../examples/data/places/prefix.toml");

/// The example data to train on, `{"prompt", "completion"}` lines.
pub const TRAIN_DATA: &[u8] = include_bytes!("../examples/data/places/train.jsonl");

/// The held-out rows of the example data.
pub const VALID_DATA: &[u8] = include_bytes!("../examples/data/places/valid.jsonl");

/// The rows of the example data that no run reads.
pub const TEST_DATA: &[u8] = include_bytes!("../examples/data/places/test.jsonl");
