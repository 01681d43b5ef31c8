//! The kinds of methods that an adapter consists of, as a user writes them: `lora`, or `lora+prefix`.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{
    AdapterSpec,
    methods::{Kind, kinds, list},
};

/// Kinds of methods, at least one, each once and in the order of the registry ([`kinds`]).
///
/// As text, also in serde, their names are joined by `+`; parsing takes them in any order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Kinds(Vec<&'static str>);

impl Kinds {
    /// The kinds whose names `wanted` accepts; `None` when it accepts none.
    fn which(wanted: impl Fn(&str) -> bool) -> Option<Self> {
        let names: Vec<_> = kinds().into_iter().map(|kind| kind.name).filter(|name| wanted(name)).collect();
        (!names.is_empty()).then_some(Self(names))
    }

    /// The kinds of the methods of `spec`; `None` when it has no method.
    pub fn of(spec: &AdapterSpec) -> Option<Self> {
        let names: Vec<_> = spec.methods().iter().map(|method| method.kind().name).collect();
        Self::which(|name| names.contains(&name))
    }

    /// Names of the kinds, in the order of the registry.
    pub fn names(&self) -> &[&'static str] {
        &self.0
    }

    /// Whether the kind called `name` is among them.
    pub fn contains(&self, name: &str) -> bool {
        self.0.contains(&name)
    }

    /// These kinds and the one called `name`, if the registry has it.
    #[must_use]
    pub fn with(&self, name: &str) -> Self {
        Self::which(|known| known == name || self.contains(known)).unwrap_or_else(|| self.clone())
    }
}

/// A list of that kind alone.
impl From<&'static Kind> for Kinds {
    fn from(kind: &'static Kind) -> Self {
        Self(vec![kind.name])
    }
}

impl fmt::Display for Kinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("+"))
    }
}

impl FromStr for Kinds {
    type Err = String;

    /// # Errors
    /// The remedy for an unknown name or one that is there twice: `give lora, ln_tuning or prefix, or ..`.
    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<&str> = text.split('+').collect();
        let found = Self::which(|name| names.contains(&name));
        found.filter(|found| found.0.len() == names.len()).ok_or_else(|| {
            let first: Vec<_> = kinds().into_iter().map(|kind| kind.name).take(2).collect();
            format!(
                "give {}, or several of them such as {}",
                list(|kind| kind.name.into(), " or "),
                first.join("+")
            )
        })
    }
}

impl TryFrom<String> for Kinds {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Kinds> for String {
    fn from(kinds: Kinds) -> Self {
        kinds.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LoraSpec, PrefixSpec};

    #[test]
    fn every_kind_has_its_name_and_any_order_is_read() {
        for kind in kinds() {
            let alone: Kinds = kind.name.parse().unwrap();
            assert_eq!((alone.names(), alone.to_string()), (&[kind.name][..], kind.name.to_owned()));
        }
        let both: Kinds = "prefix+lora".parse().unwrap();
        assert_eq!((both.to_string(), both.contains("lora")), ("lora+prefix".to_owned(), true));
        assert_eq!(serde_json::to_string(&both).unwrap(), r#""lora+prefix""#);
        assert_eq!(serde_json::from_str::<Kinds>(r#""lora+prefix""#).unwrap(), both);
        let prefix: Kinds = "prefix".parse().unwrap();
        assert_eq!(
            (prefix.with("lora"), prefix.with("prefix"), prefix.contains("lora")),
            (both, prefix, false)
        );
    }

    #[test]
    fn names_that_are_unknown_or_twice_there_are_refused() {
        for wrong in ["", "lora+", "loar", "lora+lora", "lora prefix", "LoRA"] {
            let remedy = wrong.parse::<Kinds>().unwrap_err();
            assert!(
                remedy.starts_with("give lora, vera") && remedy.ends_with("such as lora+vera"),
                "{remedy}"
            );
        }
    }

    #[test]
    fn a_spec_has_the_kinds_of_its_methods() {
        assert_eq!(Kinds::of(&AdapterSpec::default()), None);
        assert_eq!(Kinds::of(&LoraSpec::default().into()), Some(Kinds::from(&LoraSpec::KIND)));
        let (lora, prefix) = (Some(LoraSpec::default()), Some(PrefixSpec::default()));
        let both = AdapterSpec { lora, prefix, ..AdapterSpec::default() };
        assert_eq!(Kinds::of(&both).unwrap().to_string(), "lora+prefix");
    }
}
