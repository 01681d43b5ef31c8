//! Joins the sources of option values: command line, config file, run folder, embedded defaults, defaults.

use std::path::{Path, PathBuf};

use engraft_adapters::Kinds;
use toml::Table;

use super::{args::TrainArgs, config_file};
use crate::{
    cli::common::{
        open,
        options::{Facts, OnResume, Options, Part},
    },
    data,
    error::{Error, Result},
    train::folder::MARKER,
};

/// Joins layers of options, the first one winning.
///
/// # Errors
/// When a value cannot be written as TOML, or a layer has two options that exclude each other.
pub fn join(layers: &[TrainArgs]) -> Result<TrainArgs> {
    let facts = TrainArgs::facts();
    let mut joined = Table::new();
    for layer in layers {
        let mut below = config_file::table(layer)?;
        refuse_both(&facts, &below)?;
        hide(&facts, &joined, &mut below);
        for (key, value) in below {
            joined.entry(key).or_insert(value);
        }
    }
    config_file::untable(&joined)
}

/// Pairs of options that say the same in two ways.
fn exclusive(facts: &[Facts]) -> impl Iterator<Item = [&str; 2]> {
    facts.iter().filter_map(|facts| Some([facts.excludes?, facts.name.as_str()]))
}

fn refuse_both(facts: &[Facts], layer: &Table) -> Result<()> {
    match exclusive(facts).find(|pair| pair.iter().all(|key| layer.contains_key(*key))) {
        None => Ok(()),
        Some([one, other]) => Err(Error::input(format!(
            "--{one} {} and --{other} {} exclude each other; give one of them",
            layer[one], layer[other]
        ))),
    }
}

/// Removes from the layer `below` the options that the layer `above` overrules.
fn hide(facts: &[Facts], above: &Table, below: &mut Table) {
    for pair in exclusive(facts) {
        if pair.iter().any(|key| above.contains_key(*key)) {
            pair.iter().for_each(|key| drop(below.remove(*key)));
        }
    }
    let from_adapter = above.contains_key("init-adapter");
    let kinds = above.get("method").and_then(|kinds| kinds.as_str()?.parse::<Kinds>().ok());
    let is_of_another = |facts: &Facts| kinds.as_ref().is_some_and(|kinds| !facts.part.is_of(kinds));
    let hidden = |facts: &&Facts| from_adapter && facts.from_adapter || is_of_another(facts);
    facts.iter().filter(hidden).for_each(|facts| drop(below.remove(&facts.name)));
}

/// `args` with every default that does not depend on the base filled in.
pub fn with_defaults(mut args: TrainArgs) -> TrainArgs {
    args.fill(&|facts| facts.part == Part::Run);
    // An adapter to start from gives these; its method is not known here.
    if let Some(kinds) = args.method.clone().filter(|_| args.init_adapter.is_none()) {
        args.fill(&|facts| facts.part.is_of(&kinds));
    }
    // `pack` now says what both options say.
    args.data.no_pack = None;
    args
}

/// `args` as the text of a run folder's `config.toml`, which `--config` reads again.
///
/// # Errors
/// When a value cannot be written as TOML.
pub fn written(args: &TrainArgs) -> Result<String> {
    let mut table = config_file::table(args)?;
    let of_the_call = |facts: &Facts| facts.on_resume == OnResume::OfTheCall;
    TrainArgs::facts()
        .iter()
        .filter(|facts| of_the_call(facts))
        .for_each(|facts| drop(table.remove(&facts.name)));
    table.insert(MARKER.to_owned(), env!("CARGO_PKG_VERSION").into());
    let text = toml::to_string(&table).map_err(|cause| {
        Error::input(format!("an option cannot be written to config.toml: {cause}; change it"))
    })?;
    Ok(format!(
        "# The options of this run, without those of a single call. `engraft train --config` reads it again.\n{text}"
    ))
}

