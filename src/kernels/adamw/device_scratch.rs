//! Bytes of device scratch that this op takes beside its buffers, from sizes alone: plans count them on machines
//! without a device.

/// Bytes for partial sums of the norm of `len` trainables, one f64 for each 32768.
pub fn norm(len: usize) -> usize {
    8 * len.div_ceil(1 << 15).max(1)
}
