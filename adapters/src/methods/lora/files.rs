//! The files of a LoRA, and of methods that have a LoRA's files: config and tensors, written and read.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{LoraSpec, beside};
use crate::{
    AdapterSet, AdapterSpec, BaseDescription, EmbeddingDelta, Problem, Result, Targets, TensorSlot,
    methods::{Kind, Stored, ln_tuning},
    peft::{
        self, CONFIG_FILE, Fields, Files, Findings, OneOrMany, Outgoing, TensorFile,
        modules::{Module, modules},
        selection::{Selection, check_layers, idle_keys, target_fields},
    },
    targets,
};

/// Metadata of the tensor file: the spec as JSON, where parts were fused and the config cannot say so.
pub(crate) const META_SPEC: &str = "engraft.lora";
/// Initial values that leave the base's weights as they are.
const PLAIN_INITS: [&str; 4] = ["gaussian", "orthogonal", "eva", "true"];

/// What distinguishes the methods that have these files.
#[derive(Debug)]
pub(in crate::methods) struct Variant {
    pub kind: &'static Kind,
    /// The field that is true in a config of the method alone.
    pub field: Option<&'static str>,
    /// Makes a spec of the method.
    pub wrap: fn(LoraSpec) -> AdapterSpec,
    /// Whether the method is trained with dropout.
    pub drops: bool,
}

impl Variant {
    /// The modules that the method's deltas in `set` act on.
    fn modules(&self, set: &AdapterSet, base: &BaseDescription) -> Vec<Module> {
        let root = set.spec.lora_options().is_some_and(|lora| lora.rslora);
        modules(set, self.kind, root, base)
    }

    /// The method's tensors that are no factors of deltas: the file has them as they are.
    fn others<'a>(&self, set: &'a AdapterSet) -> impl Iterator<Item = &'a TensorSlot> {
        let (kind, slots) = (self.kind.name, &set.layout.tensors);
        let is_factor = move |at: usize| set.loras.iter().any(|lora| lora.a == at || lora.b == at);
        let own = move |(at, slot): &(usize, &TensorSlot)| slot.method == kind && !is_factor(*at);
        slots.iter().enumerate().filter(own).map(|(_, slot)| slot)
    }

    /// The files of the method with `spec` in `set`.
    pub fn files<'a>(
        &self,
        spec: &LoraSpec,
        set: &'a AdapterSet,
        values: &'a [f32],
        base: &BaseDescription,
    ) -> Files<'a> {
        let modules = self.modules(set, base);
        let fused = modules.iter().any(|module| module.is_fused(set));
        let own = |delta: &&EmbeddingDelta| set.layout.tensors[delta.b].method == self.kind.name;
        let embedding = set.embedding.as_ref().filter(own).and(base.token_embedding.as_deref());
        let config = self.config(spec, &Adapted { modules: &modules, fused, embedding }, base);
        let mut tensors = Vec::new();
        for module in modules {
            let (name, shape, twin) = (module.a(), vec![module.rank, module.inputs], module.clone());
            tensors.push(Outgoing { name, shape, values: Box::new(move || twin.fuse_a(set, values)) });
            let (name, shape) = (module.b(), vec![module.outputs, module.rank]);
            tensors.push(Outgoing { name, shape, values: Box::new(move || module.fuse_b(set, values)) });
        }
        tensors.extend(self.others(set).map(|slot| Outgoing::plain(slot, values)));
        let mut files = Files::new(config, tensors, base);
        if fused {
            let init_lora_weights =
                Some(spec.init_lora_weights).filter(|init| init.has_copies()).unwrap_or_default();
            let finished =
                LoraSpec { lora_plus_ratio: 1.0, freeze_a: false, init_lora_weights, ..spec.clone() };
            files.note(META_SPEC, serde_json::to_string(&finished).unwrap_or_default());
        }
        files
    }

    /// Reads the method's values into the flat store of `set`.
    pub fn read(
        &self,
        set: &AdapterSet,
        base: &BaseDescription,
        tensors: &mut TensorFile,
        values: &mut [f32],
        findings: &mut Findings,
    ) -> Result<()> {
        for module in self.modules(set, base) {
            if let Some(a) = findings.read_finite(tensors, &module.a())? {
                module.split_a(set, &a, values);
            }
            if let Some(b) = findings.read_finite(tensors, &module.b())?
                && let Some(index) = module.split_b(set, &b, values)
            {
                findings.problems.push(Problem::OutsideBlock { tensor: module.b(), index });
            }
        }
        for slot in self.others(set) {
            if let Some(found) = findings.read_finite(tensors, &slot.name)? {
                values[slot.range()].copy_from_slice(&found);
            }
        }
        Ok(())
    }

    /// The config, in fields that old versions of PEFT read too; PEFT's formulas then give our scales.
    fn config(&self, spec: &LoraSpec, adapted: &Adapted, base: &BaseDescription) -> String {
        let &Adapted { modules, fused, embedding } = adapted;
        let fields = [
            ("bias", json!(spec.bias)),
            ("fan_in_fan_out", json!(base.sites.iter().any(|site| site.fan_in_fan_out))),
            ("init_lora_weights", json!(true)),
            ("layers_pattern", Value::Null),
            ("lora_dropout", peft::number(spec.dropout)),
            ("modules_to_save", json!(spec.modules_to_save(base))),
            ("use_rslora", json!(spec.rslora)),
        ];
        let ranks = if fused { fused_ranks(spec, modules, embedding) } else { plain_ranks(spec) };
        let (targets, layers) = (&spec.targets, spec.layers.as_deref());
        let targets = target_fields(targets, layers, modules, fused, embedding.is_some(), base);
        let own = self.field.map(|field| (field, json!(true)));
        peft::config_text(self.kind, base, fields.into_iter().chain(own).chain(ranks).chain(targets))
    }

    /// Takes the method's fields out of a config.
    pub fn stored(&'static self, fields: &mut Fields) -> Option<Box<dyn Stored>> {
        if let Some(field) = self.field {
            fields.take::<bool>(field, "true or false is expected");
        }
        StoredLora::read(self, fields)
    }
}

