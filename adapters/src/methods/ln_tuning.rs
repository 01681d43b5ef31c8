//! LN tuning: gains and biases of layer norms in place of the base's (Zhao et al. 2023, arXiv:2312.11420).
//!
//! Initial values: those of the base, so that the adapter starts as the base alone. No weight decay acts on them:
//! it would pull gains to 0, where 1 is neutral. Trainers of transformers leave norms out of it, too.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{AdapterSpec, Kind, Method, Stored};
use crate::{
    AdapterSet, BaseDescription, Contribution, Error, Group, NormDescription, NormVectors, NormWeights,
    Result, Targets,
    init::Init,
    layout::Slots,
    peft::{
        self, Fields, Files, Findings, MODULE_PREFIX, TensorFile,
        selection::{check_layers, excluded_field, targets_field},
    },
    set::layer_ranges,
    targets::{matcher, names},
};

/// Layer norms with gains and biases of their own: `gain * (x - mean) / deviation + bias`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LnTuningSpec {
    /// Layer norms that are trained: names, paths, or a regular expression for whole paths.
    pub norms: Targets,
}

impl Default for LnTuningSpec {
    fn default() -> Self {
        Self { norms: Targets::List(["ln_1", "ln_2", "ln_f"].map(str::to_owned).into()) }
    }
}

/// The optimizer's own learning rate, and no decay.
const GROUP: Group = Group { weight_decay: Some(0.0), ..Group::DEFAULT };

/// A layer norm of a base.
pub(super) struct Norm<'a> {
    /// `None` for the norm before the head.
    pub layer: Option<usize>,
    /// Which norm of the layer.
    pub norm: usize,
    pub description: &'a NormDescription,
    pub path: String,
}

/// All layer norms of a base, in the order in which a token meets them.
pub(super) fn all(base: &BaseDescription) -> Vec<Norm<'_>> {
    let (inside, last): (Vec<_>, Vec<_>) = base.norms.iter().partition(|norm| norm.is_in_layers());
    let of = |layer: Option<usize>, norm: usize, description| {
        let path = NormDescription::module(description, layer.unwrap_or_default());
        Norm { layer, norm, description, path }
    };
    let mut norms = Vec::new();
    for layer in 0..base.layers {
        norms.extend(inside.iter().enumerate().map(|(norm, &one)| of(Some(layer), norm, one)));
    }
    norms.extend(last.iter().enumerate().map(|(norm, &one)| of(None, norm, one)));
    norms
}

/// The norms that `targets`, the property `option`, choose.
///
/// # Errors
/// When a name, or all of it, matches none.
pub(super) fn chosen<'a>(
    option: &'static str,
    targets: &Targets,
    base: &'a BaseDescription,
) -> Result<Vec<Norm<'a>>> {
    let nothing = |target: &str| Error::NoNormMatched {
        option,
        target: target.to_owned(),
        norms: base.norms.iter().map(|norm| norm.name.clone()).collect(),
    };
    let mut norms = all(base);
    match targets {
        Targets::List(list) => {
            let idle = |name: &&String| !norms.iter().any(|norm| names(name, &norm.path));
            if let Some(name) = list.iter().find(idle) {
                return Err(nothing(name));
            }
        }
        Targets::AllLinear => return Err(nothing("all-linear")),
        Targets::Regex(_) => {}
    }
    let is_chosen = matcher(option, targets)?;
    norms.retain(|norm| is_chosen(&norm.path));
    if norms.is_empty() { Err(nothing(&targets.to_string())) } else { Ok(norms) }
}

/// A line per name of the norms `chosen`: `ln_1: layers 0-11`, and `ln_f`.
pub(super) fn matched(chosen: &[Norm], base: &BaseDescription) -> Vec<String> {
    let line = |description: &NormDescription| {
        let own = chosen.iter().filter(|norm| norm.description == description);
        let layers: Vec<Option<usize>> = own.map(|norm| norm.layer).collect();
        let in_layers: Vec<usize> = layers.iter().copied().flatten().collect();
        match (layers.is_empty(), in_layers.is_empty()) {
            (true, _) => None,
            (false, true) => Some(description.name.clone()),
            (false, false) => Some(format!("{}: {}", description.name, layer_ranges(&in_layers))),
        }
    };
    base.norms.iter().filter_map(line).collect()
}

impl LnTuningSpec {
    /// The kind `ln_tuning`.
    pub const KIND: Kind =
        Kind { name: "ln_tuning", peft_type: "LN_TUNING", claims: |_| true, read: StoredLnTuning::read };

