//! What a run is doing right now, process-wide: the label of every sample of memory.

use std::{
    fmt,
    sync::atomic::{AtomicU8, Ordering::Relaxed},
};

use serde::{Deserialize, Serialize};

/// A part of a run that has a peak of memory of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Moment {
    /// Opening the base, the adapter and the data; allocation.
    Loading,
    /// Forward through the blocks.
    Forward,
    /// Head and loss, forward and backward.
    Head,
    /// Backward through the blocks.
    Backward,
    /// Clipping and the optimizer.
    Update,
    /// Losses of held-out data.
    Evaluation,
    /// Writing adapters and resume files.
    Saving,
}

impl Moment {
    /// All of them, in the order in which a run comes to them.
    pub const ALL: [Moment; 7] = [
        Self::Loading,
        Self::Forward,
        Self::Head,
        Self::Backward,
        Self::Update,
        Self::Evaluation,
        Self::Saving,
    ];

    /// Its name in tables and files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Forward => "forward",
            Self::Head => "head",
            Self::Backward => "backward",
            Self::Update => "update",
            Self::Evaluation => "evaluation",
            Self::Saving => "saving",
        }
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

static CURRENT: AtomicU8 = AtomicU8::new(Moment::Loading as u8);

/// From now on the process is in `moment`; costs one relaxed store.
#[inline]
pub fn enter(moment: Moment) {
    CURRENT.store(moment as u8, Relaxed);
}

/// The moment entered last; [`Moment::Loading`] before the first.
pub fn current() -> Moment {
    let code = usize::from(CURRENT.load(Relaxed));
    Moment::ALL.get(code).copied().unwrap_or(Moment::Loading)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_names_and_files_agree() {
        for (code, moment) in Moment::ALL.into_iter().enumerate() {
            assert_eq!(moment as usize, code);
            assert_eq!(serde_json::to_string(&moment).unwrap(), format!("\"{moment}\""));
        }
        assert_eq!(format!("{:>9}|", Moment::Head), "     head|");
    }
}
