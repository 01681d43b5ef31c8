//! A look at data before they are trained on: lengths, forms, the first records, and what looks wrong.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    path::PathBuf,
};

use super::{
    batch::NO_LOSS,
    dataset::{self, Dataset},
    documents::Document,
    formats::Kind,
    options::DataOptions,
    read::{Reader, Seen},
    records::{Record, Role, listed},
    sources::{self, DataFile, Split},
    store::bytes_of,
    tokenizer::{END_OF_TEXT, Tokenizer},
};
use crate::error::Result;

/// Most places that are named for a finding.
const EXAMPLES: usize = 3;

/// Most tokens of a text file that are kept to be shown.
const SHOWN_TEXT: usize = 256;

/// What a file of data holds.
#[derive(Debug)]
pub struct Survey {
    /// The rows, with their counts and hints.
    pub data: Dataset,
    /// Number of records by form.
    pub forms: BTreeMap<String, usize>,
    /// Number of records by length in tokens, lost ones included.
    pub lengths: BTreeMap<usize, usize>,
    /// The first records.
    pub first: Vec<Shown>,
    /// What looks wrong, by kind.
    pub findings: Vec<(Finding, Found)>,
    /// A digest of each record, with its place.
    digests: HashMap<[u8; 16], String>,
}

/// A record to be shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// `file:line`
    pub place: String,
    /// Token ids, the end-of-text that is only a target included.
    pub ids: Vec<u32>,
    /// For each id whether it is a target, so that it has a loss.
    pub supervised: Vec<bool>,
    /// Tokens that are not shown: those that no row has, or the rest of a text file.
    pub more: usize,
}

impl Shown {
    /// Stretches of ids that are all supervised or all not.
    pub fn stretches(&self) -> Vec<(&[u32], bool)> {
        let mut stretches = Vec::new();
        let mut begin = 0;
        for group in self.supervised.chunk_by(|a, b| a == b) {
            stretches.push((&self.ids[begin..begin + group.len()], group[0]));
            begin += group.len();
        }
        stretches
    }
}

/// A kind of thing that looks wrong in data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finding {
    /// The same tokens and targets as a record before.
    Duplicate,
    /// A held-out record that is in the training data too.
    Leak,
    /// A record without any text.
    Empty,
    /// A completion, or an answer of the assistant, without text.
    EmptyCompletion,
    /// A conversation without an answer of the assistant.
    NoAnswer,
    /// No end-of-text is learned at the end: the record was cut, or its labels have none.
    NoEnd,
    /// Prompt and completion meet without a space or line break.
    Glued,
    /// A prompt ends with a space, which GPT-2's tokens have at the beginning of the next word.
    TrailingSpace,
    /// U+FFFD: the text was damaged when it was converted.
    Damaged,
    /// The end-of-text token is spelled out inside a text.
    EndInside,
}

impl Finding {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Duplicate => "duplicate",
            Self::Leak => "leak",
            Self::Empty => "empty",
            Self::EmptyCompletion => "empty_completion",
            Self::NoAnswer => "no_answer",
            Self::NoEnd => "no_end",
            Self::Glued => "glued",
            Self::TrailingSpace => "trailing_space",
            Self::Damaged => "damaged",
            Self::EndInside => "end_inside",
        }
    }

    /// What it means and what to do, after the number of records.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Duplicate => "the same as a record before; remove the copies",
            Self::Leak => {
                "in the training data too, so the evaluation is too good; remove them from one of the two"
            }
            Self::Empty => "without text; remove them",
            Self::EmptyCompletion => "with an empty completion or answer, which teaches to say nothing",
            Self::NoAnswer => "without an answer of the assistant, so nothing is learned from them",
            Self::NoEnd => {
                "whose end is not learned, because they are cut or their labels have no end-of-text"
            }
            Self::Glued => "whose prompt and completion meet without a space; begin completions with one",
            Self::TrailingSpace => {
                "whose prompt ends with a space; move it to the completion, as GPT-2's tokens have it"
            }
            Self::Damaged => "with U+FFFD, the sign of a wrong encoding; convert the source again",
            Self::EndInside => "with <|endoftext|> inside a text, which ends it there",
        }
    }
}

/// How often something was found, and where first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// Number of records.
    pub count: usize,
    /// The first places, `file:line`, up to three.
    pub examples: Vec<String>,
}

