//! Compares with results of PEFT and PyTorch: logits, loss, every gradient, ten steps.
//!
//! The files and their reading are described in tests/golden/README.md; docs/NUMERICS.md holds the bounds.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use candle_core::{DType, Device, Tensor};
use engraft::{
    data::{Batch, NO_LOSS, Row},
    device::{Buffer, arena::Arenas},
    engine::{Evaluator, Trainer, TrainerOptions},
    model::{AdapterBindings, Base, BaseSource, Decoder, Limits, Policy, Recompute, Stack, Trained},
    optim::{AdamWOptions, OptimizerKind},
};
use engraft_adapters::{AdapterSet, AdapterSpec, LoraSpec, PrefixSpec, TensorSlot, peft};

use crate::setup::penalty;

mod adalora;
mod pissa;

/// Bounds of docs/NUMERICS.md, relative to the largest element of the expected tensor.
const LOGITS: f64 = 5e-6;
const GRADIENT: f64 = 1e-5;
const LOSS: f64 = 1e-6;
/// Losses and norms of ten steps of AdamW, and the values after them: the update divides by the root of
/// tiny second moments, which amplifies rounding.
const STEP_LOSS: f64 = 1e-5;
const STEP_NORM: f64 = 2e-4;
const FINAL: f64 = 1e-4;

const BATCH: usize = 3;

fn golden(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

/// The tensors of a golden file, flattened to f64.
struct Expected(BTreeMap<String, Vec<f64>>, Vec<usize>);

impl Expected {
    fn read(path: &Path) -> Self {
        let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let shape = tensors["input_ids"].dims().to_vec();
        let flat = |tensor: &Tensor| {
            tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap()
        };
        Self(tensors.iter().map(|(name, tensor)| (name.clone(), flat(tensor))).collect(), shape)
    }

    fn get(&self, name: &str) -> &[f64] {
        self.0.get(name).unwrap_or_else(|| panic!("golden file lacks {name}"))
    }

    fn rows(&self) -> Vec<Row> {
        let t = self.1[1];
        let (ids, labels) = (self.get("input_ids"), self.get("labels"));
        ids.chunks(t)
            .zip(labels.chunks(t))
            .map(|(ids, labels)| Row {
                ids: ids.iter().map(|&id| id as u32).collect(),
                targets: labels[1..].iter().map(|&l| l as i32).chain([NO_LOSS]).collect(),
                starts: vec![0; t],
            })
            .collect()
    }

    /// The rows after virtual tokens of the ids `prompt`, the last of which predicts what the first label says.
    fn batch(&self, prompt: Range<u32>) -> Batch {
        let labels = self.get("labels").chunks(self.1[1]);
        let mut rows = Vec::new();
        for (Row { ids, targets, .. }, labels) in self.rows().iter().zip(labels) {
            let mut row = Row::default();
            row.push(prompt.clone(), labels[0] as i32, ids, targets);
            rows.push(row);
        }
        Batch::new(&rows.iter().collect::<Vec<_>>())
    }
}

/// Largest difference relative to the largest expected element.
fn difference(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "lengths");
    let largest = expected.iter().fold(1e-30, |most: f64, x| most.max(x.abs()));
    let error = found.iter().zip(expected).map(|(&f, e)| (f64::from(f) - e).abs()).fold(0.0, f64::max);
    assert!(found.iter().all(|x| x.is_finite()), "not finite");
    error / largest
}

#[track_caller]
fn assert_near(found: &[f32], expected: &[f64], bound: f64, what: &str) {
    let difference = difference(found, expected);
    assert!(difference <= bound, "{what}: relative difference {difference:.2e} above {bound:.0e}");
}

fn base(name: &str) -> Arc<Base> {
    let cache = std::env::temp_dir().join(format!("engraft-golden-{}", std::process::id()));
    Arc::new(Base::load(&BaseSource::Folder(golden(&format!("bases/{name}"))), name, &cache).unwrap())
}

