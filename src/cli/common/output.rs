//! Printing: results on standard output, all else on standard error.

use std::{
    io::{self, Write},
    sync::atomic::{AtomicU8, Ordering},
};

pub use engraft_util::words::{count, count_of};
use serde_json::Value;

use crate::error::{Error, Result};

/// Writes `text` to standard output as it is.
pub fn write_out(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|cause| output_error(&cause))
}

/// One JSON object on a line of standard output.
pub fn write_json(value: &Value) -> Result<()> {
    write_out(&format!("{value}\n"))
}

fn output_error(cause: &io::Error) -> Error {
    if cause.kind() == io::ErrorKind::BrokenPipe {
        return Error::ClosedPipe;
    }
    Error::failed(format!("standard output cannot be written: {cause}; redirect it elsewhere"))
}

/// How much is said on standard error, besides errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Loudness {
    /// Nothing (`-q`).
    Quiet,
    /// Progress and hints.
    Normal,
    /// Also what was found where (`-v`).
    Verbose,
}

static LOUDNESS: AtomicU8 = AtomicU8::new(Loudness::Normal as u8);

/// Sets how much the process says, once the command line is read.
pub fn set_loudness(loudness: Loudness) {
    LOUDNESS.store(loudness as u8, Ordering::Relaxed);
}

/// Whether the process says at least as much as `loudness`.
pub fn is_at_least(loudness: Loudness) -> bool {
    LOUDNESS.load(Ordering::Relaxed) >= loudness as u8
}

/// Writes a line to standard error: progress, a hint, a warning; nothing with `-q`. It is lost if standard error
/// is closed.
pub fn write_note(text: &str) {
    if is_at_least(Loudness::Normal) {
        write_error(text);
    }
}

/// Writes a line to standard error with `-v`.
pub fn write_detail(text: &str) {
    if is_at_least(Loudness::Verbose) {
        write_error(text);
    }
}

/// Writes a line to standard error, with `-q` too.
pub fn write_error(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// `text` as one word of a shell command.
pub fn quoted(text: &str) -> String {
    engraft_util::shell::word(text)
}

/// Items of a list that people are shown.
const MOST_SHOWN: usize = 3;

/// The first three of `items`, and how many more there are: `a, b, c and 9 more`.
pub fn shortened_list(items: &[String], separator: &str) -> String {
    let shown = items.iter().take(MOST_SHOWN).map(String::as_str).collect::<Vec<_>>().join(separator);
    match items.len().saturating_sub(MOST_SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Line breaks shown as such: a sample takes one line.
pub fn one_line(text: &str) -> String {
    text.trim().replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_can_be_pasted() {
        assert_eq!(quoted("runs/a-2/adapter"), "runs/a-2/adapter");
        assert_eq!(quoted("my run's"), r"'my run'\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn lists_are_cut_to_three() {
        let items = |count: usize| (0..count).map(|index| index.to_string()).collect::<Vec<_>>();
        assert_eq!(shortened_list(&items(3), ", "), "0, 1, 2");
        assert_eq!(shortened_list(&items(12), ", "), "0, 1, 2 and 9 more");
    }

    #[test]
    fn a_closed_pipe_is_no_failure() {
        assert_eq!(output_error(&io::Error::from(io::ErrorKind::BrokenPipe)), Error::ClosedPipe);
        assert_eq!(output_error(&io::Error::from(io::ErrorKind::StorageFull)).exit_code(), 1);
    }
}
