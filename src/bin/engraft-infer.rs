//! `engraft-infer`: loads a frozen GPT-2 with adapters and generates text.

use std::process::ExitCode;

fn main() -> ExitCode {
    engraft::cli::engraft_infer()
}
