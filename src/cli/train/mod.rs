//! The program `engraft`: parses options, turns them into a run, prints.
//!
//! `args` holds one definition for each option of `train`; `layers` joins command line, files and
//! defaults; `resolve` turns the result into values the library takes; `report` prints, and `report_page` makes
//! the page of a run.

mod args;
mod cached;
mod closing;
mod commands;
mod config_file;
mod data_source;
mod layers;
mod report;
mod report_page;
mod resolve;
mod sampling;
mod table;
mod time_table;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use self::{
    args::TrainArgs,
    commands::{
        cache, combine, data, diff, doctor, eval, export, extract, inspect, merge, plan, push,
        report as report_command, train,
    },
};
use super::common::{
    options::{Facts, Options},
    program::{self, CommonArgs},
    shell,
};
use crate::error::Result;

/// Trains small adapters (LoRA, DoRA, VeRA, IA3, prefix, prompt, layer norms) on a frozen GPT-2
#[derive(Debug, Parser)]
#[command(name = "engraft", version, subcommand_required = true, arg_required_else_help = true)]
struct Engraft {
    #[command(flatten)]
    common: CommonArgs,
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
    /// Look at data before training: counts, lengths, the first records with what is learned, what looks wrong
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Data(data::DataCommand),
    /// Describe an adapter, a base or a run folder
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Inspect(inspect::InspectArgs),
    /// Fold adapters into their base: a plain GPT-2 that needs no adapter
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Merge(merge::MergeArgs),
    /// Make one LoRA of several, as PEFT's add_weighted_adapter does
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Combine(combine::CombineArgs),
    /// Lay the deltas of two adapters side by side: how alike and how large they are, the ranks that they use
    Diff(diff::DiffArgs),
    /// Make a LoRA of what a full fine-tuning changed
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Extract(extract::ExtractArgs),
    /// Write an adapter, or a model, in another program's format: llama.cpp, mlx-lm, loralib, PEFT
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Export(export::ExportArgs),
    /// Lay runs side by side: a table, and a page with curves; also while they go on
    #[command(args_override_self = true)]
    Report(report_command::ReportArgs),
    /// What this machine has for training: CPU, GPU, memory, caches, the hub
    Doctor(doctor::DoctorArgs),
    /// List converted bases, tokens, measured speeds and downloads, or remove them
    Cache(cache::CacheArgs),
    /// Upload an adapter to the hub
    Push(push::PushArgs),
    /// Print a script that completes commands and options in a shell
    Completions(shell::CompletionsArgs),
    /// Print the manual page, or write the pages of all commands
    Man(shell::ManArgs),
}

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    program::exit(program::parse::<Engraft>(options).and_then(|typed| typed.map_or(Ok(()), run)))
}

fn run(typed: Engraft) -> Result<()> {
    typed.common.apply();
    match typed.command {
        Command::Train(args) => train::run(*args),
        Command::Plan(args) => plan::run(*args),
        Command::Eval(args) => eval::run(&args),
        Command::Data(args) => data::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Merge(args) => merge::run(&args),
        Command::Combine(args) => combine::run(&args),
        Command::Diff(args) => diff::run(&args),
        Command::Extract(args) => extract::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Report(args) => report_command::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Cache(args) => cache::run(&args),
        Command::Push(args) => push::run(&args),
        Command::Completions(args) => shell::completions(Engraft::command(), &args),
        Command::Man(args) => shell::man(Engraft::command(), &args),
    }
}

/// The options of a command; none where it has no table of them.
pub(super) fn options(command: &str) -> Vec<Facts> {
    match command {
        "train" | "plan" => TrainArgs::facts(),
        "eval" => eval::EvalArgs::facts(),
        "data" => data::SurveyArgs::facts(),
        "merge" => merge::MergeArgs::facts(),
        "combine" => combine::CombineArgs::facts(),
        "extract" => extract::ExtractArgs::facts(),
        "export" => export::ExportArgs::facts(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::common::usage;

    #[test]
    fn a_usage_error_is_a_sentence_with_hints() {
        for (line, sentence) in [
            ("train --rnak 3", "--rnak: there is no such option; did you mean --rank?"),
            ("train --max-steps 3", "--max-steps: there is no such option; it is called --steps here"),
            ("train --frobnicate", "--frobnicate: there is no such option; --help lists all"),
            ("train -b 3", "-b: there is no such option; --help lists all"),
            (
                "train --offline perhaps",
                "perhaps: belongs to no option; values of switches are written with =, as --json=false",
            ),
            ("train Cargo.toml", "Cargo.toml: stands alone; write --data Cargo.toml"),
            ("trian", "trian: there is no such command; did you mean train?"),
            ("generate", "generate: there is no such command; it is engraft-infer generate"),
            ("finetune", "finetune: there is no such command; it is called engraft train"),
            ("frobnicate", "frobnicate: there is no such command; --help lists all"),
        ] {
            let words: Vec<&str> = ["engraft"].into_iter().chain(line.split(' ')).collect();
            let usage = Engraft::try_parse_from(&words).err().unwrap();
            let error = usage::usage_error(&usage, &options(words[1]));
            assert_eq!((error.exit_code(), error.to_string()), (2, sentence.to_owned()));
        }
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
            let error = usage::usage_error(&usage, &options(words[1]));
            assert_eq!(error.to_string(), sentence);
        }
    }
}
