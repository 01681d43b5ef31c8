//! A greedy sample of one prompt.

use crate::{
    cli::common::open::Opened,
    error::Result,
    generate::{GenerateOptions, Generator, Scaled},
};

/// The text that `adapters` on the base give after the ids of `prompt`, at most `most` tokens of it.
///
/// `None` when the base has no tokenizer, or no position left after the prompt.
///
/// # Errors
/// When the adapters do not fit the base.
pub fn greedy(
    opened: &Opened,
    adapters: &[Scaled<'_>],
    prompt: &[u32],
    most: usize,
) -> Result<Option<String>> {
    let generator = Generator::new(opened.base.clone(), adapters, opened.tokenizer.as_ref())?;
    let room = generator.room().saturating_sub(prompt.len());
    if room == 0 || opened.tokenizer.is_none() {
        return Ok(None);
    }
    let options = GenerateOptions::greedy(most.min(room));
    let samples = generator.generate(prompt, &options, &mut |_| Ok(()))?;
    Ok(samples.into_iter().next().and_then(|sample| sample.text))
}
