//! Settings that may change memory and time but no result: recompute, threads, chunks, micro-batches, packing.
//! Also: a step moves every trainable, never changes the base, and is never made by half.

use std::sync::Arc;

use engraft::{
    data::{Batch, NO_LOSS, Row},
    device::{
        Frozen,
        arena::{Arenas, Placement},
    },
    engine::{StepReport, Trainer, TrainerOptions},
    model::{AdapterBindings, Base, Decoder, Linear, Policy, Recompute},
    optim::{AdamWOptions, OptimizerKind},
};
use engraft_adapters::LoraSpec;
use half::f16;

use crate::setup::{
    Case, Sizes, TrainerState, batch, bits, by_tensor, case, cases, golden, lora, prefix, random_base,
    restore, row, state, wide, within,
};

/// Bounds of docs/NUMERICS.md, relative to a tensor's largest element: the same sums in another order.
/// A sum of m FP32 terms errs by about sqrt(m) 2^-24 of its size (6e-8), a few such sums follow one
/// another, and a gradient that is a difference of larger terms keeps their absolute error.
const CHUNKS: f64 = 5e-6;
/// Bound of a loss: the mean of a few dozen FP32 losses.
pub const LOSS: f64 = 1e-6;

pub const VOCAB: usize = 61;
pub const SEQ_LEN: usize = 11;

pub fn options(policy: Policy) -> TrainerOptions {
    let adamw = AdamWOptions { weight_decay: 0.0, ..AdamWOptions::default() };
    TrainerOptions {
        rows: 4,
        seq_len: SEQ_LEN,
        policy,
        optimizer: OptimizerKind::AdamW,
        adamw,
        clip: 1.0,
        label_smoothing: 0.1,
        neftune: 0.0,
        seed: 7,
    }
}

pub fn trainer(base: &Arc<Base>, case: &Case, options: TrainerOptions) -> Trainer {
    Trainer::new(Arc::clone(base), case.set.clone(), &case.values, options, arenas()).unwrap()
}

/// Arenas that may also put buffers into files.
fn arenas() -> Arenas {
    Arenas::real(Some(std::env::temp_dir()))
}

/// Four rows of different lengths with 7, 0, 6 and 3 supervised tokens.
pub fn rows() -> Vec<Row> {
    let mut rows = vec![row(1, 11, 2, VOCAB), row(2, 7, 7, VOCAB), row(3, 9, 1, VOCAB), row(4, 5, 1, VOCAB)];
    rows[2].targets[8] = NO_LOSS;
    let supervised: Vec<_> = rows.iter().map(|row| batch(std::slice::from_ref(row)).supervised()).collect();
    assert_eq!(supervised, [7, 0, 6, 3]);
    rows
}

pub fn cut(rows: &[Row], size: usize) -> Vec<Batch> {
    rows.chunks(size).map(batch).collect()
}

/// Gradient of the first step, reports of three steps, and the state after them.
pub type Outcome = (Vec<f32>, Vec<StepReport>, TrainerState);

fn run(base: &Arc<Base>, case: &Case, options: TrainerOptions) -> Outcome {
    let mut trainer = trainer(base, case, options);
    let batches = cut(&rows(), 2);
    trainer.accumulate(&batches).unwrap();
    let gradient = trainer.gradient();
    let reports = (0..3).map(|_| trainer.step(&batches, 1e-2).unwrap()).collect();
    (gradient, reports, state(&trainer))
}

#[test]
fn recompute_changes_no_bit() {
    let base = golden("tiny");
    for dropout in [0.0, 0.2] {
        for case in cases(&base, dropout) {
            let with = |recompute| {
                run(&base, &case, options(Policy { recompute, head_rows: 256, ..Policy::default() }))
            };
            let kept = with(Recompute::None);
            assert!(kept.0.iter().any(|&x| x != 0.0), "{} has no gradient", case.name);
            for recompute in
                [Recompute::Mlp, Recompute::Linear, Recompute::Every(2), Recompute::Every(1), Recompute::All]
            {
                let what = format!("{}, dropout {dropout}, {recompute:?}", case.name);
                same(&with(recompute), &kept, &what);
            }
        }
    }
}

