//! The front ends of the two programs: what was typed, what it means, what is printed.
//!
//! `args*` are the options as typed, one definition each; `layers` joins command line, files and
//! defaults; `resolve` turns the result into values the library takes; `report` prints. Only this
//! room and `bin/` print or read the environment.

pub mod args;
mod args_other;
mod config_file;
mod environment;
mod eval;
mod generate;
mod inspect;
mod layers;
mod open;
mod plan;
mod report;
mod resolve;
mod sample;
mod signals;
mod table;
mod train;
mod values;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use clap::Parser;
use serde_json::Value;

use crate::error::{Error, Result};
use args_other::{Engraft, EngraftInfer, InferVerb, Verb};

/// Runs the program `engraft` with the process's arguments.
pub fn engraft() -> ExitCode {
    exit(parse::<Engraft>().and_then(|typed| match typed.map(|program| program.verb) {
        None => Ok(()),
        Some(Verb::Train(args)) => train::run(*args),
        Some(Verb::Plan(args)) => plan::run(*args),
        Some(Verb::Eval(args)) => eval::run(&args),
        Some(Verb::Inspect(args)) => inspect::run(&args),
    }))
}

/// Runs the program `engraft-infer` with the process's arguments.
pub fn engraft_infer() -> ExitCode {
    exit(parse::<EngraftInfer>().and_then(|typed| match typed.map(|program| program.verb) {
        None => Ok(()),
        Some(InferVerb::Generate(args)) => generate::run(&args),
    }))
}

/// What was typed; `None` after `--help` or `--version`, whose text is then printed.
fn parse<P: Parser>() -> Result<Option<P>> {
    match P::try_parse() {
        Ok(program) => Ok(Some(program)),
        Err(usage) if usage.use_stderr() => Err(usage_error(&usage)),
        Err(help) => {
            write_out(&help.render().to_string())?;
            Ok(None)
        }
    }
}

/// clap's report in the form of ours: one sentence, then hints.
fn usage_error(usage: &clap::Error) -> Error {
    let text = usage.render().to_string();
    if usage.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return Error::input(format!("a command is missing; give one of those below\n{}", text.trim_end()));
    }
    if usage.kind() == clap::error::ErrorKind::MissingRequiredArgument {
        let missing = text.lines().skip(1).take_while(|line| line.starts_with(' ')).map(str::trim);
        let missing = missing.collect::<Vec<_>>().join(", ");
        return Error::input(format!("{missing} is missing; give it, as --help says"));
    }
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let sentence = lines.next().unwrap_or("wrong usage").trim_start_matches("error: ").to_owned();
    let hints = lines.filter(|line| !line.starts_with("Usage:")).map(|line| {
        line.strip_prefix("tip: ").unwrap_or(line).trim_start_matches("For more information, ").to_owned()
    });
    hints.fold(Error::input(sentence), Error::hint)
}

fn exit(result: Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    match &error {
        Error::ClosedPipe => {}
        Error::Interrupted(_) => write_note(&error.to_string()),
        Error::Input(_) | Error::Failed(_) | Error::Memory(_) => write_note(&format!("error: {error}")),
    }
    ExitCode::from(error.exit_code())
}

/// Writes `text` to standard output as it is.
fn write_out(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|cause| output_error(&cause))
}

/// One JSON object on a line of standard output.
fn write_json(value: &Value) -> Result<()> {
    write_out(&format!("{value}\n"))
}

fn output_error(cause: &io::Error) -> Error {
    if cause.kind() == io::ErrorKind::BrokenPipe {
        return Error::ClosedPipe;
    }
    Error::failed(format!("standard output cannot be written: {cause}; free space or redirect it elsewhere"))
}

/// A line beside the results: progress, hints, warnings. Lost when standard error is closed.
fn write_note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usage_error_is_a_sentence_with_hints() {
        let usage = Engraft::try_parse_from(["engraft", "train", "--rnak", "3"]).err().unwrap();
        let error = usage_error(&usage);
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(text.starts_with("unexpected argument '--rnak' found\nhint: "), "{text}");
        assert!(text.contains("--rank"), "{text}");
        assert!(!text.contains("Usage"), "{text}");
    }

    #[test]
    fn a_closed_pipe_is_no_failure() {
        assert_eq!(output_error(&io::Error::from(io::ErrorKind::BrokenPipe)), Error::ClosedPipe);
        assert_eq!(output_error(&io::Error::from(io::ErrorKind::StorageFull)).exit_code(), 1);
    }
}
