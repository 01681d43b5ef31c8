//! Lines of `.txt` or `.jsonl` to records, checked before any tokenizer sees them.

use std::{fmt, path::Path};

use serde_json::{Map, Value};

use super::batch::NO_LOSS;
use crate::error::{Error, Result};

/// The format of a file, from its extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `.txt`: one document, or one a line.
    Text,
    /// `.jsonl`: one record a line.
    Jsonl,
}

impl Kind {
    /// The format of `path` by its extension, in any case.
    ///
    /// # Errors
    /// Any other extension, by name.
    pub fn of(path: &Path) -> Result<Self> {
        let extension = path.extension().map(|extension| extension.to_string_lossy().to_lowercase());
        match extension.as_deref() {
            Some("txt") => Ok(Self::Text),
            Some("jsonl") => Ok(Self::Jsonl),
            Some(other) => Err(Error::input(format!(
                "{}: .{other} files are not read; convert it to .txt or .jsonl",
                path.display()
            ))),
            None => Err(Error::input(format!(
                "{}: has no extension to tell its format; name it .txt or .jsonl",
                path.display()
            ))),
        }
    }
}

/// The role of a message's author.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions ahead of the conversation.
    System,
    /// The person who asks.
    User,
    /// The model, whose texts have a loss.
    Assistant,
}

impl Role {
    /// The name in files and in the template.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        [Self::System, Self::User, Self::Assistant].into_iter().find(|role| role.name() == name)
    }
}

/// One record, as its file has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// A line of a text file, or all of it; longer than a row, it fills several.
    File(String),
    /// `{"text"}`.
    Text(String),
    /// `{"prompt","completion"}`.
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
        /// The same ids where they are supervised, else [`NO_LOSS`], `(t)`.
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
}

impl fmt::Display for SourceLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        self.line.map_or(Ok(()), |line| write!(f, ":{line}"))
    }
}

/// The lines of `text` that are not blank, with their numbers; the first line is number `first`.
pub fn lines(text: &str, first: usize) -> impl Iterator<Item = (usize, &str)> {
    (first..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty())
}

/// The record of one line.
///
/// # Errors
/// Everything a line of JSON can have wrong; `vocab` is the size of the base's vocabulary.
pub fn of_line(place: SourceLine, line: &str, kind: Kind, vocab: usize) -> Result<Record> {
    match kind {
        Kind::Text => Ok(Record::File(line.to_owned())),
        Kind::Jsonl => parse(place, line, vocab),
    }
}

fn parse(place: SourceLine, line: &str, vocab: usize) -> Result<Record> {
    let value: Value = serde_json::from_str(line).map_err(|error| {
        let text = error.to_string();
        // serde_json counts lines within this one line.
        let cause = text.split(" at line ").next().unwrap_or(&text);
        place.error(format!("is not JSON ({cause} at column {}); give one object a line", error.column()))
    })?;
    let Value::Object(map) = value else {
        return Err(place.error(format!("is {}; give one object a line", kind_of(&value))));
    };
    let mut keys: Vec<&str> = map.keys().map(String::as_str).collect();
    keys.sort_unstable();
    match keys[..] {
        ["text"] => Ok(Record::Text(string(place, &map, "text")?)),
        ["completion", "prompt"] => Ok(Record::Completion {
            prompt: string(place, &map, "prompt")?,
            completion: string(place, &map, "completion")?,
        }),
        ["messages"] => messages(place, &map["messages"]).map(Record::Messages),
        ["input_ids", "labels"] => token_ids(place, &map, vocab),
        _ => Err(place.error(format!(
            "has the keys {keys:?}; a record is {{\"text\"}}, {{\"prompt\",\"completion\"}}, \
             {{\"messages\"}} or {{\"input_ids\",\"labels\"}} and nothing else"
        ))),
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn string(place: SourceLine, map: &Map<String, Value>, key: &str) -> Result<String> {
    match &map[key] {
        Value::String(text) => Ok(text.clone()),
        other => Err(place.error(format!("\"{key}\" is {}; it must be a string", kind_of(other)))),
    }
}

fn array<'a>(place: SourceLine, value: &'a Value, key: &str) -> Result<&'a [Value]> {
    match value {
        Value::Array(items) => Ok(items),
        other => Err(place.error(format!("\"{key}\" is {}; it must be an array", kind_of(other)))),
    }
}