/// Looks at the files that `sources` have for `split`, and keeps the first `show` records.
///
/// # Errors
/// As [`load`](super::load).
pub fn survey(
    sources: &[PathBuf],
    split: Split,
    tokenizer: Option<&Tokenizer>,
    options: &DataOptions,
    show: usize,
) -> Result<Survey> {
    options.check(tokenizer)?;
    let files = sources::files(sources, split, options.read.format)?;
    survey_with(tokenizer, options, show, |mut reader| {
        dataset::read_files(&mut reader, &files, &options.read)?;
        reader.finish(&listed(files.iter().map(DataFile::name)))
    })
}

/// [`survey`] of data that are no file: bytes and their format; `name` stands in messages.
///
/// # Errors
/// As [`survey`].
pub fn survey_text(
    name: &str,
    text: (&[u8], Kind),
    tokenizer: Option<&Tokenizer>,
    options: &DataOptions,
    show: usize,
) -> Result<Survey> {
    options.check(tokenizer)?;
    survey_with(tokenizer, options, show, |mut reader| {
        reader.read(name, text.0, text.1)?;
        reader.finish(name)
    })
}

/// [`survey`] of what `read` reads.
fn survey_with(
    tokenizer: Option<&Tokenizer>,
    options: &DataOptions,
    show: usize,
    read: impl FnOnce(Reader) -> Result<Dataset>,
) -> Result<Survey> {
    let mut collector = Collector::new(options.end_of_text, show);
    let mut visit = |seen: &Seen| collector.see(seen);
    let data = read(Reader::new(tokenizer, options).visited(&mut visit))?;
    Ok(collector.finish(data))
}

impl Survey {
    /// Adds the records of `self` that are in the training data `train` too.
    pub fn compare(&mut self, train: &Self) {
        let mut found = Found::default();
        let mut both: Vec<&String> = self
            .digests
            .iter()
            .filter(|(digest, _)| train.digests.contains_key(*digest))
            .map(|(_, at)| at)
            .collect();
        both.sort();
        both.into_iter().for_each(|place| found.add(place));
        if found.count > 0 {
            self.findings.push((Finding::Leak, found));
            self.findings.sort_by_key(|(finding, _)| *finding);
        }
    }

    /// The length that half of the records do not exceed; 0 without records.
    pub fn median(&self) -> usize {
        let half = self.lengths.values().sum::<usize>().div_ceil(2);
        let mut below = 0;
        let found = self.lengths.iter().find(|(_, count)| {
            below += **count;
            below >= half
        });
        found.map_or(0, |(length, _)| *length)
    }
}

impl Found {
    fn add(&mut self, place: &str) {
        self.count += 1;
        if self.examples.len() < EXAMPLES {
            self.examples.push(place.to_owned());
        }
    }
}

/// Gathers a survey document by document.
struct Collector {
    end_of_text: u32,
    show: usize,
    forms: BTreeMap<String, usize>,
    lengths: BTreeMap<usize, usize>,
    first: Vec<Shown>,
    findings: BTreeMap<Finding, Found>,
    digests: HashMap<[u8; 16], String>,
    /// Name and length of the text file that is read in parts.
    text: Option<(String, usize)>,
}

impl Collector {
    fn new(end_of_text: u32, show: usize) -> Self {
        Self {
            end_of_text,
            show,
            forms: BTreeMap::new(),
            lengths: BTreeMap::new(),
            first: Vec::new(),
            findings: BTreeMap::new(),
            digests: HashMap::new(),
            text: None,
        }
    }

    fn see(&mut self, seen: &Seen) {
        let Some(parsed) = seen.parsed else { return self.see_text(seen) };
        self.end_text();
        let place = seen.line.map_or(seen.name.to_owned(), |line| format!("{}:{line}", seen.name));
        *self.forms.entry(parsed.form.clone()).or_default() += 1;
        *self.lengths.entry(seen.document.ids.len() + seen.document.lost).or_default() += 1;
        self.look(&parsed.record, seen.document, &place);
        if self.first.len() < self.show {
            self.first.push(shown(place.clone(), seen.document));
        }
        self.remember(seen.document, place);
    }

