//! A split: its rows, counts of records and rows, and a fingerprint.

use std::fmt;
use std::fs::File;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::batch::{Batch, NO_LOSS, RowRef};
use super::options::DataOptions;
use super::read::Reader;
use super::records::Kind;
use super::sampler::Sampler;
use super::sources::{self, Split};
use super::store::{Rows, bytes_of};
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

/// Keys the shuffle that chooses held-out rows apart from the shuffles of training.
const HOLD_OUT: u64 = 0x686f_6c64_6f75_7400;

/// Counts of records and rows that were read, kept and left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DataReport {
    /// Number of records read: lines of JSONL, text files, or lines of text files.
    pub records: usize,
    /// Number of records that are in at least one row.
    pub documents: usize,
    /// Number of rows.
    pub rows: usize,
    /// Input positions of all rows, less those of virtual tokens.
    pub tokens: usize,
    /// Number of positions with a target.
    pub supervised: usize,
    /// Number of JSONL records that were cut to `seq_len`.
    pub truncated: usize,
    /// Number of windows without any target, which are left out.
    pub dropped: usize,
}

/// One line for people: `3 records, 2 rows, 40 tokens (12 supervised), 1 cut, 1 dropped`.
impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        write!(
            f,
            "{} record{}, {} row{}, {} token{} ({} supervised)",
            self.records,
            plural(self.records),
            self.rows,
            plural(self.rows),
            self.tokens,
            plural(self.tokens),
            self.supervised
        )?;
        if self.truncated > 0 {
            write!(f, ", {} cut to the row length", self.truncated)?;
        }
        if self.dropped > 0 {
            write!(f, ", {} dropped without a supervised token", self.dropped)?;
        }
        Ok(())
    }
}

/// Rows of one split, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dataset {
    /// The rows in the order of the files.
    pub rows: Rows,
    /// Counts of the records and rows.
    pub report: DataReport,
    /// BLAKE3 over all rows in order, in hex.
    pub fingerprint: String,
    /// Ids from here on are those of virtual tokens.
    vocab: usize,
}

impl Dataset {
    /// Counts and fingerprints `rows` in one pass; ids from `vocab` on are no tokens of text.
    pub(super) fn new(rows: Rows, report: DataReport, vocab: usize) -> Self {
        let mut report = DataReport { rows: rows.len(), tokens: 0, supervised: 0, ..report };
        let mut fingerprint = Fingerprint::new(rows.len());
        rows.for_each(|row| {
            report.tokens += row.text(vocab).count();
            report.supervised += row.targets.iter().filter(|&&target| target != NO_LOSS).count();
            fingerprint.add(row);
        });
        Self { rows, report, fingerprint: fingerprint.finish(), vocab }
    }

    /// Longest row, in positions, virtual tokens included; a memory plan depends on it.
    pub fn longest(&self) -> usize {
        self.rows.longest()
    }

    /// Bytes the rows hold: on the heap, and mapped from a file, whose pages the system can drop and
    /// read again. Both parts of a [`Dataset::split`] count the same mapping.
    pub fn memory(&self) -> (usize, usize) {
        self.rows.memory()
    }

    /// The rows at `indices` as one batch, padded to the longest of them; an index that is no row
    /// adds none.
    pub fn batch(&self, indices: &[usize]) -> Batch {
        let inside = indices.iter().copied().filter(|&index| index < self.rows.len());
        self.copied(inside)
    }

