//! How much scratch of a CUDA device this op takes beside its buffers, from sizes alone: plans count it
//! on machines without a device.

/// Bytes of the norm of `len` trainables.
pub fn norm(len: usize) -> usize {
    8 * len.div_ceil(1 << 15).max(1)
}
