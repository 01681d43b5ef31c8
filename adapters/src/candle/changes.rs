//! Turns the tensors of a source into changes of named parameters.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Device, Tensor};

use super::{
    fold::{Change, LowRank, Side, Stored},
    source::{Lora, Method, Source},
};
use crate::{
    Problem, Result,
    peft::{Findings, MODULE_PREFIX},
};

/// Ends of tensor names, after the module's path.
const A: &str = "lora_A.weight";
const B: &str = "lora_B.weight";
const B_BIAS: &str = "lora_B.bias";
const EMBEDDING_A: &str = "lora_embedding_A";
const EMBEDDING_B: &str = "lora_embedding_B";
const MAGNITUDE: &str = "lora_magnitude_vector";
const IA3: &str = "ia3_l";
/// Stand between a module's path and a parameter that takes the place of the base's.
const REPLACED: [&str; 2] = [".base_layer.", ".ln_tuning_layers."];

/// Changes by parameter, such as `model.layers.0.self_attn.q_proj.weight`, in the order of their use.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub by_parameter: BTreeMap<String, Vec<Change>>,
    /// Parameters that a base may lack: biases that are only scaled.
    pub optional: BTreeSet<String>,
}

/// Tensors of one module by the end of their names.
type Parts = BTreeMap<&'static str, Tensor>;

impl Changes {
    fn push(&mut self, parameter: String, change: Change) {
        self.by_parameter.entry(parameter).or_default().push(change);
    }

    /// Adds what `source` changes.
    ///
    /// # Errors
    /// Every tensor that is missing, left over, of a wrong shape or type or not finite, at once.
    pub fn add(&mut self, source: &mut Source) -> Result<()> {
        let mut findings = Findings::default();
        let mut modules: BTreeMap<String, Parts> = BTreeMap::new();
        let names: Vec<String> = source.tensors.tensors().into_iter().map(|(name, _)| name).collect();
        for name in names {
            let Some(path) = name.strip_prefix(MODULE_PREFIX) else {
                findings.problems.push(Problem::Extra(name));
                continue;
            };
            let Some(tensor) = read(source, &name, &mut findings)? else { continue };
            match own_part(path) {
                Some((module, part)) => {
                    modules.entry(module.to_owned()).or_default().insert(part, tensor);
                }
                // What PEFT stores under a parameter's own name takes the place of the parameter.
                None => {
                    let parameter = REPLACED.iter().fold(path.to_owned(), |path, it| path.replace(it, "."));
                    self.push(parameter, Change::Replace(tensor));
                }
            }
        }
        for (module, parts) in modules {
            let problems = findings.problems.len();
            match &source.method {
                Method::Lora(lora) => self.add_lora(lora, &module, parts, &mut findings)?,
                Method::Ia3 { fan_in_fan_out, .. } => {
                    self.add_ia3(*fan_in_fan_out, &module, parts, &mut findings)
                }
                Method::LnTuning => left_over(&module, parts, &mut findings),
            }
            if findings.problems.len() == problems && source.chooses(&module) == Some(false) {
                // PEFT would pass over it.
                let name = format!("{MODULE_PREFIX}{module}");
                findings.field("target_modules", format!("at odds with {name}"), "both should name the same");
            }
        }
        findings.or_refuse(&source.folder)
    }

