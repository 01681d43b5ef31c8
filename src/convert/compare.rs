//! How far the logits of two models are apart on the same tokens.

use std::sync::Arc;

use engraft_adapters::AdapterSet;

use crate::{
    error::Result,
    model::{AdapterBindings, Base, Decoder, RowTokens},
};

/// Differences of the logits of two models, over all tokens read and the whole vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LogitDifference {
    /// Largest absolute difference.
    pub largest: f64,
    /// Mean absolute difference.
    pub mean: f64,
    /// Largest absolute logit of the first model, to judge the difference by.
    pub largest_logit: f64,
    /// Tokens after which both models find the same token the most likely.
    pub agreed: usize,
    /// Tokens of the texts that both models read.
    pub tokens: usize,
}

/// An adapter with its flat store and the factor of its deltas.
pub type Scaled<'a> = (&'a AdapterSet, &'a [f32], f32);

/// Logits of `base` with `adapters` against those of `merged` alone, after every token of `texts`, each of which
/// is read from its beginning.
///
/// # Errors
/// When adapters cannot be used together, a text is longer than the positions, or memory cannot be reserved.
pub fn compare(
    base: &Arc<Base>,
    adapters: &[Scaled],
    merged: &Arc<Base>,
    texts: &[Vec<u32>],
) -> Result<LogitDifference> {
    let sets: Vec<(&AdapterSet, f32)> = adapters.iter().map(|(set, _, factor)| (*set, *factor)).collect();
    let bindings = AdapterBindings::new(&sets, base.config.layers)?;
    let values = adapters.iter().flat_map(|(_, values, _)| values.iter().copied()).collect();
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    let mut first = Decoder::new(Arc::clone(base), bindings, values, texts.len(), longest)?;
    let none = AdapterBindings::none(merged.config.layers);
    let mut second = Decoder::new(Arc::clone(merged), none, Vec::new(), texts.len(), longest)?;
    let (mut found, mut sum, mut values) = (LogitDifference::default(), 0f64, 0u64);
    for at in 0..longest {
        let next: Vec<RowTokens> = texts
            .iter()
            .enumerate()
            .filter_map(|(row, ids)| Some(RowTokens { row, ids: ids.get(at..=at)? }))
            .collect();
        let vocab = base.config.vocab;
        let (one, other) = (first.feed_rows(&next)?, second.feed_rows(&next)?);
        for (one, other) in one.chunks_exact(vocab).zip(other.chunks_exact(vocab)) {
            for (&one, &other) in one.iter().zip(other) {
                let difference = (f64::from(one) - f64::from(other)).abs();
                sum += difference;
                found.largest = found.largest.max(difference);
                found.largest_logit = found.largest_logit.max(f64::from(one.abs()));
            }
            values += one.len() as u64;
            found.agreed += usize::from(likeliest(one) == likeliest(other));
            found.tokens += 1;
        }
    }
    found.mean = sum / values.max(1) as f64;
    Ok(found)
}

fn likeliest(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
}
