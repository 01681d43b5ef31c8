//! The program `engraft-infer`.

mod chat;
mod generate;
mod prompts;
mod sampling;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use super::common::{
    options::{Facts, Options},
    program::{self, CommonArgs},
    shell,
};
use crate::error::Result;

/// Runs a frozen GPT-2 with adapters
#[derive(Debug, Parser)]
#[command(name = "engraft-infer", version, subcommand_required = true, arg_required_else_help = true)]
struct EngraftInfer {
    #[command(flatten)]
    common: CommonArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Continue prompts
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Generate(generate::GenerateArgs),
    /// Talk with a model in the template that conversations are trained in
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Chat(chat::ChatArgs),
    /// Print a script that completes commands and options in a shell
    Completions(shell::CompletionsArgs),
    /// Print the manual page, or write the pages of all commands
    Man(shell::ManArgs),
}

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    program::exit(program::parse::<EngraftInfer>(options).and_then(|typed| typed.map_or(Ok(()), run)))
}

fn run(typed: EngraftInfer) -> Result<()> {
    typed.common.apply();
    match typed.command {
        Command::Generate(args) => generate::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Completions(args) => shell::completions(EngraftInfer::command(), &args),
        Command::Man(args) => shell::man(EngraftInfer::command(), &args),
    }
}

/// The options of a command; none where it has no table of them.
pub(super) fn options(command: &str) -> Vec<Facts> {
    match command {
        "generate" => generate::GenerateArgs::facts(),
        "chat" => chat::ChatArgs::facts(),
        _ => Vec::new(),
    }
}
