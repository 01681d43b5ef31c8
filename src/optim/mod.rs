//! From gradients to new values: AdamW over the flat store, clipping, learning-rate schedules.

mod adamw;
pub mod schedule;

pub use adamw::{AdamW, AdamWOptions};
