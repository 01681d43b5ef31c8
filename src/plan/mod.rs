//! The memory plan: what a run will take, before it starts.
//!
//! [`table`] is the table of a run's buffers, a pure function of sizes; [`predict`] says how long a step
//! takes at the [`calibrate`]d rates of this machine; [`choose`] picks the fastest plan within a [`budget`].

mod base_bytes;
pub mod budget;
pub mod calibrate;
pub mod choose;
pub mod predict;
pub mod table;
#[cfg(test)]
mod table_tests;
