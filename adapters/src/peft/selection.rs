//! The config fields with which PEFT chooses modules, for every method that attaches to modules.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;
use serde_json::{Value, json};

use super::{Fields, Findings, MODULE_PREFIX, TensorFile, config::OneOrMany, modules::Module};
use crate::{
    BaseDescription, Result, Targets,
    targets::{self, Chosen},
};

const TARGETS: &str = "target_modules";
const NAMES_EXPECTED: &str = "names or a regular expression are expected";

/// Modules as a config chooses them.
#[derive(Debug)]
pub(crate) struct Selection {
    /// The field `target_modules`.
    pub targets: Targets,
    /// The field `layers_to_transform`; `None` for all layers.
    pub layers: Option<Vec<usize>>,
    layers_pattern: Vec<String>,
    exclude: Option<Targets>,
}

impl Selection {
    /// Takes the fields; nothing without targets.
    pub fn read(fields: &mut Fields) -> Option<Self> {
        let targets = fields.need::<OneOrMany<String>>(TARGETS, NAMES_EXPECTED);
        let layers = fields.take::<OneOrMany<usize>>("layers_to_transform", "layer numbers are expected");
        let layers_pattern = fields.take::<OneOrMany<String>>("layers_pattern", "a name is expected");
        let exclude = excluded_field(fields);
        let targets = written_targets(targets?);
        let layers = layers.map(OneOrMany::into_vec).filter(|layers| !layers.is_empty());
        let layers_pattern = layers_pattern.map(OneOrMany::into_vec).unwrap_or_default();
        let layers_pattern = layers_pattern.into_iter().filter(|name| !name.is_empty()).collect();
        Some(Self { targets, layers, layers_pattern, exclude })
    }

    /// Takes the fields of a method that knows no layers, and that PEFT gives `usual` targets if the config has none.
    pub fn without_layers(fields: &mut Fields, usual: Targets) -> Self {
        let targets = modules_field(fields, TARGETS).unwrap_or(usual);
        Self { targets, layers: None, layers_pattern: Vec::new(), exclude: excluded_field(fields) }
    }

    /// Whether PEFT adapts a module of this path. Of a base no more than the path is known.
    pub fn chooses(&self, path: &str) -> Result<bool> {
        let is_excluded = match &self.exclude {
            Some(exclude) => targets::matcher("exclude_modules", exclude)?(path),
            None => false,
        };
        if is_excluded || !targets::matcher(TARGETS, &self.targets)?(path) {
            return Ok(false);
        }
        // PEFT looks at the layer only where the end of a path is named.
        let by_end = match &self.targets {
            Targets::List(names) => !names.iter().any(|name| name == path),
            _ => false,
        };
        match &self.layers {
            Some(layers) if by_end => Ok(self.layer_of(path)?.is_some_and(|layer| layers.contains(&layer))),
            _ => Ok(true),
        }
    }

    /// The first number among the segments of a path, after `layers_pattern` if there is one.
    fn layer_of(&self, path: &str) -> Result<Option<usize>> {
        let number = |regex: Regex| regex.captures(path)?.get(1)?.as_str().parse().ok();
        if self.layers_pattern.is_empty() {
            let anywhere = r"^.*?\.[^.]*\.(\d+)\.";
            return Ok(number(targets::whole_match("layers_pattern", anywhere, anywhere)?));
        }
        for pattern in &self.layers_pattern {
            let anchored = format!(r"^(?:|.*?\.)(?:{pattern})\.(\d+)\.");
            if let Some(layer) = number(targets::whole_match("layers_pattern", pattern, &anchored)?) {
                return Ok(Some(layer));
            }
        }
        Ok(None)
    }

    /// Refuses a `layers_pattern` that is not what the base calls its layers.
    pub fn check_pattern(&self, base: &BaseDescription, findings: &mut Findings) {
        let segment = base.sites.first().map(|site| site.layers_segment()).unwrap_or_default();
        for name in self.layers_pattern.iter().filter(|&name| name != segment) {
            findings.field("layers_pattern", name, format!("{segment} is what the base calls its layers"));
        }
    }

    /// Targets and layers without what PEFT passes over: names in lists that match nothing, as long as another
    /// does (it knows no parts), which come third, and modules that it excludes.
    pub fn as_peft_matches(
        &self,
        base: &BaseDescription,
        findings: &mut Findings,
    ) -> (Targets, Option<Vec<usize>>, Vec<String>) {
        let mut targets = self.targets.clone();
        let paths: Vec<String> =
            base.sites.iter().flat_map(|site| (0..base.layers).map(|layer| site.module(layer))).collect();
        let mut idle = Vec::new();
        if let Targets::List(names) = &mut targets {
            let used = |name: &String| {
                self.names_embedding(name, base) || paths.iter().any(|path| targets::names(name, path))
            };
            if names.iter().any(used) {
                idle.extend(names.extract_if(.., |name| !used(name)));
            }
        }
        let (targets, layers) = self.without_excluded(targets, base, findings);
        (targets, layers, idle)
    }

    /// Whether PEFT finds the embedding of tokens by a name of the list: of one in no layer it wants the whole path where
    /// the config names layers.
    fn names_embedding(&self, name: &str, base: &BaseDescription) -> bool {
        let path = base.token_embedding.as_deref();
        path.is_some_and(|path| if self.layers.is_some() { name == path } else { targets::names(name, path) })
    }

