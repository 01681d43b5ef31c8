//! What a LoRA trains beside its deltas, in place of the base's: biases (PEFT's `bias`), and whole layer norms (PEFT's
//! `modules_to_save`). Both start from the base's. No weight decay acts on them, as in the trainer of transformers.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use super::LoraSpec;
use crate::{
    AdapterSet, BaseDescription, Contribution, Error, Group, Lora, NormVectors, NormWeights, Result,
    SiteVectors, Targets,
    init::Init,
    layout::Slots,
    methods::{Kind, ln_tuning},
    peft::MODULE_PREFIX,
};

/// Name of the property with trained norms.
pub(super) const SAVED_NORMS: &str = "saved_norms";

/// The biases that are trained beside the deltas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrainedBiases {
    /// The base's biases stay as they are.
    #[default]
    None,
    /// Those of the modules that have a delta.
    LoraOnly,
    /// Those of all linear modules and layer norms of the base.
    All,
}

impl TrainedBiases {
    const ALL: [(Self, &str); 3] = [(Self::None, "none"), (Self::LoraOnly, "lora_only"), (Self::All, "all")];

    /// Whether no bias is trained.
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }
}

impl fmt::Display for TrainedBiases {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(known, _)| known == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

impl FromStr for TrainedBiases {
    type Err = String;

    /// # Errors
    /// The remedy for an unknown name.
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|(_, name)| *name == text).map(|(found, _)| found);
        found.ok_or_else(|| "give none, lora_only or all".to_owned())
    }
}

impl LoraSpec {
    /// The vectors of linear modules and norms that are trained beside `loras`, and their tensors.
    pub(super) fn beside(
        &self,
        loras: &[Lora],
        base: &BaseDescription,
        slots: &mut Slots,
    ) -> Result<Contribution> {
        let mut all = Contribution::default();
        let group = Group { weight_decay: Some(0.0), ..self.vector_group() };
        self.add_biases(loras, base, &mut |name, len| slots.push_to(group, name, &[len]), &mut all)?;
        let Some(norms) = &self.saved_norms else { return Ok(all) };
        if self.bias == TrainedBiases::All {
            return Err(Error::NormsTwice);
        }
        for norm in ln_tuning::chosen(SAVED_NORMS, norms, base)? {
            let mut push = |what: &str| {
                slots.push_to(group, format!("{MODULE_PREFIX}{}.{what}", norm.path), &[base.width])
            };
            let (gain, bias) = (Some(push("weight")?), Some(push("bias")?));
            all.norms.push(NormVectors { layer: norm.layer, norm: norm.norm, gain, bias });
        }
        Ok(all)
    }

    /// Adds the trained biases; `push` makes a tensor of a name and a length.
    fn add_biases(
        &self,
        loras: &[Lora],
        base: &BaseDescription,
        push: &mut dyn FnMut(String, usize) -> Result<usize>,
        to: &mut Contribution,
    ) -> Result<()> {
        let everywhere = self.bias == TrainedBiases::All;
        if self.bias.is_none() {
            return Ok(());
        }
        for (layer, site) in (0..base.layers).flat_map(|layer| (0..base.sites.len()).map(move |s| (layer, s)))
        {
            let is_adapted = loras.iter().any(|lora| (lora.layer, lora.site) == (layer, site));
            if !is_adapted && !everywhere {
                continue;
            }
            let description = &base.sites[site];
            // PEFT wraps modules with a delta.
            let wrapped = if is_adapted { ".base_layer" } else { "" };
            let name = format!("{MODULE_PREFIX}{}{wrapped}.bias", description.module(layer));
            let bias = Some(push(name, description.outputs)?);
            to.vectors.push(SiteVectors { layer, site, u: None, g: None, bias });
        }
        for norm in ln_tuning::all(base).into_iter().filter(|_| everywhere) {
            let bias = Some(push(format!("{MODULE_PREFIX}{}.bias", norm.path), base.width)?);
            to.norms.push(NormVectors { layer: norm.layer, norm: norm.norm, gain: None, bias });
        }
        Ok(())
    }

    /// Writes the base's values of what a method of `kind` trains beside its deltas.
    pub(in crate::methods) fn init_beside(
        kind: &Kind,
        set: &AdapterSet,
        values: &mut [f32],
        from: &Init,
    ) -> Result<()> {
        let mut start = |tensor: Option<usize>, with: &dyn Fn() -> Result<Vec<f32>>| {
            let slot = tensor.map(|tensor| &set.layout.tensors[tensor]);
            if let Some(slot) = slot.filter(|slot| slot.method == kind.name) {
                values[slot.range()].copy_from_slice(&with()?);
            }
            Ok::<(), Error>(())
        };
        for own in &set.vectors {
            start(own.bias, &|| from.bias(kind.name, own.site, own.layer))?;
        }
        for own in &set.norms {
            let norm = || from.norm(kind.name, own.layer, own.norm);
            start(own.gain, &|| norm().map(|NormWeights { gain, .. }| gain))?;
            start(own.bias, &|| norm().map(|NormWeights { bias, .. }| bias))?;
        }
        Ok(())
    }

    /// `modules_to_save` with which PEFT trains exactly these norms; `None` without any. PEFT takes every module whose
    /// path ends with a name.
    pub(super) fn modules_to_save(&self, base: &BaseDescription) -> Option<Vec<String>> {
        let chosen = ln_tuning::chosen(SAVED_NORMS, self.saved_norms.as_ref()?, base).ok()?;
        let paths: Vec<String> = chosen.into_iter().map(|norm| norm.path).collect();
        match &self.saved_norms {
            Some(Targets::List(names)) if saved_by_peft(names, base) == paths => Some(names.clone()),
            _ => Some(paths),
        }
    }
}

/// Paths of the norms that PEFT saves for these names, in the order in which a token meets them.
pub(super) fn saved_by_peft(names: &[String], base: &BaseDescription) -> Vec<String> {
    let paths = ln_tuning::all(base).into_iter().map(|norm| norm.path);
    paths.filter(|path| names.iter().any(|name| path.ends_with(name.as_str()))).collect()
}

/// Whether PEFT finds one of the base's norms by that name, and no linear module.
pub(super) fn names_norms(name: &str, base: &BaseDescription) -> bool {
    let is_site =
        (0..base.layers).any(|layer| base.sites.iter().any(|site| site.module(layer).ends_with(name)));
    !is_site && !saved_by_peft(&[name.to_owned()], base).is_empty()
}

#[cfg(test)]
#[path = "beside_tests.rs"]
mod tests;
