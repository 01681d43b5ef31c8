//! What holds of any method, tried on one by its file of tests: gradients against autograd, choices of memory that change
//! no bit or rounding alone, a restored trainer, generation, and the same through the program.

use std::sync::Arc;

use engraft::{
    device::arena::Placement,
    engine::Evaluator,
    model::{Base, BaseDType, Limits, Policy, Recompute},
};
use engraft_adapters::{AdapterSet, AdapterSpec};
use engraft_util::rng;
use serde_json::Value;

use crate::{
    autograd,
    cli_support::{Sandbox, counts_what_was_planned, files_below, losses},
    policies::{LOSS, SEQ_LEN, cut, options, rows, same, trainer},
    setup::{
        Case, TrainerState, bits, by_tensor, decoder, golden, loss_token_by_token, predicting_next, restore,
        row, state, wide, within,
    },
};

/// Bounds of docs/NUMERICS.md.
const CHUNKS: f64 = 5e-6;
/// Factors of modules are around 1, and all other values around 0.
const AROUND_ONE: [&str; 1] = [".ia3_l"];

/// The adapter that `spec` describes, with values none of which is a usual initial one.
pub fn case(name: &'static str, base: &Base, spec: &AdapterSpec) -> Case {
    let set = AdapterSet::new(spec, &base.description()).unwrap();
    let mut values = vec![0.0; set.layout.len];
    for slot in &set.layout.tensors {
        let key = rng::key(&[31, rng::name(&slot.name)]);
        let mean = if AROUND_ONE.iter().any(|end| slot.name.ends_with(end)) { 1.0 } else { 0.0 };
        for (index, value) in values[slot.range()].iter_mut().enumerate() {
            *value = mean + 0.3 * rng::normal(key, index as u64);
        }
    }
    Case { name, set, values }
}

/// The gradient against candle's autograd, on an FP16 base, one of odd sizes, and one in 8 bits.
pub fn gradients(name: &'static str, spec: &AdapterSpec) {
    let mut worst = autograd::Worst::new();
    for base in ["tiny", "odd_heads", "n_inner"] {
        let base = golden(base);
        let case = case(name, &base, spec);
        for (smoothing, recompute) in [(0.0, Recompute::None), (0.1, Recompute::All)] {
            autograd::check(&base, &case, smoothing, recompute, &mut worst);
        }
    }
    let cache = tempfile::tempdir().unwrap();
    let coded = Base::load_as(&golden("tiny").source, "coded", cache.path(), BaseDType::Q8).unwrap();
    let case = case(name, &coded, spec);
    autograd::check(&Arc::new(coded), &case, 0.0, Recompute::None, &mut worst);
    autograd::report(&worst, name);
}

