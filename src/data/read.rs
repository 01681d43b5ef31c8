//! From files to rows, a bounded part at a time: memory does not grow with the files.

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use rayon::prelude::*;

use super::batch::NO_LOSS;
use super::chunks::{CHUNK, Chunks};
use super::dataset::{self, DataReport, Dataset};
use super::documents::{self, Document};
use super::formats::Kind;
use super::forms::Parsed;
use super::options::{DataOptions, Progress};
use super::records::{Parser, Record, SourceLine};
use super::rows::RowBuilder;
use super::split::{self, Part, Raw};
use super::tokenizer::Tokenizer;
use super::weights::Weights;
use crate::error::{Error, Result};

/// Most records that are tokenised in parallel; they must fit into one chunk.
const GROUP: usize = 8192;

/// Most different keys that are counted although no form reads them.
const MOST_IGNORED: usize = 1000;

/// A document as it comes by.
pub(super) struct Seen<'a> {
    pub name: &'a str,
    pub line: Option<usize>,
    /// Its record; `None` for a part of a text file, which is a document of several parts.
    pub parsed: Option<&'a Parsed>,
    pub document: &'a Document,
}

/// Called with every document, in order.
pub(super) type Visit<'a> = dyn FnMut(&Seen) + 'a;

/// Reads files one after the other into rows.
///
/// The reported error does not depend on the size of the parts: of several errors in a file it is the
/// first byte that is not UTF-8, else the first line that is no record, else the first record that cannot
/// be tokenised.
pub(super) struct Reader<'a> {
    tokenizer: Option<&'a Tokenizer>,
    options: &'a DataOptions,
    builder: RowBuilder,
    report: DataReport,
    /// Bytes of a file in memory at a time.
    chunk: usize,
    /// Records of a chunk that are tokenised in parallel.
    group: usize,
    /// How many records have each key that no form reads.
    ignored: BTreeMap<String, usize>,
    /// Weights of files; empty where all weigh the same.
    weights: Weights,
    /// Bytes of files read so far, and how many there will be.
    counter: Arc<AtomicU64>,
    expected: u64,
    visit: Option<&'a mut Visit<'a>>,
}

/// The reason why a line makes no document.
enum Fault {
    /// The line is no record.
    Record(Error),
    /// The record cannot be tokenised; names no place.
    Document(Error),
}

impl<'a> Reader<'a> {
    pub(super) fn new(tokenizer: Option<&'a Tokenizer>, options: &'a DataOptions) -> Self {
        Self::in_parts(tokenizer, options, CHUNK, GROUP)
    }

    pub(super) fn in_parts(
        tokenizer: Option<&'a Tokenizer>,
        options: &'a DataOptions,
        chunk: usize,
        group: usize,
    ) -> Self {
        let builder = RowBuilder::new(options.seq_len, options.pack, options.spool.as_deref())
            .with_prompt(options.vocab, options.prompt);
        Self {
            tokenizer,
            options,
            builder,
            report: DataReport::default(),
            chunk,
            group,
            ignored: BTreeMap::new(),
            weights: Weights::default(),
            counter: Arc::default(),
            expected: 0,
            visit: None,
        }
    }

    /// The same reader, which calls `visit` with every document.
    pub(super) fn visited(self, visit: &'a mut Visit<'a>) -> Self {
        Self { visit: Some(visit), ..self }
    }

    /// The same reader, whose rows go to a file in `folder` that can be kept.
    pub(super) fn kept_in(mut self, folder: &Path) -> Self {
        self.builder = self.builder.kept_in(folder);
        self
    }

    /// How many records have each key that no form reads.
    pub(super) fn ignored(&self) -> &BTreeMap<String, usize> {
        &self.ignored
    }

    /// Announces that files of `bytes` bytes follow.
    pub(super) fn announce(&mut self, bytes: u64) {
        self.expected = bytes;
    }

    /// Counts bytes of files.
    pub(super) fn counter(&self) -> Arc<AtomicU64> {
        self.counter.clone()
    }

    /// Adds the records of a file called `name`.
    ///
    /// # Errors
    /// When it has no record, its bytes, lines or records are invalid, or the spool folder cannot be
    /// written.
    pub(super) fn read(&mut self, name: &str, from: impl io::Read, kind: Kind) -> Result<()> {
        let mut chunks = Chunks::new(name, from, self.chunk);
        let records = if kind == Kind::Text && !self.options.line_by_line {
            self.read_whole(name, &mut chunks)?
        } else {
            self.read_records(name, &mut chunks, kind)?
        };
        if records == 0 {
            return Err(SourceLine { name, line: None }.error("is empty; give a file with text or records"));
        }
        self.report.records += records;
        Ok(())
    }

