//! A program from its command line to its exit code.

use std::{
    error::Error as _,
    num::{ParseFloatError, ParseIntError},
    process::ExitCode,
};

use clap::{
    Parser,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::{
    failure,
    options::Facts,
    output::{write_note, write_out},
};
use crate::error::{Error, Result};

/// The parsed command line; `None` after `--help` or `--version`, whose text is then printed.
///
/// `options` gives the options of a command.
///
/// # Errors
/// When it cannot be understood, or the help cannot be written.
pub fn parse<P: Parser>(options: fn(&str) -> Vec<Facts>) -> Result<Option<P>> {
    failure::install();
    match P::try_parse() {
        Ok(program) => Ok(Some(program)),
        Err(usage) if usage.use_stderr() => {
            let command = std::env::args().nth(1).unwrap_or_default();
            Err(usage_error(&usage, &options(&command)))
        }
        Err(help) => {
            write_out(&help.render().to_string())?;
            Ok(None)
        }
    }
}

/// clap's report in the form of ours: one sentence, then hints.
pub fn usage_error(usage: &clap::Error, options: &[Facts]) -> Error {
    let text = usage.render().to_string();
    match usage.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return Error::input(format!(
                "a command is missing; give one of those below\n{}",
                text.trim_end()
            ));
        }
        ErrorKind::MissingRequiredArgument => {
            let missing = text.lines().skip(1).take_while(|line| line.starts_with(' ')).map(str::trim);
            let missing = missing.collect::<Vec<_>>().join(", ");
            return Error::input(format!("{missing} is missing; give it, as --help says"));
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            if let Some(sentence) = wrong_value(usage, options) {
                return Error::input(sentence);
            }
        }
        _ => {}
    }
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let sentence = lines.next().unwrap_or("wrong usage").trim_start_matches("error: ").to_owned();
    let hints = lines.filter(|line| !line.starts_with("Usage:")).map(|line| {
        line.strip_prefix("tip: ").unwrap_or(line).trim_start_matches("For more information, ").to_owned()
    });
    hints.fold(Error::input(sentence), Error::hint)
}

/// The message for a value that its option cannot parse.
fn wrong_value(usage: &clap::Error, options: &[Facts]) -> Option<String> {
    let text = |kind| match usage.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    // Such as `--batch <N>`.
    let option = text(ContextKind::InvalidArg)?.split([' ', '=', '[']).next()?;
    let value = text(ContextKind::InvalidValue)?;
    if value.is_empty() {
        return Some(format!("{option}: has no value; give one after it"));
    }
    if let Some(ContextValue::Strings(known)) = usage.get(ContextKind::ValidValue)
        && let Some((last, others)) = known.split_last()
    {
        let others = others.join(", ");
        return Some(format!("{option} {value}: is an invalid value; give {others} or {last}"));
    }
    let cause = usage.source()?;
    let no_number = cause.is::<ParseIntError>() || cause.is::<ParseFloatError>();
    if !no_number {
        let is_remedy = cause.to_string().starts_with("give ");
        let fault = if is_remedy { "is an invalid value; " } else { "" };
        return Some(format!("{option} {value}: {fault}{cause}"));
    }
    let remedy = options.iter().find(|facts| option.strip_prefix("--") == Some(&facts.name));
    let remedy = remedy.map(|facts| facts.remedy).filter(|remedy| !remedy.is_empty());
    let of_type =
        if cause.is::<ParseIntError>() { "give a whole number from 0" } else { "give a number such as 0.5" };
    Some(format!("{option} {value}: {}", remedy.unwrap_or(of_type)))
}

/// Reports an error and gives the exit code of the program.
pub fn exit(result: Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    match &error {
        Error::ClosedPipe => {}
        Error::Interrupted(_) => write_note(&error.to_string()),
        Error::Input(_) | Error::Failed(_) | Error::Memory(_) => write_note(&format!("error: {error}")),
    }
    ExitCode::from(error.exit_code())
}
