//! The commands of `engraft`, a file each.

pub mod data;
pub mod eval;
pub mod inspect;
pub mod plan;
pub mod train;
