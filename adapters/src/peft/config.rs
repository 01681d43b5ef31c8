//! `adapter_config.json`: PEFT's fields -> a spec, with every reason for a refusal; and back.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read,
    path::Path,
};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use super::modules::Module;
use crate::{AdapterSet, BaseDescription, Error, LoraSpec, PrefixSpec, Problem, Result, Targets, targets};

/// Longest config read, in bytes.
const LONGEST: u64 = 16 << 20;
/// Fields whose value changes nothing about what a finished adapter computes.
const WITHOUT_EFFECT: [&str; 11] = [
    "auto_mapping",
    "encoder_hidden_size",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "init_weights",
    "loftq_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
];
/// Initial values of a LoRA that leave the base's weights as they are.
const PLAIN_INITS: [&str; 4] = ["gaussian", "orthogonal", "eva", "true"];

/// A config file, read; `problems` says what in it is refused.
#[derive(Debug)]
pub(crate) struct Config {
    pub base_name: Option<String>,
    pub revision: Option<String>,
    pub kind: Option<Kind>,
    pub problems: Vec<Problem>,
}

/// The adapter a config describes, as far as it could be read.
#[derive(Debug)]
pub(crate) enum Kind {
    Lora { spec: LoraSpec, layers_pattern: Vec<String>, exclude: Option<Targets> },
    Prefix(PrefixConfig),
}

/// A prefix and the base it says it is for.
#[derive(Debug)]
pub(crate) struct PrefixConfig {
    pub length: usize,
    pub layers: Option<usize>,
    pub heads: Option<usize>,
    pub width: Option<usize>,
    pub projection: bool,
}

/// One value or a list of them, as PEFT writes some fields.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl Config {
    pub fn read(path: &Path) -> Result<Self> {
        let read = |cause| Error::read(path, cause);
        let broken = |cause: String| Error::Json { path: path.to_owned(), cause };
        let file = std::fs::File::open(path).map_err(read)?;
        let mut bytes = Vec::new();
        file.take(LONGEST + 1).read_to_end(&mut bytes).map_err(read)?;
        if bytes.len() as u64 > LONGEST {
            return Err(broken(format!("it is longer than {LONGEST} bytes")));
        }
        let map = serde_json::from_slice(&bytes).map_err(|error| broken(error.to_string()))?;
        Ok(Self::from_fields(map))
    }

    fn from_fields(map: Map<String, Value>) -> Self {
        let mut fields = Fields { map, problems: Vec::new() };
        let base_name = fields.take("base_model_name_or_path", "a name is expected");
        let revision = fields.take("revision", "a revision is expected");
        fields.require("task_type", &["CAUSAL_LM"]);
        let kind = match fields.take::<String>("peft_type", "LORA or PREFIX_TUNING is expected").as_deref() {
            Some("LORA") => fields.lora(),
            Some("PREFIX_TUNING") => fields.prefix(),
            other => {
                fields.problems.push(Problem::UnsupportedType(other.unwrap_or("(none)").to_owned()));
                fields.map.clear(); // what the fields of an unknown kind mean is unknown too
                None
            }
        };
        fields.refuse_the_rest();
        Self { base_name, revision, kind, problems: fields.problems }
    }
}

/// The fields not looked at yet, and what was wrong with the others.
struct Fields {
    map: Map<String, Value>,
    problems: Vec<Problem>,
}

impl Fields {
    /// The field's value; nothing when it is missing, null or of the wrong type (then a problem).
    fn take<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Option<T> {
        let value = self.map.remove(name).filter(|value| !value.is_null())?;
        let taken = serde_json::from_value(value.clone()).ok();
        if taken.is_none() {
            self.refuse(name, &value, expected);
        }
        taken
    }

    /// The same for a field that must be there.
    fn need<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Option<T> {
        if self.map.get(name).is_none_or(Value::is_null) {
            self.map.remove(name);
            self.refuse(name, &Value::Null, expected);
        }
        self.take(name, expected)
    }

    fn require(&mut self, name: &str, allowed: &[&str]) {
        let expected = format!("{} is supported", allowed.join(" or "));
        if let Some(value) = self.take::<Value>(name, &expected)
            && !value.as_str().is_some_and(|text| allowed.contains(&text))
        {
            self.refuse(name, &value, &expected);
        }
    }

    fn refuse(&mut self, name: &str, value: &Value, expected: &str) {
        let (name, expected) = (name.to_owned(), expected.to_owned());
        self.problems.push(Problem::Field { name, value: value.to_string(), expected });
    }