    /// Ends a file of this weight: its rows hold nothing of other files.
    ///
    /// # Errors
    /// When the spool folder cannot be written.
    pub(super) fn end_file(&mut self, weight: f64) -> Result<()> {
        self.weights.push(self.builder.end_file()?, weight);
        Ok(())
    }

    /// The rows of everything read; `names` are the files, for messages.
    ///
    /// # Errors
    /// When nothing is supervised, or the spool folder cannot be written.
    pub(super) fn finish(self, names: &str) -> Result<Dataset> {
        let (rows, documents, dropped) = self.builder.finish()?;
        if rows.is_empty() {
            return Err(Error::input(format!(
                "{names}: nothing is supervised in {} record{}; give completions, answers of the assistant, \
                 or labels other than -100, within the first {} tokens",
                self.report.records,
                if self.report.records == 1 { "" } else { "s" },
                self.options.seq_len
            )));
        }
        let report = DataReport { documents, dropped, ..self.report };
        let hints = dataset::hints(names, &report, &self.ignored, self.options.seq_len);
        let vocab = self.options.vocab;
        let mut data = match self.weights.is_empty() {
            true => Dataset::new(rows, report, vocab),
            false => Dataset::weighted(rows, self.weights, report, vocab)?,
        };
        data.hints = hints;
        Ok(data)
    }

    /// A text file as one document, in pieces: [`Document::new`] for a text that need not fit into
    /// memory. Returns the number of records, 1 or 0.
    fn read_whole(&mut self, name: &str, chunks: &mut Chunks<impl io::Read>) -> Result<usize> {
        let mut last = None;
        let mut records = 0;
        let mut tokens = 0;
        while !chunks.ended() {
            chunks.fill()?;
            if chunks.text().is_empty() {
                continue;
            }
            records = 1;
            let (ids, read) = match self.encode_sure(chunks.text(), chunks.ended()) {
                Ok(encoded) => encoded,
                Err(error) => {
                    chunks.drain()?;
                    return Err(SourceLine { name, line: None }.error(error));
                }
            };
            chunks.take(read);
            for ids in &ids {
                tokens += ids.len();
                self.visit_text(name, ids);
                self.extend(&mut last, ids)?;
            }
            self.progress();
        }
        self.report.read_tokens += tokens;
        if records > 0 {
            if last.is_some() {
                self.extend(&mut last, &[self.options.end_of_text])?;
            }
            self.builder.end()?;
        }
        Ok(records)
    }

    /// Shows a part of a text file.
    fn visit_text(&mut self, name: &str, ids: &[u32]) {
        if let Some(visit) = &mut self.visit {
            let targets = ids.iter().map(|&id| id as i32).collect();
            let document = Document { ids: ids.to_vec(), targets, first: NO_LOSS, lost: 0 };
            visit(&Seen { name, line: None, parsed: None, document: &document });
        }
    }

    /// The ids of the pieces of `text` that no further text can change, and the bytes they are of.
    fn encode_sure(&self, text: &str, ended: bool) -> Result<(Vec<Vec<u32>>, usize)> {
        let tokenizer = documents::needed(self.tokenizer)?;
        let pieces = tokenizer.pieces(text, ended);
        let read = pieces.iter().map(|piece| piece.len()).sum();
        Ok((tokenizer.encode_pieces(&pieces)?, read))
    }

    /// Adds tokens of a text: each is the target of the one before it.
    fn extend(&mut self, last: &mut Option<u32>, ids: &[u32]) -> Result<()> {
        let targets: Vec<i32> = ids.iter().map(|&id| id as i32).collect();
        match (*last, &targets[..]) {
            (Some(before), [target, ..]) => self.builder.extend(&[before], &[*target])?,
            (None, [first, ..]) => self.builder.begin(*first),
            (_, []) => {}
        }
        if let [inputs @ .., end] = ids {
            self.builder.extend(inputs, &targets[1..])?;
            *last = Some(*end);
        }
        Ok(())
    }