pub fn same(found: &Outcome, expected: &Outcome, what: &str) {
    assert_eq!(bits(&found.0), bits(&expected.0), "gradients of {what}");
    assert_eq!(found.1, expected.1, "reports of {what}");
    assert_eq!(found.2, expected.2, "state of {what}");
}

/// Streamed weights, and inputs of blocks and moments that are in a file, or in buffers that are copied away and
/// back, alone and together with recompute; also where the lowest blocks are not adapted.
#[test]
fn streaming_and_offloading_change_no_bit() {
    let base = golden("tiny");
    let mut tried = cases(&base, 0.2);
    let upper = LoraSpec { layers: Some(vec![base.config.layers - 1]), ..lora("all-linear", 0.2) };
    tried.push(case("lora above", &base, Some(upper), None));
    for case in tried {
        let plain = run(&base, &case, options(Policy::default()));
        assert!(plain.0.iter().any(|&x| x != 0.0), "{} has no gradient", case.name);
        for recompute in
            [Recompute::None, Recompute::Mlp, Recompute::Linear, Recompute::Every(2), Recompute::All]
        {
            for (stream, inputs, moments) in [
                (true, Placement::Memory, Placement::Memory),
                (false, Placement::Disk, Placement::Memory),
                (false, Placement::Memory, Placement::Disk),
                (true, Placement::Disk, Placement::Disk),
                (true, Placement::Host, Placement::Host),
            ] {
                let policy = Policy { recompute, stream, inputs, moments, ..Policy::default() };
                let what = format!("{}, {policy:?}", case.name);
                same(&run(&base, &case, options(policy)), &plain, &what);
            }
        }
    }
}

/// Seven blocks whose inputs share three buffers; with the lowest ones not adapted, and an evaluation between steps,
/// which goes through the same buffers.
#[test]
fn inputs_that_take_turns_come_back() {
    let sizes = Sizes { layers: 7, heads: 2, width: 16, inner: 40, positions: 20, vocab: 50 };
    let random = random_base(sizes, "gelu_new");
    let rows: Vec<Row> = [(1, 11), (2, 9), (3, 4)].map(|(seed, len)| row(seed, len, 2, sizes.vocab)).to_vec();
    // The last micro-batch is smaller than the others.
    let batches = cut(&rows, 2);
    for layers in [None, Some(vec![2, 5]), Some(vec![4]), Some(vec![5]), Some(vec![6])] {
        let lora = LoraSpec { layers: layers.clone(), ..lora("all-linear", 0.2) };
        let case = case("some layers", &random.base, Some(lora), None);
        let trained = |inputs, recompute| {
            let options = TrainerOptions {
                rows: 2,
                seq_len: 11,
                ..options(Policy { inputs, recompute, ..Policy::default() })
            };
            let mut trainer = trainer(&random.base, &case, options);
            trainer.step(&batches, 1e-2).unwrap();
            let loss = trainer.evaluate(&mut batches.clone().into_iter()).unwrap().loss;
            trainer.step(&batches, 1e-2).unwrap();
            (loss.to_bits(), bits(&trainer.gradient()), state(&trainer))
        };
        for recompute in [Recompute::None, Recompute::All] {
            let kept = trained(Placement::Memory, recompute);
            assert!(kept == trained(Placement::Host, recompute), "layers {layers:?}, recompute {recompute}");
        }
    }
}

/// Without this, a dropout that does nothing would pass every test of sameness.
#[test]
fn dropout_and_smoothing_do_something() {
    let base = golden("tiny");
    let plain = &cases(&base, 0.0)[0];
    let dropping = &cases(&base, 0.2)[0];
    let smooth = options(Policy::default());
    let (gradient, reports, _) = run(&base, plain, smooth);
    let (dropped, ..) = run(&base, dropping, smooth);
    assert!(by_tensor(&plain.set, &dropped, &wide(&gradient)) > 1e-2, "dropout changes the gradient");
    let (other_seed, ..) = run(&base, dropping, TrainerOptions { seed: 8, ..smooth });
    assert!(by_tensor(&plain.set, &other_seed, &wide(&dropped)) > 1e-2, "the seed changes the mask");
    let (_, sharp, _) = run(&base, plain, TrainerOptions { label_smoothing: 0.0, ..smooth });
    assert!((sharp[0].loss - reports[0].loss).abs() > 1e-3, "smoothing changes the loss");
}