    fn lora(&mut self) -> Option<Kind> {
        self.require("bias", &["none"]);
        self.init();
        let rank = self.need("r", "a whole number from 1 is expected");
        let alpha = self.need("lora_alpha", "a number is expected");
        let targets =
            self.need::<OneOrMany<String>>("target_modules", "names or a regular expression are expected");
        let layers = self.take::<OneOrMany<usize>>("layers_to_transform", "layer numbers are expected");
        let layers_pattern = self.take::<OneOrMany<String>>("layers_pattern", "a name is expected");
        let dropout = self.take("lora_dropout", "a number in [0, 1) is expected").unwrap_or_default();
        let rslora = self.take("use_rslora", "true or false is expected").unwrap_or_default();
        let rank_pattern =
            self.take("rank_pattern", "whole numbers by pattern are expected").unwrap_or_default();
        let alpha_pattern = self.take("alpha_pattern", "numbers by pattern are expected").unwrap_or_default();
        let exclude =
            self.take::<OneOrMany<String>>("exclude_modules", "names or a regular expression are expected");
        let exclude = match exclude {
            None => None,
            Some(OneOrMany::One(text)) if text.is_empty() => None,
            Some(OneOrMany::One(text)) => Some(Targets::Regex(text)),
            Some(OneOrMany::Many(names)) => Some(Targets::List(sorted(names))),
        };
        let targets = match targets? {
            OneOrMany::One(text) if text == "all-linear" => Targets::AllLinear,
            OneOrMany::One(text) => Targets::Regex(text),
            OneOrMany::Many(names) => Targets::List(sorted(names)),
        };
        let layers = layers.map(OneOrMany::into_vec).filter(|layers| !layers.is_empty());
        let layers_pattern = layers_pattern.map(OneOrMany::into_vec).unwrap_or_default();
        let layers_pattern = layers_pattern.into_iter().filter(|name| !name.is_empty()).collect();
        let (rank, alpha) = (rank?, alpha?);
        let spec = LoraSpec { rank, alpha, targets, layers, dropout, rslora, rank_pattern, alpha_pattern };
        Some(Kind::Lora { spec, layers_pattern, exclude })
    }

    /// PiSSA and its like subtract from the base what the LoRA starts with; PEFT redoes that on load.
    fn init(&mut self) {
        let name = "init_lora_weights";
        let Some(value) = self.take::<Value>(name, "") else { return };
        let plain = value.as_str().is_some_and(|text| PLAIN_INITS.contains(&text.to_lowercase().as_str()));
        if !plain && !value.is_boolean() {
            self.refuse(
                name,
                &value,
                "an init that leaves the base as it is is supported (convert it to plain LoRA)",
            );
        }
    }

    fn prefix(&mut self) -> Option<Kind> {
        let whole = "a whole number is expected";
        let submodules: Option<usize> = self.take("num_transformer_submodules", whole);
        if let Some(count) = submodules.filter(|&count| count != 1) {
            self.refuse("num_transformer_submodules", &json!(count), "1 is supported");
        }
        let length = self.need("num_virtual_tokens", whole);
        let (layers, heads) = (self.take("num_layers", whole), self.take("num_attention_heads", whole));
        let width = self.take("token_dim", whole);
        let projection = self.take("prefix_projection", "true or false is expected").unwrap_or_default();
        Some(Kind::Prefix(PrefixConfig { length: length?, layers, heads, width, projection }))
    }

    fn refuse_the_rest(&mut self) {
        for (name, value) in std::mem::take(&mut self.map) {
            if !is_empty(&value) && !WITHOUT_EFFECT.contains(&name.as_str()) {
                self.refuse(&name, &value, "nothing but an empty value is supported");
            }
        }
    }
}

impl<T> OneOrMany<T> {
    fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
}

/// PEFT writes lists of names out of sets, in any order.
fn sorted(names: Vec<String>) -> Vec<String> {
    BTreeSet::from_iter(names).into_iter().collect()
}

/// The values with which PEFT says that a feature is off.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

/// The config of a LoRA, in fields that PEFT has had for long and with which its formulas give our scales.
pub(crate) fn lora_json(
    set: &AdapterSet,
    lora: &LoraSpec,
    modules: &[Module],
    base: &BaseDescription,
) -> String {
    let fused = modules.iter().any(|module| module.is_fused(set));
    let (targets, layers) = peft_targets(lora, modules, fused, base);
    let mut fields = common("LORA", base);
    fields.extend([
        ("bias", json!("none")),
        ("fan_in_fan_out", json!(base.sites.iter().any(|site| site.fan_in_fan_out))),
        ("init_lora_weights", json!(true)),
        ("layers_pattern", Value::Null),
        ("layers_to_transform", json!(layers)),
        ("lora_dropout", number(lora.dropout)),
        ("modules_to_save", Value::Null),
        ("target_modules", targets),
        ("use_rslora", json!(lora.rslora)),
    ]);
    fields.extend(if fused { fused_ranks(modules) } else { plain_ranks(lora) });
    pretty(&fields)
}

