//! The template of conversations, for training and for generation.
//!
//! A turn is its role, `:` and a newline, then the content. A turn of the assistant ends with end-of-text, the
//! others with a blank line:
//!
//! ```text
//! system:
//! Be brief.
//!
//! user:
//! Hi
//!
//! assistant:
//! Hello<|endoftext|>user:
//! ```
//!
//! Everything between two contents of the assistant is tokenised in one piece, so that a conversation with one answer
//! is the record `{"prompt":"user:\nHi\n\nassistant:\n","completion":"Hello"}`.

/// The role whose text the model writes.
pub const ASSISTANT: &str = "assistant";

/// A piece of a conversation that is tokenised alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece<'a> {
    /// What the model reads between two answers.
    Context(String),
    /// A content of the assistant; end-of-text follows it.
    Answer(&'a str),
}

/// The pieces of a conversation of turns (role, content). Turns after the last answer are a context.
pub fn pieces<'a>(turns: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    let mut context = String::new();
    for (role, content) in turns {
        context += &opened(role);
        if role == ASSISTANT {
            pieces.push(Piece::Context(std::mem::take(&mut context)));
            pieces.push(Piece::Answer(content));
        } else {
            context += content;
            context += "\n\n";
        }
    }
    if !context.is_empty() {
        pieces.push(Piece::Context(context));
    }
    pieces
}

/// The beginning of a turn.
pub fn opened(role: &str) -> String {
    format!("{role}:\n")
}
