//! What the options of `train` mean. Whatever cannot go together is refused here, before anything loads.

use std::{collections::BTreeMap, path::PathBuf};

use super::{
    args::TrainArgs,
    config_file, layers,
    values::{
        Method, Optimizer, Pattern, Precision, PrefixInit, RowsName, ScheduleName, Switch,
        Warmup as TypedWarmup,
    },
};
use crate::{
    error::{Error, Result},
    observe::machine,
    optim::{AdamWOptions, OptimizerKind, schedule::Schedule},
    plan::{budget::Limit, choose::Wish},
    train::{self, AdapterOptions, DataSource, Kinds, Length, Machine, PrefixStart, RunOptions},
};

/// Options that change how a run is made or shown, never its adapter. The base and the data are
/// compared by fingerprint, the length and the machine by rules of their own, and what a memory plan may
/// choose by what it chose.
const FREE: [&str; 27] = [
    "memory",
    "memory-trace",
    "stream-base",
    "offload-inputs",
    "offload-optimizer",
    "micro-batch",
    "head-rows",
    "optimizer",
    "threads",
    "json",
    "log-every",
    "base",
    "revision",
    "offline",
    "allow-base-mismatch",
    "data",
    "eval-data",
    "recompute",
    "output",
    "save-every",
    "keep",
    "eval-every",
    "resume",
    "steps",
    "epochs",
    "device",
    "precision",
];

/// More rows per step than anybody waits for.
const LARGEST_BATCH: usize = 1_000_000;

/// The run that `args`, joined and with defaults, ask for; `cache` keeps what is measured of the machine.
///
/// # Errors
/// The first option with a value that makes no sense, or options that exclude each other.
pub fn run_options(args: &TrainArgs, machine: Machine, cache: Option<PathBuf>) -> Result<RunOptions> {
    refuse_combinations(args)?;
    let batch = at_least_one("batch", args.batch)?;
    if batch > LARGEST_BATCH {
        return Err(Error::input(format!("--batch {batch}: is too large; give at most {LARGEST_BATCH}")));
    }
    let micro_batch = fixed_rows("micro-batch", args.micro_batch)?;
    if let Some(micro_batch) = micro_batch
        && !batch.is_multiple_of(micro_batch)
    {
        return Err(Error::input(format!(
            "--micro-batch {micro_batch}: does not divide --batch {batch}; give a divisor such as {}",
            divisor_up_to(batch, micro_batch)
        )));
    }
    let init = args.prefix_init.unwrap_or(PrefixInit::Text);
    let absolute = layers::with_absolute_paths(args.clone())?;
    Ok(RunOptions {
        adapter: adapter_options(args)?,
        init_adapter: absolute.init_adapter.clone(),
        allow_base_mismatch: args.allow_base_mismatch.unwrap_or(false),
        prefix_start: match init {
            PrefixInit::Text => PrefixStart::Text(args.prefix_text.clone()),
            PrefixInit::Random => PrefixStart::Random,
            PrefixInit::Zero => PrefixStart::Zero,
        },
        data: args.data.clone().map_or(DataSource::Embedded, DataSource::Files),
        eval_data: args.eval_data.clone().unwrap_or_default(),
        eval_fraction: args.eval_fraction.map(|part| inside("eval-fraction", part, 0.0, 1.0)).transpose()?,
        seq_len: args.seq_len.map(|tokens| at_least_one("seq-len", Some(tokens))).transpose()?,
        pack: args.pack.unwrap_or(true),
        line_by_line: args.line_by_line.unwrap_or(false),
        train_on_prompt: args.train_on_prompt.unwrap_or(false),
        shuffle: !args.no_shuffle.unwrap_or(false),
        batch,
        length: length(args)?,
        lr: positive("lr", args.lr.unwrap_or_default(), "5e-4")?,
        schedule: match args.schedule {
            Some(ScheduleName::Constant) => Schedule::Constant,
            Some(ScheduleName::Cosine) => Schedule::Cosine,
            Some(ScheduleName::Linear) | None => Schedule::Linear,
        },
        warmup: warmup(args)?,
        adamw: AdamWOptions {
            weight_decay: not_negative("weight-decay", args.weight_decay.unwrap_or_default(), "0.01")?,
            ..AdamWOptions::default()
        },
        clip: not_negative("clip", args.clip.unwrap_or_default(), "1, or 0 for no clipping")?,
        label_smoothing: below_one("label-smoothing", args.label_smoothing.unwrap_or_default())?,
        wish: wish(args, micro_batch)?,
        memory: args.memory.map_or(Limit::Auto, |memory| memory.0),
        memory_trace: args.memory_trace.clone(),
        cache,
        free_memory: machine::available,
        seed: args.seed.unwrap_or_default(),
        save_every: args.save_every.unwrap_or_default(),
        keep: at_least_one("keep", args.keep)?,
        eval_every: args.eval_every.unwrap_or_default(),
        resume: args.resume.unwrap_or(false),
        identity: identity(&absolute)?,
        config_text: layers::written(&absolute)?,
        machine,
    })
}

