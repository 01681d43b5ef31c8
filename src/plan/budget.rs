//! How many bytes a run may take, and how many the process has before its plan.

use super::{Plan, Row};
use crate::{
    device::{OwnMemory, arena::Placement},
    observe::machine,
};

/// The value of `--memory`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Limit {
    /// Nine tenths of the free memory.
    #[default]
    Auto,
    /// This number of bytes for the whole process.
    Bytes(u64),
}

/// Part of the free memory that `auto` takes: others need some, and it changes.
const OF_FREE: f64 = 0.9;

/// Growth of a running process that its plan does not count: stacks of threads, the progress bar, buffers of
/// writers, heap that the system's allocator does not give back.
const GROWTH: u64 = 8 << 20;

/// Code, runtime and a tokenizer of GPT-2's size, where the system does not tell.
const PROGRAM: u64 = 56 << 20;

/// Bytes that a process which holds `program` may take in all; `None` where the system does not tell.
pub fn bytes(limit: Limit, program: u64) -> Option<u64> {
    match limit {
        Limit::Bytes(bytes) => Some(bytes),
        Limit::Auto => machine::available().map(|free| program + (free as f64 * OF_FREE) as u64),
    }
}

/// Bytes that this process uses now, and the growth that its plan does not count.
pub fn program() -> u64 {
    machine::resident().map_or(PROGRAM, |resident| resident.total + GROWTH)
}

/// The same for a process that does not run yet.
pub fn assumed_program() -> u64 {
    PROGRAM
}

/// Bytes of a device's `memory` that a process may take in all, which has its runtime and `held` bytes
/// there, where `free` bytes are left.
pub fn device_bytes(limit: Limit, memory: &OwnMemory, free: Option<u64>, held: u64) -> Option<u64> {
    match limit {
        Limit::Bytes(bytes) => Some(bytes),
        Limit::Auto => free.map(|free| held + memory.runtime + (free as f64 * OF_FREE) as u64),
    }
}

/// Bytes of memory that `plan` wants beyond what the process already holds: itself, and on a device the base.
pub fn wanted<C>(plan: &Plan<C>) -> u64 {
    let held = |row: &&Row| match row.place {
        Placement::Host => row.role == "program",
        Placement::Memory => matches!(row.role, "program" | "base"),
        Placement::Disk => false,
    };
    // Rows that a device's plan only lists take none of its memory.
    plan.peak().1.saturating_sub(plan.rows.iter().filter(held).map(Row::most_resident).sum())
}

/// With less free memory than this touching the next page may end the process.
pub const LOW: u64 = 1 << 20;
