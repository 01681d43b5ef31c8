//! A split in memory: its rows, what was counted on the way, and a fingerprint.

use std::fmt;
use std::fs;
use std::path::PathBuf;

use rayon::prelude::*;
use serde::Serialize;

use super::batch::{Batch, NO_LOSS, Row};
use super::documents::Document;
use super::options::DataOptions;
use super::records::{self, Kind, Place};
use super::rows::RowBuilder;
use super::sampler::Sampler;
use super::sources::{self, Split};
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

/// Keys the shuffle that chooses held-out rows apart from the shuffles of training.
const HOLD_OUT: u64 = 0x686f_6c64_6f75_7400;

/// What was read, kept and left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DataReport {
    /// Records read: lines of JSONL, text files, or lines of them.
    pub records: usize,
    /// Records that reached at least one row.
    pub documents: usize,
    /// Rows.
    pub rows: usize,
    /// Input positions of all rows.
    pub tokens: usize,
    /// Positions with a target.
    pub supervised: usize,
    /// JSONL records that lost their end to `seq_len`.
    pub truncated: usize,
    /// Windows left out because none of their positions has a target.
    pub dropped: usize,
}

impl DataReport {
    fn of_rows(self, rows: &[Row]) -> Self {
        let supervised =
            rows.iter().map(|row| row.targets.iter().filter(|&&target| target != NO_LOSS).count()).sum();
        let tokens = rows.iter().map(|row| row.ids.len()).sum();
        Self { rows: rows.len(), tokens, supervised, ..self }
    }
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
    pub rows: Vec<Row>,
    /// The counts.
    pub report: DataReport,
    /// BLAKE3 over all rows in order, in hex.
    pub fingerprint: String,
}

impl Dataset {
    fn new(rows: Vec<Row>, report: DataReport) -> Self {
        let fingerprint = fingerprint(&rows);
        Self { report: report.of_rows(&rows), rows, fingerprint }
    }

    /// Longest row, in positions: what a memory plan is for.
    pub fn longest(&self) -> usize {
        self.rows.iter().map(|row| row.ids.len()).max().unwrap_or(0)
    }

    /// The rows at `indices` as one batch, padded to the longest of them; an index that is no row
    /// adds none.
    pub fn batch(&self, indices: &[usize]) -> Batch {
        let rows: Vec<&Row> = indices.iter().filter_map(|&index| self.rows.get(index)).collect();
        Batch::new(&rows)
    }

    /// All rows once, in order, `size` a batch; the last batch may have fewer.
    pub fn batches(&self, size: usize) -> impl Iterator<Item = Batch> + '_ {
        self.rows.chunks(size.max(1)).map(|rows| Batch::new(&rows.iter().collect::<Vec<_>>()))
    }

    /// Splits off about `fraction` of the rows, at least one: (kept, held out). The choice depends
    /// on `seed`, the order within both parts stays. Rows are split, not documents, because a text
    /// file is one document. The counts of records, documents, cut and dropped stay those of all.
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
        let mut flags = is_held.into_iter();
        let (held, kept) = self.rows.into_iter().partition(|_| flags.next() == Some(true));
        Ok((Self::new(kept, self.report), Self::new(held, self.report)))
    }
}

/// Loads the files that `sources` have for `split`, in order; see [`sources::files`].
///
/// # Errors
/// No such file, anything wrong in one of them, or no supervised token in all of them.
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
        let bytes = fs::read(&path).map_err(|cause| Error::reading(&path, &cause))?;
        let name = path.display().to_string();
        reader.read(&name, &bytes, kind)?;
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

struct Reader<'a> {
    tokenizer: Option<&'a Tokenizer>,
    options: &'a DataOptions,
    builder: RowBuilder,
    report: DataReport,
}

impl<'a> Reader<'a> {
    fn new(tokenizer: Option<&'a Tokenizer>, options: &'a DataOptions) -> Self {
        let builder = RowBuilder::new(options.seq_len, options.pack);
        Self { tokenizer, options, builder, report: DataReport::default() }
    }

    fn read(&mut self, name: &str, bytes: &[u8], kind: Kind) -> Result<()> {
        let options = self.options;
        let records = records::read(name, bytes, kind, options.line_by_line, options.vocab)?;
        self.report.records += records.len();
        let tokenise = |(line, record): &(usize, records::Record)| {
            let line = (records.len() > 1 || kind == Kind::Jsonl).then_some(*line);
            Document::new(Place { name, line }, record, self.tokenizer, options)
        };
        // In parallel, but taken in order: the first error of the file is the one reported.
        let documents: Vec<_> = records.par_iter().map(tokenise).collect();
        for document in documents {
            let document = document?;
            self.report.truncated += usize::from(document.cut);
            self.builder.push(&document);
        }
        Ok(())
    }

    fn finish(self, names: &str) -> Result<Dataset> {
        let (rows, documents, dropped) = self.builder.finish();
        if rows.is_empty() {
            return Err(Error::input(format!(
                "{names}: nothing is supervised in {} records; give completions, answers of the assistant, \
                 or labels other than -100, within the first {} tokens",
                self.report.records, self.options.seq_len
            )));
        }
        Ok(Dataset::new(rows, DataReport { documents, dropped, ..self.report }))
    }
}

/// BLAKE3 over the rows: their number, then for each its length, ids, targets and starts, all
/// little-endian 32 bit except the number (64 bit).
fn fingerprint(rows: &[Row]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(rows.len() as u64).to_le_bytes());
    let mut bytes = Vec::new();
    for row in rows {
        bytes.clear();
        bytes.extend((row.ids.len() as u32).to_le_bytes());
        bytes.extend(row.ids.iter().flat_map(|id| id.to_le_bytes()));
        bytes.extend(row.targets.iter().flat_map(|target| target.to_le_bytes()));
        bytes.extend(row.starts.iter().flat_map(|start| start.to_le_bytes()));
        hasher.update(&bytes);
    }
    hasher.finalize().to_hex().to_string()
}

#[cfg(test)]
#[path = "dataset_tests.rs"]
mod tests;
