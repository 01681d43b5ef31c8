//! From options to a run that can begin: adapter, rows, lengths.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use engraft_adapters::{AdapterSet, AdapterSpec};
use engraft_util::words::count;

use super::{
    AdapterOptions, DataSource, Length, PlanConfig, PrefixStart, PromptStart, RunOptions, adapter, memory,
    sample::{PromptSource, SamplePrompt},
    save::{FORMAT, Save, SaveInfo},
};
use crate::{
    data::{self, DataOptions, Dataset, Kind, RowStatistics, Sampler, Split, Tokenizer},
    embedded,
    error::{Error, Result},
    model::{Base, Config},
};

/// Longest row when none is asked for and the base has the positions.
const SEQ_LEN: usize = 256;

/// A run before its first step.
pub(super) struct Prepared {
    pub set: AdapterSet,
    /// Values of an adapter to start from.
    loaded: Option<Vec<f32>>,
    pub train: Dataset,
    pub statistics: RowStatistics,
    pub eval: Option<Dataset>,
    pub sampler: Sampler,
    /// Number of optimizer steps of the whole run.
    pub steps: u64,
    pub warmup: u64,
    pub seq_len: usize,
    pub hints: Vec<String>,
    /// Prompts of the samples that are made during training.
    pub samples: Vec<SamplePrompt>,
}

impl Prepared {
    /// Tokens of the longest row.
    pub fn longest(&self) -> usize {
        self.train.longest().max(self.eval.as_ref().map_or(0, Dataset::longest))
    }

    /// Values at step 0; with `stream` one layer of the base is in memory at a time.
    ///
    /// # Errors
    /// When there is no text that a prefix or a prompt could start from.
    pub fn values(
        &mut self,
        options: &RunOptions,
        base: &Arc<Base>,
        tokenizer: Option<&Tokenizer>,
        stream: bool,
    ) -> Result<Vec<f32>> {
        if let Some(values) = self.loaded.take() {
            return Ok(values);
        }
        let prefix = match &options.prefix_start {
            PrefixStart::Text(text) => self.set.prefix.as_ref().map(|_| ("prefix", text)),
            _ => None,
        };
        let prompt = match &options.prompt_start {
            PromptStart::Text(text) => self.set.prompt.as_ref().map(|_| ("prompt", text)),
            _ => None,
        };
        let ids = match prefix.or(prompt) {
            Some((what, text)) => start_text(what, text.as_deref(), base, tokenizer, &self.train)?,
            None => Vec::new(),
        };
        adapter::initial_values(&self.set, base, options, &ids, stream)
    }
}

/// Loads the adapter and the data of `options`. A run that goes on from `past` takes its adapter from
/// there. Rows too many for memory go to a nameless file in `spool`.
///
/// # Errors
/// When the data or the adapter is invalid, or their lengths do not fit the base.
pub(super) fn prepare(
    options: &RunOptions,
    base: &Arc<Base>,
    tokenizer: Option<&Tokenizer>,
    past: Option<&Save>,
    spool: &Path,
) -> Result<Prepared> {
    let mut chosen = choose(options, base, past)?;
    let seq_len = row_limit(options.seq_len, Some(&chosen.set), base.config.positions)?;
    let rows = RowOptions { seq_len, prompt: chosen.set.prompt_len(), spool: Some(spool.to_owned()) };
    let (mut train, mut eval) = load_rows(options, &base.config, tokenizer, rows)?;
    refuse_without_evaluation(options, eval.is_some())?;
    let sampler = Sampler::new(train.rows.len(), options.seed, options.shuffle);
    let (steps, few) = steps(options, &sampler);
    let warmup = options.warmup.steps(steps);
    if past.is_none() && chosen.set.spec.depends_on_steps() {
        let mut spec = chosen.set.spec.clone();
        spec.set_steps(steps);
        chosen.set = AdapterSet::new(&spec, &base.description())?;
    }
    let rows = eval.as_ref().unwrap_or(&train);
    let samples =
        PromptSource { config: &base.config, set: &chosen.set, tokenizer, rows }.prompts(options)?;
    let mut hints = std::mem::take(&mut chosen.hints);
    hints.append(&mut train.hints);
    hints.extend(eval.iter_mut().flat_map(|eval| std::mem::take(&mut eval.hints)));
    hints.extend(few);
    if warmup >= steps {
        hints.push(format!(
            "--warmup {warmup}: the rate rises through all of {} and never falls; lower it",
            count(steps, "step")
        ));
    }
    let Chosen { set, values: loaded, .. } = chosen;
    let statistics = RowStatistics::of(&train);
    Ok(Prepared { set, loaded, train, statistics, eval, sampler, steps, warmup, seq_len, hints, samples })
}

