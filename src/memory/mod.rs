//! Memory of a run: what the machine has, what the process takes, and how both come about over time.
//!
//! [`counting`] counts the heap and the arenas, [`machine`] reads what the system grants and what is
//! resident, [`moment`] names what a run is doing, [`trace`] records all of that over time, and
//! [`calibrate`] measures how fast this machine is. [`plan`] is the table of a run's buffers, a pure
//! function of sizes; [`predict`] how long a step takes; [`choose`] the fastest plan within a [`budget`].

mod base_bytes;
pub mod budget;
pub mod calibrate;
pub mod choose;
pub mod counting;
pub mod machine;
pub mod moment;
pub mod plan;
#[cfg(test)]
mod plan_tests;
pub mod predict;
pub mod trace;
