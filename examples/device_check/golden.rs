//! The golden files of tests/golden on the device: compares results of PEFT, transformers and PyTorch with those
//! of the device.

use std::{path::Path, sync::Arc};

use candle_core::{DType as CandleType, Device as CandleDevice, Tensor};
use engraft::{
    data::{Batch, NO_LOSS, Row},
    device::{Buffer, DType, Device, arena::Arenas},
    engine::{Trainer, TrainerOptions},
    error::{Error, Result},
    model::{AdapterBindings, Base, BaseSource, Decoder, Limits, Policy, Stack, Trained},
    optim::{AdamWOptions, OptimizerKind},
};
use engraft_adapters::{AdapterSet, peft};

use crate::{
    Line, Report,
    runs::{element_bound, largest_error, loss_bound},
    setup::{Size, golden, load},
};

/// Cases whose tensors are named in their golden file as in ours, or after the kind of adapter.
const CASES: [&str; 6] =
    ["lora_c_attn", "lora_all_rslora_patterns", "lora_layers", "lora_rank_8", "prefix", "lora_and_prefix"];

/// Gradients of a case relative to the largest of a tensor. PyTorch's own, with a base in BF16, are up to 7.9e-2 off
/// (`lora_all_rslora_patterns`, whose gradients are differences of larger terms): twice that.
fn gradient_bound(activations: DType) -> f64 {
    if activations == DType::BF16 { 1.6e-1 } else { element_bound(activations) }
}

pub fn check(device: Device, types: &[DType], size: Size, report: &mut Report) -> Result<()> {
    for &activations in types {
        // Logits and losses are checked in every precision, the many bases only in the widest.
        if activations == DType::F32 {
            for name in bases()? {
                report.add(&name, of_base(device, activations, &name).map(|line| vec![line]));
            }
        }
        let base = load(&folder("tiny")?, "tiny", device, activations)?;
        for case in CASES {
            report.add(case, of_case(&base, case, if size.is_large() { 10 } else { 2 }));
        }
    }
    Ok(())
}

fn folder(name: &str) -> Result<BaseSource> {
    golden(&format!("bases/{name}")).map(BaseSource::Folder)
}

