//! A split: its rows, counts of records and rows, and a fingerprint.

use std::{collections::BTreeMap, fmt, fs, path::PathBuf};

use engraft_util::words::count;
use serde::{Deserialize, Serialize};

use super::batch::{Batch, NO_LOSS, RowRef};
use super::formats::Kind;
use super::options::{DataOptions, ReadOptions};
use super::read::Reader;
use super::records::listed;
use super::sampler::Sampler;
use super::sources::{self, DataFile, Split};
use super::store::{Rows, bytes_of};
use super::token_cache::{self, Part, TokenCache};
use super::tokenizer::Tokenizer;
use super::weights::Weights;
use crate::error::{Error, Result};

/// Keys the shuffle that chooses held-out rows apart from the shuffles of training.
const HOLD_OUT: u64 = 0x686f_6c64_6f75_7400;

/// Counts of records and rows that were read, kept and left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DataReport {
    /// Number of records read: raw records of a file, text files, or lines of text files.
    pub records: usize,
    /// Number of records that are in at least one row.
    pub documents: usize,
    /// Number of rows.
    pub rows: usize,
    /// Input positions of all rows, less those of virtual tokens.
    pub tokens: usize,
    /// Number of positions with a target.
    pub supervised: usize,
    /// Number of records that were cut to `seq_len`.
    pub truncated: usize,
    /// Input positions of all records, those that were lost included.
    pub read_tokens: usize,
    /// Input positions that were lost where records were cut.
    pub cut_tokens: usize,
    /// Input positions of the longest record that must fit into a row; 0 without such a record.
    pub longest_record: usize,
    /// Number of windows without any target, which are left out.
    pub dropped: usize,
}

impl DataReport {
    /// The share of tokens that were lost where records were cut, from 0 to 1.
    pub fn cut_share(&self) -> f64 {
        self.cut_tokens as f64 / self.read_tokens.max(1) as f64
    }
}

/// A part in percent, with two digits below one percent.
fn percent(part: f64) -> String {
    let percent = 100.0 * part;
    if percent < 1.0 { format!("{percent:.2}%") } else { format!("{percent:.1}%") }
}

/// One line for people: `3 records, 2 rows, 40 tokens (12 supervised), 1 cut to the row length (5.0% of the tokens)`.
impl fmt::Display for DataReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [records, rows, tokens] = [(self.records, "record"), (self.rows, "row"), (self.tokens, "token")]
            .map(|(number, word)| count(number as u64, word));
        write!(f, "{records}, {rows}, {tokens} ({} supervised)", self.supervised)?;
        if self.truncated > 0 {
            let lost = percent(self.cut_share());
            write!(f, ", {} cut to the row length ({lost} of the tokens lost)", self.truncated)?;
        }
        if self.dropped > 0 {
            write!(f, ", {} dropped without a supervised token", self.dropped)?;
        }
        Ok(())
    }
}

/// From this share of lost tokens on a hint says so.
const CUT_HINT: f64 = 0.01;

/// What the user should know of data called `names`: tokens that were cut, keys that were not read.
pub(super) fn hints(
    names: &str,
    report: &DataReport,
    ignored: &BTreeMap<String, usize>,
    seq_len: usize,
) -> Vec<String> {
    let mut hints = Vec::new();
    if report.cut_share() >= CUT_HINT {
        hints.push(format!(
            "{names}: {} of the tokens are lost ({} of {}), because {} longer than --seq-len {seq_len}; --seq-len {} \
             would keep the longest whole",
            percent(report.cut_share()),
            report.cut_tokens,
            report.read_tokens,
            if report.truncated == 1 {
                "1 record is".to_owned()
            } else {
                format!("{} records are", report.truncated)
            },
            report.longest_record
        ));
    }
    if !ignored.is_empty() {
        let named =
            |(key, records): (&String, &usize)| format!("{key:?} in {}", count(*records as u64, "record"));
        hints.push(format!("{names}: keys that are not read: {}", listed(ignored.iter().map(named))));
    }
    hints
}

