//! The tokenizer in the metadata of a GGUF file.

use super::file::Meta;
use crate::{
    data::{
        Tokenizer,
        vocabulary::{TokenKind, Vocabulary},
    },
    model::Config,
};

/// Numbers of kinds of tokens: `LLAMA_TOKEN_TYPE_*` in llama.cpp's `include/llama.h`.
fn number(kind: TokenKind) -> i32 {
    match kind {
        TokenKind::Normal => 1,
        TokenKind::Special => 3,
        TokenKind::Added => 4,
        TokenKind::Unused => 5,
    }
}

/// The entries that describe `tokenizer`.
///
/// # Errors
/// Why llama.cpp could not use it, as the end of a sentence.
pub(super) fn of(tokenizer: Option<&Tokenizer>, config: &Config) -> Result<Vec<(String, Meta)>, String> {
    let Some(tokenizer) = tokenizer else { return Err("the base has none".to_owned()) };
    let Vocabulary { tokens, merges } = tokenizer
        .vocabulary(config.vocab)
        .map_err(|why| format!("the base's {why}, and GGUF has no name for its rules"))?;
    // Without its own ids llama.cpp takes token 11 for both.
    let Some(end) = tokenizer.end_of_text(config.eos_token) else {
        return Err("neither config.json nor the tokenizer names an end-of-text".to_owned());
    };
    let begin = config.bos_token.unwrap_or(end);
    let kinds = tokens.iter().map(|(_, kind)| number(*kind)).collect();
    let entries = [
        ("model", Meta::from("gpt2")),
        ("pre", "gpt-2".into()),
        ("tokens", Meta::Texts(tokens.into_iter().map(|(token, _)| token).collect())),
        ("token_type", Meta::Numbers(kinds)),
        ("merges", Meta::Texts(merges.into_iter().map(|(one, two)| format!("{one} {two}")).collect())),
        ("bos_token_id", Meta::U32(begin)),
        ("eos_token_id", Meta::U32(end)),
        ("add_bos_token", Meta::Bool(false)),
    ];
    Ok(entries.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect())
}

/// What says that there is none.
pub(super) fn none() -> Vec<(String, Meta)> {
    vec![("tokenizer.ggml.model".to_owned(), "no_vocab".into())]
}