/// The adapter, and its values unless they are to be made.
struct Chosen {
    set: AdapterSet,
    values: Option<Vec<f32>>,
    hints: Vec<String>,
}

fn choose(options: &RunOptions, base: &Base, past: Option<&Save>) -> Result<Chosen> {
    let description = base.description();
    let fresh = |spec: &AdapterSpec| AdapterSet::new(spec, &description).map_err(Error::from);
    match (past, &options.init_adapter) {
        (Some(save), _) => {
            let set = fresh(&save.info.spec)?;
            // Untouched zeros until the trainer reads the save.
            let values = Some(vec![0.0; set.layout.len]);
            Ok(Chosen { set, values, hints: Vec::new() })
        }
        (None, Some(dir)) => {
            let loaded = adapter::load(dir, &options.adapter, &description, options.allow_base_mismatch)?;
            Ok(Chosen { set: loaded.set, values: Some(loaded.values), hints: loaded.hints })
        }
        (None, None) => {
            let set = fresh(&AdapterOptions::spec(&options.adapter))?;
            Ok(Chosen { set, values: None, hints: Vec::new() })
        }
    }
}

/// What rows depend on beside the options of a run.
#[derive(Debug, Clone)]
pub struct RowOptions {
    /// Longest row of text, in tokens.
    pub seq_len: usize,
    /// Virtual tokens in front of each document.
    pub prompt: usize,
    /// Folder for the nameless file of rows that are too many for memory.
    pub spool: Option<PathBuf>,
}

/// The training rows of a run and those that it evaluates on.
///
/// # Errors
/// As [`load_split`].
pub fn load_rows(
    options: &RunOptions,
    config: &Config,
    tokenizer: Option<&Tokenizer>,
    rows: RowOptions,
) -> Result<(Dataset, Option<Dataset>)> {
    let data_options = DataOptions {
        seq_len: rows.seq_len,
        pack: true,
        line_by_line: options.line_by_line,
        train_on_prompt: options.train_on_prompt,
        end_of_text: end_of_text(config, tokenizer)?,
        vocab: config.vocab,
        prompt: rows.prompt,
        spool: rows.spool,
        read: options.read.clone(),
    };
    let (mut train, data_options) = load_train(options, tokenizer, data_options)?;
    let load = |source: &DataSource, split| load_split(source, split, tokenizer, &data_options);
    let eval = match options.eval_fraction {
        _ if !options.eval_data.is_empty() => {
            Some(load(&DataSource::Files(options.eval_data.clone()), Split::Valid)?)
        }
        Some(0.0) => None,
        Some(fraction) => {
            let held_out;
            (train, held_out) = train.split(fraction, options.seed)?;
            Some(held_out)
        }
        None => brings_valid(&options.data)?.then(|| load(&options.data, Split::Valid)).transpose()?,
    };
    let eval = match options.eval_max_rows {
        Some(most) => eval.map(|eval| eval.at_most(most)),
        None => eval,
    };
    Ok((train, eval))
}

/// Refuses options that compare evaluations where there is nothing to evaluate.
fn refuse_without_evaluation(options: &RunOptions, has_rows: bool) -> Result<()> {
    let asked = [("save-best", options.save_best), ("patience", options.patience.is_some())];
    match asked.into_iter().find(|(_, asked)| *asked && !has_rows) {
        None => Ok(()),
        Some((option, _)) => Err(Error::input(format!(
            "--{option}: there is no held-out data to evaluate on; give --eval-data, or --eval-fraction such as 0.1"
        ))),
    }
}

/// Steps of a run whose length follows from its data, at least: fewer change an adapter too little.
const STEPS: u64 = 200;
/// Steps of an epoch below which documents are not packed: with few documents in few rows a run would have few, or see
/// the same rows many times in a step.
const PACKED_STEPS: usize = 100;
/// A run of fewer steps hardly learns.
const FEW: u64 = 20;