/// Logits of every position, one token at a time: golden logits test the cache too.
fn assert_logits(
    base: &Arc<Base>,
    bindings: &AdapterBindings,
    values: &[f32],
    expected: &Expected,
    what: &str,
) {
    let vocab = base.config.vocab;
    let rows = expected.rows();
    let t = rows[0].ids.len();
    for (index, row) in rows.iter().enumerate() {
        let mut decoder = Decoder::new(Arc::clone(base), bindings.clone(), values.to_vec(), 1, t).unwrap();
        for (position, &id) in row.ids.iter().enumerate() {
            let logits = decoder.feed(&[id]).unwrap();
            let at = (index * t + position) * vocab;
            assert_near(logits, &expected.get("logits")[at..at + vocab], LOGITS, &format!("{what} logits"));
        }
        // The whole row at once gives the same last logits.
        let mut decoder = Decoder::new(Arc::clone(base), bindings.clone(), values.to_vec(), 1, t).unwrap();
        let last = decoder.feed(&row.ids).unwrap();
        let at = (index * t + t - 1) * vocab;
        assert_near(last, &expected.get("logits")[at..at + vocab], LOGITS, &format!("{what} prefill"));
    }
}

#[test]
fn every_base_gives_transformers_logits_and_loss() {
    let mut seen = 0;
    for entry in std::fs::read_dir(golden("bases")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let expected = Expected::read(&path.join("expected.safetensors"));
        let base = base(name);
        let bindings = AdapterBindings::none(base.config.layers);
        assert_logits(&base, &bindings, &[], &expected, name);
        let batch = expected.batch(0..0);
        let limits = Limits { rows: batch.rows, tokens: batch.seq_len };
        let policy = Policy { head_rows: 4, ..Policy::default() };
        let mut stack = Stack::new(base, bindings, limits, policy, false, &mut Arenas::real(None)).unwrap();
        let none = Buffer::from_slice::<f32>(&[]).unwrap();
        let loss = stack.loss(Trained { values: none.view(), prefix: None }, &batch).unwrap();
        assert_near(&[(loss.sum / loss.tokens as f64) as f32], expected.get("loss"), LOSS, name);
        seen += 1;
    }
    assert!(seen >= 15, "only {seen} golden bases");
}

fn options(policy: Policy, batch: &Batch) -> TrainerOptions {
    let adamw = AdamWOptions { weight_decay: 0.01, ..AdamWOptions::default() };
    TrainerOptions {
        rows: BATCH,
        seq_len: batch.seq_len,
        policy,
        optimizer: OptimizerKind::AdamW,
        adamw,
        clip: 1.0,
        label_smoothing: 0.0,
        neftune: 0.0,
        seed: 1,
    }
}

/// One golden case: its adapter, and the golden name of each tensor of the store.
struct Case {
    name: &'static str,
    set: AdapterSet,
    values: Vec<f32>,
    golden_name: fn(&str) -> String,
}

impl Case {
    fn batch(&self, expected: &Expected, base: &Base) -> Batch {
        let vocab = base.config.vocab as u32;
        expected.batch(vocab..vocab + self.set.prompt_len() as u32)
    }
}

fn load(name: &'static str, base: &Base, golden_name: fn(&str) -> String) -> Case {
    let loaded = peft::load(&golden(&format!("cases/{name}/adapter")), &base.description(), false).unwrap();
    assert!(
        loaded.hints.iter().any(|hint| hint.contains("fingerprint")),
        "PEFT's files carry no fingerprint"
    );
    Case { name, set: loaded.set, values: loaded.values, golden_name }
}

/// The case with options of a LoRA that no file has.
fn trained_with(case: Case, base: &Base, change: fn(&mut LoraSpec)) -> Case {
    let mut spec = case.set.spec.clone();
    change(spec.lora_options_mut().unwrap());
    Case { set: AdapterSet::new(&spec, &base.description()).unwrap(), ..case }
}

/// Where the values of a trained tensor are more than rounding. A bias of keys adds the same number to all scores of a
/// query, so its gradient is 0, and AdamW divides what rounding leaves of it by its own size.
fn defined(name: &str, len: usize) -> Vec<Range<usize>> {
    let is_fused = name.ends_with("c_attn.base_layer.bias") || name.ends_with("c_attn.bias");
    let keys = if is_fused { len / 3..2 * len / 3 } else { len..len };
    [0..keys.start, keys.end..len].into_iter().filter(|part| !part.is_empty()).collect()
}

