//! `adapter_config.json`: the fields that all methods have, and how any field is taken out, strictly.

use std::{collections::BTreeMap, io::Read, path::Path};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use crate::{
    BaseDescription, Error, Problem, Result,
    methods::{self, Kind, Stored},
};

/// Longest config read, in bytes.
const LONGEST: u64 = 16 << 20;
/// Fields whose value changes nothing about what a finished adapter computes.
const WITHOUT_EFFECT: [&str; 12] = [
    "auto_mapping",
    "encoder_hidden_size",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "init_weights",
    "loftq_config",
    "megatron_core",
    "merge_weights",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
];
/// A config file, read; `problems` says what in it is refused.
#[derive(Debug)]
pub(crate) struct Config {
    pub base_name: Option<String>,
    pub revision: Option<String>,
    /// The method it describes, as far as it could be read.
    pub stored: Option<Box<dyn Stored>>,
    pub problems: Vec<Problem>,
}

/// One value or a list of them, as PEFT writes some fields.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl Config {
    pub fn read(path: &Path) -> Result<Self> {
        Ok(Self::from_fields(Fields::open(path)?))
    }

    fn from_fields(mut fields: Fields) -> Self {
        let base_name = fields.take("base_model_name_or_path", "a name is expected");
        let revision = fields.take("revision", "a revision is expected");
        fields.require("task_type", &["CAUSAL_LM"]);
        let known = methods::peft_types(" or ");
        let peft_type: Option<String> = fields.take("peft_type", &format!("{known} is expected"));
        let is_of =
            |kind: &&'static Kind| Some(kind.peft_type) == peft_type.as_deref() && (kind.claims)(&fields);
        let stored = match methods::read_kinds().into_iter().rfind(is_of) {
            Some(kind) => (kind.read)(&mut fields),
            None => {
                let found = peft_type.unwrap_or("(none)".to_owned());
                fields.problems.push(Problem::UnsupportedType(found));
                fields.ignore_the_rest(); // the meaning of an unknown kind's fields is unknown too
                None
            }
        };
        Self { base_name, revision, stored, problems: fields.into_problems() }
    }
}

/// The fields not looked at yet, and what was wrong with the others.
pub(crate) struct Fields {
    map: Map<String, Value>,
    problems: Vec<Problem>,
}

impl Fields {
    /// The fields of a config file.
    pub fn open(path: &Path) -> Result<Self> {
        let read = |cause| Error::read(path, cause);
        let broken = |cause: String| Error::Json { path: path.to_owned(), cause };
        let file = std::fs::File::open(path).map_err(read)?;
        let mut bytes = Vec::new();
        file.take(LONGEST + 1).read_to_end(&mut bytes).map_err(read)?;
        if bytes.len() as u64 > LONGEST {
            return Err(broken(format!("it is longer than {LONGEST} bytes")));
        }
        let map = serde_json::from_slice(&bytes)
            .map_err(|error| Error::stand_in(path).unwrap_or_else(|| broken(error.to_string())))?;
        Ok(Self { map, problems: Vec::new() })
    }

    /// What was wrong with the fields; those that nothing has taken must be empty.
    pub fn into_problems(mut self) -> Vec<Problem> {
        self.refuse_the_rest();
        self.problems
    }

    /// The field's value; nothing when it is missing, null or of the wrong type (then a problem).
    pub fn take<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Option<T> {
        let value = self.map.remove(name).filter(|value| !value.is_null())?;
        let taken = serde_json::from_value(value.clone()).ok();
        if taken.is_none() {
            self.refuse(name, &value, expected);
        }
        taken
    }

    /// As [`Fields::take`], for a field that must be there.
    pub fn need<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Option<T> {
        if self.map.get(name).is_none_or(Value::is_null) {
            self.map.remove(name);
            self.refuse(name, &Value::Null, expected);
        }
        self.take(name, expected)
    }

    /// Takes fields out whose values do not matter.
    pub fn ignore(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.map.remove(*name)));
    }

    /// Refuses a field whose value is none of `allowed`, unless it is missing.
    pub fn require(&mut self, name: &str, allowed: &[&str]) {
        let expected = format!("{} is supported", allowed.join(" or "));
        if let Some(value) = self.take::<Value>(name, &expected)
            && !value.as_str().is_some_and(|text| allowed.contains(&text))
        {
            self.refuse(name, &value, &expected);
        }
    }

    /// Whether the field is there and true; it is not taken.
    pub fn is_true(&self, name: &str) -> bool {
        self.map.get(name) == Some(&Value::Bool(true))
    }

    /// Notes that a field's value is not what is expected.
    pub fn refuse(&mut self, name: &str, value: &Value, expected: &str) {
        let (name, expected) = (name.to_owned(), expected.to_owned());
        self.problems.push(Problem::Field { name, value: value.to_string(), expected });
    }

    /// Passes over the fields that nothing has taken.
    pub fn ignore_the_rest(&mut self) {
        self.map.clear();
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
    pub fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(one) => vec![one],
            Self::Many(many) => many,
        }
    }
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

/// The text of a method's config: its `own` fields and those that all have, by name.
pub(crate) fn config_text(
    kind: &Kind,
    base: &BaseDescription,
    own: impl IntoIterator<Item = (&'static str, Value)>,
) -> String {
    let mut fields = BTreeMap::from([
        ("auto_mapping", Value::Null),
        ("base_model_name_or_path", json!(base.name)),
        ("inference_mode", json!(true)),
        ("peft_type", json!(kind.peft_type)),
        ("revision", json!(base.revision)),
        ("task_type", json!("CAUSAL_LM")),
    ]);
    fields.extend(own);
    serde_json::to_string_pretty(&fields).unwrap_or_default()
}

/// 16 and not 16.0: some readers want whole alphas to be whole.
pub(crate) fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 2f64.powi(53) { json!(value as i64) } else { json!(value) }
}