/// The training rows, with the options that they were made by: packed as asked for, or else if many rows are left.
///
/// # Errors
/// As [`load_split`].
fn load_train(
    options: &RunOptions,
    tokenizer: Option<&Tokenizer>,
    data_options: DataOptions,
) -> Result<(Dataset, DataOptions)> {
    let load = |pack| {
        let data_options = DataOptions { pack, ..data_options.clone() };
        Ok((load_split(&options.data, Split::Train, tokenizer, &data_options)?, data_options))
    };
    let packed = load(options.pack.unwrap_or(true))?;
    // The standard input can be read once.
    let is_given = options.pack.is_some()
        || matches!(&options.data, DataSource::Files(paths) if data::reads_standard_input(paths));
    if is_given || packed.0.rows.len() >= PACKED_STEPS * options.batch {
        return Ok(packed);
    }
    load(false)
}

/// The number of steps, and a hint where it is less than a user may expect, or more.
fn steps(options: &RunOptions, sampler: &Sampler) -> (u64, Option<String>) {
    let of = |epochs| sampler.steps(epochs, options.batch);
    match options.length {
        Length::Steps(steps) => (steps, None),
        Length::Epochs(epochs) => {
            let steps = of(epochs);
            let more = (epochs * STEPS as f64 / steps as f64).ceil();
            let few = (steps < FEW).then(|| {
                format!(
                    "--epochs {epochs} makes {}, too few to learn much; --epochs {more} or --steps {STEPS} trains more",
                    count(steps, "step")
                )
            });
            (steps, few)
        }
        Length::FromData => {
            let one = of(1.0);
            if one >= STEPS {
                return (one, None);
            }
            let epochs = (STEPS as f64 * options.batch as f64 / sampler.len() as f64).ceil();
            let hint = format!(
                "one pass over the data makes {}, too few to learn much, so the run has {epochs} passes; \
                 --epochs or --steps sets its length",
                count(one, "step")
            );
            (of(epochs), Some(hint))
        }
    }
}

/// Whether the data folders contain held-out rows.
///
/// # Errors
/// When a folder cannot be read.
pub fn brings_valid(source: &DataSource) -> Result<bool> {
    match source {
        DataSource::Embedded => Ok(true),
        DataSource::Files(paths) => data::has_split(paths, Split::Valid),
    }
}

/// The rows of a split.
///
/// # Errors
/// As [`data::load`].
pub fn load_split(
    source: &DataSource,
    split: Split,
    tokenizer: Option<&Tokenizer>,
    options: &DataOptions,
) -> Result<Dataset> {
    match source {
        DataSource::Files(paths) => data::load(paths, split, tokenizer, options),
        DataSource::Embedded => {
            let (name, text) = embedded_text(split);
            data::load_text(&name, text, Kind::Jsonl, tokenizer, options)
        }
    }
}

/// A split of the embedded data, with a name for messages.
pub fn embedded_text(split: Split) -> (String, &'static [u8]) {
    let text = match split {
        Split::Train => embedded::TRAIN_DATA,
        Split::Valid => embedded::VALID_DATA,
        Split::Test => embedded::TEST_DATA,
    };
    (format!("the embedded {}.jsonl", split.stem()), text)
}

/// The token that ends documents on this base.
///
/// # Errors
/// When neither the base nor its tokenizer names one.
pub fn end_of_text(config: &Config, tokenizer: Option<&Tokenizer>) -> Result<u32> {
    let found = tokenizer.map_or(config.eos_token, |tokenizer| tokenizer.end_of_text(config.eos_token));
    found.ok_or_else(|| {
        Error::input("--base: neither its config.json nor its tokenizer names an end-of-text token; add eos_token_id to config.json")
    })
}

/// The longest row of text on a base with `positions` positions, some of which prefix and prompt of an adapter take.
///
/// # Errors
/// When there is no room for the row, or for any.
pub fn row_limit(asked: Option<usize>, set: Option<&AdapterSet>, positions: usize) -> Result<usize> {
    let (prefix, prompt) = set.map_or((0, 0), |set| (set.prefix_len(), set.prompt_len()));
    let room = positions.saturating_sub(prefix + prompt);
    if room == 0 {
        return Err(Error::input(if prompt == 0 {
            format!(
                "--prefix-len {prefix}: leaves no position for text, the base has {positions}; give less than {positions}"
            )
        } else {
            format!(
                "the adapter's {} virtual tokens leave no position for text, the base has {positions}; give fewer than \
                 {positions}",
                prefix + prompt
            )
        }));
    }
    match asked {
        None => Ok(SEQ_LEN.min(room)),
        Some(asked) if (1..=room).contains(&asked) => Ok(asked),
        Some(asked) => {
            let taken = match (prefix, prompt) {
                (0, 0) => String::new(),
                (_, 0) => format!(", {prefix} of them taken by the prefix"),
                (0, _) => format!(", {prompt} of them taken by the prompt"),
                _ => format!(", {prefix} of them taken by the prefix and {prompt} by the prompt"),
            };
            Err(Error::input(format!(
                "--seq-len {asked}: the base has {positions} positions{taken}; give 1 to {room}"
            )))
        }
    }
}

