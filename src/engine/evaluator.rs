//! Evaluation of a base with or without an adapter, without memory for training.

use std::{borrow::Cow, sync::Arc};

use engraft_adapters::AdapterSet;

use crate::{
    data::Batch,
    device::{Buffer, arena::Arenas},
    error::{Error, Result},
    model::{
        AdapterBindings, Base, Limits, OutputScales, Policy, PrefixState, Stack, Trained,
        not_finite::remedy_in_use,
    },
};

/// The loss of a data set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// Mean over all supervised tokens.
    pub loss: f64,
    /// Number of supervised tokens.
    pub tokens: usize,
    /// Rows that were evaluated.
    pub rows: usize,
}

impl Evaluation {
    /// e to the mean loss.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// A base with or without an adapter, for evaluation only.
pub struct Evaluator {
    stack: Stack,
    values: Buffer,
    prefix: Option<PrefixState>,
    /// The end of the sentence about a loss that is not finite.
    remedy: String,
}

impl Evaluator {
    /// Prepares for micro-batches up to `limits`, with `head_rows` rows of logits in memory at a time.
    ///
    /// # Errors
    /// When rows are longer than the positions of the base, or memory cannot be reserved.
    pub fn new(
        base: Arc<Base>,
        adapter: Option<(&AdapterSet, &[f32])>,
        limits: Limits,
        head_rows: usize,
    ) -> Result<Self> {
        let sets: Vec<(&AdapterSet, f32)> = adapter.iter().map(|(set, _)| (*set, 1.0)).collect();
        let bindings = AdapterBindings::new(&sets, base.config.layers)?;
        let (device, activations) = (base.device, base.activations);
        let mut store = adapter.map_or(Cow::default(), |(_, values)| Cow::from(values));
        if store.len() < bindings.store_len() {
            store.to_mut().resize(bindings.store_len(), 0.0);
        }
        let mut values = Buffer::on(device, &store)?;
        let mut arenas = Arenas::real(None).on(device);
        let mut prefix = PrefixState::new(&bindings, &base.config, activations, false, &mut arenas)?;
        if let Some(prefix) = &mut prefix {
            prefix.refresh(values.view());
        }
        let policy = Policy { head_rows, activations, ..Policy::default() };
        let scales = OutputScales::new(&bindings, &mut arenas)?;
        let mut stack = Stack::new(base, bindings, limits, policy, false, &mut arenas)?;
        if let Some(mut scales) = scales {
            stack.derive(&mut scales, values.view_mut());
        }
        let remedy = remedy_in_use(&sets, "lower lora_alpha in its adapter_config.json");
        Ok(Self { stack, values, prefix, remedy })
    }

    /// Mean loss over `batches`.
    ///
    /// # Errors
    /// When a token is outside the vocabulary, nothing is supervised, or the loss is not finite.
    pub fn evaluate(&mut self, batches: &mut dyn Iterator<Item = Batch>) -> Result<Evaluation> {
        let values = self.values.view();
        let prefix = self.prefix.as_ref().map(|prefix| prefix.view(values));
        evaluate(&mut self.stack, Trained { values, prefix }, batches, || self.remedy.clone())
    }
}

/// Mean loss of `stack` over `batches`; `remedy` ends the sentence about one that is not finite.
///
/// # Errors
/// When a token is outside the vocabulary, nothing is supervised, or the loss is not finite.
pub fn evaluate(
    stack: &mut Stack,
    trained: Trained,
    batches: &mut dyn Iterator<Item = Batch>,
    remedy: impl FnOnce() -> String,
) -> Result<Evaluation> {
    let (mut sum, mut tokens, mut rows) = (0f64, 0, 0);
    for batch in batches {
        let losses = stack.loss(trained, &batch)?;
        sum += losses.sum;
        tokens += losses.tokens;
        rows += batch.rows;
    }
    if tokens == 0 {
        return Err(Error::input("the evaluation data has no supervised token; check its labels"));
    }
    let loss = sum / tokens as f64;
    if !loss.is_finite() {
        return Err(Error::failed(format!("the evaluation loss is {loss}; {}", remedy())));
    }
    Ok(Evaluation { loss, tokens, rows })
}
