//! LoRA: low-rank deltas on linear modules (Hu et al. 2021, arXiv:2106.09685).
//!
//! Initial values: A ~ U(-1/sqrt(inputs), 1/sqrt(inputs)), which is `kaiming_uniform_(a=sqrt(5))`; B = 0.

use std::collections::BTreeMap;

use candle_core::Tensor;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{AdapterSpec, Kind, Method, Stored};
use crate::{
    AdapterSet, BaseDescription, Contribution, Error, Lora, Problem, Result, Targets,
    init::Init,
    layout::Slots,
    peft::{
        self, CONFIG_FILE, Fields, Files, Findings, Outgoing, TensorFile,
        modules::{Module, modules},
        selection::{Selection, check_layers, idle_keys, target_fields},
    },
    set::layer_ranges,
    targets::{self, Patterns, Selected},
};

/// Metadata of the tensor file: the spec as JSON, where parts were fused and the config cannot say so.
pub(crate) const META_SPEC: &str = "engraft.lora";
/// Initial values that leave the base's weights as they are.
const PLAIN_INITS: [&str; 4] = ["gaussian", "orthogonal", "eva", "true"];

/// A LoRA: `y = x W + b + s (dropout(x) A^T) B^T`.
///
/// The scale s is alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski 2023,
/// arXiv:2312.03732).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraSpec {
    /// Rank r of the delta; of each part's delta where parts are targets.
    pub rank: usize,
    /// Numerator alpha of the scale.
    pub alpha: f64,
    /// Modules or parts the LoRA attaches to.
    pub targets: Targets,
    /// Layers it attaches to; `None` for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<usize>>,
    /// Probability in [0, 1) that an input element of the LoRA branch is dropped.
    pub dropout: f64,
    /// Whether the scale is alpha / sqrt(rank).
    pub rslora: bool,
    /// Ranks that differ: regex on the end of the module path -> rank; the first match in key order wins.
    pub rank_pattern: BTreeMap<String, usize>,
    /// Alphas that differ, keyed like `rank_pattern`.
    pub alpha_pattern: BTreeMap<String, f64>,
}

impl Default for LoraSpec {
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 16.0,
            targets: Targets::List(vec!["c_attn".to_owned()]),
            layers: None,
            dropout: 0.0,
            rslora: false,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
        }
    }
}

impl LoraSpec {
    /// The scale of a delta with this rank and alpha.
    pub fn scale(&self, rank: usize, alpha: f64) -> f64 {
        let rank = rank as f64;
        alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}

impl LoraSpec {
    /// The kind `lora`.
    pub const KIND: Kind = Kind { name: "lora", peft_type: "LORA", claims: |_| true, read: StoredLora::read };

