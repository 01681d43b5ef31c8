//! Generation: a prompt is read once, then each token is chosen from the logits of the one before.

mod choose;
pub mod options;
mod text;

use std::{sync::Arc, time::Instant};

use engraft_adapters::AdapterSet;

pub use options::GenerateOptions;

use crate::{
    data::Tokenizer,
    error::Result,
    model::{Base, Decoder, Wiring},
};

use choose::Chooser;
use text::Text;

/// Why a sample ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model said end-of-text.
    EndOfText,
    /// One of the stop texts appeared.
    Stop,
    /// The limit of new tokens or of positions was reached.
    Length,
}

impl Finish {
    /// As it stands in JSON.
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
    /// What they say, up to a stop text; `None` without a tokenizer.
    pub text: Option<String>,
    /// Why it ended.
    pub finish: Finish,
    /// New tokens over seconds; the first sample's seconds include reading the prompt.
    pub tokens_per_s: f64,
}

/// An adapter with its flat store and the factor of its LoRA.
pub type Scaled<'a> = (&'a AdapterSet, &'a [f32], f32);

/// A base with adapters, continuing prompts.
pub struct Generator<'a> {
    base: Arc<Base>,
    wiring: Wiring,
    values: Vec<f32>,
    tokenizer: Option<&'a Tokenizer>,
    end_of_text: Option<u32>,
}

impl<'a> Generator<'a> {
    /// Joins a base and any number of adapters; `tokenizer` turns ids into text.
    ///
    /// # Errors
    /// When more than one adapter brings a prefix.
    pub fn new(base: Arc<Base>, adapters: &[Scaled], tokenizer: Option<&'a Tokenizer>) -> Result<Self> {
        let sets: Vec<(&AdapterSet, f32)> = adapters.iter().map(|(set, _, factor)| (*set, *factor)).collect();
        let wiring = Wiring::new(&sets, base.config.layers)?;
        let values = adapters.iter().flat_map(|(_, values, _)| values.iter().copied()).collect();
        let end_of_text = match tokenizer {
            Some(tokenizer) => tokenizer.end_of_text(base.config.eos_token),
            None => base.config.eos_token,
        };
        Ok(Self { base, wiring, values, tokenizer, end_of_text })
    }

    /// Tokens of prompt and continuation together that fit behind the prefix.
    pub fn room(&self) -> usize {
        self.base.config.positions.saturating_sub(self.wiring.prefix_len())
    }

    /// `options.num_samples` continuations of `prompt`; sample i draws with `options.seed + i`.
    ///
    /// `stream` gets the text of each sample as it comes, and a line break behind it; nothing without
    /// a tokenizer.
    ///
    /// # Errors
    /// When the prompt is empty, too long or outside the vocabulary, or `stream` fails.
    pub fn generate(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
        stream: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<Vec<Sample>> {
        let mut start = Instant::now();
        let capacity = self.room().min(prompt.len() + options.max_new_tokens).max(prompt.len());
        let mut decoder =
            Decoder::new(Arc::clone(&self.base), self.wiring.clone(), self.values.clone(), capacity)?;
        let first = decoder.feed(prompt)?.to_vec();
        let mut samples = Vec::with_capacity(options.num_samples);
        for index in 0..options.num_samples {
            decoder.rewind(prompt.len());
            let seed = options.seed.wrapping_add(index as u64);
            let mut sample = self.sample(&mut decoder, &first, prompt, options, seed, stream)?;
            sample.tokens_per_s = sample.token_ids.len() as f64 / start.elapsed().as_secs_f64().max(1e-9);
            samples.push(sample);
            start = Instant::now();
        }
        Ok(samples)
    }

    fn sample(
        &self,
        decoder: &mut Decoder,
        first: &[f32],
        prompt: &[u32],
        options: &GenerateOptions,
        seed: u64,
        stream: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<Sample> {
        let mut chooser = Chooser::new(options, seed, self.end_of_text);
        let mut text = self.tokenizer.map(|tokenizer| Text::new(tokenizer, &options.stop));
        let mut seen = prompt.to_vec();
        let mut logits = first.to_vec();
        let finish = loop {
            let new = seen.len() - prompt.len();
            if new == options.max_new_tokens {
                break Finish::Length;
            }
            let id = chooser.choose(&mut logits, &seen, new)?;
            if Some(id) == self.end_of_text {
                break Finish::EndOfText;
            }
            seen.push(id);
            if let Some(text) = &mut text
                && text.push(id, stream)?
            {
                break Finish::Stop;
            }
            if decoder.position() == decoder.capacity() {
                break Finish::Length;
            }
            logits.copy_from_slice(decoder.feed(&[id])?);
        };
        let text = text.map(|text| text.finish(finish == Finish::Stop, stream)).transpose()?;
        Ok(Sample { token_ids: seen.split_off(prompt.len()), text, finish, tokens_per_s: 0.0 })
    }
}