#[test]
fn chunks_of_the_head_change_rounding_only() {
    let base = golden("tiny");
    let mut worst = 0f64;
    for case in cases(&base, 0.2) {
        let with = |head_rows| run(&base, &case, options(Policy { head_rows, ..Policy::default() }));
        let (whole, reports, _) = with(256);
        for head_rows in [1, 3, 5, 16] {
            let (gradient, again, _) = with(head_rows);
            worst = worst.max(by_tensor(&case.set, &gradient, &wide(&whole)));
            within((again[0].loss / reports[0].loss - 1.0).abs(), LOSS, "loss with chunks");
        }
    }
    within(worst, CHUNKS, "gradients with chunks of 1, 3, 5, 16 rows");
}

/// A base whose products, attention and head are cut into several tasks.
#[test]
fn threads_change_no_bit() {
    let sizes = Sizes { layers: 2, heads: 5, width: 320, inner: 600, positions: 90, vocab: 700 };
    let random = random_base(sizes, "gelu_new");
    let wide_rows: Vec<Row> =
        [(1, 70), (2, 66), (3, 41)].map(|(seed, len)| row(seed, len, 3, sizes.vocab)).to_vec();
    let batches = cut(&wide_rows, 2);
    let options =
        TrainerOptions { rows: 2, seq_len: 70, ..options(Policy { head_rows: 50, ..Policy::default() }) };
    for case in cases(&random.base, 0.2) {
        let with = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut trainer = trainer(&random.base, &case, options);
                trainer.accumulate(&batches).unwrap();
                let gradient = bits(&trainer.gradient());
                trainer.step(&batches, 1e-2).unwrap();
                (gradient, state(&trainer))
            })
        };
        let one = with(1);
        for threads in [2, 5] {
            let many = with(threads);
            assert!(one.0 == many.0, "gradient of {} with {threads} threads", case.name);
            assert!(one.1 == many.1, "state of {} with {threads} threads", case.name);
        }
    }
}

fn frozen_bits(base: &Base) -> Vec<u16> {
    let weights = &base.weights;
    let mut all: Vec<&Frozen> = vec![&weights.wte.data, &weights.wpe, &weights.ln_f.gain, &weights.ln_f.bias];
    all.extend(weights.head.as_ref().map(|head| &head.data));
    let linear = |linear: &'_ Linear| [linear.weight.data.clone(), linear.bias.clone()];
    let blocks: Vec<Frozen> = weights
        .blocks
        .iter()
        .flat_map(|block| {
            let norms = [&block.ln_1, &block.ln_2].map(|norm| [norm.gain.clone(), norm.bias.clone()]);
            let sites = [&block.c_attn, &block.attn_proj, &block.c_fc, &block.mlp_proj].map(linear);
            norms.into_iter().chain(sites).flatten().collect::<Vec<_>>()
        })
        .collect();
    all.extend(&blocks);
    all.iter().flat_map(|frozen| frozen.view().host::<f16>()).map(|half| half.to_bits()).collect()
}

#[test]
fn a_step_moves_every_trainable_tensor_and_no_frozen_byte() {
    for name in ["tiny", "untied"] {
        let base = golden(name);
        let before = frozen_bits(&base);
        let vocab = base.config.vocab;
        // Every tensor of an embedding, of 12 blocks' tensors, of the last norm, of a head of its own.
        let expected = 12 * base.config.layers + 4 + usize::from(base.weights.head.is_some());
        assert!(before.len() > expected * base.config.width, "{} values", before.len());
        for case in cases(&base, 0.2) {
            // After a prefix of 5 the smaller bases have room for 8.
            let options = TrainerOptions { seq_len: 8, ..options(Policy::default()) };
            let mut trainer = trainer(&base, &case, options);
            trainer.step(&[batch(&[row(1, 8, 1, vocab), row(2, 6, 1, vocab)])], 1e-2).unwrap();
            let values = trainer.values();
            for slot in &case.set.layout.tensors {
                let moved =
                    values[slot.range()].iter().zip(&case.values[slot.range()]).filter(|(a, b)| a != b);
                let (moved, all) = (moved.count(), slot.len());
                assert!(2 * moved > all, "{}: {moved} of {all} values of {} moved", case.name, slot.name);
            }
        }
        assert!(frozen_bits(&base) == before, "a weight of {name} changed");
        let again = golden(name);
        assert!(frozen_bits(&again) == before, "the file of {name} changed");
    }
}

