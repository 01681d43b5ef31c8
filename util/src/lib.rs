//! Helpers that engraft's crates share, independent of adapters, models and devices: files that are
//! replaced as a whole, paths that are removed when a program stops early, panics that are caught, headers of
//! tensor files, the counter-based random numbers, the number types of reference maths, words for people.

pub mod atomic;
pub mod panics;
pub mod real;
pub mod rng;
pub mod safetensors;
pub mod shards;
pub mod shell;
pub mod stand_in;
pub mod unfinished;
pub mod words;
