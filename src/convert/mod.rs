//! Models and adapters made into others: adapters folded into their base, and written as a plain model.
//!
//! [`Merge`] folds and writes, one tensor in memory at a time; [`compare`] says how far the logits of the result are from
//! those of base and adapters. The base itself is never changed.

mod card;
mod compare;
mod folder;
mod merge;

pub use card::write_card;
pub use compare::{LogitDifference, compare};
pub use folder::{WeightDtype, check_output};
pub use merge::{Merge, Merged};
