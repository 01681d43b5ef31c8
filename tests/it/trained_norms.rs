//! Layer norms whose gains and biases are trained, in sets made by hand: gradients against autograd, everything that may
//! change no bit, saves, evaluation and generation; and initial values that start from the base.

use std::sync::Arc;

use engraft::{
    device::arena::Placement,
    engine::{Evaluator, Trainer},
    model::{AdapterBindings, Base, Decoder, Limits, Policy, Recompute, RowTokens},
};
use engraft_adapters::BaseWeights;

use crate::{
    autograd,
    by_hand::{
        ByHand, LOGITS, LOSS, SIZES, agrees_with_autograd_in_8_bits, base, micro_batches_round_otherwise,
        run, trainer,
    },
    policies::{self, cut, options},
    setup::{
        Case, batch, bindings, decoder, difference, loss_token_by_token, predicting_next, restore, row,
        state, wide, within,
    },
};

/// Every norm but those of layer 0 and one gain, beside deltas and vectors of both layers; some are frozen.
fn beside_deltas(dropout: f64) -> Case {
    let mut hand = ByHand::default();
    let (a, b) = (hand.a(10, true), hand.b(30, true));
    hand.delta((1, 0), 0, (a, b));
    let (u, g) = (hand.vector(10, true), hand.vector(14, true));
    hand.site((2, 2), Some(u), Some((g, false)), None);
    let (gain, bias) = (hand.vector(10, true), hand.bias(10));
    hand.norm((Some(1), 0), Some(gain), Some(bias));
    let gain = hand.vector(10, true);
    hand.norm((Some(1), 1), Some(gain), None);
    let bias = hand.bias(10);
    hand.norm((Some(2), 0), None, Some(bias));
    let (gain, bias) = (hand.vector(10, false), hand.bias(10));
    hand.norm((Some(2), 1), Some(gain), Some(bias));
    let (gain, bias) = (hand.vector(10, true), hand.bias(10));
    hand.norm((None, 0), Some(gain), Some(bias));
    hand.case("norms beside deltas", dropout)
}

/// A gain and a bias of one norm, and nothing else: those of layers 0 to 2, then the last.
fn one_norm(index: usize) -> Case {
    let mut hand = ByHand::default();
    let (gain, bias) = (hand.vector(10, true), hand.bias(10));
    let place = if index < 6 { (Some(index / 2), index % 2) } else { (None, 0) };
    hand.norm(place, Some(gain), Some(bias));
    hand.case("one norm", 0.0)
}

fn cases() -> Vec<Case> {
    let mut cases = vec![beside_deltas(0.0), beside_deltas(0.2)];
    cases.extend((0..7).map(one_norm));
    cases
}

#[test]
fn autograd_agrees_on_trained_norms() {
    let base = base();
    let mut worst = autograd::Worst::new();
    for case in cases() {
        for recompute in [Recompute::None, Recompute::Mlp, Recompute::Linear, Recompute::All] {
            autograd::check(&base.base, &case, 0.1, recompute, &mut worst);
        }
    }
    autograd::report(&worst, "with trained norms");
}

#[test]
fn autograd_agrees_on_norms_of_a_base_in_8_bits() {
    agrees_with_autograd_in_8_bits(&beside_deltas(0.0));
}

#[test]
fn recompute_streaming_and_offloading_change_no_bit() {
    let base = base();
    for case in cases() {
        let plain = run(&base.base, &case, Policy::default());
        let all = Policy { recompute: Recompute::All, ..Policy::default() };
        let mlp = Policy { recompute: Recompute::Mlp, ..Policy::default() };
        let linear = Policy { recompute: Recompute::Linear, stream: true, ..Policy::default() };
        let files = Policy { stream: true, inputs: Placement::Disk, moments: Placement::Disk, ..all };
        for policy in [all, mlp, linear, files] {
            assert!(run(&base.base, &case, policy) == plain, "{} under {policy:?}", case.name);
        }
    }
}

#[test]
fn micro_batches_change_rounding_alone() {
    let base = base();
    for case in [beside_deltas(0.2), one_norm(0), one_norm(6)] {
        micro_batches_round_otherwise(&base.base, &case);
    }
}

#[test]
fn a_trained_norm_takes_no_memory_but_its_values() {
    let base = base();
    let rows = |case: &Case| {
        let plan = Trainer::plan(&base.base.config, &case.set, options(Policy::default())).unwrap();
        assert_eq!(trainer(&base.base, case, Policy::default()).memory(), plan);
        let rows = plan.into_iter().filter(|row| !["trainables", "moments"].contains(&row.role));
        rows.map(|row| (row.name, row.shape)).collect::<Vec<_>>()
    };
    let with = beside_deltas(0.0);
    let without = beside_deltas(0.0);
    let without = Case { set: engraft_adapters::AdapterSet { norms: Vec::new(), ..without.set }, ..without };
    assert_eq!(rows(&with), rows(&without));
}

