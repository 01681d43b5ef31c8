//! The importance of values and triplets against its twin.

use super::*;
use crate::testing::{assert_close, numbers, widened, with_threads};

#[test]
fn means_are_those_of_the_twin_for_any_number_of_threads() {
    let len = 70_001;
    let by = Smoothing { betas: (0.85, 0.6), factor: 0.37 };
    let values = numbers(1, len);
    let run = |threads| {
        let (mut mean, mut uncertainty) = (vec![0f32; len], vec![0f32; len]);
        with_threads(threads, || {
            for step in 0..3 {
                let gradient = numbers(10 + step, len);
                let to = (mean.as_mut_slice().into(), uncertainty.as_mut_slice().into());
                smooth(values.as_slice().into(), gradient.as_slice().into(), to.0, to.1, by);
            }
        });
        (mean, uncertainty)
    };
    let found = run(1);
    assert!(found == run(3), "threads change bits");
    let (mut mean, mut uncertainty) = (vec![0f64; len], vec![0f64; len]);
    for step in 0..3 {
        let gradient = widened(&numbers(10 + step, len));
        reference::smooth(&widened(&values), &gradient, &mut mean, &mut uncertainty, by);
    }
    assert_close(&found.0, &mean, 1e-6, "means");
    assert_close(&found.1, &uncertainty, 1e-6, "uncertainties");
}

#[test]
fn scores_are_those_of_the_twin_and_what_is_not_kept_becomes_0() {
    let shape = |a, rank, inputs, outputs, first| {
        let b = a + rank * inputs;
        let d = b + rank * outputs;
        Triplets { a, b, d, rank, inputs, outputs, first }
    };
    let deltas = [shape(2, 3, 7, 11, 0), shape(90, 1, 5, 4, 3), shape(120, 5, 9, 2, 4)];
    let len = 200;
    let positive = |seed| numbers(seed, len).into_iter().map(f32::abs).collect::<Vec<f32>>();
    let (mean, uncertainty) = (positive(1), positive(2));
    let mut found = vec![f32::NAN; 9];
    scores(mean.as_slice().into(), uncertainty.as_slice().into(), &deltas, found.as_mut_slice().into());
    let twin = deltas.iter().flat_map(|&it| reference::scores(&widened(&mean), &widened(&uncertainty), it));
    assert_close(&found, &twin.collect::<Vec<f64>>(), 1e-6, "scores");

    let kept = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0f32];
    let before = numbers(3, len);
    let mut values = before.clone();
    keep(kept[..].into(), &deltas, values.as_mut_slice().into());
    let zeros = [deltas[0].d + 1, deltas[1].d, deltas[2].d + 2, deltas[2].d + 4];
    for at in 0..len {
        assert_eq!(values[at], if zeros.contains(&at) { 0.0 } else { before[at] }, "{at}");
    }
}
