//! `engraft eval`: loss and perplexity of a base, with an adapter or alone.

use std::path::Path;

use serde_json::json;

use super::{
    args_other::EvalArgs,
    environment::Environment,
    open::{self, Compute},
    signals,
    values::SplitName,
    write_json, write_out,
};
use crate::{
    data::{DataOptions, Split},
    engine::Evaluator,
    error::{Error, Result},
    model::Limits,
    train::{self, DataSource},
};

/// Runs `engraft eval`.
///
/// # Errors
/// When anything named cannot be read or does not fit together.
pub fn run(args: &EvalArgs) -> Result<()> {
    signals::install()?;
    for (option, value) in [("micro-batch", args.micro_batch), ("head-rows", args.head_rows)] {
        if value == 0 {
            return Err(Error::input(format!("--{option} 0: is too small; give at least 1")));
        }
    }
    open::threads(args.compute.threads)?;
    let compute = Compute::open(Some(args.compute.device), args.compute.precision)?;
    let environment = Environment::read()?;
    let opened = open::base(&args.base, &environment, compute, args.compute.streams())?;
    let adapter = args
        .adapter
        .as_deref()
        .map(|name| open::adapter(name, &args.base, &environment, &opened.base.description()))
        .transpose()?;
    let prefix =
        adapter.as_ref().and_then(|loaded| loaded.set.prefix.as_ref()).map_or(0, |prefix| prefix.length);
    let config = &opened.base.config;
    let options = DataOptions {
        seq_len: train::row_limit(args.seq_len, prefix, config.positions)?,
        pack: !args.no_pack,
        line_by_line: args.line_by_line,
        train_on_prompt: args.train_on_prompt,
        end_of_text: train::end_of_text(config, opened.tokenizer.as_ref())?,
        vocab: config.vocab,
        spool: environment.cache().ok().map(Path::to_owned),
    };
    let source =
        if args.data.is_empty() { DataSource::Embedded } else { DataSource::Files(args.data.clone()) };
    let data = train::load_split(&source, split(args.split), opened.tokenizer.as_ref(), &options)?;
    let limits = Limits { rows: args.micro_batch.min(data.rows.len()), tokens: data.longest() };
    let adapter = adapter.as_ref().map(|loaded| (&loaded.set, loaded.values.as_slice()));
    let mut evaluator = Evaluator::new(opened.base.clone(), adapter, limits, args.head_rows)?;
    let found = evaluator.evaluate(&mut data.batches(args.micro_batch))?;
    let perplexity = found.perplexity();
    if args.json {
        let (loss, tokens, rows) = (found.loss, found.tokens, found.rows);
        return write_json(
            &json!({ "loss": loss, "perplexity": perplexity, "tokens": tokens, "rows": rows }),
        );
    }
    write_out(&format!(
        "loss {:.4}, perplexity {perplexity:.2} over {} tokens in {} rows\n",
        found.loss, found.tokens, found.rows
    ))
}

fn split(name: SplitName) -> Split {
    match name {
        SplitName::Train => Split::Train,
        SplitName::Valid => Split::Valid,
        SplitName::Test => Split::Test,
    }
}