/// Ids that `what`, a prefix or a prompt, starts from: at least one.
fn start_text(
    what: &str,
    text: Option<&str>,
    base: &Base,
    tokenizer: Option<&Tokenizer>,
    train: &Dataset,
) -> Result<Vec<u32>> {
    let ids = match (text, tokenizer) {
        (Some(text), Some(tokenizer)) => tokenizer.encode(text)?,
        (Some(_), None) => {
            return Err(Error::input(format!(
                "--{what}-text: the base has no tokenizer to read it with; leave the option out to start from the data"
            )));
        }
        (None, _) => {
            let vocab = base.config.vocab;
            train.rows.iter().next().map(|row| row.text(vocab).collect()).unwrap_or_default()
        }
    };
    if ids.is_empty() {
        return Err(Error::input(format!(
            "--{what}-text: there is no token in the text; give some text, or --{what}-init random"
        )));
    }
    Ok(ids)
}

/// The description in saves of a run, at step 0.
pub(super) fn describe(
    options: &RunOptions,
    base: &Base,
    prepared: &Prepared,
    config: PlanConfig,
) -> SaveInfo {
    let Prepared { set, train, steps, seq_len, .. } = prepared;
    let mut identity = options.identity.clone();
    // Left to the base, or to the memory plan, where nothing was typed.
    identity.insert("seq-len".to_owned(), seq_len.to_string());
    identity.extend(memory::identity(config));
    SaveInfo {
        format: FORMAT,
        step: 0,
        steps: *steps,
        options: identity,
        base: base.weights.fingerprint.clone(),
        data: train.fingerprint.clone(),
        machine: options.machine.clone(),
        spec: set.spec.clone(),
        tensors: set.layout.tensors.iter().map(|slot| format!("{} {:?}", slot.name, slot.shape)).collect(),
        optimizer: config.optimizer.name().to_owned(),
        loss_scale: None,
        progress: Default::default(),
    }
}

#[cfg(test)]
mod tests {
    use engraft_adapters::{PrefixSpec, Prompt};

    use super::*;

    /// A set with a prefix and a prompt of these lengths.
    fn taking(prefix: usize, prompt: usize) -> AdapterSet {
        let spec = AdapterSpec::from(PrefixSpec { length: prefix, projection: None });
        let base = crate::model::builtin::builtin("gpt2").unwrap().unwrap().describe("gpt2", None);
        let mut set = AdapterSet::new(&spec, &base).unwrap();
        set.prefix = set.prefix.filter(|_| prefix > 0);
        set.prompt = (prompt > 0).then_some(Prompt { length: prompt, embeddings: 0 });
        set
    }

    #[test]
    fn rows_share_the_positions_with_the_prefix_and_the_prompt() {
        let row_limit = |asked, prefix, positions| {
            let set = (prefix > 0).then(|| taking(prefix, 0));
            row_limit(asked, set.as_ref(), positions)
        };
        assert_eq!(row_limit(None, 0, 1024).unwrap(), 256);
        assert_eq!(row_limit(None, 20, 128).unwrap(), 108);
        assert_eq!(row_limit(Some(108), 20, 128).unwrap(), 108);
        let message = row_limit(Some(109), 20, 128).unwrap_err().to_string();
        assert_eq!(
            message,
            "--seq-len 109: the base has 128 positions, 20 of them taken by the prefix; give 1 to 108"
        );
        assert!(row_limit(Some(0), 0, 128).is_err());
        assert!(row_limit(None, 128, 128).unwrap_err().to_string().contains("--prefix-len 128"));
        let both = taking(20, 3);
        assert_eq!(super::row_limit(None, Some(&both), 128).unwrap(), 105);
        let message = super::row_limit(Some(106), Some(&both), 128).unwrap_err().to_string();
        assert!(
            message.contains("20 of them taken by the prefix and 3 by the prompt; give 1 to 105"),
            "{message}"
        );
        let message = super::row_limit(None, Some(&taking(1, 127)), 128).unwrap_err().to_string();
        assert!(message.contains("128 virtual tokens leave no position"), "{message}");
    }
}
