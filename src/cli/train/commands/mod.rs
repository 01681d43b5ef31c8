//! The commands of `engraft`, a file each.

pub mod cache;
pub mod combine;
pub mod data;
pub mod diff;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod extract;
pub mod inspect;
pub mod merge;
pub mod plan;
pub mod push;
pub mod report;
pub mod train;
