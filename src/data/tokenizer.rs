//! Text to token ids and back, with the tokenizer files in a base's folder.

use std::{fs, path::Path};

use rayon::prelude::*;
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, DecoderWrapper, ModelWrapper, PreTokenizerWrapper};

use crate::error::{Error, Result};

/// The end-of-text token as GPT-2's files spell it.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// Text is encoded in pieces of about this many bytes: an encoding costs some 150 bytes of memory a
/// token, and pieces can be encoded side by side.
const PIECE_BYTES: usize = 4 << 10;

/// A tokenizer: `tokenizer.json`, or GPT-2's older pair `vocab.json` and `merges.txt`.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    pub(super) inner: tokenizers::Tokenizer,
    /// BLAKE3 of its files.
    identity: String,
    vocab_size: usize,
    /// The places where long texts may be cut; `None` if there are none.
    cuts: Option<Cuts>,
}

impl Tokenizer {
    /// The tokenizer of a base's folder; `None` when it holds no tokenizer file.
    ///
    /// # Errors
    /// A file that cannot be read or makes no tokenizer; one of `vocab.json` and `merges.txt` alone.
    pub fn from_folder(folder: &Path) -> Result<Option<Self>> {
        let file = folder.join("tokenizer.json");
        if file.exists() {
            let bytes = fs::read(&file).map_err(|cause| Error::reading(&file, &cause))?;
            let parsed = Self::parse(&bytes, &file.display().to_string());
            return parsed.map(Some).map_err(|error| Error::damaged(&file, || error));
        }
        let (vocab, merges) = (folder.join("vocab.json"), folder.join("merges.txt"));
        match (vocab.exists(), merges.exists()) {
            (true, true) => Self::from_pair(&vocab, &merges)
                .map(Some)
                .map_err(|error| Error::damaged(&vocab, || Error::damaged(&merges, || error))),
            (false, false) => Ok(None),
            (true, false) => Err(lonely(&vocab, "merges.txt")),
            (false, true) => Err(lonely(&merges, "vocab.json")),
        }
    }

