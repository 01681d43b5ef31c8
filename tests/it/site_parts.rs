//! Every optional part of a linear site (d, e, frozen and shared factors of deltas; u, g and a bias of the whole site),
//! in sets made by hand: gradients against autograd, recompute, the plan of memory, and generation.

use std::sync::Arc;

use engraft::{
    device::{Buffer, arena::Arenas},
    engine::Trainer,
    model::{AdapterBindings, Base, Decoder, Limits, Policy, Recompute, RowTokens, Stack, Trained},
};

use crate::{
    autograd,
    by_hand::ByHand,
    policies::{self, options},
    setup::{
        Case, RandomBase, Sizes, batch, bindings, bits, decoder, difference, loss_token_by_token,
        predicting_next, random_base, row, wide, within,
    },
};

const SIZES: Sizes = Sizes { layers: 2, heads: 2, width: 10, inner: 14, positions: 13, vocab: 61 };
/// Bounds of docs/NUMERICS.md for generation against a full pass.
const LOGITS: f64 = 5e-6;
const LOSS: f64 = 2e-6;

const RECOMPUTE: [Recompute; 5] =
    [Recompute::None, Recompute::Mlp, Recompute::Linear, Recompute::Every(2), Recompute::All];

fn base() -> RandomBase {
    random_base(SIZES, "gelu_new")
}

/// Sites of a layer by their numbers: c_attn 10 to 30, attn.c_proj 10 to 10, c_fc 10 to 14, mlp.c_proj 14 to 10.
fn everything(dropout: f64) -> Case {
    let mut hand = ByHand::default();
    let shared_a = hand.a(10, false);
    let shared_b = hand.b(10, true);
    let (d, e) = (hand.vector(3, true), hand.vector(10, true));
    let delta = hand.delta((0, 0), 7, (shared_a, shared_b));
    (delta.d, delta.e) = (Some(d), Some(e));
    let (b, d, e) = (hand.b(14, false), hand.vector(3, true), hand.vector(14, true));
    let delta = hand.delta((0, 2), 0, (shared_a, b));
    (delta.d, delta.e) = (Some(d), Some(e));
    let (a, b, d) = (hand.a(14, true), hand.b(10, true), hand.vector(3, false));
    hand.delta((0, 3), 0, (a, b)).d = Some(d);
    let (b, e) = (hand.b(30, true), hand.vector(30, false));
    hand.delta((1, 0), 0, (shared_a, b)).e = Some(e);
    hand.delta((1, 1), 0, (shared_a, shared_b));

    let (u, g) = (hand.vector(10, true), hand.vector(30, true));
    hand.site((0, 0), Some(u), Some((g, false)), None);
    let (g, bias) = (hand.vector(10, true), hand.bias(10));
    hand.site((0, 1), None, Some((g, true)), Some(bias));
    let (u, bias) = (hand.vector(10, true), hand.bias(14));
    hand.site((0, 2), Some(u), None, Some(bias));
    let (g, bias) = (hand.vector(10, true), hand.bias(10));
    hand.site((0, 3), None, Some((g, false)), Some(bias));
    let g = hand.vector(30, true);
    hand.site((1, 0), None, Some((g, true)), None);
    let (u, g) = (hand.vector(10, false), hand.vector(14, false));
    hand.site((1, 2), Some(u), Some((g, true)), None);
    let (u, g, bias) = (hand.vector(14, true), hand.vector(10, true), hand.bias(10));
    hand.site((1, 3), Some(u), Some((g, true)), Some(bias));
    hand.case("every part", dropout)
}

/// No delta, and nothing in the lowest layer.
fn vectors_alone() -> Case {
    let mut hand = ByHand::default();
    let (u, g, bias) = (hand.vector(10, true), hand.vector(30, true), hand.bias(30));
    hand.site((1, 0), Some(u), Some((g, false)), Some(bias));
    let (u, g) = (hand.vector(14, true), hand.vector(10, true));
    hand.site((1, 3), Some(u), Some((g, false)), None);
    hand.case("vectors alone", 0.0)
}

/// One part at one site, so that no other hides that memory for it is missing.
fn one_part(index: usize) -> Case {
    let mut hand = ByHand::default();
    let site = index / 4;
    let (inputs, outputs) = [(10, 30), (10, 10), (10, 14), (14, 10)][site];
    match index % 4 {
        0 => {
            let u = hand.vector(inputs, true);
            hand.site((0, site), Some(u), None, None);
        }
        1 => {
            let g = hand.vector(outputs, true);
            hand.site((1, site), None, Some((g, true)), None);
        }
        2 => {
            let bias = hand.bias(outputs);
            hand.site((0, site), None, None, Some(bias));
        }
        _ => {
            let (a, b, d) = (hand.a(inputs, false), hand.b(outputs, false), hand.vector(3, true));
            hand.delta((0, site), 0, (a, b)).d = Some(d);
        }
    }
    hand.case("one part", 0.0)
}

#[test]
fn autograd_agrees_on_every_part_of_a_site() {
    let base = base();
    let mut worst = autograd::Worst::new();
    for case in [everything(0.0), everything(0.2), vectors_alone()] {
        for recompute in RECOMPUTE {
            autograd::check(&base.base, &case, 0.1, recompute, &mut worst);
        }
    }
    autograd::report(&worst, "with every part of a site");
}

#[test]
fn autograd_agrees_on_each_part_at_each_site() {
    let base = base();
    let mut worst = autograd::Worst::new();
    for index in 0..16 {
        for recompute in [Recompute::None, Recompute::All] {
            autograd::check(&base.base, &one_part(index), 0.0, recompute, &mut worst);
        }
    }
    autograd::report(&worst, "with one part of a site");
}