    fn chosen<'a>(&self, base: &'a BaseDescription) -> Result<Vec<Norm<'a>>> {
        chosen("norms", &self.norms, base)
    }

    /// `target_modules` with which PEFT finds exactly these norms. A regular expression can match modules that are no
    /// norms, which PEFT would copy too: it goes out as names, or else as full paths.
    fn target_modules(&self, base: &BaseDescription) -> Result<Value> {
        if let Targets::List(list) = &self.norms {
            return Ok(json!(list));
        }
        let chosen = self.chosen(base)?;
        let mut short: Vec<String> = chosen.iter().map(|norm| norm.description.name.clone()).collect();
        short.sort();
        short.dedup();
        let by_name = Self { norms: Targets::List(short.clone()) };
        let same = by_name.chosen(base).is_ok_and(|found| found.len() == chosen.len());
        Ok(if same { json!(short) } else { json!(chosen.iter().map(|norm| &norm.path).collect::<Vec<_>>()) })
    }
}

impl Method for LnTuningSpec {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn resolve(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution> {
        let mut norms = Vec::new();
        for Norm { layer, norm, path, .. } in self.chosen(base)? {
            let mut push = |what: &str| {
                slots.push_to(GROUP, format!("{MODULE_PREFIX}{path}.ln_tuning_layers.{what}"), &[base.width])
            };
            let (gain, bias) = (Some(push("weight")?), Some(push("bias")?));
            norms.push(NormVectors { layer, norm, gain, bias });
        }
        Ok(Contribution { norms, ..Contribution::default() })
    }

    fn init(&self, set: &AdapterSet, values: &mut [f32], from: &Init) -> Result<()> {
        for own in &set.norms {
            let NormWeights { gain, bias } = from.norm(Self::KIND.name, own.layer, own.norm)?;
            for (tensor, start) in [(own.gain, gain), (own.bias, bias)] {
                let slot = tensor.map(|tensor| &set.layout.tensors[tensor]);
                let slot = slot.filter(|slot| slot.method == Self::KIND.name);
                slot.iter().for_each(|slot| values[slot.range()].copy_from_slice(&start));
            }
        }
        Ok(())
    }

    /// A line per name: `ln_1: layers 0-11`, and `ln_f`.
    fn matched(&self, _: &AdapterSet, base: &BaseDescription) -> Vec<String> {
        matched(&self.chosen(base).unwrap_or_default(), base)
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        vec![("kind", Self::KIND.name.to_owned()), ("norms", self.norms.to_string())]
    }

    fn files<'a>(
        &'a self,
        set: &'a AdapterSet,
        values: &'a [f32],
        _: Option<&'a [f32]>,
        base: &BaseDescription,
    ) -> Result<Files<'a>> {
        let fields = [("modules_to_save", Value::Null), ("target_modules", self.target_modules(base)?)];
        Ok(Files::plain(peft::config_text(&Self::KIND, base, fields), &Self::KIND, set, values, base))
    }
}

/// LN tuning as its config has it.
#[derive(Debug)]
struct StoredLnTuning {
    norms: Targets,
    exclude: Option<Targets>,
}

impl StoredLnTuning {
    /// PEFT chooses every norm where the config names no targets.
    fn read(fields: &mut Fields) -> Option<Box<dyn Stored>> {
        let norms = targets_field(fields).unwrap_or_else(|| LnTuningSpec::default().norms);
        Some(Box::new(Self { norms, exclude: excluded_field(fields) }))
    }

    /// The spec without what PEFT passes over: names that match nothing, as long as another does, and norms that it
    /// excludes.
    fn as_peft_matches(&self, base: &BaseDescription, findings: &mut Findings) -> Result<LnTuningSpec> {
        let mut spec = LnTuningSpec { norms: self.norms.clone() };
        if let Targets::List(list) = &mut spec.norms {
            let paths: Vec<String> = all(base).into_iter().map(|norm| norm.path).collect();
            let used = |name: &String| paths.iter().any(|path| names(name, path));
            if list.iter().any(used) {
                let idle: Vec<String> = list.extract_if(.., |name| !used(name)).collect();
                if !idle.is_empty() {
                    let idle = idle.join(", ");
                    findings.hints.push(format!("the config's {idle} applies to no layer norm of this base"));
                }
            }
        }
        if let Some(exclude) = &self.exclude {
            let is_excluded = matcher("exclude_modules", exclude)?;
            let kept = spec.chosen(base)?.into_iter().map(|norm| norm.path);
            spec.norms = Targets::List(kept.filter(|path| !is_excluded(path)).collect());
        }
        Ok(spec)
    }
}

impl Stored for StoredLnTuning {
    fn kind(&self) -> &'static Kind {
        &LnTuningSpec::KIND
    }

    fn spec(&self, _: &TensorFile) -> AdapterSpec {
        LnTuningSpec { norms: self.norms.clone() }.into()
    }

    fn fit(
        &self,
        tensors: &TensorFile,
        base: &BaseDescription,
        findings: &mut Findings,
    ) -> Option<AdapterSet> {
        let spec = self.as_peft_matches(base, findings);
        check_layers(&self.norms, None, tensors, base, findings);
        let set = findings.accept(spec.and_then(|spec| AdapterSet::new(&spec.into(), base)))?;
        findings.plain(tensors, &set);
        Some(set)
    }
}

#[cfg(test)]
#[path = "ln_tuning_tests.rs"]
mod tests;
