//! The record forms: which keys make a record of which kind.
//!
//! Another form is a row of `FORMS` and its row in docs/MANUAL.md; only a new kind of [`Record`] also touches
//! `documents`.

use serde_json::{Map, Value};

use super::{
    batch::NO_LOSS,
    records::{Record, Role, SourceLine, kind_of, listed},
};
use crate::error::{Error, Result};

/// A record as keys and values, whatever its file's format.
pub(super) type Object = Map<String, Value>;

/// Names of keys that the user gave; `None` where a form has its usual ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keys {
    /// `--prompt-key`
    pub prompt: Option<String>,
    /// `--completion-key`
    pub completion: Option<String>,
    /// `--text-key`
    pub text: Option<String>,
}

/// Reads a record from the values of its keys.
type Read = fn(&mut Fields, &[&str]) -> Result<Record>;

/// A record form.
struct Form {
    /// Keys that a record must have; the first form whose keys are all there is taken.
    keys: &'static [&'static str],
    /// Keys that it may have.
    optional: &'static [&'static str],
    read: Read,
}

/// All forms. What a file of chats or instructions was made for comes before copies of it that its makers added, such
/// as the `text` of Alpaca.
const FORMS: [Form; 9] = [
    Form { keys: &["messages"], optional: &[], read: turns },
    Form { keys: &["conversations"], optional: &[], read: turns },
    Form { keys: &["prompt", "completion"], optional: &[], read: pair },
    Form { keys: &["prompt", "response"], optional: &[], read: pair },
    Form { keys: &["question", "answer"], optional: &[], read: pair },
    Form { keys: &["instruction", "output"], optional: &["input"], read: instruction },
    Form { keys: &["instruction", "response"], optional: &["context"], read: instruction },
    Form { keys: &["input_ids", "labels"], optional: &[], read: token_ids },
    Form { keys: &["text"], optional: &[], read: text },
];

/// The names that files give to roles.
const ROLES: [(&str, Role); 14] = [
    ("system", Role::System),
    ("developer", Role::System),
    ("user", Role::User),
    ("human", Role::User),
    ("assistant", Role::Assistant),
    ("gpt", Role::Assistant),
    ("chatgpt", Role::Assistant),
    ("model", Role::Assistant),
    ("function_call", Role::Assistant),
    ("tool", Role::Tool),
    ("tool_response", Role::Tool),
    ("function", Role::Tool),
    ("function_response", Role::Tool),
    ("observation", Role::Tool),
];

/// The prompt of an instruction with an input, of the Alpaca project (tatsu-lab/stanford_alpaca); its data files and
/// most of its followers end it with the line break that its training script leaves out.
const WITH_INPUT: &str = "Below is an instruction that describes a task, paired with an input that provides further \
                          context. Write a response that appropriately completes the request.\n\n### \
                          Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n";

/// The prompt of an instruction without an input; see [`WITH_INPUT`].
const WITHOUT_INPUT: &str = "Below is an instruction that describes a task. Write a response that appropriately \
                             completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n";

/// The values of one record, and what was read of them.
pub(super) struct Fields<'a> {
    /// Place of the record, for messages.
    pub place: SourceLine<'a>,
    pub object: &'a Object,
    /// Number of tokens that ids may name.
    pub vocab: usize,
    /// Keys inside of values that mean nothing here, such as `messages[].name`.
    pub ignored: Vec<String>,
}

/// A record, its form and the keys that were not read.
pub(super) struct Parsed {
    pub record: Record,
    /// The keys of the form, such as `prompt, completion`.
    pub form: String,
    pub ignored: Vec<String>,
}

/// The record in `fields`, in the form that `keys` name or the first one that it has the keys of; `noun` is what its file calls keys.
///
/// # Errors
/// Keys of no form, and everything that the values of a form can have wrong.
pub(super) fn record(mut fields: Fields, keys: &Keys, noun: &str) -> Result<Parsed> {
    let (names, optional, read) = match named(keys) {
        Some((names, read)) => {
            if let Some(missing) = names.iter().find(|name| !fields.object.contains_key(**name)) {
                return Err(lacks(&fields, keys, missing, noun));
            }
            (names, &[][..], read)
        }
        None => {
            let object = fields.object;
            let form = FORMS.iter().find(|form| form.keys.iter().all(|key| object.contains_key(*key)));
            let form = form.ok_or_else(|| no_form(&fields, noun))?;
            (form.keys.to_vec(), form.optional, form.read)
        }
    };
    let record = read(&mut fields, &names)?;
    let known = |key: &&String| !names.contains(&key.as_str()) && !optional.contains(&key.as_str());
    let mut ignored: Vec<String> = fields.object.keys().filter(known).cloned().collect();
    ignored.append(&mut fields.ignored);
    Ok(Parsed { record, form: names.join(", "), ignored })
}