    /// A file of records, one after the other; returns their number.
    fn read_records(&mut self, name: &str, chunks: &mut Chunks<impl io::Read>, kind: Kind) -> Result<usize> {
        let options = self.options;
        let mut parser = Parser::new(kind, &options.read.keys, options.vocab);
        let mut splitter = split::splitter(kind);
        let (mut records, mut failed) = (0, None);
        loop {
            let part = splitter.split(chunks.text(), chunks.ended(), self.group);
            if part.is_empty() {
                if chunks.ended() {
                    break;
                }
                let used = part.used;
                chunks.take(used);
                chunks.fill()?;
                continue;
            }
            let added = self.add_part(name, &part, &mut parser, failed.is_some());
            let (used, fault) = (part.used, part.fault);
            let fault = fault.map(|(line, message)| SourceLine { name, line: Some(line) }.error(message));
            match added.and_then(|added| fault.map_or(Ok(added), Err)) {
                Ok((read, found)) => {
                    records += read;
                    failed = failed.or(found);
                }
                Err(error) => {
                    chunks.drain()?;
                    return Err(error);
                }
            }
            chunks.take(used);
            self.progress();
        }
        match failed {
            None => Ok(records),
            Some((line, error)) => {
                let line = (records > 1 || kind != Kind::Text).then_some(line);
                Err(SourceLine { name, line }.error(error))
            }
        }
    }

    /// Adds the records of `part`; returns their number, and line and error of the first that cannot be tokenised.
    fn add_part(
        &mut self,
        name: &str,
        part: &Part,
        parser: &mut Parser,
        only_check: bool,
    ) -> Result<(usize, Option<(usize, Error)>)> {
        let mut raw = &part.raw[..];
        if let ([first, others @ ..], true) = (raw, parser.wants_columns()) {
            parser.take_columns(SourceLine { name, line: Some(first.line) }, first.text)?;
            raw = others;
        }
        Ok((raw.len(), self.add(name, raw, parser, only_check)?))
    }

    /// Adds the documents of `raw` up to the first that cannot be tokenised, and returns that one's
    /// line and error. `only_check`: adds nothing and looks only whether each is a record.
    ///
    /// # Errors
    /// The first that is no record, or a spool folder that cannot be written.
    fn add(
        &mut self,
        name: &str,
        raw: &[Raw],
        parser: &Parser,
        only_check: bool,
    ) -> Result<Option<(usize, Error)>> {
        let (tokenizer, options) = (self.tokenizer, self.options);
        let document = |raw: &Raw| {
            let place = SourceLine { name, line: Some(raw.line) };
            let parsed = parser.parse(place, raw.text).map_err(Fault::Record)?;
            if only_check {
                return Ok(None);
            }
            let document = Document::new(&parsed.record, tokenizer, options).map_err(Fault::Document)?;
            Ok(Some((parsed, document)))
        };
        // Tokenised in parallel, added in order.
        let mut documents: Vec<_> = raw.par_iter().map(document).collect();
        if let Some(at) = documents.iter().position(|document| matches!(document, Err(Fault::Record(_))))
            && let Err(Fault::Record(error)) = documents.swap_remove(at)
        {
            return Err(error);
        }
        for (document, raw) in documents.into_iter().zip(raw) {
            match document {
                Err(Fault::Record(error) | Fault::Document(error)) => return Ok(Some((raw.line, error))),
                Ok(None) => {}
                Ok(Some((parsed, document))) => {
                    self.count(&parsed, &document);
                    if let Some(visit) = &mut self.visit {
                        visit(&Seen {
                            name,
                            line: Some(raw.line),
                            parsed: Some(&parsed),
                            document: &document,
                        });
                    }
                    self.builder.push(&document)?;
                }
            }
        }
        Ok(None)
    }

    fn count(&mut self, parsed: &Parsed, document: &Document) {
        let (report, inputs) = (&mut self.report, document.ids.len() + document.lost);
        report.truncated += usize::from(document.lost > 0);
        report.cut_tokens += document.lost;
        report.read_tokens += inputs;
        if !matches!(parsed.record, Record::File(_) | Record::Text(_)) {
            report.longest_record = report.longest_record.max(inputs);
        }
        for key in &parsed.ignored {
            if let Some(count) = self.ignored.get_mut(key) {
                *count += 1;
            } else if self.ignored.len() < MOST_IGNORED {
                self.ignored.insert(key.clone(), 1);
            }
        }
    }

    fn progress(&self) {
        let done = self.counter.load(Ordering::Relaxed);
        self.options.read.watch.tell(Progress { done, total: self.expected });
    }
}

#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;
