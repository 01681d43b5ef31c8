//! The memory plan: the bytes that a job will take, counted before it starts.
//!
//! A [`Job`] says which buffers it would allocate for one way to do it; [`plan()`] adds the memory of
//! the base and of the device, phase by phase. [`choose()`] picks the fastest plan within a [`budget`]:
//! [`predict`] says how long counted work takes at the [`calibrate`]d rates of this machine. Nothing here
//! knows what the job is: training, generation and serving are planned by the same functions. [`launches`] lists what a
//! device is given in a step, and [`device_time`] predicts its time on GPUs that need not be here.

mod base_bytes;
pub mod budget;
pub mod calibrate;
mod choose;
mod device;
pub mod device_time;
mod job;
pub mod launches;
pub mod predict;
mod size;
mod table;
#[cfg(test)]
mod tests;

pub use base_bytes::{BaseBytes, PlannedBase};
pub use choose::{Alternative, Predicted, Selection, choose};
pub use device::{Cores, PlannedDevice};
pub use job::{Candidates, Job, LastResort};
pub use size::{size, size_up};
pub use table::{ByPhase, Plan, Row, by_phase, from_the_first_pass, plan};
