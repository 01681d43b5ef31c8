//! Small trainings: the loss falls and begins where the CPU's does, recompute changes no bit, and the device holds
//! what was planned.

use std::{path::Path, sync::Arc};

use engraft::{
    data::{Batch, NO_LOSS, Row},
    error::Result,
    kernels::{
        arena::{Arenas, TableRow},
        device::{DType, Device},
        device_scratch::WORKSPACE,
    },
    model::{Base, BaseSource, Decoder, Policy, Recompute, Wiring},
    optim::{AdamWOptions, OptimizerKind},
    train::{Trainer, TrainerOptions},
};
use engraft_adapters::{AdapterSet, AdapterSpec, LoraSpec, PrefixSpec, Targets, rng};

use crate::Line;

const ROWS: usize = 3;
const TOKENS: usize = 37;
const STEPS: usize = 12;

/// First losses relative to the CPU's: what rounding of activations may change.
fn loss_bound(activations: DType) -> f64 {
    match activations {
        DType::F16 => 5e-3,
        DType::BF16 => 3e-2,
        _ => 1e-5,
    }
}

pub fn check(device: Device, types: &[DType]) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    let on_cpu =
        Training::new(base(Device::Cpu, DType::F32)?, Recompute::None, OptimizerKind::AdamW)?.run()?;
    for &activations in types {
        let base = base(device, activations)?;
        lines.extend(training(&base, activations, &on_cpu)?);
        lines.push(generation(&base, activations)?);
    }
    Ok(lines)
}

fn base(device: Device, activations: DType) -> Result<Arc<Base>> {
    Ok(Arc::new(Base::load(&BaseSource::Embedded, "embedded", Path::new("."))?.on(device, activations)?))
}

/// A LoRA with dropout on all sites and a prefix, on a fixed batch in two micro-batches.
struct Training {
    trainer: Trainer,
    batches: Vec<Batch>,
    planned: usize,
}

/// What a training did.
struct Outcome {
    losses: Vec<f64>,
    values: Vec<f32>,
    planned: usize,
    held: usize,
}

impl Training {
    fn new(base: Arc<Base>, recompute: Recompute, optimizer: OptimizerKind) -> Result<Self> {
        let targets = "all-linear".parse::<Targets>().unwrap_or_else(|never| match never {});
        let lora = LoraSpec { rank: 5, targets, dropout: 0.1, ..LoraSpec::default() };
        let prefix = PrefixSpec { length: 7, projection: Some(12) };
        let spec = AdapterSpec { lora: Some(lora), prefix: Some(prefix) };
        let set = AdapterSet::new(&spec, &base.description())?;
        let options = TrainerOptions {
            rows: ROWS,
            seq_len: TOKENS,
            policy: Policy { recompute, head_rows: 32, activations: base.activations, ..Policy::default() },
            optimizer,
            adamw: AdamWOptions::default(),
            clip: 1.0,
            label_smoothing: 0.1,
            seed: 1,
        };
        let table: usize = Trainer::plan(&base.config, &set, options)?.iter().map(TableRow::bytes).sum();
        let planned = table + options.device_scratch(&base.config, &set);
        let vocab = base.config.vocab as u64;
        let batch = |first: u64| {
            let rows: Vec<Row> = (0..ROWS as u64).map(|row| tokens(first + row, vocab)).collect();
            Batch::new(&rows.iter().collect::<Vec<_>>())
        };
        let batches = vec![batch(0), batch(ROWS as u64)];
        let (device, values) = (base.device, set.init(3));
        let trainer = Trainer::new(base, set, &values, options, Arenas::real(None).on(device))?;
        Ok(Self { trainer, batches, planned })
    }

    fn run(mut self) -> Result<Outcome> {
        let held = |trainer: &Trainer| held(trainer.device());
        let mut losses = Vec::new();
        for _ in 0..STEPS {
            losses.push(self.trainer.step(&self.batches, 3e-3)?.loss);
        }
        let (values, held) = (self.trainer.values().into_owned(), held(&self.trainer));
        Ok(Outcome { losses, values, planned: self.planned, held })
    }
}

fn held(device: Device) -> usize {
    if let Device::Cuda(gpu) = device { gpu.held().0 } else { 0 }
}

/// A row of repeatable tokens, half of them without a loss.
fn tokens(row: u64, vocab: u64) -> Row {
    let key = rng::key(&[row]);
    let ids: Vec<u32> = (0..TOKENS as u64).map(|at| (rng::bits(key, at) % vocab) as u32).collect();
    let supervised = |at: usize| at.is_multiple_of(2) && at + 1 < TOKENS;
    let targets = (0..TOKENS).map(|at| if supervised(at) { ids[at + 1] as i32 } else { NO_LOSS }).collect();
    // Two documents in a row.
    let starts = (0..TOKENS as u32).map(|at| if at < 11 { 0 } else { 11 }).collect();
    Row { ids, targets, starts }
}

fn training(base: &Arc<Base>, activations: DType, on_cpu: &Outcome) -> Result<Vec<Line>> {
    let before = held(base.device);
    let run = |recompute, optimizer| Training::new(Arc::clone(base), recompute, optimizer)?.run();
    let kept = run(Recompute::None, OptimizerKind::AdamW)?;
    let again = run(Recompute::All, OptimizerKind::AdamW)?;
    let coded = run(Recompute::None, OptimizerKind::AdamW8bit)?;
    let different = kept.values.iter().zip(&again.values).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let fell = |losses: &[f64]| losses[STEPS - 1] / losses[0];
    let first = (kept.losses[0] - on_cpu.losses[0]).abs() / on_cpu.losses[0];
    // Scratch may be there from a training before, the workspace of products is had with the first.
    let planned = kept.planned + WORKSPACE;
    let grown = kept.held.saturating_sub(before);
    let memory = grown.saturating_sub(planned) as f64 / planned as f64;
    Ok(vec![
        Line::new("training: first loss against the CPU's", activations, first, loss_bound(activations)),
        Line::new("training: last loss over first", activations, fell(&kept.losses), 0.9),
        Line::new("training, 8-bit moments: last loss over first", activations, fell(&coded.losses), 0.9),
        Line::new("recompute: values with other bits", activations, different as f64, 0.0),
        Line::new("memory: held beyond the plan", activations, memory, 0.01),
    ])
}

/// Logits behind a text that is fed whole, and token by token.
fn generation(base: &Arc<Base>, activations: DType) -> Result<Line> {
    let vocab = base.config.vocab as u64;
    let ids: Vec<u32> = (0..23).map(|at| (rng::bits(9, at) % vocab) as u32).collect();
    let decoder =
        || Decoder::new(Arc::clone(base), Wiring::none(base.config.layers), Vec::new(), 1, ids.len());
    let whole = decoder()?.feed(&ids)?.to_vec();
    let mut one_by_one = decoder()?;
    let mut last = Vec::new();
    for id in &ids {
        last = one_by_one.feed(&[*id])?.to_vec();
    }
    let largest = whole.iter().fold(0f32, |most, z| most.max(z.abs()));
    let error = whole.iter().zip(&last).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max) / largest;
    let bound = match activations {
        DType::F16 => 1e-2,
        DType::BF16 => 8e-2,
        _ => 1e-5,
    };
    Ok(Line::new("generation: token by token against whole", activations, f64::from(error), bound))
}