    /// A tokenizer from the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// Bytes that make no tokenizer.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Self::parse(bytes, "tokenizer.json")
    }

    fn parse(bytes: &[u8], name: &str) -> Result<Self> {
        let inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|cause| {
            Error::input(format!("{name}: is no tokenizer: {cause}; download the file again"))
        })?;
        Self::new(inner, name, blake3::hash(bytes).to_hex().to_string())
    }

    /// Byte-level BPE as GPT-2: no space is put before the text, end-of-text is one special token.
    fn from_pair(vocab: &Path, merges: &Path) -> Result<Self> {
        let name = vocab.display().to_string();
        let broken = |cause: tokenizers::Error| {
            Error::input(format!(
                "{name}: makes no tokenizer with merges.txt: {cause}; download both files again"
            ))
        };
        let (Some(vocab_path), Some(merges_path)) = (vocab.to_str(), merges.to_str()) else {
            return Err(Error::input(format!("{name}: its path is not UTF-8; move the folder")));
        };
        let bpe = BPE::from_file(vocab_path, merges_path).build().map_err(broken)?;
        let mut inner = tokenizers::Tokenizer::new(bpe);
        inner.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)));
        inner.with_decoder(Some(ByteLevel::default()));
        if inner.token_to_id(END_OF_TEXT).is_some() {
            inner.add_special_tokens([AddedToken::from(END_OF_TEXT, true)]).map_err(broken)?;
        }
        let mut hasher = blake3::Hasher::new();
        for path in [vocab, merges] {
            let bytes = fs::read(path).map_err(|cause| Error::reading(path, &cause))?;
            hasher.update(&(bytes.len() as u64).to_le_bytes()).update(&bytes);
        }
        Self::new(inner, &name, hasher.finalize().to_hex().to_string())
    }

    /// Takes over `inner` without what its file may say about truncation, padding and BPE dropout:
    /// each of them would change a document silently.
    fn new(mut inner: tokenizers::Tokenizer, name: &str, identity: String) -> Result<Self> {
        inner
            .with_truncation(None)
            .map_err(|cause| Error::input(format!("{name}: {cause}; download the file again")))?;
        inner.with_padding(None);
        if let ModelWrapper::BPE(bpe) = inner.get_model()
            && bpe.dropout.is_some()
        {
            let mut bpe = bpe.clone();
            bpe.dropout = None;
            inner.with_model(bpe);
        }
        let largest = inner.get_vocab(true).into_values().max();
        let vocab_size = largest.map_or(0, |id| id as usize + 1);
        if vocab_size == 0 {
            return Err(Error::input(format!("{name}: has an empty vocabulary; download the file again")));
        }
        let cuts = Cuts::of(&inner);
        Ok(Self { inner, identity, vocab_size, cuts })
    }

    /// The ids of `text`, without special tokens around it. A special token spelled out in the
    /// text (`<|endoftext|>`) becomes its id, as in Transformers.
    ///
    /// # Errors
    /// Text that the tokenizer's model cannot take (a word-level vocabulary without unknown token).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self.pieces(text, true)[..] {
            [piece] => self.encode_piece(piece),
            ref pieces => Ok(self.encode_pieces(pieces)?.concat()),
        }
    }

    /// `text` in pieces of about 4 KiB whose ids, one after the other, are those of the whole. Unless
    /// the text has `ended`, its rest after the last sure cut is left out; with more text after it
    /// the pieces stay the same.
    pub(super) fn pieces<'a>(&self, text: &'a str, ended: bool) -> Vec<&'a str> {
        match &self.cuts {
            Some(cuts) => cuts.pieces(text, PIECE_BYTES, ended),
            None => Vec::from_iter(ended.then_some(text)),
        }
    }

    /// The ids of each of `pieces`, encoded in parallel.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`], for the first piece that fails.
    pub(super) fn encode_pieces(&self, pieces: &[&str]) -> Result<Vec<Vec<u32>>> {
        let encoded: Vec<_> = pieces.par_iter().map(|piece| self.encode_piece(piece)).collect();
        encoded.into_iter().collect()
    }

    fn encode_piece(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(|cause| {
            let start: String = text.chars().take(40).collect();
            Error::input(format!(
                "the tokenizer cannot encode the text that starts {start:?}: {cause}; \
                 use the tokenizer of the base"
            ))
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`, special tokens included. Bytes that are no UTF-8 become U+FFFD; an id the
    /// tokenizer does not know (a padded vocabulary) adds nothing.
    ///
    /// # Errors
    /// A decoder that refuses the tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(|cause| {
            Error::input(format!(
                "the tokenizer cannot decode {} ids: {cause}; use the tokenizer of the base",
                ids.len()
            ))
        })
    }

    /// Tells two tokenizers apart: BLAKE3 of the files that this one was made from, in hex.
    pub(super) fn identity(&self) -> &str {
        &self.identity
    }

    /// One more than the largest id this tokenizer can give.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of a token as the vocabulary spells it, special tokens included.
    pub fn token(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The id that ends a document: the base's own, else the tokenizer's `<|endoftext|>`.
    pub fn end_of_text(&self, eos: Option<u32>) -> Option<u32> {
        eos.or_else(|| self.token(END_OF_TEXT))
    }

    /// Refuses a tokenizer that can give an id outside a base's vocabulary of `vocab` tokens.
    ///
    /// # Errors
    /// Both sizes and the remedy.
    pub fn check_vocabulary(&self, vocab: usize) -> Result<()> {
        if self.vocab_size <= vocab {
            return Ok(());
        }
        Err(Error::input(format!(
            "the tokenizer has {} tokens, but the base has embeddings for {vocab}; \
             use the tokenizer files that belong to this base",
            self.vocab_size
        )))
    }

    /// The bytes that `id` stands for under a byte-level decoder; `None` under any other decoder.
    pub(super) fn bytes(&self, id: u32) -> Option<Vec<u8>> {
        matches!(self.inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))).then(|| {
            let token = self.inner.id_to_token(id).unwrap_or_default();
            // A token with a character outside the byte alphabet stands for itself.
            let bytes: Option<Vec<u8>> = token.chars().map(byte_of).collect();
            bytes.unwrap_or_else(|| token.into_bytes())
        })
    }
}

fn lonely(present: &Path, missing: &str) -> Error {
    Error::input(format!("{}: is there without {missing}; add {missing} to its folder", present.display()))
}

/// Inverse of GPT-2's `bytes_to_unicode` (openai/gpt-2, `src/encoder.py`): a printable byte is its
/// own character, the other 68 bytes are U+0100 and up, in order.
fn byte_of(character: char) -> Option<u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    match u32::from(character) {
        code @ 0..=0xFF => Some(code as u8).filter(|&byte| printable(byte)),
        code => (0..=0xFF).filter(|&byte| !printable(byte)).nth((code - 0x100) as usize),
    }
}

/// The places before a newline at which a text may be cut without changing a token, if the tokenizer's
/// parts allow any.
///
/// Under GPT-2's pre-tokenizer (contractions, ` ?\p{L}+`, ` ?\p{N}+`, ` ?[^\s\p{L}\p{N}]+`,
/// `\s+(?!\S)`, `\s+`) a match ends before a newline
/// - that follows a non-space: no alternative matches a non-space and a newline after it;
/// - that a non-space follows: it is the last of a run of spaces, and `\s+(?!\S)` takes the run
///   without its last character. An added token after the newline would end the text there, so
///   its first characters are excepted.
///
/// No alternative looks back, so the tail matches as before. An added token must not reach over the
/// cut, nor a normalizer look over it.
#[derive(Debug, Clone)]
struct Cuts {
    /// First characters of added tokens.
    added: Vec<char>,
}

impl Cuts {
    fn of(inner: &tokenizers::Tokenizer) -> Option<Self> {
        let gpt2 = match inner.get_pre_tokenizer() {
            Some(PreTokenizerWrapper::ByteLevel(level)) => level.use_regex && !level.add_prefix_space,
            _ => false,
        };
        let added = inner.get_added_tokens_decoder();
        let plain = added.values().all(|token| {
            !token.lstrip && !token.rstrip && !token.single_word && !token.content.contains('\n')
        });
        let first = added.values().filter_map(|token| token.content.chars().next()).collect();
        (gpt2 && plain && inner.get_normalizer().is_none()).then_some(Self { added: first })
    }

    /// `text` in pieces of at least `bytes` bytes, but for the last; without the last one unless the
    /// text has `ended`.
    fn pieces<'a>(&self, text: &'a str, bytes: usize, ended: bool) -> Vec<&'a str> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some(cut) = self.first(rest, bytes.max(1)) {
            let (piece, tail) = rest.split_at(cut);
            pieces.push(piece);
            rest = tail;
        }
        pieces.extend(ended.then_some(rest));
        pieces
    }

    /// The first place to cut from byte `from` on.
    fn first(&self, text: &str, from: usize) -> Option<usize> {
        let newlines = text.bytes().enumerate().skip(from).filter(|&(_, byte)| byte == b'\n');
        let mut places = newlines.map(|(index, _)| index);
        places.find(|&index| {
            let before = text[..index].chars().next_back();
            let after = text[index + 1..].chars().next();
            before.is_some_and(|before| !before.is_whitespace())
                || after.is_some_and(|after| !after.is_whitespace() && !self.added.contains(&after))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::testing::{END, FIXTURE, VOCAB, tokenizer};

    #[test]
    fn encodes_with_merges_and_without_special_tokens() {
        let tokenizer = tokenizer();
        assert_eq!(tokenizer.vocab_size(), VOCAB);
        // hello = merge 3 (id 259), " the" = merge 5 (id 261); "!" is byte token 0.
        assert_eq!(tokenizer.encode("hello the!").unwrap(), [259, 261, 0]);
        assert_eq!(tokenizer.encode("").unwrap(), [] as [u32; 0]);
        assert_eq!(tokenizer.encode("!<|endoftext|>!").unwrap(), [0, END, 0]);
        assert_eq!(tokenizer.token("<|endoftext|>"), Some(END));
        assert_eq!(tokenizer.token("absent"), None);
        assert_eq!((tokenizer.end_of_text(Some(5)), tokenizer.end_of_text(None)), (Some(5), Some(END)));
    }

    #[test]
    fn the_truncation_of_the_file_is_off() {
        // The fixture says max_length 4.
        assert!(std::str::from_utf8(FIXTURE).unwrap().contains("\"max_length\":4"));
        assert_eq!(tokenizer().encode("abcdefgh").unwrap().len(), 8);
    }

    #[test]
    fn dropout_and_padding_of_the_file_are_off() {
        let mut json: serde_json::Value = serde_json::from_slice(FIXTURE).unwrap();
        json["model"]["dropout"] = 1.0.into();
        json["padding"] = serde_json::json!({"strategy": {"Fixed": 9}, "direction": "Right",
            "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
        let noisy = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
        assert_eq!(noisy.encode("hello the!").unwrap(), [259, 261, 0]);
    }

    #[test]
    fn decodes_what_it_encoded() {
        let tokenizer = tokenizer();
        for text in ["hello the end", "é日本\u{1F600}\n\t\0\u{ad}", "a  b\r\n\u{a0}", "<|endoftext|>x"] {
            assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
        }
        assert_eq!(tokenizer.decode(&[0, 9999, 0]).unwrap(), "!!", "an unknown id adds nothing");
    }

    #[test]
    fn every_byte_has_its_character() {
        let tokenizer = tokenizer();
        let bytes: Vec<u8> = (0..256).flat_map(|id| tokenizer.bytes(id).unwrap()).collect();
        let mut sorted = bytes.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..=255).collect::<Vec<u8>>());
        assert_eq!(bytes[..2], *b"!\"");
        assert_eq!(tokenizer.bytes(END).unwrap(), b"<|endoftext|>");
        assert_eq!(byte_of('日'), None);
    }

    #[test]
    fn reads_vocab_and_merges_as_the_single_file() {
        let folder = tempfile::tempdir().unwrap();
        let json: serde_json::Value = serde_json::from_slice(FIXTURE).unwrap();
        let merges = json["model"]["merges"].as_array().unwrap().iter();
        let lines: Vec<String> = merges
            .map(|pair| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()))
            .collect();
        fs::write(folder.path().join("vocab.json"), json["model"]["vocab"].to_string()).unwrap();
        let lonely = Tokenizer::from_folder(folder.path()).unwrap_err();
        assert!(
            lonely
                .to_string()
                .ends_with("vocab.json: is there without merges.txt; add merges.txt to its folder")
        );
        fs::write(folder.path().join("merges.txt"), format!("#version: 0.2\n{}\n", lines.join("\n")))
            .unwrap();
        let pair = Tokenizer::from_folder(folder.path()).unwrap().unwrap();
        let text = "hello<|endoftext|> the hell é 日本 it's";
        assert_eq!(pair.encode(text).unwrap(), tokenizer().encode(text).unwrap());
        assert_eq!(pair.decode(&pair.encode(text).unwrap()).unwrap(), text);
        assert!(pair.cuts.is_some());
        fs::write(folder.path().join("merges.txt"), "#version: 0.2\nq q\n").unwrap();
        let broken = Tokenizer::from_folder(folder.path()).unwrap_err().to_string();
        assert!(broken.contains("vocab.json: makes no tokenizer with merges.txt"), "{broken}");
    }

    #[test]
    fn a_folder_may_have_no_tokenizer_or_a_broken_one() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Tokenizer::from_folder(folder.path()).unwrap().is_none());
        fs::write(folder.path().join("tokenizer.json"), "{").unwrap();
        let error = Tokenizer::from_folder(folder.path()).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("tokenizer.json: is no tokenizer: "), "{error}");
        assert!(Tokenizer::from_bytes(b"[]").is_err());
    }

    #[test]
    fn a_tokenizer_larger_than_the_vocabulary_is_refused() {
        assert!(tokenizer().check_vocabulary(VOCAB).is_ok());
        assert!(tokenizer().check_vocabulary(VOCAB + 1).is_ok());
        let error = tokenizer().check_vocabulary(VOCAB - 1).unwrap_err().to_string();
        assert!(error.contains("267 tokens") && error.contains("266"), "{error}");
    }

    #[test]
    fn cuts_stand_in_front_of_newlines_beside_a_non_space() {
        let cuts = tokenizer().cuts.unwrap();
        assert_eq!(cuts.added, ['<']);
        assert_eq!(cuts.pieces("ab\ncd\n\nef", 1, true), ["ab", "\ncd", "\n", "\nef"]);
        assert_eq!(cuts.pieces("ab \n cd \nef", 1, true), ["ab \n cd ", "\nef"], "a space on both sides");
        assert_eq!(cuts.pieces("ab \n<", 1, true), ["ab \n<"], "perhaps an added token");
        assert_eq!(cuts.pieces("\n\na\n", 1, true), ["\n", "\na", "\n"]);
        assert_eq!(cuts.pieces("", 1, true), [""]);
    }

    #[test]
    fn pieces_encode_as_the_whole() {
        let tokenizer = tokenizer();
        let cuts = tokenizer.cuts.clone().unwrap();
        let parts =
            ["he", " ", "\n", "\n\n", "it's", "é", "\u{a0}", "!?", "\r\n", "\u{2028}", "<|endoftext|>"];
        // Every sequence of four parts: all neighbourhoods of a cut.
        for code in 0..11usize.pow(4) {
            let text =
                [code % 11, code / 11 % 11, code / 121 % 11, code / 1331].map(|part| parts[part]).concat();
            let pieces = cuts.pieces(&text, 1, true);
            let cut: Vec<u32> =
                pieces.iter().flat_map(|piece| tokenizer.encode_piece(piece).unwrap()).collect();
            assert_eq!(cut, tokenizer.encode_piece(&text).unwrap(), "{text:?}");
        }
    }

    #[test]
    fn pieces_of_a_beginning_are_those_of_the_whole() {
        let cuts = tokenizer().cuts.unwrap();
        let text = "ab\n\n<\ncd \n\n é\n\nf\n<|endoftext|>\n\n\n日\n";
        let whole = cuts.pieces(text, 2, true);
        for (end, _) in text.char_indices() {
            let begun = cuts.pieces(&text[..end], 2, false);
            assert!(begun.len() < whole.len());
            assert_eq!(begun, whole[..begun.len()], "{end} bytes");
        }
        assert_eq!(cuts.pieces(text, 2, false), whole[..whole.len() - 1]);
    }

    #[test]
    fn long_text_goes_through_pieces() {
        let tokenizer = tokenizer();
        let text = "hello the\n\n end\n".repeat(10_000);
        assert!(tokenizer.pieces(&text, true).len() > 1);
        assert_eq!(tokenizer.encode(&text).unwrap(), tokenizer.encode_piece(&text).unwrap());
    }

    #[test]
    fn tokenizers_that_look_around_are_not_cut() {
        let cuts = |change: fn(&mut serde_json::Value)| {
            let mut json: serde_json::Value = serde_json::from_slice(FIXTURE).unwrap();
            change(&mut json);
            Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap().cuts.is_some()
        };
        assert!(cuts(|_| {}));
        assert!(!cuts(|json| json["pre_tokenizer"]["add_prefix_space"] = true.into()));
        assert!(!cuts(|json| json["added_tokens"][0]["rstrip"] = true.into()));
        assert!(!cuts(|json| json["normalizer"] = serde_json::json!({"type": "NFC"})));
    }
}