fn messages(place: SourceLine, value: &Value) -> Result<Vec<(Role, String)>> {
    let items = array(place, value, "messages")?;
    if items.is_empty() {
        return Err(place.error("\"messages\" is empty; give at least one message"));
    }
    (1..).zip(items).map(|(number, item)| message(place, number, item)).collect()
}

fn message(place: SourceLine, number: usize, item: &Value) -> Result<(Role, String)> {
    let Some(map) = item.as_object().filter(|map| map.len() == 2) else {
        return Err(malformed(place, number));
    };
    let (Some(Value::String(role)), Some(Value::String(content))) = (map.get("role"), map.get("content"))
    else {
        return Err(malformed(place, number));
    };
    let parsed = Role::parse(role).ok_or_else(|| {
        place.error(format!("message {number} has the role {role:?}; use system, user or assistant"))
    })?;
    Ok((parsed, content.clone()))
}

fn malformed(place: SourceLine, number: usize) -> Error {
    place.error(format!(
        "message {number} is not {{\"role\",\"content\"}} with two strings; give both and nothing else"
    ))
}

fn token_ids(place: SourceLine, map: &Map<String, Value>, vocab: usize) -> Result<Record> {
    let inputs = array(place, &map["input_ids"], "input_ids")?;
    let targets = array(place, &map["labels"], "labels")?;
    if inputs.len() != targets.len() {
        return Err(place.error(format!(
            "\"labels\" has {} entries and \"input_ids\" {}; give one label for each token",
            targets.len(),
            inputs.len()
        )));
    }
    let ids =
        (0..).zip(inputs).map(|(index, value)| Ok(token(place, "input_ids", index, value, vocab)? as u32));
    let labels = (0..).zip(targets).map(|(index, value)| match value.as_i64() {
        Some(label) if label == i64::from(NO_LOSS) => Ok(NO_LOSS),
        _ => token(place, "labels", index, value, vocab),
    });
    Ok(Record::Ids { ids: ids.collect::<Result<_>>()?, labels: labels.collect::<Result<_>>()? })
}

