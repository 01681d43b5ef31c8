//! The tokens and merges of a tokenizer whose rules are GPT-2's, for programs that have these rules built in.

use tokenizers::{ModelWrapper, PreTokenizerWrapper};

use super::Tokenizer;

/// What a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// A word of the vocabulary, in the alphabet of bytes.
    Normal,
    /// A special token: no text contains it.
    Special,
    /// A token that was added to the vocabulary and is no special one.
    Added,
    /// No token: the base has a row that the tokenizer never names.
    Unused,
}

/// A byte-level BPE with GPT-2's rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary {
    /// The tokens by id, in the alphabet of bytes.
    pub tokens: Vec<(String, TokenKind)>,
    /// Pairs that become one token, the first to be merged first.
    pub merges: Vec<(String, String)>,
}

impl Tokenizer {
    /// Its vocabulary, for a base of `rows` tokens.
    ///
    /// # Errors
    /// What is not GPT-2's about it, as the end of a sentence.
    pub fn vocabulary(&self, rows: usize) -> Result<Vocabulary, &'static str> {
        let ModelWrapper::BPE(bpe) = self.inner.get_model() else { return Err("is no BPE") };
        match self.inner.get_pre_tokenizer() {
            Some(PreTokenizerWrapper::ByteLevel(level)) if level.use_regex && !level.add_prefix_space => {}
            _ => return Err("does not cut text as GPT-2's does"),
        }
        let is_set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let marked = is_set(&bpe.continuing_subword_prefix) || is_set(&bpe.end_of_word_suffix);
        if self.inner.get_normalizer().is_some() || marked || bpe.byte_fallback || bpe.ignore_merges {
            return Err("changes text or words before it merges, which GPT-2's does not");
        }
        let mut tokens: Vec<(String, TokenKind)> =
            (0..rows).map(|id| (format!("[PAD{id}]"), TokenKind::Unused)).collect();
        for (token, id) in self.inner.get_vocab(false) {
            if let Some(place) = tokens.get_mut(id as usize) {
                *place = (token, TokenKind::Normal);
            }
        }
        for (id, token) in self.inner.get_added_tokens_decoder() {
            if let Some(place) = tokens.get_mut(id as usize) {
                let kind = if token.special { TokenKind::Special } else { TokenKind::Added };
                *place = (token.content, kind);
            }
        }
        // The merges themselves are private there; what is written down contains them in their order.
        let written = serde_json::to_value(bpe).map_err(|_| "cannot be written down")?;
        let merges = serde_json::from_value(written["merges"].clone());
        Ok(Vocabulary { tokens, merges: merges.map_err(|_| "has merges that are no pairs")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::testing::{END, FIXTURE, VOCAB, tokenizer};

    #[test]
    fn tokens_stand_at_their_ids_and_merges_in_their_order() {
        let found = tokenizer().vocabulary(VOCAB + 2).unwrap();
        assert_eq!(found.tokens.len(), VOCAB + 2);
        assert_eq!(found.tokens[0], ("!".to_owned(), TokenKind::Normal));
        assert_eq!(found.tokens[END as usize], ("<|endoftext|>".to_owned(), TokenKind::Special));
        assert_eq!(found.tokens[VOCAB + 1], (format!("[PAD{}]", VOCAB + 1), TokenKind::Unused));
        let json: serde_json::Value = serde_json::from_slice(FIXTURE).unwrap();
        let expected: Vec<(String, String)> =
            serde_json::from_value(json["model"]["merges"].clone()).unwrap();
        assert!(expected.len() > 3);
        assert_eq!(found.merges, expected);
    }

    #[test]
    fn other_rules_are_named() {
        let refused = |change: fn(&mut serde_json::Value)| {
            let mut json: serde_json::Value = serde_json::from_slice(FIXTURE).unwrap();
            change(&mut json);
            Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap().vocabulary(VOCAB).err()
        };
        assert_eq!(refused(|_| {}), None);
        let prefix = refused(|json| json["pre_tokenizer"]["add_prefix_space"] = true.into());
        assert_eq!(prefix, Some("does not cut text as GPT-2's does"));
        let normalizer = refused(|json| json["normalizer"] = serde_json::json!({"type": "NFC"}));
        assert_eq!(normalizer, Some("changes text or words before it merges, which GPT-2's does not"));
    }
}