    /// A part of a text file: only its length counts, and the beginning of the first is shown.
    fn see_text(&mut self, seen: &Seen) {
        let ids = &seen.document.ids;
        match &mut self.text {
            Some((name, length)) if name == seen.name => *length += ids.len(),
            _ => {
                self.end_text();
                self.text = Some((seen.name.to_owned(), ids.len()));
                *self.forms.entry("a text file".to_owned()).or_default() += 1;
                if self.first.len() < self.show {
                    let ids = ids[..ids.len().min(SHOWN_TEXT)].to_vec();
                    let supervised = (0..ids.len()).map(|index| index > 0).collect();
                    self.first.push(Shown { place: seen.name.to_owned(), ids, supervised, more: 0 });
                }
            }
        }
    }

    fn end_text(&mut self) {
        let Some((name, length)) = self.text.take() else { return };
        *self.lengths.entry(length).or_default() += 1;
        if let Some(first) = self.first.iter_mut().find(|first| first.place == name) {
            first.more = length - first.ids.len();
        }
    }

    fn remember(&mut self, document: &Document, place: String) {
        let mut hasher = blake3::Hasher::new();
        hasher.update(bytes_of(&document.ids));
        for target in &document.targets {
            hasher.update(&target.to_le_bytes());
        }
        let mut digest = [0; 16];
        digest.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        match self.digests.entry(digest) {
            Entry::Vacant(free) => drop(free.insert(place)),
            Entry::Occupied(_) => self.note(Finding::Duplicate, &place),
        }
    }

    fn note(&mut self, finding: Finding, place: &str) {
        self.findings.entry(finding).or_default().add(place);
    }

    /// Notes what looks wrong in one record.
    fn look(&mut self, record: &Record, document: &Document, place: &str) {
        let mut found = Vec::new();
        let texts: Vec<&str> = match record {
            Record::File(text) | Record::Text(text) => vec![text],
            Record::Completion { prompt, completion } => {
                found.extend(pair_findings(prompt, completion));
                vec![prompt, completion]
            }
            Record::Messages(turns) => {
                let answers: Vec<_> = turns.iter().filter(|(role, _)| *role == Role::Assistant).collect();
                if answers.is_empty() {
                    found.push(Finding::NoAnswer);
                } else if answers.iter().any(|(_, text)| text.trim().is_empty()) {
                    found.push(Finding::EmptyCompletion);
                }
                turns.iter().map(|(_, text)| &text[..]).collect()
            }
            Record::Ids { .. } => Vec::new(),
        };
        if document.ids.is_empty() || (!texts.is_empty() && texts.iter().all(|text| text.trim().is_empty())) {
            found.push(Finding::Empty);
        }
        if texts.iter().any(|text| text.contains(char::REPLACEMENT_CHARACTER)) {
            found.push(Finding::Damaged);
        }
        if texts.iter().any(|text| text.contains(END_OF_TEXT)) {
            found.push(Finding::EndInside);
        }
        let has_end = document.targets.contains(&(self.end_of_text as i32));
        if document.lost > 0 || matches!(record, Record::Ids { .. }) && !has_end {
            found.push(Finding::NoEnd);
        }
        found.into_iter().for_each(|finding| self.note(finding, place));
    }

    fn finish(mut self, data: Dataset) -> Survey {
        self.end_text();
        Survey {
            data,
            forms: self.forms,
            lengths: self.lengths,
            first: self.first,
            findings: self.findings.into_iter().collect(),
            digests: self.digests,
        }
    }
}

fn pair_findings(prompt: &str, completion: &str) -> Option<Finding> {
    let (before, after) = (prompt.chars().next_back(), completion.chars().next());
    match (before, after) {
        _ if completion.trim().is_empty() => Some(Finding::EmptyCompletion),
        (Some(' '), Some(after)) if !after.is_whitespace() => Some(Finding::TrailingSpace),
        (Some(before), Some(after)) if !before.is_whitespace() && !after.is_whitespace() => {
            Some(Finding::Glued)
        }
        _ => None,
    }
}