/// Rows of one split, at least one.
#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    /// The rows in the order of the files.
    pub rows: Rows,
    /// Counts of the records and rows.
    pub report: DataReport,
    /// BLAKE3 over all rows in order, in hex.
    pub fingerprint: String,
    /// Sentences that the user should read.
    pub hints: Vec<String>,
    /// Ids from here on are those of virtual tokens.
    vocab: usize,
    /// Every row once with the weights of their files, where `rows` repeats or leaves out some.
    weighted: Option<(Rows, Weights)>,
    /// The entry of the token cache that the rows are in, where what splits of them have is noted.
    pub(super) splits: Option<PathBuf>,
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
        let fingerprint = fingerprint.finish();
        Self { rows, report, fingerprint, hints: Vec::new(), vocab, weighted: None, splits: None }
    }

    /// All rows as `about` describes them, without reading them.
    pub(super) fn known(rows: Rows, weights: Weights, about: Part, vocab: usize) -> Self {
        let Part { report, fingerprint } = about;
        let of = |rows, weighted| Self {
            rows,
            report,
            fingerprint,
            hints: Vec::new(),
            vocab,
            weighted,
            splits: None,
        };
        match weights.is_empty() {
            true => of(rows, None),
            false => of(rows.part(weights.repeated(0..rows.len())), Some((rows, weights))),
        }
    }

    /// Every row once, and the weights of the files; none where all weigh the same.
    pub(super) fn all(&self) -> (&Rows, Weights) {
        let weighted = self.weighted.as_ref().map(|(rows, weights)| (rows, weights.clone()));
        weighted.unwrap_or((&self.rows, Weights::default()))
    }

    /// As [`Dataset::new`], with each row as often as `weights` say.
    ///
    /// # Errors
    /// When they leave no row.
    pub(super) fn weighted(rows: Rows, weights: Weights, report: DataReport, vocab: usize) -> Result<Self> {
        let repeated = rows.part(weights.repeated(0..rows.len()));
        if repeated.is_empty() {
            return Err(Error::input("--data: the weights leave no row; give larger ones"));
        }
        Ok(Self { weighted: Some((rows, weights)), ..Self::new(repeated, report, vocab) })
    }

    fn about(&self) -> Part {
        Part { report: self.report, fingerprint: self.fingerprint.clone() }
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
    /// documents, because a text file is one document. Held-out rows come once, whatever the weight of their file. The
    /// counts of records, documents, cut and dropped stay those of all.
    ///
    /// # Errors
    /// A fraction that is not between 0 and 1, or a single row.
    pub fn split(self, fraction: f64, seed: u64) -> Result<(Self, Self)> {
        if !(fraction > 0.0 && fraction < 1.0) {
            return Err(Error::input(format!(
                "--eval-fraction: is {fraction}; give a number between 0 and 1"
            )));
        }
        let all = self.weighted.as_ref().map_or(&self.rows, |(rows, _)| rows);
        let len = all.len();
        if len < 2 {
            return Err(Error::input(
                "--eval-fraction: the data make a single row; give --eval-data, more data or a smaller --seq-len",
            ));
        }
        let held = ((len as f64 * fraction).round() as usize).clamp(1, len - 1);
        let order = Sampler::new(len, seed ^ HOLD_OUT, true);
        let mut is_held = vec![false; len];
        order.rows(0, held).into_iter().for_each(|row| is_held[row] = true);
        let is_held = &is_held;
        let of = |held| (0..len).filter(move |&row| is_held[row] == held);
        let kept = match &self.weighted {
            None => all.part(of(false)),
            Some((_, weights)) => all.part(weights.repeated(of(false))),
        };
        if kept.is_empty() {
            return Err(Error::input("--data: the weights leave no row to train on; give larger ones"));
        }
        let held_out = all.part(of(true));
        let noted = self.splits.as_deref().and_then(|entry| token_cache::split_parts(entry, fraction, seed));
        let (kept, held_out) = match noted {
            Some([first, second]) => {
                let known = |rows, part| Self::known(rows, Weights::default(), part, self.vocab);
                (known(kept, first), known(held_out, second))
            }
            None => {
                let new = |rows| Self::new(rows, self.report, self.vocab);
                (new(kept), new(held_out))
            }
        };
        if let Some(entry) = &self.splits {
            token_cache::note_split(entry, fraction, seed, &[kept.about(), held_out.about()]);
        }
        Ok((Self { hints: self.hints, ..kept }, held_out))
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
    let files = sources::files(sources, split, options.read.format)?;
    let names = listed(files.iter().map(DataFile::name));
    let cache = TokenCache::of(&files, tokenizer, options);
    if let Some((data, ignored)) = cache.as_ref().and_then(|cache| cache.find(options.vocab)) {
        return Ok(Dataset { hints: hints(&names, &data.report, &ignored, options.seq_len), ..data });
    }
    let mut reader = Reader::new(tokenizer, options);
    if let Some(cache) = &cache {
        reader = reader.kept_in(cache.folder());
    }
    read_files(&mut reader, &files, &options.read)?;
    let ignored = reader.ignored().clone();
    let mut data = reader.finish(&names)?;
    if let Some(cache) = &cache {
        cache.keep(&mut data, &ignored);
    }
    Ok(data)
}

/// Reads `files` in order.
///
/// # Errors
/// The first file that is invalid, or a folder that cannot take the rows.
pub(super) fn read_files(reader: &mut Reader, files: &[DataFile], options: &ReadOptions) -> Result<()> {
    let is_weighted = files.iter().any(|file| file.weight != 1.0);
    reader.announce(files.iter().filter_map(|file| Some(fs::metadata(&file.path).ok()?.len())).sum());
    for file in files {
        let (from, kind) = file.open(options, reader.counter())?;
        reader.read(&file.name(), from, kind)?;
        if is_weighted {
            reader.end_file(file.weight)?;
        }
    }
    Ok(())
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
    const TOGETHER: usize = 1 << 20;

    fn new(rows: usize) -> Self {
        Self { hasher: blake3::Hasher::new(), bytes: (rows as u64).to_le_bytes().to_vec() }
    }

    fn add(&mut self, row: RowRef) {
        self.bytes.extend((row.ids.len() as u32).to_le_bytes());
        self.bytes.extend_from_slice(bytes_of(row.ids));
        self.bytes.extend(row.targets.iter().flat_map(|target| target.to_le_bytes()));
        self.bytes.extend_from_slice(bytes_of(row.starts));
        if self.bytes.len() >= Self::TOGETHER {
            self.hasher.update_rayon(&self.bytes);
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
