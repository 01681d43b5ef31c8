//! Which parameter of an adapter a model means by the name that it asks for.

use std::collections::BTreeMap;

use crate::{Error, Result};

/// A difference between the names of a model and of an adapter, found by comparing them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Shift {
    /// The adapter's names begin with this and a dot, the model's do not.
    AdapterHas(String),
    /// The model's names begin with this and a dot, the adapter's do not.
    ModelHas(String),
}

/// A parameter of the adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    /// Its name in the adapter.
    pub parameter: String,
    /// `None` if the model calls it the same.
    pub shift: Option<Shift>,
}

/// What was loaded so far.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    /// Names that the model used, by the adapter's.
    pub names: BTreeMap<String, String>,
    /// How the names differ, once a load has shown it.
    pub shift: Option<Shift>,
}

/// The parameter that a model asks for as `asked`, if the adapter changes it.
///
/// A name that is the adapter's own is meant as such. Else one of the two may have a prefix that the other lacks,
/// because PEFT wrapped a larger or a smaller model (`bert.encoder..` and `encoder..`).
pub(super) fn find<T>(asked: &str, parameters: &BTreeMap<String, T>) -> Option<Found> {
    if parameters.contains_key(asked) {
        return Some(Found { parameter: asked.to_owned(), shift: None });
    }
    let longer = parameters.keys().filter_map(|name| {
        let prefix = name.strip_suffix(asked)?.strip_suffix('.')?;
        Some((name, Shift::AdapterHas(prefix.to_owned())))
    });
    let shorter = asked.match_indices('.').filter_map(|(dot, _)| {
        let (name, _) = parameters.get_key_value(&asked[dot + 1..])?;
        Some((name, Shift::ModelHas(asked[..dot].to_owned())))
    });
    let mut all = longer.chain(shorter);
    let (parameter, shift) = all.next()?;
    // To take one of several would be a guess: none is taken, and `Adapter::finish` names what is missing.
    all.next().is_none().then(|| Found { parameter: parameter.clone(), shift: Some(shift) })
}

impl Loaded {
    /// Notes that `asked` was loaded as `found`.
    ///
    /// # Errors
    /// [`Error::Ambiguous`] when two names mean one parameter, or names differ in two ways.
    pub fn note(&mut self, asked: &str, found: &Found) -> Result<()> {
        let ambiguous = |other: &str| Error::Ambiguous {
            parameter: found.parameter.clone(),
            first: other.to_owned(),
            second: asked.to_owned(),
        };
        if let Some(other) = self.names.get(&found.parameter).filter(|other| *other != asked) {
            return Err(ambiguous(other));
        }
        if let (Some(known), Some(new)) = (&self.shift, &found.shift)
            && known != new
        {
            return Err(ambiguous(&known.apply(&found.parameter)));
        }
        self.shift = self.shift.take().or_else(|| found.shift.clone());
        self.names.insert(found.parameter.clone(), asked.to_owned());
        Ok(())
    }

    /// Whether nothing is guessed: the names are the same, or differ as others did before.
    pub fn is_sure(&self, found: &Found) -> bool {
        found.shift.is_none() || found.shift == self.shift
    }
}

impl Shift {
    /// The model's name of the adapter's `parameter`.
    pub fn apply(&self, parameter: &str) -> String {
        match self {
            Self::ModelHas(prefix) => format!("{prefix}.{parameter}"),
            Self::AdapterHas(prefix) => {
                let rest = parameter.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.'));
                rest.unwrap_or(parameter).to_owned()
            }
        }
    }

    /// The adapter's name of what the model calls `asked`, if that is in the model that PEFT wrapped.
    pub fn undo(&self, asked: &str) -> Option<String> {
        match self {
            Self::AdapterHas(prefix) => Some(format!("{prefix}.{asked}")),
            Self::ModelHas(prefix) => Some(asked.strip_prefix(prefix)?.strip_prefix('.')?.to_owned()),
        }
    }
}
