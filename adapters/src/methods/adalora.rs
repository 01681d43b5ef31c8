//! AdaLoRA: low-rank deltas with a factor for each rank, of which training keeps the most important ones (Zhang et al.
//! 2023, arXiv:2303.10512).
//!
//! A module is `y = x W + b + s ((drop(x) A^T) * E) B^T`: A `[rank, inputs]` and B `[outputs, rank]` stand for the singular
//! vectors of a delta and E `[rank, 1]` for its singular values. In PEFT the scale s is `alpha / (init_r + 1e-5)`, also
//! where fewer ranks than `init_r` are left.
//!
//! Initial values: E = 0, so that the adapter starts as the base alone; A and B normal with standard deviation 0.02.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{AdapterSpec, Kind, Method, Stored};
use crate::{
    AdapterSet, BaseDescription, Contribution, Error, Lora, RankAllocation, Result, Targets, Triplets,
    init::Init,
    layout::Slots,
    peft::{
        self, Fields, Files, Findings, MODULE_PREFIX, Outgoing, TensorFile,
        modules::Module,
        selection::{Selection, check_layers, target_fields},
    },
    set::layer_ranges,
    targets::{self, Selected},
};

/// Standard deviation of the initial A and B.
const DEVIATION: f32 = 0.02;
/// What PEFT adds to the rank under alpha.
const UNDER_ALPHA: f32 = 1e-5;
/// The end of a module's key in PEFT's `rank_pattern`.
const E: &str = ".lora_E";

/// An AdaLoRA: `y = x W + b + s ((dropout(x) A^T) * E) B^T`, and how its ranks are allocated while it is trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaLoraSpec {
    /// Rank of every module in the beginning.
    pub init_r: usize,
    /// Mean rank of the modules in the end.
    pub target_r: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Modules it attaches to.
    pub targets: Targets,
    /// Layers it attaches to; `None` for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<usize>>,
    /// Probability in [0, 1) that an input element of the delta is dropped.
    pub dropout: f64,
    /// First steps, in which no rank is taken away.
    pub tinit: u64,
    /// Last steps, in which the ranks stay as they are.
    pub tfinal: u64,
    /// Steps between two allocations.
    #[serde(rename = "deltaT")]
    pub delta_t: u64,
    /// Decay of the mean of the importance.
    pub beta1: f64,
    /// Decay of the mean of its uncertainty.
    pub beta2: f64,
    /// Weight of the penalty on factors that are not orthogonal.
    pub orth_reg_weight: f64,
    /// Steps of the whole training; 0 before it is known.
    pub total_step: u64,
    /// Ranks that are left of `init_r`, by the full path of a module; other modules have all.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub ranks: BTreeMap<String, usize>,
}

impl Default for AdaLoraSpec {
    fn default() -> Self {
        Self {
            init_r: 12,
            target_r: 8,
            alpha: 16.0,
            targets: Targets::List(vec!["c_attn".to_owned()]),
            layers: None,
            dropout: 0.0,
            tinit: 0,
            tfinal: 0,
            delta_t: 1,
            beta1: 0.85,
            beta2: 0.85,
            orth_reg_weight: 0.5,
            total_step: 0,
            ranks: BTreeMap::new(),
        }
    }
}

impl AdaLoraSpec {
    /// The kind `adalora`.
    pub const KIND: Kind =
        Kind { name: "adalora", peft_type: "ADALORA", claims: |_| true, read: StoredAdaLora::read };

