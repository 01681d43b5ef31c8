//! IA3: learned vectors that scale the output or the input of linear modules (Liu et al. 2022, arXiv:2205.05638).
//!
//! A module is `y = l * (x W + b)` with l `[outputs]`, or as a feed-forward module `y = (l * x) W + b` with l
//! `[inputs]`. Initial values: 1, so that the adapter starts as the base alone. They decay as PEFT's with its trainer do.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{AdapterSpec, Kind, Method, Stored};
use crate::{
    AdapterSet, BaseDescription, Contribution, Error, OutputScale, Result, SiteVectors, Targets,
    init::Init,
    layout::Slots,
    peft::{
        self, Fields, Files, Findings, MODULE_PREFIX, TensorFile,
        selection::{Selection, check_layers, modules_field},
    },
    set::layer_ranges,
    targets::{self, Matcher, matcher},
};

/// Vectors that scale what modules give, or what feed-forward modules are given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Ia3Spec {
    /// Modules with a vector.
    pub targets: Targets,
    /// Those of them whose input is scaled and not the output: ends of module paths, or a regular expression for whole
    /// paths. `None` for the usual ones ([`Self::usual_feedforward`]) among the targets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub feedforward: Option<Targets>,
}

impl Default for Ia3Spec {
    fn default() -> Self {
        Self { targets: list(["c_attn", "mlp.c_proj"]), feedforward: None }
    }
}

fn list<const N: usize>(names: [&str; N]) -> Targets {
    Targets::List(names.map(str::to_owned).into())
}

/// A module with a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Scaled {
    layer: usize,
    site: usize,
    /// Whether the vector scales the input.
    is_feedforward: bool,
}

impl Scaled {
    fn path(self, base: &BaseDescription) -> String {
        base.sites[self.site].module(self.layer)
    }
}

/// Whether an entry of a list names the feed-forward module at `path`: PEFT compares ends of text here, not of names.
fn ends(name: &str, path: &str) -> bool {
    path.ends_with(name)
}

/// Whether an entry of a list names any of the modules at `paths`.
fn used(name: &str, paths: &[String]) -> bool {
    paths.iter().any(|path| ends(name, path))
}

impl Ia3Spec {
    /// The kind `ia3`.
    pub const KIND: Kind = Kind { name: "ia3", peft_type: "IA3", claims: |_| true, read: StoredIa3::read };

    /// The feed-forward modules that PEFT chooses for GPT-2.
    pub fn usual_feedforward() -> Targets {
        list(["mlp.c_proj"])
    }

    /// The feed-forward modules as a user writes them: `mlp.c_proj`, `none`.
    pub fn feedforward_text(&self) -> String {
        match self.feedforward.clone().unwrap_or_else(Self::usual_feedforward) {
            Targets::List(names) if names.is_empty() => "none".to_owned(),
            other => other.to_string(),
        }
    }

    /// The modules with a vector, in the order layer, site.
    ///
    /// # Errors
    /// When a name matches nothing, or a part of a module is meant.
    fn chosen(&self, base: &BaseDescription) -> Result<Vec<Scaled>> {
        let selected = targets::whole_modules(&self.targets, None, Self::KIND.name, base)?;
        let paths: Vec<String> = selected.iter().map(|one| one.path(base)).collect();
        let unmatched = |target: &str| Error::FeedforwardUnmatched {
            target: target.to_owned(),
            targets: self.targets.to_string(),
        };
        let feedforward = self.feedforward.clone().unwrap_or_else(Self::usual_feedforward);
        let is_feedforward: Matcher = match &feedforward {
            Targets::List(names) => Box::new(|path| names.iter().any(|name| ends(name, path))),
            other => matcher("feedforward", other)?,
        };
        let scaled = selected.iter().zip(&paths).map(|(one, path)| Scaled {
            layer: one.layer,
            site: one.site,
            is_feedforward: is_feedforward(path),
        });
        let scaled: Vec<Scaled> = scaled.collect();
        match &self.feedforward {
            Some(Targets::List(names)) => match names.iter().find(|name| !used(name, &paths)) {
                Some(idle) => Err(unmatched(idle)),
                None => Ok(scaled),
            },
            Some(other) if !scaled.iter().any(|one| one.is_feedforward) => Err(unmatched(&other.to_string())),
            _ => Ok(scaled),
        }
    }