#[test]
fn evaluation_changes_nothing_and_sees_neither_dropout_nor_smoothing() {
    let base = golden("tiny");
    for recompute in [Recompute::None, Recompute::All] {
        let options = options(Policy { recompute, ..Policy::default() });
        for (case, plain) in cases(&base, 0.2).into_iter().zip(cases(&base, 0.0)) {
            let mut sharp = trainer(&base, &plain, TrainerOptions { label_smoothing: 0.0, ..options });
            let batches = cut(&rows(), 2);
            let expected = sharp.accumulate(&batches).unwrap();

            let mut first = trainer(&base, &case, options);
            first.step(&batches, 1e-2).unwrap();
            let reset = TrainerState { values: case.values.clone(), ..state(&first) };
            restore(&mut first, &reset).unwrap();
            let before = state(&first);
            let found = first.evaluate(&mut batches.clone().into_iter()).unwrap();
            assert_eq!(state(&first), before, "{}", case.name);
            assert_eq!((found.tokens, found.rows), (16, 4));
            assert_eq!(found.loss, expected.sum / expected.tokens as f64, "{}", case.name);
            let mut none = std::iter::empty();
            assert!(first.evaluate(&mut none).is_err(), "nothing to evaluate is an error");

            // The evaluation does not change the training.
            let mut second = trainer(&base, &case, options);
            restore(&mut second, &before).unwrap();
            assert_eq!(first.step(&batches, 1e-2).unwrap(), second.step(&batches, 1e-2).unwrap());
            assert_eq!(state(&first), state(&second), "{}", case.name);
        }
    }
}

/// The lowest layer has no delta, a higher one has: memory lent to evaluation must fit every layer.
#[test]
fn evaluation_works_when_layers_have_different_ranks() {
    let base = golden("tiny");
    let top = lora("all-linear", 0.0);
    let above = case(
        "LoRA above a prefix",
        &base,
        Some(engraft_adapters::LoraSpec { layers: Some(vec![2]), ..top.clone() }),
        Some(prefix(5, None)),
    );
    let mut growing = top;
    growing.rank_pattern.insert(r"h\.[12]\..*".into(), 6);
    let growing = case("ranks that grow", &base, Some(growing), None);
    for case in [above, growing] {
        let options = TrainerOptions { label_smoothing: 0.0, ..options(Policy::default()) };
        let mut trainer = trainer(&base, &case, options);
        let batches = cut(&rows(), 2);
        let expected = trainer.accumulate(&batches).unwrap();
        let found = trainer.evaluate(&mut batches.into_iter()).unwrap();
        assert_eq!(found.loss, expected.sum / expected.tokens as f64, "{}", case.name);
    }
}

/// Logits come from the decoder, the rest from the definition, in f64.
#[test]
fn label_smoothing_is_the_definition() {
    let base = golden("tiny");
    for smoothing in [0.0, 0.1, 0.7] {
        for case in cases(&base, 0.0) {
            let options = TrainerOptions { label_smoothing: smoothing, ..options(Policy::default()) };
            let found = trainer(&base, &case, options).accumulate(&cut(&rows(), 4)).unwrap();
            let bindings = AdapterBindings::new(&[(&case.set, 1.0)], base.config.layers).unwrap();
            let expected: f64 =
                rows().iter().map(|row| row_loss(&base, &bindings, &case, row, smoothing)).sum();
            within((found.sum / expected - 1.0).abs(), LOSS, "smoothed loss");
        }
    }
}

/// `sum of (1 - e) (lse(z) - z_y) + e (lse(z) - mean(z))`.
fn row_loss(base: &Arc<Base>, bindings: &AdapterBindings, case: &Case, row: &Row, e: f64) -> f64 {
    let mut decoder =
        Decoder::new(Arc::clone(base), bindings.clone(), case.values.clone(), 1, row.ids.len()).unwrap();
    let mut sum = 0.0;
    for (&id, &target) in row.ids.iter().zip(&row.targets) {
        let z = wide(decoder.feed(&[id]).unwrap());
        if target != NO_LOSS {
            let lse = z.iter().map(|z| z.exp()).sum::<f64>().ln();
            let mean = z.iter().sum::<f64>() / z.len() as f64;
            sum += (1.0 - e) * (lse - z[target as usize]) + e * (lse - mean);
        }
    }
    sum
}