fn bases() -> Result<Vec<String>> {
    let path = golden("bases")?;
    let entries = std::fs::read_dir(&path)
        .map_err(|cause| Error::input(format!("{}: cannot be read: {cause}", path.display())))?;
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// Tensors of a golden file.
struct Expected(std::collections::HashMap<String, Tensor>);

impl Expected {
    fn read(path: &Path) -> Result<Self> {
        let unreadable = |cause| Error::input(format!("{}: cannot be read: {cause}", path.display()));
        candle_core::safetensors::load(path, &CandleDevice::Cpu).map(Self).map_err(unreadable)
    }

    /// The elements of a tensor; empty if it is missing, which every comparison refuses.
    fn get(&self, name: &str) -> Vec<f32> {
        let flat = |tensor: &Tensor| tensor.to_dtype(CandleType::F32)?.flatten_all()?.to_vec1::<f32>();
        self.0.get(name).and_then(|tensor| flat(tensor).ok()).unwrap_or_default()
    }

    fn batch(&self) -> Batch {
        let tokens = self.0.get("input_ids").and_then(|ids| ids.dims().last().copied()).unwrap_or(1);
        let (ids, labels) = (self.get("input_ids"), self.get("labels"));
        let row = |(ids, labels): (&[f32], &[f32])| Row {
            ids: ids.iter().map(|&id| id as u32).collect(),
            targets: labels[1..].iter().map(|&label| label as i32).chain([NO_LOSS]).collect(),
            starts: vec![0; tokens],
        };
        let rows: Vec<Row> = ids.chunks(tokens).zip(labels.chunks(tokens)).map(row).collect();
        Batch::new(&rows.iter().collect::<Vec<_>>())
    }
}

/// Loss of the batch and last logits of each of its rows.
fn of_base(device: Device, activations: DType, name: &str) -> Result<Line> {
    let expected = Expected::read(&golden(&format!("bases/{name}/expected.safetensors"))?)?;
    let base = load(&folder(name)?, name, device, activations)?;
    let (batch, vocab) = (expected.batch(), base.config.vocab);
    let bindings = AdapterBindings::none(base.config.layers);
    let limits = Limits { rows: batch.rows, tokens: batch.seq_len };
    let policy = Policy { head_rows: 4, activations, ..Policy::default() };
    let mut arenas = Arenas::real(None).on(device);
    let mut stack = Stack::new(Arc::clone(&base), bindings.clone(), limits, policy, false, &mut arenas)?;
    let none = Buffer::on::<f32>(device, &[])?;
    let loss = stack.loss(Trained { values: none.view(), prefix: None }, &batch)?;
    let mut error = largest_error(&expected.get("loss"), &[(loss.sum / loss.tokens as f64) as f32]);
    let logits = expected.get("logits");
    for (row, ids) in batch.ids.chunks(batch.seq_len).enumerate() {
        let mut decoder = Decoder::new(Arc::clone(&base), bindings.clone(), Vec::new(), 1, ids.len())?;
        let at = ((row + 1) * batch.seq_len - 1) * vocab;
        error = error.max(largest_error(logits.get(at..at + vocab).unwrap_or(&[]), decoder.feed(ids)?));
    }
    Ok(Line::new(
        format!("golden base {name}: loss and logits"),
        activations,
        error,
        element_bound(activations),
    ))
}

/// Loss, gradients and some steps of a case.
fn of_case(base: &Arc<Base>, case: &'static str, steps: usize) -> Result<Vec<Line>> {
    let activations = base.activations;
    let expected = Expected::read(&golden(&format!("cases/{case}/expected.safetensors"))?)?;
    let loaded = peft::load(&golden(&format!("cases/{case}/adapter"))?, &base.description(), false)?;
    let batch = [expected.batch()];
    let set: AdapterSet = loaded.set;
    let options = TrainerOptions {
        rows: batch[0].rows,
        seq_len: batch[0].seq_len,
        policy: Policy { head_rows: 7, activations, ..Policy::default() },
        optimizer: OptimizerKind::AdamW,
        adamw: AdamWOptions { weight_decay: 0.01, ..AdamWOptions::default() },
        clip: 1.0,
        label_smoothing: 0.0,
        neftune: 0.0,
        seed: 1,
    };
    let arenas = Arenas::real(None).on(base.device);
    let mut trainer = Trainer::new(Arc::clone(base), set.clone(), &loaded.values, options, arenas)?;
    let losses = trainer.accumulate(&batch)?;
    let loss = largest_error(&expected.get("loss"), &[(losses.sum / losses.tokens as f64) as f32]);
    let gradient = trainer.gradient();
    let mut worst = 0f64;
    for slot in &set.layout.tensors {
        let kind = if slot.name.contains("lora") { "lora" } else { "prefix" };
        let name =
            if case == "lora_and_prefix" { format!("{kind}.{}", slot.name) } else { slot.name.clone() };
        worst = worst.max(largest_error(&expected.get(&format!("grad.{name}")), &gradient[slot.range()]));
    }
    let mut found = Vec::new();
    for _ in 0..steps {
        found.push(trainer.step(&batch, 1e-2)?.loss as f32);
    }
    let course = largest_error(expected.get("losses").get(..steps).unwrap_or(&[]), &found);
    Ok(vec![
        Line::new(format!("golden {case}: loss"), activations, loss, loss_bound(activations)),
        Line::new(format!("golden {case}: gradients"), activations, worst, gradient_bound(activations)),
        Line::new(
            format!("golden {case}: losses of {steps} steps"),
            activations,
            course,
            2.0 * loss_bound(activations),
        ),
    ])
}
