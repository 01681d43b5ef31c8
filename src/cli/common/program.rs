//! A program from its command line to its exit code.

use std::process::ExitCode;

use clap::Parser;

use super::{
    failure,
    options::Facts,
    output::{Loudness, set_loudness, write_error, write_out},
    usage,
};
use crate::error::{Error, Result};

/// Options that every command has.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct CommonArgs {
    /// Say nothing but results and errors
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Also say what was found where
    #[arg(short, long, global = true)]
    pub verbose: bool,
}

impl CommonArgs {
    /// Sets how much the process says.
    pub fn apply(self) {
        set_loudness(match self {
            Self { quiet: true, .. } => Loudness::Quiet,
            Self { verbose: true, .. } => Loudness::Verbose,
            Self { .. } => Loudness::Normal,
        });
    }
}

/// The parsed command line; `None` after `--help` or `--version`, whose text is then printed.
///
/// `options` gives the options of a command.
///
/// # Errors
/// When it cannot be understood, or the help cannot be written.
pub fn parse<P: Parser>(options: fn(&str) -> Vec<Facts>) -> Result<Option<P>> {
    failure::install();
    let words = usage::plain_words(std::env::args_os());
    match P::try_parse_from(&words) {
        Ok(program) => Ok(Some(program)),
        Err(usage) if usage.use_stderr() => {
            let mut words = words.iter().skip(1).filter_map(|word| word.to_str());
            let command = words.find(|word| !word.starts_with('-')).unwrap_or_default();
            Err(usage::usage_error(&usage, &options(command)))
        }
        Err(help) => {
            write_out(&help.render().to_string())?;
            Ok(None)
        }
    }
}

/// Reports an error and gives the exit code of the program.
pub fn exit(result: Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    match &error {
        Error::ClosedPipe => {}
        Error::Interrupted(_) => write_error(&error.to_string()),
        Error::Input(_) | Error::Failed(_) | Error::Memory(_) => write_error(&format!("error: {error}")),
    }
    ExitCode::from(error.exit_code())
}
