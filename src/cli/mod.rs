//! The front ends of the two programs: `train` is `engraft`, `infer` is `engraft-infer`, and both use
//! `common`.
//!
//! Only this room and `bin/` print or read the environment. `infer` and `common` never reach training.

mod common;
pub mod infer;
pub mod train;

#[cfg(test)]
mod manual_tests;