    /// The modules it attaches to.
    ///
    /// # Errors
    /// When a name matches nothing, a part of a module is meant, or a value is out of range.
    fn chosen(&self, base: &BaseDescription) -> Result<Vec<Selected>> {
        let wrong = |option, value: &dyn ToString, why| {
            Err(Error::Allocation { option, value: value.to_string(), why })
        };
        if self.init_r == 0 {
            return Err(Error::ZeroRank { option: "init_r".to_owned() });
        }
        if self.target_r == 0 || self.target_r > self.init_r {
            return wrong("target_r", &self.target_r, "is no rank from 1 to init_r; give one such as 8");
        }
        if !(self.alpha as f32).is_finite() {
            return Err(Error::Alpha { option: "alpha".to_owned(), value: self.alpha });
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return Err(Error::Dropout { value: self.dropout });
        }
        if self.delta_t == 0 {
            return wrong("delta_t", &self.delta_t, "is no number of steps; give one from 1");
        }
        for (option, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(beta > 0.0 && beta < 1.0) {
                return wrong(option, &beta, "is not between 0 and 1; give a number such as 0.85");
            }
        }
        if !(self.orth_reg_weight.is_finite() && self.orth_reg_weight >= 0.0) {
            return wrong(
                "orth_reg_weight",
                &self.orth_reg_weight,
                "is no number from 0; give one such as 0.5",
            );
        }
        let ends = self.tinit.checked_add(self.tfinal).is_some_and(|both| both < self.total_step);
        if self.total_step > 0 && !ends {
            let (value, why) = (
                format!("{} and tfinal {} of {} steps", self.tinit, self.tfinal, self.total_step),
                "leave no step in which ranks are taken away; give smaller ones or more steps",
            );
            return wrong("tinit", &value, why);
        }
        targets::whole_modules(&self.targets, self.layers.as_deref(), Self::KIND.name, base)
    }

    /// Rank of the module at `path`.
    fn rank(&self, path: &str) -> usize {
        self.ranks.get(path).copied().unwrap_or(self.init_r)
    }

    /// The scale of every delta. As in PEFT, an alpha that is not above 0 stands for the rank.
    fn scale(&self) -> f32 {
        let rank = self.init_r as f32;
        let alpha = if self.alpha > 0.0 { self.alpha as f32 } else { rank };
        alpha / (rank + UNDER_ALPHA)
    }
}

impl AdapterSpec {
    /// Whether a method has a schedule of its own over the steps of a training.
    pub fn depends_on_steps(&self) -> bool {
        self.adalora.is_some()
    }

    /// Tells methods with a schedule of their own how many steps a training has.
    pub fn set_steps(&mut self, steps: u64) {
        if let Some(adalora) = &mut self.adalora {
            adalora.total_step = steps;
        }
    }
}

