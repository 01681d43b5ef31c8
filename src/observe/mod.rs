//! Memory and phase of this process: [`counting`] counts the heap and the arenas, [`machine`] reads the
//! memory that the system grants and that is resident, [`phase`] names the phase of the run, and [`trace`]
//! records all of that over time.

pub mod counting;
pub mod machine;
pub mod phase;
pub mod trace;
