//! The options of the adapter, and the adapter made from them.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use engraft_adapters::{
    AdapterSet, AdapterSpec, BaseDescription, DoraSpec, Kind, Kinds, LnTuningSpec, LoraSpec, PrefixSpec,
    PrefixValues, Targets, TrainedBiases, peft,
};

use crate::{
    error::{Error, Result},
    model::{Base, prefix_from_text},
};

/// The initial value of a new prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrefixStart {
    /// Keys and values that the base computes for this text; `None`: for the first training row.
    Text(Option<String>),
    /// Random numbers of the run's seed.
    Random,
    /// Zeros for all keys and values.
    Zero,
}

/// Requested properties of the adapter. `None` leaves one to the default of its spec, or to the adapter
/// that a run starts from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdapterOptions {
    /// Kinds of methods to train, such as `lora+prefix`.
    pub kinds: Option<Kinds>,
    /// Rank r of every delta that no pattern names.
    pub rank: Option<usize>,
    /// Numerator of the LoRA's scale alpha / r.
    pub alpha: Option<f64>,
    /// Sites that the LoRA adapts.
    pub targets: Option<Targets>,
    /// Layers that the LoRA adapts, from 0.
    pub layers: Option<Vec<usize>>,
    /// Dropout on the LoRA's input, in 0 .. 1. May differ from that of an adapter that a run starts from.
    pub dropout: Option<f64>,
    /// Whether the scale is alpha / sqrt(r).
    pub rslora: Option<bool>,
    /// Ranks by regular expression of the site.
    pub rank_pattern: Option<BTreeMap<String, usize>>,
    /// Alphas by regular expression of the site.
    pub alpha_pattern: Option<BTreeMap<String, f64>>,
    /// Biases that a LoRA trains.
    pub bias: Option<TrainedBiases>,
    /// Layer norms that a LoRA trains.
    pub train_norms: Option<Targets>,
    /// Factor of the learning rate of B. May differ from that of an adapter that a run starts from.
    pub lora_plus_ratio: Option<f64>,
    /// Whether A is frozen. May differ from that of an adapter that a run starts from.
    pub freeze_a: Option<bool>,
    /// Layer norms that LN tuning trains.
    pub norms: Option<Targets>,
    /// Length p of the prefix in virtual tokens.
    pub prefix_length: Option<usize>,
    /// Hidden width of the prefix's projection.
    pub projection: Option<usize>,
}

impl AdapterOptions {
    /// The kinds that are trained if nothing else is asked for: a LoRA.
    pub fn default_kinds() -> Kinds {
        Kinds::from(&LoraSpec::KIND)
    }

    /// A new adapter with these properties and defaults for the others.
    pub fn spec(&self) -> AdapterSpec {
        let kinds = self.kinds.clone().unwrap_or_else(Self::default_kinds);
        let has = |kind: Kind| kinds.contains(kind.name);
        AdapterSpec {
            lora: has(LoraSpec::KIND).then(|| self.lora()),
            ln_tuning: has(LnTuningSpec::KIND).then(|| self.ln_tuning()),
            dora: has(DoraSpec::KIND).then(|| DoraSpec { lora: self.lora() }),
            prefix: has(PrefixSpec::KIND).then(|| self.prefix()),
        }
    }

    fn lora(&self) -> LoraSpec {
        let default = LoraSpec::default();
        LoraSpec {
            rank: self.rank.unwrap_or(default.rank),
            alpha: self.alpha.unwrap_or(default.alpha),
            targets: self.targets.clone().unwrap_or(default.targets),
            layers: self.layers.clone().or(default.layers),
            dropout: self.dropout.unwrap_or(default.dropout),
            rslora: self.rslora.unwrap_or(default.rslora),
            rank_pattern: self.rank_pattern.clone().unwrap_or(default.rank_pattern),
            alpha_pattern: self.alpha_pattern.clone().unwrap_or(default.alpha_pattern),
            bias: self.bias.unwrap_or(default.bias),
            saved_norms: self.train_norms.clone().or(default.saved_norms),
            lora_plus_ratio: self.lora_plus_ratio.unwrap_or(default.lora_plus_ratio),
            freeze_a: self.freeze_a.unwrap_or(default.freeze_a),
        }
    }

    fn ln_tuning(&self) -> LnTuningSpec {
        LnTuningSpec { norms: self.norms.clone().unwrap_or(LnTuningSpec::default().norms) }
    }

    fn prefix(&self) -> PrefixSpec {
        PrefixSpec {
            length: self.prefix_length.unwrap_or(PrefixSpec::default().length),
            projection: self.projection,
        }
    }

