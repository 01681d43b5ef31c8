//! The text of a sample as it grows: whole characters only, and nothing of a stop text is shown.

use crate::{
    data::{DecodeStream, Tokenizer},
    error::Result,
};

/// The text so far and how much of it was shown.
pub struct Text<'a> {
    stream: DecodeStream<'a>,
    stop: &'a [String],
    text: String,
    shown: usize,
}

impl<'a> Text<'a> {
    /// An empty text that ends at any of `stop`.
    pub fn new(tokenizer: &'a Tokenizer, stop: &'a [String]) -> Self {
        Self { stream: DecodeStream::new(tokenizer), stop, text: String::new(), shown: 0 }
    }

    /// Adds a token and shows the text that cannot become part of a stop text. Returns whether a stop text has appeared.
    pub fn push(&mut self, id: u32, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<bool> {
        if let Some(piece) = self.stream.push(id) {
            self.text += &piece;
        }
        if self.cut() {
            return Ok(true);
        }
        self.show(self.text.len() - self.held_back(), show)?;
        Ok(false)
    }

    /// Counts nothing as shown: the text so far was not printed.
    pub fn show_again(&mut self) {
        self.shown = 0;
    }

    /// Shows the rest and a line break; returns the whole text.
    pub fn finish(mut self, stopped: bool, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<String> {
        if !stopped && let Some(piece) = self.stream.finish() {
            self.text += &piece;
            self.cut();
        }
        self.show(self.text.len(), show)?;
        show("\n")?;
        Ok(self.text)
    }

    /// Cuts the text at the first stop text.
    fn cut(&mut self) -> bool {
        let first = self.stop.iter().filter_map(|stop| self.text.find(stop.as_str())).min();
        if let Some(at) = first {
            self.text.truncate(at);
        }
        first.is_some()
    }

    /// Bytes at the end that may be the beginning of a stop text.
    fn held_back(&self) -> usize {
        let begins = |stop: &String| {
            let lengths = (1..stop.len()).rev().filter(|&length| stop.is_char_boundary(length));
            lengths.into_iter().find(|&length| self.text.ends_with(&stop[..length])).unwrap_or(0)
        };
        self.stop.iter().map(begins).max().unwrap_or(0)
    }

    fn show(&mut self, end: usize, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        if end > self.shown {
            show(&self.text[self.shown..end])?;
            self.shown = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::testing::{ids, tokenizer};

    fn run(text: &str, stop: &[&str]) -> (String, String) {
        let (tokenizer, stop) = (tokenizer(), stop.iter().map(|s| s.to_string()).collect::<Vec<_>>());
        let (mut grown, mut shown) = (Text::new(&tokenizer, &stop), String::new());
        let mut show = |piece: &str| {
            shown += piece;
            Ok(())
        };
        let mut stopped = false;
        for id in ids(text) {
            stopped = grown.push(id, &mut show).unwrap();
            if stopped {
                break;
            }
        }
        let whole = grown.finish(stopped, &mut show).unwrap();
        (whole, shown)
    }

    #[test]
    fn a_stop_text_ends_the_text_and_is_never_shown() {
        assert_eq!(run("one. two", &[]), ("one. two".into(), "one. two\n".into()));
        assert_eq!(run("one. End two", &["End", "zzz"]), ("one. ".into(), "one. \n".into()));
        // A text that only begins like one is shown in the end.
        assert_eq!(run("one En", &["End"]), ("one En".into(), "one En\n".into()));
    }
}
