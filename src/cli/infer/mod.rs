//! The program `engraft-infer`.

mod generate;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use super::common::{
    options::{Facts, Options},
    program,
};

/// Runs a frozen GPT-2 with adapters
#[derive(Debug, Parser)]
#[command(name = "engraft-infer", version, subcommand_required = true, arg_required_else_help = true)]
struct EngraftInfer {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Continue prompts
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Generate(generate::GenerateArgs),
}

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    program::exit(program::parse::<EngraftInfer>(options).and_then(|typed| {
        match typed.map(|typed| typed.command) {
            None => Ok(()),
            Some(Command::Generate(args)) => generate::run(&args),
        }
    }))
}

/// The options of a command; none where it has no table of them.
pub(super) fn options(command: &str) -> Vec<Facts> {
    match command {
        "generate" => generate::GenerateArgs::facts(),
        _ => Vec::new(),
    }
}
