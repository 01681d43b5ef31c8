//! Generation: the prompt is processed once, then each token is chosen from the logits of the one before.

mod choose;
pub mod options;
pub mod session;
mod text;

use std::{cell::OnceCell, sync::Arc, time::Instant};

use engraft_adapters::AdapterSet;
use rayon::prelude::*;

pub use options::GenerateOptions;
pub use session::{Answer, Session};

use crate::{
    data::Tokenizer,
    device::Frozen,
    error::{Error, Result},
    model::{AdapterBindings, Base, BlockWeights, Decoder, Largest, not_finite::remedy_in_use},
    observe::machine,
};

use choose::Chooser;
use text::Text;

/// Why a sample ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model chose end-of-text.
    EndOfText,
    /// One of the stop texts appeared.
    Stop,
    /// The limit of new tokens or of positions was reached.
    Length,
}

impl Finish {
    /// Name of the reason in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::EndOfText => "end_of_text",
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// One continuation of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The new ids, without prompt and end-of-text.
    pub token_ids: Vec<u32>,
    /// Their text, up to a stop text; `None` without a tokenizer.
    pub text: Option<String>,
    /// The reason for its end.
    pub finish: Finish,
    /// New tokens over seconds; the first sample's seconds include reading the prompt.
    pub tokens_per_s: f64,
}

/// An adapter with its flat store and the factor of its LoRA.
pub type Scaled<'a> = (&'a AdapterSet, &'a [f32], f32);

/// A base with adapters, continuing prompts.
pub struct Generator<'a> {
    base: Arc<Base>,
    /// The base in the layout for many samples; made when many samples are first requested.
    settled: OnceCell<Arc<Base>>,
    bindings: AdapterBindings,
    values: Vec<f32>,
    tokenizer: Option<&'a Tokenizer>,
    end_of_text: Option<u32>,
    /// The end of the sentence about logits that are not finite.
    remedy: String,
}

impl<'a> Generator<'a> {
    /// Joins a base and any number of adapters; `tokenizer` turns ids into text.
    ///
    /// # Errors
    /// When more than one adapter brings a prefix or a prompt.
    pub fn new(base: Arc<Base>, adapters: &[Scaled], tokenizer: Option<&'a Tokenizer>) -> Result<Self> {
        let sets: Vec<(&AdapterSet, f32)> = adapters.iter().map(|(set, _, factor)| (*set, *factor)).collect();
        let bindings = AdapterBindings::new(&sets, base.config.layers)?;
        let values = adapters.iter().flat_map(|(_, values, _)| values.iter().copied()).collect();
        let end_of_text = match tokenizer {
            Some(tokenizer) => tokenizer.end_of_text(base.config.eos_token),
            None => base.config.eos_token,
        };
        let remedy = remedy_in_use(
            &sets,
            "give --adapter DIR=SCALE with a smaller SCALE, or lower lora_alpha in its adapter_config.json",
        );
        Ok(Self { base, settled: OnceCell::new(), bindings, values, tokenizer, end_of_text, remedy })
    }

    /// Tokens of prompt and continuation together that fit after the virtual tokens of prefix and prompt.
    pub fn room(&self) -> usize {
        let taken = self.bindings.prefix_len() + self.bindings.prompt_len();
        self.base.config.positions.saturating_sub(taken)
    }

    /// `options.num_samples` continuations of `prompt`; sample i draws with `options.seed + i`.
    ///
    /// `options.micro_batch` samples are made at a time. `stream` gets the text of each sample, and a line
    /// break after it: token by token if one sample is made at a time, else when all are done. Nothing
    /// without a tokenizer.
    ///
    /// # Errors
    /// When the prompt is empty, too long or outside the vocabulary, or `stream` fails.
    pub fn generate(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        stream: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<Vec<Sample>> {
        self.generate_each(prompt, options, &mut |_, piece| stream(piece))
    }

    /// As [`Generator::generate`]; `stream` also gets the number of the sample that the text belongs to.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn generate_each(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        stream: &mut dyn FnMut(usize, &str) -> Result<()>,
    ) -> Result<Vec<Sample>> {
        let mut start = Instant::now();
        let capacity = self.room().min(prompt.len().saturating_add(options.max_new_tokens)).max(prompt.len());
        let rows = options.micro_batch.clamp(1, options.num_samples.max(1));
        let (bindings, values) = (self.bindings.clone(), self.values.clone());
        let base = self.laid_out(rows, capacity - prompt.len());
        let mut decoder = Decoder::new(base, bindings, values, rows, capacity)?;
        let logits = decoder.feed(prompt)?.to_vec();
        let mut samples = Vec::new();
        for first in (0..options.num_samples).step_by(rows) {
            let count = rows.min(options.num_samples - first);
            decoder.rewind(prompt.len());
            let begin = |index: usize| {
                let seed = options.seed.wrapping_add((first + index) as u64);
                Running::new(self, options, prompt, &logits, seed)
            };
            let mut running: Vec<Running> = (0..count).map(begin).collect();
            self.run(&mut decoder, &mut running, &mut |piece| stream(first, piece))?;
            let seconds = start.elapsed().as_secs_f64().max(1e-9);
            for (index, sample) in running.into_iter().enumerate() {
                samples.push(sample.finish(count == 1, seconds, &mut |piece| stream(first + index, piece))?);
            }
            start = Instant::now();
        }
        Ok(samples)
    }

