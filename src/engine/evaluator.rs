//! Evaluation of a base with or without an adapter, without memory for training.

use std::{borrow::Cow, sync::Arc};

use engraft_adapters::AdapterSet;

use super::trainer::{Evaluation, evaluate};
use crate::{
    data::Batch,
    device::{Buffer, arena::Arenas},
    error::Result,
    model::{
        AdapterBindings, Base, Limits, OutputScales, Policy, PrefixState, Stack, Trained,
        not_finite::remedy_in_use,
    },
};

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
