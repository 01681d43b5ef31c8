//! How much scratch of a CUDA device this op takes beside its buffers, from sizes alone: plans count it
//! on machines without a device.

/// Shares that a sum over `n` rows is cut into.
pub fn shares(n: usize) -> usize {
    n.div_ceil(256).clamp(1, 32)
}

/// Bytes of the gradients of gain and bias `(c)` over `n` rows.
pub fn parameter_gradients(n: usize, c: usize) -> usize {
    4 * 2 * shares(n) * c
}
