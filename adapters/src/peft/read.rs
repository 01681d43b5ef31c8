//! Reading an adapter: everything the files say must fit the base, and all that does not is said at once.

use std::path::{Path, PathBuf};

use super::{
    CONFIG_FILE, LORA_PREFIX, META_FINGERPRINT, META_LORA, PROMPT, TENSOR_FILE,
    config::{Config, Kind, PrefixConfig},
    folders,
    modules::{Module, modules},
    tensors::{TensorFile, is_readable},
};
use crate::{
    AdapterSet, AdapterSpec, BaseDescription, Error, LoraSpec, PrefixSpec, Problem, Result, Targets, targets,
};

/// An adapter, read and found to fit.
#[derive(Debug)]
pub struct Loaded {
    /// The adapters, resolved.
    pub set: AdapterSet,
    /// The flat store, as `set.layout` lays it out.
    pub values: Vec<f32>,
    /// What the user may want to know; nothing in it is an error.
    pub hints: Vec<String>,
}

/// Reads the adapter in a folder, or the LoRA and the prefix in `lora/` and `prefix/` below it.
///
/// F32, F16 and BF16 tensors are read. A prefix that was made by a projection comes back as the
/// prefix it made: PEFT's files do not hold the projection.
///
/// # Errors
/// [`Error::Read`], [`Error::NotAnAdapter`], [`Error::Json`], [`Error::SafeTensors`] for files that
/// cannot be read; [`Error::Mismatch`] with every reason why the adapter does not fit this base. A base
/// with another fingerprint is one of them, unless `allow_base_mismatch`.
pub fn load(dir: &Path, base: &BaseDescription, allow_base_mismatch: bool) -> Result<Loaded> {
    let mut sources = folders(dir)?.into_iter().map(Source::open).collect::<Result<Vec<_>>>()?;
    let mut report = Findings { allow_base_mismatch, ..Findings::default() };
    refuse_two_of_a_kind(&sources, &mut report);
    let fitted: Vec<Option<Fitted>> =
        sources.iter_mut().map(|source| Fitted::new(source, base, &mut report)).collect();
    report.or_refuse(dir)?;
    let mut spec = AdapterSpec::default();
    let mut values = Vec::new();
    for (source, fitted) in sources.iter_mut().zip(fitted.into_iter().flatten()) {
        values.extend(fitted.values(&mut source.tensors, &mut report)?);
        spec.lora = spec.lora.or(fitted.set.spec.lora);
        spec.prefix = spec.prefix.or(fitted.set.spec.prefix);
    }
    report.or_refuse(dir)?;
    // The LoRA's tensors come before the prefix's in a set of both, as its folder did.
    Ok(Loaded { set: AdapterSet::new(&spec, base)?, values, hints: report.hints })
}

/// The two files of one PEFT folder.
struct Source {
    config: Config,
    tensors: TensorFile,
}

impl Source {
    fn open(folder: PathBuf) -> Result<Self> {
        let path = folder.join(TENSOR_FILE);
        if !path.exists() && folder.join("adapter_model.bin").exists() {
            let found =
                "its tensors are a pickle, adapter_model.bin, which is not read (save it as safetensors)";
            return Err(Error::NotAnAdapter { path: folder, found });
        }
        Ok(Self { config: Config::read(&folder.join(CONFIG_FILE))?, tensors: TensorFile::open(&path)? })
    }
}

/// What was found while reading.
#[derive(Default)]
struct Findings {
    allow_base_mismatch: bool,
    problems: Vec<Problem>,
    hints: Vec<String>,
}

impl Findings {
    fn or_refuse(&mut self, dir: &Path) -> Result<()> {
        match std::mem::take(&mut self.problems) {
            problems if problems.is_empty() => Ok(()),
            problems => Err(Error::Mismatch { path: dir.to_owned(), problems }),
        }
    }

    fn field(&mut self, name: &str, value: impl ToString, expected: impl Into<String>) {
        let (name, value, expected) = (name.to_owned(), value.to_string(), expected.into());
        self.problems.push(Problem::Field { name, value, expected });
    }

