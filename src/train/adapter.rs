//! The options of the adapter, and the adapter made from them.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use engraft_adapters::{
    AdaLoraSpec, AdapterSet, AdapterSpec, BaseDescription, BaseWeights, DoraSpec, Ia3Spec, InitialFactors,
    Kind, Kinds, LnTuningSpec, LoraSpec, Prefix, PrefixSpec, PrefixValues, Prompt, PromptTuningSpec, Targets,
    TrainedBiases, VeraSpec, peft,
};
use engraft_util::rng;

use super::RunOptions;
use crate::{
    convert::foreign::{Foreign, Untold},
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

/// The initial value of a new prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptStart {
    /// The base's embeddings of this text's tokens; `None`: of the first training row.
    Text(Option<String>),
    /// The base's embeddings of random tokens.
    Vocab,
    /// Random numbers of the run's seed.
    Random,
}

/// Requested properties of the adapter. `None` leaves one to the default of its spec, or to the adapter
/// that a run starts from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdapterOptions {
    /// Kinds of methods to train, such as `lora+prefix`.
    pub kinds: Option<Kinds>,
    /// Rank r of every delta of a LoRA that no pattern names, and of a VeRA.
    pub rank: Option<usize>,
    /// Numerator of the LoRA's scale alpha / r.
    pub alpha: Option<f64>,
    /// Sites that a LoRA, VeRA and IA3 adapt.
    pub targets: Option<Targets>,
    /// Layers that a LoRA and a VeRA adapt, from 0.
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
    /// Initial values of a LoRA's A and B.
    pub init_lora_weights: Option<InitialFactors>,
    /// Dropout on the VeRA's input, in 0 .. 1. May differ from that of an adapter that a run starts from.
    pub vera_dropout: Option<f64>,
    /// Initial value of the VeRA's lambda_d.
    pub d_initial: Option<f64>,
    /// Seed of the VeRA's projections.
    pub projection_prng_key: Option<u64>,
    /// What an AdaLoRA has of its own.
    pub adalora: AdaLoraOptions,
    /// Sites whose input IA3 scales.
    pub feedforward: Option<Targets>,
    /// Layer norms that LN tuning trains.
    pub norms: Option<Targets>,
    /// Length p of the prefix in virtual tokens.
    pub prefix_length: Option<usize>,
    /// Hidden width of the prefix's projection.
    pub projection: Option<usize>,
    /// Length p of the prompt in virtual tokens.
    pub prompt_length: Option<usize>,
}

/// Requested properties of an AdaLoRA. All but the first may differ from those of an adapter that a run starts from.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdaLoraOptions {
    /// Rank of every module in the beginning.
    pub init_r: Option<usize>,
    /// Mean rank in the end.
    pub target_r: Option<usize>,
    /// First steps, in which no rank is taken away.
    pub tinit: Option<u64>,
    /// Last steps, in which ranks stay.
    pub tfinal: Option<u64>,
    /// Steps between two allocations.
    pub delta_t: Option<u64>,
    /// Decay of the mean of the importance.
    pub beta1: Option<f64>,
    /// Decay of the mean of its uncertainty.
    pub beta2: Option<f64>,
    /// Weight of the penalty on factors that are not orthogonal.
    pub orth_reg_weight: Option<f64>,
}