impl Method for AdaLoraSpec {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn resolve(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution> {
        let chosen = self.chosen(base)?;
        let modules = chosen.len();
        let (mut loras, mut triplets) = (Vec::new(), Vec::new());
        for one in chosen {
            let (path, site) = (one.path(base), &base.sites[one.site]);
            let rank = self.rank(&path);
            if rank == 0 {
                continue; // nothing is left of it
            }
            let path = format!("{MODULE_PREFIX}{path}");
            let a = slots.push(format!("{path}.lora_A"), &[rank, site.inputs])?;
            let b = slots.push(format!("{path}.lora_B"), &[site.outputs, rank])?;
            let d = slots.push(format!("{path}.lora_E"), &[rank, 1])?;
            let (layer, site, columns) = (one.layer, one.site, 0..site.outputs);
            let (alpha, scale) = (self.alpha, self.scale());
            let d_of = Some(d);
            loras.push(Lora { layer, site, part: None, columns, rank, alpha, scale, a, b, d: d_of, e: None });
            triplets.push(Triplets { a, b, d });
        }
        let allocation = RankAllocation {
            triplets,
            modules,
            budget: self.target_r * modules,
            tinit: self.tinit,
            tfinal: self.tfinal,
            every: self.delta_t,
            betas: (self.beta1, self.beta2),
            penalty: self.orth_reg_weight,
            steps: self.total_step,
        };
        Ok(Contribution { loras, allocation: Some(allocation), ..Contribution::default() })
    }

    fn init(&self, set: &AdapterSet, values: &mut [f32], from: &Init) -> Result<()> {
        for lora in set.loras_of(&Self::KIND) {
            for tensor in [lora.a, lora.b] {
                let slot = &set.layout.tensors[tensor];
                from.normal(values, slot);
                values[slot.range()].iter_mut().for_each(|value| *value *= DEVIATION);
            }
        }
        Ok(())
    }

    fn dropout(&self) -> Option<f64> {
        Some(self.dropout)
    }

    /// A line per site and rank: `attn.c_attn: layers 0-11`.
    fn matched(&self, set: &AdapterSet, base: &BaseDescription) -> Vec<String> {
        let mut lines: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
        for lora in set.loras_of(&Self::KIND) {
            lines.entry((lora.site, self.init_r - lora.rank.min(self.init_r))).or_default().push(lora.layer);
        }
        let other = |less: usize| match less {
            0 => String::new(),
            less => format!(" (rank {})", self.init_r - less),
        };
        let line = |((site, less), layers): ((usize, usize), Vec<usize>)| {
            format!("{}: {}{}", base.sites[site].name, layer_ranges(&layers), other(less))
        };
        lines.into_iter().map(line).collect()
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let Self { init_r, target_r, alpha, .. } = self;
        let kind = format!("adalora, initial rank {init_r}, target rank {target_r}, alpha {alpha}");
        let mut lines = vec![("kind", kind), ("targets", self.targets.to_string())];
        if let (Some(least), Some(most)) = (self.ranks.values().min(), self.ranks.values().max()) {
            lines.push(("ranks", format!("{least} to {most} of {init_r} are left")));
        }
        lines
    }

    /// As PEFT writes it: without the triplets whose E is 0, and a `rank_pattern` that says which ones are there. An
    /// adapter that adds nothing yet is written whole.
    fn files<'a>(
        &'a self,
        set: &'a AdapterSet,
        values: &'a [f32],
        _: Option<&'a [f32]>,
        base: &BaseDescription,
    ) -> Result<Files<'a>> {
        let kept = Kept::of(set, values);
        let (mut modules, mut tensors, mut pattern) = (Vec::new(), Vec::new(), Map::new());
        let mut is_whole = true;
        for one in self.chosen(base)? {
            let (path, site) = (one.path(base), &base.sites[one.site]);
            let mut own = set.loras_of(&Self::KIND);
            let lora = own.find(|lora| (lora.layer, lora.site) == (one.layer, one.site));
            let kept = lora.map(|lora| kept.ranks(lora)).unwrap_or_default();
            let mut flags = vec![false; lora.map_or(0, |lora| lora.rank)];
            kept.iter().for_each(|&rank| flags[rank] = true);
            flags.resize(self.init_r, false);
            is_whole &= kept.len() == self.init_r;
            pattern.insert(format!("{path}{E}"), json!(flags));
            let (inputs, outputs, rank) = (site.inputs, site.outputs, kept.len());
            tensors.extend(outgoing(&path, (inputs, outputs), lora, kept, set, values));
            let (layer, site, alpha) = (one.layer, one.site, self.alpha);
            modules.push(Module { path, layer, site, inputs, outputs, rank, alpha, loras: 0..0 });
        }
        let pattern = if is_whole { Value::Null } else { Value::Object(pattern) };
        let fields = [
            ("beta1", peft::number(self.beta1)),
            ("beta2", peft::number(self.beta2)),
            ("bias", json!("none")),
            ("deltaT", json!(self.delta_t)),
            ("fan_in_fan_out", json!(base.sites.iter().any(|site| site.fan_in_fan_out))),
            ("init_lora_weights", json!(true)),
            ("init_r", json!(self.init_r)),
            ("layers_pattern", Value::Null),
            ("lora_alpha", peft::number(self.alpha)),
            ("lora_dropout", peft::number(self.dropout)),
            ("modules_to_save", Value::Null),
            ("orth_reg_weight", peft::number(self.orth_reg_weight)),
            ("rank_pattern", pattern),
            ("target_r", json!(self.target_r)),
            ("tfinal", json!(self.tfinal)),
            ("tinit", json!(self.tinit)),
            // PEFT refuses a config without a number of steps in which ranks can be taken away.
            (
                "total_step",
                json!(self.total_step.max(self.tinit.saturating_add(self.tfinal).saturating_add(1))),
            ),
        ];
        let targets = target_fields(&self.targets, self.layers.as_deref(), &modules, false, false, base);
        let config = peft::config_text(&Self::KIND, base, fields.into_iter().chain(targets));
        Ok(Files::new(config, tensors, base))
    }
}

