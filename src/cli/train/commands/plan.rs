//! `engraft plan`: the memory and time of a training run, from sizes alone.

use std::path::Path;

use engraft_adapters::AdapterSet;

use super::train::joined;
use crate::{
    cli::train::{
        table,
        time_table::{self, Times},
    },
    cli::{
        common::{
            args::BaseArgs,
            environment::Environment,
            open::{self, Compute},
            output::{count_of, write_json, write_note, write_out},
            values::Precision,
        },
        train::{args::TrainArgs, data_source, layers, resolve},
    },
    data::{Dataset, Tokenizer},
    device::DType,
    embedded,
    error::Result,
    kernels::matmul::Arithmetic,
    model::{Config, Recompute, builtin, weights},
    plan::{PlannedDevice, device_time::DeviceTime, launches::Pass},
    train as run,
    train::{
        AdapterOptions, DataSource, PlanConfig, PlanRequest, RowOptions, RunOptions,
        sample::{self, PromptSource},
    },
};

/// Runs `engraft plan`.
///
/// # Errors
/// As `engraft train` before its first step.
pub fn run(typed: TrainArgs) -> Result<()> {
    let args = joined(typed)?;
    let environment = Environment::read()?;
    let cache = environment.cache().ok().map(Path::to_owned);
    open::threads(args.compute.threads)?;
    // A plan needs no device: it is made for the one that was named, or for what is here.
    let kind = args.compute.device().kind();
    let arithmetic = match args.compute.precision {
        Some(Precision::Bf16) => Arithmetic::Bf16,
        _ => Arithmetic::F32,
    };
    let device = PlannedDevice::of_kind(kind, arithmetic);
    let base_dtype = args.base.base_dtype().kept();
    let mut options = resolve::run_options(&args, resolve::machine(Compute::CPU), cache)?;
    options.data = data_source::fetched(options.data, &args.base, &environment)?;
    options.eval_data = data_source::files(&options.eval_data, &args.base, &environment)?;
    resolve::check_data(&options)?;
    if let Some(precision) = args.compute.precision {
        open::hint_at_f32(kind, precision.activations());
    }
    let base = open_sizes(&args, &environment)?;
    let set = adapter(&options, &base)?;
    let limit = run::row_limit(options.seq_len, Some(&set), base.config.positions)?;
    let (seq_len, sample_tokens) = match rows(&options, &base, (limit, &set), &environment)? {
        Some(found) => found,
        None => {
            write_note(&format!(
                "hint: planned for rows of {}; the data were not read",
                count_of(limit, "token")
            ));
            let positions = base.config.positions;
            (limit + set.prompt_len(), sample::tokens_without_tokenizer(&options, limit, positions))
        }
    };
    let plan_request = PlanRequest {
        config: &base.config,
        base_dtype,
        set: &set,
        seq_len,
        device,
        streamable: args.base.base.is_some(),
        sample_tokens,
    };
    let selection = run::plan_request(&options, plan_request)?;
    let times = times(&selection.chosen.plan.config, &plan_request);
    if args.json == Some(true) {
        let mut event = table::event(&selection);
        if let Some(times) = &times {
            event["device_time"] = time_table::event(times);
        }
        write_json(&event)
    } else {
        write_out(&table::whole(&selection))?;
        if let Some(times) = &times {
            write_out(&format!("\n{}", time_table::whole(times)))?;
        }
        if let Some(hint) = open::faster_in_bf16(kind, args.compute.precision, args.base.base_dtype) {
            write_note(&format!("hint: {hint}"));
        }
        Ok(())
    }
}

/// Keys that the token of a predicted decoding rate sees.
const KEYS: usize = 128;

/// The predicted time of a micro-batch and of a token on devices whose speeds are not measured; `None` where the table of
/// launches does not cover the run: other adapters than LoRA, other activations than F16, recomputation.
fn times(config: &PlanConfig, request: &PlanRequest) -> Option<Times> {
    let PlanConfig { micro_batch, policy, .. } = *config;
    let plain = policy.activations == DType::F16 && policy.recompute == Recompute::None;
    if request.device.kind.is_calibrated || !plain {
        return None;
    }
    let step = Pass {
        config: request.config,
        base: request.base_dtype,
        set: request.set,
        batch: micro_batch,
        tokens: request.seq_len,
        head_rows: policy.head_rows,
    };
    let token = Pass { batch: 1, tokens: KEYS, ..step };
    step.is_covered()
        .then(|| Times { step: DeviceTime::of_training(step), token: (DeviceTime::of_token(token), KEYS) })
}