impl AdaLoraOptions {
    /// `spec` with what of these may differ from an adapter that a run starts from.
    fn of_a_run(&self, spec: AdaLoraSpec) -> AdaLoraSpec {
        AdaLoraSpec {
            target_r: self.target_r.unwrap_or(spec.target_r),
            tinit: self.tinit.unwrap_or(spec.tinit),
            tfinal: self.tfinal.unwrap_or(spec.tfinal),
            delta_t: self.delta_t.unwrap_or(spec.delta_t),
            beta1: self.beta1.unwrap_or(spec.beta1),
            beta2: self.beta2.unwrap_or(spec.beta2),
            orth_reg_weight: self.orth_reg_weight.unwrap_or(spec.orth_reg_weight),
            ..spec
        }
    }
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
            vera: has(VeraSpec::KIND).then(|| self.vera()),
            adalora: has(AdaLoraSpec::KIND).then(|| self.adalora()),
            ia3: has(Ia3Spec::KIND).then(|| self.ia3()),
            ln_tuning: has(LnTuningSpec::KIND).then(|| self.ln_tuning()),
            dora: has(DoraSpec::KIND).then(|| DoraSpec { lora: self.lora() }),
            prefix: has(PrefixSpec::KIND).then(|| self.prefix()),
            prompt_tuning: has(PromptTuningSpec::KIND).then(|| self.prompt_tuning()),
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
            init_lora_weights: self.init_lora_weights.unwrap_or(default.init_lora_weights),
        }
    }

    fn vera(&self) -> VeraSpec {
        let default = VeraSpec::default();
        VeraSpec {
            rank: self.rank.unwrap_or(default.rank),
            targets: self.targets.clone().unwrap_or(default.targets),
            layers: self.layers.clone().or(default.layers),
            dropout: self.vera_dropout.unwrap_or(default.dropout),
            d_initial: self.d_initial.unwrap_or(default.d_initial),
            projection_prng_key: self.projection_prng_key.unwrap_or(default.projection_prng_key),
        }
    }

    fn adalora(&self) -> AdaLoraSpec {
        let default = AdaLoraSpec::default();
        self.adalora.of_a_run(AdaLoraSpec {
            init_r: self.adalora.init_r.unwrap_or(default.init_r),
            alpha: self.alpha.unwrap_or(default.alpha),
            targets: self.targets.clone().unwrap_or_else(|| default.targets.clone()),
            layers: self.layers.clone().or_else(|| default.layers.clone()),
            dropout: self.dropout.unwrap_or(default.dropout),
            ..default
        })
    }

    fn ia3(&self) -> Ia3Spec {
        let default = Ia3Spec::default();
        Ia3Spec {
            targets: self.targets.clone().unwrap_or(default.targets),
            feedforward: self.feedforward.clone().or(default.feedforward),
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

    fn prompt_tuning(&self) -> PromptTuningSpec {
        PromptTuningSpec { length: self.prompt_length.unwrap_or(PromptTuningSpec::default().length) }
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
        let (low_rank, vera) = (spec.lora_options(), spec.vera.as_ref());
        let adalora = spec.adalora.as_ref();
        let alphas = [low_rank.map(|own| own.alpha), adalora.map(|own| own.alpha)];
        let asked = self.alpha.map(|alpha| alpha.to_string()).unwrap_or_default();
        compare("alpha", self.alpha.is_some(), asked.clone(), shared(&alphas, &asked));
        compare(
            "init-r",
            self.adalora.init_r.is_some(),
            self.adalora().init_r.to_string(),
            adalora.map(|adalora| adalora.init_r.to_string()),
        );
        let ranks = [low_rank.map(|own| own.rank), vera.map(|own| own.rank)];
        let asked = self.rank.map(|rank| rank.to_string()).unwrap_or_default();
        compare("rank", self.rank.is_some(), asked.clone(), shared(&ranks, &asked));
        let targets = [
            low_rank.map(|own| &own.targets),
            vera.map(|own| &own.targets),
            adalora.map(|own| &own.targets),
            spec.ia3.as_ref().map(|own| &own.targets),
        ];
        let asked = self.targets.as_ref().map(Targets::to_string).unwrap_or_default();
        compare("targets", self.targets.is_some(), asked.clone(), shared(&targets, &asked));
        let show = |layers: &Option<Vec<usize>>| format!("{:?}", layers.as_deref().unwrap_or_default());
        let layers = [
            low_rank.map(|own| show(&own.layers)),
            vera.map(|own| show(&own.layers)),
            adalora.map(|own| show(&own.layers)),
        ];
        let asked = show(&self.layers);
        compare("layers", self.layers.is_some(), asked.clone(), shared(&layers, &asked));
        compare(
            "d-initial",
            self.d_initial.is_some(),
            self.vera().d_initial.to_string(),
            vera.map(|vera| vera.d_initial.to_string()),
        );
        compare(
            "projection-prng-key",
            self.projection_prng_key.is_some(),
            self.vera().projection_prng_key.to_string(),
            vera.map(|vera| vera.projection_prng_key.to_string()),
        );
        compare(
            "feedforward",
            self.feedforward.is_some(),
            self.ia3().feedforward_text(),
            spec.ia3.as_ref().map(Ia3Spec::feedforward_text),
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
        compare(
            "prompt-len",
            self.prompt_length.is_some(),
            show(self.prompt_tuning().length),
            spec.prompt_tuning.as_ref().map(|prompt| show(prompt.length)),
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

/// What methods have for an option that they share, as far as it is not what is asked for.
fn shared<T: ToString>(found: &[Option<T>], asked: &str) -> Option<String> {
    let mut texts: Vec<String> = found.iter().flatten().map(T::to_string).collect();
    texts.dedup();
    if let [one] = &texts[..] {
        return Some(one.clone());
    }
    texts.retain(|text| text != asked);
    (!texts.is_empty()).then(|| texts.join(" and "))
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

/// The adapter in `dir`, or in a file of another format, to be trained further.
///
/// # Errors
/// When it cannot be read, does not fit the base, or contradicts `options`.
pub fn load(
    dir: &Path,
    options: &AdapterOptions,
    base: &BaseDescription,
    allow_base_mismatch: bool,
) -> Result<Fresh> {
    let mut loaded = match Foreign::open(dir)? {
        Some(foreign) => foreign.load(&Untold::default(), base, allow_base_mismatch)?,
        None => peft::load(dir, base, allow_base_mismatch)?,
    };
    options.check_against(&loaded.set.spec, dir)?;
    if let Some(lora) = loaded.set.spec.lora_options_mut() {
        lora.dropout = options.dropout.unwrap_or(lora.dropout);
        lora.lora_plus_ratio = options.lora_plus_ratio.unwrap_or(lora.lora_plus_ratio);
        lora.freeze_a = options.freeze_a.unwrap_or(lora.freeze_a);
        loaded.set = AdapterSet::new(&loaded.set.spec, base)?;
    }
    if let (Some(vera), Some(dropout)) = (&mut loaded.set.spec.vera, options.vera_dropout) {
        vera.dropout = dropout;
    }
    if let Some(adalora) = &mut loaded.set.spec.adalora {
        adalora.dropout = options.dropout.unwrap_or(adalora.dropout);
        *adalora = options.adalora.of_a_run(adalora.clone());
        adalora.total_step = 0; // that of the training before
    }
    // Of several methods the dropouts must be one.
    let set = AdapterSet::new(&loaded.set.spec, base)?;
    Ok(Fresh { set, values: loaded.values, hints: loaded.hints })
}

/// The values a new adapter starts from; `text` are ids of the text that a prefix or a prompt starts from.
///
/// # Errors
/// When the base cannot read the text.
pub fn initial_values(
    set: &AdapterSet,
    base: &Arc<Base>,
    options: &RunOptions,
    text: &[u32],
    stream: bool,
) -> Result<Vec<f32>> {
    let mut values = set.init_from(options.seed, Some(base.as_ref()))?;
    let slots = &set.layout.tensors;
    // A short text is read again and again.
    let repeated = |length: usize| text.iter().copied().cycle().take(length).collect::<Vec<u32>>();
    if let Some(Prefix { length, values: PrefixValues::Direct { values: tensor } }) = set.prefix {
        let place = &mut values[slots[tensor].range()];
        match options.prefix_start {
            PrefixStart::Random => {}
            PrefixStart::Zero => place.fill(0.0),
            PrefixStart::Text(_) => {
                place.copy_from_slice(&prefix_from_text(base, &repeated(length), stream)?)
            }
        }
    }
    if let Some(Prompt { length, embeddings }) = set.prompt {
        let ids = match options.prompt_start {
            PromptStart::Random => return Ok(values),
            PromptStart::Text(_) => repeated(length),
            PromptStart::Vocab => {
                let key = rng::key(&[options.seed, rng::name("tokens of a prompt")]);
                let id = |index| (rng::bits(key, index) % base.config.vocab as u64) as u32;
                (0..length as u64).map(id).collect()
            }
        };
        let rows = base.token_embeddings(&ids).ok_or_else(|| {
            Error::input(format!(
                "--prompt-text: has a token outside the {} of base {}; give another text",
                base.config.vocab, base.name
            ))
        })?;
        values[slots[embeddings].range()].copy_from_slice(&rows);
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_contradiction_is_named_at_once() {
        let options = AdapterOptions {
            kinds: Some("lora+prefix+ln_tuning+prompt_tuning".parse().unwrap()),
            rank: Some(4),
            alpha: Some(16.0),
            norms: Some("ln_f".parse().unwrap()),
            prefix_length: Some(5),
            prompt_length: Some(6),
            dropout: Some(0.5),
            ..AdapterOptions::default()
        };
        let spec = AdapterSpec::from(LoraSpec::default());
        let error = options.check_against(&spec, Path::new("x")).unwrap_err().to_string();
        assert_eq!(
            error,
            "--init-adapter x: contradicted by --method lora+ln_tuning+prefix+prompt_tuning (the adapter has lora), --rank 4 (the adapter \
             has 8), --norms ln_f (the adapter has none), --prefix-len 5 (the adapter has none), --prompt-len 6 (the adapter \
             has none); leave these options out"
        );
        assert!(AdapterOptions::default().check_against(&spec, Path::new("x")).is_ok());
        assert!(options.check_against(&options.spec(), Path::new("x")).is_ok());
    }
}