    /// The delta of rank `rank` and scale [`Self::scale`] on `one`, and its two tensors.
    fn push(
        &self,
        one: Selected,
        rank: usize,
        alpha: f64,
        base: &BaseDescription,
        slots: &mut Slots,
    ) -> Result<Lora> {
        let site = &base.sites[one.site];
        let part = one.part.map(|part| &site.parts[part]);
        let columns = part.map_or(0..site.outputs, |part| part.columns.clone());
        let path = format!("{}{}", peft::MODULE_PREFIX, one.path(base));
        Ok(Lora {
            layer: one.layer,
            site: one.site,
            part: part.map(|part| part.name.clone()),
            rank,
            alpha,
            scale: self.scale(rank, alpha) as f32,
            a: slots.push(format!("{path}.lora_A.weight"), &[rank, site.inputs])?,
            b: slots.push(format!("{path}.lora_B.weight"), &[columns.len(), rank])?,
            d: None,
            e: None,
            columns,
        })
    }
}

impl Method for LoraSpec {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn resolve(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution> {
        let chosen = targets::select(&self.targets, self.layers.as_deref(), base)?;
        let values = ranks_and_alphas(self, &chosen, base)?;
        let each = chosen.iter().zip(values);
        let loras = each.map(|(&one, (rank, alpha))| self.push(one, rank, alpha, base, slots));
        Ok(Contribution { loras: loras.collect::<Result<_>>()?, ..Contribution::default() })
    }

    fn init(&self, set: &AdapterSet, values: &mut [f32], from: &Init) -> Result<()> {
        for lora in set.loras_of(&Self::KIND) {
            let a = &set.layout.tensors[lora.a];
            from.uniform(values, a, a.shape[1]);
        }
        Ok(())
    }

    fn dropout(&self) -> Option<f64> {
        Some(self.dropout)
    }

    /// A line per site, part and rank: `attn.c_attn: layers 0-11`.
    fn matched(&self, set: &AdapterSet, base: &BaseDescription) -> Vec<String> {
        type Key<'a> = (usize, Option<&'a str>, usize); // site, part, rank
        let mut lines: Vec<(Key, Vec<usize>)> = Vec::new();
        for lora in set.loras_of(&Self::KIND) {
            let key = (lora.site, lora.part.as_deref(), lora.rank);
            match lines.iter_mut().find(|(known, _)| *known == key) {
                Some((_, layers)) => layers.push(lora.layer),
                None => lines.push((key, vec![lora.layer])),
            }
        }
        let line = |((site, part, rank), layers): (Key, Vec<usize>)| {
            let part = part.map(|part| format!(".{part}")).unwrap_or_default();
            let rank = if rank == self.rank { String::new() } else { format!(" (rank {rank})") };
            format!("{}{part}: {}{rank}", base.sites[site].name, layer_ranges(&layers))
        };
        lines.into_iter().map(line).collect()
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let root = if self.rslora { " / sqrt(rank)" } else { " / rank" };
        vec![
            ("kind", format!("lora, rank {}, alpha {}, scale alpha{root}", self.rank, self.alpha)),
            ("targets", self.targets.to_string()),
        ]
    }

    fn files<'a>(
        &'a self,
        set: &'a AdapterSet,
        values: &'a [f32],
        _: Option<&'a [f32]>,
        base: &BaseDescription,
    ) -> Result<Files<'a>> {
        let modules = modules(set, &Self::KIND, self.rslora, base);
        let fused = modules.iter().any(|module| module.is_fused(set));
        let config = self.config(&modules, fused, base);
        let mut tensors = Vec::new();
        for module in modules {
            let (name, shape, twin) = (module.a(), vec![module.rank, module.inputs], module.clone());
            tensors.push(Outgoing { name, shape, values: Box::new(move || twin.fuse_a(set, values)) });
            let (name, shape) = (module.b(), vec![module.outputs, module.rank]);
            tensors.push(Outgoing { name, shape, values: Box::new(move || module.fuse_b(set, values)) });
        }
        let mut files = Files::new(config, tensors, base);
        if fused {
            files.note(META_SPEC, serde_json::to_string(self).unwrap_or_default());
        }
        Ok(files)
    }

    fn read(
        &self,
        set: &AdapterSet,
        base: &BaseDescription,
        tensors: &mut TensorFile,
        values: &mut [f32],
        findings: &mut Findings,
    ) -> Result<()> {
        for module in modules(set, &Self::KIND, self.rslora, base) {
            if let Some(a) = findings.read_finite(tensors, &module.a())? {
                module.split_a(set, &a, values);
            }
            if let Some(b) = findings.read_finite(tensors, &module.b())?
                && let Some(index) = module.split_b(set, &b, values)
            {
                findings.problems.push(Problem::OutsideBlock { tensor: module.b(), index });
            }
        }
        Ok(())
    }
}

// ---- ranks and alphas ----

