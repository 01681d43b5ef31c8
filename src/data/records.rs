//! Raw records of a file to [`Record`]s, checked before any tokenizer sees them.

use std::fmt;

use serde_json::Value;

use super::{
    formats::Kind,
    forms::{self, Fields, Keys, Object, Parsed},
    json, split,
};
use crate::error::{Error, Result};

/// The role of a message's author.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions ahead of the conversation.
    System,
    /// The person who asks.
    User,
    /// The model, whose texts have a loss.
    Assistant,
    /// What a tool answered to the model.
    Tool,
}

impl Role {
    /// The name in the template.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One record, as its file has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// A line of a text file, or all of it.
    File(String),
    /// `{"text"}`; like a text file, one that is longer than a row fills several.
    Text(String),
    /// `{"prompt","completion"}` and the forms that become such a pair.
    Completion {
        /// The text that the model is given.
        prompt: String,
        /// The text that it is to say.
        completion: String,
    },
    /// `{"messages":[{"role","content"}]}`, at least one.
    Messages(Vec<(Role, String)>),
    /// `{"input_ids","labels"}`: equally long, inside the vocabulary, labels not shifted.
    Ids {
        /// Token ids, `(t)`.
        ids: Vec<u32>,
        /// The same ids where they are supervised, else [`NO_LOSS`](super::NO_LOSS), `(t)`.
        labels: Vec<i32>,
    },
}

/// A file and perhaps a line in it, for messages.
#[derive(Debug, Clone, Copy)]
pub struct SourceLine<'a> {
    /// The file as the user named it.
    pub name: &'a str,
    /// Line of the file, from 1.
    pub line: Option<usize>,
}

impl SourceLine<'_> {
    /// [`Error::Input`] at this place.
    pub fn error(&self, message: impl fmt::Display) -> Error {
        Error::input(format!("{self}: {message}"))
    }

    /// `lines` further down.
    fn below(self, lines: usize) -> Self {
        Self { line: self.line.map(|line| line + lines), ..self }
    }
}

impl fmt::Display for SourceLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        self.line.map_or(Ok(()), |line| write!(f, ":{line}"))
    }
}

/// Most names of a list that a message shows.
const MOST_NAMED: usize = 3;

/// `a, b, c and 9 more`.
pub(super) fn listed(names: impl ExactSizeIterator<Item = String>) -> String {
    let more = names.len().saturating_sub(MOST_NAMED);
    let shown = names.take(MOST_NAMED).collect::<Vec<_>>().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// What a JSON value is, in words.
pub(super) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Parses the raw records of one file.
pub(super) struct Parser<'a> {
    kind: Kind,
    keys: &'a Keys,
    vocab: usize,
    /// Columns of a file that names them in its first record, once it is read.
    columns: Vec<String>,
}

impl<'a> Parser<'a> {
    /// For a file of `kind` whose ids are below `vocab`.
    pub(super) fn new(kind: Kind, keys: &'a Keys, vocab: usize) -> Self {
        Self { kind, keys, vocab, columns: Vec::new() }
    }

    /// Whether the next record names the columns.
    pub(super) fn wants_columns(&self) -> bool {
        matches!(self.kind, Kind::Csv | Kind::Tsv) && self.columns.is_empty()
    }

    /// Takes the names of the columns from a file's first record.
    ///
    /// # Errors
    /// Two columns of one name.
    pub(super) fn take_columns(&mut self, place: SourceLine, raw: &str) -> Result<()> {
        let columns = split::fields(raw, self.kind);
        let twice = (1..columns.len()).find(|&index| columns[..index].contains(&columns[index]));
        if let Some(index) = twice {
            return Err(place.error(format!(
                "names the column {:?} twice; give each column a name of its own",
                columns[index]
            )));
        }
        self.columns = columns;
        Ok(())
    }

    /// The record of one raw record.
    ///
    /// # Errors
    /// Everything that it can have wrong.
    pub(super) fn parse(&self, place: SourceLine, raw: &str) -> Result<Parsed> {
        let (object, noun) = match self.kind {
            Kind::Text => {
                let (record, form) = (Record::File(raw.to_owned()), "a line of text".to_owned());
                return Ok(Parsed { record, form, ignored: Vec::new() });
            }
            Kind::Jsonl => (object(place, raw, "give one object a line")?, "keys"),
            Kind::Parquet => (object(place, raw, "give columns with names")?, "columns"),
            Kind::Json => (object(place, raw, "give an array of objects")?, "keys"),
            Kind::Csv | Kind::Tsv => (self.row(place, raw)?, "columns"),
        };
        let fields = Fields { place, object: &object, vocab: self.vocab, ignored: Vec::new() };
        forms::record(fields, self.keys, noun)
    }

    fn row(&self, place: SourceLine, raw: &str) -> Result<Object> {
        let fields = split::fields(raw, self.kind);
        if fields.len() != self.columns.len() {
            return Err(place.error(format!(
                "has {} fields for {} columns; put quotes around a field that holds the separator",
                fields.len(),
                self.columns.len()
            )));
        }
        Ok(self.columns.iter().cloned().zip(fields.into_iter().map(Value::String)).collect())
    }
}

/// `text` as an object that has each of its keys once; `remedy` ends the message for another value.
fn object(place: SourceLine, text: &str, remedy: &str) -> Result<Object> {
    let parsed = json::parse(text).map_err(|error| {
        let message = error.to_string();
        // serde_json counts lines within this one record.
        let cause = message.split(" at line ").next().unwrap_or(&message);
        place
            .below(error.line().saturating_sub(1))
            .error(format!("is not JSON ({cause} at column {}); {remedy}", error.column()))
    })?;
    match parsed {
        (_, Some(key)) => Err(place.error(format!("has the key {key:?} twice; keep one of them"))),
        (Value::Object(object), None) => Ok(object),
        (other, None) => Err(place.error(format!("is {}; {remedy}", kind_of(&other)))),
    }
}
