//! `engraft`: trains adapters on a frozen GPT-2 and looks at what was trained.

use std::process::ExitCode;

fn main() -> ExitCode {
    engraft::cli::engraft()
}