    /// Compares the requested properties with `spec`, the adapter in the folder `dir`.
    ///
    /// # Errors
    /// One [`Error::Input`] that names every option with another value than the adapter has.
    pub fn check_against(&self, spec: &AdapterSpec, dir: &Path) -> Result<()> {
        let asked = self.lora();
        let mut wrong = Vec::new();
        let mut compare = |option: &str, given: bool, asked: String, found: Option<String>| {
            let found = found.unwrap_or_else(|| "none".to_owned());
            if given && asked != found {
                wrong.push(format!("--{option} {asked} (the adapter has {found})"));
            }
        };
        let kinds = self.kinds.clone().map(String::from).unwrap_or_default();
        compare("method", self.kinds.is_some(), kinds, Kinds::of(spec).map(String::from));
        macro_rules! lora {
            ($option:literal, $field:ident, $show:expr) => {
                let show = $show;
                compare($option, self.$field.is_some(), show(&asked), spec.lora_options().map(show));
            };
        }
        lora!("rank", rank, |lora: &LoraSpec| lora.rank.to_string());
        lora!("alpha", alpha, |lora: &LoraSpec| lora.alpha.to_string());
        lora!("targets", targets, |lora: &LoraSpec| lora.targets.to_string());
        lora!("layers", layers, |lora: &LoraSpec| format!(
            "{:?}",
            lora.layers.as_deref().unwrap_or_default()
        ));
        lora!("rslora", rslora, |lora: &LoraSpec| lora.rslora.to_string());
        lora!("rank-pattern", rank_pattern, |lora: &LoraSpec| format!("{:?}", lora.rank_pattern));
        lora!("alpha-pattern", alpha_pattern, |lora: &LoraSpec| format!("{:?}", lora.alpha_pattern));
        lora!("bias", bias, |lora: &LoraSpec| lora.bias.to_string());
        compare(
            "train-norms",
            self.train_norms.is_some(),
            asked.saved_norms.iter().map(Targets::to_string).collect(),
            spec.lora_options().and_then(|lora| lora.saved_norms.as_ref()).map(Targets::to_string),
        );
        compare(
            "norms",
            self.norms.is_some(),
            self.ln_tuning().norms.to_string(),
            spec.ln_tuning.as_ref().map(|ln_tuning| ln_tuning.norms.to_string()),
        );
        let prefix = spec.prefix.as_ref();
        let show = |length: usize| length.to_string();
        compare(
            "prefix-len",
            self.prefix_length.is_some(),
            show(self.prefix().length),
            prefix.map(|prefix| show(prefix.length)),
        );
        compare(
            "prefix-projection",
            self.projection.is_some(),
            show(self.projection.unwrap_or(0)),
            prefix.and_then(|prefix| prefix.projection).map(show),
        );
        if wrong.is_empty() {
            return Ok(());
        }
        Err(Error::input(format!(
            "--init-adapter {}: contradicted by {}; leave these options out",
            dir.display(),
            wrong.join(", ")
        )))
    }
}

/// An adapter with the values it starts from.
#[derive(Debug)]
pub struct Fresh {
    /// The adapter and the layout of its values.
    pub set: AdapterSet,
    /// Its values in the order of the layout.
    pub values: Vec<f32>,
    /// Sentences that the user should read.
    pub hints: Vec<String>,
}

/// The adapter in `dir`, to be trained further.
///
/// # Errors
/// When it cannot be read, does not fit the base, or contradicts `options`.
pub fn load(
    dir: &Path,
    options: &AdapterOptions,
    base: &BaseDescription,
    allow_base_mismatch: bool,
) -> Result<Fresh> {
    let mut loaded = peft::load(dir, base, allow_base_mismatch)?;
    options.check_against(&loaded.set.spec, dir)?;
    if let Some(lora) = loaded.set.spec.lora_options_mut() {
        lora.dropout = options.dropout.unwrap_or(lora.dropout);
        lora.lora_plus_ratio = options.lora_plus_ratio.unwrap_or(lora.lora_plus_ratio);
        lora.freeze_a = options.freeze_a.unwrap_or(lora.freeze_a);
        loaded.set = AdapterSet::new(&loaded.set.spec, base)?;
    }
    Ok(Fresh { set: loaded.set, values: loaded.values, hints: loaded.hints })
}

/// The values a new adapter starts from; `text` are ids of the text a prefix may start from.
///
/// # Errors
/// When there is no text to start from.
pub fn initial_values(
    set: &AdapterSet,
    base: &Arc<Base>,
    seed: u64,
    start: &PrefixStart,
    text: &[u32],
    stream: bool,
) -> Result<Vec<f32>> {
    let mut values = set.init_from(seed, Some(base.as_ref()))?;
    let Some(prefix) = &set.prefix else { return Ok(values) };
    let PrefixValues::Direct { values: tensor } = prefix.values else { return Ok(values) };
    let slot = &set.layout.tensors[tensor];
    let place = &mut values[slot.offset..slot.offset + slot.shape.iter().product::<usize>()];
    match start {
        PrefixStart::Random => {}
        PrefixStart::Zero => place.fill(0.0),
        PrefixStart::Text(_) if text.is_empty() => {
            return Err(Error::input(
                "--prefix-text: there is no token in the text; give some text, or --prefix-init random",
            ));
        }
        PrefixStart::Text(_) => {
            // A short text is read again and again.
            let ids: Vec<u32> = text.iter().copied().cycle().take(prefix.length).collect();
            place.copy_from_slice(&prefix_from_text(base, &ids, stream)?);
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contradiction_is_named_at_once() {
        let options = AdapterOptions {
            kinds: Some("lora+prefix+ln_tuning".parse().unwrap()),
            rank: Some(4),
            alpha: Some(16.0),
            norms: Some("ln_f".parse().unwrap()),
            prefix_length: Some(5),
            dropout: Some(0.5),
            ..AdapterOptions::default()
        };
        let spec = AdapterSpec::from(LoraSpec::default());
        let error = options.check_against(&spec, Path::new("x")).unwrap_err().to_string();
        assert_eq!(
            error,
            "--init-adapter x: contradicted by --method lora+ln_tuning+prefix (the adapter has lora), --rank 4 (the adapter \
             has 8), --norms ln_f (the adapter has none), --prefix-len 5 (the adapter has none); leave these options out"
        );
        assert!(AdapterOptions::default().check_against(&spec, Path::new("x")).is_ok());
        assert!(options.check_against(&options.spec(), Path::new("x")).is_ok());
    }
}
