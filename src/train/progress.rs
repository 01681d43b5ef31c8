//! What a run knows about its course: its losses, its best evaluation, and whether to stop before its last step.
//!
//! Saves contain it, so that a resumed run stops where an undisturbed one does. Losses are compared as FP32: their
//! text in a save gives the same number again.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// The course of a run up to a step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Loss of the last step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<f32>,
    /// Loss that the run began with: of the evaluation before the first step or of that step, whichever is higher;
    /// without held-out rows the mean of the first steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<f32>,
    /// The evaluation after the first step with the lowest loss, the first of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<BestEvaluation>,
    /// Steps done at the last evaluation after the first step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluated: Option<u64>,
    /// Evaluations in a row since the best one.
    #[serde(default)]
    pub waited: u64,
    /// Losses of the last steps.
    #[serde(skip)]
    recent: VecDeque<f64>,
}

/// The evaluation with the lowest loss so far.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BestEvaluation {
    /// Number of steps done.
    pub step: u64,
    /// Mean loss over the supervised tokens of the held-out rows.
    pub loss: f32,
}

/// Steps whose mean loss says whether a run diverges.
const STEPS: usize = 20;
/// A run whose mean loss is this much above its start, in nats a token ..
const ABOVE: f64 = 1.5;
/// .. and this many times its start has diverged.
const TIMES: f64 = 1.3;

impl Progress {
    /// Takes the loss of an evaluation after `step` steps; returns whether it is the lowest so far. What is
    /// evaluated before the first step is no result of training, so it is never the best.
    pub fn evaluated(&mut self, step: u64, loss: f64) -> bool {
        let loss = loss as f32;
        if step == 0 {
            self.start = Some(loss);
            return false;
        }
        self.evaluated = Some(step);
        if self.best.is_some_and(|best| loss >= best.loss) {
            self.waited += 1;
            return false;
        }
        self.best = Some(BestEvaluation { step, loss });
        self.waited = 0;
        true
    }

    /// Takes the loss of the step that was just done; returns the mean of the last steps if it shows that the run
    /// diverges. A few bad batches show nothing.
    pub fn step(&mut self, loss: f64) -> Option<f64> {
        if let (None, Some(start)) = (self.loss, &mut self.start) {
            // Training rows may be harder than held-out ones.
            *start = start.max(loss as f32);
        }
        self.loss = Some(loss as f32);
        self.recent.push_back(loss);
        if self.recent.len() > STEPS {
            self.recent.pop_front();
        }
        if self.recent.len() < STEPS {
            return None;
        }
        let mean = self.recent.iter().sum::<f64>() / STEPS as f64;
        let start = f64::from(*self.start.get_or_insert(mean as f32));
        (mean > start + ABOVE && mean > start * TIMES).then_some(mean)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_loss_is_the_best_and_others_are_waited_for() {
        let mut progress = Progress::default();
        assert!(!progress.evaluated(0, 1.0), "before training nothing is best");
        let is_best: Vec<bool> = [(5, 3.0), (10, 2.0), (15, 2.0), (20, 2.5), (25, 1.9)]
            .into_iter()
            .map(|(step, loss)| progress.evaluated(step, loss))
            .collect();
        assert_eq!(is_best, [true, true, false, false, true]);
        assert_eq!(progress.best, Some(BestEvaluation { step: 25, loss: 1.9 }));
        progress.evaluated(30, 2.0);
        progress.evaluated(35, 2.0);
        assert_eq!((progress.waited, progress.evaluated), (2, Some(35)));
    }

    #[test]
    fn only_a_loss_that_stays_far_above_the_start_diverges() {
        let mut progress = Progress::default();
        progress.evaluated(0, 4.0);
        assert!((0..100).all(|step| progress.step(if step % 10 == 9 { 13.0 } else { 3.0 }).is_none()));
        let found: Vec<Option<f64>> = (0..STEPS).map(|_| progress.step(7.0)).collect();
        assert!(found[..5].iter().all(Option::is_none) && found[STEPS - 1] == Some(7.0), "{found:?}");
        let mut harder = Progress::default();
        harder.evaluated(0, 4.0);
        assert!((0..100).all(|_| harder.step(6.0).is_none()), "the rows of training are only harder");
        // Without an evaluation the first steps say where the run began.
        let mut alone = Progress::default();
        assert!((0..STEPS).all(|_| alone.step(1.0).is_none()));
        assert_eq!(alone.start, Some(1.0));
        assert!((0..STEPS).any(|_| alone.step(3.5).is_some()));
    }

    #[test]
    fn a_save_holds_it() {
        let mut progress = Progress::default();
        for (step, loss) in (1..).zip([1.0 / 3.0, 0.1 + 0.2, 0.1 + 0.2, 7.7]) {
            progress.evaluated(step, loss);
            let again: Progress = serde_json::from_str(&serde_json::to_string(&progress).unwrap()).unwrap();
            assert_eq!(again, progress);
        }
        assert_eq!(progress.waited, 2);
        assert_eq!(serde_json::from_str::<Progress>("{}").unwrap(), Progress::default());
    }
}
