//! Bytes of device scratch that this op takes beside its buffers, from sizes alone: plans count them on machines
//! without a device.

use crate::device::DType;

/// Bytes of converted frozen weights at a time, where activations are not FP16.
const CONVERTED: usize = 64 << 20;
/// Largest batch whose products read each weight once, by our own kernels.
pub const SMALL_BATCH: usize = 8;

/// Rows of weights `(rows, cols)` that are converted to `dtype` at a time.
pub fn converted_rows(rows: usize, cols: usize, dtype: DType) -> usize {
    (CONVERTED / (cols * dtype.size()).max(1)).clamp(1, rows.max(1))
}

/// Shares that the inner size of a product of a small batch with weights `(rows, cols)` is cut into: enough blocks
/// for a large device.
pub fn product_shares(rows: usize, cols: usize) -> usize {
    (512 / cols.div_ceil(32).max(1)).clamp(1, rows.div_ceil(256).max(1))
}

/// Bytes of a product of `n` rows with frozen weights `(rows, cols)`.
pub fn product(activations: DType, n: usize, (rows, cols): (usize, usize)) -> usize {
    let small_batch = if n <= SMALL_BATCH { 4 * product_shares(rows, cols) * n * cols } else { 0 };
    // Matrices of a base are in the activations' type but for FP32.
    let converted = match activations {
        DType::F16 | DType::BF16 => 0,
        other => converted_rows(rows, cols, other) * cols * other.size(),
    };
    small_batch.max(converted)
}
