//! The number type of REFERENCE twins: `f32` for comparing, `f64` for central differences.

use std::{iter::Sum, ops::AddAssign};

/// A floating-point number that a REFERENCE twin can be run in.
pub trait Real: num_traits::Float + AddAssign + Sum + std::fmt::Debug + Send + Sync + 'static {
    /// The nearest value of this type.
    fn of(value: f64) -> Self;
    /// The error function erf.
    fn erf(self) -> Self;
}

impl Real for f32 {
    fn of(value: f64) -> Self {
        value as f32
    }
    fn erf(self) -> Self {
        libm::erff(self)
    }
}

impl Real for f64 {
    fn of(value: f64) -> Self {
        value
    }
    fn erf(self) -> Self {
        libm::erf(self)
    }
}