/// Logits, loss and gradients, then ten steps, under one policy.
fn check(case: &Case, base: &Arc<Base>, policy: Policy) {
    let expected = Expected::read(&golden(&format!("cases/{}/expected.safetensors", case.name)));
    let what = case.name;
    let bindings = AdapterBindings::new(&[(&case.set, 1.0)], base.config.layers).unwrap();
    assert_logits(base, &bindings, &case.values, &expected, what);

    let batch = [case.batch(&expected, base)];
    let options = options(policy, &batch[0]);
    let mut trainer =
        Trainer::new(Arc::clone(base), case.set.clone(), &case.values, options, Arenas::real(None)).unwrap();
    let losses = trainer.accumulate(&batch).unwrap();
    let loss = losses.sum / losses.tokens as f64 + penalty(&case.set, &case.values);
    assert_near(&[loss as f32], expected.get("loss"), LOSS, what);
    let gradient = trainer.gradient();
    let is_trained = |slot: &&TensorSlot| case.set.layout.groups[slot.group].trainable;
    for slot in case.set.layout.tensors.iter().filter(is_trained) {
        let name = (case.golden_name)(&slot.name);
        let expected = expected.get(&format!("grad.{name}"));
        assert_near(&gradient[slot.range()], expected, GRADIENT, &format!("{what} grad {name}"));
    }

    for step in 0..10 {
        let added = penalty(&case.set, &trainer.values());
        let report = trainer.step(&batch, 1e-2).unwrap();
        let (loss, norm) = (expected.get("losses")[step], expected.get("grad_norms")[step]);
        assert_near(
            &[(report.loss + added) as f32],
            &[loss],
            STEP_LOSS,
            &format!("{what} loss of step {step}"),
        );
        assert_near(&[report.grad_norm as f32], &[norm], STEP_NORM, &format!("{what} norm of step {step}"));
    }
    let values = trainer.values();
    for slot in case.set.layout.tensors.iter().filter(is_trained) {
        let name = (case.golden_name)(&slot.name);
        let expected = expected.get(&format!("final.{name}"));
        for part in defined(&slot.name, slot.len()) {
            let found = &values[slot.range()][part.clone()];
            assert_near(found, &expected[part], FINAL, &format!("{what} final {name}"));
        }
    }
}

/// Every policy runs the same case: the kept activations must not matter.
fn check_all(case: &Case, base: &Arc<Base>) {
    for (recompute, head_rows) in [
        (Recompute::None, 256),
        (Recompute::Mlp, 256),
        (Recompute::Linear, 7),
        (Recompute::Every(2), 5),
        (Recompute::All, 1),
    ] {
        check(case, base, Policy { recompute, head_rows, ..Policy::default() });
    }
}

#[test]
fn lora_matches_peft() {
    let base = base("tiny");
    for name in ["lora_c_attn", "lora_all_rslora_patterns", "lora_layers", "lora_rank_8"] {
        check_all(&load(name, &base, str::to_owned), &base);
    }
}

#[test]
fn prefix_matches_peft() {
    let base = base("tiny");
    check_all(&load("prefix", &base, str::to_owned), &base);
}

#[test]
fn lora_with_prefix_matches_peft() {
    let base = base("tiny");
    let name = |slot: &str| {
        let kind = if slot.contains("lora") { "lora" } else { "prefix" };
        format!("{kind}.{slot}")
    };
    check_all(&load("lora_and_prefix", &base, name), &base);
}

#[test]
fn ln_tuning_matches_peft() {
    let base = base("tiny");
    for name in ["ln_tuning", "ln_tuning_regex"] {
        check_all(&load(name, &base, str::to_owned), &base);
    }
}

#[test]
fn prompt_tuning_matches_peft() {
    let base = base("tiny");
    check_all(&load("prompt_tuning", &base, str::to_owned), &base);
    let name = |slot: &str| {
        let kind = if slot.contains("lora") { "lora" } else { "prompt_tuning" };
        format!("{kind}.{slot}")
    };
    check_all(&load("lora_and_prompt_tuning", &base, name), &base);
}

