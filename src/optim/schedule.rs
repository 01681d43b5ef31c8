//! The learning rate of each step.

use std::f64::consts::PI;

/// Learning rate after warm-up. Formulas and names are those of Transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decay {
    /// Stays the same.
    Constant,
    /// Falls linearly until the last step.
    Linear,
    /// Falls along half a cosine.
    Cosine,
    /// Falls along half a cosine so many times, from the top again each time.
    CosineWithRestarts(u32),
    /// Falls with one over the square root of the steps.
    InverseSqrt,
}

/// The learning rate over the steps of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// The highest rate, that after warm-up.
    pub lr: f64,
    /// The lowest rate after warm-up; 0 where the formulas of Transformers end in 0.
    pub min_lr: f64,
    /// How the rate falls.
    pub decay: Decay,
}

/// Steps over which [`Decay::InverseSqrt`] falls to 1 / sqrt(2) without warm-up.
const TIMESCALE: f64 = 10_000.0;

impl Schedule {
    /// The rate of the optimizer step that follows `step` finished ones, of `steps` in all, after `warmup` steps of
    /// warm-up, during which it is `lr * step / warmup`, so that the very first step has rate 0.
    ///
    /// Then with `p = (step - warmup) / (steps - warmup)` it is `min + (lr - min) f`, where f is 1 - p (linear),
    /// (1 + cos(pi p)) / 2 (cosine) or (1 + cos(pi (n p mod 1))) / 2 (n restarts), as
    /// `get_{constant,linear,cosine,cosine_with_hard_restarts}_schedule_with_warmup` and `cosine_with_min_lr`; or
    /// `max(min, lr sqrt(w / (step - warmup + w)))` with w the warm-up steps, or 10,000 without, as
    /// `get_inverse_sqrt_schedule`.
    pub fn rate(self, warmup: u64, steps: u64, step: u64) -> f64 {
        let Self { lr, min_lr, decay } = self;
        if step < warmup {
            return lr * step as f64 / warmup.max(1) as f64;
        }
        let after = (step - warmup) as f64;
        let p = after / steps.saturating_sub(warmup).max(1) as f64;
        let factor = match decay {
            Decay::Constant => return lr,
            Decay::InverseSqrt => {
                let timescale = if warmup > 0 { warmup as f64 } else { TIMESCALE };
                return (lr / ((after + timescale) / timescale).sqrt()).max(min_lr);
            }
            Decay::Linear => 1.0 - p,
            Decay::Cosine => half_cosine(p),
            Decay::CosineWithRestarts(_) if p >= 1.0 => 0.0,
            Decay::CosineWithRestarts(cycles) => half_cosine((f64::from(cycles) * p).fract()),
        };
        min_lr + (lr - min_lr) * factor.max(0.0)
    }

    /// Whether rates depend on the number of steps of the run.
    pub fn depends_on_length(self) -> bool {
        !matches!(self.decay, Decay::Constant | Decay::InverseSqrt)
    }
}

fn half_cosine(p: f64) -> f64 {
    0.5 * (1.0 + (PI * p).cos())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(decay: Decay, min_lr: f64) -> Vec<f64> {
        let schedule = Schedule { lr: 1.0, min_lr, decay };
        (0..6).map(|step| schedule.rate(2, 6, step)).collect()
    }

    #[track_caller]
    fn close(ours: Vec<f64>, theirs: &[f64]) {
        assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in ours.into_iter().zip(theirs) {
            assert!((ours - theirs).abs() < 1e-15, "{ours} {theirs}");
        }
    }

    /// Printed by Transformers 5.23 for lr 1, 2 warm-up steps, 6 steps in all.
    #[test]
    fn follows_transformers() {
        assert_eq!(rates(Decay::Constant, 0.0), [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(rates(Decay::Linear, 0.0), [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]);
        let cosine = [0.0, 0.5, 1.0, 0.853_553_390_593_273_7, 0.5, 0.146_446_609_406_726_27];
        close(rates(Decay::Cosine, 0.0), &cosine);
        let inverse =
            [0.0, 0.5, 1.0, 0.816_496_580_927_726_1, 0.707_106_781_186_547_5, 0.632_455_532_033_675_9];
        close(rates(Decay::InverseSqrt, 0.0), &inverse);
        // cosine_with_min_lr, and a polynomial of power 1 with lr_end.
        let cosine = [0.0, 0.5, 1.0, 0.868_198_051_533_946_4, 0.55, 0.231_801_948_466_053_65];
        close(rates(Decay::Cosine, 0.1), &cosine);
        close(rates(Decay::Linear, 0.1), &[0.0, 0.5, 1.0, 0.775, 0.55, 0.325]);
        let restarts = Schedule { lr: 1.0, min_lr: 0.0, decay: Decay::CosineWithRestarts(3) };
        let theirs = [
            0.0,
            0.5,
            1.0,
            0.691_341_716_182_544_9,
            0.146_446_609_406_726_27,
            0.961_939_766_255_643_4,
            0.5,
            0.038_060_233_744_356_63,
            0.853_553_390_593_273_7,
            0.308_658_283_817_455_14,
        ];
        close((0..10).map(|step| restarts.rate(2, 10, step)).collect(), &theirs);
        let alone = Schedule { decay: Decay::InverseSqrt, ..restarts };
        let theirs = [1.0, 0.999_950_003_749_687_7, 0.999_900_014_997_500_6, 0.999_850_033_741_564_8];
        close((0..4).map(|step| alone.rate(0, 4, step)).collect(), &theirs);
    }

    #[test]
    fn never_leaves_its_range() {
        let decays =
            [Decay::Constant, Decay::Linear, Decay::Cosine, Decay::CosineWithRestarts(3), Decay::InverseSqrt];
        for decay in decays {
            let schedule = Schedule { lr: 2.0, min_lr: 0.5, decay };
            assert_eq!(schedule.rate(0, 1, 0), 2.0);
            assert!((0.5..=2.0).contains(&schedule.rate(5, 3, 9)), "{decay:?}");
            assert!(
                (0..2000).all(|step| (0.5..=2.0).contains(&schedule.rate(0, 100, 100 * step))),
                "{decay:?}"
            );
        }
    }
}
