//! Options of turning records into rows.

use std::path::PathBuf;

use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

/// Options of turning records into rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataOptions {
    /// Input positions of a row that text takes, at least 1. `seq_len` inputs have up to `seq_len` targets: the
    /// target of the last one is known although it is no input.
    pub seq_len: usize,
    /// Whether several documents share a row.
    pub pack: bool,
    /// Whether each line of a `.txt` file is a document.
    pub line_by_line: bool,
    /// Whether prompts, and messages of other roles than the assistant, have a loss too.
    pub train_on_prompt: bool,
    /// The token that ends a document.
    pub end_of_text: u32,
    /// Number of tokens that the base has embeddings for.
    pub vocab: usize,
    /// Virtual tokens in front of each document of a row, of ids `vocab` and following. They are no part of `seq_len`: a
    /// row has that many positions more.
    pub prompt: usize,
    /// Folder for the file that rows of more than 1 MiB go to; `None`: they stay in memory, whatever
    /// their size.
    pub spool: Option<PathBuf>,
}

impl DataOptions {
    pub(super) fn check(&self, tokenizer: Option<&Tokenizer>) -> Result<()> {
        if self.seq_len == 0 {
            return Err(Error::input("--seq-len: is 0; give at least 1"));
        }
        if self.end_of_text as usize >= self.vocab {
            return Err(Error::input(format!(
                "the end-of-text token {} is outside the base's {} tokens; correct eos_token_id in its config.json",
                self.end_of_text, self.vocab
            )));
        }
        tokenizer.map_or(Ok(()), |tokenizer| tokenizer.check_vocabulary(self.vocab))
    }
}
