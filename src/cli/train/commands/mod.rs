//! The commands of `engraft`, a file each.

pub mod eval;
pub mod inspect;
pub mod plan;
pub mod report;
pub mod train;