/// What P-tuning made is used; PEFT trains its encoder, which is not in the files.
#[test]
fn p_tuning_is_used_as_peft_does() {
    let base = base("tiny");
    let case = load("p_tuning", &base, str::to_owned);
    assert_eq!((case.set.prompt_len(), case.set.spec.prompt_tuning.is_some()), (3, true));
    let expected = Expected::read(&golden("cases/p_tuning/expected.safetensors"));
    let bindings = AdapterBindings::new(&[(&case.set, 1.0)], base.config.layers).unwrap();
    assert_logits(&base, &bindings, &case.values, &expected, case.name);
    let limits = Limits { rows: BATCH, tokens: expected.1[1] + 3 };
    let mut evaluator =
        Evaluator::new(Arc::clone(&base), Some((&case.set, &case.values)), limits, 256).unwrap();
    let found = evaluator.evaluate(&mut std::iter::once(case.batch(&expected, &base))).unwrap();
    assert_near(&[found.loss as f32], expected.get("loss"), LOSS, case.name);
}

#[test]
fn ia3_matches_peft() {
    let base = base("tiny");
    for name in ["ia3", "ia3_regex"] {
        check_all(&load(name, &base, str::to_owned), &base);
    }
}

/// Also with A and B that the file leaves out: those that PEFT drew from the key.
#[test]
fn vera_matches_peft() {
    let base = base("tiny");
    for name in ["vera", "vera_without_projections"] {
        check_all(&load(name, &base, str::to_owned), &base);
    }
}

#[test]
fn dora_matches_peft() {
    let base = base("tiny");
    for name in ["dora_c_attn", "dora_all_rslora_patterns", "dora_layers"] {
        check_all(&load(name, &base, str::to_owned), &base);
    }
    let name = |slot: &str| {
        let kind = if slot.contains("lora") { "dora" } else { "prefix" };
        format!("{kind}.{slot}")
    };
    check_all(&load("dora_and_prefix", &base, name), &base);
}

/// `bias` and `modules_to_save`, with a LoRA and a DoRA.
#[test]
fn what_is_trained_beside_deltas_matches_peft() {
    let base = base("tiny");
    for name in ["lora_bias_only", "lora_bias_all", "lora_train_norms", "dora_beside"] {
        check_all(&load(name, &base, str::to_owned), &base);
    }
}

/// The delta on the embedding of tokens, with a rank of its own, and by its path beside layers.
#[test]
fn a_lora_on_the_embedding_matches_peft() {
    let base = base("tiny");
    for name in ["lora_wte", "lora_wte_layers"] {
        let case = load(name, &base, str::to_owned);
        assert!(case.set.embedding.is_some(), "{name}");
        check_all(&case, &base);
    }
}

/// The optimizer is PEFT's `create_loraplus_optimizer`.
#[test]
fn lora_plus_matches_peft() {
    let base = base("tiny");
    let plus = load("lora_plus", &base, str::to_owned);
    check_all(&trained_with(plus, &base, |lora| lora.lora_plus_ratio = 4.0), &base);
}

/// An A that does not require a gradient.
#[test]
fn a_frozen_a_matches_peft() {
    let base = base("tiny");
    let frozen = load("lora_frozen_a", &base, str::to_owned);
    check_all(&trained_with(frozen, &base, |lora| lora.freeze_a = true), &base);
}

#[test]
fn three_methods_at_once_match_peft() {
    let base = base("tiny");
    let name = |slot: &str| {
        let kinds = ["ln_tuning", "lora", "ia3", "vera"];
        let kind = kinds.into_iter().find(|kind| slot.contains(kind)).unwrap_or("prefix");
        format!("{kind}.{slot}")
    };
    for case in ["lora_ln_tuning_and_prefix", "lora_ia3_and_prefix", "lora_vera_and_ia3"] {
        check_all(&load(case, &base, name), &base);
    }
}

