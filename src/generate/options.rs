//! Options of generation.

/// Settings of one call of generation.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// Most new tokens per sample, at least 1.
    pub max_new_tokens: usize,
    /// No end-of-text before this many new tokens.
    pub min_new_tokens: usize,
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Likeliest tokens to choose from; 0 for all.
    pub top_k: usize,
    /// Probability that the tokens to choose from reach together, in (0, 1].
    pub top_p: f64,
    /// Above 1 makes tokens seen before less likely; 1 does nothing.
    pub repetition_penalty: f64,
    /// Texts that end a sample and are not part of it.
    pub stop: Vec<String>,
    /// Seed of the first sample of the first prompt.
    pub seed: u64,
    /// Samples per prompt, at least 1.
    pub num_samples: usize,
    /// Samples made at a time, at least 1.
    pub micro_batch: usize,
}

impl GenerateOptions {
    /// Greedy decoding: one sample of up to `max_new_tokens` tokens.
    pub fn greedy(max_new_tokens: usize) -> Self {
        Self {
            max_new_tokens,
            min_new_tokens: 0,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            repetition_penalty: 1.0,
            stop: Vec::new(),
            seed: 0,
            num_samples: 1,
            micro_batch: 1,
        }
    }
}