    /// `targets` as the paths of those modules that the config does not exclude, by PEFT's rules.
    fn without_excluded(
        &self,
        targets: Targets,
        base: &BaseDescription,
        findings: &mut Findings,
    ) -> (Targets, Option<Vec<usize>>) {
        let unchanged = (targets, self.layers.clone());
        let Some(exclude) = &self.exclude else { return unchanged };
        let Some(is_excluded) = findings.accept(targets::matcher("exclude_modules", exclude)) else {
            return unchanged;
        };
        match targets::select_with_embedding(&unchanged.0, self.layers.as_deref(), base) {
            Ok(Chosen { modules, embedding }) => {
                let paths = modules.into_iter().map(|one| one.path(base));
                let embedding = base.token_embedding.clone().filter(|_| embedding);
                let paths = paths.chain(embedding).filter(|path| !is_excluded(path));
                (Targets::List(paths.collect()), None)
            }
            Err(_) => unchanged,
        }
    }
}

/// The field `target_modules`, if it is there.
pub(crate) fn targets_field(fields: &mut Fields) -> Option<Targets> {
    modules_field(fields, TARGETS)
}

/// A field that chooses modules as `target_modules` does, if it is there.
pub(crate) fn modules_field(fields: &mut Fields, name: &str) -> Option<Targets> {
    fields.take(name, NAMES_EXPECTED).map(written_targets)
}

/// The field `exclude_modules`, if it excludes anything.
pub(crate) fn excluded_field(fields: &mut Fields) -> Option<Targets> {
    match fields.take::<OneOrMany<String>>("exclude_modules", NAMES_EXPECTED)? {
        OneOrMany::One(text) if text.is_empty() => None,
        OneOrMany::One(text) => Some(Targets::Regex(text)),
        OneOrMany::Many(names) => Some(Targets::List(sorted(names))),
    }
}

fn written_targets(written: OneOrMany<String>) -> Targets {
    match written {
        OneOrMany::One(text) if text == "all-linear" => Targets::AllLinear,
        OneOrMany::One(text) => Targets::Regex(text),
        OneOrMany::Many(names) => Targets::List(sorted(names)),
    }
}

/// PEFT writes lists of names out of sets, in any order.
fn sorted(names: Vec<String>) -> Vec<String> {
    BTreeSet::from_iter(names).into_iter().collect()
}

/// Takes out the keys that are the first match of no module.
pub(crate) fn idle_keys<T>(
    option: &'static str,
    patterns: &mut BTreeMap<String, T>,
    modules: &[String],
) -> Vec<String> {
    let regexes: Option<Vec<_>> = patterns
        .keys()
        .map(|key| targets::pattern_regex(option, key).ok().map(|regex| (key.clone(), regex)))
        .collect();
    let Some(regexes) = regexes else { return Vec::new() }; // reported by the caller
    let first =
        |module: &String| regexes.iter().find(|(_, regex)| regex.is_match(module)).map(|(key, _)| key);
    let used: Vec<&String> = modules.iter().filter_map(first).collect();
    let idle: Vec<String> = patterns.keys().filter(|key| !used.contains(key)).cloned().collect();
    patterns.retain(|key, _| !idle.contains(key));
    idle
}

/// Says it in one sentence when the adapter is for a deeper or a flatter base.
pub(crate) fn check_layers(
    targets: &Targets,
    layers: Option<&[usize]>,
    tensors: &TensorFile,
    base: &BaseDescription,
    findings: &mut Findings,
) {
    let layer = |(name, _): (String, _)| {
        let path = name.strip_prefix(MODULE_PREFIX)?;
        let of_site = base.sites.iter().find_map(|site| site.layer_of(path));
        of_site.or_else(|| base.norms.iter().find_map(|norm| norm.layer_of(path)))
    };
    let Some(found) =
        tensors.tensors().into_iter().filter_map(layer).max().map(|last| last.saturating_add(1))
    else {
        return;
    };
    let all_layers = layers.is_none() && !matches!(targets, Targets::Regex(_)) && !names_layers(targets);
    if found > base.layers || (all_layers && found < base.layers) {
        findings.layers(found, base.layers);
    }
}

fn names_layers(targets: &Targets) -> bool {
    let Targets::List(names) = targets else { return false };
    names.iter().any(|name| name.split('.').any(|segment| segment.parse::<usize>().is_ok()))
}

/// `target_modules` and `layers_to_transform` with which PEFT finds exactly these modules, and with `embedding` that of
/// tokens.
///
/// A list goes out as the user wrote it, and the embedding by its path where layers are named. Parts PEFT does not know; a regular expression can match modules
/// that are no sites (an activation), on which PEFT stops: these go out by site, or else by full path.
pub(crate) fn target_fields(
    targets: &Targets,
    layers: Option<&[usize]>,
    modules: &[Module],
    fused: bool,
    embedding: bool,
    base: &BaseDescription,
) -> [(&'static str, Value); 2] {
    let fields = |targets: Value, layers: Option<&[usize]>| {
        [("layers_to_transform", json!(layers)), ("target_modules", targets)]
    };
    let embedding = base.token_embedding.as_ref().filter(|_| embedding);
    if let (Targets::List(names), false) = (targets, fused) {
        let by_path = embedding.filter(|_| layers.is_some());
        let written =
            |name: &String| by_path.filter(|path| targets::names(name, path)).unwrap_or(name).clone();
        return fields(json!(names.iter().map(written).collect::<Vec<_>>()), layers);
    }
    let with_embedding =
        |names: Vec<String>| json!(names.into_iter().chain(embedding.cloned()).collect::<Vec<_>>());
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
        return fields(with_embedding(names), layers.as_deref());
    }
    fields(with_embedding(modules.iter().map(|module| module.path.clone()).collect()), None)
}
