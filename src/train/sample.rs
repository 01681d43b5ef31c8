//! Samples during training: their prompts, and the memory of the decoder that continues them.
//!
//! Generation is not below this room, so the text comes from a function that the program hands in. It makes a
//! decoder for each prompt and drops it, so that only sampling takes its memory.

use std::sync::Arc;

use engraft_adapters::AdapterSet;

use super::{RunOptions, end_of_text};
use crate::{
    data::{Dataset, NO_LOSS, RowRef, Tokenizer},
    device::{
        DType,
        arena::{Placement, TableRow},
    },
    error::{Error, Result},
    model::{AdapterBindings, Base, BaseDType, Config, Decoder, ScratchPlace, scratch::FactorTypes},
    observe::phase::Phase,
    plan::{BaseBytes, PlannedDevice, Row, by_phase},
};

/// New tokens of a sample. So few that generation makes no copy of the base for them, which no plan would count.
const NEW_TOKENS: usize = 48;
/// Tokens of a text that make a prompt.
const PROMPT: usize = 16;

/// The samples of a run.
#[derive(Debug, Clone)]
pub struct Sampling {
    /// Steps between samples.
    pub every: u64,
    /// Texts to continue; none: the beginning of the first held-out row, or else of the first training row.
    pub prompts: Vec<String>,
    /// Generates the text.
    pub continue_text: fn(&Continuation<'_>) -> Result<String>,
}

/// A prompt, and all that its continuation depends on.
pub struct Continuation<'a> {
    /// The frozen base.
    pub base: &'a Arc<Base>,
    /// The adapter.
    pub set: &'a AdapterSet,
    /// The adapter's values as they are now.
    pub values: &'a [f32],
    /// Turns ids into text.
    pub tokenizer: &'a Tokenizer,
    /// Ids of the prompt.
    pub prompt: &'a [u32],
    /// Most new tokens.
    pub most: usize,
}

/// A prompt of the samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SamplePrompt {
    pub text: String,
    pub ids: Vec<u32>,
    /// Most new tokens after it.
    pub most: usize,
}

/// What prompts are made from.
pub struct PromptSource<'a> {
    /// Config of the base.
    pub config: &'a Config,
    /// The adapter, whose virtual tokens take positions.
    pub set: &'a AdapterSet,
    /// Tokenizer of the base.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Held-out rows, or else those of the training.
    pub rows: &'a Dataset,
}

impl PromptSource<'_> {
    /// The prompts that `options` ask for.
    ///
    /// # Errors
    /// When there is no tokenizer, or a prompt leaves no position for a new token.
    pub(super) fn prompts(&self, options: &RunOptions) -> Result<Vec<SamplePrompt>> {
        let Some(sampling) = &options.sampling else { return Ok(Vec::new()) };
        let Some(tokenizer) = self.tokenizer else {
            return Err(Error::input(
                "--sample-every: the base has no tokenizer that could show a text; leave the option out",
            ));
        };
        let prompt = |text: &str, ids: Vec<u32>| {
            let taken = self.set.prefix_len() + self.set.prompt_len();
            let room = self.config.positions.saturating_sub(taken + ids.len());
            if room == 0 {
                return Err(Error::input(format!(
                    "--sample-prompt: {} tokens leave no position for a new one, the base has {}; give a shorter prompt",
                    ids.len(),
                    self.config.positions
                )));
            }
            Ok(SamplePrompt { text: text.to_owned(), ids, most: NEW_TOKENS.min(room) })
        };
        if sampling.prompts.is_empty() {
            let ids = first_prompt(self.rows, self.config.vocab);
            return Ok(vec![prompt(&tokenizer.decode(&ids)?, ids)?]);
        }
        let of_text = |text: &String| {
            let mut ids = tokenizer.encode(text)?;
            if ids.is_empty() {
                // As between documents: something begins after an end of text.
                ids.push(end_of_text(self.config, self.tokenizer)?);
            }
            prompt(text, ids)
        };
        sampling.prompts.iter().map(of_text).collect()
    }

    /// Tokens of the longest sample with its prompt; 0 without samples.
    ///
    /// # Errors
    /// As those of the prompts.
    pub fn tokens(&self, options: &RunOptions) -> Result<usize> {
        Ok(longest(&self.prompts(options)?))
    }
}

/// Tokens of the longest sample with its prompt.
pub(super) fn longest(prompts: &[SamplePrompt]) -> usize {
    prompts.iter().map(|prompt| prompt.ids.len() + prompt.most).max().unwrap_or(0)
}

