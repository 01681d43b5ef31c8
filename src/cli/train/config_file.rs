//! Config files: TOML whose keys are the long names of options.

use std::{collections::BTreeMap, fs, ops::Range, path::Path};

use serde::Serialize;
use serde_json::Value;
use toml::{Spanned, Table};

use super::args::TrainArgs;
use crate::{
    cli::common::{
        elsewhere::advice,
        options::{Facts, Fault, Options},
    },
    error::{Error, Result},
    train::folder::MARKER,
};

/// The options in the file at `path`.
///
/// # Errors
/// When it cannot be read, is no TOML, has a key that is no option or a value the option refuses.
pub fn read(path: &Path) -> Result<TrainArgs> {
    let bytes = fs::read(path).map_err(|cause| Error::reading(path, &cause))?;
    let name = path.display().to_string();
    let text = String::from_utf8(bytes)
        .map_err(|_| Error::input(format!("{name}: is not UTF-8; save it as UTF-8 text")))?;
    parse(&text, &name)
}

/// As [`read`], from `text`; `name` stands for the file in messages.
///
/// # Errors
/// As [`read`].
pub fn parse(text: &str, name: &str) -> Result<TrainArgs> {
    let document = Document::read(text, name)?;
    // From the text, not from a table: only so does a wrong value know its line.
    let args = from_text(&document.text).map_err(|cause| document.damaged(&cause))?;
    match args.fault() {
        None => Ok(args),
        Some(fault) => Err(document.refused(&fault)),
    }
}

/// Options from TOML, group by group; keys of other groups are passed over.
fn from_text(text: &str) -> Result<TrainArgs, toml::de::Error> {
    Ok(TrainArgs {
        base: toml::from_str(text)?,
        data: toml::from_str(text)?,
        compute: toml::from_str(text)?,
        ..toml::from_str(text)?
    })
}

/// Definitions of the options a config file may hold.
fn options() -> Vec<Facts> {
    TrainArgs::facts().into_iter().filter(|facts| facts.name != "config").collect()
}

/// The text of a config file, with dashes for underscores in its keys, and where its keys and values are.
struct Document<'a> {
    name: &'a str,
    text: String,
    entries: Vec<Entry>,
}

/// A key of a config file and the bytes of its value.
struct Entry {
    key: String,
    at: usize,
    value: Range<usize>,
}

impl<'a> Document<'a> {
    fn read(text: &str, name: &'a str) -> Result<Self> {
        let mut document = Self { name, text: text.to_owned(), entries: Vec::new() };
        type Spans = BTreeMap<Spanned<String>, Spanned<toml::Value>>;
        let spans: Spans = toml::from_str(text).map_err(|cause| document.damaged(&cause))?;
        let known = options();
        let known: Vec<&str> = known.iter().map(|facts| facts.name.as_str()).collect();
        for (key, value) in spans {
            let plain = key.get_ref().replace('_', "-");
            let span = key.span();
            // The marker of a run folder's config says who wrote it.
            if !known.contains(&plain.as_str()) && plain != MARKER {
                return Err(document.unknown(key.get_ref(), span.start, value.get_ref().is_table(), &known));
            }
            // As long as before, so that all places stay the same.
            let dashed = text[span.clone()].replace('_', "-");
            document.text.replace_range(span.clone(), &dashed);
            document.entries.push(Entry { key: plain, at: span.start, value: value.span() });
        }
        Ok(document)
    }

    fn unknown(&self, key: &str, at: usize, is_section: bool, known: &[&str]) -> Error {
        let place = self.place(at);
        if is_section {
            return Error::input(format!(
                "{place}: begins the section {key:?}; write all options without sections"
            ));
        }
        let remedy = advice(key, known, |option| format!("{option:?}"));
        let remedy = remedy
            .unwrap_or_else(|| "use the long names of `engraft train --help` without the dashes".to_owned());
        Error::input(format!("{place}: unknown key {key:?}; {remedy}"))
    }

    /// The error for a value that the option refuses.
    fn refused(&self, fault: &Fault) -> Error {
        let entry = self.entries.iter().find(|entry| entry.key == fault.option);
        let place = entry.map_or_else(|| self.name.to_owned(), |entry| self.place(entry.at));
        Error::input(format!("{place}: {} = {}: {}", fault.option, fault.value, fault.sentence))
    }