#[test]
fn recompute_changes_no_bit_of_any_part() {
    let base = base();
    let mut cases = vec![everything(0.0), everything(0.2), vectors_alone()];
    cases.extend((0..16).map(one_part));
    for case in &cases {
        let found = RECOMPUTE.map(|recompute| {
            let options = options(Policy { recompute, ..Policy::default() });
            let mut trainer = policies::trainer(&base.base, case, options);
            let losses = trainer.accumulate(&[batch(&policies::rows())]).unwrap();
            let gradient = bits(&trainer.gradient());
            let loss = trainer.evaluate(&mut [batch(&policies::rows())].into_iter()).unwrap().loss;
            (losses.sum.to_bits(), gradient, loss.to_bits())
        });
        assert!(found.iter().all(|other| *other == found[0]), "{}", case.name);
    }
}

#[test]
fn memory_is_planned_for_the_parts_that_are_there() {
    let base = base();
    let names = |case: &Case, recompute| {
        let options = options(Policy { recompute, ..Policy::default() });
        let rows = Trainer::plan(&base.base.config, &case.set, options).unwrap();
        let mut names: Vec<String> = rows
            .iter()
            .filter(|row| row.name == "scaled" || row.name.contains("product"))
            .map(|row| format!("{} {:?}", row.name, row.shape))
            .collect();
        names.sort();
        names
    };
    let none: [&str; 0] = [];
    let mut plain = ByHand::default();
    let (a, b) = (plain.a(10, true), plain.b(30, true));
    plain.delta((1, 0), 0, (a, b));
    assert_eq!(names(&plain.case("plain", 0.0), Recompute::None), none);
    let kept = ["block 1 product c_attn [44, 30]", "block 1 product mlp.c_proj [44, 10]", "scaled [44, 30]"];
    let shared = [
        "scaled [44, 30]",
        "shared block product c_attn [44, 30]",
        "shared block product mlp.c_proj [44, 10]",
    ];
    assert_eq!(names(&vectors_alone(), Recompute::All), shared);
    let found = names(&vectors_alone(), Recompute::None);
    assert!(kept.iter().all(|name| found.iter().any(|found| found == name)), "{found:?}");
}

/// The loss of every token but the first of `ids`, by the forward of training.
fn loss_in_training(base: &Arc<Base>, case: &Case, ids: &[u32]) -> f64 {
    let of = predicting_next(ids);
    let limits = Limits { rows: 1, tokens: ids.len() };
    let policy = Policy::default();
    let mut arenas = Arenas::real(None);
    let mut stack =
        Stack::new(Arc::clone(base), bindings(base, case), limits, policy, false, &mut arenas).unwrap();
    let store = Buffer::from_slice(&case.values).unwrap();
    stack.loss(Trained { values: store.view(), prefix: None }, &batch(&[of])).unwrap().sum
}

#[test]
fn generation_has_every_part() {
    let base = base();
    let ids = row(4, 13, 0, SIZES.vocab).ids;
    let mut cases = vec![everything(0.0), vectors_alone()];
    cases.extend((0..16).map(one_part));
    let mut worst = 0f64;
    for case in &cases {
        let mut decoder = decoder(&base.base, case, 1, SIZES.positions);
        let sum = loss_token_by_token(&mut decoder, &ids);
        let expected = loss_in_training(&base.base, case, &ids);
        worst = worst.max((sum / expected - 1.0).abs());
    }
    within(worst, LOSS, "losses token by token, with every part of a site");
}

/// Rows of one pass with other adapters each have the logits that they have alone.
#[test]
fn rows_with_different_parts_are_read_together() {
    let base = base();
    let (first, second) = (everything(0.0), vectors_alone());
    let ids = row(6, 9, 0, SIZES.vocab).ids;
    let mut together = decoder(&base.base, &first, 3, SIZES.positions);
    let other = together.add_adapter(bindings(&base.base, &second), second.values.clone()).unwrap();
    let none = together.add_adapter(AdapterBindings::none(2), Vec::new()).unwrap();
    together.assign(1, other).unwrap();
    together.assign(2, none).unwrap();
    let tokens: Vec<RowTokens> = (0..3).map(|row| RowTokens { row, ids: &ids[row..] }).collect();
    let mut found = together.feed_rows(&tokens).unwrap().to_vec();
    found.extend(together.feed_each(&[1, 2, 3]).unwrap());

    let bare = Decoder::new(Arc::clone(&base.base), AdapterBindings::none(2), Vec::new(), 1, SIZES.positions);
    let alone = [
        decoder(&base.base, &first, 1, SIZES.positions),
        decoder(&base.base, &second, 1, SIZES.positions),
        bare.unwrap(),
    ];
    let (mut read, mut next) = (Vec::new(), Vec::new());
    for (row, mut decoder) in alone.into_iter().enumerate() {
        read.extend(wide(decoder.feed(&ids[row..]).unwrap()));
        next.extend(wide(decoder.feed(&[row as u32 + 1]).unwrap()));
    }
    read.extend(next);
    let worst = found
        .chunks(SIZES.vocab)
        .zip(read.chunks(SIZES.vocab))
        .map(|(found, expected)| difference(found, expected))
        .fold(0.0, f64::max);
    within(worst, LOGITS, "rows with different parts of sites");
    assert!(difference(&found[..SIZES.vocab], &read[2 * SIZES.vocab..3 * SIZES.vocab]) > 1e-2);
}
