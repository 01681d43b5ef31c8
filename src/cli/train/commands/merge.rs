//! `engraft merge`: folds adapters into their base, and says how far the result is from both together.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use engraft_adapters::{FoldPart, Folding, Kinds, kinds, peft::Loaded};
use engraft_util::rng;
use serde_json::json;

use crate::{
    cli::{
        common::{
            adapters::base_and_adapters,
            args::{BaseArgs, ComputeArgs},
            environment::Environment,
            open::{self, Compute, Opened},
            options::{FROM_ONE, Options, options, switch, value},
            output::{count_of, quoted, write_json, write_note, write_out},
            progress::Work,
            signals,
            values::{ScaledAdapter, ShardSize, WeightDtypeName},
        },
        train::{args::DataArgs, data_source},
    },
    convert::{LogitDifference, Merge, Merged, check_output, compare},
    data::{DataOptions, Split},
    error::{Error, Result},
    model::{Base, BaseDType, BaseSource},
    plan::size,
    train::{self, DataSource},
};

options! {
    /// Options of `merge`.
    MergeArgs { base: BaseArgs, compute: ComputeArgs }

    "" {
        /// Run folder, adapter folder or hub id, optionally with =SCALE; repeatable, LoRAs are summed
        #[arg(required = true)]
        adapter: Vec<ScaledAdapter> => value("DIR[=SCALE]").basic();
        /// Folder to write; it is new or empty
        #[arg(required = true)]
        output: PathBuf => value("DIR").basic();
        /// Type of the weights that are written: f16, f32 or bf16
        dtype: WeightDtypeName = WeightDtypeName::F16 => value("TYPE").basic();
        /// Largest weight file; a larger model is cut into several
        max_shard_size: ShardSize = ShardSize::USUAL => value("SIZE");
        /// Files with the text on which the logits are compared
        #[arg(num_args = 1..)]
        data: Vec<PathBuf> => value("PATH").otherwise("the embedded data").basic();
        /// Texts that are compared, of up to 64 tokens each
        texts: usize = 8 => value("N").check(FROM_ONE);
        /// One JSON object on stdout
        json: bool => switch().basic();
    }
}

/// Most tokens of a text that is compared.
const LONGEST: usize = 64;

/// Runs `engraft merge`.
///
/// # Errors
/// When an adapter cannot be folded, something cannot be read, they do not fit each other, or the folder cannot be
/// written.
pub fn run(args: &MergeArgs) -> Result<()> {
    signals::install()?;
    args.check()?;
    let output = args.output.as_deref().unwrap_or(Path::new(""));
    check_output(output)?;
    let dtype = args.base.base_dtype().kept();
    if dtype != BaseDType::F16 {
        return Err(Error::input(format!(
            "--base-dtype {}: merging reads the base's own files, not codes; leave it out",
            dtype.name()
        )));
    }
    open::threads(args.compute.threads)?;
    let compute = Compute::open(args.compute.device, args.compute.precision)?;
    let environment = Environment::read()?;
    let named = args.adapter.as_deref().unwrap_or_default();
    let names: Vec<&Path> = named.iter().map(|adapter| adapter.name.as_path()).collect();
    let streams = args.compute.streams();
    let (opened, loaded) = base_and_adapters(&names, &args.base, &environment, compute, streams)?;
    check(named, &loaded)?;
    let parts = loaded.iter().zip(named).map(|(loaded, named)| FoldPart {
        set: &loaded.set,
        values: &loaded.values,
        factor: named.scale as f32,
    });
    let folding = Folding::new(parts.collect())?;
    // Data that cannot be read should be known before anything is written.
    let texts = texts(args, &opened, &environment)?;
    let merge = Merge {
        base: &opened.base,
        folding: &folding,
        dtype: args.dtype().dtype(),
        max_shard: args.max_shard_size().0,
    };
    let work = Work::new("merging");
    let merged = merge.write(output, &|done, total| work.at(done, total))?;
    drop(work);
    let difference = difference(args, &opened, compute, &environment, (named, &loaded), &texts.ids);
    let difference = difference
        .inspect_err(|error| {
            write_note(&format!("hint: {} is complete, but was not compared: {error}", output.display()));
        })
        .ok();
    report(args, &opened.base, &loaded, &merged, difference.as_ref(), texts.what)
}

/// Refuses adapters that no weight can hold, and factors that mean nothing.
fn check(named: &[ScaledAdapter], loaded: &[Loaded]) -> Result<()> {
    for (ScaledAdapter { name, scale }, Loaded { set, .. }) in named.iter().zip(loaded) {
        let name = name.display();
        if let Err(cause) = set.check_foldable() {
            let others: Vec<&str> = kinds()
                .into_iter()
                .map(|kind| kind.name)
                .filter(|kind| !["prefix", "prompt_tuning"].contains(kind))
                .collect();
            return Err(Error::input(format!("--adapter {name}: {cause}"))
                .hint(format!("what can be merged: {}", others.join(", "))));
        }
        if *scale != 1.0 && !set.is_scalable() {
            return Err(Error::input(format!(
                "--adapter {name}={scale}: has no low-rank delta that could be scaled; leave ={scale} out"
            )));
        }
    }
    Ok(())
}