    /// Said once, though a LoRA and a prefix can both be for the same other base.
    fn layers(&mut self, found: usize, expected: usize) {
        let problem = Problem::Layers { found, expected };
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    fn tensor(&mut self, tensors: &TensorFile, name: String, expected: &[usize]) {
        let Some(info) = tensors.info(&name) else {
            return self.problems.push(Problem::Missing(name));
        };
        if !is_readable(info.dtype) {
            self.problems.push(Problem::Dtype { tensor: name.clone(), found: info.dtype.to_string() });
        }
        if info.shape != expected {
            let (found, expected) = (info.shape.clone(), expected.to_vec());
            self.problems.push(Problem::Shape { tensor: name, found, expected });
        }
    }

    fn extras(&mut self, tensors: &TensorFile, expected: &[String]) {
        let extra =
            tensors.tensors().into_iter().map(|(name, _)| name).filter(|name| !expected.contains(name));
        self.problems.extend(extra.map(Problem::Extra));
    }
}

fn refuse_two_of_a_kind(sources: &[Source], report: &mut Findings) {
    let kinds: Vec<_> = sources.iter().filter_map(|source| source.config.kind.as_ref()).collect();
    match kinds[..] {
        [Kind::Lora { .. }, Kind::Lora { .. }] => {
            report.field("prefix/ peft_type", "LORA", "PREFIX_TUNING is expected");
        }
        [Kind::Prefix(_), Kind::Prefix(_)] => {
            report.field("lora/ peft_type", "PREFIX_TUNING", "LORA is expected");
        }
        [Kind::Prefix(_), Kind::Lora { .. }] => {
            report.field("lora/ peft_type", "PREFIX_TUNING", "LORA is expected");
            report.field("prefix/ peft_type", "LORA", "PREFIX_TUNING is expected");
        }
        _ => {}
    }
}

/// One adapter whose header fits the base.
struct Fitted {
    set: AdapterSet,
    modules: Vec<Module>,
}

impl Fitted {
    fn new(source: &mut Source, base: &BaseDescription, report: &mut Findings) -> Option<Self> {
        report.problems.append(&mut source.config.problems);
        check_base(source, base, report);
        match source.config.kind.as_ref()? {
            Kind::Lora { spec, layers_pattern, exclude } => {
                check_layers_pattern(layers_pattern, base, report);
                fit_lora(spec, exclude.as_ref(), &source.tensors, base, report)
            }
            Kind::Prefix(prefix) => fit_prefix(prefix, &source.tensors, base, report),
        }
    }

