//! Options of turning records into rows.

use std::{fmt, io::Read, path::PathBuf, sync::Arc};

use super::{formats::Kind, forms::Keys, tokenizer::Tokenizer};
use crate::error::{Error, Result};

/// Options of turning records into rows.
#[derive(Debug, Clone)]
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
    /// How files are read.
    pub read: ReadOptions,
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

/// Options of reading files, the same for training and held-out data.
#[derive(Debug, Clone, Default)]
pub struct ReadOptions {
    /// Keys of records that the user named.
    pub keys: Keys,
    /// The format of every file; `None`: each file's extension tells it.
    pub format: Option<Kind>,
    /// Opens the standard input, for the path `-`; `None` where there is none.
    pub standard_input: Option<fn() -> Box<dyn Read + Send>>,
    /// Folder of the token cache; `None`: rows are made anew.
    pub token_cache: Option<PathBuf>,
    /// Told how far the reading is.
    pub watch: Watch,
}

/// How far files are read and tokenised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes read, as they are on the disk.
    pub done: u64,
    /// Bytes of all files; 0 if unknown, as for the standard input.
    pub total: u64,
}

/// Receives [`Progress`], many times a second.
#[derive(Clone, Default)]
pub struct Watch(Option<Arc<dyn Fn(Progress) + Send + Sync>>);

impl Watch {
    /// A watch that calls `tell`.
    pub fn new(tell: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(tell)))
    }

    pub(super) fn tell(&self, progress: Progress) {
        if let Some(tell) = &self.0 {
            tell(progress);
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Watch(..)" } else { "Watch" })
    }
}