    /// All rows once, in order, `size` a batch; the last batch may have fewer.
    pub fn batches(&self, size: usize) -> impl Iterator<Item = Batch> + '_ {
        let (len, size) = (self.rows.len(), size.max(1));
        (0..len).step_by(size).map(move |first| self.copied(first..len.min(first.saturating_add(size))))
    }

    /// A batch holds copies, so the pages of its rows are given back at once: an epoch would else
    /// gather the whole file in memory.
    fn copied(&self, indices: impl Iterator<Item = usize> + Clone) -> Batch {
        let batch = Batch::new(&indices.clone().map(|index| self.rows.get(index)).collect::<Vec<_>>());
        indices.for_each(|index| self.rows.release(index));
        batch
    }

    /// At most `most` of the rows, at least one, evenly spread: of sorted data every part is represented. The counts of
    /// records, documents, cut and dropped stay those of all.
    pub fn at_most(self, most: usize) -> Self {
        let (len, most) = (self.rows.len(), most.max(1));
        if most >= len {
            return self;
        }
        let rows = self.rows.part((0..most).map(|row| row * len / most));
        Self::new(rows, self.report, self.vocab)
    }

    /// Splits off about `fraction` of the rows, at least one: (kept, held out). The choice depends
    /// on `seed`, the order within both parts stays, and no number is copied. Rows are split, not
    /// documents, because a text file is one document. The counts of records, documents, cut and
    /// dropped stay those of all.
    ///
    /// # Errors
    /// A fraction that is not between 0 and 1, or a single row.
    pub fn split(self, fraction: f64, seed: u64) -> Result<(Self, Self)> {
        if !(fraction > 0.0 && fraction < 1.0) {
            return Err(Error::input(format!(
                "--eval-fraction: is {fraction}; give a number between 0 and 1"
            )));
        }
        let len = self.rows.len();
        if len < 2 {
            return Err(Error::input(
                "--eval-fraction: the data make a single row; give --eval-data, more data or a smaller --seq-len",
            ));
        }
        let held = ((len as f64 * fraction).round() as usize).clamp(1, len - 1);
        let order = Sampler::new(len, seed ^ HOLD_OUT, true);
        let mut is_held = vec![false; len];
        order.rows(0, held).into_iter().for_each(|row| is_held[row] = true);
        let part = |held| self.rows.part((0..len).filter(|&row| is_held[row] == held));
        let new = |held| Self::new(part(held), self.report, self.vocab);
        Ok((new(false), new(true)))
    }
}

/// Loads the files that `sources` have for `split`, in order; see [`sources::files`].
///
/// # Errors
/// When there is no such file, one of them is invalid, no token is supervised, or a folder
/// cannot take the rows ([`DataOptions::spool`]).
pub fn load(
    sources: &[PathBuf],
    split: Split,
    tokenizer: Option<&Tokenizer>,
    options: &DataOptions,
) -> Result<Dataset> {
    options.check(tokenizer)?;
    let mut reader = Reader::new(tokenizer, options);
    let mut names = Vec::new();
    for path in sources::files(sources, split)? {
        let kind = Kind::of(&path)?;
        let file = File::open(&path).map_err(|cause| Error::reading(&path, &cause))?;
        let name = path.display().to_string();
        reader.read(&name, file, kind)?;
        names.push(name);
    }
    reader.finish(&names.join(", "))
}

/// [`load`] for data that is no file, such as the embedded example; `name` stands in messages.
///
/// # Errors
/// As [`load`].
pub fn load_text(
    name: &str,
    bytes: &[u8],
    kind: Kind,
    tokenizer: Option<&Tokenizer>,
    options: &DataOptions,
) -> Result<Dataset> {
    options.check(tokenizer)?;
    let mut reader = Reader::new(tokenizer, options);
    reader.read(name, bytes, kind)?;
    reader.finish(name)
}

/// BLAKE3 over the rows: their number, then for each its length, ids, targets and starts, all
/// little-endian 32 bit except the number (64 bit).
struct Fingerprint {
    hasher: blake3::Hasher,
    /// Rows that wait to be hashed together: many blocks at a time are several times as fast as few.
    bytes: Vec<u8>,
}

impl Fingerprint {
    const TOGETHER: usize = 256 << 10;

    fn new(rows: usize) -> Self {
        Self { hasher: blake3::Hasher::new(), bytes: (rows as u64).to_le_bytes().to_vec() }
    }

    fn add(&mut self, row: RowRef) {
        self.bytes.extend((row.ids.len() as u32).to_le_bytes());
        self.bytes.extend_from_slice(bytes_of(row.ids));
        self.bytes.extend(row.targets.iter().flat_map(|target| target.to_le_bytes()));
        self.bytes.extend_from_slice(bytes_of(row.starts));
        if self.bytes.len() >= Self::TOGETHER {
            self.hasher.update(&self.bytes);
            self.bytes.clear();
        }
    }

    fn finish(mut self) -> String {
        self.hasher.update(&self.bytes);
        self.hasher.finalize().to_hex().to_string()
    }
}

#[cfg(test)]
#[path = "dataset_tests.rs"]
mod tests;
