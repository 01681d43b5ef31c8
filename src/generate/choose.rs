//! The next token: penalties and filters in the order of Transformers, then the largest logit or a draw.
//!
//! Order: repetition penalty, no end-of-text before the minimum, temperature, top-k, top-p. candle's own
//! top-k-then-top-p compares probabilities that no longer sum to 1, so the filters are ours. A draw is
//! the one of candle's `LogitsProcessor`, token for token; it is made here because compiling
//! candle-transformers for speed would take 80 CPU seconds of every cold build.

use std::collections::HashSet;

use candle_core::{Device, Tensor};
use candle_nn::ops::softmax_last_dim;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use rand::{
    SeedableRng,
    distr::{Distribution, weighted::WeightedIndex},
    rngs::StdRng,
};

use super::GenerateOptions;
use crate::error::{Error, Result};

/// Chooses tokens for one sample.
pub struct Chooser<'a> {
    options: &'a GenerateOptions,
    largest: LogitsProcessor,
    generator: StdRng,
    end_of_text: Option<u32>,
}

impl<'a> Chooser<'a> {
    /// A chooser that draws with `seed`.
    pub fn new(options: &'a GenerateOptions, seed: u64, end_of_text: Option<u32>) -> Self {
        let largest = LogitsProcessor::from_sampling(seed, Sampling::ArgMax);
        Self { options, largest, generator: StdRng::seed_from_u64(seed), end_of_text }
    }

    /// Whether the choice after `new` tokens is the largest logit as the model gives it.
    pub fn is_greedy(&self, new: usize) -> bool {
        let waits = self.end_of_text.is_some() && new < self.options.min_new_tokens;
        self.options.temperature == 0.0 && self.options.repetition_penalty == 1.0 && !waits
    }

    /// The token after `seen`, `new` of which were generated; `logits` are finite, and are changed.
    pub fn choose(&mut self, logits: &mut [f32], seen: &[u32], new: usize) -> Result<u32> {
        let failed = |cause: candle_core::Error| Error::failed(format!("sampling failed: {cause}"));
        penalise(logits, self.options.repetition_penalty as f32, seen);
        if let Some(end) = self.end_of_text.filter(|_| new < self.options.min_new_tokens) {
            logits[end as usize] = f32::NEG_INFINITY;
        }
        if self.options.temperature > 0.0 {
            // Measured from the largest, a tiny temperature drives all others to -inf and none to NaN.
            let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let cool = |logit: f32| ((f64::from(logit) - max) / self.options.temperature) as f32;
            logits.iter_mut().for_each(|logit| *logit = cool(*logit));
            keep_top_k(logits, self.options.top_k);
            keep_top_p(logits, self.options.top_p);
        }
        let tensor = Tensor::from_slice(logits, logits.len(), &Device::Cpu).map_err(failed)?;
        if self.options.temperature == 0.0 {
            return self.largest.sample(&tensor).map_err(failed);
        }
        let probabilities: Vec<f32> =
            softmax_last_dim(&tensor).and_then(|row| row.to_vec1()).map_err(failed)?;
        let weights = WeightedIndex::new(&probabilities)
            .map_err(|cause| Error::failed(format!("sampling failed: {cause}")))?;
        Ok(weights.sample(&mut self.generator) as u32)
    }
}

/// Divides each positive logit of a token in `seen` by `penalty` and multiplies each other one, once
/// however often the token was seen (Keskar et al. 2019, as Transformers and candle read it).
fn penalise(logits: &mut [f32], penalty: f32, seen: &[u32]) {
    if penalty == 1.0 {
        return;
    }
    let tokens: HashSet<usize> = seen.iter().map(|&token| token as usize).collect();
    for token in tokens {
        if let Some(logit) = logits.get_mut(token) {
            *logit = if *logit >= 0.0 { *logit / penalty } else { *logit * penalty };
        }
    }
}

/// Hides all but the `k` largest logits (0: none); logits equal to the k-th stay, as in Transformers.
fn keep_top_k(logits: &mut [f32], k: usize) {
    if k == 0 || k >= logits.len() {
        return;
    }
    let mut sorted = logits.to_vec();
    let (_, kth, _) = sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
    let kth = *kth;
    logits.iter_mut().filter(|logit| **logit < kth).for_each(|logit| *logit = f32::NEG_INFINITY);
}