fn token(place: SourceLine, key: &str, index: usize, value: &Value, vocab: usize) -> Result<i32> {
    let ignored = if key == "labels" { ", or -100 for no loss" } else { "" };
    let Some(id) = value.as_i64() else {
        return Err(place.error(format!("\"{key}\"[{index}] is {value}; give a token id{ignored}")));
    };
    usize::try_from(id).ok().filter(|&id| id < vocab).and_then(|id| i32::try_from(id).ok()).ok_or_else(|| {
        place.error(format!(
            "\"{key}\"[{index}] is {id}, outside the base's vocabulary; give ids from 0 to {}{ignored}",
            vocab.saturating_sub(1)
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jsonl(text: &str) -> Result<Vec<(usize, Record)>> {
        let record = |(line, text)| {
            let place = SourceLine { name: "d.jsonl", line: Some(line) };
            Ok((line, of_line(place, text, Kind::Jsonl, 100)?))
        };
        lines(text, 1).map(record).collect()
    }

    fn refused(line: &str) -> String {
        let error = jsonl(&format!("{{\"text\":\"fine\"}}\n{line}\n")).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let message = error.to_string();
        message.strip_prefix("d.jsonl:2: ").unwrap_or_else(|| panic!("no place in {message}")).to_owned()
    }

    #[test]
    fn extensions_tell_the_format() {
        assert_eq!(Kind::of(Path::new("a/b.txt")).unwrap(), Kind::Text);
        assert_eq!(Kind::of(Path::new("b.JSONL")).unwrap(), Kind::Jsonl);
        let csv = Kind::of(Path::new("a/train.csv")).unwrap_err().to_string();
        assert_eq!(csv, "a/train.csv: .csv files are not read; convert it to .txt or .jsonl");
        assert!(Kind::of(Path::new("data")).unwrap_err().to_string().starts_with("data: has no extension"));
    }

    #[test]
    fn blank_lines_are_counted_and_left_out() {
        let found: Vec<_> = lines("one\r\n\r\n  \n two\n", 7).collect();
        assert_eq!(found, [(7, "one"), (10, " two")]);
        let place = SourceLine { name: "a.txt", line: None };
        assert_eq!(of_line(place, "{", Kind::Text, 9).unwrap(), Record::File("{".into()));
    }

    #[test]
    fn every_form_is_read_with_its_line() {
        let text = "{\"text\":\"a\"}\n\n{\"completion\":\"c\",\"prompt\":\"p\"}\r\n\
            {\"messages\":[{\"role\":\"system\",\"content\":\"s\"},{\"content\":\"u\",\"role\":\"user\"},\
            {\"role\":\"assistant\",\"content\":\"\"}]}\n{\"input_ids\":[0,99],\"labels\":[-100,99]}";
        let expected = [
            (1, Record::Text("a".into())),
            (3, Record::Completion { prompt: "p".into(), completion: "c".into() }),
            (
                4,
                Record::Messages(vec![
                    (Role::System, "s".into()),
                    (Role::User, "u".into()),
                    (Role::Assistant, String::new()),
                ]),
            ),
            (5, Record::Ids { ids: vec![0, 99], labels: vec![-100, 99] }),
        ];
        assert_eq!(jsonl(text).unwrap(), expected);
    }

    #[test]
    fn broken_json_and_other_values_are_refused() {
        let broken = refused("{\"text\":\"a\"");
        assert!(broken.starts_with("is not JSON (EOF while parsing an object at column 11)"), "{broken}");
        assert_eq!(refused("[1]"), "is an array; give one object a line");
        assert_eq!(refused("3"), "is a number; give one object a line");
    }

    #[test]
    fn other_sets_of_keys_are_refused() {
        for line in [
            "{}",
            "{\"txt\":\"a\"}",
            "{\"prompt\":\"a\"}",
            "{\"text\":\"a\",\"prompt\":\"b\"}",
            "{\"input_ids\":[1]}",
        ] {
            assert!(refused(line).contains("; a record is {\"text\"}, "), "{line}");
        }
        assert!(refused("{\"text\":\"a\",\"id\":1}").starts_with("has the keys [\"id\", \"text\"]"));
    }

    #[test]
    fn wrong_types_are_refused() {
        assert_eq!(refused("{\"text\":1}"), "\"text\" is a number; it must be a string");
        assert_eq!(
            refused("{\"prompt\":\"a\",\"completion\":null}"),
            "\"completion\" is null; it must be a string"
        );
        assert_eq!(refused("{\"messages\":{}}"), "\"messages\" is an object; it must be an array");
        assert_eq!(
            refused("{\"input_ids\":true,\"labels\":[]}"),
            "\"input_ids\" is a boolean; it must be an array"
        );
        let float = refused("{\"input_ids\":[1,1.5],\"labels\":[1,1]}");
        assert_eq!(float, "\"input_ids\"[1] is 1.5; give a token id");
        let label = refused("{\"input_ids\":[1],\"labels\":[\"a\"]}");
        assert_eq!(label, "\"labels\"[0] is \"a\"; give a token id, or -100 for no loss");
    }

    #[test]
    fn messages_need_a_role_and_a_content() {
        assert!(refused("{\"messages\":[]}").starts_with("\"messages\" is empty"));
        for item in ["3", "{\"role\":\"user\"}", "{\"role\":\"user\",\"content\":[]}"] {
            let line = format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"a\"}},{item}]}}");
            assert!(refused(&line).starts_with("message 2 is not {\"role\",\"content\"}"), "{item}");
        }
        let role = refused("{\"messages\":[{\"role\":\"tool\",\"content\":\"a\"}]}");
        assert_eq!(role, "message 1 has the role \"tool\"; use system, user or assistant");
    }

    #[test]
    fn ids_and_labels_are_as_long_and_inside_the_vocabulary() {
        let length = refused("{\"input_ids\":[1,2],\"labels\":[1]}");
        assert_eq!(length, "\"labels\" has 1 entries and \"input_ids\" 2; give one label for each token");
        let outside = refused("{\"input_ids\":[100],\"labels\":[1]}");
        assert_eq!(outside, "\"input_ids\"[0] is 100, outside the base's vocabulary; give ids from 0 to 99");
        assert!(refused("{\"input_ids\":[-100],\"labels\":[1]}").starts_with("\"input_ids\"[0] is -100"));
        for label in [-1, -101, 100, i64::MAX] {
            let line = format!("{{\"input_ids\":[1],\"labels\":[{label}]}}");
            assert!(refused(&line).starts_with(&format!("\"labels\"[0] is {label}, outside")), "{label}");
        }
    }
}