fn plain_ranks(lora: &LoraSpec) -> [(&'static str, Value); 4] {
    let alphas: BTreeMap<_, _> =
        lora.alpha_pattern.iter().map(|(key, &alpha)| (key, number(alpha))).collect();
    [
        ("alpha_pattern", json!(alphas)),
        ("lora_alpha", number(lora.alpha)),
        ("r", json!(lora.rank)),
        ("rank_pattern", json!(lora.rank_pattern)),
    ]
}

/// Rank and alpha of the first module, and by full path those that differ from it: how many parts a
/// module fuses may change from layer to layer.
fn fused_ranks(modules: &[Module]) -> [(&'static str, Value); 4] {
    let (rank, alpha) = modules.first().map(|first| (first.rank, first.alpha)).unwrap_or_default();
    let ranks = modules.iter().filter(|module| module.rank != rank);
    let ranks: BTreeMap<_, _> = ranks.map(|module| (&module.path, module.rank)).collect();
    let alphas = modules.iter().filter(|module| module.alpha != alpha);
    let alphas: BTreeMap<_, _> = alphas.map(|module| (&module.path, number(module.alpha))).collect();
    [
        ("alpha_pattern", json!(alphas)),
        ("lora_alpha", number(alpha)),
        ("r", json!(rank)),
        ("rank_pattern", json!(ranks)),
    ]
}

/// `target_modules` and `layers_to_transform` with which PEFT finds exactly these modules.
///
/// A list goes out as the user wrote it. Parts PEFT does not know; a regular expression can match modules
/// that are no sites (an activation), on which PEFT stops: these go out by site, or else by full path.
fn peft_targets(
    lora: &LoraSpec,
    modules: &[Module],
    fused: bool,
    base: &BaseDescription,
) -> (Value, Option<Vec<usize>>) {
    if let (Targets::List(names), false) = (&lora.targets, fused) {
        return (json!(names), lora.layers.clone());
    }
    let sites: BTreeSet<&str> = modules.iter().map(|module| base.sites[module.site].name.as_str()).collect();
    let names: Vec<String> = sites.into_iter().map(str::to_owned).collect();
    let layers: BTreeSet<usize> = modules.iter().map(|module| module.layer).collect();
    let layers = (layers.len() < base.layers).then(|| Vec::from_iter(layers));
    let by_site = targets::select(&Targets::List(names.clone()), layers.as_deref(), base);
    let same = by_site.is_ok_and(|found| {
        let found = found.iter().map(|one| (one.layer, one.site));
        found.eq(modules.iter().map(|module| (module.layer, module.site)))
    });
    if same {
        return (json!(names), layers);
    }
    (json!(modules.iter().map(|module| &module.path).collect::<Vec<_>>()), None)
}

/// The config of a prefix.
pub(crate) fn prefix_json(prefix: &PrefixSpec, base: &BaseDescription) -> String {
    let mut fields = common("PREFIX_TUNING", base);
    fields.extend([
        ("encoder_hidden_size", json!(prefix.projection)),
        ("num_attention_heads", json!(base.heads)),
        ("num_layers", json!(base.layers)),
        ("num_transformer_submodules", json!(1)),
        ("num_virtual_tokens", json!(prefix.length)),
        ("prefix_projection", json!(prefix.projection.is_some())),
        ("token_dim", json!(base.width)),
    ]);
    pretty(&fields)
}

fn common(peft_type: &str, base: &BaseDescription) -> BTreeMap<&'static str, Value> {
    BTreeMap::from([
        ("auto_mapping", Value::Null),
        ("base_model_name_or_path", json!(base.name)),
        ("inference_mode", json!(true)),
        ("peft_type", json!(peft_type)),
        ("revision", json!(base.revision)),
        ("task_type", json!("CAUSAL_LM")),
    ])
}

fn pretty(fields: &BTreeMap<&'static str, Value>) -> String {
    serde_json::to_string_pretty(fields).unwrap_or_default()
}

/// 16 and not 16.0: some readers want whole alphas to be whole.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 2f64.powi(53) { json!(value as i64) } else { json!(value) }
}