#[test]
fn projected_prefix_matches_peft() {
    let base = base("tiny");
    let spec = AdapterSpec::from(PrefixSpec { length: 5, projection: Some(13) });
    let set = AdapterSet::new(&spec, &base.description()).unwrap();
    let name = |slot: &str| {
        let part = slot.strip_prefix("prompt_encoder.").unwrap();
        match part.split_once('.').unwrap() {
            ("embedding", _) => "proj.embedding".to_owned(),
            (_, rest) => format!("proj.{}", rest.replace("0.", "in.").replace("2.", "out.")),
        }
    };
    let expected = Expected::read(&golden("cases/prefix_projection/expected.safetensors"));
    let mut values = vec![0f32; set.layout.len];
    for slot in &set.layout.tensors {
        let tensor = expected.get(&name(&slot.name));
        values[slot.range()].iter_mut().zip(tensor).for_each(|(to, from)| *to = *from as f32);
    }
    let case = Case { name: "prefix_projection", set, values, golden_name: name };
    check_all(&case, &base);
    let policy = Policy::default();
    let options = options(policy, &expected.batch(0..0));
    let trainer = Trainer::new(base, case.set.clone(), &case.values, options, Arenas::real(None)).unwrap();
    let stored = candle_core::safetensors::load(
        golden("cases/prefix_projection/adapter/adapter_model.safetensors"),
        &Device::Cpu,
    )
    .unwrap();
    let stored: Vec<f64> =
        stored["prompt_embeddings"].to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap();
    assert_near(&trainer.projected().unwrap(), &stored, 1e-6, "projected prefix");
}

/// q and v adapted apart, against PEFT's fused form with its zero blocks held at zero.
#[test]
fn separate_q_and_v_match_peft() {
    let base = base("tiny");
    let fused = load("lora_qv", &base, str::to_owned);
    let lora = LoraSpec { rank: 2, alpha: 3.0, targets: "q,v".parse().unwrap(), ..LoraSpec::default() };
    let spec = AdapterSpec::from(lora);
    let set = AdapterSet::new(&spec, &base.description()).unwrap();
    let expected = Expected::read(&golden("cases/lora_qv/expected.safetensors"));
    let c = base.config.width;
    // The place of a tensor of q or v inside the fused one: rows of A, a block of B.
    let part_of = |slot: &str, whole: &[f64]| -> Vec<f64> {
        let second = slot.contains(".v.");
        if slot.contains("lora_A") {
            let (first, last) = if second { (2, 4) } else { (0, 2) };
            return whole[first * c..last * c].to_vec();
        }
        let (row, column) = if second { (2 * c, 2) } else { (0, 0) };
        (row..row + c).flat_map(|i| whole[i * 4 + column..i * 4 + column + 2].to_vec()).collect()
    };
    let fused_name = |slot: &str| slot.replace(".q.", ".").replace(".v.", ".");
    let mut values = vec![0f32; set.layout.len];
    for slot in &set.layout.tensors {
        let source = fused.set.layout.slot(&fused_name(&slot.name)).unwrap();
        let whole: Vec<f64> = fused.values[source.range()].iter().map(|&x| f64::from(x)).collect();
        let part = part_of(&slot.name, &whole);
        values[slot.range()].iter_mut().zip(part).for_each(|(to, from)| *to = from as f32);
    }
    let batch = [expected.batch(0..0)];
    let options = options(Policy::default(), &batch[0]);
    let mut trainer =
        Trainer::new(Arc::clone(&base), set.clone(), &values, options, Arenas::real(None)).unwrap();
    trainer.accumulate(&batch).unwrap();
    let gradient = trainer.gradient();
    for slot in &set.layout.tensors {
        let whole = expected.get(&format!("grad.{}", fused_name(&slot.name)));
        assert_near(&gradient[slot.range()], &part_of(&slot.name, whole), GRADIENT, &slot.name);
    }
    for step in 0..10 {
        let report = trainer.step(&batch, 1e-2).unwrap();
        assert_near(&[report.loss as f32], &[expected.get("losses")[step]], STEP_LOSS, "loss");
        assert_near(&[report.grad_norm as f32], &[expected.get("grad_norms")[step]], STEP_NORM, "norm");
    }
    let trained = trainer.values();
    for slot in &set.layout.tensors {
        let whole = expected.get(&format!("final.{}", fused_name(&slot.name)));
        assert_near(&trained[slot.range()], &part_of(&slot.name, whole), FINAL, &slot.name);
    }
    // Written for PEFT, it is the fused file again, with zeros where PEFT's has them.
    let folder = tempfile::tempdir().unwrap();
    peft::save(&folder.path().join("a"), &set, &trained, None, &base.description()).unwrap();
    let file = folder.path().join("a/adapter_model.safetensors");
    let written = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    for (name, tensor) in written {
        let found: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
        assert_near(&found, expected.get(&format!("final.{name}")), FINAL, &name);
    }
}
