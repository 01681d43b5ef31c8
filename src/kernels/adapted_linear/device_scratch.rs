//! How much scratch of a CUDA device this op takes beside its buffers, from sizes alone: plans count it
//! on machines without a device.

/// Shares that a sum over `n` rows is cut into.
pub fn row_shares(n: usize) -> usize {
    n.div_ceil(256).clamp(1, 32)
}

/// Bytes of the gradients of deltas of rank up to `rank` at sites up to `widest`, over `n` rows.
pub fn deltas(n: usize, widest: usize, rank: usize) -> usize {
    4 * row_shares(n) * rank * widest
}

/// Bytes of a B `(columns, r)` times d and e, which a forward of a delta with either takes.
pub fn scaled_factor(columns: usize, rank: usize) -> usize {
    4 * columns * rank
}