    /// The values of the flat store, as this adapter's own layout has them.
    fn values(&self, tensors: &mut TensorFile, report: &mut Findings) -> Result<Vec<f32>> {
        let mut values = vec![0.0; self.set.layout.len];
        for module in &self.modules {
            if let Some(a) = read_finite(tensors, &module.a(), report)? {
                module.split_a(&self.set, &a, &mut values);
            }
            if let Some(b) = read_finite(tensors, &module.b(), report)?
                && let Some(index) = module.split_b(&self.set, &b, &mut values)
            {
                report.problems.push(Problem::OutsideBlock { tensor: module.b(), index });
            }
        }
        if self.set.prefix.is_some()
            && let Some(prompt) = read_finite(tensors, PROMPT, report)?
        {
            values = prompt;
        }
        Ok(values)
    }
}

fn read_finite(tensors: &mut TensorFile, name: &str, report: &mut Findings) -> Result<Option<Vec<f32>>> {
    let values = tensors.read(name)?;
    let bad = values.as_ref().and_then(|values| values.iter().position(|value| !value.is_finite()));
    if let Some(index) = bad {
        report.problems.push(Problem::NotFinite { tensor: name.to_owned(), index });
        return Ok(None);
    }
    Ok(values)
}

fn check_base(source: &Source, base: &BaseDescription, report: &mut Findings) {
    let named = source.config.base_name.as_deref().unwrap_or("none");
    match (source.tensors.metadata(META_FINGERPRINT), base.fingerprint.as_deref()) {
        (Some(found), Some(expected)) if found != expected => {
            if report.allow_base_mismatch {
                report.hints.push(format!(
                    "the adapter was made for a base with fingerprint {found} ({named}), not {expected} ({})",
                    base.name
                ));
            } else {
                let (found, expected) = (found.to_owned(), expected.to_owned());
                report.problems.push(Problem::Base { found, expected });
            }
        }
        (Some(_), Some(_)) => {}
        (found, _) => {
            let who = if found.is_none() { "adapter" } else { "base" };
            report.hints.push(format!(
                "the {who} carries no base fingerprint, so that nothing but shapes was compared \
                 (the adapter names base {named}, this is {})",
                base.name
            ));
        }
    }
}

fn check_layers_pattern(layers_pattern: &[String], base: &BaseDescription, report: &mut Findings) {
    let segment = base.sites.first().map(|site| site.layers_segment()).unwrap_or_default();
    for name in layers_pattern.iter().filter(|&name| name != segment) {
        report.field("layers_pattern", name, format!("{segment} is what the base calls its layers"));
    }
}

fn fit_lora(
    config: &LoraSpec,
    exclude: Option<&Targets>,
    tensors: &TensorFile,
    base: &BaseDescription,
    report: &mut Findings,
) -> Option<Fitted> {
    let config = as_peft_matches(config, exclude, base, report);
    let fit = |spec: &LoraSpec, report: &mut Findings| {
        let set = AdapterSet::new(&AdapterSpec { lora: Some(spec.clone()), prefix: None }, base);
        let set = set.map_err(|error| report.problems.push(Problem::Spec(error.to_string()))).ok()?;
        Some(Fitted { modules: modules(&set, base), set })
    };
    let by_config = fit(&config, report);
    let by_config = match (by_config, tensors.metadata(META_LORA)) {
        (Some(by_config), Some(text)) => match serde_json::from_str::<LoraSpec>(text) {
            Ok(ours) => fit(&ours, report).inspect(|ours| same_modules(&by_config, ours, report)),
            Err(error) => {
                report.field(META_LORA, error, "the LoRA as this program writes it is expected");
                None
            }
        },
        (by_config, _) => by_config,
    };
    check_layers(&config, tensors, base, report);
    let fitted = by_config?;
    let mut expected = Vec::new();
    for module in &fitted.modules {
        report.tensor(tensors, module.a(), &[module.rank, module.inputs]);
        report.tensor(tensors, module.b(), &[module.outputs, module.rank]);
        expected.extend([module.a(), module.b()]);
    }
    report.extras(tensors, &expected);
    Some(fitted)
}

/// The config without what PEFT passes over: names in lists that match nothing, as long as another does
/// (it knows no parts), modules that it excludes, and pattern keys that apply to none of the others.
fn as_peft_matches(
    config: &LoraSpec,
    exclude: Option<&Targets>,
    base: &BaseDescription,
    report: &mut Findings,
) -> LoraSpec {
    let mut spec = config.clone();
    let paths: Vec<String> =
        base.sites.iter().flat_map(|site| (0..base.layers).map(|layer| site.module(layer))).collect();
    let mut idle = Vec::new();
    if let Targets::List(names) = &mut spec.targets {
        let used = |name: &String| paths.iter().any(|path| targets::names(name, path));
        if names.iter().any(used) {
            idle.extend(names.extract_if(.., |name| !used(name)));
        }
    }
    if let Some(exclude) = exclude {
        leave_out(&mut spec, exclude, base, report);
    }
    // The selection can fail here; the caller meets the same error again and reports it.
    if let Ok(chosen) = targets::select(&spec.targets, spec.layers.as_deref(), base) {
        let used: Vec<String> = chosen.into_iter().map(|one| one.path(base)).collect();
        idle.extend(idle_keys("rank_pattern", &mut spec.rank_pattern, &used));
        idle.extend(idle_keys("alpha_pattern", &mut spec.alpha_pattern, &used));
    }
    if !idle.is_empty() {
        report.hints.push(format!("the config's {} applies to no module of this base", idle.join(", ")));
    }
    spec
}

/// Turns the targets into the paths of those modules that `exclude` does not match, by PEFT's rules.
fn leave_out(spec: &mut LoraSpec, exclude: &Targets, base: &BaseDescription, report: &mut Findings) {
    let is_excluded = match targets::matcher(exclude) {
        Ok(is_excluded) => is_excluded,
        Err(error) => return report.problems.push(Problem::Spec(error.to_string())),
    };
    if let Ok(chosen) = targets::select(&spec.targets, spec.layers.as_deref(), base) {
        let paths = chosen.into_iter().map(|one| one.path(base)).filter(|path| !is_excluded(path));
        spec.targets = Targets::List(paths.collect());
        spec.layers = None;
    }
}

/// Takes out the keys that are the first match of no module.
fn idle_keys<T>(
    option: &'static str,
    patterns: &mut std::collections::BTreeMap<String, T>,
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

/// The config, which PEFT goes by, and our own record of the parts must say the same.
fn same_modules(config: &Fitted, ours: &Fitted, report: &mut Findings) {
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.abs().max(b.abs());
    let rslora = |fitted: &Fitted| fitted.set.spec.lora.as_ref().map(|lora| lora.rslora);
    let same = config.modules.len() == ours.modules.len()
        && rslora(config) == rslora(ours)
        && config
            .modules
            .iter()
            .zip(&ours.modules)
            .all(|(a, b)| a.path == b.path && a.rank == b.rank && close(a.alpha, b.alpha));
    if !same {
        report.field(
            CONFIG_FILE,
            "at odds with the tensor file",
            format!("its modules, ranks and alphas should be those of {META_LORA} there"),
        );
    }
}

/// Says it in one sentence when the adapter is for a deeper or a flatter base.
fn check_layers(config: &LoraSpec, tensors: &TensorFile, base: &BaseDescription, report: &mut Findings) {
    let layer = |(name, _): (String, _)| {
        let path = name.strip_prefix(LORA_PREFIX)?;
        base.sites.iter().find_map(|site| site.layer_of(path))
    };
    let Some(found) =
        tensors.tensors().into_iter().filter_map(layer).max().map(|last| last.saturating_add(1))
    else {
        return;
    };
    let all_layers =
        config.layers.is_none() && !matches!(config.targets, Targets::Regex(_)) && !names_layers(config);
    if found > base.layers || (all_layers && found < base.layers) {
        report.layers(found, base.layers);
    }
}

fn names_layers(config: &LoraSpec) -> bool {
    let Targets::List(names) = &config.targets else { return false };
    names.iter().any(|name| name.split('.').any(|segment| segment.parse::<usize>().is_ok()))
}

fn fit_prefix(
    config: &PrefixConfig,
    tensors: &TensorFile,
    base: &BaseDescription,
    report: &mut Findings,
) -> Option<Fitted> {
    if let Some(found) = config.layers.filter(|&found| found != base.layers) {
        report.layers(found, base.layers);
    }
    for (name, found, expected) in
        [("num_attention_heads", config.heads, base.heads), ("token_dim", config.width, base.width)]
    {
        if let Some(found) = found.filter(|&found| found != expected) {
            report.field(name, found, format!("the base has {expected}"));
        }
    }
    if config.projection {
        report.hints.push(
            "the prefix was made by a projection, which the files do not hold; the prefix itself is read"
                .to_owned(),
        );
    }
    report.tensor(tensors, PROMPT.to_owned(), &[config.length, 2 * base.layers * base.width]);
    report.extras(tensors, &[PROMPT.to_owned()]);
    let prefix = PrefixSpec { length: config.length, projection: None };
    let set = AdapterSet::new(&AdapterSpec { lora: None, prefix: Some(prefix) }, base);
    let set = set.map_err(|error| report.problems.push(Problem::Spec(error.to_string()))).ok()?;
    Some(Fitted { set, modules: Vec::new() })
}