/// Recompute, streaming, offloading and threads change no bit; micro-batches and rows of the head round otherwise; a
/// restored trainer goes on bit for bit; and no frozen value moves.
pub fn memory_choices(name: &'static str, spec: &AdapterSpec) {
    let base = golden("tiny");
    let case = case(name, &base, spec);
    let run = |policy: Policy, size: usize| {
        let mut trainer = trainer(&base, &case, options(policy));
        let batches = cut(&rows(), size);
        trainer.accumulate(&batches).unwrap();
        let gradient = trainer.gradient();
        let reports = (0..3).map(|_| trainer.step(&batches, 1e-2).unwrap()).collect();
        (gradient, reports, state(&trainer))
    };
    let plain = run(Policy::default(), 2);
    for recompute in [Recompute::None, Recompute::Mlp, Recompute::Linear, Recompute::Every(2), Recompute::All]
    {
        for (stream, inputs, moments) in [
            (false, Placement::Memory, Placement::Memory),
            (true, Placement::Disk, Placement::Disk),
            (true, Placement::Host, Placement::Host),
        ] {
            let policy = Policy { recompute, stream, inputs, moments, ..Policy::default() };
            same(&run(policy, 2), &plain, &format!("{name}, {policy:?}"));
        }
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    same(&pool.install(|| run(Policy::default(), 2)), &plain, &format!("{name}, 3 threads"));

    let trained = |slot: &engraft_adapters::TensorSlot| case.set.layout.groups[slot.group].trainable;
    // A frozen tensor has no gradient to compare.
    let comparable = |mut gradient: Vec<f32>| {
        let frozen = case.set.layout.tensors.iter().filter(|slot| !trained(slot));
        frozen.for_each(|slot| gradient[slot.range()].fill(1.0));
        gradient
    };
    let expected = wide(&comparable(plain.0.clone()));
    for (policy, size) in
        [(Policy::default(), 1), (Policy::default(), 4), (Policy { head_rows: 3, ..Policy::default() }, 2)]
    {
        let (gradient, reports, _) = run(policy, size);
        let found = by_tensor(&case.set, &comparable(gradient), &expected);
        within(found, CHUNKS, &format!("gradients of {name}, {size} rows at a time, {policy:?}"));
        within((reports[0].loss / plain.1[0].loss - 1.0).abs(), LOSS, "the loss");
    }
    for slot in &case.set.layout.tensors {
        let (after, before) = (&plain.2.values[slot.range()], &case.values[slot.range()]);
        let moved = after.iter().zip(before).filter(|(a, b)| a != b).count();
        // Of the embedding's A the columns of tokens that are in no row stay.
        let least = if slot.name.ends_with("lora_embedding_A") { slot.len() / 4 } else { slot.len() / 2 };
        let expected = if trained(slot) { moved > least } else { moved == 0 };
        assert!(expected, "{moved} of {} values of {} moved", slot.len(), slot.name);
    }
    restored(&base, &case);
}

fn restored(base: &Arc<Base>, case: &Case) {
    let batches = cut(&rows(), 2);
    let mut whole = trainer(base, case, options(Policy::default()));
    whole.step(&batches, 1e-2).unwrap();
    let saved = state(&whole);
    let expected = whole.step(&batches, 1e-2).unwrap();
    let fresh = Case { name: case.name, set: case.set.clone(), values: vec![0.5; case.values.len()] };
    let mut second = trainer(base, &fresh, options(Policy::default()));
    restore(&mut second, &saved).unwrap();
    assert_eq!(second.step(&batches, 1e-2).unwrap(), expected);
    let (found, expected): (TrainerState, TrainerState) = (state(&second), state(&whole));
    assert!(found == expected && bits(&found.values) == bits(&expected.values), "{} restored", case.name);
}

/// Token by token, and all at once, a decoder gives what an evaluation computes.
pub fn generation(name: &'static str, spec: &AdapterSpec) {
    let base = golden("tiny");
    let case = case(name, &base, spec);
    let of = predicting_next(&row(4, SEQ_LEN, 0, base.config.vocab).ids);
    let limits = Limits { rows: 1, tokens: SEQ_LEN };
    let adapter = Some((&case.set, &case.values[..]));
    let mut evaluator = Evaluator::new(Arc::clone(&base), adapter, limits, 64).unwrap();
    let expected =
        evaluator.evaluate(&mut [crate::setup::batch(std::slice::from_ref(&of))].into_iter()).unwrap().loss;

    let decoder = || decoder(&base, &case, 1, SEQ_LEN);
    let mut one_by_one = decoder();
    let sum = loss_token_by_token(&mut one_by_one, &of.ids);
    within((sum / (SEQ_LEN - 1) as f64 / expected - 1.0).abs(), 2e-6, "the loss of a decoder");
    let last = wide(one_by_one.feed(&of.ids[SEQ_LEN - 1..]).unwrap());
    let at_once = decoder().feed(&of.ids).unwrap().to_vec();
    within(crate::setup::difference(&at_once, &last), 5e-6, "logits of a prefill");
}

/// Runs the program with `line` and with further options; what each must give beside the run without them.
pub fn program(line: &str) {
    let sandbox = Sandbox::new();
    let run = |output: &str, more: &str| {
        let run = sandbox.engraft(&format!("{line} --micro-batch 2 --output {output} {more}")).succeeds();
        counts_what_was_planned(&run);
        losses(&run)
    };
    let adapter = |name: &str| files_below(&sandbox.path(name).join("adapter"));
    let plain = run("plain", "");
    for (name, more) in [
        ("recomputed", "--recompute all"),
        ("streamed", "--stream-base on --offload-inputs --offload-optimizer --threads 2"),
    ] {
        assert_eq!(run(name, more), plain, "{more}");
        assert!(adapter(name) == adapter("plain"), "{more}: other bytes");
    }
    let near = |found: &[f64], bound: f64, what: &str| {
        let worst = found.iter().zip(&plain).map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max);
        assert!(found.len() == plain.len() && worst < bound, "{what}: {worst:.2e}, {found:?} {plain:?}");
    };
    near(&run("whole", "--micro-batch 4"), 1e-4, "4 rows at a time");
    near(&run("codes", "--base-dtype q8"), 2e-2, "a base in 8 bits");
    near(&run("moments", "--optimizer adamw8bit"), 5e-2, "moments in 8 bits");
    let first: Value = sandbox.engraft("inspect plain/adapter --json").succeeds().events().remove(0);
    assert!(first["adapters"][0]["unsupported"].as_array().unwrap().is_empty(), "{first}");
}
