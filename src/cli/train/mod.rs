//! The program `engraft`: what was typed, what it means, what is printed.
//!
//! `args` holds one definition for each option of `train`; `layers` joins command line, files and
//! defaults; `resolve` turns the result into values the library takes; `report` prints.

mod args;
mod closing;
mod commands;
mod config_file;
mod layers;
mod report;
mod resolve;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use self::{
    args::TrainArgs,
    commands::{eval, inspect, plan, train},
};
use super::common::program;

/// Trains small adapters (LoRA, prefix) on a frozen GPT-2
#[derive(Debug, Parser)]
#[command(name = "engraft", version, subcommand_required = true, arg_required_else_help = true)]
struct Engraft {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train an adapter; with no option at all, a LoRA on the embedded base and data
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Train(Box<TrainArgs>),
    /// Tell what a training run would take of memory and time; trains nothing, needs no weights
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Plan(Box<TrainArgs>),
    /// Loss and perplexity of a base with an adapter, or alone
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Eval(eval::EvalArgs),
    /// Tell what an adapter, a base or a run folder is
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Inspect(inspect::InspectArgs),
}

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    program::exit(program::parse::<Engraft>().and_then(|typed| match typed.map(|typed| typed.command) {
        None => Ok(()),
        Some(Command::Train(args)) => train::run(*args),
        Some(Command::Plan(args)) => plan::run(*args),
        Some(Command::Eval(args)) => eval::run(&args),
        Some(Command::Inspect(args)) => inspect::run(&args),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usage_error_is_a_sentence_with_hints() {
        let usage = Engraft::try_parse_from(["engraft", "train", "--rnak", "3"]).err().unwrap();
        let error = program::usage_error(&usage);
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(text.starts_with("unexpected argument '--rnak' found\nhint: "), "{text}");
        assert!(text.contains("--rank"), "{text}");
        assert!(!text.contains("Usage"), "{text}");
    }
}
