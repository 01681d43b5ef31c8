//! A conversation: one sequence whose keys and values stay in the cache from answer to answer.

use std::time::Instant;

use super::{GenerateOptions, Generator, Running, Sample};
use crate::{error::Result, model::Decoder};

/// Answers to prompts that begin alike, as the turns of a conversation do. What a prompt has in common with the text
/// before it is not read again.
pub struct Session<'g, 'a> {
    generator: &'g Generator<'a>,
    decoder: Decoder,
    /// The tokens whose keys and values are in the cache.
    read: Vec<u32>,
}

/// What was generated after a prompt of a session.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The new tokens and their text.
    pub sample: Sample,
    /// Tokens of the prompt that were in the cache.
    pub reused: usize,
}

impl<'g, 'a> Session<'g, 'a> {
    /// An empty conversation with room for as many tokens as the base has positions.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    pub fn new(generator: &'g Generator<'a>) -> Result<Self> {
        let room = generator.room();
        let base = generator.laid_out(1, room);
        let (bindings, values) = (generator.bindings.clone(), generator.values.clone());
        Ok(Self { generator, decoder: Decoder::new(base, bindings, values, 1, room)?, read: Vec::new() })
    }

    /// One continuation of `prompt`, the whole text so far; `stream` gets its text token by token and a line break.
    ///
    /// # Errors
    /// When the prompt is empty, too long or outside the vocabulary, or `stream` fails.
    pub fn answer(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        stream: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<Answer> {
        let start = Instant::now();
        // The last token is read in any case: its logits are needed.
        let common = self.read.iter().zip(prompt).take_while(|(old, new)| old == new).count();
        let reused = common.min(prompt.len().saturating_sub(1));
        self.decoder.truncate(0, reused);
        self.read.truncate(reused);
        let logits = self.decoder.feed(&prompt[reused..])?.to_vec();
        self.read.extend_from_slice(&prompt[reused..]);
        let mut running = Running::new(self.generator, options, prompt, &logits, options.seed);
        loop {
            let full = self.decoder.position() == self.decoder.capacity();
            running.advance(full, stream)?;
            let Some(&last) = running.seen.last().filter(|_| running.finish.is_none()) else { break };
            if running.is_greedy() {
                running.largest = self.decoder.feed_each_greedily(&[last])?.pop();
            } else {
                running.logits.copy_from_slice(self.decoder.feed(&[last])?);
            }
            self.read.push(last);
        }
        let seconds = start.elapsed().as_secs_f64().max(1e-9);
        Ok(Answer { sample: running.finish(true, seconds, stream)?, reused })
    }
}
