//! What a CUDA device holds whatever is computed, so that plans count it on machines without one.

/// A tensor of the base starts at a multiple of this many bytes, where cuBLASLt has all of its algorithms.
pub const ALIGN: usize = 256;
/// Bytes that cuBLASLt may work in.
pub const WORKSPACE: usize = 32 << 20;
/// Bytes for what the update of the optimizer leaves for the host.
pub const CONTROL: usize = 256;
/// Bytes of the books that 8-bit moments are read with.
pub const BOOKS: usize = 4 * 2 * 256;
/// Bytes that a device holds whatever is computed, each had when it is first needed and kept.
pub const FIXED: usize = WORKSPACE + CONTROL + BOOKS;
