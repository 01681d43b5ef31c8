//! From gradients to new values: AdamW over the flat store, clipping, learning-rate schedules.

mod loss_scale;
mod moments;
mod optimizer;
mod rank_allocator;
pub mod schedule;
mod windows;

pub use loss_scale::LossScale;
pub(crate) use moments::upload;
pub use moments::{Moments, OptimizerKind, SavedTensor, StateTensor};
pub use optimizer::{AdamWOptions, Optimizer};
pub use rank_allocator::RankAllocator;
pub use windows::{Window, windows};