    fn add_lora(
        &mut self,
        lora: &Lora,
        module: &str,
        mut parts: Parts,
        findings: &mut Findings,
    ) -> Result<()> {
        let is_embedding = parts.contains_key(EMBEDDING_A) || parts.contains_key(EMBEDDING_B);
        let names = if is_embedding { [EMBEDDING_A, EMBEDDING_B] } else { [A, B] };
        let (rank, scale) = lora.rank_and_scale(module)?;
        let [a, b] = names.map(|name| need(module, name, &mut parts, findings));
        let (Some(a), Some(b)) = (a, b) else { return Ok(()) };
        if a.rank() > 2 {
            findings.field(
                "target_modules",
                module,
                "a linear module or an embedding is supported, no convolution",
            );
            return Ok(());
        }
        check(module, names[0], &a, |found| vec![rank, found.get(1).copied().unwrap_or_default()], findings);
        check(module, names[1], &b, |found| vec![found.first().copied().unwrap_or_default(), rank], findings);
        let outputs = b.dims().first().copied().unwrap_or_default();
        let mut vector = |part, wanted: bool, findings: &mut Findings| {
            let found = if wanted { need(module, part, &mut parts, findings) } else { None };
            found.inspect(|found| check(module, part, found, |_| vec![outputs], findings))
        };
        let magnitude = vector(MAGNITUDE, lora.dora, findings);
        let bias = vector(B_BIAS, lora.bias && !is_embedding, findings);
        left_over(module, parts, findings);
        if let Some(bias) = bias {
            self.push(format!("{module}.bias"), Change::Add((bias * scale)?));
        }
        let stored = if is_embedding { Stored::Embedding } else { Stored::of_linear(lora.fan_in_fan_out) };
        let delta = LowRank { a, b, scale, magnitude, stored };
        self.push(format!("{module}.weight"), Change::LowRank(delta));
        Ok(())
    }

    fn add_ia3(&mut self, fan_in_fan_out: bool, module: &str, mut parts: Parts, findings: &mut Findings) {
        let factors = need(module, IA3, &mut parts, findings);
        left_over(module, parts, findings);
        let Some(factors) = factors else { return };
        let side = match *factors.dims() {
            [_, 1] => Side::Outputs,
            [1, _] => Side::Inputs, // a feed-forward module: its input is scaled
            _ => {
                check(module, IA3, &factors, |found| vec![found.iter().product(), 1], findings);
                return;
            }
        };
        let Ok(factors) = factors.flatten_all() else { return };
        if side == Side::Outputs {
            self.optional.insert(format!("{module}.bias"));
            self.push(format!("{module}.bias"), Change::Multiply(factors.clone()));
        }
        self.push(format!("{module}.weight"), Change::Scale { factors, side, fan_in_fan_out });
    }
}

/// The values of a tensor, in F32 on the CPU; nothing where they cannot be read, which is noted.
fn read(source: &mut Source, name: &str, findings: &mut Findings) -> Result<Option<Tensor>> {
    let shape = source.tensors.info(name).map(|info| info.shape.clone()).unwrap_or_default();
    findings.tensor(&source.tensors, name.to_owned(), &shape);
    let values = findings.read_finite(&mut source.tensors, name)?;
    Ok(values.map(|values| Tensor::from_vec(values, shape, &Device::Cpu)).transpose()?)
}

/// Module and end of a name that a method gives its own tensors.
fn own_part(path: &str) -> Option<(&str, &'static str)> {
    // Some versions wrote the magnitude as the weight of a module.
    let path = path.strip_suffix(".weight").filter(|path| path.ends_with(MAGNITUDE)).unwrap_or(path);
    let part = [A, B, B_BIAS, EMBEDDING_A, EMBEDDING_B, MAGNITUDE, IA3]
        .into_iter()
        .find(|part| path.strip_suffix(part).is_some_and(|module| module.ends_with('.')))?;
    Some((path.strip_suffix(part)?.strip_suffix('.')?, part))
}

fn file_name(module: &str, part: &str) -> String {
    format!("{MODULE_PREFIX}{module}.{part}")
}

fn need(module: &str, part: &'static str, parts: &mut Parts, findings: &mut Findings) -> Option<Tensor> {
    let found = parts.remove(part);
    if found.is_none() {
        findings.problems.push(Problem::Missing(file_name(module, part)));
    }
    found
}

/// Notes a tensor whose shape is not the one that is made of it.
fn check(
    module: &str,
    part: &str,
    tensor: &Tensor,
    expected: impl Fn(&[usize]) -> Vec<usize>,
    findings: &mut Findings,
) {
    let (found, expected) = (tensor.dims().to_vec(), expected(tensor.dims()));
    if found != expected {
        findings.problems.push(Problem::Shape { tensor: file_name(module, part), found, expected });
    }
}

/// Notes what the config does not promise.
fn left_over(module: &str, parts: Parts, findings: &mut Findings) {
    findings.problems.extend(parts.into_keys().map(|part| Problem::Extra(file_name(module, part))));
}