#[test]
fn a_refused_batch_leaves_everything_as_it_was() {
    let base = golden("tiny");
    let good = cut(&rows(), 2);
    let vocab = VOCAB as u32;
    let broken = |change: &dyn Fn(&mut Row)| {
        let mut rows = rows();
        change(&mut rows[3]);
        cut(&rows, 2)
    };
    let refused: Vec<(&str, Vec<Batch>, &str)> = vec![
        ("more rows than planned", vec![batch(&[rows(), rows()].concat())], "8 x 11"),
        ("longer than planned", vec![batch(&[row(9, 12, 0, VOCAB)])], "1 x 12"),
        ("a token outside", broken(&|row| row.ids[4] = vocab), "token 61 is outside"),
        ("a target outside", broken(&|row| row.targets[3] = 1000), "token 1000 is outside"),
        ("a negative target", broken(&|row| row.targets[3] = -1), "token -1 is outside"),
        ("nothing supervised", vec![batch(&rows()[1..2])], "no supervised token"),
        ("no micro-batch", vec![], "no supervised token"),
    ];
    for case in cases(&base, 0.2) {
        let mut disturbed = trainer(&base, &case, options(Policy::default()));
        let mut calm = trainer(&base, &case, options(Policy::default()));
        disturbed.step(&good, 1e-2).unwrap();
        calm.step(&good, 1e-2).unwrap();
        for (what, batches, says) in &refused {
            let before = state(&disturbed);
            let error = disturbed.step(batches, 1e-2).unwrap_err().to_string();
            assert!(error.contains(says), "{what}: {error}");
            assert_eq!(state(&disturbed), before, "{what}");
        }
        assert_eq!(disturbed.step(&good, 1e-2).unwrap(), calm.step(&good, 1e-2).unwrap());
        assert_eq!(state(&disturbed), state(&calm), "{}", case.name);
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_refused() {
    let base = golden("tiny");
    for case in cases(&base, 0.0) {
        let mut trainer = trainer(&base, &case, options(Policy::default()));
        let mut broken = state(&trainer);
        let last = broken.values.len() - 1;
        broken.values[last] = f32::NAN;
        restore(&mut trainer, &broken).unwrap();
        let before = state(&trainer);
        let error = trainer.step(&cut(&rows(), 2), 1e-2).unwrap_err().to_string();
        assert!(error.contains("not finite"), "{}: {error}", case.name);
        let after = state(&trainer);
        assert_eq!(bits(&after.values), bits(&before.values), "{}", case.name);
        assert_eq!((after.step, after.moments), (before.step, before.moments));
    }
}

#[test]
fn a_restored_trainer_goes_on_bit_for_bit() {
    let base = golden("tiny");
    let batches: Vec<Vec<Batch>> =
        (0..5).map(|step| cut(&[row(step, 11, 1, VOCAB), row(50 + step, 8, 2, VOCAB)], 1)).collect();
    for case in cases(&base, 0.2) {
        let mut whole = trainer(&base, &case, options(Policy::default()));
        let reports: Vec<_> = batches.iter().map(|batch| whole.step(batch, 1e-2).unwrap()).collect();
        for cut in 0..5 {
            let mut first = trainer(&base, &case, options(Policy::default()));
            for batch in &batches[..cut] {
                first.step(batch, 1e-2).unwrap();
            }
            let saved = state(&first);
            drop(first);
            let fresh = Case { name: case.name, set: case.set.clone(), values: case.set.init(99).unwrap() };
            let mut second = trainer(&base, &fresh, options(Policy::default()));
            restore(&mut second, &saved).unwrap();
            assert_eq!(second.steps_done(), cut as u64);
            for (batch, report) in batches[cut..].iter().zip(&reports[cut..]) {
                assert_eq!(second.step(batch, 1e-2).unwrap(), *report, "{} cut at {cut}", case.name);
            }
            assert_eq!(state(&second), state(&whole), "{} cut at {cut}", case.name);
        }
        let short = TrainerState { values: vec![0.0; 3], ..state(&whole) };
        assert!(restore(&mut whole, &short).is_err(), "a state of another adapter is refused");
    }
}