/// Sizes of a base, with its tokenizer where there is one.
struct BaseSizes {
    name: String,
    config: Config,
    tokenizer: Option<Tokenizer>,
}

/// The config of a base: built in for the four GPT-2 models, else read as for training, without weights.
fn open_sizes(args: &TrainArgs, environment: &Environment) -> Result<BaseSizes> {
    let Some(name) = &args.base.base else {
        let config = Config::from_json(embedded::CONFIG, Path::new("the embedded config.json"))?;
        let tokenizer = Some(Tokenizer::from_bytes(embedded::TOKENIZER)?);
        return Ok(BaseSizes { name: open::EMBEDDED.to_owned(), config, tokenizer });
    };
    let folder = Path::new(name);
    if folder.is_dir() {
        let (config, tokenizer) = (weights::read_config(folder)?, Tokenizer::from_folder(folder)?);
        return Ok(BaseSizes { name: layers::base_name(name)?, config, tokenizer });
    }
    if let Some(config) = builtin::builtin(name)? {
        return Ok(BaseSizes { name: name.clone(), config, tokenizer: None });
    }
    // Sizes are the same in every type, and no adapter is loaded.
    let named = BaseArgs { base_dtype: None, allow_base_mismatch: Some(true), ..args.base.clone() };
    let opened = open::base(&named, environment, Compute::CPU, false)?;
    Ok(BaseSizes { name: name.clone(), config: opened.base.config.clone(), tokenizer: opened.tokenizer })
}

fn adapter(options: &RunOptions, base: &BaseSizes) -> Result<AdapterSet> {
    let description = base.config.describe(&base.name, None);
    match &options.init_adapter {
        Some(dir) => Ok(run::adapter::load(dir, &options.adapter, &description, true)?.set),
        None => Ok(AdapterSet::new(&AdapterOptions::spec(&options.adapter), &description)?),
    }
}

/// Tokens of the longest row of the data, of up to `limit` of text after those of a prompt of `set`, and those of the
/// longest sample; `None` where they cannot be read without a tokenizer.
fn rows(
    options: &RunOptions,
    base: &BaseSizes,
    (limit, set): (usize, &AdapterSet),
    environment: &Environment,
) -> Result<Option<(usize, usize)>> {
    if base.tokenizer.is_none() || (options.data == DataSource::Embedded && base.name != open::EMBEDDED) {
        return Ok(None);
    }
    let tokenizer = base.tokenizer.as_ref();
    let row_options = RowOptions {
        seq_len: limit,
        prompt: set.prompt_len(),
        spool: environment.cache().ok().filter(|cache| cache.is_dir()).map(Path::to_owned),
    };
    let (train, held_out) = run::load_rows(options, &base.config, tokenizer, row_options)?;
    let longest = train.longest().max(held_out.as_ref().map_or(0, Dataset::longest));
    let prompts =
        PromptSource { config: &base.config, set, tokenizer, rows: held_out.as_ref().unwrap_or(&train) };
    Ok(Some((longest, prompts.tokens(options)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_built_in_size_needs_no_file() {
        let of = |base| TrainArgs { base, ..TrainArgs::default() };
        let args = of(BaseArgs { base: Some("gpt2-xl".to_owned()), ..BaseArgs::default() });
        let environment = Environment::read().unwrap();
        let base = open_sizes(&args, &environment).unwrap();
        assert_eq!((base.config.layers, base.tokenizer.is_none()), (48, true));
        let missing = of(BaseArgs {
            base: Some("no/such-folder".to_owned()),
            offline: Some(true),
            ..BaseArgs::default()
        });
        let error = open_sizes(&missing, &environment).err().unwrap();
        assert_eq!(error.exit_code(), 2);
    }
}
