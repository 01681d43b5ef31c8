//! The options of sampling, which every command that makes text has.

use crate::{
    cli::common::options::{Check, FROM_ONE, from_zero, options, unless, value},
    error::{Error, Result},
    generate::GenerateOptions,
};

options! {
    /// How tokens are chosen, and when a text ends.
    SamplingArgs {}

    "Sampling" {
        /// Most new tokens per sample
        max_new_tokens: usize => value("N").otherwise("64, or 256 in chat").check(FROM_ONE).basic();
        /// No end-of-text before this many new tokens
        min_new_tokens: usize = 0 => value("N");
        /// Temperature of sampling; 0 always takes the likeliest token
        temperature: f64 = 1.0 =>
            value("T").basic().check(from_zero("give 0 for greedy, or a number such as 0.8"));
        /// Sample from the K likeliest tokens; 0 from all
        top_k: usize = 0 => value("K").basic();
        /// Sample from the likeliest tokens that together reach probability P
        top_p: f64 = 1.0 => value("P").basic().check(Check {
            refused: |&part| unless(part > 0.0 && part <= 1.0, part),
            fault: "is not above 0 and at most 1",
            remedy: "give a number such as 0.9",
        });
        /// Divide positive and multiply negative logits of earlier tokens by this number
        repetition_penalty: f64 = 1.0 => value("R").check(Check {
            refused: |penalty| unless((1e-3..=1e3).contains(penalty), penalty),
            fault: "is not between 0.001 and 1000",
            remedy: "give 1 for none, or a number such as 1.2",
        });
        /// Stop at this text, which is not printed; repeatable
        stop: Vec<String> => value("TEXT").basic().check(Check {
            refused: |texts| texts.iter().any(String::is_empty).then(|| "\"\"".to_owned()),
            fault: "every text holds the empty one",
            remedy: "give some text",
        });
        /// Seed of the samples
        seed: u64 = 0 => value("N").basic();
    }
}

impl SamplingArgs {
    /// The options of one sample, of at most `most` new tokens where the user names no number; each value is checked
    /// already.
    ///
    /// # Errors
    /// When two of them contradict each other.
    pub fn generate_options(&self, most: usize) -> Result<GenerateOptions> {
        let max_new_tokens = self.max_new_tokens.unwrap_or(most);
        if self.min_new_tokens() > max_new_tokens {
            let least = self.min_new_tokens();
            return Err(Error::input(format!(
                "--min-new-tokens {least}: is more than --max-new-tokens; give less"
            )));
        }
        Ok(GenerateOptions {
            max_new_tokens,
            min_new_tokens: self.min_new_tokens(),
            temperature: self.temperature(),
            top_k: self.top_k(),
            top_p: self.top_p(),
            repetition_penalty: self.repetition_penalty(),
            stop: self.stop.clone().unwrap_or_default(),
            seed: self.seed(),
            num_samples: 1,
            micro_batch: 1,
        })
    }
}
