//! Training with 8-bit moments: it ends as with FP32 ones, stops and goes on exactly, saves less.

use std::{
    fs,
    sync::{Arc, Mutex},
};

use engraft::{
    engine::{BeforeUpdate, PendingUpdate},
    error::Result,
    model::Policy,
};
use engraft_adapters::Group;
use serde_json::Value;

use crate::{
    cli_support::{Sandbox, files_below},
    policies::{cut, options, rows, trainer},
    setup::{case, golden, lora, within},
};

/// Tensors of 8192 and 24576 trainables: all of them 8-bit.
const LARGE: &str = "--rank 64 --lora-dropout 0.1 --warmup 2";

/// Bounds of docs/NUMERICS.md on the loss of 60 steps, as a part of the first loss.
const CURVE: f64 = 2e-2;
const FINAL: f64 = 1e-2;

fn losses(events: &[Value]) -> Vec<f64> {
    events.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
}

#[test]
fn training_ends_as_with_fp32_moments() {
    let sandbox = Sandbox::new();
    let run = |optimizer: &str| {
        let line = format!(
            "train --rank 64 --seq-len 64 --batch 8 --steps 60 --lr 0.003 --threads 1 --json --optimizer {optimizer} \
             --output {optimizer}"
        );
        let finished = sandbox.engraft(&line).succeeds();
        let held_out = losses(&finished.events_of("eval"));
        (losses(&finished.events_of("step")), *held_out.last().unwrap(), held_out[0])
    };
    let (wide, wide_end, start) = run("adamw");
    let (coded, coded_end, _) = run("adamw8bit");
    assert!(wide_end < 0.9 * start, "FP32 has not learnt: {start} to {wide_end}");
    assert_ne!(wide, coded, "nothing was rounded");
    let apart = wide.iter().zip(&coded).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    within(apart / wide[0], CURVE, "8-bit moments: losses of 60 steps");
    within((wide_end - coded_end).abs() / start, FINAL, "8-bit moments: held-out loss at the end");
}

#[test]
fn a_run_with_8_bit_moments_goes_on_bit_for_bit() {
    let whole = Sandbox::new();
    let options = format!("{LARGE} --optimizer adamw8bit --schedule constant");
    whole.train(&format!("{options} --steps 6")).succeeds();
    let parts = Sandbox::new();
    parts.train(&format!("{options} --steps 2")).succeeds();
    for steps in [3, 6] {
        let again = parts.engraft(&format!("train --resume --output run --steps {steps} --json")).succeeds();
        assert!(!again.events_of("step").is_empty());
    }
    let adapter = |sandbox: &Sandbox| files_below(&sandbox.path("run/adapter"));
    assert!(adapter(&whole) == adapter(&parts));
    let save = |sandbox: &Sandbox| fs::read(sandbox.path("run/saves/step-00000006.safetensors")).unwrap();
    let tensors = |bytes: &[u8]| {
        let (_, metadata) = safetensors::SafeTensors::read_metadata(bytes).unwrap();
        metadata.tensors().into_iter().map(|(name, info)| (name, info.dtype)).collect::<Vec<_>>()
    };
    let (one, other) = (save(&whole), save(&parts));
    // Values, and codes and scales of two moments: no tensor is small.
    assert_eq!(tensors(&one).len(), 5);
    let tail = |bytes: &[u8]| bytes[bytes.len() - bytes.len() / 2..].to_vec();
    assert!(tail(&one) == tail(&other), "values and moments are the same bytes");
}

#[test]
fn another_optimizer_does_not_go_on_and_saves_less() {
    let sandbox = Sandbox::new();
    let size = |optimizer: &str| {
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{LARGE} --steps 1 --optimizer {optimizer}")).succeeds();
        fs::metadata(sandbox.path("run/saves/step-00000001.safetensors")).unwrap().len()
    };
    let (wide, coded) = (size("adamw"), size("adamw8bit"));
    // 12 bytes per trainable against 4 + 2.03, and a description of a few KB.
    assert!(coded as f64 <= 0.53 * wide as f64, "{coded} of {wide} bytes");
    sandbox.train(&format!("{LARGE} --steps 2 --optimizer adamw8bit")).succeeds();
    sandbox
        .engraft("train --resume --output run --steps 4 --optimizer adamw --json")
        .refused(&["--optimizer is \"adamw\" (the run has \"adamw8bit\")"]);
}