/// A document with its last target as a token of its own.
fn shown(place: String, document: &Document) -> Shown {
    let mut ids = document.ids.clone();
    let mut supervised = vec![false; ids.len().min(1)];
    supervised.extend(document.targets.iter().map(|&target| target != NO_LOSS));
    match document.targets.last().and_then(|&last| u32::try_from(last).ok()) {
        Some(last) => ids.push(last),
        None => supervised.truncate(ids.len()),
    }
    Shown { place, ids, supervised, more: document.lost }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::testing::{END, ids, options, tokenizer};

    fn look(content: &str, kind: Kind, seq_len: usize) -> Survey {
        survey_text("d", (content.as_bytes(), kind), Some(&tokenizer()), &options(seq_len), 2).unwrap()
    }

    #[test]
    fn lengths_forms_and_the_first_records_are_those_of_the_data() {
        let content =
            "{\"prompt\":\"a \",\"completion\":\"b\"}\n{\"text\":\"c\"}\n{\"text\":\"hello the!\"}\n";
        let found = look(content, Kind::Jsonl, 9);
        assert_eq!(found.forms, BTreeMap::from([("prompt, completion".into(), 1), ("text".into(), 2)]));
        let pair = ids("a ").len() + 1;
        assert_eq!(found.lengths.values().sum::<usize>(), 3);
        assert_eq!(found.lengths[&1], 1);
        assert_eq!(found.median(), 3.min(pair));
        let first = &found.first[0];
        assert_eq!(first.ids, [ids("a "), ids("b"), vec![END]].concat());
        let learned: Vec<_> = first.stretches().into_iter().filter(|(_, learned)| *learned).collect();
        assert_eq!(learned, [(&[ids("b")[0], END][..], true)]);
        assert_eq!((found.first.len(), &first.place[..], first.more), (2, "d:1", 0));
    }

    #[test]
    fn a_text_file_is_one_long_record() {
        let text = "hello the end\n".repeat(3000);
        let found = look(&text, Kind::Text, 64);
        assert_eq!(found.lengths, BTreeMap::from([(ids(&text).len(), 1)]));
        let first = &found.first[0];
        assert_eq!((first.ids.len(), first.more), (SHOWN_TEXT, ids(&text).len() - SHOWN_TEXT));
    }

    #[test]
    fn what_looks_wrong_is_found_with_its_place() {
        let content = "{\"prompt\":\"a\",\"completion\":\"b\"}\n{\"prompt\":\"a \",\"completion\":\"b\"}\n\
            {\"prompt\":\"a\",\"completion\":\" \"}\n{\"text\":\"\"}\n{\"text\":\"x<|endoftext|>y\"}\n\
            {\"text\":\"bad \u{fffd}\"}\n{\"messages\":[{\"role\":\"user\",\"content\":\"q\"}]}\n\
            {\"input_ids\":[1,2],\"labels\":[1,2]}\n{\"prompt\":\"a\\n\",\"completion\":\"very very long\"}\n\
            {\"prompt\":\"a\",\"completion\":\"b\"}\n{\"input_ids\":[1,266],\"labels\":[1,266]}\n";
        let found = look(content, Kind::Jsonl, 12);
        let places = |finding| {
            let found = found.findings.iter().find(|(found, _)| *found == finding);
            found.map_or(Vec::new(), |(_, found)| found.examples.clone())
        };
        for (finding, expected) in [
            (Finding::Glued, &["d:1", "d:10"][..]),
            (Finding::TrailingSpace, &["d:2"]),
            (Finding::EmptyCompletion, &["d:3"]),
            (Finding::Empty, &["d:4"]),
            (Finding::EndInside, &["d:5"]),
            (Finding::Damaged, &["d:6"]),
            (Finding::NoAnswer, &["d:7"]),
            (Finding::Duplicate, &["d:10"]),
        ] {
            assert_eq!(places(finding), expected, "{finding:?}");
        }
        assert!(places(Finding::NoEnd).contains(&"d:8".to_owned()), "{:?}", places(Finding::NoEnd));
        assert!(
            places(Finding::NoEnd).contains(&"d:9".to_owned())
                && !places(Finding::NoEnd).contains(&"d:11".to_owned())
        );
    }

    #[test]
    fn held_out_records_in_the_training_data_are_leaks() {
        let train = look("{\"text\":\"one\"}\n{\"text\":\"two\"}\n", Kind::Jsonl, 9);
        let mut valid = look("{\"text\":\"three\"}\n{\"text\":\"two\"}\n", Kind::Jsonl, 9);
        valid.compare(&train);
        assert_eq!(valid.findings, [(Finding::Leak, Found { count: 1, examples: vec!["d:2".into()] })]);
    }
}