    /// `feedforward_modules` and `target_modules` with which PEFT finds exactly these modules: the user's lists, or
    /// else names of sites, or else full paths. PEFT wants the first to be a part of the second, word by word.
    fn module_fields(&self, base: &BaseDescription) -> Result<[(&'static str, Value); 2]> {
        let chosen = self.chosen(base)?;
        let all = |text: &dyn Fn(Scaled) -> String, feedforward: bool| {
            let of = chosen.iter().filter(|one| one.is_feedforward || !feedforward);
            let mut texts: Vec<String> = of.map(|&one| text(one)).collect();
            texts.sort();
            texts.dedup();
            texts
        };
        let site = |one: Scaled| base.sites[one.site].name.clone();
        let path = |one: Scaled| one.path(base);
        let as_given = match (&self.targets, &self.feedforward) {
            (Targets::List(targets), Some(Targets::List(names))) => Some((targets.clone(), names.clone())),
            (Targets::List(targets), None) => Some((targets.clone(), all(&site, true))),
            _ => None,
        };
        let by_site = (all(&site, false), all(&site, true));
        let same = |(targets, feedforward): &(Vec<String>, Vec<String>)| {
            let (is_part, feedforward) =
                (feedforward.iter().all(|name| targets.contains(name)), feedforward.clone());
            let spec = Self {
                targets: Targets::List(targets.clone()),
                feedforward: Some(Targets::List(feedforward)),
            };
            is_part && spec.chosen(base).is_ok_and(|found| found == chosen)
        };
        let found = as_given.into_iter().chain([by_site]).find(same);
        let (targets, feedforward) = found.unwrap_or_else(|| (all(&path, false), all(&path, true)));
        Ok([("feedforward_modules", json!(feedforward)), ("target_modules", json!(targets))])
    }
}

impl Method for Ia3Spec {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn resolve(&self, base: &BaseDescription, slots: &mut Slots) -> Result<Contribution> {
        let mut vectors = Vec::new();
        for one in self.chosen(base)? {
            let (layer, site) = (one.layer, one.site);
            let (inputs, outputs) = (base.sites[site].inputs, base.sites[site].outputs);
            let shape = if one.is_feedforward { [1, inputs] } else { [outputs, 1] };
            let vector = slots.push(format!("{MODULE_PREFIX}{}.ia3_l", one.path(base)), &shape)?;
            let g = OutputScale { vector, over_norms: false, with_bias: true };
            let (u, g) = if one.is_feedforward { (Some(vector), None) } else { (None, Some(g)) };
            vectors.push(SiteVectors { layer, site, u, g, bias: None });
        }
        Ok(Contribution { vectors, ..Contribution::default() })
    }

    fn init(&self, set: &AdapterSet, values: &mut [f32], _: &Init) -> Result<()> {
        let own = set.layout.tensors.iter().filter(|slot| slot.method == Self::KIND.name);
        own.for_each(|slot| values[slot.range()].fill(1.0));
        Ok(())
    }

