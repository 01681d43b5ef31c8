//! What a run takes of the machine: [`counting`] counts the heap and the arenas, [`machine`] reads what
//! the system grants and what is resident, [`phase`] names what a run is doing, and [`trace`] records
//! all of that over time.

pub mod counting;
pub mod machine;
pub mod phase;
pub mod trace;
