//! Prompts: from the command line, files or standard input to token ids.

use std::{
    io::{self, IsTerminal, Read},
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    cli::common::{
        open::Opened,
        options::{options, value},
        output::{count_of, write_note},
        values::TokenIds,
    },
    data::{self, Turn},
    error::{Error, Result},
};

options! {
    /// Where prompts come from.
    PromptArgs {}

    "Prompt" {
        /// Text to continue
        #[arg(conflicts_with_all = ["prompt_file", "prompt_whole", "messages", "input_ids"])]
        prompt: String => value("TEXT").otherwise("standard input").basic();
        /// File with one prompt a line; of a .jsonl each line is {"prompt"}, {"text"}, {"messages"} or {"input_ids"}
        #[arg(conflicts_with_all = ["prompt_whole", "messages", "input_ids"])]
        prompt_file: PathBuf => value("FILE").basic();
        /// File that is one prompt as a whole, line breaks included
        #[arg(conflicts_with_all = ["messages", "input_ids"])]
        prompt_whole: PathBuf => value("FILE").basic();
        /// JSON file with a conversation, [{"role","content"}, ..], to be answered; - for standard input
        #[arg(conflicts_with = "input_ids")]
        messages: PathBuf => value("FILE").basic();
        /// The prompt as token ids, with commas between them
        input_ids: TokenIds => value("IDS");
    }
}

/// A prompt as it was given.
#[derive(Debug, Clone, PartialEq)]
pub enum Given {
    /// Text to continue.
    Text(String),
    /// A conversation to answer.
    Turns(Vec<Turn>),
    /// Ids of tokens, which need no tokenizer.
    Ids(Vec<u32>),
}

/// A prompt and its token ids.
pub struct Prompt {
    /// As it was given, for JSON.
    pub shown: Value,
    /// Its beginning, for people.
    pub label: String,
    /// Token ids of the text, in order.
    pub ids: Vec<u32>,
}

impl PromptArgs {
    /// The prompts, not yet as tokens; reads files or standard input.
    ///
    /// # Errors
    /// When a file cannot be read, or holds no prompt.
    pub fn read(&self) -> Result<Vec<Given>> {
        if let Some(ids) = &self.input_ids {
            return Ok(vec![Given::Ids(ids.0.clone())]);
        }
        if let Some(prompt) = &self.prompt {
            return Ok(vec![Given::Text(prompt.clone())]);
        }
        if let Some(path) = &self.prompt_whole {
            return Ok(vec![Given::Text(text_of(path)?)]);
        }
        if let Some(path) = &self.messages {
            let (name, text) = match path.to_str() {
                Some("-") => ("standard input".to_owned(), standard_input("a conversation as JSON")?),
                _ => (path.display().to_string(), text_of(path)?),
            };
            return Ok(vec![Given::Turns(data::turns(&text, &name)?)]);
        }
        let (name, text) = match &self.prompt_file {
            Some(path) => (path.display().to_string(), text_of(path)?),
            None => ("standard input".to_owned(), standard_input("prompts, one a line")?),
        };
        let is_jsonl = self.prompt_file.as_ref().and_then(|path| path.extension());
        let is_jsonl = is_jsonl.is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"));
        let lines = (1..).zip(text.lines()).filter(|(_, line)| !line.is_empty());
        let prompts = if is_jsonl {
            lines
                .map(|(number, line)| record(line, &format!("{name}:{number}")))
                .collect::<Result<Vec<_>>>()?
        } else {
            lines.map(|(_, line)| Given::Text(line.to_owned())).collect()
        };
        if prompts.is_empty() {
            return Err(Error::input(format!("{name}: holds no prompt; write one a line, or give --prompt")));
        }
        Ok(prompts)
    }
}

/// The prompt of a line of JSON; `place` is its file and line.
fn record(line: &str, place: &str) -> Result<Given> {
    let wrong = |what: &str| {
        Error::input(format!(
            "{place}: {what}; a prompt is {{\"prompt\"}}, {{\"text\"}}, {{\"messages\"}} or {{\"input_ids\"}}"
        ))
    };
    let value: Value = serde_json::from_str(line).map_err(|_| wrong("is not JSON"))?;
    let Some(fields) = value.as_object() else { return Err(wrong("is no object")) };
    if fields.contains_key("messages") {
        return data::turns(line, place).map(Given::Turns);
    }
    if let Some(text) = fields.get("prompt").or_else(|| fields.get("text")) {
        let text = text.as_str().ok_or_else(|| wrong("has a prompt that is no string"))?;
        return Ok(Given::Text(text.to_owned()));
    }
    let ids = fields.get("input_ids").ok_or_else(|| wrong("has no prompt"))?;
    let ids =
        serde_json::from_value(ids.clone()).map_err(|_| wrong("has input_ids that are no token ids"))?;
    Ok(Given::Ids(ids))
}

