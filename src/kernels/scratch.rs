//! How much memory the CPU sides of the ops take beside their buffers: tiles in per-thread scratch, what tasks share, and
//! what `gemm` packs its operands into. A memory plan counts it; runs count what they take and hold it against the plan.

use super::{
    adapted_linear, attention, cpu,
    matmul::{self, Arithmetic},
};

/// What scratch depends on.
#[derive(Debug, Clone, Copy)]
pub struct Needs {
    /// Rows n of a micro-batch's activations.
    pub rows: usize,
    /// Longest row of keys, prefix included.
    pub keys: usize,
    /// c.
    pub width: usize,
    /// d.
    pub head_width: usize,
    /// f.
    pub inner: usize,
    /// Largest rank of a delta.
    pub rank: usize,
    /// Whether deltas drop elements of their input.
    pub dropout: bool,
}

/// Bytes for a pool of `threads`, with what its tasks share in `arithmetic`.
pub fn bytes(needs: Needs, threads: usize, arithmetic: Arithmetic) -> usize {
    let widest = needs.inner.max(3 * needs.width);
    let ops = [
        matmul::scratch(needs.rows),
        attention::scratch(needs.keys, needs.head_width),
        adapted_linear::scratch(needs.rows, widest, needs.rank, needs.dropout),
    ];
    let tiles = ops.iter().map(|op| op.0).max().unwrap_or(0);
    let packed = ops.iter().map(|op| op.1).max().unwrap_or(0);
    let shared = 4 * matmul::shared(needs.rows, arithmetic).next_multiple_of(cpu::LINE);
    threads * (4 * (tiles.next_multiple_of(cpu::LINE) + packed) + cpu::slab()) + shared
}
