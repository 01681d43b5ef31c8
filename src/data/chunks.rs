//! A file as text, a bounded part at a time.

use std::{io::Read, path::Path};

use super::records::SourceLine;
use crate::error::{Error, Result};

/// Bytes read at a time. More are in memory only while a line, or a stretch without a place to cut
/// it, is longer.
pub(super) const CHUNK: usize = 4 << 20;

/// The text of a file whose beginning is taken away as it is used. A byte-order mark is skipped.
pub(super) struct Chunks<'a, R> {
    name: &'a str,
    from: R,
    chunk: usize,
    /// Valid UTF-8, of which the first `taken` bytes are used.
    text: String,
    taken: usize,
    /// Bytes that are not decoded yet: after [`Chunks::fill`] an incomplete character, at most 3 bytes.
    bytes: Vec<u8>,
    /// Bytes of the file before `bytes`, and the newlines among them.
    offset: usize,
    newlines: usize,
    ended: bool,
}

impl<'a, R: Read> Chunks<'a, R> {
    /// The text of `from`, called `name` in messages, read about `chunk` bytes at a time.
    pub(super) fn new(name: &'a str, from: R, chunk: usize) -> Self {
        // A first read must hold a whole byte-order mark.
        let chunk = chunk.max(4);
        let (text, bytes) = (String::new(), Vec::new());
        Self { name, from, chunk, text, taken: 0, bytes, offset: 0, newlines: 0, ended: false }
    }

    /// The text in memory that was not taken.
    pub(super) fn text(&self) -> &str {
        &self.text[self.taken..]
    }

    /// Whether [`Chunks::text`] is all of the rest of the file.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// Appends more text to that in memory; as much again if that is long, so that text without a
    /// place to cut costs time in proportion to its length.
    ///
    /// # Errors
    /// When reading fails, or at the first line that is not UTF-8.
    pub(super) fn fill(&mut self) -> Result<()> {
        self.text.drain(..std::mem::take(&mut self.taken));
        let wanted = self.chunk.max(self.text.len());
        let limit = wanted as u64;
        let read = self.from.by_ref().take(limit).read_to_end(&mut self.bytes);
        let read = read.map_err(|cause| Error::reading(Path::new(self.name), &cause))?;
        self.ended = read < wanted;
        let text = match std::str::from_utf8(&self.bytes) {
            Ok(text) => text,
            Err(error) if error.error_len().is_none() && !self.ended => {
                std::str::from_utf8(&self.bytes[..error.valid_up_to()]).unwrap_or_default()
            }
            Err(error) => return Err(self.no_utf8(error.valid_up_to())),
        };
        let first = if self.offset == 0 { text.strip_prefix('\u{feff}') } else { None };
        self.newlines += newlines(text.as_bytes());
        self.text.push_str(first.unwrap_or(text));
        let taken = text.len();
        self.offset += taken;
        self.bytes.drain(..taken);
        Ok(())
    }

    /// Takes the first `len` bytes of the text away.
    pub(super) fn take(&mut self, len: usize) {
        self.taken += len;
    }

    /// Reads to the end without keeping anything: bytes that are not UTF-8 are reported before other errors.
    ///
    /// # Errors
    /// As [`Chunks::fill`].
    pub(super) fn drain(&mut self) -> Result<()> {
        while !self.ended {
            self.taken = self.text.len();
            self.fill()?;
        }
        Ok(())
    }

    fn no_utf8(&self, at: usize) -> Error {
        let line = 1 + self.newlines + newlines(&self.bytes[..at]);
        SourceLine { name: self.name, line: Some(line) }.error(format!(
            "is not UTF-8 (byte 0x{:02x} at offset {}); convert the file to UTF-8",
            self.bytes[at],
            self.offset + at
        ))
    }
}

fn newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All text, taken a character at a time from what is there.
    fn text(bytes: &[u8], chunk: usize) -> Result<String> {
        let mut chunks = Chunks::new("a.txt", bytes, chunk);
        let mut found = String::new();
        while !chunks.ended() || !chunks.text().is_empty() {
            match chunks.text().chars().next() {
                Some(next) => {
                    found.push(next);
                    chunks.take(next.len_utf8());
                }
                None => chunks.fill()?,
            }
        }
        Ok(found)
    }

    #[test]
    fn text_comes_whole_whatever_the_chunk() {
        let content = "one\r\n\n日本\u{1F600} and more than most chunks\r\nlast\r";
        for chunk in 1..80 {
            let found = text(format!("\u{feff}{content}").as_bytes(), chunk).unwrap();
            assert_eq!(found, content, "chunk {chunk}");
        }
        assert_eq!(text("a\u{feff}".as_bytes(), 1).unwrap(), "a\u{feff}");
        assert!(text(b"", 9).unwrap().is_empty());
    }

    #[test]
    fn bytes_that_are_no_utf8_are_placed_as_in_the_whole() {
        let good = "\u{feff}ok\nüber日本\n\n".as_bytes();
        for bad in [&b"\xef"[..], b"\xe6\x97", b"\xffab\n", b"\xc3\n", b"\xf0\x9f\x98"] {
            let bytes = [good, bad].concat();
            let at = std::str::from_utf8(&bytes).unwrap_err().valid_up_to();
            let expected = format!(
                "a.txt:4: is not UTF-8 (byte 0x{:02x} at offset {at}); convert the file to UTF-8",
                bytes[at]
            );
            for chunk in 1..40 {
                assert_eq!(text(&bytes, chunk).unwrap_err().to_string(), expected, "chunk {chunk}");
                let mut chunks = Chunks::new("a.txt", &bytes[..], chunk);
                assert_eq!(chunks.drain().unwrap_err().to_string(), expected);
            }
        }
    }
}
