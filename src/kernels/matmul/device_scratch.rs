//! Bytes of device scratch that this op takes beside its buffers, from sizes alone: plans count them on machines
//! without a device.

use crate::device::DType;

/// Bytes of widened frozen weights at a time, where activations are FP32 or the weights are codes.
const CONVERTED: usize = 64 << 20;
/// Rows of a stretch of them are a multiple of this: a block of 4-bit codes, and whole tiles of the library's kernels.
const WHOLE: usize = 64;
/// Largest batch whose products read each weight once, by our own kernels.
pub const SMALL_BATCH: usize = 8;

/// Rows of weights `(rows, cols)` that are widened to `dtype` at a time.
pub fn converted_rows(rows: usize, cols: usize, dtype: DType) -> usize {
    let wholes = CONVERTED / (WHOLE * cols * dtype.size()).max(1);
    (WHOLE * wholes.max(1)).min(rows.max(1))
}

/// Shares that the inner size of a product of a small batch with weights `(rows, cols)` is cut into: enough blocks
/// for a large device.
pub fn product_shares(rows: usize, cols: usize) -> usize {
    (512 / cols.div_ceil(32).max(1)).clamp(1, rows.div_ceil(256).max(1))
}

/// As [`product_shares`], of weights whose elements are of `dtype`: blocks of codes are of more columns, and a share of
/// 4-bit codes is whole blocks of 256 rows.
pub fn shares_of(dtype: DType, rows: usize, cols: usize) -> usize {
    let (columns, most) = match dtype {
        DType::I8 => (128, rows.div_ceil(64)),
        DType::U8 => (64, rows.div_ceil(256)),
        _ => return product_shares(rows, cols),
    };
    (512 / cols.div_ceil(columns).max(1)).clamp(1, most.max(1))
}

/// Bytes of a product of `n` rows with frozen weights `(rows, cols)`, whose elements are of type `weights` at rest.
pub fn product(activations: DType, weights: DType, n: usize, (rows, cols): (usize, usize)) -> usize {
    let small_batch = if n <= SMALL_BATCH { 4 * shares_of(weights, rows, cols) * n * cols } else { 0 };
    // Matrices of an FP16 base are in the activations' type but for FP32.
    let in_place = weights == DType::F16 && matches!(activations, DType::F16 | DType::BF16);
    let converted = match in_place {
        true => 0,
        false => converted_rows(rows, cols, activations) * cols * activations.size(),
    };
    small_batch.max(converted)
}