#[test]
fn eight_bits_are_proposed_and_left_to_the_user() {
    let sandbox = Sandbox::new();
    let plan = |more: &str| {
        sandbox.engraft(&format!(
            "plan --base gpt2 --device cuda --rank 64 --targets all-linear --offload-optimizer off --json {more}"
        ))
    };
    let refused = |more: &str| {
        let done = plan(more);
        assert_eq!(done.code(), Some(2), "{}", done.stderr());
        done.stderr()
    };
    let text = refused("--memory 2MiB");
    let proposal = "with --optimizer adamw8bit the smallest plan takes ";
    let named = text.split(proposal).nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    let chosen = |more: &str| {
        let planned = plan(more).succeeds().events_of("plan").remove(0);
        planned["policy"]["optimizer"].as_str().unwrap().to_owned()
    };
    let text = refused(&format!("--memory {named}"));
    assert!(text.contains("--optimizer adamw\n") && text.contains(proposal), "{text}");
    assert_eq!(chosen(&format!("--memory {named} --optimizer adamw8bit")), "adamw8bit");
    assert_eq!(chosen(&format!("--memory {named} --optimizer auto")), "adamw8bit");
    assert_eq!(chosen("--memory 4GiB --optimizer auto"), "adamw");
    assert_eq!(chosen("--memory 4GiB"), "adamw");
}

/// Until `adamw` became the default, a run folder said `auto` where nothing was typed.
#[test]
fn a_run_of_auto_goes_on_with_the_optimizer_of_its_save() {
    for optimizer in ["adamw", "adamw8bit"] {
        let sandbox = Sandbox::new();
        sandbox.train(&format!("{LARGE} --steps 2 --optimizer {optimizer}")).succeeds();
        let path = sandbox.path("run/config.toml");
        let typed = fs::read_to_string(&path).unwrap();
        let auto = typed.replace(&format!("optimizer = \"{optimizer}\""), "optimizer = \"auto\"");
        assert_ne!(auto, typed);
        fs::write(&path, &auto).unwrap();
        let again = sandbox.engraft("train --resume --output run --steps 4 --json").succeeds();
        assert_eq!(again.events_of("plan")[0]["policy"]["optimizer"], optimizer);
        assert_eq!(again.events_of("step").len(), 2);
        assert_eq!(fs::read_to_string(&path).unwrap().replace("steps = 4", "steps = 2"), auto);
    }
}

/// Clears the gradient of one tensor, and notes what it sees.
struct Clearing {
    tensor: usize,
    seen: Arc<Mutex<Vec<(u64, usize)>>>,
}

impl BeforeUpdate for Clearing {
    fn before_update(&mut self, update: PendingUpdate) -> Result<()> {
        let range = update.layout.tensors[self.tensor].range();
        assert!(update.gradient.as_view().host::<f32>()[range.clone()].iter().any(|&g| g != 0.0));
        update.gradient.slice(range.start, range.len()).clear();
        self.seen.lock().unwrap().push((update.step, update.supervised));
        Ok(())
    }
}

/// Without decay a value whose gradient is zero stays; a frozen value stays with any gradient.
#[test]
fn a_hook_acts_before_the_norm_and_a_frozen_tensor_stays() {
    let base = golden("tiny");
    let mut case = case("lora", &base, Some(lora("all-linear", 0.0)), None);
    let plain = case.set.clone();
    let (cleared, frozen) = (3, 6);
    case.set.layout.groups.push(Group::FROZEN);
    case.set.layout.tensors[frozen].group = 1;
    let mut options = options(Policy::default());
    options.adamw.weight_decay = 0.0;
    let batches = cut(&rows(), 2);
    let mut hooked = trainer(&base, &case, options);
    let seen = Arc::default();
    hooked.add_hook(Box::new(Clearing { tensor: cleared, seen: Arc::clone(&seen) }));
    let norms: Vec<f64> = (0..2).map(|_| hooked.step(&batches, 1e-2).unwrap().grad_norm).collect();
    assert_eq!(*seen.lock().unwrap(), [(1, 16), (2, 16)]);
    let values = hooked.values().to_vec();
    for (index, slot) in plain.layout.tensors.iter().enumerate() {
        let stays = values[slot.range()] == case.values[slot.range()];
        assert_eq!(stays, index == cleared || index == frozen, "{}", slot.name);
    }
    // The norm is that of the others' gradient, and only the frozen tensor has no moments.
    case.set = plain;
    let mut whole = trainer(&base, &case, options);
    whole.accumulate(&batches).unwrap();
    let gradient = whole.gradient();
    let slots = case.set.layout.tensors.iter().enumerate();
    let others = slots.filter(|(index, _)| *index != cleared && *index != frozen);
    let squares = others.flat_map(|(_, slot)| &gradient[slot.range()]).map(|&g| f64::from(g).powi(2));
    let norm = squares.sum::<f64>().sqrt();
    assert!((norms[0] / norm - 1.0).abs() < 1e-9, "{} {norm}", norms[0]);
    let moments = |trainer: &engraft::engine::Trainer| trainer.tensors()[1].1.len();
    assert_eq!(moments(&hooked), moments(&whole) - case.set.layout.tensors[frozen].len());
}