/// Rank and alpha of each selected module: the pattern's where a key matches, else the default.
fn ranks_and_alphas(
    lora: &LoraSpec,
    chosen: &[Selected],
    base: &BaseDescription,
) -> Result<Vec<(usize, f64)>> {
    check_values(lora)?;
    let mut ranks = Patterns::new("rank_pattern", &lora.rank_pattern)?;
    let mut alphas = Patterns::new("alpha_pattern", &lora.alpha_pattern)?;
    let found: Vec<_> = chosen
        .iter()
        .map(|&one| {
            let rank = ranks.value(one, base).unwrap_or(lora.rank);
            (rank, alphas.value(one, base).unwrap_or(lora.alpha))
        })
        .collect();
    let example = chosen.first().map(|one| one.path(base)).unwrap_or_default();
    ranks.refuse_unmatched(&example)?;
    alphas.refuse_unmatched(&example)?;
    for (pair, values) in chosen.windows(2).zip(found.windows(2)) {
        let same_module = (pair[0].layer, pair[0].site) == (pair[1].layer, pair[1].site);
        if same_module && values[0] != values[1] {
            return Err(Error::PartsDiffer { module: pair[0].module(base) });
        }
    }
    Ok(found)
}

fn check_values(lora: &LoraSpec) -> Result<()> {
    let option = |pattern: &str, key: Option<&String>| match key {
        None => pattern.to_owned(),
        Some(key) => format!("{pattern}_pattern `{key}`"),
    };
    let ranks =
        std::iter::once((None, lora.rank)).chain(lora.rank_pattern.iter().map(|(k, &v)| (Some(k), v)));
    if let Some((key, _)) = ranks.into_iter().find(|&(_, rank)| rank == 0) {
        return Err(Error::ZeroRank { option: option("rank", key) });
    }
    let alphas =
        std::iter::once((None, lora.alpha)).chain(lora.alpha_pattern.iter().map(|(k, &v)| (Some(k), v)));
    // The scale is F32: an alpha beyond its range is as good as infinite.
    if let Some((key, value)) = alphas.into_iter().find(|&(_, alpha)| !(alpha as f32).is_finite()) {
        return Err(Error::Alpha { option: option("alpha", key), value });
    }
    if !(0.0..1.0).contains(&lora.dropout) {
        return Err(Error::Dropout { value: lora.dropout });
    }
    Ok(())
}

// ---- PEFT's config ----

impl LoraSpec {
    /// The config, in fields that old versions of PEFT read too; PEFT's formulas then give our scales.
    fn config(&self, modules: &[Module], fused: bool, base: &BaseDescription) -> String {
        let fields = [
            ("bias", json!("none")),
            ("fan_in_fan_out", json!(base.sites.iter().any(|site| site.fan_in_fan_out))),
            ("init_lora_weights", json!(true)),
            ("layers_pattern", Value::Null),
            ("lora_dropout", peft::number(self.dropout)),
            ("modules_to_save", Value::Null),
            ("use_rslora", json!(self.rslora)),
        ];
        let ranks = if fused { fused_ranks(modules) } else { self.plain_ranks() };
        let targets = target_fields(&self.targets, self.layers.as_deref(), modules, fused, base);
        peft::config_text(&Self::KIND, base, fields.into_iter().chain(ranks).chain(targets))
    }