/// The same options with data and adapter paths that do not depend on the current folder.
///
/// # Errors
/// When there is no current folder.
pub fn with_absolute_paths(mut args: TrainArgs) -> Result<TrainArgs> {
    for path in args.data.data.iter_mut().flatten().chain(args.eval_data.iter_mut().flatten()) {
        // The standard input and files of the hub are no paths, with or without a weight.
        let is_input = path.to_str().is_some_and(|text| text.split(':').next() == Some(data::STANDARD_INPUT));
        if !is_input && !open::is_on_hub(path) {
            *path = absolute(path)?;
        }
    }
    if let Some(path) = &mut args.init_adapter {
        *path = absolute(path)?;
    }
    Ok(args)
}

/// The name of a base; for a folder its absolute path, because adapter files contain the name and a
/// resumed run must write the same bytes.
///
/// # Errors
/// When there is no current folder.
pub fn base_name(name: &str) -> Result<String> {
    let path = Path::new(name);
    if path.is_dir() { Ok(absolute(path)?.display().to_string()) } else { Ok(name.to_owned()) }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|cause| Error::reading(path, &cause))
}

#[cfg(test)]
mod tests {
    use clap::Args as _;
    use engraft_adapters::kinds;

    use super::*;

    fn args(text: &str) -> TrainArgs {
        config_file::parse(text, "test.toml").unwrap()
    }

    #[test]
    fn the_upper_layer_wins() {
        let joined = join(&[args("rank = 3"), args("rank = 4\nalpha = 2.0")]).unwrap();
        assert_eq!((joined.rank, joined.alpha), (Some(3), Some(2.0)));
    }

    #[test]
    fn an_upper_choice_hides_its_alternative() {
        let joined =
            join(&[args("steps = 3\nmethod = 'prefix'"), args("epochs = 4.0\nrank = 2\nlr = 0.1")]).unwrap();
        assert_eq!(joined, args("steps = 3\nmethod = 'prefix'\nlr = 0.1"));
        let joined = join(&[args("init-adapter = 'x'"), args("method = 'lora'\nrank = 2")]).unwrap();
        assert_eq!(joined, args("init-adapter = 'x'"));
    }

    #[test]
    fn help_names_the_real_defaults() {
        let lora = config_file::table(&with_defaults(TrainArgs::default())).unwrap();
        let both = args("method = 'lora+prefix'");
        let both = config_file::table(&with_defaults(both)).unwrap();
        let command = TrainArgs::augment_args(clap::Command::new("train"));
        let mut compared = 0;
        for option in command.get_arguments() {
            let (Some(name), Some(help)) = (option.get_long(), option.get_help()) else { continue };
            let Some(value) = lora.get(name).or_else(|| both.get(name)) else { continue };
            let shown = match value {
                toml::Value::String(text) => text.clone(),
                toml::Value::Array(items) => items[0].as_str().unwrap().to_owned(),
                toml::Value::Float(number) => number.to_string(),
                toml::Value::Boolean(false) => continue,
                other => other.to_string(),
            };
            let help = help.to_string();
            assert!(
                help.contains(&format!("[default: {shown}")),
                "--{name}: the default is {shown}, the help says: {help}"
            );
            compared += 1;
        }
        assert!(compared > 20, "{compared}");
    }

    #[test]
    fn help_names_every_method() {
        let command = TrainArgs::augment_args(clap::Command::new("train"));
        let method = command.get_arguments().find(|option| option.get_long() == Some("method")).unwrap();
        let help = method.get_help().unwrap().to_string();
        for kind in kinds() {
            assert!(help.contains(kind.name), "{}: {help}", kind.name);
        }
    }

    #[test]
    fn a_written_config_reads_back() {
        let effective =
            with_defaults(args("output = 'x'\nresume = true\ntargets = '/h\\.(0|1),x/'\nseed = 7"));
        let again = config_file::parse(&written(&effective).unwrap(), "config.toml").unwrap();
        assert_eq!((again.output.as_ref(), again.resume), (None, None));
        assert_eq!(again.targets, effective.targets);
        assert_eq!(with_defaults(again.clone()), again);
    }
}
