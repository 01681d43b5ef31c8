//! `engraft-infer`: loads a frozen GPT-2 with adapters and generates text.

use std::process::ExitCode;

use engraft::observe::counting::Counting;

#[global_allocator]
static HEAP: Counting = Counting;

fn main() -> ExitCode {
    engraft::cli::infer::main()
}
