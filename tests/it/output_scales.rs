//! Output scales over the norms of columns (DoRA), in sets made by hand: gradients against autograd with norms held,
//! everything that may change no bit, saves, plans, evaluation and generation.

use std::sync::{Arc, Mutex};

use engraft::{
    device::arena::Placement,
    engine::{BeforeUpdate, Evaluator, PendingUpdate, Trainer},
    error::Result,
    model::{Base, Limits, Policy, Recompute, RowTokens},
};

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

/// Sites of a layer by their numbers: c_attn 10 to 30, attn.c_proj 10 to 10, c_fc 10 to 14, mlp.c_proj 14 to 10. The lowest
/// layer has nothing.
fn everywhere(dropout: f64) -> Case {
    let mut hand = ByHand::default();
    // Two deltas on parts of the columns, which overlap, one with d and e; some columns have the norm of W.
    let (a, b, d, e) = (hand.a(10, true), hand.b(12, true), hand.vector(3, true), hand.vector(12, true));
    let delta = hand.delta((1, 0), 2, (a, b));
    (delta.d, delta.e) = (Some(d), Some(e));
    let (a, b) = (hand.a(10, true), hand.b(9, true));
    hand.delta((1, 0), 8, (a, b));
    let m = hand.vector(30, true);
    hand.site_over_norms((1, 0), None, (m, false), None);
    // The vector of W alone, with a trained bias inside.
    let (m, bias) = (hand.vector(10, true), hand.bias(10));
    hand.site_over_norms((1, 1), None, (m, true), Some(bias));
    // A frozen m over norms that follow from trained factors, and a u.
    let (a, b, m, u) = (hand.a(10, true), hand.b(14, true), hand.vector(14, false), hand.vector(10, true));
    hand.delta((1, 2), 0, (a, b));
    hand.site_over_norms((1, 2), Some(u), (m, false), None);
    // Frozen factors, and an m that another site shares.
    let (a, b, m) = (hand.a(14, false), hand.b(10, false), hand.vector(10, true));
    hand.delta((1, 3), 0, (a, b));
    hand.site_over_norms((1, 3), None, (m, false), None);
    let (a, b) = (hand.a(10, true), hand.b(10, true));
    hand.delta((2, 1), 0, (a, b));
    hand.site_over_norms((2, 1), None, (m, true), None);
    // A g that is a vector, and one that is derived, in one layer.
    let g = hand.vector(14, true);
    hand.site((2, 2), None, Some((g, false)), None);
    hand.case("output scales over norms", dropout)
}

/// A LoRA with a derived scale at one site.
fn one_site(site: usize) -> Case {
    let mut hand = ByHand::default();
    let (inputs, outputs) = [(10, 30), (10, 10), (10, 14), (14, 10)][site];
    let (a, b, m) = (hand.a(inputs, true), hand.b(outputs, true), hand.vector(outputs, true));
    hand.delta((1, site), 0, (a, b));
    hand.site_over_norms((1, site), None, (m, false), None);
    hand.case("one output scale over norms", 0.0)
}

/// All deltas of [`everywhere`], and no other part.
fn deltas_alone() -> Case {
    let case = everywhere(0.0);
    Case { set: engraft_adapters::AdapterSet { vectors: Vec::new(), ..case.set }, ..case }
}

#[test]
fn autograd_agrees_with_norms_held() {
    let base = base();
    let mut worst = autograd::Worst::new();
    for case in [everywhere(0.0), everywhere(0.2), one_site(0), one_site(1), one_site(2), one_site(3)] {
        for recompute in [Recompute::None, Recompute::All] {
            autograd::check(&base.base, &case, 0.1, recompute, &mut worst);
        }
    }
    autograd::report(&worst, "with output scales over norms");
}