/// The ranks that a file has.
struct Kept<'a> {
    set: &'a AdapterSet,
    values: &'a [f32],
    /// Whether every E is 0: the ranks are not allocated yet.
    all: bool,
}

impl<'a> Kept<'a> {
    fn of(set: &'a AdapterSet, values: &'a [f32]) -> Self {
        let e_of = |lora: &Lora| lora.d.map(|d| &values[set.layout.tensors[d].range()]).unwrap_or_default();
        let all = set.loras_of(&AdaLoraSpec::KIND).all(|lora| e_of(lora).iter().all(|&e| e == 0.0));
        Self { set, values, all }
    }

    /// Indices of the ranks of a delta.
    fn ranks(&self, lora: &Lora) -> Vec<usize> {
        let e = lora.d.map(|d| &self.values[self.set.layout.tensors[d].range()]).unwrap_or_default();
        (0..lora.rank).filter(|&rank| self.all || e.get(rank).is_some_and(|&e| e != 0.0)).collect()
    }
}

/// The three tensors of a module with the ranks `kept` of a delta; empty ones of a module that has none left.
fn outgoing<'a>(
    path: &str,
    (inputs, outputs): (usize, usize),
    lora: Option<&'a Lora>,
    kept: Vec<usize>,
    set: &'a AdapterSet,
    values: &'a [f32],
) -> [Outgoing<'a>; 3] {
    let rank = kept.len();
    let slot = move |index: Option<usize>| {
        index.map(|index| &values[set.layout.tensors[index].range()]).unwrap_or_default()
    };
    let (a, b, e) = (slot(lora.map(|it| it.a)), slot(lora.map(|it| it.b)), slot(lora.and_then(|it| it.d)));
    let whole = lora.map_or(1, |lora| lora.rank);
    let (of_a, of_b, of_e) = (kept.clone(), kept.clone(), kept);
    let name = |end: &str| format!("{MODULE_PREFIX}{path}.{end}");
    [
        Outgoing {
            name: name("lora_A"),
            shape: vec![rank, inputs],
            values: Box::new(move || {
                of_a.iter().flat_map(|&rank| &a[rank * inputs..(rank + 1) * inputs]).copied().collect()
            }),
        },
        Outgoing {
            name: name("lora_B"),
            shape: vec![outputs, rank],
            values: Box::new(move || {
                b.chunks(whole).flat_map(|row| of_b.iter().map(|&rank| row[rank])).collect()
            }),
        },
        Outgoing {
            name: name("lora_E"),
            shape: vec![rank, 1],
            values: Box::new(move || of_e.iter().map(|&rank| e[rank]).collect()),
        },
    ]
}

/// An AdaLoRA as its config has it.
#[derive(Debug)]
struct StoredAdaLora {
    spec: AdaLoraSpec,
    selection: Selection,
}

