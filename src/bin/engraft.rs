//! `engraft`: trains adapters on a frozen GPT-2 and describes what was trained.

use std::process::ExitCode;

use engraft::observe::counting::Counting;

#[global_allocator]
static HEAP: Counting = Counting;

fn main() -> ExitCode {
    engraft::cli::train::main()
}