    /// The base in the fastest layout for this number of samples. Unlike pages of a file, a copy cannot be dropped
    /// when memory gets short, so it is made only if there is memory for two.
    fn laid_out(&self, rows: usize, tokens: usize) -> Arc<Base> {
        if let Some(base) = self.settled.get() {
            return Arc::clone(base);
        }
        let weights = &self.base.weights;
        let tensors = weights.blocks.iter().flat_map(BlockWeights::tensors).chain(weights.head().tensors());
        let size: usize = tensors.map(Frozen::bytes).sum();
        if machine::available().is_some_and(|free| free < 2 * size as u64) {
            return Arc::clone(&self.base);
        }
        let base = self.base.for_generation(rows, tokens);
        if !Arc::ptr_eq(&base, &self.base) {
            let _ = self.settled.set(Arc::clone(&base));
        }
        base
    }

    /// Adds tokens to all samples until each has ended.
    fn run(
        &self,
        decoder: &mut Decoder,
        running: &mut [Running],
        stream: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let vocab = self.base.config.vocab;
        decoder.fork(running.len());
        loop {
            let full = decoder.position() == decoder.capacity();
            match running {
                [alone] => alone.advance(full, stream)?,
                // Choosing reads the whole vocabulary several times, so many samples are chosen on all threads.
                _ => running
                    .par_iter_mut()
                    .filter(|sample| sample.finish.is_none())
                    .try_for_each(|sample| sample.advance(full, &mut |_| Ok(())))?,
            }
            if running.iter().all(|sample| sample.finish.is_some()) {
                return Ok(());
            }
            // A sample that has ended reads its last token again; the result is ignored.
            let last: Vec<u32> = running.iter().filter_map(|sample| sample.seen.last().copied()).collect();
            if running.iter().all(|sample| sample.finish.is_some() || sample.is_greedy()) {
                let largest = decoder.feed_each_greedily(&last)?;
                running.iter_mut().zip(largest).for_each(|(sample, largest)| sample.largest = Some(largest));
                continue;
            }
            let logits = decoder.feed_each(&last)?.par_chunks_exact(vocab);
            running
                .par_iter_mut()
                .zip(logits)
                .for_each(|(sample, logits)| sample.logits.copy_from_slice(logits));
        }
    }
}

/// A sample that is being made.
struct Running<'a> {
    options: &'a GenerateOptions,
    chooser: Chooser<'a>,
    remedy: String,
    text: Option<Text<'a>>,
    end_of_text: Option<u32>,
    /// Prompt and new tokens.
    seen: Vec<u32>,
    prompt: usize,
    logits: Vec<f32>,
    /// The largest logit, where that is all that was asked for.
    largest: Option<Largest>,
    finish: Option<Finish>,
}

impl<'a> Running<'a> {
    fn new(
        generator: &Generator<'a>,
        options: &'a GenerateOptions,
        prompt: &[u32],
        logits: &[f32],
        seed: u64,
    ) -> Self {
        Self {
            options,
            chooser: Chooser::new(options, seed, generator.end_of_text),
            remedy: generator.remedy.clone(),
            text: generator.tokenizer.map(|tokenizer| Text::new(tokenizer, &options.stop)),
            end_of_text: generator.end_of_text,
            seen: prompt.to_vec(),
            prompt: prompt.len(),
            logits: logits.to_vec(),
            largest: None,
            finish: None,
        }
    }

    /// Whether the next token follows from the largest logit alone.
    fn is_greedy(&self) -> bool {
        self.chooser.is_greedy(self.seen.len() - self.prompt)
    }

    /// The next token, the largest logit or chosen from all of them.
    fn choose(&mut self, new: usize) -> Result<u32> {
        let largest = self.largest.take();
        let logits =
            largest.as_ref().map_or(&self.logits[..], |largest| std::slice::from_ref(&largest.logit));
        if let Some(bad) = logits.iter().find(|logit| !logit.is_finite()) {
            return Err(Error::failed(format!("the model gives a logit of {bad}; {}", self.remedy)));
        }
        match largest {
            Some(largest) => Ok(largest.id),
            None => self.chooser.choose(&mut self.logits, &self.seen, new),
        }
    }

    /// Chooses the next token; `full` when no further one can be read.
    fn advance(&mut self, full: bool, show: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        let new = self.seen.len() - self.prompt;
        let id = self.choose(new)?;
        if Some(id) == self.end_of_text {
            self.finish = Some(Finish::EndOfText);
            return Ok(());
        }
        self.seen.push(id);
        let stopped = match &mut self.text {
            Some(text) => text.push(id, show)?,
            None => false,
        };
        if stopped {
            self.finish = Some(Finish::Stop);
        } else if full || new + 1 == self.options.max_new_tokens {
            self.finish = Some(Finish::Length);
        }
        Ok(())
    }

    fn finish(
        mut self,
        alone: bool,
        seconds: f64,
        show: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<Sample> {
        let finish = self.finish.unwrap_or(Finish::Length);
        if let Some(text) = self.text.as_mut().filter(|_| !alone) {
            text.show_again();
        }
        let text = self.text.map(|text| text.finish(finish == Finish::Stop, show)).transpose()?;
        let token_ids = self.seen.split_off(self.prompt);
        let tokens_per_s = token_ids.len() as f64 / seconds;
        Ok(Sample { token_ids, text, finish, tokens_per_s })
    }
}