impl Given {
    /// The tokens of a prompt, checked against the base and the `room` that it has.
    ///
    /// # Errors
    /// When it is empty or too long, or needs a tokenizer that the base does not have.
    pub fn prompt(&self, opened: &Opened, room: usize) -> Result<Prompt> {
        let (shown, label, ids) = match self {
            Self::Text(text) => (json!(text), label(text), from_text(text, opened)?),
            Self::Turns(turns) => {
                let last = turns.last().map_or("", |turn| turn.content.as_str());
                (json!(turns), label(last), from_turns(turns, opened)?)
            }
            Self::Ids(ids) => (json!(ids), label(&format!("{ids:?}")), from_ids(ids, opened)?),
        };
        if ids.is_empty() {
            return Err(Error::input(
                "--prompt: is empty and the base has no end-of-text token to begin after; give some text",
            ));
        }
        if ids.len() > room {
            return Err(Error::input(format!(
                "the prompt has {}, the base has room for {room}; shorten it",
                count_of(ids.len(), "token")
            )));
        }
        Ok(Prompt { shown, label, ids })
    }
}

/// Characters of a prompt that stand above its text.
const LABEL: usize = 40;

fn label(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(LABEL) {
        Some((end, _)) => format!("{}..", line[..end].trim_end()),
        None => line,
    }
}

fn from_text(text: &str, opened: &Opened) -> Result<Vec<u32>> {
    let Some(tokenizer) = &opened.tokenizer else {
        return Err(Error::input("--prompt: the base has no tokenizer to read it with; give --input-ids"));
    };
    let mut ids = tokenizer.encode(text)?;
    if ids.is_empty() {
        // As between documents: something begins after an end of text.
        ids.extend(tokenizer.end_of_text(opened.base.config.eos_token));
    }
    Ok(ids)
}

/// The conversation in the template of training, up to where the assistant speaks.
///
/// # Errors
/// When the base has no tokenizer or no end-of-text.
pub fn from_turns(turns: &[Turn], opened: &Opened) -> Result<Vec<u32>> {
    let Some(tokenizer) = &opened.tokenizer else {
        return Err(Error::input("the base has no tokenizer to read a conversation with; give --input-ids"));
    };
    let end = tokenizer.end_of_text(opened.base.config.eos_token);
    let end = end.ok_or_else(|| {
        Error::input(
            "the base has no end-of-text token, which ends the turns of a conversation; give --prompt",
        )
    })?;
    data::prompt_of_turns(turns, tokenizer, end)
}

fn from_ids(ids: &[u32], opened: &Opened) -> Result<Vec<u32>> {
    let vocab = opened.base.config.vocab;
    match ids.iter().find(|&&id| id as usize >= vocab) {
        Some(id) => {
            Err(Error::input(format!("--input-ids: {id} is no token of this base; give ids below {vocab}")))
        }
        None => Ok(ids.to_vec()),
    }
}

fn text_of(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(|cause| Error::reading(path, &cause))?;
    utf8(bytes, &path.display().to_string())
}

/// Standard input up to its end; on a terminal a line says what is waited for.
fn standard_input(what: &str) -> Result<String> {
    if io::stdin().is_terminal() {
        write_note(&format!("reading {what}; Ctrl-D on an empty line ends it, --prompt TEXT does without"));
    }
    let mut bytes = Vec::new();
    let read = io::stdin().lock().read_to_end(&mut bytes);
    read.map_err(|cause| Error::input(format!("standard input: cannot be read: {cause}; give --prompt")))?;
    utf8(bytes, "standard input")
}

fn utf8(bytes: Vec<u8>, name: &str) -> Result<String> {
    let text = String::from_utf8(bytes)
        .map_err(|_| Error::input(format!("{name}: is not UTF-8; save it as UTF-8")))?;
    Ok(text.strip_prefix('\u{feff}').map_or_else(|| text.clone(), str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_json_is_a_prompt() {
        assert_eq!(record(r#"{"prompt": "a", "id": 3}"#, "x:1").unwrap(), Given::Text("a".into()));
        assert_eq!(record(r#"{"text": "a"}"#, "x:1").unwrap(), Given::Text("a".into()));
        assert_eq!(record(r#"{"input_ids": [1, 2]}"#, "x:1").unwrap(), Given::Ids(vec![1, 2]));
        for line in ["{", "3", "{}", r#"{"prompt": 3}"#, r#"{"input_ids": [-1]}"#] {
            let error = record(line, "x.jsonl:7").unwrap_err().to_string();
            assert!(error.starts_with("x.jsonl:7: ") && error.contains("a prompt is"), "{error}");
        }
    }

    #[test]
    fn a_label_is_one_short_line() {
        assert_eq!(label("a\n b"), "a b");
        assert_eq!(label(&"ab ".repeat(30)), format!("{}..", "ab ".repeat(13) + "a"));
    }
}