    fn plain_ranks(&self) -> [(&'static str, Value); 4] {
        let alphas: BTreeMap<_, _> =
            self.alpha_pattern.iter().map(|(key, &alpha)| (key, peft::number(alpha))).collect();
        [
            ("alpha_pattern", json!(alphas)),
            ("lora_alpha", peft::number(self.alpha)),
            ("r", json!(self.rank)),
            ("rank_pattern", json!(self.rank_pattern)),
        ]
    }
}

/// Rank and alpha of the first module, and by full path those that differ from it: how many parts a
/// module fuses may change from layer to layer.
fn fused_ranks(modules: &[Module]) -> [(&'static str, Value); 4] {
    let (rank, alpha) = modules.first().map(|first| (first.rank, first.alpha)).unwrap_or_default();
    let ranks = modules.iter().filter(|module| module.rank != rank);
    let ranks: BTreeMap<_, _> = ranks.map(|module| (&module.path, module.rank)).collect();
    let alphas = modules.iter().filter(|module| module.alpha != alpha);
    let alphas: BTreeMap<_, _> = alphas.map(|module| (&module.path, peft::number(module.alpha))).collect();
    [
        ("alpha_pattern", json!(alphas)),
        ("lora_alpha", peft::number(alpha)),
        ("r", json!(rank)),
        ("rank_pattern", json!(ranks)),
    ]
}

/// A LoRA as its config has it.
#[derive(Debug)]
struct StoredLora {
    spec: LoraSpec,
    selection: Selection,
}

impl StoredLora {
    fn read(fields: &mut Fields) -> Option<Box<dyn Stored>> {
        fields.require("bias", &["none"]);
        refuse_changed_base(fields);
        let rank = fields.need("r", "a whole number from 1 is expected");
        let alpha = fields.need("lora_alpha", "a number is expected");
        let selection = Selection::read(fields);
        let dropout = fields.take("lora_dropout", "a number in [0, 1) is expected").unwrap_or_default();
        let rslora = fields.take("use_rslora", "true or false is expected").unwrap_or_default();
        let rank_pattern =
            fields.take("rank_pattern", "whole numbers by pattern are expected").unwrap_or_default();
        let alpha_pattern =
            fields.take("alpha_pattern", "numbers by pattern are expected").unwrap_or_default();
        let (rank, alpha, selection) = (rank?, alpha?, selection?);
        let (targets, layers) = (selection.targets.clone(), selection.layers.clone());
        let spec = LoraSpec { rank, alpha, targets, layers, dropout, rslora, rank_pattern, alpha_pattern };
        Some(Box::new(Self { spec, selection }))
    }

    /// The spec without what PEFT passes over.
    fn as_peft_matches(&self, base: &BaseDescription, findings: &mut Findings) -> LoraSpec {
        let mut spec = self.spec.clone();
        let mut idle;
        (spec.targets, spec.layers, idle) = self.selection.as_peft_matches(base, findings);
        // The selection can fail here; `fit` meets the same error again and reports it.
        if let Ok(chosen) = targets::select(&spec.targets, spec.layers.as_deref(), base) {
            let used: Vec<String> = chosen.into_iter().map(|one| one.path(base)).collect();
            idle.extend(idle_keys("rank_pattern", &mut spec.rank_pattern, &used));
            idle.extend(idle_keys("alpha_pattern", &mut spec.alpha_pattern, &used));
        }
        if !idle.is_empty() {
            let names = idle.join(", ");
            findings.hints.push(format!("the config's {names} applies to no module of this base"));
        }
        spec
    }
}

/// PiSSA and its like subtract from the base what the LoRA starts with; PEFT redoes that on load.
fn refuse_changed_base(fields: &mut Fields) {
    let name = "init_lora_weights";
    let Some(value) = fields.take::<Value>(name, "") else { return };
    let plain = value.as_str().is_some_and(|text| PLAIN_INITS.contains(&text.to_lowercase().as_str()));
    if !plain && !value.is_boolean() {
        let expected = "an init that leaves the base as it is is supported (convert it to plain LoRA)";
        fields.refuse(name, &value, expected);
    }
}

impl Stored for StoredLora {
    fn kind(&self) -> &'static Kind {
        &LoraSpec::KIND
    }

    /// The spec before parts were fused, if the file contains it.
    fn spec(&self, tensors: &TensorFile) -> AdapterSpec {
        let own = tensors.metadata(META_SPEC).and_then(|text| serde_json::from_str::<LoraSpec>(text).ok());
        own.unwrap_or_else(|| self.spec.clone()).into()
    }

    fn fit(
        &self,
        tensors: &TensorFile,
        base: &BaseDescription,
        findings: &mut Findings,
    ) -> Option<AdapterSet> {
        self.selection.check_pattern(base, findings);
        let config = self.as_peft_matches(base, findings);
        let fit = |spec: &LoraSpec, findings: &mut Findings| {
            let set = AdapterSet::new(&spec.clone().into(), base);
            set.map_err(|error| findings.problems.push(Problem::Spec(error.to_string()))).ok()
        };
        let by_config = fit(&config, findings);
        let by_config = match (by_config, tensors.metadata(META_SPEC)) {
            (Some(by_config), Some(text)) => match serde_json::from_str::<LoraSpec>(text) {
                Ok(ours) => {
                    fit(&ours, findings).inspect(|ours| same_modules(&by_config, ours, base, findings))
                }
                Err(error) => {
                    findings.field(META_SPEC, error, "the LoRA as this program writes it is expected");
                    None
                }
            },
            (by_config, _) => by_config,
        };
        check_layers(&config.targets, config.layers.as_deref(), tensors, base, findings);
        let set = by_config?;
        let mut expected = Vec::new();
        for module in lora_modules(&set, base) {
            findings.tensor(tensors, module.a(), &[module.rank, module.inputs]);
            findings.tensor(tensors, module.b(), &[module.outputs, module.rank]);
            expected.extend([module.a(), module.b()]);
        }
        findings.extras(tensors, &expected);
        Some(set)
    }
}

/// The modules of a set that has a LoRA.
fn lora_modules(set: &AdapterSet, base: &BaseDescription) -> Vec<Module> {
    let root = set.spec.lora.as_ref().is_some_and(|lora| lora.rslora);
    modules(set, &LoraSpec::KIND, root, base)
}

/// The config, which PEFT goes by, and our own record of the parts must say the same.
fn same_modules(config: &AdapterSet, ours: &AdapterSet, base: &BaseDescription, findings: &mut Findings) {
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs().max(b.abs());
    let rslora = |set: &AdapterSet| set.spec.lora.as_ref().map(|lora| lora.rslora);
    let (theirs, own) = (lora_modules(config, base), lora_modules(ours, base));
    let same = theirs.len() == own.len()
        && rslora(config) == rslora(ours)
        && theirs
            .iter()
            .zip(&own)
            .all(|(a, b)| a.path == b.path && a.rank == b.rank && close(a.alpha, b.alpha));
    if !same {
        findings.field(
            CONFIG_FILE,
            "at odds with the tensor file",
            format!("its modules, ranks and alphas should be those of {META_SPEC} there"),
        );
    }
}

// ---- reference maths ----

/// `y = x W + b + s (x A^T) B^T` (Hu et al. 2021, section 4.1), without dropout.
///
/// x [.., inputs], W [inputs, outputs], b `[outputs]`, A [rank, inputs], B [outputs, rank];
/// y [.., outputs].
///
/// # Errors
/// Shapes that do not belong together.
pub fn lora_linear(
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
    a: &Tensor,
    b: &Tensor,
    scale: f64,
) -> candle_core::Result<Tensor> {
    let xa = x.broadcast_matmul(&a.t()?)?;
    let y = (x.broadcast_matmul(w)? + (xa.broadcast_matmul(&b.t()?)? * scale)?)?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// The weight that folds a LoRA into its base: `W + s (B A)^T`.
///
/// W [inputs, outputs], A [rank, inputs], B [outputs, rank].
///
/// # Errors
/// Shapes that do not belong together.
pub fn merged(w: &Tensor, a: &Tensor, b: &Tensor, scale: f64) -> candle_core::Result<Tensor> {
    w + merge_delta(a, b, scale)?
}

/// `s (B A)^T`, [inputs, outputs], from A [rank, inputs] and B [outputs, rank].
///
/// # Errors
/// Shapes that do not belong together.
pub fn merge_delta(a: &Tensor, b: &Tensor, scale: f64) -> candle_core::Result<Tensor> {
    (b.matmul(a)?.t()? * scale)?.contiguous()
}