    /// The error for text that is no TOML, or a value of the wrong type.
    fn damaged(&self, cause: &toml::de::Error) -> Error {
        let message = one_line(cause.message());
        let Some(span) = cause.span() else {
            return Error::input(format!("{}: {message}; correct the value", self.name));
        };
        let place = self.place(span.start);
        let line = self.text.get(..span.start).unwrap_or_default().matches('\n').count();
        let found = self.text.lines().nth(line).unwrap_or_default().trim();
        let of_value = |entry: &&Entry| entry.value.contains(&span.start) || entry.value == span;
        let entry = self.entries.iter().find(of_value);
        let option = entry.and_then(|entry| options().into_iter().find(|facts| facts.name == entry.key));
        match option {
            Some(facts) => Error::input(format!("{place}: `{found}`: {}", remedy(&facts, &message))),
            None => Error::input(format!("{place}: {message} in `{found}`; correct the line")),
        }
    }

    /// File and line of the byte `at`.
    fn place(&self, at: usize) -> String {
        let before = self.text.get(..at).unwrap_or_default();
        format!("{}, line {}", self.name, before.matches('\n').count() + 1)
    }
}

/// What to write for an option whose value serde refuses with `message`.
fn remedy(facts: &Facts, message: &str) -> String {
    if message.contains("give ") {
        return message.to_owned();
    }
    if !facts.remedy.is_empty() {
        return facts.remedy.to_owned();
    }
    // "unknown variant `steep`, expected one of `constant`, `linear`, `cosine`"
    let known: Vec<&str> = message.split('`').skip(3).step_by(2).collect();
    if let (true, Some((last, others))) = (message.starts_with("unknown variant"), known.split_last()) {
        return if others.is_empty() {
            format!("give {last}")
        } else {
            format!("give {} or {last}", others.join(", "))
        };
    }
    let expects = |names: &[&str]| names.iter().any(|name| message.contains(&format!("expected {name}")));
    if facts.value == "BOOL" {
        "give true or false, without quotes".to_owned()
    } else if expects(&["a sequence"]) {
        format!("give a list, as in {} = [\"..\"]", facts.name)
    } else if expects(&["u64", "usize", "u32", "u16"]) {
        "give a whole number from 0, without quotes".to_owned()
    } else if expects(&["f64", "f32", "a float"]) {
        "give a number, without quotes".to_owned()
    } else if expects(&["a string", "path"]) {
        "give text in quotes".to_owned()
    } else {
        format!("give what --{} takes, as `engraft train --help` says", facts.name)
    }
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// `args` as a table of the options that were given.
///
/// # Errors
/// On what TOML cannot hold: a path that is not UTF-8, a number beyond 64 signed bits.
pub fn table(args: &TrainArgs) -> Result<Table> {
    let mut table = group(args)?;
    table.extend(group(&args.base)?);
    table.extend(group(&args.data)?);
    table.extend(group(&args.compute)?);
    Ok(table)
}

fn group(options: &impl Serialize) -> Result<Table> {
    let given = serde_json::to_value(options).unwrap_or_default();
    let too_large = |value: &Value| value.as_u64().is_some_and(|number| i64::try_from(number).is_err());
    if let Some((key, value)) = given.as_object().into_iter().flatten().find(|(_, value)| too_large(value)) {
        return Err(Error::input(format!("--{key} {value}: is too large; give {} or less", i64::MAX)));
    }
    Table::try_from(options).map_err(|cause| {
        Error::input(format!("an option cannot be written to a config file: {cause}; change its value"))
    })
}

/// The options a table holds; the inverse of [`table()`].
///
/// # Errors
/// When a value does not fit its option.
pub fn untable(table: &Table) -> Result<TrainArgs> {
    from_text(&table.to_string()).map_err(|cause| Error::input(format!("{}; correct it", cause.message())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_a_key() {
        let all: String = options().iter().map(|facts| format!("{} = 0\n", facts.name)).collect();
        let error = parse(&all, "all.toml").unwrap_err().to_string();
        assert!(!error.contains("unknown"), "{error}");
    }

    #[test]
    fn every_group_is_written_and_read() {
        let text = "base = 'gpt2'\ndata = ['a.txt']\ndevice = 'cpu'\nrank = 3\n";
        let args = parse(text, "x.toml").unwrap();
        let given = (args.base.base.as_deref(), args.data.data.is_some(), args.compute.device.is_some());
        assert_eq!((given, args.rank), ((Some("gpt2"), true, true), Some(3)));
        assert_eq!(table(&args).unwrap().len(), 4);
    }

    #[test]
    fn reads_the_spellings_of_the_command_line() {
        let text = "targets = ['q', 'v']\nlayers = '0-2,5'\nwarmup = 0.5\nrecompute = 'every:2'\n\
                    rank-pattern = ['h.0=4']\nno-shuffle = true\nmethod = 'lora+prefix'\ndata = ['a.txt']\n";
        let args = parse(text, "x.toml").unwrap();
        assert_eq!(args.layers.as_ref().unwrap().0, [0, 1, 2, 5]);
        assert_eq!(untable(&table(&args).unwrap()).unwrap(), args);
    }

    #[test]
    fn names_file_key_and_line() {
        let error = |text: &str| parse(text, "run.toml").unwrap_err().to_string();
        let of = |text| parse(text, "run.toml").unwrap_err().to_string();
        assert_eq!(
            of("seed = 3\nrnak = 3"),
            "run.toml, line 2: unknown key \"rnak\"; did you mean \"rank\"?"
        );
        assert_eq!(
            of("learning_rate = 0.1"),
            "run.toml, line 1: unknown key \"learning_rate\"; it is called \"lr\" here"
        );
        assert!(error("config = 'x'").starts_with("run.toml, line 1: unknown key \"config\""));
        assert!(error("seed = 1\n[optimizer-options]\nlr = 1.0").contains("line 2: begins the section"));
        assert!(error("rank = ").starts_with("run.toml, line 1:"));
    }

    #[test]
    fn underscores_are_dashes() {
        let args =
            parse("seq_len = 7\nlora_dropout = 0.5\nbase_dtype = 'q8'\n\"no_shuffle\" = true", "x").unwrap();
        assert_eq!((args.data.seq_len, args.lora_dropout, args.no_shuffle), (Some(7), Some(0.5), Some(true)));
        let twice = parse("seq-len = 7\nseq_len = 8", "x.toml").unwrap_err().to_string();
        assert!(twice.starts_with("x.toml, line 2: duplicate key"), "{twice}");
    }

    #[test]
    fn a_wrong_value_is_answered_with_what_can_be_written() {
        for (text, sentence) in [
            ("lr = 1.0\nrank = \"8\"", "x.toml, line 2: `rank = \"8\"`: give a whole number from 1"),
            ("rank = -1", "x.toml, line 1: `rank = -1`: give a whole number from 1"),
            (
                "\n\nlr = -1",
                "x.toml, line 3: lr = -1: is no finite number above 0; give a number such as 0.0005",
            ),
            ("seed = 3.5", "x.toml, line 1: `seed = 3.5`: give a whole number from 0, without quotes"),
            ("offline = \"yes\"", "x.toml, line 1: `offline = \"yes\"`: give true or false, without quotes"),
            ("data = \"a.txt\"", "x.toml, line 1: `data = \"a.txt\"`: give a list, as in data = [\"..\"]"),
            (
                "schedule = \"steep\"",
                "x.toml, line 1: `schedule = \"steep\"`: give constant, linear, cosine, \
                 cosine-with-restarts or inverse-sqrt",
            ),
            ("base = 3", "x.toml, line 1: `base = 3`: give text in quotes"),
            ("device = \"tpu\"", "x.toml, line 1: `device = \"tpu\"`: give auto, cpu, cuda or cuda:N"),
            (
                "layers = true",
                "x.toml, line 1: `layers = true`: give what --layers takes, as `engraft train --help` says",
            ),
            (
                "warmup = \"x\"",
                "x.toml, line 1: `warmup = \"x\"`: give a number of steps such as 100, or a part such as 0.1",
            ),
        ] {
            assert_eq!(parse(text, "x.toml").unwrap_err().to_string(), sentence);
        }
    }
}
