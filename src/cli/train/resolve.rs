//! Turns the options of `train` into a run. Options that contradict each other are refused here, before
//! anything is loaded.

use std::{collections::BTreeMap, path::PathBuf};

use engraft_adapters::Targets;

use super::{args::TrainArgs, config_file, layers, sampling};
use crate::{
    cli::common::{
        open::{Compute, EMBEDDED},
        options::{Facts, OnResume, Options, Part},
        values::{Optimizer, Pattern, Precision, PrefixInit, PromptInit, ScheduleName, Warmup},
    },
    cli::train::table,
    data::{self, Split},
    error::{Error, Result},
    observe::machine::{self, Machine},
    optim::{
        AdamWOptions, OptimizerKind,
        schedule::{Decay, Schedule},
    },
    train::{
        self, AdaLoraOptions, AdapterOptions, Constraints, DataSource, Length, PrefixStart, PromptStart,
        RunOptions, Sampling,
    },
};

/// The run that `args`, joined and with defaults, describe; `cache` is the folder for measured speeds.
///
/// # Errors
/// [`Error::Input`] with the first invalid value, or with options that exclude each other.
pub fn run_options(args: &TrainArgs, machine: Machine, cache: Option<PathBuf>) -> Result<RunOptions> {
    args.check()?;
    refuse_combinations(args)?;
    let absolute = layers::with_absolute_paths(args.clone())?;
    let data = &args.data;
    Ok(RunOptions {
        adapter: adapter_options(args),
        init_adapter: absolute.init_adapter.clone(),
        allow_base_mismatch: args.base.allow_base_mismatch == Some(true),
        prefix_start: match args.prefix_init.unwrap_or(PrefixInit::Text) {
            PrefixInit::Text => PrefixStart::Text(args.prefix_text.clone()),
            PrefixInit::Random => PrefixStart::Random,
            PrefixInit::Zero => PrefixStart::Zero,
        },
        prompt_start: match args.prompt_init.unwrap_or(PromptInit::Text) {
            PromptInit::Text => PromptStart::Text(args.prompt_text.clone()),
            PromptInit::Vocab => PromptStart::Vocab,
            PromptInit::Random => PromptStart::Random,
        },
        data: data.data.clone().map_or(DataSource::Embedded, DataSource::Files),
        eval_data: args.eval_data.clone().unwrap_or_default(),
        eval_fraction: args.eval_fraction,
        read: data.read_options(cache.as_deref()),
        seq_len: data.seq_len,
        pack: data.packs(),
        line_by_line: data.line_by_line == Some(true),
        train_on_prompt: data.train_on_prompt == Some(true),
        shuffle: args.no_shuffle != Some(true),
        batch: args.batch(),
        length: match (args.steps, args.epochs) {
            (Some(steps), _) => Length::Steps(steps),
            (None, Some(epochs)) => Length::Epochs(epochs),
            (None, None) => Length::FromData,
        },
        schedule: schedule(args)?,
        warmup: match args.warmup() {
            Warmup::Steps(steps) => train::Warmup::Steps(steps),
            Warmup::Fraction(part) => train::Warmup::Fraction(part),
        },
        adamw: AdamWOptions { weight_decay: args.weight_decay(), ..AdamWOptions::default() },
        clip: args.clip(),
        label_smoothing: args.label_smoothing(),
        neftune: args.neftune_alpha.unwrap_or(0.0),
        constraints: constraints(args),
        memory: args.memory().0,
        memory_trace: args.memory_trace.clone(),
        cache,
        free_memory: machine::available,
        seed: args.seed(),
        save_every: args.save_every(),
        keep: args.keep(),
        eval_every: args.eval_every(),
        eval_max_rows: args.eval_max_rows,
        save_best: args.save_best == Some(true),
        patience: args.patience,
        sampling: sampling(args),
        resume: args.resume == Some(true),
        resume_from: args.resume_from,
        identity: identity(&absolute)?,
        config_text: layers::written(&absolute)?,
        machine,
    })
}

/// The learning rate over the steps.
///
/// # Errors
/// When options contradict the schedule.
fn schedule(args: &TrainArgs) -> Result<Schedule> {
    let (name, lr) = (args.schedule(), args.lr());
    if let Some(min_lr) = args.min_lr {
        if name == ScheduleName::Constant {
            return Err(Error::input(format!(
                "--min-lr {min_lr}: the rate of --schedule constant does not fall; leave it out, or give another schedule"
            )));
        }
        if min_lr > lr {
            return Err(Error::input(format!("--min-lr {min_lr}: is above --lr {lr}; give a smaller one")));
        }
    }
    let decay = match (name, args.num_cycles) {
        (ScheduleName::CosineWithRestarts, Some(cycles)) => Decay::CosineWithRestarts(cycles),
        (ScheduleName::CosineWithRestarts, None) => {
            return Err(Error::input(
                "--schedule cosine-with-restarts: says nothing about how often; give --num-cycles with a number such as 4",
            ));
        }
        (_, Some(cycles)) => {
            return Err(Error::input(format!(
                "--num-cycles {cycles}: belongs to --schedule cosine-with-restarts; leave it out or give that schedule"
            )));
        }
        (ScheduleName::Constant, None) => Decay::Constant,
        (ScheduleName::Linear, None) => Decay::Linear,
        (ScheduleName::Cosine, None) => Decay::Cosine,
        (ScheduleName::InverseSqrt, None) => Decay::InverseSqrt,
    };
    Ok(Schedule { lr, min_lr: args.min_lr.unwrap_or(0.0), decay })
}

