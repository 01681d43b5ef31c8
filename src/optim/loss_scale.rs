//! The loss scale: FP16 gradients are computed a factor too large, so that small ones do not vanish.
//!
//! Dynamic scaling as in Micikevicius et al. 2018, "Mixed Precision Training", with the numbers of PyTorch's
//! `GradScaler`: it begins at 2^16, doubles after 2000 good steps in a row, and is halved when a gradient is not
//! finite. A step whose gradient was not finite is computed again from the same rows: no data is passed over,
//! and the count of steps stays that of updates.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

const START: f64 = 65536.0;
const GOOD_STEPS: u32 = 2000;

/// A loss scale and its history, as a save contains them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    scale: f64,
    good: u32,
    skipped: u64,
    #[serde(default = "yes")]
    dynamic: bool,
}

fn yes() -> bool {
    true
}

impl LossScale {
    /// No scale: gradients are computed as they are.
    pub const NONE: Self = Self { scale: 1.0, good: 0, skipped: 0, dynamic: false };

    /// The scale that a run in FP16 begins with.
    pub fn dynamic() -> Self {
        Self { scale: START, dynamic: true, ..Self::NONE }
    }

    /// Whether gradients are scaled.
    pub fn is_dynamic(self) -> bool {
        self.dynamic
    }

    /// Factor of losses before they are differentiated; 1 without a scale.
    pub fn factor(self) -> f64 {
        self.scale
    }

    /// Number of gradients so far that were not finite; each was computed again with a smaller scale.
    pub fn skipped(self) -> u64 {
        self.skipped
    }

    /// Counts an update; the scale doubles after 2000 of them in a row.
    pub fn succeeded(&mut self) {
        self.good += u32::from(self.dynamic);
        if self.good == GOOD_STEPS {
            self.good = 0;
            self.scale *= 2.0;
        }
    }

    /// Halves the scale after a gradient of step `step` whose `norm` is not finite; `remedy` ends the sentence
    /// where it cannot be halved.
    ///
    /// # Errors
    /// When there is no scale to lower.
    pub fn overflowed(&mut self, step: u64, norm: f64, remedy: &str) -> Result<()> {
        if !self.dynamic {
            return Err(Error::failed(format!(
                "the gradient of step {step} is not finite ({norm}); {remedy}"
            )));
        }
        self.skipped += 1;
        self.good = 0;
        self.scale /= 2.0;
        if self.scale < 1.0 {
            return Err(Error::failed(format!(
                "the gradient of step {step} overflows FP16 even with a loss scale of 1; give --precision bf16 or f32, or {remedy}"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_after_good_steps_and_falls_at_once() {
        let mut scale = LossScale::dynamic();
        (0..GOOD_STEPS - 1).for_each(|_| scale.succeeded());
        assert_eq!(scale.factor(), 65536.0);
        scale.succeeded();
        assert_eq!(scale.factor(), 131072.0);
        scale.overflowed(7, f64::INFINITY, "lower --lr").unwrap();
        assert_eq!((scale.factor(), scale.skipped()), (65536.0, 1));
        // The count of good steps starts again at 0.
        (0..GOOD_STEPS - 1).for_each(|_| scale.succeeded());
        scale.overflowed(8, f64::NAN, "lower --lr").unwrap();
        assert_eq!(scale.factor(), 32768.0);
    }

    #[test]
    fn below_one_it_stops_with_a_remedy() {
        let mut scale = LossScale::dynamic();
        for _ in 0..16 {
            scale.overflowed(3, f64::NAN, "lower --lr").unwrap();
        }
        assert_eq!(scale.factor(), 1.0);
        let error = scale.overflowed(3, f64::NAN, "lower --lr").unwrap_err();
        assert!(
            error.to_string().contains("step 3") && error.to_string().contains("--precision bf16"),
            "{error}"
        );
        assert!(LossScale::NONE.clone().overflowed(1, f64::NAN, "lower --lr").is_err());
    }

    #[test]
    fn without_one_nothing_changes() {
        let mut scale = LossScale::NONE;
        (0..2 * GOOD_STEPS).for_each(|_| scale.succeeded());
        assert_eq!(scale, LossScale::NONE);
    }
}