/// What the deltas of a LoRA act on.
struct Adapted<'a> {
    modules: &'a [Module],
    /// Whether a module has several deltas, or one on a part of it.
    fused: bool,
    /// Path of the embedding of tokens, where there is a delta on it.
    embedding: Option<&'a str>,
}

// ---- ranks and alphas ----

fn plain_ranks(spec: &LoraSpec) -> [(&'static str, Value); 4] {
    let alphas: BTreeMap<_, _> =
        spec.alpha_pattern.iter().map(|(key, &alpha)| (key, peft::number(alpha))).collect();
    [
        ("alpha_pattern", json!(alphas)),
        ("lora_alpha", peft::number(spec.alpha)),
        ("r", json!(spec.rank)),
        ("rank_pattern", json!(spec.rank_pattern)),
    ]
}

/// Rank and alpha of the first module, and by full path those that differ from it: how many parts a
/// module fuses may change from layer to layer, and the embedding has none.
fn fused_ranks(spec: &LoraSpec, modules: &[Module], embedding: Option<&str>) -> [(&'static str, Value); 4] {
    let mut all: Vec<(&str, usize, f64)> =
        modules.iter().map(|module| (module.path.as_str(), module.rank, module.alpha)).collect();
    // The patterns were compiled before.
    let value = embedding.and_then(|path| Some((path, spec.rank_and_alpha(path).ok()?)));
    all.extend(value.map(|(path, (rank, alpha))| (path, rank, alpha)));
    let (rank, alpha) = all.first().map(|&(_, rank, alpha)| (rank, alpha)).unwrap_or_default();
    let ranks: BTreeMap<_, _> =
        all.iter().filter(|own| own.1 != rank).map(|&(path, rank, _)| (path, rank)).collect();
    let alphas = all.iter().filter(|own| own.2 != alpha);
    let alphas: BTreeMap<_, _> = alphas.map(|&(path, _, alpha)| (path, peft::number(alpha))).collect();
    [
        ("alpha_pattern", json!(alphas)),
        ("lora_alpha", peft::number(alpha)),
        ("r", json!(rank)),
        ("rank_pattern", json!(ranks)),
    ]
}

// ---- reading ----

impl LoraSpec {
    /// Takes the fields that say what a LoRA computes; nothing when one that it needs is missing or wrong.
    pub(crate) fn read(fields: &mut Fields) -> Option<(Self, Selection)> {
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
        let spec = Self {
            rank,
            alpha,
            targets,
            layers,
            dropout,
            rslora,
            rank_pattern,
            alpha_pattern,
            ..Self::default()
        };
        Some((spec, selection))
    }
}

/// A LoRA, or a method with its files, as the config has it.
#[derive(Debug)]
struct StoredLora {
    variant: &'static Variant,
    spec: LoraSpec,
    selection: Selection,
    /// The field `modules_to_save`.
    saved: Vec<String>,
}

impl StoredLora {
    fn read(variant: &'static Variant, fields: &mut Fields) -> Option<Box<dyn Stored>> {
        let bias = fields.take("bias", "none, lora_only or all is expected").unwrap_or_default();
        let saved = fields.take::<OneOrMany<String>>("modules_to_save", "names are expected");
        let mut saved = saved.map(OneOrMany::into_vec).unwrap_or_default();
        saved.sort(); // PEFT writes them out of a set
        let (spec, selection) = LoraSpec::read(fields)?;
        let saved_norms = (!saved.is_empty()).then(|| Targets::List(saved.clone()));
        let spec = LoraSpec { bias, saved_norms, ..spec };
        Some(Box::new(Self { variant, spec, selection, saved }))
    }

    /// The spec without what PEFT passes over.
    fn as_peft_matches(&self, base: &BaseDescription, findings: &mut Findings) -> LoraSpec {
        let mut spec = self.spec.clone();
        let mut idle;
        (spec.targets, spec.layers, idle) = self.selection.as_peft_matches(base, findings);
        // The selection can fail here; `fit` meets the same error again and reports it.
        if let Ok(chosen) = targets::select_with_embedding(&spec.targets, spec.layers.as_deref(), base) {
            let embedding = base.token_embedding.clone().filter(|_| chosen.embedding);
            let used = chosen.modules.into_iter().map(|one| one.path(base)).chain(embedding);
            let used: Vec<String> = used.collect();
            idle.extend(idle_keys("rank_pattern", &mut spec.rank_pattern, &used));
            idle.extend(idle_keys("alpha_pattern", &mut spec.alpha_pattern, &used));
        }
        if !idle.is_empty() {
            let names = idle.join(", ");
            findings.hints.push(format!("the config's {names} applies to no module of this base"));
        }
        for name in self.saved.iter().filter(|name| !beside::names_norms(name, base)) {
            findings.field("modules_to_save", format!("{name:?}"), "layer norms alone are supported");
        }
        if let Some(Targets::List(names)) = &mut spec.saved_norms {
            let by_name = ln_tuning::chosen(beside::SAVED_NORMS, &Targets::List(names.clone()), base);
            let by_name: Vec<String> = by_name.into_iter().flatten().map(|norm| norm.path).collect();
            let by_end = beside::saved_by_peft(names, base);
            if by_name != by_end {
                *names = by_end;
            }
        }
        spec.saved_norms = spec.saved_norms.filter(|norms| *norms != Targets::List(Vec::new()));
        // A finished adapter does not depend on it.
        if !self.variant.drops && spec.dropout != 0.0 {
            let (name, dropout) = (self.variant.kind.name, spec.dropout);
            findings.hints.push(format!(
                "the config's lora_dropout {dropout} is left out: {name} is trained without dropout"
            ));
            spec.dropout = 0.0;
        }
        spec
    }

    /// The config, which PEFT goes by, and our own record of the parts must say the same.
    fn same_modules(
        &self,
        config: &AdapterSet,
        ours: &AdapterSet,
        base: &BaseDescription,
        findings: &mut Findings,
    ) {
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs().max(b.abs());
        let rslora = |set: &AdapterSet| set.spec.lora_options().map(|lora| lora.rslora);
        let (theirs, own) = (self.variant.modules(config, base), self.variant.modules(ours, base));
        let same = theirs.len() == own.len()
            && rslora(config) == rslora(ours)
            && theirs
                .iter()
                .zip(&own)
                .all(|(a, b)| a.path == b.path && a.rank == b.rank && close(a.alpha, b.alpha));
        let embedding = |set: &AdapterSet| set.embedding.as_ref().map(|delta| (delta.rank, delta.scale));
        if !same || embedding(config) != embedding(ours) {
            findings.field(
                CONFIG_FILE,
                "at odds with the tensor file",
                format!("its modules, ranks and alphas should be those of {META_SPEC} there"),
            );
        }
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
        self.variant.kind
    }

    /// The spec before parts were fused, if the file contains it.
    fn spec(&self, tensors: &TensorFile) -> AdapterSpec {
        let own = tensors.metadata(META_SPEC).and_then(|text| serde_json::from_str::<LoraSpec>(text).ok());
        (self.variant.wrap)(own.unwrap_or_else(|| self.spec.clone()))
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
            findings.accept(AdapterSet::new(&(self.variant.wrap)(spec.clone()), base))
        };
        let by_config = fit(&config, findings);
        let by_config = match (by_config, tensors.metadata(META_SPEC)) {
            (Some(by_config), Some(text)) => match serde_json::from_str::<LoraSpec>(text) {
                Ok(ours) => {
                    fit(&ours, findings).inspect(|ours| self.same_modules(&by_config, ours, base, findings))
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
        let mut expect = |name: String, shape: &[usize]| {
            findings.tensor(tensors, name.clone(), shape);
            expected.push(name);
        };
        for module in self.variant.modules(&set, base) {
            expect(module.a(), &[module.rank, module.inputs]);
            expect(module.b(), &[module.outputs, module.rank]);
        }
        self.variant.others(&set).for_each(|slot| expect(slot.name.clone(), &slot.shape));
        findings.extras(tensors, &expected);
        Some(set)
    }
}
