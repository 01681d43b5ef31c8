//! Config files: TOML whose keys are the long names of options.

use std::{fs, path::Path};

use serde::Serialize;
use serde_json::Value;
use toml::Table;

use super::args::TrainArgs;
use crate::{
    cli::common::options::Options,
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
    let table: Table = toml::from_str(text).map_err(|cause| damaged(name, text, &cause))?;
    let mut known = option_names();
    // Of a run folder's config: it says who wrote it.
    known.push(MARKER.to_owned());
    let unknown: Vec<&str> =
        table.keys().map(String::as_str).filter(|key| !known.iter().any(|name| name == key)).collect();
    if !unknown.is_empty() {
        let keys = unknown.iter().map(|key| format!("{key:?}")).collect::<Vec<_>>().join(", ");
        return Err(Error::input(format!(
            "{name}: unknown key {keys}; use the long names of `engraft train --help` without the dashes"
        )));
    }
    // From the text, not from the table: only so does a wrong value know its line.
    from_text(text).map_err(|cause| damaged(name, text, &cause))
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

/// Names of the options a config file may hold.
fn option_names() -> Vec<String> {
    TrainArgs::facts().into_iter().map(|facts| facts.name).filter(|name| name != "config").collect()
}

fn damaged(name: &str, text: &str, cause: &toml::de::Error) -> Error {
    let Some(span) = cause.span() else {
        return Error::input(format!("{name}: {}; correct the value", one_line(cause.message())));
    };
    let before = text.get(..span.start).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let found = text.lines().nth(line - 1).unwrap_or_default().trim();
    Error::input(format!("{name}, line {line}: {} in `{found}`; correct the line", one_line(cause.message())))
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
        let all: String = option_names().iter().map(|name| format!("{name} = {{}}\n")).collect();
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
        let error = |text| parse(text, "run.toml").unwrap_err().to_string();
        assert!(error("rnak = 3").contains("run.toml: unknown key \"rnak\""));
        assert!(error("config = 'x'").contains("unknown key \"config\""));
        let message = error("rank = 3\nlr = 'fast'\n");
        assert!(message.starts_with("run.toml, line 2:") && message.contains("lr = 'fast'"), "{message}");
        assert!(error("rank = ").starts_with("run.toml, line 1:"));
    }
}
