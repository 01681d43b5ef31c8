//! `engraft eval`: loss and perplexity of a base, with an adapter or alone.

use std::path::{Path, PathBuf};

use engraft_adapters::AdapterSet;
use serde_json::json;

use crate::{
    cli::{
        common::{
            adapters::base_and_adapters,
            args::{BaseArgs, ComputeArgs},
            environment::Environment,
            open::{self, Compute},
            options::{FROM_ONE, Options, options, switch, value},
            output::{count, write_json, write_note, write_out},
            progress::Work,
            signals,
            values::SplitName,
        },
        train::{args::DataArgs, data_source},
    },
    data::DataOptions,
    engine::Evaluator,
    error::Result,
    model::{Limits, Policy},
    train::{self, DataSource},
};

options! {
    /// Options of `eval`.
    EvalArgs { base: BaseArgs, data: DataArgs, compute: ComputeArgs }

    "" {
        /// Run folder, adapter folder or hub id; without it the base alone
        adapter: PathBuf => value("DIR").basic();
        /// Files to read if --data is a folder
        split: SplitName = SplitName::Valid => value("SPLIT");
        /// Sequences per forward pass
        #[arg(visible_alias = "batch")]
        micro_batch: usize = 8 => value("N").check(FROM_ONE).basic();
        /// Rows of logits that the head holds at a time
        head_rows: usize = Policy::HEAD_ROWS => value("N").check(FROM_ONE);
        /// One JSON object on stdout
        json: bool => switch().basic();
    }
}

/// Runs `engraft eval`.
///
/// # Errors
/// When a base, adapter or file cannot be read, or they do not fit each other.
pub fn run(args: &EvalArgs) -> Result<()> {
    signals::install()?;
    args.check()?;
    open::threads(args.compute.threads)?;
    let compute = Compute::open(args.compute.device, args.compute.precision)?;
    let environment = Environment::read()?;
    let names: Vec<&Path> = args.adapter.as_deref().into_iter().collect();
    let streams = args.compute.streams();
    let (opened, loaded) = base_and_adapters(&names, &args.base, &environment, compute, streams)?;
    let adapter = loaded.into_iter().next();
    let set = adapter.as_ref().map(|loaded| &loaded.set);
    let config = &opened.base.config;
    let options = DataOptions {
        seq_len: train::row_limit(args.data.seq_len, set, config.positions)?,
        pack: args.data.packs().unwrap_or(true),
        line_by_line: args.data.line_by_line == Some(true),
        train_on_prompt: args.data.train_on_prompt == Some(true),
        end_of_text: train::end_of_text(config, opened.tokenizer.as_ref())?,
        vocab: config.vocab,
        prompt: set.map_or(0, AdapterSet::prompt_len),
        spool: environment.cache().ok().map(Path::to_owned),
        read: args.data.read_options(environment.cache().ok()),
    };
    if args.data.data.is_none() && args.base.base.is_some() {
        write_note(
            "hint: without --data this is the loss on the embedded example data; name your own with --data",
        );
    }
    let source = args.data.data.clone().map_or(DataSource::Embedded, DataSource::Files);
    let source = data_source::fetched(source, &args.base, &environment)?;
    let data = train::load_split(&source, args.split().split(), opened.tokenizer.as_ref(), &options)?;
    data.hints.iter().for_each(|hint| write_note(&format!("hint: {hint}")));
    let limits = Limits { rows: args.micro_batch().min(data.rows.len()), tokens: data.longest() };
    let adapter = adapter.as_ref().map(|loaded| (&loaded.set, loaded.values.as_slice()));
    let mut evaluator = Evaluator::new(opened.base.clone(), adapter, limits, args.head_rows())?;
    let (mut done, total) = (0, data.rows.len() as u64);
    let work = Work::new("evaluating");
    let found = evaluator.evaluate(&mut data.batches(args.micro_batch()).inspect(|batch| {
        work.at(done, total);
        done += batch.rows as u64;
    }))?;
    drop(work);
    let perplexity = found.perplexity();
    if args.json == Some(true) {
        let (loss, tokens, rows) = (found.loss, found.tokens, found.rows);
        return write_json(&json!({
            "loss": loss, "perplexity": perplexity, "tokens": tokens, "rows": rows,
            "cut_share": data.report.cut_share(),
        }));
    }
    let cut = match data.report.cut_tokens {
        0 => String::new(),
        lost => format!("; {} not read where records were cut", count(lost as u64, "token")),
    };
    write_out(&format!(
        "loss {:.4}, perplexity {perplexity:.2} over {} in {}{cut}\n",
        found.loss,
        count(found.tokens as u64, "token"),
        count(found.rows as u64, "row")
    ))
}
