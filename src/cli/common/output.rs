//! Printing: results on standard output, all else on standard error.

use std::io::{self, Write};

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
    Error::failed(format!("standard output cannot be written: {cause}; free space or redirect it elsewhere"))
}

/// Writes a line to standard error: progress, a hint, a warning. It is lost if standard error is closed.
pub fn write_note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// A number with the word that is counted: `1 step`, `2 steps`.
pub fn count(number: u64, word: &str) -> String {
    format!("{number} {word}{}", if number == 1 { "" } else { "s" })
}

/// Line breaks shown as such: a sample takes one line.
pub fn one_line(text: &str) -> String {
    text.trim().replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_no_plural() {
        assert_eq!([count(0, "row"), count(1, "row"), count(2, "row")], ["0 rows", "1 row", "2 rows"]);
    }

    #[test]
    fn a_closed_pipe_is_no_failure() {
        assert_eq!(output_error(&io::Error::from(io::ErrorKind::BrokenPipe)), Error::ClosedPipe);
        assert_eq!(output_error(&io::Error::from(io::ErrorKind::StorageFull)).exit_code(), 1);
    }
}
