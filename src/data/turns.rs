//! Conversations as prompts: in the template of training, up to where the assistant speaks.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    template::{ASSISTANT, Piece, opened, pieces},
    tokenizer::Tokenizer,
};
use crate::error::{Error, Result};

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turn {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What was said.
    pub content: String,
}

/// Roles that the template has.
const ROLES: [&str; 4] = ["system", "user", ASSISTANT, "tool"];

impl Turn {
    /// A message of `role`.
    pub fn new(role: &str, content: &str) -> Self {
        Self { role: role.to_owned(), content: content.to_owned() }
    }
}

/// The conversation in a JSON text: a list of `{"role","content"}`, or an object with it as `"messages"`. `name` stands
/// for the text in messages.
///
/// # Errors
/// When it is none, or is empty.
pub fn turns(text: &str, name: &str) -> Result<Vec<Turn>> {
    const FORM: &str = "give a list of {\"role\",\"content\"}";
    let value: Value = serde_json::from_str(text)
        .map_err(|cause| Error::input(format!("{name}: is not JSON ({cause}); {FORM}")))?;
    let value = value.get("messages").cloned().unwrap_or(value);
    let Value::Array(items) = value else {
        return Err(Error::input(format!("{name}: is no conversation; {FORM}")));
    };
    let turn = |(number, item): (usize, Value)| {
        let wrong = |what: &str| Error::input(format!("{name}: message {number} {what}; {FORM}"));
        let turn: Turn =
            serde_json::from_value(item).map_err(|_| wrong("lacks a role or a content that is text"))?;
        if !ROLES.contains(&turn.role.as_str()) {
            return Err(wrong(&format!("has the role {:?}, and not {}", turn.role, ROLES.join(", "))));
        }
        Ok(turn)
    };
    let turns = (1..).zip(items).map(turn).collect::<Result<Vec<_>>>()?;
    if turns.is_empty() {
        return Err(Error::input(format!("{name}: is empty; {FORM}")));
    }
    Ok(turns)
}

/// The tokens of a conversation up to where the assistant speaks next; if the last turn is the assistant's, up to where
/// it goes on. `end` is the end-of-text that follows each of its answers.
///
/// Training has the same tokens in front of an answer: everything between two contents of the assistant is tokenised in
/// one piece.
///
/// # Errors
/// When the tokenizer cannot encode it.
pub fn prompt_of_turns(turns: &[Turn], tokenizer: &Tokenizer, end: u32) -> Result<Vec<u32>> {
    let mut pieces = pieces(turns.iter().map(|turn| (turn.role.as_str(), turn.content.as_str())));
    match pieces.last_mut() {
        Some(Piece::Answer(_)) => {}
        Some(Piece::Context(context)) => context.push_str(&opened(ASSISTANT)),
        None => pieces.push(Piece::Context(opened(ASSISTANT))),
    }
    let last = pieces.len() - 1;
    let mut ids = Vec::new();
    for (index, piece) in pieces.into_iter().enumerate() {
        match piece {
            Piece::Context(text) => ids.extend(tokenizer.encode(&text)?),
            Piece::Answer(text) => {
                ids.extend(tokenizer.encode(text)?);
                ids.extend((index < last).then_some(end));
            }
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{
        documents::Document,
        records::{Record, Role},
        testing::{END, ids, options, tokenizer},
    };

    /// What training reads before an answer is what generation reads before it.
    #[test]
    fn a_prompt_is_what_training_has_before_the_answer() {
        let said = [
            ("system", Role::System, "Be brief."),
            ("user", Role::User, "Hi"),
            ("assistant", Role::Assistant, "hello"),
            ("user", Role::User, "the"),
            ("assistant", Role::Assistant, "hell"),
        ];
        let messages = said.map(|(_, role, content)| (role, content.to_owned())).to_vec();
        let document = Document::new(&Record::Messages(messages), Some(&tokenizer()), &options(999)).unwrap();
        let turns: Vec<Turn> = said.iter().map(|(role, _, content)| Turn::new(role, content)).collect();
        let prompt = prompt_of_turns(&turns[..4], &tokenizer(), END).unwrap();
        assert_eq!([prompt, ids("hell")].concat(), document.ids);
        // An answer that has begun goes on.
        assert_eq!(prompt_of_turns(&turns, &tokenizer(), END).unwrap(), document.ids);
    }

    #[test]
    fn conversations_are_lists_or_records() {
        let list = r#"[{"role": "user", "content": "a"}]"#;
        let wanted = vec![Turn::new("user", "a")];
        assert_eq!(turns(list, "x").unwrap(), wanted);
        assert_eq!(turns(&format!("{{\"messages\": {list}}}"), "x").unwrap(), wanted);
        for (text, part) in [
            ("{", "is not JSON"),
            ("3", "is no conversation"),
            ("[]", "is empty"),
            (r#"[{"role": "user"}]"#, "message 1 lacks"),
            (
                r#"[{"role": "user", "content": "a"}, {"role": "me", "content": "b"}]"#,
                "message 2 has the role \"me\"",
            ),
        ] {
            let error = turns(text, "x.json").unwrap_err().to_string();
            assert!(error.starts_with("x.json: ") && error.contains(part), "{error}");
        }
    }
}