/// The samples that `args` ask for.
fn sampling(args: &TrainArgs) -> Option<Sampling> {
    let every = args.sample_every.filter(|&every| every > 0)?;
    let prompts = args.sample_prompt.clone().unwrap_or_default();
    Some(Sampling { every, prompts, continue_text: sampling::continue_text })
}

/// The properties of device and CPU that change the bits of a result.
pub fn machine(compute: Compute) -> Machine {
    Machine {
        device: compute.device.kind().name.to_owned(),
        precision: table::type_name(compute.activations).to_owned(),
        dispatch: compute.dispatch(),
    }
}

/// The choices of the memory plan that options fix.
fn constraints(args: &TrainArgs) -> Constraints {
    Constraints {
        micro_batch: args.micro_batch().fixed(),
        recompute: args.recompute().0,
        head_rows: args.head_rows().fixed(),
        stream: args.compute.stream_base().fixed(),
        inputs: args.offload_inputs().fixed(),
        moments: args.offload_optimizer().fixed(),
        optimizer: match args.optimizer() {
            Optimizer::Adamw8bit => Some(OptimizerKind::AdamW8bit),
            Optimizer::Adamw => Some(OptimizerKind::AdamW),
            Optimizer::Auto => None,
        },
        activations: args.compute.precision.map(Precision::activations),
        resumed: false,
    }
}

fn refuse_combinations(args: &TrainArgs) -> Result<()> {
    if let Some(rows) = args.micro_batch().fixed()
        && !args.batch().is_multiple_of(rows)
    {
        let (batch, divisor) = (args.batch(), divisor_up_to(args.batch(), rows));
        return Err(Error::input(format!(
            "--micro-batch {rows}: does not divide --batch {batch}; give a divisor such as {divisor}"
        )));
    }
    if args.sample_prompt.is_some() && args.sample_every.is_none() {
        return Err(Error::input(
            "--sample-prompt: nothing says when to continue it; give --sample-every with a number of steps such as 100",
        ));
    }
    let compares = [("save-best", args.save_best == Some(true)), ("patience", args.patience.is_some())];
    if let Some((option, _)) = compares.into_iter().find(|(_, asked)| *asked && args.eval_every() == 0) {
        return Err(Error::input(format!(
            "--{option}: compares evaluations during training, and there are none; give --eval-every with a number of \
             steps such as 100"
        )));
    }
    refuse_options_of_other_methods(args)?;
    if let Some(init) = args.init_lora_weights.filter(|_| args.init_adapter.is_some()) {
        return Err(Error::input(format!(
            "--init-lora-weights {init}: A and B start from --init-adapter; leave one of the two out"
        )));
    }
    let init = args.prefix_init;
    if args.prefix_text.is_some() && init.is_some_and(|init| init != PrefixInit::Text) {
        return Err(Error::input("--prefix-text: needs --prefix-init text; leave one of the two out"));
    }
    if args.prefix_projection.is_some()
        && (args.prefix_text.is_some() || init.is_some_and(|init| init != PrefixInit::Random))
    {
        return Err(Error::input(
            "--prefix-projection: starts from random numbers only; give --prefix-init random or leave the projection out",
        ));
    }
    if args.prompt_text.is_some() && args.prompt_init.is_some_and(|init| init != PromptInit::Text) {
        return Err(Error::input("--prompt-text: needs --prompt-init text; leave one of the two out"));
    }
    let starts = [
        ("prefix", args.prefix_init.is_some() || args.prefix_text.is_some()),
        ("prompt", args.prompt_init.is_some() || args.prompt_text.is_some()),
    ];
    if let Some((what, _)) = starts.into_iter().find(|(_, given)| *given && args.init_adapter.is_some()) {
        return Err(Error::input(format!(
            "--{what}-init, --{what}-text: the {what} starts from --init-adapter; leave these options out"
        )));
    }
    args.base.refuse_revision()
}

