//! Bytes of device scratch that this op takes beside its buffers, from sizes alone: plans count them on machines
//! without a device.

/// Keys of a single query that a block takes.
pub const KEYS: usize = 128;

/// Number of shares that the keys of a single query are cut into.
pub fn key_shares(keys: usize) -> usize {
    keys.div_ceil(KEYS)
}

/// Bytes of attention's backward over `n` rows in all of `heads` heads.
pub fn attention_backward(n: usize, heads: usize) -> usize {
    4 * n * heads
}

/// Bytes of attention of one query in each of `rows` rows.
pub fn attention_decode(rows: usize, keys: usize, heads: usize, width: usize) -> usize {
    4 * rows * heads * key_shares(keys) * (width + 2)
}
