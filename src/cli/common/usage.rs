//! A command line that cannot be understood, in the words of our errors: one sentence, then hints.

use std::{
    error::Error as _,
    ffi::OsString,
    num::{ParseFloatError, ParseIntError},
    path::Path,
};

use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::{
    elsewhere::{advice, nearest},
    options::Facts,
};
use crate::error::Error;

/// Commands that belong to the other program, or have another name elsewhere, and how they are called.
const COMMANDS: &[(&[&str], &str)] = &[
    (&["generate", "chat"], "engraft-infer"),
    (&["sample", "complete", "infer", "run"], "engraft-infer generate"),
    (
        &[
            "train", "plan", "eval", "inspect", "data", "merge", "combine", "diff", "extract", "report",
            "doctor", "cache", "push",
        ],
        "engraft",
    ),
    (&["finetune", "fine-tune", "fit", "lora", "sft"], "engraft train"),
    (&["test", "evaluate", "perplexity", "ppl"], "engraft eval"),
    (&["info", "show", "describe"], "engraft inspect"),
    (&["env", "check", "diagnose"], "engraft doctor"),
    (&["upload"], "engraft push"),
];

/// The words of the command line, with dashes for underscores in the names of options.
pub fn plain_words(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let plain = |word: OsString| {
        let Some(option) = word.to_str().and_then(|word| word.strip_prefix("--")) else { return word };
        match option.split_once('=') {
            Some((name, value)) => format!("--{}={value}", name.replace('_', "-")).into(),
            None => format!("--{}", option.replace('_', "-")).into(),
        }
    };
    words.map(plain).collect()
}

/// clap's report in the form of ours; `options` are those of the command.
pub fn usage_error(usage: &clap::Error, options: &[Facts]) -> Error {
    let text = usage.render().to_string();
    let sentence = match usage.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return Error::input(format!(
                "a command is missing; give one of those below\n{}",
                text.trim_end()
            ));
        }
        ErrorKind::MissingRequiredArgument => {
            let missing = text.lines().skip(1).take_while(|line| line.starts_with(' ')).map(str::trim);
            let missing = missing.collect::<Vec<_>>().join(", ");
            Some(format!("{missing} is missing; give it, as --help says"))
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => wrong_value(usage, options),
        ErrorKind::UnknownArgument => {
            context(usage, ContextKind::InvalidArg).map(|word| unknown(word, options))
        }
        ErrorKind::InvalidSubcommand => unknown_command(usage),
        _ => None,
    };
    if let Some(sentence) = sentence {
        return Error::input(sentence);
    }
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let sentence = lines.next().unwrap_or("wrong usage").trim_start_matches("error: ").to_owned();
    let hints = lines.filter(|line| !line.starts_with("Usage:")).map(|line| {
        line.strip_prefix("tip: ").unwrap_or(line).trim_start_matches("For more information, ").to_owned()
    });
    hints.fold(Error::input(sentence), Error::hint)
}

fn context(usage: &clap::Error, kind: ContextKind) -> Option<&str> {
    match usage.get(kind) {
        Some(ContextValue::String(text)) => Some(text),
        _ => None,
    }
}

/// The sentence for a word that is no option of the command.
fn unknown(word: &str, options: &[Facts]) -> String {
    let Some(name) = word.strip_prefix("--") else {
        let is_path = !word.starts_with('-') && Path::new(word).exists();
        let named =
            ["data", "path", "adapter"].into_iter().find(|name| options.iter().any(|it| it.name == **name));
        return match named.filter(|_| is_path) {
            Some(option) => format!("{word}: stands alone; write --{option} {word}"),
            None if word.starts_with('-') => format!("{word}: there is no such option; --help lists all"),
            None => format!(
                "{word}: belongs to no option; values of switches are written with =, as --json=false"
            ),
        };
    };
    let known: Vec<&str> = options.iter().map(|facts| facts.name.as_str()).collect();
    let remedy = advice(name, &known, |option| format!("--{option}"));
    let remedy = remedy.unwrap_or_else(|| "--help lists all".to_owned());
    format!("--{name}: there is no such option; {remedy}")
}

fn unknown_command(usage: &clap::Error) -> Option<String> {
    let word = context(usage, ContextKind::InvalidSubcommand)?;
    // clap's own guesses, of which the far ones are left out.
    let known: Vec<&str> = match usage.get(ContextKind::SuggestedSubcommand) {
        Some(ContextValue::Strings(known)) => known.iter().map(String::as_str).collect(),
        Some(ContextValue::String(known)) => vec![known],
        _ => Vec::new(),
    };
    let elsewhere = COMMANDS.iter().find(|(names, _)| names.contains(&word)).map(|(names, program)| {
        // Of the other program, under the same name.
        let is_ours = program.split(' ').count() == 1 && names.contains(&word);
        if is_ours { format!("it is {program} {word}") } else { format!("it is called {program}") }
    });
    let remedy = elsewhere
        .or_else(|| nearest(word, &known).map(|near| format!("did you mean {near}?")))
        .unwrap_or_else(|| "--help lists all".to_owned());
    Some(format!("{word}: there is no such command; {remedy}"))
}

/// The message for a value that its option cannot parse.
fn wrong_value(usage: &clap::Error, options: &[Facts]) -> Option<String> {
    // Such as `--batch <N>`, or `<SHELL>`.
    let option = context(usage, ContextKind::InvalidArg)?.split([' ', '=', '[']).next()?;
    let option = option.trim_matches(['<', '>']);
    let value = context(usage, ContextKind::InvalidValue)?;
    if value.is_empty() {
        return Some(format!("{option}: has no value; give one after it"));
    }
    if let Some(ContextValue::Strings(known)) = usage.get(ContextKind::ValidValue)
        && let Some((last, others)) = known.split_last()
    {
        let others = others.join(", ");
        return Some(format!("{option} {value}: is an invalid value; give {others} or {last}"));
    }
    let cause = usage.source()?;
    let no_number = cause.is::<ParseIntError>() || cause.is::<ParseFloatError>();
    if !no_number {
        let is_remedy = cause.to_string().starts_with("give ");
        let fault = if is_remedy { "is an invalid value; " } else { "" };
        return Some(format!("{option} {value}: {fault}{cause}"));
    }
    let remedy = options.iter().find(|facts| option.strip_prefix("--") == Some(&facts.name));
    let remedy = remedy.map(|facts| facts.remedy).filter(|remedy| !remedy.is_empty());
    let of_type =
        if cause.is::<ParseIntError>() { "give a whole number from 0" } else { "give a number such as 0.5" };
    Some(format!("{option} {value}: {}", remedy.unwrap_or(of_type)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn underscores_in_names_of_options_are_dashes() {
        let words = ["engraft", "train", "--lora_dropout", "0.1", "--base_dtype=q8_x", "a_b", "-x_y", "--"];
        let plain = plain_words(words.into_iter().map(OsString::from));
        let wanted = ["engraft", "train", "--lora-dropout", "0.1", "--base-dtype=q8_x", "a_b", "-x_y", "--"];
        assert_eq!(plain, wanted.map(OsString::from));
    }
}