    /// A line per site and side: `attn.c_attn (output): layers 0-11`.
    fn matched(&self, _: &AdapterSet, base: &BaseDescription) -> Vec<String> {
        let chosen = self.chosen(base).unwrap_or_default();
        let sides = (0..base.sites.len()).flat_map(|site| [(site, false), (site, true)]);
        let line = |(site, is_feedforward): (usize, bool)| {
            let own = chosen.iter().filter(|one| (one.site, one.is_feedforward) == (site, is_feedforward));
            let layers: Vec<usize> = own.map(|one| one.layer).collect();
            let side = if is_feedforward { "input" } else { "output" };
            let text = || format!("{} ({side}): {}", base.sites[site].name, layer_ranges(&layers));
            (!layers.is_empty()).then(text)
        };
        sides.filter_map(line).collect()
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        vec![
            ("kind", Self::KIND.name.to_owned()),
            ("targets", self.targets.to_string()),
            ("feedforward", self.feedforward_text()),
        ]
    }

    fn files<'a>(
        &'a self,
        set: &'a AdapterSet,
        values: &'a [f32],
        _: Option<&'a [f32]>,
        base: &BaseDescription,
    ) -> Result<Files<'a>> {
        let fields = [
            ("fan_in_fan_out", json!(base.sites.iter().any(|site| site.fan_in_fan_out))),
            ("init_ia3_weights", json!(true)),
            ("modules_to_save", Value::Null),
        ];
        let fields = fields.into_iter().chain(self.module_fields(base)?);
        Ok(Files::plain(peft::config_text(&Self::KIND, base, fields), &Self::KIND, set, values, base))
    }
}

/// IA3 as its config has it.
#[derive(Debug)]
struct StoredIa3 {
    selection: Selection,
    feedforward: Targets,
}

impl StoredIa3 {
    /// PEFT chooses modules of the architecture where the config names none.
    fn read(fields: &mut Fields) -> Option<Box<dyn Stored>> {
        let _: Option<bool> = fields.take("init_ia3_weights", "true or false is expected");
        let selection = Selection::without_layers(fields, Ia3Spec::default().targets);
        let feedforward = modules_field(fields, "feedforward_modules");
        let feedforward = feedforward.unwrap_or_else(Ia3Spec::usual_feedforward);
        Some(Box::new(Self { selection, feedforward }))
    }

    /// The spec without what PEFT passes over.
    fn as_peft_matches(&self, base: &BaseDescription, findings: &mut Findings) -> Result<Ia3Spec> {
        let (targets, _, mut idle) = self.selection.as_peft_matches(base, findings);
        let (mut feedforward, is_used) =
            (self.feedforward.clone(), matcher("feedforward_modules", &self.feedforward)?);
        let chosen = Ia3Spec { targets: targets.clone(), feedforward: None }.chosen(base)?;
        let paths: Vec<String> = chosen.into_iter().map(|one| one.path(base)).collect();
        if let Targets::List(names) = &mut feedforward {
            idle.extend(names.extract_if(.., |name| !used(name, &paths)));
        } else if !paths.iter().any(|path| is_used(path)) {
            idle.push(feedforward.to_string());
            feedforward = Targets::List(Vec::new());
        }
        if !idle.is_empty() {
            let names = idle.join(", ");
            findings.hints.push(format!("the config's {names} applies to no module of this base"));
        }
        Ok(Ia3Spec { targets, feedforward: Some(feedforward) })
    }
}

impl Stored for StoredIa3 {
    fn kind(&self) -> &'static Kind {
        &Ia3Spec::KIND
    }

    fn spec(&self, _: &TensorFile) -> AdapterSpec {
        let (targets, feedforward) = (self.selection.targets.clone(), Some(self.feedforward.clone()));
        Ia3Spec { targets, feedforward }.into()
    }

    fn fit(
        &self,
        tensors: &TensorFile,
        base: &BaseDescription,
        findings: &mut Findings,
    ) -> Option<AdapterSet> {
        let spec = self.as_peft_matches(base, findings);
        check_layers(&self.selection.targets, None, tensors, base, findings);
        let set = findings.accept(spec.and_then(|spec| AdapterSet::new(&spec.into(), base)))?;
        findings.plain(tensors, &set);
        Some(set)
    }
}

#[cfg(test)]
#[path = "ia3_tests.rs"]
mod tests;
