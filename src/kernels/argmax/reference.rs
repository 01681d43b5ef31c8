//! One row, logit by logit.

use super::Largest;

/// The first logit that is not finite, or else the first of the largest ones.
pub fn row(logits: &[f32]) -> Largest {
    let mut best = Largest { id: 0, logit: f32::NEG_INFINITY };
    for (id, &logit) in (0..).zip(logits) {
        if !logit.is_finite() {
            return Largest { id, logit };
        }
        if logit > best.logit {
            best = Largest { id, logit };
        }
    }
    best
}
