//! Memory of a run: what the machine has, what the process takes, and how both come about over time.
//!
//! [`counting`] counts the heap and the arenas, [`machine`] reads what the system grants and what is
//! resident, [`moment`] names what a run is doing, [`trace`] records all of that over time, and
//! [`calibrate`] measures how fast this machine is, for predictions of time.

pub mod calibrate;
pub mod counting;
pub mod machine;
pub mod moment;
pub mod trace;