/// A number of rows, unless it is left to the plan.
fn fixed_rows(option: &str, rows: Option<RowsName>) -> Result<Option<usize>> {
    rows.and_then(RowsName::fixed).map(|rows| at_least_one(option, Some(rows))).transpose()
}

/// What of the memory plan is fixed.
fn wish(args: &TrainArgs, micro_batch: Option<usize>) -> Result<Wish> {
    Ok(Wish {
        micro_batch,
        recompute: args.recompute.and_then(|recompute| recompute.0),
        head_rows: fixed_rows("head-rows", args.head_rows)?,
        stream: args.stream_base.and_then(Switch::fixed),
        inputs: args.offload_inputs.and_then(Switch::fixed),
        moments: args.offload_optimizer.and_then(Switch::fixed),
        optimizer: match args.optimizer {
            Some(Optimizer::Adamw8bit) => Some(OptimizerKind::AdamW8bit),
            Some(Optimizer::Adamw) => Some(OptimizerKind::AdamW),
            Some(Optimizer::Auto) | None => None,
        },
        activations: args.precision.map(Precision::activations),
        resumed: false,
    })
}

fn refuse_combinations(args: &TrainArgs) -> Result<()> {
    if let Some(method) = args.method {
        let given = |keys: &[&str]| -> Result<Option<String>> {
            let table = config_file::table(args)?;
            Ok(keys.iter().find(|key| table.contains_key(**key)).map(|key| (*key).to_owned()))
        };
        let meaningless = match method {
            Method::Lora => given(&layers::PREFIX_KEYS)?.map(|key| (key, "lora", "prefix or lora+prefix")),
            Method::Prefix => given(&layers::LORA_KEYS)?.map(|key| (key, "prefix", "lora or lora+prefix")),
            Method::LoraPrefix => None,
        };
        if let Some((key, method, other)) = meaningless {
            return Err(Error::input(format!(
                "--{key}: means nothing with --method {method}; leave it out or give --method {other}"
            )));
        }
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
    if args.init_adapter.is_some() && (args.prefix_init.is_some() || args.prefix_text.is_some()) {
        return Err(Error::input(
            "--prefix-init, --prefix-text: the prefix starts from --init-adapter; leave these options out",
        ));
    }
    if args.revision.is_some() && args.base.is_none() {
        return Err(Error::input(
            "--revision: the embedded base has none; give --base with the name of a base on the hub",
        ));
    }
    Ok(())
}

fn adapter_options(args: &TrainArgs) -> Result<AdapterOptions> {
    Ok(AdapterOptions {
        kinds: args.method.map(|method| Kinds { lora: method.lora(), prefix: method.prefix() }),
        rank: args.rank.map(|rank| at_least_one("rank", Some(rank))).transpose()?,
        alpha: args.alpha.map(|alpha| positive("alpha", alpha, "16")).transpose()?,
        targets: args.targets.clone(),
        layers: args.layers.clone().map(|layers| layers.0),
        dropout: args.lora_dropout.map(|dropout| below_one("lora-dropout", dropout)).transpose()?,
        rslora: args.rslora,
        rank_pattern: args.rank_pattern.as_deref().map(rank_pattern).transpose()?,
        alpha_pattern: args.alpha_pattern.as_deref().map(alpha_pattern).transpose()?,
        prefix_length: args.prefix_len.map(|length| at_least_one("prefix-len", Some(length))).transpose()?,
        projection: args
            .prefix_projection
            .map(|width| at_least_one("prefix-projection", Some(width)))
            .transpose()?,
    })
}

/// Larger ranks are typing errors: no base is that wide.
const LARGEST_RANK: f64 = 1e6;

fn rank_pattern(patterns: &[Pattern]) -> Result<BTreeMap<String, usize>> {
    let rank = |pattern: &Pattern| {
        let rank = pattern.number;
        if rank.fract() != 0.0 || !(1.0..=LARGEST_RANK).contains(&rank) {
            let written = String::from(pattern.clone());
            return Err(Error::input(format!(
                "--rank-pattern {written}: {rank} is no rank; give a whole number from 1"
            )));
        }
        Ok((pattern.key.clone(), rank as usize))
    };
    patterns.iter().map(rank).collect()
}

fn alpha_pattern(patterns: &[Pattern]) -> Result<BTreeMap<String, f64>> {
    patterns
        .iter()
        .map(|pattern| Ok((pattern.key.clone(), positive("alpha-pattern", pattern.number, "KEY=16")?)))
        .collect()
}

fn length(args: &TrainArgs) -> Result<Length> {
    match (args.steps, args.epochs) {
        (Some(0), _) => Err(Error::input("--steps 0: trains nothing; give at least 1")),
        (Some(steps), _) => Ok(Length::Steps(steps)),
        (None, epochs) => Ok(Length::Epochs(positive("epochs", epochs.unwrap_or(1.0), "1")?)),
    }
}

fn warmup(args: &TrainArgs) -> Result<train::Warmup> {
    match args.warmup {
        None => Ok(train::Warmup::Steps(0)),
        Some(TypedWarmup::Steps(steps)) => Ok(train::Warmup::Steps(steps)),
        Some(TypedWarmup::Fraction(part)) => Ok(train::Warmup::Fraction(below_one("warmup", part)?)),
    }
}

/// The options that results depend on, as they are written; those that a memory plan may choose come
/// with it.
fn identity(args: &TrainArgs) -> Result<BTreeMap<String, String>> {
    let mut table = config_file::table(args)?;
    table.retain(|key, value| !FREE.contains(&key) && *value != toml::Value::Boolean(false));
    Ok(table.into_iter().map(|(key, value)| (key, value.to_string())).collect())
}

/// The largest divisor of `number` that is not above `limit`.
fn divisor_up_to(number: usize, limit: usize) -> usize {
    (1..=limit.min(number)).rev().find(|divisor| number.is_multiple_of(*divisor)).unwrap_or(1)
}

fn at_least_one(option: &str, value: Option<usize>) -> Result<usize> {
    match value.unwrap_or_default() {
        0 => Err(Error::input(format!("--{option} 0: is too small; give at least 1"))),
        value => Ok(value),
    }
}

fn positive(option: &str, value: f64, such_as: &str) -> Result<f64> {
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    Err(Error::input(format!("--{option} {value}: is no positive finite number; give one such as {such_as}")))
}

fn not_negative(option: &str, value: f64, such_as: &str) -> Result<f64> {
    if value.is_finite() && value >= 0.0 {
        return Ok(value);
    }
    Err(Error::input(format!(
        "--{option} {value}: is negative or not finite; give a number such as {such_as}"
    )))
}

fn below_one(option: &str, value: f64) -> Result<f64> {
    if (0.0..1.0).contains(&value) {
        return Ok(value);
    }
    Err(Error::input(format!("--{option} {value}: is not from 0 to below 1; give a number such as 0.1")))
}

fn inside(option: &str, value: f64, low: f64, high: f64) -> Result<f64> {
    if value > low && value < high {
        return Ok(value);
    }
    Err(Error::input(format!(
        "--{option} {value}: is not between {low} and {high}; give a number such as 0.1"
    )))
}

/// `runs/BASE-METHOD`, with a number behind it when that name is taken.
pub fn default_output(args: &TrainArgs) -> PathBuf {
    let base = args.base.as_deref().unwrap_or(super::open::EMBEDDED);
    let last = base.trim_end_matches('/').rsplit('/').next().unwrap_or(base);
    let plain: String =
        last.chars().map(|c| if c.is_alphanumeric() || "._-".contains(c) { c } else { '_' }).collect();
    let plain = if plain.trim_matches('.').is_empty() { "base".to_owned() } else { plain };
    let method = args.method.map_or("adapter", Method::in_file_name);
    train::folder::free_name("runs".as_ref(), &format!("{plain}-{method}"))
}

#[cfg(test)]
mod tests;
