//! Which modules a method attaches to, and which pattern gives a module its value: PEFT's rules, strict.
//!
//! A target of a list is a module path or its end after a dot; a regular expression must match a
//! whole module path; a pattern key matches as `(.*\.)?(KEY)$`. Beyond PEFT, a part of a module
//! (`q` of a fused projection) is addressed as if it were a module below it: `attn.c_attn.q`.

use std::{collections::BTreeMap, convert::Infallible, fmt, str::FromStr};

use regex::Regex;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{BaseDescription, Error, Result};

/// Which modules a method attaches to. As text: `q,v`, `all-linear`, `/regex/`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Targets {
    /// Every linear module of every layer.
    AllLinear,
    /// Module paths or their ends after a dot (`c_attn`, `mlp.c_proj`), or parts (`q`, `c_attn.v`).
    List(Vec<String>),
    /// A regular expression that must match a whole module path.
    Regex(String),
}

impl Targets {
    fn from_names(names: Vec<String>) -> Self {
        if names == ["all-linear"] { Self::AllLinear } else { Self::List(names) }
    }
}

impl FromStr for Targets {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        let text = text.trim();
        if let Some(regex) = text.strip_prefix('/').and_then(|rest| rest.strip_suffix('/')) {
            return Ok(Self::Regex(regex.to_owned()));
        }
        let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
        Ok(Self::from_names(names.map(str::to_owned).collect()))
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllLinear => write!(f, "all-linear"),
            Self::List(names) => write!(f, "{}", names.join(",")),
            Self::Regex(regex) => write!(f, "/{regex}/"),
        }
    }
}

impl Serialize for Targets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::List(names) => names.serialize(serializer),
            _ => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for Targets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            Names(Vec<String>),
        }
        Ok(match Written::deserialize(deserializer)? {
            Written::Text(text) => text.parse().unwrap_or_else(|never: Infallible| match never {}),
            Written::Names(names) => Self::from_names(names),
        })
    }
}

/// A module, or a part of one, that a method attaches to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Selected {
    pub layer: usize,
    /// Index into the base's sites.
    pub site: usize,
    /// Index into the site's parts; `None` for the whole module.
    pub part: Option<usize>,
}

impl Selected {
    /// Module path, with the part after it.
    pub fn path(self, base: &BaseDescription) -> String {
        let site = &base.sites[self.site];
        let module = site.module(self.layer);
        self.part.map_or(module.clone(), |part| format!("{module}.{}", site.parts[part].name))
    }

    pub fn module(self, base: &BaseDescription) -> String {
        base.sites[self.site].module(self.layer)
    }
}

/// What targets choose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chosen {
    /// Modules and parts of layers, in the order layer, site, part.
    pub modules: Vec<Selected>,
    /// Whether the embedding of tokens is among them.
    pub embedding: bool,
}

/// Modules and parts that `targets` choose in `layers`, in the order layer, site, part.
pub(crate) fn select(
    targets: &Targets,
    layers: Option<&[usize]>,
    base: &BaseDescription,
) -> Result<Vec<Selected>> {
    Ok(choose(targets, layers, None, base)?.modules)
}

/// As [`select`], for a method that attaches to the embedding of tokens, too. That is in no layer, so `layers` do not
/// matter to it.
pub(crate) fn select_with_embedding(
    targets: &Targets,
    layers: Option<&[usize]>,
    base: &BaseDescription,
) -> Result<Chosen> {
    choose(targets, layers, base.token_embedding.as_deref(), base)
}

fn choose(
    targets: &Targets,
    layers: Option<&[usize]>,
    embedding: Option<&str>,
    base: &BaseDescription,
) -> Result<Chosen> {
    let candidates = candidates(chosen_layers(layers, base)?, base);
    let nothing = |target: String| {
        let name = embedding.and(base.token_embedding_name()).map(str::to_owned);
        Error::NothingMatched { target, sites: base.target_names().into_iter().chain(name).collect() }
    };
    let (modules, embedding): (Vec<Selected>, bool) = match targets {
        Targets::AllLinear => (candidates.into_iter().filter(|c| c.part.is_none()).collect(), false),
        Targets::Regex(pattern) => {
            let regex = whole_match("targets", pattern, &format!("^(?:{pattern})$"))?;
            let whole = |c: &Selected| c.part.is_none() && regex.is_match(&c.module(base));
            let modules = candidates.into_iter().filter(whole).collect();
            (modules, embedding.is_some_and(|path| regex.is_match(path)))
        }
        Targets::List(names) => {
            let paths: Vec<String> = candidates.iter().map(|candidate| candidate.path(base)).collect();
            let all = || paths.iter().map(String::as_str).chain(embedding);
            if let Some(target) = names.iter().find(|name| !all().any(|path| self::names(name, path))) {
                return Err(nothing(target.clone()));
            }
            let chosen = |path: &str| names.iter().any(|name| self::names(name, path));
            let modules = candidates.into_iter().zip(&paths).filter(|(_, path)| chosen(path));
            (modules.map(|(candidate, _)| candidate).collect(), embedding.is_some_and(chosen))
        }
    };
    if modules.is_empty() && !embedding {
        return Err(nothing(targets.to_string()));
    }
    refuse_part_and_whole(&modules, base)?;
    Ok(Chosen { modules, embedding })
}