fn refuse_options_of_other_methods(args: &TrainArgs) -> Result<()> {
    let Some(kinds) = &args.method else { return Ok(()) };
    let given = config_file::table(args)?;
    for Facts { name, part, .. } in TrainArgs::facts() {
        if let Part::Methods(own) = part
            && !part.is_of(kinds)
            && given.contains_key(&name)
        {
            let both = kinds.with(own[0]);
            let alone = own.join(", ");
            return Err(Error::input(format!(
                "--{name}: means nothing with --method {kinds}; leave it out or give --method {alone} or {both}"
            )));
        }
    }
    Ok(())
}

fn adapter_options(args: &TrainArgs) -> AdapterOptions {
    let by_key = |patterns: &[Pattern]| -> BTreeMap<String, f64> {
        patterns.iter().map(|pattern| (pattern.key.clone(), pattern.number)).collect()
    };
    let ranks =
        |patterns: &[Pattern]| by_key(patterns).into_iter().map(|(key, rank)| (key, rank as usize)).collect();
    AdapterOptions {
        kinds: args.method.clone(),
        rank: args.rank,
        alpha: args.alpha,
        targets: args.targets.clone(),
        layers: args.layers.clone().map(|layers| layers.0),
        dropout: args.lora_dropout,
        rslora: args.rslora,
        rank_pattern: args.rank_pattern.as_deref().map(ranks),
        alpha_pattern: args.alpha_pattern.as_deref().map(by_key),
        bias: args.bias,
        train_norms: args.train_norms.clone(),
        lora_plus_ratio: args.lora_plus_ratio,
        freeze_a: args.freeze_a,
        init_lora_weights: args.init_lora_weights,
        vera_dropout: args.vera_dropout,
        d_initial: args.d_initial,
        projection_prng_key: args.projection_prng_key,
        adalora: AdaLoraOptions {
            init_r: args.init_r,
            target_r: args.target_r,
            tinit: args.tinit,
            tfinal: args.tfinal,
            delta_t: args.delta_t,
            beta1: args.importance_beta1,
            beta2: args.importance_beta2,
            orth_reg_weight: args.orth_reg_weight,
        },
        feedforward: args.feedforward.clone().map(or_none),
        norms: args.norms.clone(),
        prefix_length: args.prefix_len,
        projection: args.prefix_projection,
        prompt_length: args.prompt_len,
    }
}

/// The targets, of which the word `none` means no one.
fn or_none(targets: Targets) -> Targets {
    let none = |names: &[String]| names == ["none"];
    match targets {
        Targets::List(names) if none(&names) => Targets::List(Vec::new()),
        other => other,
    }
}

/// The options that change results: name and value as TOML. A resumed run must have the same.
fn identity(args: &TrainArgs) -> Result<BTreeMap<String, String>> {
    let table = config_file::table(args)?;
    let same = TrainArgs::facts().into_iter().filter(|facts| facts.on_resume == OnResume::Same);
    let given = same.filter_map(|facts| Some((table.get(&facts.name)?.to_string(), facts.name)));
    Ok(given.filter(|(value, _)| value != "false").map(|(value, name)| (name, value)).collect())
}

/// The largest divisor of `number` that is not above `limit`.
fn divisor_up_to(number: usize, limit: usize) -> usize {
    (1..=limit.min(number)).rev().find(|divisor| number.is_multiple_of(*divisor)).unwrap_or(1)
}

/// The name of a run folder where none is given: `BASE-METHOD`.
pub fn default_name(args: &TrainArgs) -> String {
    let base = args.base.base.as_deref().unwrap_or(EMBEDDED);
    let last = base.trim_end_matches('/').rsplit('/').next().unwrap_or(base);
    let plain: String =
        last.chars().map(|c| if c.is_alphanumeric() || "._-".contains(c) { c } else { '_' }).collect();
    let plain = if plain.trim_matches('.').is_empty() { "base".to_owned() } else { plain };
    let method = args.method.as_ref().map_or_else(|| "adapter".to_owned(), |kinds| kinds.names().join("-"));
    format!("{plain}-{method}")
}

/// Refuses data that are not there, before a base is downloaded or converted for them.
///
/// # Errors
/// As [`data::files`].
pub fn check_data(options: &RunOptions) -> Result<()> {
    if let DataSource::Files(paths) = &options.data {
        data::files(paths, Split::Train, options.read.format)?;
    }
    if !options.eval_data.is_empty() {
        data::files(&options.eval_data, Split::Valid, options.read.format)?;
    }
    Ok(())
}

/// Refuses to train a base of the user's on the embedded data, which nobody means.
///
/// # Errors
/// [`Error::Input`] that names `--data`. A run that goes on has what it began with.
pub fn refuse_missing_data(args: &TrainArgs) -> Result<()> {
    match &args.base.base {
        Some(base) if args.data.data.is_none() && args.resume != Some(true) => Err(Error::input(format!(
            "--base {base}: there is no --data to train it on; name a file or a folder"
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
