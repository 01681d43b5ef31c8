//! DoRA: a LoRA on the directions of the columns of a weight, and their lengths (Liu et al. 2024, arXiv:2402.09353).
//!
//! Initial values: those of a LoRA, and magnitudes m that are the norms of the base's columns. B = 0, so the adapter
//! starts as the base alone.

use serde::{Deserialize, Serialize};

use super::{
    Kind, Method,
    lora::{LoraSpec, files::Variant},
};
use crate::{
    AdapterSet, BaseDescription, Contribution, Error, OutputScale, Result, SiteVectors,
    init::Init,
    layout::Slots,
    peft::{Files, Findings, MODULE_PREFIX, TensorFile},
};

/// A DoRA: `y = m / n * (x W + s (x A^T) B^T) + b`, where n are the norms of the columns of `W + s A^T B^T`, which
/// are not differentiated. m `[outputs]` belongs to the whole module, also where parts of it are targets.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DoraSpec {
    /// Its deltas. Their dropout is 0: PEFT's would drop inputs of the frozen product, too.
    pub lora: LoraSpec,
}

/// DoRA among the methods that have a LoRA's files.
static DORA: Variant = Variant {
    kind: &DoraSpec::KIND,
    field: Some("use_dora"),
    wrap: |lora| DoraSpec { lora }.into(),
    drops: false,
};

impl DoraSpec {
    /// The kind `dora`.
    pub const KIND: Kind = Kind {
        name: "dora",
        peft_type: "LORA",
        claims: |fields| fields.is_true("use_dora"),
        read: |fields| DORA.stored(fields),
    };
}

impl Method for DoraSpec {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn resolve(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution> {
        let mut all = self.lora.contribution(base, slots)?;
        if all.embedding.is_some() {
            let module = base.token_embedding.clone().unwrap_or_default();
            return Err(Error::EmbeddingTarget { module, method: Self::KIND.name });
        }
        if self.lora.dropout > 0.0 {
            return Err(Error::DroppedInputs { value: self.lora.dropout, method: Self::KIND.name });
        }
        let mut modules: Vec<(usize, usize)> = all.loras.iter().map(|lora| (lora.layer, lora.site)).collect();
        modules.dedup(); // its parts follow each other
        let magnitude = |(layer, site): (usize, usize)| {
            let description = &base.sites[site];
            let name = format!("{MODULE_PREFIX}{}.lora_magnitude_vector", description.module(layer));
            let vector = slots.push_to(self.lora.vector_group(), name, &[description.outputs])?;
            let g = Some(OutputScale { vector, over_norms: true, with_bias: false });
            Ok(SiteVectors { layer, site, u: None, g, bias: None })
        };
        let vectors = modules.into_iter().map(magnitude).collect::<Result<_>>()?;
        all.extend(Contribution { vectors, ..Contribution::default() })?;
        Ok(all)
    }

    fn init(&self, set: &AdapterSet, values: &mut [f32], from: &Init) -> Result<()> {
        self.lora.init_as(&Self::KIND, set, values, from)?;
        for own in &set.vectors {
            let magnitude = own.g.map(|g| &set.layout.tensors[g.vector]);
            let Some(slot) = magnitude.filter(|slot| slot.method == Self::KIND.name) else { continue };
            let norms = from.column_norms(Self::KIND.name, own.site, own.layer)?;
            values[slot.range()].copy_from_slice(&norms);
        }
        Ok(())
    }

    fn matched(&self, set: &AdapterSet, base: &BaseDescription) -> Vec<String> {
        self.lora.matched_by(&Self::KIND, set, base)
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        self.lora.lines_of(&Self::KIND)
    }

    fn files<'a>(
        &'a self,
        set: &'a AdapterSet,
        values: &'a [f32],
        _: Option<&'a [f32]>,
        base: &BaseDescription,
    ) -> Result<Files<'a>> {
        Ok(DORA.files(&self.lora, set, values, base))
    }

    fn read(
        &self,
        set: &AdapterSet,
        base: &BaseDescription,
        tensors: &mut TensorFile,
        values: &mut [f32],
        findings: &mut Findings,
    ) -> Result<()> {
        DORA.read(set, base, tensors, values, findings)
    }
}

#[cfg(test)]
#[path = "dora_tests.rs"]
mod tests;
