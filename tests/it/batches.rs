//! However rows are cut into micro-batches, packed, or supervised in parts, the step is the same up to rounding.

use engraft::{
    data::{Batch, NO_LOSS, Row},
    engine::TrainerOptions,
    model::Policy,
};

use crate::{
    policies::{LOSS, VOCAB, cut, options, rows, trainer},
    setup::{batch, by_tensor, cases, difference, golden, pack, row, state, wide, within},
};

/// Bounds of docs/NUMERICS.md as in `policies`.
const MICRO_BATCHES: f64 = 5e-6;
const PACKING: f64 = 5e-6;

/// Rows are numbered within the step, so the masks are the same too; padding changes with the cut.
#[test]
fn micro_batches_are_the_big_batch() {
    let base = golden("tiny");
    for dropout in [0.0, 0.2] {
        let mut worst = 0f64;
        for case in cases(&base, dropout) {
            let with = |size| {
                let mut trainer = trainer(&base, &case, options(Policy::default()));
                let losses = trainer.accumulate(&cut(&rows(), size)).unwrap();
                assert_eq!(losses.tokens, 16);
                (losses.sum, trainer.gradient())
            };
            let whole = with(4);
            for size in [2, 1] {
                let parts = with(size);
                within((parts.0 / whole.0 - 1.0).abs(), LOSS, "loss of micro-batches");
                worst = worst.max(by_tensor(&case.set, &parts.1, &wide(&whole.1)));
            }
        }
        within(worst, MICRO_BATCHES, &format!("gradients of 4 x 1 and 2 x 2 rows, dropout {dropout}"));
    }
}

/// The last block computes supervised tokens alone where they are few: parts of the targets are together the whole, whose
/// pass computes all tokens.
#[test]
fn losses_and_gradients_of_parts_of_the_targets_add_up() {
    let base = golden("tiny");
    let all =
        [1, 2].map(|seed| Row { targets: (0..11).map(|i| i * 17 % 61).collect(), ..row(seed, 11, 0, VOCAB) });
    let part = |wanted: fn(usize) -> bool| {
        let mut rows = all.clone();
        let targets = rows.iter_mut().flat_map(|row| row.targets.iter_mut()).enumerate();
        targets.filter(|(at, _)| !wanted(*at)).for_each(|(_, target)| *target = NO_LOSS);
        batch(&rows)
    };
    let parts = [
        part(|at| at % 3 == 0),
        part(|at| at % 3 == 1 && at > 4),
        part(|at| at % 3 == 2 || at == 1 || at == 4),
    ];
    let (n, whole) = (2 * 11, batch(&all));
    assert!(whole.supervised() * 8 > n * 7 && parts.iter().all(|part| part.supervised() * 8 <= n * 7));
    for dropout in [0.0, 0.2] {
        let mut worst = 0f64;
        for case in cases(&base, dropout) {
            // Sums, not means, of losses.
            let with = |batch: &Batch| {
                let mut trainer = trainer(&base, &case, options(Policy::default()));
                let losses = trainer.accumulate(std::slice::from_ref(batch)).unwrap();
                let gradient = trainer.gradient().into_iter().map(|g| f64::from(g) * losses.tokens as f64);
                (losses, gradient.collect::<Vec<f64>>())
            };
            let (losses, gradient) = with(&whole);
            let (mut sum, mut tokens, mut total) = (0f64, 0, vec![0f64; gradient.len()]);
            for part in &parts {
                let (losses, gradient) = with(part);
                sum += losses.sum;
                tokens += losses.tokens;
                total.iter_mut().zip(gradient).for_each(|(total, g)| *total += g);
            }
            assert_eq!(tokens, losses.tokens);
            within((sum / losses.sum - 1.0).abs(), LOSS, "loss of parts of the targets");
            let total: Vec<f32> = total.into_iter().map(|g| g as f32).collect();
            worst = worst.max(by_tensor(&case.set, &total, &gradient));
        }
        within(worst, MICRO_BATCHES, &format!("gradients of parts of the targets, dropout {dropout}"));
    }
}

#[test]
fn packed_documents_are_rows_of_their_own() {
    let base = golden("tiny");
    let apart = vec![row(1, 4, 1, VOCAB), row(2, 3, 0, VOCAB), row(3, 6, 2, VOCAB), row(4, 5, 0, VOCAB)];
    let packed = vec![pack(&apart[..3]), pack(&apart[3..])];
    let options = TrainerOptions { seq_len: 13, ..options(Policy::default()) };
    let mut worst = 0f64;
    for case in cases(&base, 0.0) {
        let with = |rows: &[Row]| {
            let mut trainer = trainer(&base, &case, options);
            let losses = trainer.accumulate(&[batch(rows)]).unwrap();
            (losses, trainer.gradient())
        };
        let (alone, together) = (with(&apart), with(&packed));
        assert_eq!(alone.0.tokens, together.0.tokens);
        within((together.0.sum / alone.0.sum - 1.0).abs(), LOSS, "loss of packed rows");
        worst = worst.max(by_tensor(&case.set, &together.1, &wide(&alone.1)));

        // A row that forgets where its documents start is another row.
        let mut leaking = packed.clone();
        leaking[0].starts.fill(0);
        assert!(by_tensor(&case.set, &with(&leaking).1, &wide(&alone.1)) > 1e-2, "{}", case.name);
    }
    within(worst, PACKING, "gradients of packed rows");
}

/// Clipping scales the whole gradient: the reported norm is that before clipping, and Adam's first moment
/// shows the clipped gradient.
#[test]
fn clipping_is_by_the_norm_of_all_micro_batches() {
    let base = golden("tiny");
    let case = &cases(&base, 0.0)[0];
    let clip = 1e-3;
    let mut clipped = trainer(&base, case, TrainerOptions { clip, ..options(Policy::default()) });
    let report = clipped.step(&cut(&rows(), 1), 1e-2).unwrap();
    let gradient = wide(&clipped.gradient());
    let norm = gradient.iter().map(|x| x * x).sum::<f64>().sqrt();
    within((report.grad_norm / norm - 1.0).abs(), LOSS, "norm of the gradient");
    assert!(norm > clip, "{norm} needs no clipping");
    let expected: Vec<f64> = gradient.iter().map(|x| 0.1 * x * clip / (norm + 1e-6)).collect();
    within(difference(&state(&clipped).first_moment(), &expected), LOSS, "clipped gradient");
}