#[test]
fn it_resumes_to_the_same_bits() {
    let base = base();
    for case in [beside_deltas(0.2), one_norm(6)] {
        let batches = cut(&policies::rows(), 2);
        let mut whole = trainer(&base.base, &case, Policy::default());
        for _ in 0..2 {
            whole.step(&batches, 1e-2).unwrap();
        }
        let saved = state(&whole);
        let before = whole.step(&batches, 1e-2).unwrap();
        let mut resumed = trainer(&base.base, &case, Policy::default());
        restore(&mut resumed, &saved).unwrap();
        assert_eq!(resumed.step(&batches, 1e-2).unwrap(), before);
        assert_eq!(state(&resumed), state(&whole));
    }
}

/// The loss of every token but the first of `ids`, by an evaluation.
fn evaluated(base: &Arc<Base>, adapter: Option<&Case>, ids: &[u32]) -> f64 {
    let of = predicting_next(ids);
    let limits = Limits { rows: 1, tokens: ids.len() };
    let adapter = adapter.map(|case| (&case.set, &case.values[..]));
    let mut evaluator = Evaluator::new(Arc::clone(base), adapter, limits, 64).unwrap();
    evaluator.evaluate(&mut [batch(&[of])].into_iter()).unwrap().loss * (ids.len() - 1) as f64
}

#[test]
fn generation_has_the_norms_of_training() {
    let base = base();
    let ids = row(4, 13, 0, SIZES.vocab).ids;
    let mut worst = 0f64;
    for case in cases() {
        let mut decoder = decoder(&base.base, &case, 1, SIZES.positions);
        let sum = loss_token_by_token(&mut decoder, &ids);
        let expected = evaluated(&base.base, Some(&case), &ids);
        worst = worst.max((sum / expected - 1.0).abs());
    }
    within(worst, LOSS, "losses token by token, with trained norms");
}

/// Each row of one pass has its own norms; those of the base between them, too.
#[test]
fn rows_with_different_norms_are_read_together() {
    let base = base();
    let (first, other, last) = (beside_deltas(0.0), one_norm(3), one_norm(6));
    let ids = row(6, 10, 0, SIZES.vocab).ids;
    let mut together = decoder(&base.base, &first, 4, SIZES.positions);
    let mut assign = |row: usize, bindings: AdapterBindings, values: &[f32]| {
        let adapter = together.add_adapter(bindings, values.to_vec()).unwrap();
        together.assign(row, adapter).unwrap();
    };
    assign(1, bindings(&base.base, &other), &other.values);
    assign(2, AdapterBindings::none(SIZES.layers), &[]);
    assign(3, bindings(&base.base, &last), &last.values);
    let tokens: Vec<RowTokens> = (0..4).map(|row| RowTokens { row, ids: &ids[row..] }).collect();
    let mut found = together.feed_rows(&tokens).unwrap().to_vec();
    found.extend(together.feed_each(&[1, 2, 3, 4]).unwrap());

    let none = AdapterBindings::none(SIZES.layers);
    let bare = Decoder::new(Arc::clone(&base.base), none, Vec::new(), 1, SIZES.positions).unwrap();
    let alone = [
        decoder(&base.base, &first, 1, SIZES.positions),
        decoder(&base.base, &other, 1, SIZES.positions),
        bare,
        decoder(&base.base, &last, 1, SIZES.positions),
    ];
    let (mut read, mut next) = (Vec::new(), Vec::new());
    for (row, mut decoder) in alone.into_iter().enumerate() {
        read.push(wide(decoder.feed(&ids[row..]).unwrap()));
        next.push(wide(decoder.feed(&[row as u32 + 1]).unwrap()));
    }
    read.extend(next);
    let pairs = found.chunks(SIZES.vocab).zip(&read);
    let worst = pairs.map(|(found, alone)| difference(found, alone)).fold(0.0, f64::max);
    within(worst, LOGITS, "rows with different norms");
    assert!(difference(&found[..SIZES.vocab], &read[2]) > 1e-2);
}

/// A set whose norms start from the base's is the base, bit for bit.
#[test]
fn norms_that_start_from_the_base_are_the_base() {
    let base = base();
    let mut hand = ByHand::default();
    let mut start = Vec::new();
    for place in (0..SIZES.layers).flat_map(|layer| [(Some(layer), 0), (Some(layer), 1)]).chain([(None, 0)]) {
        let (gain, bias) = (hand.vector(10, true), hand.bias(10));
        hand.norm(place, Some(gain), Some(bias));
        let norm = base.base.norm(place.0, place.1).unwrap();
        start.extend([norm.gain, norm.bias].concat());
    }
    let case = Case { values: start, ..hand.case("norms of the base", 0.0) };
    let ids = row(4, 13, 0, SIZES.vocab).ids;
    assert_eq!(evaluated(&base.base, Some(&case), &ids), evaluated(&base.base, None, &ids));
    assert_eq!(base.base.norm(Some(SIZES.layers), 0), None);
    assert_eq!((base.base.norm(Some(0), 2), base.base.norm(None, 1)), (None, None));
}