impl StoredAdaLora {
    fn read(fields: &mut Fields) -> Option<Box<dyn Stored>> {
        // PEFT passes over `r`, and over any way to start.
        fields.ignore(&["r", "init_lora_weights"]);
        fields.require("bias", &["none"]);
        let usual = AdaLoraSpec::default();
        let init_r = fields.need("init_r", "a whole number from 1 is expected");
        let alpha = fields.need("lora_alpha", "a number is expected");
        let selection = Selection::read(fields);
        let mut steps = |name: &str| fields.take::<u64>(name, "a number of steps is expected");
        let (tinit, tfinal, delta_t) = (steps("tinit"), steps("tfinal"), steps("deltaT"));
        let total_step = steps("total_step");
        let target_r = fields.take("target_r", "a whole number from 1 is expected");
        let dropout = fields.take("lora_dropout", "a number in [0, 1) is expected");
        let mut number = |name: &str| fields.take::<f64>(name, "a number is expected");
        let (beta1, beta2) = (number("beta1"), number("beta2"));
        let orth_reg_weight = number("orth_reg_weight");
        let pattern: Option<BTreeMap<String, Vec<bool>>> =
            fields.take("rank_pattern", "true or false for each rank of each module is expected");
        let (init_r, alpha, selection) = (init_r?, alpha?, selection?);
        let (targets, layers) = (selection.targets.clone(), selection.layers.clone());
        let mut ranks = BTreeMap::new();
        for (key, flags) in pattern.unwrap_or_default() {
            // PEFT leaves the adapter's name out of the key when it saves, and accepts one with it.
            let end = key.rfind(E).filter(|_| flags.len() == init_r);
            let Some(end) = end else {
                let expected = format!("{init_r} times true or false for the lora_E of a module is expected");
                fields.refuse("rank_pattern", &json!({ key: flags }), &expected);
                continue;
            };
            ranks.insert(key[..end].to_owned(), flags.into_iter().filter(|&kept| kept).count());
        }
        let spec = AdaLoraSpec {
            init_r,
            target_r: target_r.unwrap_or(usual.target_r),
            alpha,
            targets,
            layers,
            dropout: dropout.unwrap_or(usual.dropout),
            tinit: tinit.unwrap_or(usual.tinit),
            tfinal: tfinal.unwrap_or(usual.tfinal),
            delta_t: delta_t.unwrap_or(usual.delta_t),
            beta1: beta1.unwrap_or(usual.beta1),
            beta2: beta2.unwrap_or(usual.beta2),
            orth_reg_weight: orth_reg_weight.unwrap_or(usual.orth_reg_weight),
            total_step: total_step.unwrap_or(usual.total_step),
            ranks,
        };
        Some(Box::new(Self { spec, selection }))
    }
}

impl Stored for StoredAdaLora {
    fn kind(&self) -> &'static Kind {
        &AdaLoraSpec::KIND
    }

    fn spec(&self, _: &TensorFile) -> AdapterSpec {
        self.spec.clone().into()
    }

    fn fit(
        &self,
        tensors: &TensorFile,
        base: &BaseDescription,
        findings: &mut Findings,
    ) -> Option<AdapterSet> {
        self.selection.check_pattern(base, findings);
        let (targets, layers, idle) = self.selection.as_peft_matches(base, findings);
        if !idle.is_empty() {
            let names = idle.join(", ");
            findings.hints.push(format!("the config's {names} applies to no module of this base"));
        }
        check_layers(&targets, layers.as_deref(), tensors, base, findings);
        let spec = AdaLoraSpec { targets, layers, ..self.spec.clone() };
        let chosen = findings.accept(spec.chosen(base))?;
        let set = findings.accept(AdapterSet::new(&spec.clone().into(), base))?;
        let mut expected = Vec::new();
        let mut paths = Vec::new();
        for one in chosen {
            let (path, site) = (one.path(base), &base.sites[one.site]);
            let rank = spec.rank(&path);
            let shapes =
                [("lora_A", [rank, site.inputs]), ("lora_B", [site.outputs, rank]), ("lora_E", [rank, 1])];
            for (end, shape) in shapes {
                let name = format!("{MODULE_PREFIX}{path}.{end}");
                findings.tensor(tensors, name.clone(), &shape);
                expected.push(name);
            }
            paths.push(path);
        }
        for path in spec.ranks.keys().filter(|path| !paths.contains(path)) {
            findings.field("rank_pattern", path, "the path of a module that is adapted is expected");
        }
        findings.extras(tensors, &expected);
        Some(set)
    }
}

#[cfg(test)]
#[path = "adalora_tests.rs"]
mod tests;
