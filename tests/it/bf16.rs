//! `--precision bf16` on a CPU: training compared with F32, and the hint about it. Its kernels have their own tests.
//!
//! CPUs may execute the instructions without reporting them, and engraft uses them only where they are fast. So
//! the training runs in a separate process that always uses them, and that the CPU ends if it lacks them.

use std::{env, os::unix::process::ExitStatusExt, path::Path, process::Command, sync::Arc};

use engraft::{
    data::{Batch, Row},
    device::{
        DType, Device,
        arena::Arenas,
        cpu::{Level, bf16 as fast_bf16, force_bf16, level, reports_bf16},
    },
    engine::{Trainer, TrainerOptions},
    kernels::matmul::Arithmetic,
    model::{Base, BaseSource, Policy},
    optim::{AdamWOptions, OptimizerKind},
};
use engraft_adapters::{AdapterSet, AdapterSpec, LoraSpec};
use engraft_util::rng;

use crate::skip::skip;

use crate::cli_support::Sandbox;

/// Runs an ignored test of this module in another process.
fn insist(test: &str) {
    if level() != Level::Avx512 {
        return skip("BF16 products need AVX-512, of the CPU and as a feature of this build", reports_bf16());
    }
    let output = Command::new(env::current_exe().unwrap())
        .args([&format!("bf16::{test}"), "--exact", "--ignored"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    // That signal alone means a CPU without the instructions; any other end is a fault of the kernels.
    const UNKNOWN_INSTRUCTION: i32 = 4;
    if output.status.signal() == Some(UNKNOWN_INSTRUCTION) {
        return skip("this CPU has no BF16 products", reports_bf16());
    }
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn losses_stay_near_those_of_f32() {
    insist("losses");
}

/// BF16 that is not forced is not used where it would be slow: the default must not depend on this test.
#[test]
fn bf16_is_accepted_on_every_cpu() {
    let base = embedded(DType::BF16);
    assert_eq!((base.activations, base.weights.wte.arithmetic), (DType::F32, Arithmetic::Bf16));
    assert!(base.weights.blocks.iter().all(|block| block.c_fc.weight.arithmetic == Arithmetic::Bf16));
}

#[test]
fn a_cpu_without_fast_products_says_that_it_computes_in_f32() {
    let sandbox = Sandbox::new();
    let told = |precision: &str| {
        let line =
            format!("train --steps 1 --batch 1 --device cpu --precision {precision} --output {precision}");
        sandbox.engraft(&line).succeeds().stderr().contains("computes in f32 on this CPU")
    };
    assert_eq!((told("bf16"), told("f32")), (!fast_bf16(), false));
}

fn embedded(activations: DType) -> Base {
    let base = Base::load(&BaseSource::Embedded, "embedded", Path::new(".")).unwrap();
    base.on(Device::Cpu, activations).unwrap()
}

/// Losses of twenty steps on random rows.
fn train(activations: DType) -> Vec<f64> {
    let base = Arc::new(embedded(activations));
    let spec = AdapterSpec::from(LoraSpec::default());
    let set = AdapterSet::new(&spec, &base.description()).unwrap();
    let values = set.init(1).unwrap();
    let (rows, seq_len, vocab) = (4, 48, base.config.vocab as u64);
    let options = TrainerOptions {
        rows,
        seq_len,
        policy: Policy::default(),
        optimizer: OptimizerKind::AdamW,
        adamw: AdamWOptions::default(),
        clip: 1.0,
        label_smoothing: 0.0,
        neftune: 0.0,
        seed: 0,
    };
    let mut trainer = Trainer::new(base, set, &values, options, Arenas::real(None)).unwrap();
    let row = |index: u64| {
        let ids: Vec<u32> = (0..seq_len as u64).map(|at| (rng::bits(index, at / 3) % vocab) as u32).collect();
        let targets = ids[1..].iter().map(|&id| id as i32).chain([engraft::data::NO_LOSS]).collect();
        Row { ids, targets, starts: vec![0; seq_len] }
    };
    (0..20u64)
        .map(|step| {
            let rows: Vec<Row> = (0..rows as u64).map(|at| row(step % 3 * 10 + at)).collect();
            let batch = Batch::new(&rows.iter().collect::<Vec<_>>());
            trainer.step(&[batch], 5e-3).unwrap().loss
        })
        .collect()
}

/// docs/NUMERICS.md: losses of BF16 products within 1% of those of F32 while both learn.
#[test]
#[ignore = "insists on instructions that the CPU may lack"]
fn losses() {
    let exact = train(DType::F32);
    // SAFETY: a CPU without the instructions ends this process, which another one watches.
    unsafe { force_bf16() };
    let rounded = train(DType::BF16);
    assert!(exact[19] < 0.8 * exact[0], "it learns: {exact:?}");
    assert!(exact.iter().zip(&rounded).any(|(a, b)| a != b), "BF16 was not used");
    for (step, (exact, rounded)) in exact.iter().zip(&rounded).enumerate() {
        let error = (rounded - exact).abs() / exact;
        assert!(error < 1e-2, "step {step}: {rounded} in BF16, {exact} in F32");
    }
    println!(
        "largest distance {:?}",
        exact.iter().zip(&rounded).map(|(a, b)| (a - b).abs() / a).fold(0.0, f64::max)
    );
}