/// Tokens of the longest sample with its prompt where there is no tokenizer yet: a token has a byte at least, and the
/// beginning of a row at most `row` tokens.
pub fn tokens_without_tokenizer(options: &RunOptions, row: usize, positions: usize) -> usize {
    let Some(sampling) = &options.sampling else { return 0 };
    let prompt = sampling.prompts.iter().map(|text| text.len().max(1)).max().unwrap_or(row);
    positions.min(prompt + NEW_TOKENS)
}

/// Beginning of the first row: its prompt, or a few tokens of a text.
pub(super) fn first_prompt(rows: &Dataset, vocab: usize) -> Vec<u32> {
    rows.rows.iter().next().map(|row| beginning(row, vocab)).unwrap_or_default()
}

/// The tokens up to the first supervised one; of a text, its first tokens. Ids from `vocab` on are no text.
fn beginning(row: RowRef, vocab: usize) -> Vec<u32> {
    let text = row.ids.iter().zip(row.targets).filter(|(id, _)| (**id as usize) < vocab);
    let unsupervised = text.clone().take_while(|(_, target)| **target == NO_LOSS).count();
    let len = if unsupervised == 0 { PROMPT } else { unsupervised + 1 };
    text.map(|(id, _)| *id).take(len).collect()
}

/// The decoder of the samples in a plan.
pub(super) struct PlannedSamples<'a> {
    pub config: &'a Config,
    pub set: &'a AdapterSet,
    pub device: PlannedDevice,
    /// Tokens of the longest sample with its prompt; 0 for no samples.
    pub tokens: usize,
    pub activations: DType,
    /// Type that the matrices of the base are kept in.
    pub base_dtype: BaseDType,
    /// Whether the base is streamed.
    pub stream: bool,
}

impl PlannedSamples<'_> {
    /// Those of the adapter, if there are samples.
    fn bindings(&self) -> Option<AdapterBindings> {
        AdapterBindings::new(&[(self.set, 1.0)], self.config.layers).ok().filter(|_| self.tokens > 0)
    }

    /// Rows of the plan, in memory while samples are made. A set that has no decoder is refused with the other
    /// buffers.
    pub fn rows(&self) -> Vec<Row> {
        let Some(bindings) = self.bindings() else { return Vec::new() };
        let Ok(buffers) = Decoder::plan(self.config, &bindings, self.tokens, self.activations) else {
            return Vec::new();
        };
        let bytes = |cache: bool| -> u64 {
            let of = buffers.iter().filter(|buffer| (buffer.role == "KV cache") == cache);
            of.map(TableRow::bytes).sum::<usize>() as u64
        };
        let own = self.device.own_memory();
        let memory = if own.is_some() { Placement::Memory } else { Placement::Host };
        let row = |name, bytes: u64, place| {
            let resident = by_phase(|phase| if phase == Phase::Sampling { bytes } else { 0 });
            Row::new("sampling", name, bytes, place, "sample").with_resident(resident)
        };
        // The values on their way into the decoder, and logits that are chosen from.
        let lists = 4 * (4 * bindings.store_len() + 5 * self.config.vocab) as u64 + (64 << 10);
        let mut rows = vec![
            row("keys and values", bytes(true), memory),
            row("other buffers", bytes(false), memory),
            row("logits, values, text", lists, Placement::Host),
        ];
        if let Some(own) = own.filter(|_| self.stream) {
            // Staged blocks of its own.
            let blocks = BaseBytes::on_device(self.config, self.base_dtype, own).blocks;
            rows.push(row("two blocks", 2 * blocks / self.config.layers.max(1) as u64, memory));
        }
        rows
    }

    /// Bytes of the scratch that its kernels take, which is that of training where that is more.
    pub fn scratch(&self) -> u64 {
        let place = match self.device.cores {
            Some(cores) => ScratchPlace::Threads(cores.threads, cores.arithmetic),
            None => {
                ScratchPlace::Device(FactorTypes { activations: self.activations, base: self.base_dtype })
            }
        };
        let bytes = |bindings| Decoder::scratch(self.config, &bindings, self.tokens, place) as u64;
        self.bindings().map_or(0, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_is_what_has_no_loss() {
        let (ids, starts): (Vec<u32>, _) = ((1..19).collect(), vec![0; 18]);
        let of = |targets: &[i32]| {
            let row = RowRef { ids: &ids[..targets.len()], targets, starts: &starts[..targets.len()] };
            beginning(row, 100)
        };
        assert_eq!(of(&[NO_LOSS, NO_LOSS, 4, 5]), [1, 2, 3]);
        assert_eq!(of(&[7; 18]).len(), PROMPT);
    }
}