/// As [`select`], for a method whose tensors PEFT has for whole modules alone.
pub(crate) fn whole_modules(
    targets: &Targets,
    layers: Option<&[usize]>,
    method: &'static str,
    base: &BaseDescription,
) -> Result<Vec<Selected>> {
    let chosen = select(targets, layers, base)?;
    match chosen.iter().find_map(|one| Some((&base.sites[one.site], one.part?))) {
        None => Ok(chosen),
        Some((site, part)) => {
            let (part, module) = (site.parts[part].name.clone(), site.name.clone());
            Err(Error::PartOfModule { part, module, method })
        }
    }
}

/// Whether a list entry names the module or part at `path`: all of it, or its end after a dot.
pub(crate) fn names(target: &str, path: &str) -> bool {
    path.strip_suffix(target).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Says whether a module path is matched.
pub(crate) type Matcher<'a> = Box<dyn Fn(&str) -> bool + 'a>;

/// Whether `targets`, a list or an expression, match a whole module path; errors call them `option`.
pub(crate) fn matcher<'a>(option: &'static str, targets: &'a Targets) -> Result<Matcher<'a>> {
    Ok(match targets {
        Targets::AllLinear => Box::new(|_| true),
        Targets::List(list) => Box::new(|path| list.iter().any(|name| names(name, path))),
        Targets::Regex(pattern) => {
            let regex = whole_match(option, pattern, &format!("^(?:{pattern})$"))?;
            Box::new(move |path| regex.is_match(path))
        }
    })
}

fn chosen_layers(layers: Option<&[usize]>, base: &BaseDescription) -> Result<Vec<usize>> {
    let Some(layers) = layers else { return Ok((0..base.layers).collect()) };
    if layers.is_empty() {
        return Err(Error::NoLayers);
    }
    if let Some(&layer) = layers.iter().find(|&&layer| layer >= base.layers) {
        return Err(Error::LayerOutOfRange { layer, layers: base.layers });
    }
    let mut layers = layers.to_vec();
    layers.sort_unstable();
    layers.dedup();
    Ok(layers)
}

fn candidates(layers: Vec<usize>, base: &BaseDescription) -> Vec<Selected> {
    let mut all = Vec::new();
    for layer in layers {
        for (site, description) in base.sites.iter().enumerate() {
            all.push(Selected { layer, site, part: None });
            all.extend((0..description.parts.len()).map(|part| Selected { layer, site, part: Some(part) }));
        }
    }
    all
}

fn refuse_part_and_whole(chosen: &[Selected], base: &BaseDescription) -> Result<()> {
    // The whole module comes right before its parts.
    for pair in chosen.windows(2) {
        let [whole, next] = [pair[0], pair[1]];
        if let (None, Some(part)) = (whole.part, next.part)
            && (whole.layer, whole.site) == (next.layer, next.site)
        {
            let part = base.sites[next.site].parts[part].name.clone();
            return Err(Error::PartAndWhole { module: whole.module(base), part });
        }
    }
    Ok(())
}

/// The compiled keys of a map such as `rank_pattern`, and which of them matched something.
pub(crate) struct Patterns<'a, T> {
    option: &'static str,
    keys: Vec<(&'a str, Regex, T, bool)>,
}

impl<'a, T: Copy> Patterns<'a, T> {
    pub fn new(option: &'static str, patterns: &'a BTreeMap<String, T>) -> Result<Self> {
        let compile = |(key, &value): (&'a String, &T)| {
            let regex = pattern_regex(option, key)?;
            Ok((key.as_str(), regex, value, false))
        };
        Ok(Self { option, keys: patterns.iter().map(compile).collect::<Result<_>>()? })
    }

    /// Value of the first key that matches the part's path, else of the first that matches the module's.
    pub fn value(&mut self, one: Selected, base: &BaseDescription) -> Option<T> {
        self.value_at(&one.path(base)).or_else(|| self.value_at(&one.module(base)))
    }

    /// Value of the first key that matches `path`.
    pub fn value_at(&mut self, path: &str) -> Option<T> {
        let entry = self.keys.iter_mut().find(|entry| entry.1.is_match(path))?;
        entry.3 = true;
        Some(entry.2)
    }

    pub fn refuse_unmatched(&self, example: &str) -> Result<()> {
        match self.keys.iter().find(|entry| !entry.3) {
            None => Ok(()),
            Some(entry) => Err(Error::PatternUnmatched {
                option: self.option,
                key: entry.0.to_owned(),
                example: example.to_owned(),
            }),
        }
    }
}

/// Value of the first key that matches a module path.
pub(crate) fn pattern_value<T: Copy>(
    option: &'static str,
    patterns: &BTreeMap<String, T>,
    path: &str,
) -> Result<Option<T>> {
    for (key, &value) in patterns {
        if pattern_regex(option, key)?.is_match(path) {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// PEFT's `(.*\.)?(KEY)$`, matched from the start of a module path.
pub(crate) fn pattern_regex(option: &'static str, key: &str) -> Result<Regex> {
    whole_match(option, key, &format!(r"^(?:.*\.)?(?:{key})$"))
}

/// `anchored`, compiled; errors quote `pattern`, which it is made of.
pub(crate) fn whole_match(option: &'static str, pattern: &str, anchored: &str) -> Result<Regex> {
    // Alone first, so that the message quotes what the user wrote and `a)|(b` is refused.
    Regex::new(pattern).and_then(|_| Regex::new(anchored)).map_err(|error| {
        let text = error.to_string();
        let cause = text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
        Error::BadRegex { option, pattern: pattern.to_owned(), cause }
    })
}

#[cfg(test)]
#[path = "targets_tests.rs"]
mod tests;
