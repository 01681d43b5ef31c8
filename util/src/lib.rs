//! Helpers that engraft's crates share, independent of adapters, models and devices: files that are
//! replaced as a whole, headers of tensor files, the counter-based random numbers, the number types of reference
//! maths, words for people.

pub mod atomic;
pub mod real;
pub mod rng;
pub mod safetensors;
pub mod shards;
pub mod stand_in;
pub mod words;
