//! Numbers of a run that span its steps: smoothed loss, time spent, time left, throughput.

use std::time::Instant;

/// Weight of the past in a smoothed value: about the mean of the last ten.
const BETA: f64 = 0.9;

/// An exponential moving average: `m = BETA m + (1 - BETA) x`, divided by `1 - BETA^n` after n values, so
/// that the first ones count in full (the bias correction of Kingma and Ba 2015, "Adam", section 3).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Smoothed {
    sum: f64,
    weight: f64,
}

impl Smoothed {
    /// Takes the next value and returns the average.
    pub fn add(&mut self, value: f64) -> f64 {
        self.sum = BETA * self.sum + (1.0 - BETA) * value;
        self.weight = BETA * self.weight + (1.0 - BETA);
        self.value()
    }

    /// The average; 0 before the first value.
    pub fn value(&self) -> f64 {
        if self.weight > 0.0 { self.sum / self.weight } else { 0.0 }
    }
}

/// What earlier processes of the same run leave behind.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct History {
    /// The smoothed loss after the step that the run goes on from.
    pub smoothed: Smoothed,
    /// Seconds that the run took up to there.
    pub elapsed: f64,
}

/// The clock and counters of this process's part of a run.
#[derive(Debug)]
pub(super) struct Pace {
    history: History,
    began: Instant,
    /// When the first step of this process began.
    stepping: Option<Instant>,
    /// Steps of this process.
    steps: u64,
    /// Input tokens of this process's steps, and the seconds of the steps alone.
    tokens: usize,
    seconds: f64,
    fastest: f64,
    /// Seconds of one step with all that is done between steps: smoothed, as a machine may get slower.
    each: Smoothed,
    last: Option<Instant>,
    /// Seconds of the latest evaluation: there is one at the end.
    evaluation: f64,
}

impl Pace {
    pub fn new(history: History) -> Self {
        Self {
            history,
            began: Instant::now(),
            stepping: None,
            steps: 0,
            tokens: 0,
            seconds: 0.0,
            fastest: 0.0,
            each: Smoothed::default(),
            last: None,
            evaluation: 0.0,
        }
    }

    /// Counts a step of `loss` over `tokens` input tokens that began at `started` and ends now; returns its seconds
    /// and the smoothed loss.
    pub fn step(&mut self, loss: f64, tokens: usize, started: Instant) -> (f64, f64) {
        let now = Instant::now();
        let seconds = now.duration_since(started).as_secs_f64();
        self.stepping.get_or_insert(started);
        self.each.add(now.duration_since(self.last.unwrap_or(started)).as_secs_f64());
        self.last = Some(now);
        self.steps += 1;
        self.tokens += tokens;
        self.seconds += seconds;
        self.fastest = self.fastest.max(per_second(tokens, seconds));
        (seconds, self.history.smoothed.add(loss))
    }

    /// Counts an evaluation.
    pub fn evaluated(&mut self, seconds: f64) {
        self.evaluation = seconds;
    }

    /// Seconds of the run so far, earlier processes included.
    pub fn elapsed(&self) -> f64 {
        self.history.elapsed + self.began.elapsed().as_secs_f64()
    }

    /// Estimated seconds until `left` steps are done and evaluated. The mean of all steps of this process, with
    /// their saves and evaluations, says most; the latest steps correct it where the machine became faster or slower.
    pub fn remaining(&self, left: u64) -> f64 {
        let Some(stepping) = self.stepping else { return 0.0 };
        let mean = stepping.elapsed().as_secs_f64() / self.steps.max(1) as f64;
        left as f64 * (mean + self.each.value()) / 2.0 + self.evaluation
    }

    /// Input tokens over the seconds of all steps of this process; 0 without one.
    pub fn tokens_per_s(&self) -> f64 {
        per_second(self.tokens, self.seconds)
    }

    /// Most input tokens per second of one step.
    pub fn fastest(&self) -> f64 {
        self.fastest
    }
}

/// `tokens` over `seconds`; 0 where no time passed.
pub(super) fn per_second(tokens: usize, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_average_is_the_weighted_mean_of_what_was_seen() {
        let values = [4.0, 2.0, 7.0, 1.0, 3.0];
        let mut smoothed = Smoothed::default();
        for seen in 1..=values.len() {
            let found = smoothed.add(values[seen - 1]);
            let weight = |index: usize| BETA.powi((seen - 1 - index) as i32);
            let total: f64 = (0..seen).map(weight).sum();
            let expected = (0..seen).map(|index| weight(index) * values[index]).sum::<f64>() / total;
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
        assert_eq!(Smoothed::default().add(5.0), 5.0);
    }

    #[test]
    fn time_left_follows_the_steps_and_the_last_evaluation() {
        let mut pace = Pace::new(History { elapsed: 100.0, ..History::default() });
        assert_eq!((pace.remaining(10), pace.tokens_per_s()), (0.0, 0.0));
        pace.evaluated(7.0);
        let now = Instant::now();
        // Two steps of two seconds, begun four seconds ago.
        pace.stepping = now.checked_sub(Duration::from_secs(4));
        pace.last = now.checked_sub(Duration::from_secs(2));
        pace.steps = 1;
        pace.each.add(2.0);
        let (seconds, _) = pace.step(1.0, 600, now.checked_sub(Duration::from_secs(2)).unwrap());
        assert!(
            (seconds - 2.0).abs() < 0.5 && (pace.remaining(10) - 27.0).abs() < 3.0,
            "{}",
            pace.remaining(10)
        );
        assert!((pace.tokens_per_s() - 300.0).abs() < 60.0 && pace.elapsed() >= 100.0);
    }
}
