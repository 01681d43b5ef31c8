//! From files to batches: records, tokens and loss masks, rows, micro-batches.
//!
//! In order: [`sources`] names the files of a split, `formats` opens them, `split` tells their records apart,
//! [`records`] and `forms` read these, [`documents`] turns a
//! record into token ids and shifted targets, [`rows`] cuts and packs documents into rows,
//! [`store`] keeps them in a mapped file, [`dataset`] goes that way a bounded part at a time and
//! holds the rows with their counts and fingerprint, [`sampler`] says which row comes
//! next, [`batch`] pads rows for the model. Nothing here knows a device or an adapter.

pub mod batch;
mod chunks;
pub mod dataset;
pub mod documents;
mod formats;
mod forms;
mod json;
mod options;
#[cfg(feature = "parquet")]
mod parquet;
mod read;
pub mod records;
pub mod rows;
pub mod sampler;
pub mod sources;
mod split;
mod statistics;
pub mod store;
pub mod stream;
pub mod survey;
pub mod template;
mod token_cache;
pub mod tokenizer;
pub mod turns;
pub mod vocabulary;
mod weights;
mod zstd;

pub use batch::{Batch, NO_LOSS, Row, RowRef};
pub use dataset::{DataReport, Dataset, load, load_text};
pub use formats::Kind;
pub use forms::Keys;
pub use options::{DataOptions, Progress, ReadOptions, Watch};
pub use sampler::Sampler;
pub use sources::{DataFile, STANDARD_INPUT, Split, files, has_split, reads_standard_input};
pub use statistics::RowStatistics;
pub use store::Rows;
pub use stream::DecodeStream;
pub use tokenizer::Tokenizer;
pub use turns::{Turn, prompt_of_turns, turns};
pub use vocabulary::Vocabulary;

/// Helpers shared by the tests of this folder.
#[cfg(test)]
pub(crate) mod testing {
    use super::{DataOptions, ReadOptions, Tokenizer};

    /// End-of-text and vocabulary size of the fixture: 256 bytes, 10 merges (spaces and newlines too),
    /// end-of-text.
    pub(crate) const END: u32 = 266;
    pub(crate) const VOCAB: usize = 267;
    pub(crate) const FIXTURE: &[u8] = include_bytes!("fixtures/tokenizer.json");

    pub(crate) fn tokenizer() -> Tokenizer {
        Tokenizer::from_bytes(FIXTURE).unwrap()
    }

    pub(crate) fn options(seq_len: usize) -> DataOptions {
        DataOptions {
            seq_len,
            pack: false,
            line_by_line: false,
            train_on_prompt: false,
            end_of_text: END,
            vocab: VOCAB,
            prompt: 0,
            spool: None,
            read: ReadOptions::default(),
        }
    }

    /// The ids of `text` under the fixture.
    pub(crate) fn ids(text: &str) -> Vec<u32> {
        tokenizer().encode(text).unwrap()
    }
}
