//! From gradients to new values: AdamW over the flat store, clipping, learning-rate schedules.

mod moments;
mod optimizer;
pub mod schedule;
mod windows;

pub use moments::{Moments, OptimizerKind, Stored};
pub use optimizer::{AdamWOptions, Optimizer};
pub use windows::{Window, windows};
