//! A program from its command line to its exit code.

use std::process::ExitCode;

use clap::Parser;

use super::output::{write_note, write_out};
use crate::error::{Error, Result};

/// What was typed; `None` after `--help` or `--version`, whose text is then printed.
pub fn parse<P: Parser>() -> Result<Option<P>> {
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
pub fn usage_error(usage: &clap::Error) -> Error {
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
