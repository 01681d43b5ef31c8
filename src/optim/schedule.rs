//! The learning rate of each step.

use std::f64::consts::PI;

/// Learning-rate decay after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// Stays the same.
    Constant,
    /// Falls linearly to zero.
    Linear,
    /// Falls to zero along half a cosine.
    Cosine,
}

/// The learning rate of the optimizer step that follows `step` finished ones.
///
/// As `get_{constant,linear,cosine}_schedule_with_warmup` of Transformers: during warm-up
/// `lr * step / warmup`, so that the very first step has rate 0; then `lr`, `lr * (1 - p)` or
/// `lr * (1 + cos(pi p)) / 2` with `p = (step - warmup) / (steps - warmup)`.
pub fn rate(schedule: Schedule, lr: f64, warmup: u64, steps: u64, step: u64) -> f64 {
    if step < warmup {
        return lr * step as f64 / warmup.max(1) as f64;
    }
    let progress = (step - warmup) as f64 / steps.saturating_sub(warmup).max(1) as f64;
    lr * match schedule {
        Schedule::Constant => 1.0,
        Schedule::Linear => (1.0 - progress).max(0.0),
        Schedule::Cosine => (0.5 * (1.0 + (PI * progress).cos())).max(0.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by Transformers 5.23 for lr 1, 2 warm-up steps, 6 steps in all.
    #[test]
    fn follows_transformers() {
        let rates = |schedule| (0..6).map(|step| rate(schedule, 1.0, 2, 6, step)).collect::<Vec<_>>();
        assert_eq!(rates(Schedule::Constant), [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(rates(Schedule::Linear), [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]);
        let cosine = [0.0, 0.5, 1.0, 0.853_553_390_593_273_7, 0.5, 0.146_446_609_406_726_27];
        for (ours, theirs) in rates(Schedule::Cosine).into_iter().zip(cosine) {
            assert!((ours - theirs).abs() < 1e-15, "{ours} {theirs}");
        }
    }

    #[test]
    fn never_leaves_its_range() {
        for schedule in [Schedule::Constant, Schedule::Linear, Schedule::Cosine] {
            assert_eq!(rate(schedule, 2.0, 0, 1, 0), 2.0);
            assert!((0.0..=2.0).contains(&rate(schedule, 2.0, 5, 3, 9)));
        }
    }
}