/// The form that options name.
fn named(keys: &Keys) -> Option<(Vec<&str>, Read)> {
    if let Some(key) = &keys.text {
        return Some((vec![key], text));
    }
    (keys.prompt.is_some() || keys.completion.is_some()).then(|| {
        let prompt = keys.prompt.as_deref().unwrap_or("prompt");
        (vec![prompt, keys.completion.as_deref().unwrap_or("completion")], pair as Read)
    })
}

fn lacks(fields: &Fields, keys: &Keys, missing: &str, noun: &str) -> Error {
    let given =
        [("--text-key", &keys.text), ("--prompt-key", &keys.prompt), ("--completion-key", &keys.completion)];
    let option = given.iter().find(|(_, name)| name.as_deref() == Some(missing)).map(|(option, _)| *option);
    let remedy = match option {
        Some(option) => format!("{option} must name one of its {noun}"),
        None => format!("name its {noun} with both --prompt-key and --completion-key"),
    };
    let known = listed(fields.object.keys().map(|key| format!("{key:?}")));
    fields.place.error(format!("has no {missing:?} among its {noun} {known}; {remedy}"))
}

fn no_form(fields: &Fields, noun: &str) -> Error {
    let known = listed(fields.object.keys().map(|key| format!("{key:?}")));
    let has = if known.is_empty() { format!("has no {noun}") } else { format!("has the {noun} {known}") };
    fields.place.error(format!(
        "{has}; a record is {{\"text\"}}, {{\"prompt\",\"completion\"}}, {{\"messages\"}} or another form of the \
         manual, or name the {noun} with --text-key, or with --prompt-key and --completion-key"
    ))
}

impl Fields<'_> {
    fn error(&self, message: String) -> Error {
        self.place.error(message)
    }

    fn string(&self, key: &str) -> Result<String> {
        match self.object.get(key) {
            Some(Value::String(text)) => Ok(text.clone()),
            other => {
                let found = other.map_or("missing", kind_of);
                Err(self.error(format!("\"{key}\" is {found}; it must be a string")))
            }
        }
    }

    fn array(&self, key: &str) -> Result<&[Value]> {
        match self.object.get(key) {
            Some(Value::Array(items)) => Ok(items),
            other => {
                let found = other.map_or("missing", kind_of);
                Err(self.error(format!("\"{key}\" is {found}; it must be an array")))
            }
        }
    }
}

fn text(fields: &mut Fields, keys: &[&str]) -> Result<Record> {
    fields.string(keys[0]).map(Record::Text)
}

fn pair(fields: &mut Fields, keys: &[&str]) -> Result<Record> {
    Ok(Record::Completion { prompt: fields.string(keys[0])?, completion: fields.string(keys[1])? })
}

/// Of Alpaca (`instruction`, `input`, `output`) and Dolly (`instruction`, `context`, `response`).
fn instruction(fields: &mut Fields, keys: &[&str]) -> Result<Record> {
    let input = match ["input", "context"].into_iter().find(|key| fields.object.contains_key(*key)) {
        Some(key) if !fields.object[key].is_null() => fields.string(key)?,
        _ => String::new(),
    };
    let template = if input.is_empty() { WITHOUT_INPUT } else { WITH_INPUT };
    let prompt = filled(template, &[("{instruction}", &fields.string(keys[0])?), ("{input}", &input)]);
    Ok(Record::Completion { prompt, completion: fields.string(keys[1])? })
}

/// `template` with texts in the place of names, each replaced once and never inside a text.
fn filled(template: &str, texts: &[(&str, &str)]) -> String {
    let mut filled = String::new();
    let mut rest = template;
    for (name, text) in texts {
        if let Some((before, after)) = rest.split_once(name) {
            filled += before;
            filled += text;
            rest = after;
        }
    }
    filled + rest
}

