//! How much scratch of a CUDA device this op takes beside its buffers, from sizes alone: plans count it
//! on machines without a device.

/// Rows of a tile of the matrix.
const TILE: usize = 64;

/// Rows that a share of a sum over `rows` rows of a matrix takes, whole tiles.
pub fn share(rows: usize) -> usize {
    (4 * TILE).max(rows.div_ceil(16).next_multiple_of(TILE))
}

/// Bytes of all factors of deltas of `ranks` in all beside a matrix `(rows, cols)`, and of the shares of the sums.
pub fn norms((rows, cols): (usize, usize), ranks: usize) -> usize {
    4 * (ranks * (rows + cols) + rows.div_ceil(share(rows)) * cols)
}
