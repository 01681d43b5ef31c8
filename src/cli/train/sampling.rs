//! Text for the samples of a run: training does not reach generation by itself.

use std::sync::Arc;

use crate::{
    error::Result,
    generate::{GenerateOptions, Generator},
    train::Continuation,
};

/// The likeliest text after a prompt, so that samples of different steps can be compared.
///
/// # Errors
/// When the adapter gives logits that are not finite, or memory cannot be reserved.
pub fn continue_text(asked: &Continuation<'_>) -> Result<String> {
    let adapters = [(asked.set, asked.values, 1.0)];
    let generator = Generator::new(Arc::clone(asked.base), &adapters, Some(asked.tokenizer))?;
    let samples = generator.generate(asked.prompt, &GenerateOptions::greedy(asked.most), &mut |_| Ok(()))?;
    Ok(samples.into_iter().next().and_then(|sample| sample.text).unwrap_or_default())
}
