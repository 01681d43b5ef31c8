//! The error type of the library: a mistake of the user, or a failure while running.
//!
//! A message is one sentence that names the file, line or option, the value found and what to do;
//! further lines are hints. The exit code follows from the variant alone.

use std::{fmt, io, path::Path};

use engraft_util::{atomic, shards::IndexError, stand_in::StandIn};

/// `Result` with the library's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The remedy for a path that begins with `~`, which the program takes as a name like any other.
pub const TILDE: &str = "~ stands for the home folder in a shell alone; write the whole path";

/// A sentence for the user, with optional `hint:` lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// One sentence: where, the value found, the remedy.
    pub message: String,
    /// Lines printed after the sentence, each after `hint: `.
    pub hints: Vec<String>,
}

/// Why a program stops before its work is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// Wrong usage or bad input; exit code 2.
    Input(Report),
    /// Failed while running (disk full, device lost, network); exit code 1.
    Failed(Report),
    /// The machine ran out of memory; exit code 1. A smaller plan may still fit.
    Memory(Report),
    /// Stopped by SIGINT or SIGTERM with everything for `--resume` on disk; exit code 130.
    Interrupted(Report),
    /// The reader of our output went away (`| head`); ends quietly with exit code 0.
    ClosedPipe,
}

impl Error {
    /// Bad input, described by one sentence.
    pub fn input(message: impl Into<String>) -> Self {
        Self::Input(Report::new(message))
    }

    /// A failure while running, described by one sentence.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::Failed(Report::new(message))
    }

    /// Too little memory, described by one sentence.
    pub fn memory(message: impl Into<String>) -> Self {
        Self::Memory(Report::new(message))
    }

    /// A user's file that cannot be read: [`Error::Input`] with the path, the cause and a remedy.
    pub fn reading(path: &Path, cause: &io::Error) -> Self {
        let remedy = match cause.kind() {
            _ if atomic::is_limit(cause) => "raise the limit of open files (`ulimit -n`)",
            io::ErrorKind::NotFound if path.starts_with("~") => TILDE,
            io::ErrorKind::NotFound => "check the path",
            io::ErrorKind::PermissionDenied => "check its permissions",
            _ => "check the file",
        };
        Self::input(format!("{}: cannot be read: {cause}; {remedy}", path.display()))
    }

    /// The error for a file that is not what its name says: `otherwise`, unless it is something else that downloads
    /// leave in place of files.
    pub fn damaged(path: &Path, otherwise: impl FnOnce() -> Self) -> Self {
        match StandIn::at(path) {
            Some(found) => Self::input(format!("{}: {found}", path.display())),
            None => otherwise(),
        }
    }

    /// A file of ours that cannot be written: [`Error::Failed`] with the path and the cause.
    pub fn writing(path: &Path, cause: &io::Error) -> Self {
        Self::failed(format!("{}: cannot be written: {cause}; {}", path.display(), atomic::remedy(cause)))
    }

    /// The same error with one more hint line.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        if let Self::Input(report) | Self::Failed(report) | Self::Memory(report) | Self::Interrupted(report) =
            &mut self
        {
            report.hints.push(hint.into());
        }
        self
    }

    /// The exit code of a program that stops with this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::ClosedPipe => 0,
            Self::Failed(_) | Self::Memory(_) => 1,
            Self::Input(_) => 2,
            Self::Interrupted(_) => 130,
        }
    }
}

impl Report {
    /// A report of one sentence, without hints.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hints: Vec::new() }
    }

    /// The report with one more hint.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClosedPipe => write!(f, "the reader of the output went away"),
            Self::Input(report) | Self::Failed(report) | Self::Memory(report) | Self::Interrupted(report) => {
                write!(f, "{}", report.message)?;
                report.hints.iter().try_for_each(|hint| write!(f, "\nhint: {hint}"))
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<IndexError> for Error {
    fn from(error: IndexError) -> Self {
        let message = error.to_string();
        match error {
            IndexError::Read { path, cause } => Self::reading(&path, &cause),
            IndexError::Wrong { path, .. } => Self::damaged(&path, || Self::input(message)),
        }
    }
}

impl From<engraft_util::atomic::WriteError> for Error {
    fn from(error: engraft_util::atomic::WriteError) -> Self {
        Self::failed(error.to_string())
    }
}