#[test]
fn recompute_streaming_and_offloading_change_no_bit() {
    let base = base();
    let cases = [everywhere(0.0), everywhere(0.2), one_site(0), one_site(3)];
    for case in cases {
        let plain = run(&base.base, &case, Policy::default());
        let all = Policy { recompute: Recompute::All, ..Policy::default() };
        let mlp = Policy { recompute: Recompute::Mlp, ..Policy::default() };
        let linear = Policy { recompute: Recompute::Linear, stream: true, ..Policy::default() };
        let stream = Policy { stream: true, ..Policy::default() };
        let files = Policy { stream: true, inputs: Placement::Disk, moments: Placement::Disk, ..all };
        for policy in [all, mlp, linear, stream, files] {
            assert!(run(&base.base, &case, policy) == plain, "{} under {policy:?}", case.name);
        }
        let streamed = Base::clone(&base.base).streamed_on(base.base.device, base.base.activations).unwrap();
        assert!(
            run(&Arc::new(streamed), &case, Policy::default()) == plain,
            "{}, a streamed base",
            case.name
        );
    }
}

#[test]
fn micro_batches_change_rounding_alone() {
    micro_batches_round_otherwise(&base().base, &everywhere(0.2));
}

#[test]
fn autograd_agrees_on_a_base_in_8_bits() {
    agrees_with_autograd_in_8_bits(&everywhere(0.0));
}

/// What a step changes is in the scales of the evaluation after it: that of an evaluator which derives them anew.
#[test]
fn scales_follow_every_step() {
    let (base, case) = (base(), everywhere(0.0));
    let mut trainer = trainer(&base.base, &case, Policy::default());
    let batches = [batch(&policies::rows())];
    let limits = Limits { rows: 4, tokens: policies::SEQ_LEN };
    let mut losses = Vec::new();
    for _ in 0..3 {
        let values = trainer.values().to_vec();
        assert_eq!(values.len(), case.set.layout.len);
        let adapter = Some((&case.set, &values[..]));
        let rows = Policy::default().head_rows;
        let mut evaluator = Evaluator::new(Arc::clone(&base.base), adapter, limits, rows).unwrap();
        let expected = evaluator.evaluate(&mut batches.iter().cloned()).unwrap();
        assert_eq!(trainer.evaluate(&mut batches.iter().cloned()).unwrap(), expected);
        losses.push(expected.loss);
        trainer.step(&batches, 3e-2).unwrap();
    }
    assert!(losses[1] < losses[0] && losses[2] < losses[1], "{losses:?}");
}

#[test]
fn it_resumes_to_the_same_bits() {
    let (base, case) = (base(), everywhere(0.2));
    let batches = cut(&policies::rows(), 2);
    let mut whole = trainer(&base.base, &case, Policy::default());
    for _ in 0..2 {
        whole.step(&batches, 1e-2).unwrap();
    }
    let saved = state(&whole);
    let before = whole.step(&batches, 1e-2).unwrap();
    let mut resumed = trainer(&base.base, &case, Policy::default());
    // Scales of the first values have been used.
    resumed.accumulate(&batches).unwrap();
    restore(&mut resumed, &saved).unwrap();
    assert_eq!(resumed.step(&batches, 1e-2).unwrap(), before);
    assert_eq!(state(&resumed), state(&whole));
}

/// A hook, a save and the norm of the gradient know the trained values alone.
#[test]
fn what_is_derived_is_nobody_elses() {
    struct Seen(Arc<Mutex<Vec<f32>>>);
    impl BeforeUpdate for Seen {
        fn before_update(&mut self, update: PendingUpdate) -> Result<()> {
            assert_eq!(update.values.len(), update.layout.len);
            self.0.lock().unwrap().extend_from_slice(update.gradient.host());
            Ok(())
        }
    }
    let (base, case) = (base(), one_site(0));
    let mut trainer = trainer(&base.base, &case, Policy::default());
    let seen = Arc::new(Mutex::new(Vec::new()));
    trainer.add_hook(Box::new(Seen(Arc::clone(&seen))));
    let report = trainer.step(&[batch(&policies::rows())], 1e-2).unwrap();
    let len = case.set.layout.len;
    let gradient = seen.lock().unwrap().clone();
    assert_eq!((gradient.len(), trainer.gradient().len()), (len, len));
    assert_eq!(trainer.tensors()[0].1.len(), len);
    let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    assert!((report.grad_norm / norm - 1.0).abs() < 1e-6, "{} against {norm}", report.grad_norm);
}

