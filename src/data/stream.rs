//! Decodes ids one by one into text that never ends inside a character.

use super::tokenizer::Tokenizer;

/// Turns ids into text one at a time; the pieces joined are the text of all ids.
///
/// A character of several bytes may spread over several tokens, so a piece is held back until its
/// last character is complete.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Byte-level decoders: bytes not yet given out, the start of one character.
    pending: Vec<u8>,
    /// Other decoders join tokens with rules of their own: all ids so far,
    ids: Vec<u32>,
    /// and the text given out for them.
    given: String,
}

impl<'a> DecodeStream<'a> {
    /// A stream at the start of a text.
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, pending: Vec::new(), ids: Vec::new(), given: String::new() }
    }

    /// The text that becomes complete with `id`, if any.
    pub fn push(&mut self, id: u32) -> Option<String> {
        let text = match self.tokenizer.bytes(id) {
            Some(bytes) => {
                self.pending.extend_from_slice(&bytes);
                self.complete()
            }
            None => {
                self.ids.push(id);
                self.unseen(true)
            }
        };
        Some(text).filter(|text| !text.is_empty())
    }

    /// The text held back, an unfinished character as U+FFFD. The stream is then as new.
    pub fn finish(&mut self) -> Option<String> {
        let mut text = String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned();
        text += &self.unseen(false);
        self.ids.clear();
        self.given.clear();
        Some(text).filter(|text| !text.is_empty())
    }

    /// Takes every complete character out of `pending`; the same as `String::from_utf8_lossy` over
    /// all bytes, because an invalid sequence is replaced only once it can no longer be completed.
    fn complete(&mut self) -> String {
        let mut text = String::new();
        while !self.pending.is_empty() {
            let (valid, invalid) = match std::str::from_utf8(&self.pending) {
                Ok(all) => (all.len(), Some(0)),
                Err(error) => (error.valid_up_to(), error.error_len()),
            };
            text += &String::from_utf8_lossy(&self.pending[..valid]);
            self.pending.drain(..valid + invalid.unwrap_or(0));
            match invalid {
                Some(0) => {}
                Some(_) => text.push(char::REPLACEMENT_CHARACTER),
                None => break,
            }
        }
        text
    }

    /// The text of `ids` after that given out; `stable`: without replaced bytes at its end.
    fn unseen(&mut self, stable: bool) -> String {
        let mut text = self.tokenizer.decode(&self.ids).unwrap_or_default();
        if stable {
            text.truncate(text.trim_end_matches(char::REPLACEMENT_CHARACTER).len());
        }
        let unseen = text.strip_prefix(&self.given).unwrap_or_default().to_owned();
        self.given += &unseen;
        unseen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::testing::tokenizer;

    fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<Option<String>> {
        let mut stream = DecodeStream::new(tokenizer);
        let mut pieces: Vec<_> = ids.iter().map(|&id| stream.push(id)).collect();
        pieces.push(stream.finish());
        pieces
    }

    #[test]
    fn a_character_of_four_tokens_comes_whole() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode("a\u{1F600}b").unwrap();
        let expected = [Some("a"), None, None, None, Some("\u{1F600}"), Some("b"), None];
        assert_eq!(stream(&tokenizer, &ids), expected.map(|piece| piece.map(String::from)));
    }

    #[test]
    fn an_unfinished_character_is_replaced_at_the_end_only() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode("\u{1F600}").unwrap();
        assert_eq!(stream(&tokenizer, &ids[..2]), [None, None, Some("\u{fffd}".into())]);
    }

    #[test]
    fn pieces_joined_are_the_decoded_text_for_any_ids() {
        let tokenizer = tokenizer();
        for seed in 0..300u64 {
            // Mostly lead and continuation bytes, in any order: valid and invalid UTF-8.
            let ids: Vec<u32> = (0..12).map(|index| (draw(seed * 12 + index) % 267) as u32).collect();
            let joined: String = stream(&tokenizer, &ids).into_iter().flatten().collect();
            assert_eq!(joined, tokenizer.decode(&ids).unwrap(), "{ids:?}");
        }
    }

    #[test]
    fn other_decoders_keep_their_spaces() {
        let json = r###"{"version":"1.0","added_tokens":[],"pre_tokenizer":{"type":"Whitespace"},
            "decoder":{"type":"WordPiece","prefix":"##","cleanup":false},
            "model":{"type":"WordPiece","unk_token":"u","continuing_subword_prefix":"##",
            "max_input_chars_per_word":9,"vocab":{"u":0,"new":1,"##er":2,"day":3}}}"###;
        let tokenizer = Tokenizer::from_bytes(json.as_bytes()).unwrap();
        assert_eq!(tokenizer.encode("newer day").unwrap(), [1, 2, 3]);
        let expected = [Some("new"), Some("er"), Some(" day"), None];
        assert_eq!(stream(&tokenizer, &[1, 2, 3]), expected.map(|piece| piece.map(String::from)));
    }

    fn draw(index: u64) -> u64 {
        let mixed = (index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 33
    }
}
