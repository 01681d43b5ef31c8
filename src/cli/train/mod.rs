//! The program `engraft`: parses options, turns them into a run, prints.
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
mod sampling;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use self::{
    args::TrainArgs,
    commands::{eval, inspect, plan, train},
};
use super::common::{
    options::{Facts, Options},
    program,
};

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
    /// Show the memory and time of a training run; trains nothing, needs no weights
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Plan(Box<TrainArgs>),
    /// Loss and perplexity of a base with an adapter, or alone
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Eval(eval::EvalArgs),
    /// Describe an adapter, a base or a run folder
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Inspect(inspect::InspectArgs),
}

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    program::exit(program::parse::<Engraft>(options).and_then(
        |typed| match typed.map(|typed| typed.command) {
            None => Ok(()),
            Some(Command::Train(args)) => train::run(*args),
            Some(Command::Plan(args)) => plan::run(*args),
            Some(Command::Eval(args)) => eval::run(&args),
            Some(Command::Inspect(args)) => inspect::run(&args),
        },
    ))
}

/// The options of a command; none where it has no table of them.
pub(super) fn options(command: &str) -> Vec<Facts> {
    match command {
        "train" | "plan" => TrainArgs::facts(),
        "eval" => eval::EvalArgs::facts(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usage_error_is_a_sentence_with_hints() {
        let usage = Engraft::try_parse_from(["engraft", "train", "--rnak", "3"]).err().unwrap();
        let error = program::usage_error(&usage, &options("train"));
        assert_eq!(error.exit_code(), 2);
        let text = error.to_string();
        assert!(text.starts_with("unexpected argument '--rnak' found\nhint: "), "{text}");
        assert!(text.contains("--rank"), "{text}");
        assert!(!text.contains("Usage"), "{text}");
    }

    #[test]
    fn a_value_that_cannot_be_read_is_answered_with_what_can() {
        for (line, sentence) in [
            ("train --batch -1", "--batch -1: give a whole number from 1 to 1000000"),
            ("train --rank 1.5", "--rank 1.5: give a whole number from 1"),
            ("train --seed -1", "--seed -1: give a whole number from 0"),
            ("train --lr fast", "--lr fast: give a number such as 0.0005"),
            ("train --offline=perhaps", "--offline perhaps: is an invalid value; give true or false"),
            ("train --device tpu", "--device tpu: is an invalid value; give auto, cpu, cuda or cuda:N"),
            (
                "train --schedule steep",
                "--schedule steep: is an invalid value; give constant, linear, cosine, \
                 cosine-with-restarts or inverse-sqrt",
            ),
            (
                "train --layers 5-2",
                "--layers 5-2: \"5-2\" is no layer; give indices or ranges such as 0,2,5-11",
            ),
            ("eval --micro-batch few", "--micro-batch few: give a whole number from 1"),
            ("train --rank", "--rank: has no value; give one after it"),
        ] {
            let words: Vec<&str> = ["engraft"].into_iter().chain(line.split(' ')).collect();
            let usage = Engraft::try_parse_from(&words).err().unwrap();
            let error = program::usage_error(&usage, &options(words[1]));
            assert_eq!(error.to_string(), sentence);
        }
    }
}
