//! The phase a run is in, process-wide: the label of every sample of memory.

use std::{
    fmt,
    sync::atomic::{AtomicU8, Ordering::Relaxed},
};

use serde::{Deserialize, Serialize};

/// A part of a run whose peak of memory is planned and recorded separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Phase {
    /// Opening the base, the adapter and the data; allocation.
    Loading,
    /// Forward pass through the blocks.
    Forward,
    /// Head and loss, both forward and backward.
    Head,
    /// Backward pass through the blocks.
    Backward,
    /// Gradient norm, clipping and the optimizer's update.
    Update,
    /// Forward passes over held-out data.
    Evaluation,
    /// Generating samples.
    Sampling,
    /// Writing adapters and resume files.
    Saving,
}

impl Phase {
    /// All phases, in the order in which a run first enters them.
    pub const ALL: [Phase; 8] = [
        Self::Loading,
        Self::Forward,
        Self::Head,
        Self::Backward,
        Self::Update,
        Self::Evaluation,
        Self::Sampling,
        Self::Saving,
    ];

    /// Name of the phase in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Forward => "forward",
            Self::Head => "head",
            Self::Backward => "backward",
            Self::Update => "update",
            Self::Evaluation => "evaluation",
            Self::Sampling => "sampling",
            Self::Saving => "saving",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

static CURRENT: AtomicU8 = AtomicU8::new(Phase::Loading as u8);

/// Enters `phase`, for the whole process; costs one relaxed store.
#[inline]
pub fn enter(phase: Phase) {
    CURRENT.store(phase as u8, Relaxed);
}

/// The phase entered last; [`Phase::Loading`] before the first.
pub fn current() -> Phase {
    let code = usize::from(CURRENT.load(Relaxed));
    Phase::ALL.get(code).copied().unwrap_or(Phase::Loading)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_names_and_files_agree() {
        for (code, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(phase as usize, code);
            assert_eq!(serde_json::to_string(&phase).unwrap(), format!("\"{phase}\""));
        }
        assert_eq!(format!("{:>9}|", Phase::Head), "     head|");
    }
}