/// Tokens of some texts, and what they are.
struct Texts {
    ids: Vec<Vec<u32>>,
    what: &'static str,
}

fn texts(args: &MergeArgs, opened: &Opened, environment: &Environment) -> Result<Texts> {
    let config = &opened.base.config;
    let most = LONGEST.min(config.positions);
    let tokenizer = opened.tokenizer.as_ref();
    if tokenizer.is_none() && args.data.is_none() {
        // Without a tokenizer there is no text.
        let id = |index: usize| (rng::uniform(rng::key(&[1]), index as u64) * config.vocab as f32) as u32;
        let row = |row: usize| {
            (row * most..(row + 1) * most).map(|at| id(at).min(config.vocab as u32 - 1)).collect()
        };
        return Ok(Texts { ids: (0..args.texts()).map(row).collect(), what: "random text" });
    }
    let data = DataArgs { data: args.data.clone(), ..DataArgs::default() };
    let options = DataOptions {
        seq_len: most,
        pack: false,
        line_by_line: false,
        train_on_prompt: true,
        end_of_text: train::end_of_text(config, tokenizer)?,
        vocab: config.vocab,
        prompt: 0,
        spool: environment.cache().ok().map(Path::to_owned),
        read: data.read_options(None),
    };
    let what = if args.data.is_some() { "--data" } else { "the embedded data" };
    let source = args.data.clone().map_or(DataSource::Embedded, DataSource::Files);
    let source = data_source::fetched(source, &args.base, environment)?;
    let data = train::load_split(&source, Split::Valid, tokenizer, &options)?.at_most(args.texts());
    Ok(Texts { ids: data.batches(1).map(|batch| batch.ids).collect(), what })
}

fn difference(
    args: &MergeArgs,
    opened: &Opened,
    compute: Compute,
    environment: &Environment,
    (named, loaded): (&[ScaledAdapter], &[Loaded]),
    texts: &[Vec<u32>],
) -> Result<LogitDifference> {
    let output = args.output.clone().unwrap_or_default();
    let name = output.display().to_string();
    let merged = Base::load_as(&BaseSource::Folder(output), &name, environment.cache()?, BaseDType::F16)?;
    let Compute { device, activations } = compute;
    let merged = match args.compute.streams() {
        true => merged.streamed_on(device, activations)?,
        false => merged.on(device, activations)?,
    };
    let adapters = loaded.iter().zip(named);
    let adapters: Vec<_> =
        adapters.map(|(loaded, named)| (&loaded.set, loaded.values.as_slice(), named.scale as f32)).collect();
    let work = Work::new("comparing logits");
    work.at(0, 0);
    compare(&opened.base, &adapters, &Arc::new(merged), texts)
}

fn report(
    args: &MergeArgs,
    base: &Base,
    loaded: &[Loaded],
    merged: &Merged,
    difference: Option<&LogitDifference>,
    text: &str,
) -> Result<()> {
    let Merged { tensors, changed, bytes, files, untied } = merged;
    let (dtype, output) = (args.dtype().dtype().name(), args.output.clone().unwrap_or_default());
    let output = output.display().to_string();
    let kinds: Vec<String> =
        loaded.iter().filter_map(|loaded| Some(Kinds::of(&loaded.set.spec)?.to_string())).collect();
    if args.json == Some(true) {
        return write_json(&json!({
            "output": output, "base": base.name, "methods": kinds, "dtype": dtype, "bytes": bytes, "files": files,
            "tensors": tensors, "changed": changed, "untied": untied,
            "logits": difference.map(|found| json!({
                "largest_difference": found.largest, "mean_difference": found.mean,
                "largest_logit": found.largest_logit, "tokens": found.tokens, "agreed": found.agreed, "text": text,
            })),
        }));
    }
    let head = if *untied { "; the head is a tensor of its own now" } else { "" };
    let mut text_of = format!(
        "merged   {} into {}: {changed} of {tensors} tensors changed{head}\nwrote    {output}: {} in {dtype}, {}\n",
        kinds.join(" and "),
        base.name,
        size(*bytes),
        count_of(files.len(), "weight file"),
    );
    if let Some(found) = difference {
        text_of += &format!(
            "logits   differ by {:.2e} at most and {:.2e} on average from base and adapter, on {} of {text}; the largest \
             logit is {:.2}\nchoice   the same most likely token after {} of {}\n",
            found.largest,
            found.mean,
            count_of(found.tokens, "token"),
            found.largest_logit,
            found.agreed,
            count_of(found.tokens, "token"),
        );
    }
    let command = format!("try it: engraft-infer generate --base {} --prompt ..\n", quoted(&output));
    write_out(&(text_of + &command))
}
