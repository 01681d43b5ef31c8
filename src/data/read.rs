//! From files to rows, a bounded part at a time: memory does not grow with the files.

use std::io;

use rayon::prelude::*;

use super::chunks::{CHUNK, Chunks};
use super::dataset::{DataReport, Dataset};
use super::documents::{self, Document};
use super::options::DataOptions;
use super::records::{self, Kind, SourceLine};
use super::rows::RowBuilder;
use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};

/// Most records that are tokenised in parallel; they must fit into one chunk.
const GROUP: usize = 8192;

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
        Self { tokenizer, options, builder, report: DataReport::default(), chunk, group }
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
            self.read_lines(name, &mut chunks, kind)?
        };
        if records == 0 {
            return Err(SourceLine { name, line: None }.error("is empty; give a file with text or records"));
        }
        self.report.records += records;
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
                "{names}: nothing is supervised in {} records; give completions, answers of the assistant, \
                 or labels other than -100, within the first {} tokens",
                self.report.records, self.options.seq_len
            )));
        }
        let report = DataReport { documents, dropped, ..self.report };
        Ok(Dataset::new(rows, report, self.options.vocab))
    }

    /// A text file as one document, in pieces: [`Document::new`] for a text that need not fit into
    /// memory. Returns the number of records, 1 or 0.
    fn read_whole(&mut self, name: &str, chunks: &mut Chunks<impl io::Read>) -> Result<usize> {
        let mut last = None;
        let mut records = 0;
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
            ids.iter().try_for_each(|ids| self.extend(&mut last, ids))?;
        }
        if records > 0 {
            if last.is_some() {
                self.extend(&mut last, &[self.options.end_of_text])?;
            }
            self.builder.end()?;
        }
        Ok(records)
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
        if let (Some(before), [target, ..]) = (*last, &targets[..]) {
            self.builder.extend(&[before], &[*target])?;
        }
        if let [inputs @ .., end] = ids {
            self.builder.extend(inputs, &targets[1..])?;
            *last = Some(*end);
        }
        Ok(())
    }

    /// A file with a record a line; returns their number.
    fn read_lines(&mut self, name: &str, chunks: &mut Chunks<impl io::Read>, kind: Kind) -> Result<usize> {
        let (mut records, mut next_line) = (0, 1);
        let mut failed = None;
        while !chunks.ended() {
            let end = chunks.fill_lines()?;
            let text = &chunks.text()[..end];
            let mut lines = records::lines(text, next_line);
            loop {
                let group: Vec<_> = lines.by_ref().take(self.group).collect();
                if group.is_empty() {
                    break;
                }
                records += group.len();
                let only_check = failed.is_some();
                match self.add(name, &group, kind, only_check) {
                    Ok(found) => failed = failed.or(found),
                    Err(error) => {
                        drop(group);
                        drop(lines);
                        chunks.drain()?;
                        return Err(error);
                    }
                }
            }
            next_line += text.bytes().filter(|&byte| byte == b'\n').count();
            drop(lines);
            chunks.take(end);
        }
        match failed {
            None => Ok(records),
            Some((line, error)) => {
                let line = (records > 1 || kind == Kind::Jsonl).then_some(line);
                Err(SourceLine { name, line }.error(error))
            }
        }
    }

    /// Adds the documents of `lines` up to the first that cannot be tokenised, and returns that one's
    /// line and error. `only_check`: adds nothing and looks only whether every line is a record.
    ///
    /// # Errors
    /// The first line that is no record, or a spool folder that cannot be written.
    fn add(
        &mut self,
        name: &str,
        lines: &[(usize, &str)],
        kind: Kind,
        only_check: bool,
    ) -> Result<Option<(usize, Error)>> {
        let (tokenizer, options) = (self.tokenizer, self.options);
        let document = |&(line, text): &(usize, &str)| {
            let place = SourceLine { name, line: Some(line) };
            let record = records::of_line(place, text, kind, options.vocab).map_err(Fault::Record)?;
            if only_check {
                return Ok(None);
            }
            Document::new(&record, tokenizer, options).map(Some).map_err(Fault::Document)
        };
        // Tokenised in parallel, added in order.
        let mut documents: Vec<_> = lines.par_iter().map(document).collect();
        if let Some(at) = documents.iter().position(|document| matches!(document, Err(Fault::Record(_))))
            && let Err(Fault::Record(error)) = documents.swap_remove(at)
        {
            return Err(error);
        }
        for (document, &(line, _)) in documents.into_iter().zip(lines) {
            match document {
                Err(Fault::Record(error) | Fault::Document(error)) => return Ok(Some((line, error))),
                Ok(None) => {}
                Ok(Some(document)) => {
                    self.report.truncated += usize::from(document.cut);
                    self.builder.push(&document)?;
                }
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;