/// `messages` of `role` and `content`, or `conversations` of `from` and `value` as ShareGPT has them.
fn turns(fields: &mut Fields, keys: &[&str]) -> Result<Record> {
    let key = keys[0];
    let items = fields.array(key)?;
    if items.is_empty() {
        return Err(fields.error(format!("\"{key}\" is empty; give at least one message")));
    }
    let (mut turns, mut ignored) = (Vec::with_capacity(items.len()), Vec::new());
    for (number, item) in (1..).zip(items) {
        turns.push(turn(fields, number, item)?);
        let known = ["role", "content", "from", "value"];
        let others = item.as_object().into_iter().flat_map(Map::keys);
        ignored.extend(
            others.filter(|other| !known.contains(&other.as_str())).map(|other| format!("{key}[].{other}")),
        );
    }
    ignored.sort();
    ignored.dedup();
    fields.ignored = ignored;
    Ok(Record::Messages(turns))
}

fn turn(fields: &Fields, number: usize, item: &Value) -> Result<(Role, String)> {
    let get = |keys: [&str; 2]| keys.into_iter().find_map(|key| item.get(key));
    let (Some(Value::String(role)), Some(content)) = (get(["role", "from"]), get(["content", "value"]))
    else {
        return Err(fields.error(format!(
            "message {number} has no role and content; give {{\"role\",\"content\"}} or {{\"from\",\"value\"}}"
        )));
    };
    let known = ROLES.iter().find(|(name, _)| name == role).map(|(_, role)| *role);
    let role = known.ok_or_else(|| {
        fields.error(format!("message {number} has the role {role:?}; use system, user, assistant or tool"))
    })?;
    Ok((role, content_text(fields, number, content)?))
}

/// A text, or the texts of its parts `{"type":"text","text"}` joined.
fn content_text(fields: &Fields, number: usize, content: &Value) -> Result<String> {
    let parts = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => {
            return Err(fields.error(format!(
                "the content of message {number} is {}; give a string, or parts {{\"type\":\"text\",\"text\"}}",
                kind_of(other)
            )));
        }
    };
    let mut joined = String::new();
    for part in parts {
        let kind = part.get("type").and_then(Value::as_str).unwrap_or("text");
        match part.get("text") {
            Some(Value::String(text)) if kind == "text" => joined += text,
            _ => {
                return Err(fields.error(format!(
                    "message {number} has a part of type {kind:?} without a text to read; only parts \
                     {{\"type\":\"text\",\"text\"}} are read, take the others out"
                )));
            }
        }
    }
    Ok(joined)
}

fn token_ids(fields: &mut Fields, keys: &[&str]) -> Result<Record> {
    let (inputs, targets) = (fields.array(keys[0])?, fields.array(keys[1])?);
    if inputs.len() != targets.len() {
        return Err(fields.error(format!(
            "\"labels\" has {} entries and \"input_ids\" {}; give one label for each token",
            targets.len(),
            inputs.len()
        )));
    }
    let ids = (0..).zip(inputs).map(|(index, value)| Ok(token(fields, "input_ids", index, value)? as u32));
    let labels = (0..).zip(targets).map(|(index, value)| match value.as_i64() {
        Some(label) if label == i64::from(NO_LOSS) => Ok(NO_LOSS),
        _ => token(fields, "labels", index, value),
    });
    Ok(Record::Ids { ids: ids.collect::<Result<_>>()?, labels: labels.collect::<Result<_>>()? })
}

fn token(fields: &Fields, key: &str, index: usize, value: &Value) -> Result<i32> {
    let ignored = if key == "labels" { ", or -100 for no loss" } else { "" };
    let Some(id) = value.as_i64() else {
        return Err(fields.error(format!("\"{key}\"[{index}] is {value}; give a token id{ignored}")));
    };
    let inside = usize::try_from(id).ok().filter(|&id| id < fields.vocab);
    inside.and_then(|id| i32::try_from(id).ok()).ok_or_else(|| {
        fields.error(format!(
            "\"{key}\"[{index}] is {id}, outside the base's vocabulary; give ids from 0 to {}{ignored}",
            fields.vocab.saturating_sub(1)
        ))
    })
}

#[cfg(test)]
#[path = "forms_tests.rs"]
mod tests;
