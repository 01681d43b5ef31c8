//! Trains a LoRA on random tokens in a few lines of library code, and prints its speed.
//!
//!     cargo run --release --example throughput -- BASE_DIR ROWS SEQ_LEN STEPS [none|mlp|linear|all] [stream] [bf16]
//!
//! Options: which activations are recomputed, streaming of the base, and products in BF16. Prints tokens/s of each step.

use std::{env, path::Path, sync::Arc, time::Instant};

use engraft::{
    data::{Batch, Row},
    device::{DType, Device, arena::Arenas},
    engine::{Trainer, TrainerOptions},
    error::{Error, Result},
    model::{Base, BaseSource, Policy, Recompute},
    optim::{AdamWOptions, OptimizerKind},
};
use engraft_adapters::{AdapterSet, AdapterSpec, LoraSpec};
use engraft_util::rng;

fn main() -> Result<()> {
    let usage = || {
        Error::input("usage: throughput BASE_DIR ROWS SEQ_LEN STEPS [none|mlp|linear|all] [stream] [bf16]")
    };
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [folder, sizes @ ..] = &arguments[..] else { return Err(usage()) };
    let numbers: Vec<usize> = sizes.iter().filter_map(|size| size.parse().ok()).collect();
    let [rows, seq_len, steps] = numbers[..] else { return Err(usage()) };
    let given = |word: &str| sizes.iter().any(|size| size == word);
    let recompute = match () {
        () if given("all") => Recompute::All,
        () if given("linear") => Recompute::Linear,
        () if given("mlp") => Recompute::Mlp,
        () => Recompute::None,
    };

    let source = BaseSource::Folder(folder.into());
    let mut base = Base::load(&source, folder, Path::new("target/cache"))?;
    if given("bf16") {
        base = base.on(Device::Cpu, DType::BF16)?;
    }
    if !given("stream") {
        base.weights.settle()?;
    }
    let base = Arc::new(base);
    let vocab = base.config.vocab as u64;
    let spec = AdapterSpec::from(LoraSpec::default());
    let set = AdapterSet::new(&spec, &base.description())?;
    let values = set.init(0)?;
    let options = TrainerOptions {
        rows,
        seq_len,
        policy: Policy { recompute, stream: given("stream"), ..Policy::default() },
        optimizer: OptimizerKind::AdamW,
        adamw: AdamWOptions::default(),
        clip: 1.0,
        label_smoothing: 0.0,
        neftune: 0.0,
        seed: 0,
    };
    let mut trainer = Trainer::new(base, set, &values, options, Arenas::real(None))?;
    for step in 0..steps as u64 {
        let row = |row: usize| {
            let key = rng::key(&[step, row as u64]);
            let ids: Vec<u32> = (0..seq_len as u64).map(|at| (rng::bits(key, at) % vocab) as u32).collect();
            let targets = ids[1..].iter().map(|&id| id as i32).chain([engraft::data::NO_LOSS]).collect();
            Row { ids, targets, starts: vec![0; seq_len] }
        };
        let rows: Vec<Row> = (0..rows).map(row).collect();
        let batch = Batch::new(&rows.iter().collect::<Vec<_>>());
        let start = Instant::now();
        let report = trainer.step(&[batch], 2e-4)?;
        let speed = report.input_tokens as f64 / start.elapsed().as_secs_f64();
        println!("step {step}: loss {:.4}, {speed:.0} tokens/s", report.loss);
    }
    Ok(())
}