#[test]
fn memory_is_planned_and_nothing_without() {
    let base = base();
    let named = |case: &Case| {
        let options = options(Policy::default());
        let plan = Trainer::plan(&base.base.config, &case.set, options).unwrap();
        assert_eq!(trainer(&base.base, case, Policy::default()).memory(), plan);
        let rows = plan.into_iter().filter(|row| row.role == "trainables");
        rows.map(|row| format!("{} {:?}", row.name, row.shape)).collect::<Vec<_>>()
    };
    let (case, len) = (one_site(0), one_site(0).set.layout.len);
    let store = len + 30;
    let expected =
        [format!("values [{store}]"), format!("gradient [{store}]"), "norms of columns [30]".into()];
    assert_eq!(named(&case), expected);
    let case = deltas_alone();
    let len = case.set.layout.len;
    assert_eq!(named(&case), [format!("values [{len}]"), format!("gradient [{len}]")]);
}

/// The loss of every token but the first of `ids`, by an evaluation.
fn evaluated(base: &Arc<Base>, case: &Case, ids: &[u32]) -> f64 {
    let of = predicting_next(ids);
    let limits = Limits { rows: 1, tokens: ids.len() };
    let adapter = Some((&case.set, &case.values[..]));
    let mut evaluator = Evaluator::new(Arc::clone(base), adapter, limits, 64).unwrap();
    evaluator.evaluate(&mut [batch(&[of])].into_iter()).unwrap().loss * (ids.len() - 1) as f64
}

#[test]
fn generation_has_the_scales_of_training() {
    let base = base();
    let ids = row(4, 13, 0, SIZES.vocab).ids;
    let mut worst = 0f64;
    for case in [everywhere(0.0), one_site(0), one_site(1), one_site(2), one_site(3)] {
        let mut decoder = decoder(&base.base, &case, 1, SIZES.positions);
        let sum = loss_token_by_token(&mut decoder, &ids);
        let expected = evaluated(&base.base, &case, &ids);
        worst = worst.max((sum / expected - 1.0).abs());
    }
    within(worst, LOSS, "losses token by token, with output scales over norms");
}

/// Of one pass, also of a streamed base: each row has its own scales.
#[test]
fn rows_with_different_scales_are_read_together() {
    let base = base();
    let streamed = Base::clone(&base.base).streamed_on(base.base.device, base.base.activations).unwrap();
    let (first, second, third) = (everywhere(0.0), one_site(0), deltas_alone());
    let ids = row(6, 9, 0, SIZES.vocab).ids;
    let mut alone: Vec<Vec<f64>> = Vec::new();
    for (row, case) in [&first, &second, &third].into_iter().enumerate() {
        alone.push(wide(decoder(&base.base, case, 1, SIZES.positions).feed(&ids[row..]).unwrap()));
    }
    for base in [Arc::clone(&base.base), Arc::new(streamed)] {
        let mut together = decoder(&base, &first, 3, SIZES.positions);
        for (row, case) in [(1, &second), (2, &third)] {
            let adapter = together.add_adapter(bindings(&base, case), case.values.clone()).unwrap();
            together.assign(row, adapter).unwrap();
        }
        let tokens: Vec<RowTokens> = (0..3).map(|row| RowTokens { row, ids: &ids[row..] }).collect();
        let found = together.feed_rows(&tokens).unwrap();
        let pairs = found.chunks(SIZES.vocab).zip(&alone);
        let worst = pairs.map(|(found, alone)| difference(found, alone)).fold(0.0, f64::max);
        within(worst, LOGITS, "rows with different output scales");
        assert!(difference(&found[..SIZES.vocab], &alone[2]) > 1e-2);
    }
}
