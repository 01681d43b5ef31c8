//! PEFT folders of [`LoraLinear`] layers: written, and read into a `VarMap`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::PoisonError,
};

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use serde_json::json;

use super::{
    LoraLinear,
    changes::Changes,
    fold::{Change, LowRank, Stored},
    source::{Method, Source},
};
use crate::{
    AdapterSet, BaseDescription, Error, LoraSpec, Problem, Result, SiteDescription, Targets,
    methods::Method as _, peft::check_finite,
};

/// A LoRA that was read.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedLora {
    /// What [`LoraLinear::new`] needs to make each of its layers.
    pub spec: LoraSpec,
    /// Paths of its modules, sorted; each has its A and B in the `VarMap`.
    pub modules: Vec<String>,
    /// Name of the base it was made for.
    pub base: Option<String>,
}

/// Writes layers as one LoRA in PEFT's form: `adapter_config.json` and `adapter_model.safetensors` in `dir`.
///
/// `base` is the name or folder of the base, which PEFT's `AutoPeft..` classes load, and `task_type` what PEFT wraps
/// the model for (`CAUSAL_LM`, `SEQ_CLS` ..; without one it wraps any model). A layer's path should be the path of
/// its module in Transformers. An adapter in `dir` is replaced in one step.
///
/// # Errors
/// [`Error::Layers`] for layers without a path, with the same path, or with different dropout or scaling, which
/// PEFT's config has once; [`Error::NotFinite`] for a value that is NaN or infinite; [`Error::Write`].
pub fn save(
    dir: impl AsRef<Path>,
    layers: &[&LoraLinear],
    base: &str,
    task_type: Option<&str>,
) -> Result<()> {
    let first = *layers.first().ok_or(Error::Empty)?;
    check(first, layers)?;
    let base = describe(base, layers)?;
    let spec = spec_of(first, layers);
    let set = AdapterSet::new(&spec.clone().into(), &base)?;
    let mut values = vec![0.0; set.layout.len];
    for lora in &set.loras {
        for (slot, tensor) in [(lora.a, layers[lora.site].a()), (lora.b, layers[lora.site].b())] {
            let slot = &set.layout.tensors[slot];
            let own = tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            check_finite(&slot.name, &own)?;
            values[slot.range()].copy_from_slice(&own);
        }
    }
    let mut files = spec.files(&set, &values, None, &base)?;
    files.set_field("task_type", json!(task_type));
    files.replace(dir.as_ref())
}

/// Reads a LoRA that PEFT or [`save`] wrote: A and B of its modules become variables of `varmap`.
///
/// [`LoraLinear::new`] then finds them where it would make new ones. A module of which no layer is made keeps its
/// variables in the map, and is not saved again; compare [`SavedLora::modules`] with your layers.
///
/// # Errors
/// As [`Adapter::open`](super::Adapter::open), and [`Error::Mismatch`] for what a [`LoraLinear`] does not have:
/// other methods, DoRA, biases, embeddings and modules that were trained as a whole.
pub fn load(dir: impl AsRef<Path>, varmap: &VarMap, dtype: DType, device: &Device) -> Result<SavedLora> {
    let mut source = Source::open(dir.as_ref().to_owned())?;
    let mut changes = Changes::default();
    changes.add(&mut source)?;
    let refuse = |problems| Error::Mismatch { path: source.folder.clone(), problems };
    let Method::Lora(lora) = &source.method else {
        let expected = "a LoRA is expected (others can be folded into the base)".to_owned();
        let value = if matches!(source.method, Method::LnTuning) { "LN_TUNING" } else { "IA3" };
        let problem = Problem::Field { name: "peft_type".to_owned(), value: value.to_owned(), expected };
        return Err(refuse(vec![problem]));
    };
    let mut factors: BTreeMap<String, [&Tensor; 2]> = BTreeMap::new();
    let mut problems = Vec::new();
    for (parameter, changes) in &changes.by_parameter {
        match (parameter.strip_suffix(".weight"), &changes[..]) {
            (Some(module), [Change::LowRank(LowRank { a, b, magnitude: None, stored, .. })])
                if *stored != Stored::Embedding =>
            {
                factors.insert(module.to_owned(), [a, b]);
            }
            _ => problems.push(Problem::Extra(parameter.clone())),
        }
    }
    if !problems.is_empty() {
        return Err(refuse(problems));
    }
    let modules = factors.keys().cloned().collect();
    let mut variables = Vec::new();
    for (module, pair) in factors {
        for (name, factor) in ["lora_A", "lora_B"].into_iter().zip(pair) {
            let variable = Var::from_tensor(&factor.to_dtype(dtype)?.to_device(device)?)?;
            variables.push((format!("{module}.{name}.weight"), variable));
        }
    }
    varmap.data().lock().unwrap_or_else(PoisonError::into_inner).extend(variables);
    Ok(SavedLora { spec: lora.spec.clone(), modules, base: source.base })
}

/// Refuses layers that one config cannot describe.
fn check(first: &LoraLinear, layers: &[&LoraLinear]) -> Result<()> {
    let mut paths = BTreeSet::new();
    for layer in layers {
        if layer.path().is_empty() {
            return Err(Error::Layers { cause: "one has no path; make it with vb.pp(PATH)".to_owned() });
        }
        if !paths.insert(layer.path()) {
            return Err(layer.refuse("is there twice; give each layer a path of its own"));
        }
        if (layer.rslora(), layer.dropout()) != (first.rslora(), first.dropout()) {
            return Err(layer.refuse("has another dropout or rslora than the first layer; give all the same"));
        }
    }
    Ok(())
}

/// A base that consists of these layers: each is the only module of its kind.
fn describe(name: &str, layers: &[&LoraLinear]) -> Result<BaseDescription> {
    let site = |layer: &&LoraLinear| {
        let (outputs, inputs) = layer.base().weight().dims2()?;
        let (name, key) = (layer.path().to_owned(), layer.path().to_owned());
        Ok(SiteDescription { name, key, inputs, outputs, fan_in_fan_out: false, parts: Vec::new() })
    };
    Ok(BaseDescription {
        name: name.to_owned(),
        revision: None,
        fingerprint: None,
        layers: 1,
        heads: 1,
        width: 1,
        positions: 1,
        vocab: 1,
        sites: layers.iter().map(site).collect::<Result<_>>()?,
        token_embedding: None,
        norms: Vec::new(),
    })
}

/// The first layer's rank and alpha for all; those of the others by their whole path.
fn spec_of(first: &LoraLinear, layers: &[&LoraLinear]) -> LoraSpec {
    let key = |layer: &LoraLinear| format!("^{}", regex::escape(layer.path()));
    let ranks = layers.iter().filter(|layer| layer.rank() != first.rank());
    let alphas = layers.iter().filter(|layer| layer.alpha() != first.alpha());
    LoraSpec {
        rank: first.rank(),
        alpha: first.alpha(),
        targets: Targets::List(layers.iter().map(|layer| layer.path().to_owned()).collect()),
        layers: None,
        dropout: first.dropout(),
        rslora: first.rslora(),
        rank_pattern: ranks.map(|layer| (key(layer), layer.rank())).collect(),
        alpha_pattern: alphas.map(|layer| (key(layer), layer.alpha())).collect(),
        ..LoraSpec::default()
    }
}
