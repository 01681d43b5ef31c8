//! Helpers of several topics: bases, adapters without zeros, rows of tokens, differences.

use std::{path::Path, sync::Arc};

use engraft::{
    data::{Batch, NO_LOSS, Row},
    device::{DType, View},
    engine::Trainer,
    error::Result,
    kernels::orthogonality::reference as orthogonality,
    model::{AdapterBindings, Base, BaseSource, Decoder},
    optim::SavedTensor,
};
use engraft_adapters::{AdapterSet, AdapterSpec, LoraSpec, PrefixSpec};
use engraft_util::rng;
use half::f16;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;
use tempfile::TempDir;

/// One of the bases of tests/golden.
pub fn golden(name: &str) -> Arc<Base> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bases").join(name);
    let cache = tempfile::tempdir().unwrap();
    Arc::new(Base::load(&BaseSource::Folder(folder), name, cache.path()).unwrap())
}

/// Sizes of a base made here.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub layers: usize,
    pub heads: usize,
    pub width: usize,
    pub inner: usize,
    pub positions: usize,
    pub vocab: usize,
}

/// A base of random weights, with the folder that its mapping needs.
pub struct RandomBase {
    pub base: Arc<Base>,
    _folder: TempDir,
}

/// Weights N(0, 1) / sqrt(inputs), so that signals keep their size; gains around 1.
pub fn random_base(sizes: Sizes, activation: &str) -> RandomBase {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({
        "model_type": "gpt2", "n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.width,
        "n_inner": sizes.inner, "n_positions": sizes.positions, "vocab_size": sizes.vocab,
        "activation_function": activation,
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let tensors: Vec<_> = shapes(sizes).into_iter().map(|(name, shape)| draw(name, shape)).collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.clone(), TensorView::new(Dtype::F16, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    let source = BaseSource::Folder(folder.path().to_owned());
    let base = Base::load(&source, "random", &folder.path().join("cache")).unwrap();
    RandomBase { base: Arc::new(base), _folder: folder }
}

fn shapes(Sizes { layers, width: c, inner: f, positions, vocab, .. }: Sizes) -> Vec<(String, Vec<usize>)> {
    let mut shapes =
        vec![("wte.weight".to_owned(), vec![vocab, c]), ("wpe.weight".into(), vec![positions, c])];
    for layer in 0..layers {
        for norm in ["ln_1", "ln_2"] {
            shapes.push((format!("h.{layer}.{norm}.weight"), vec![c]));
            shapes.push((format!("h.{layer}.{norm}.bias"), vec![c]));
        }
        let linear =
            [("attn.c_attn", c, 3 * c), ("attn.c_proj", c, c), ("mlp.c_fc", c, f), ("mlp.c_proj", f, c)];
        for (site, inputs, outputs) in linear {
            shapes.push((format!("h.{layer}.{site}.weight"), vec![inputs, outputs]));
            shapes.push((format!("h.{layer}.{site}.bias"), vec![outputs]));
        }
    }
    shapes.extend([("ln_f.weight".to_owned(), vec![c]), ("ln_f.bias".into(), vec![c])]);
    shapes
}

fn draw(name: String, shape: Vec<usize>) -> (String, Vec<usize>, Vec<u8>) {
    let key = rng::key(&[11, rng::name(&name)]);
    let gain = name.contains("ln_") && name.ends_with("weight");
    let (mean, spread) = match shape.len() {
        1 => (if gain { 1.0 } else { 0.0 }, 0.1),
        _ if name.contains("wte") || name.contains("wpe") => (0.0, 0.3),
        _ => (0.0, 1.0 / (shape[0] as f32).sqrt()),
    };
    let len = shape.iter().product::<usize>() as u64;
    let bytes = (0..len)
        .flat_map(|index| f16::from_f32(mean + spread * rng::normal(key, index)).to_le_bytes())
        .collect();
    (format!("transformer.{name}"), shape, bytes)
}

/// An adapter and values for it, none of them zero.
pub struct Case {
    pub name: &'static str,
    pub set: AdapterSet,
    pub values: Vec<f32>,
}

/// LoRA of rank 3 and scale 2.5 on `targets`.
pub fn lora(targets: &str, dropout: f64) -> LoraSpec {
    LoraSpec { rank: 3, alpha: 7.5, targets: targets.parse().unwrap(), dropout, ..LoraSpec::default() }
}

pub fn prefix(length: usize, projection: Option<usize>) -> PrefixSpec {
    PrefixSpec { length, projection }
}

pub fn case(name: &'static str, base: &Base, lora: Option<LoraSpec>, prefix: Option<PrefixSpec>) -> Case {
    let set = AdapterSet::new(&AdapterSpec { lora, prefix, ..AdapterSpec::default() }, &base.description())
        .unwrap();
    let values = values(&set);
    Case { name, set, values }
}

/// Cases that every policy has to treat alike.
pub fn cases(base: &Base, dropout: f64) -> Vec<Case> {
    let all = || Some(lora("all-linear", dropout));
    let parts = || Some(lora("q,k,v,attn.c_proj,c_fc,mlp.c_proj", dropout));
    vec![
        case("lora", base, all(), None),
        case("lora on parts", base, parts(), None),
        case("prefix", base, None, Some(prefix(5, None))),
        case("lora and prefix", base, all(), Some(prefix(5, None))),
        case("projected prefix", base, None, Some(prefix(5, Some(13)))),
    ]
}

/// A of the size of its usual start, B large enough to matter, keys and values N(0, 1/4).
pub fn values(set: &AdapterSet) -> Vec<f32> {
    let mut values = vec![0f32; set.layout.len];
    for slot in &set.layout.tensors {
        let key = rng::key(&[23, rng::name(&slot.name)]);
        let spread = match slot.name.contains("lora_B") {
            true => 0.1,
            false if slot.name.contains("lora_A") => 1.0 / (slot.shape[1] as f32).sqrt(),
            false => 0.5,
        };
        for (index, value) in values[slot.range()].iter_mut().enumerate() {
            *value = spread * rng::normal(key, index as u64);
        }
    }
    values
}

/// A copy of everything that changes in training.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainerState {
    pub step: u64,
    pub values: Vec<f32>,
    /// The optimizer's tensors: name, type, bytes.
    pub moments: Vec<(&'static str, DType, Vec<u8>)>,
}

impl TrainerState {
    pub fn first_moment(&self) -> Vec<f32> {
        let (_, _, bytes) = self.moments.iter().find(|(name, ..)| *name == "first_moment").unwrap();
        bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
    }
}

pub fn state(trainer: &Trainer) -> TrainerState {
    let moments = trainer.tensors().into_iter().skip(1);
    let moments = moments.map(|(name, view, _)| (name, view.dtype(), view.bytes().to_vec())).collect();
    TrainerState { step: trainer.steps_done(), values: trainer.values().to_vec(), moments }
}

pub fn restore(trainer: &mut Trainer, state: &TrainerState) -> Result<()> {
    let values: View = state.values[..].into();
    let mut stored =
        vec![SavedTensor { name: "values", dtype: values.dtype(), bytes: values.bytes(), pages: None }];
    stored.extend(state.moments.iter().map(|(name, dtype, bytes)| SavedTensor {
        name,
        dtype: *dtype,
        bytes,
        pages: None,
    }));
    trainer.restore(state.step, &stored)
}

/// What a method adds to the mean loss, from its definition in f64: the weighted mean of `|| P P^T - I ||` over all A and
/// B^T of an AdaLoRA.
pub fn penalty(set: &AdapterSet, values: &[f32]) -> f64 {
    let Some(rule) = &set.allocation else { return 0.0 };
    let of = |tensor: usize| {
        let slot = &set.layout.tensors[tensor];
        let values: Vec<f64> = values[slot.range()].iter().map(|&value| f64::from(value)).collect();
        (values, slot.shape[0], slot.shape[1])
    };
    let norms = rule.triplets.iter().map(|own| {
        let (a, rank, _) = of(own.a);
        let (b, outputs, _) = of(own.b);
        let transposed: Vec<f64> = (0..b.len()).map(|at| b[at % outputs * rank + at / outputs]).collect();
        orthogonality::penalty(&a, rank) + orthogonality::penalty(&transposed, rank)
    });
    rule.penalty * norms.sum::<f64>() / (2 * rule.modules) as f64
}

/// Random tokens; a number of the first ones (a prompt) and every fifth are not supervised.
pub fn row(seed: u64, len: usize, prompt: usize, vocab: usize) -> Row {
    let key = rng::key(&[seed, rng::name("row")]);
    let id = |index: usize| (rng::uniform(key, index as u64) * vocab as f32) as u32 % vocab as u32;
    let target = |index: usize| match index < prompt || index % 5 == 4 {
        true => NO_LOSS,
        false => id(index + 1) as i32,
    };
    Row { ids: (0..len).map(id).collect(), targets: (0..len).map(target).collect(), starts: vec![0; len] }
}

/// Several rows joined in one, each seeing only itself.
pub fn pack(rows: &[Row]) -> Row {
    let mut packed = Row { ids: Vec::new(), targets: Vec::new(), starts: Vec::new() };
    for row in rows {
        let start = packed.ids.len() as u32;
        packed.ids.extend(&row.ids);
        packed.targets.extend(&row.targets);
        packed.starts.extend(row.starts.iter().map(|own| start + own));
    }
    packed
}

/// The row with the virtual tokens of a set in front of each document.
pub fn with_prompt(row: &Row, base: &Base, case: &Case) -> Row {
    let (vocab, prompt) = (base.config.vocab, case.set.prompt_len());
    let mut whole = Row::default();
    let mut first = 0;
    while first < row.ids.len() {
        let document = row.starts[first..].iter().take_while(|&&start| start as usize == first).count();
        let end = first + document;
        let (ids, targets) = (&row.ids[first..end], &row.targets[first..end]);
        // A document whose second token is a target has its first as one, too.
        let predicted = if targets[0] == NO_LOSS { NO_LOSS } else { ids[0] as i32 };
        whole.push(vocab as u32..(vocab + prompt) as u32, predicted, ids, targets);
        first = end;
    }
    whole
}

/// A row of `ids` in which each token has the next one as its target.
pub fn predicting_next(ids: &[u32]) -> Row {
    let targets = ids[1..].iter().map(|&id| id as i32).chain([NO_LOSS]).collect();
    Row { ids: ids.to_vec(), targets, starts: vec![0; ids.len()] }
}

/// The bindings of one adapter.
pub fn bindings(base: &Base, case: &Case) -> AdapterBindings {
    AdapterBindings::new(&[(&case.set, 1.0)], base.config.layers).unwrap()
}

/// A decoder of `rows` rows with one adapter.
pub fn decoder(base: &Arc<Base>, case: &Case, rows: usize, capacity: usize) -> Decoder {
    Decoder::new(Arc::clone(base), bindings(base, case), case.values.clone(), rows, capacity).unwrap()
}

/// The loss of every token of `ids` but the first, which a decoder of one row reads one by one; all but the last.
pub fn loss_token_by_token(decoder: &mut Decoder, ids: &[u32]) -> f64 {
    let losses = ids.windows(2).map(|pair| {
        let z = wide(decoder.feed(&pair[..1]).unwrap());
        z.iter().map(|z| z.exp()).sum::<f64>().ln() - z[pair[1] as usize]
    });
    losses.sum()
}

pub fn batch(rows: &[Row]) -> Batch {
    Batch::new(&rows.iter().collect::<Vec<_>>())
}

/// Largest difference of two vectors relative to the largest element of the second.
pub fn difference(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "lengths");
    assert!(found.iter().all(|x| x.is_finite()), "not finite");
    let largest = expected.iter().fold(1e-30, |most: f64, x| most.max(x.abs()));
    let error = found.iter().zip(expected).map(|(&f, e)| (f64::from(f) - e).abs()).fold(0.0, f64::max);
    error / largest
}

pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// Largest [`difference`] over the tensors of a flat store, each relative to its own largest element.
pub fn by_tensor(set: &AdapterSet, found: &[f32], expected: &[f64]) -> f64 {
    assert!(found.len() == set.layout.len && expected.len() == set.layout.len, "lengths");
    let tensors = set.layout.tensors.iter().map(|slot| {
        assert!(expected[slot.range()].iter().any(|&x| x != 0.0), "{} has no gradient to compare", slot.name);
        difference(&found[slot.range()], &expected[slot.range()])
    });
    tensors.fold(0.0, f64::max)
}

/// Bits of floats, for "the same" where near is not enough.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Holds `difference` against a bound of docs/NUMERICS.md, and shows it under `--nocapture`.
#[track_caller]
pub fn within(difference: f64, bound: f64, what: &str) {
    println!("measured {difference:.2e} of {bound:.0e}: {what}");
    assert!(difference <= bound, "{what}: relative difference {difference:.2e} above {bound:.0e}");
}
