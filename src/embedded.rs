//! The base that is compiled into the programs, so that a first run needs no network.

/// Its `config.json`.
pub const CONFIG: &str = include_str!("../examples/base/config.json");

/// Its `tokenizer.json`.
pub const TOKENIZER: &[u8] = include_bytes!("../examples/base/tokenizer.json");

/// Bytes on a cache line: views of FP16 tensors need at least their own alignment.
#[repr(align(64))]
struct Aligned<T: ?Sized>(T);

static MODEL: &Aligned<[u8]> = &Aligned(*include_bytes!("../examples/base/model.safetensors"));

/// Its `model.safetensors`, FP16.
pub fn model() -> &'static [u8] {
    &MODEL.0
}
