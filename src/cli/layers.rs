//! Where an option's value comes from: command line, config file, run folder, embedded defaults, defaults.

use std::path::{Path, PathBuf};

use toml::Table;

use super::{
    args::TrainArgs,
    config_file,
    values::{
        BaseDtype, DeviceName, LayerList, MemoryName, Method, Optimizer, PrefixInit, RecomputeName, RowsName,
        ScheduleName, Switch, Warmup,
    },
};
use crate::{
    error::{Error, Result},
    optim::AdamWOptions,
    plan::budget::Limit,
};
use engraft_adapters::{LoraSpec, PrefixSpec};

/// Options that say the same in two ways: a layer that gives one hides the other in the layers below.
const EXCLUSIVE: [[&str; 2]; 3] = [["steps", "epochs"], ["pack", "no-pack"], ["eval-data", "eval-fraction"]];
/// Options of a LoRA.
pub const LORA_KEYS: [&str; 8] =
    ["rank", "alpha", "targets", "layers", "lora-dropout", "rslora", "rank-pattern", "alpha-pattern"];
/// Options of a prefix.
pub const PREFIX_KEYS: [&str; 4] = ["prefix-len", "prefix-init", "prefix-text", "prefix-projection"];
/// Not written to a run folder: they belong to one call, not to the run.
const OF_THE_CALL: [&str; 6] = ["output", "resume", "json", "threads", "offline", "memory-trace"];

/// Joins layers of options, the first one winning.
///
/// # Errors
/// When a value cannot be written as TOML.
pub fn join(layers: &[TrainArgs]) -> Result<TrainArgs> {
    let mut joined = Table::new();
    for layer in layers {
        let mut below = config_file::table(layer)?;
        refuse_both(&below)?;
        hide(&joined, &mut below);
        for (key, value) in below {
            joined.entry(key).or_insert(value);
        }
    }
    config_file::untable(joined)
}

fn refuse_both(layer: &Table) -> Result<()> {
    match EXCLUSIVE.iter().find(|pair| pair.iter().all(|key| layer.contains_key(*key))) {
        None => Ok(()),
        Some([one, other]) => Err(Error::input(format!(
            "--{one} {} and --{other} {} exclude each other; give one of them",
            layer[*one], layer[*other]
        ))),
    }
}

/// Removes from the layer `below` what a decision above makes meaningless.
fn hide(above: &Table, below: &mut Table) {
    for [one, other] in EXCLUSIVE {
        if above.contains_key(one) || above.contains_key(other) {
            below.remove(one);
            below.remove(other);
        }
    }
    if above.contains_key("init-adapter") {
        below.remove("method");
        LORA_KEYS.iter().chain(&PREFIX_KEYS).filter(|key| **key != "lora-dropout").for_each(|key| {
            below.remove(*key);
        });
    }
    let method = above.get("method").and_then(|name| name.as_str());
    let meaningless: &[&str] = match method {
        Some("prefix") => &LORA_KEYS,
        Some("lora") => &PREFIX_KEYS,
        _ => &[],
    };
    meaningless.iter().for_each(|key| {
        below.remove(*key);
    });
}

/// `args` with every default that does not depend on the base filled in.
pub fn with_defaults(mut args: TrainArgs) -> TrainArgs {
    let method = args.method.unwrap_or(Method::Lora);
    if args.init_adapter.is_none() {
        args.method = Some(method);
        if method.lora() {
            lora_defaults(&mut args);
        }
        if method.prefix() {
            prefix_defaults(&mut args);
        }
    }
    args.base_dtype.get_or_insert(BaseDtype::F16);
    args.log_every.get_or_insert(10);
    // One name for what two options say.
    let packed = !args.no_pack.take().unwrap_or(false);
    args.pack.get_or_insert(packed);
    args.batch.get_or_insert(8);
    if args.steps.is_none() {
        args.epochs.get_or_insert(1.0);
    }
    args.lr.get_or_insert(5e-4);
    args.schedule.get_or_insert(ScheduleName::Linear);
    args.warmup.get_or_insert(Warmup::Steps(0));
    args.weight_decay.get_or_insert(AdamWOptions::default().weight_decay);
    args.clip.get_or_insert(1.0);
    args.label_smoothing.get_or_insert(0.0);
    args.optimizer.get_or_insert(Optimizer::Auto);
    args.seed.get_or_insert(0);
    args.device.get_or_insert(DeviceName::Auto);
    args.micro_batch.get_or_insert(RowsName::AUTO);
    args.memory.get_or_insert(MemoryName(Limit::Auto));
    args.recompute.get_or_insert(RecomputeName(None));
    args.head_rows.get_or_insert(RowsName::AUTO);
    args.stream_base.get_or_insert(Switch::Auto);
    args.offload_inputs.get_or_insert(Switch::Auto);
    args.offload_optimizer.get_or_insert(Switch::Auto);
    args.save_every.get_or_insert(100);
    args.keep.get_or_insert(2);
    args.eval_every.get_or_insert(0);
    args
}

fn lora_defaults(args: &mut TrainArgs) {
    let spec = LoraSpec::default();
    args.rank.get_or_insert(spec.rank);
    args.alpha.get_or_insert(spec.alpha);
    args.lora_dropout.get_or_insert(spec.dropout);
    args.rslora.get_or_insert(spec.rslora);
    args.targets.get_or_insert(spec.targets);
    if args.layers.is_none() {
        args.layers = spec.layers.map(LayerList);
    }
}

fn prefix_defaults(args: &mut TrainArgs) {
    args.prefix_len.get_or_insert(PrefixSpec::default().length);
    let projected = args.prefix_projection.is_some();
    args.prefix_init.get_or_insert(if projected { PrefixInit::Random } else { PrefixInit::Text });
}

/// `args` as the text of a run folder's `config.toml`, which `--config` reads again.
///
/// # Errors
/// When a value cannot be written as TOML.
pub fn written(args: &TrainArgs) -> Result<String> {
    let mut table = config_file::table(args)?;
    OF_THE_CALL.iter().for_each(|key| {
        table.remove(*key);
    });
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
    for path in args.data.iter_mut().flatten().chain(args.eval_data.iter_mut().flatten()) {
        *path = absolute(path)?;
    }
    if let Some(path) = &mut args.init_adapter {
        *path = absolute(path)?;
    }
    Ok(args)
}

/// A base that is a folder, by a name that does not depend on the current folder: adapters carry the
/// name, and a resumed run writes the very same files.
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
    use super::*;
    use clap::Args as _;

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
    fn a_written_config_reads_back() {
        let effective =
            with_defaults(args("output = 'x'\nresume = true\ntargets = '/h\\.(0|1),x/'\nseed = 7"));
        let again = config_file::parse(&written(&effective).unwrap(), "config.toml").unwrap();
        assert_eq!((again.output.as_ref(), again.resume), (None, None));
        assert_eq!(again.targets, effective.targets);
        assert_eq!(with_defaults(again.clone()), again);
    }
}