/// Hides the least likely tokens whose probabilities together stay within 1 - p (Holtzman et al. 2020);
/// the likeliest always stays.
fn keep_top_p(logits: &mut [f32], p: f64) {
    if p >= 1.0 {
        return;
    }
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let power = |logit: f32| f64::from(logit - max).exp();
    let total: f64 = logits.iter().map(|&logit| power(logit)).sum();
    let mut order: Vec<usize> = (0..logits.len()).filter(|&at| logits[at] > f32::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let mut reached = 0.0;
    for (rank, &at) in order.iter().enumerate() {
        let before = reached;
        reached += power(logits[at]) / total;
        if rank > 0 && before >= p {
            logits[at] = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> GenerateOptions {
        GenerateOptions::greedy(1)
    }

    #[test]
    fn greedy_takes_the_largest_and_penalties_come_first() {
        let plain = options();
        assert_eq!(Chooser::new(&plain, 0, Some(2)).choose(&mut [1.0, 3.0, 5.0], &[1], 0).unwrap(), 2);
        let waiting = GenerateOptions { min_new_tokens: 1, ..options() };
        assert_eq!(Chooser::new(&waiting, 0, Some(2)).choose(&mut [1.0, 3.0, 5.0], &[], 0).unwrap(), 1);
        let penalised = GenerateOptions { repetition_penalty: 4.0, ..options() };
        assert_eq!(Chooser::new(&penalised, 0, None).choose(&mut [1.0, 3.0, -5.0], &[1], 0).unwrap(), 0);
    }

    #[test]
    fn filters_keep_what_transformers_keeps() {
        let mut logits = vec![0.0, 2.0, 1.0, 2.0, -1.0];
        keep_top_k(&mut logits, 3);
        assert_eq!(logits, [f32::NEG_INFINITY, 2.0, 1.0, 2.0, f32::NEG_INFINITY]);
        // Probabilities 0.5, 0.3, 0.2 after the filter above was undone.
        let mut logits: Vec<f32> = [0.2f32, 0.5, 0.3].iter().map(|p| p.ln()).collect();
        keep_top_p(&mut logits, 0.6);
        assert_eq!(logits.map_finite(), [false, true, true]);
        let mut logits: Vec<f32> = [0.2f32, 0.5, 0.3].iter().map(|p| p.ln()).collect();
        keep_top_p(&mut logits, 0.01);
        assert_eq!(logits.map_finite(), [false, true, false]);
    }

    trait MapFinite {
        fn map_finite(&self) -> Vec<bool>;
    }
    impl MapFinite for Vec<f32> {
        fn map_finite(&self) -> Vec<bool> {
            self.iter().map(|x| x.is_finite()).collect()
        }
    }

    #[test]
    fn draws_follow_the_probabilities_and_the_seed() {
        let drawing = GenerateOptions { temperature: 0.5, ..options() };
        let logits: Vec<f32> = [0.1f32, 0.6, 0.3].iter().map(|p| p.ln() / 2.0).collect();
        let draw = |seed| Chooser::new(&drawing, seed, None).choose(&mut logits.clone(), &[], 0).unwrap();
        let mut counts = [0usize; 3];
        (0..4000).for_each(|seed| counts[draw(seed) as usize] += 1);
        assert!((counts[1] as f64 / 4000.0 - 0.6).abs() < 0.03, "{counts:?}");
        assert_eq!(draw(7), draw(7));
    }

    #[test]
    fn draws_and_penalties_are_those_of_candle() {
        let drawing = GenerateOptions { temperature: 1.0, repetition_penalty: 1.3, ..options() };
        let logits: Vec<f32> = (0..997).map(|at| ((at * 37 % 101) as f32 - 50.0) / 9.0).collect();
        let seen = [3, 5, 3, 990, 5000];
        let tensor = Tensor::from_slice(&logits, logits.len(), &Device::Cpu).unwrap();
        let theirs = candle_transformers::utils::apply_repeat_penalty(&tensor, 1.3, &seen).unwrap();
        let mut ours = logits.clone();
        penalise(&mut ours, 1.3, &seen);
        assert_eq!(ours, theirs.to_vec1::<f32>().unwrap());
        assert_ne!(ours, logits);
        let mut chooser = Chooser::new(&drawing, 11, None);
        let mut candle = LogitsProcessor::from_sampling(11, Sampling::All { temperature: 1.0 });
        // Measured from the largest, as `choose` measures them: the same bits reach both.
        let largest = ours.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let shifted: Vec<f32> = ours.iter().map(|logit| logit - largest).collect();
        let shifted = Tensor::from_slice(&shifted, ours.len(), &Device::Cpu).unwrap();
        let drawn: Vec<u32> =
            (0..200).map(|_| chooser.choose(&mut logits.clone(), &seen, 0).unwrap()).collect();
        assert!((0..200).all(|at| candle.sample(&shifted).unwrap() == drawn[at]));
        assert!(drawn.iter().any(|&token| token != drawn[0]));
    }
}
