//! How much memory of a CUDA device the ops take beside their buffers, from sizes alone: a plan counts it on
//! machines without a device, a run reserves it before its first step.
//!
//! One stretch of scratch serves all ops, whose launches the stream puts in order.

use super::{device::DType, scratch::Needs};

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
/// Bytes that a stretch of frozen weights is converted in, where activations are not FP16.
const CONVERTED: usize = 64 << 20;
/// Up to this many rows products are made by kernels that read each weight once.
pub const FEW: usize = 8;
/// Keys that a block takes of a single query.
pub const KEYS: usize = 128;

/// Rows of weights `(rows, cols)` that are converted to `dtype` at a time.
pub fn converted_rows(rows: usize, cols: usize, dtype: DType) -> usize {
    (CONVERTED / (cols * dtype.size()).max(1)).clamp(1, rows.max(1))
}

/// Shares that the inner size of a product of few rows with weights `(rows, cols)` is cut into: blocks enough for a
/// large device.
pub fn product_shares(rows: usize, cols: usize) -> usize {
    (512 / cols.div_ceil(32).max(1)).clamp(1, rows.div_ceil(256).max(1))
}

/// Shares that a sum over `n` rows is cut into.
pub fn row_shares(n: usize) -> usize {
    n.div_ceil(256).clamp(1, 32)
}

/// Shares that the keys of a single query are cut into.
pub fn key_shares(keys: usize) -> usize {
    keys.div_ceil(KEYS)
}

/// Bytes of a product of `n` rows with frozen weights `(rows, cols)`.
pub fn product(activations: DType, n: usize, (rows, cols): (usize, usize)) -> usize {
    let few = if n <= FEW { 4 * product_shares(rows, cols) * n * cols } else { 0 };
    let converted = match activations {
        DType::F16 => 0,
        other => converted_rows(rows, cols, other) * cols * other.size(),
    };
    few.max(converted)
}

/// Bytes of the gradients of deltas of rank up to `rank` at sites up to `widest`, over `n` rows.
pub fn deltas(n: usize, widest: usize, rank: usize) -> usize {
    4 * row_shares(n) * rank * widest
}

/// Bytes of attention's backward over `n` rows in all of `heads` heads.
pub fn attention_backward(n: usize, heads: usize) -> usize {
    4 * n * heads
}

/// Bytes of attention of one query in each of `rows` rows.
pub fn attention_decode(rows: usize, keys: usize, heads: usize, width: usize) -> usize {
    4 * rows * heads * key_shares(keys) * (width + 2)
}

/// Bytes of the norm of `len` trainables.
pub fn norm(len: usize) -> usize {
    8 * len.div_ceil(1 << 15).max(1)
}

/// Bytes of scratch of a training step over `vocab` tokens and `trainables` values.
pub fn training(needs: Needs, activations: DType, vocab: usize, trainables: usize) -> usize {
    let Needs { rows, width: c, inner, rank, head_width, .. } = needs;
    let others = [
        deltas(rows, inner.max(3 * c), rank),
        attention_backward(rows, c / head_width.max(1)),
        attention_decode(rows, needs.keys, c / head_width.max(1), head_width),
        norm(trainables),
    ];
    others.into_iter().fold(products(needs, activations, vocab), usize::max)
}

/// Bytes of all products of up to `needs.rows` rows.
fn products(needs: Needs, activations: DType, vocab: usize) -> usize {
    let Needs { rows, width: c, inner, .. } = needs;
    let matrices = [(c, 3 * c), (c, c), (c, inner), (inner, c), (vocab, c)];
    // A chunk of the head, or the last micro-batch, may have few rows where others have many.
    let sizes = [rows, rows.min(FEW)];
    let all = matrices.into_iter().flat_map(|matrix| sizes.map(|rows| product(activations, rows, matrix)));
    all.max().unwrap_or(0)
}

/// Bytes of scratch of generation: up to `needs.rows` tokens of a prompt at a time, and one token of each of `samples`
/// behind up to `needs.keys` less one.
pub fn decoding(needs: Needs, activations: DType, vocab: usize, samples: usize) -> usize {
    let heads = needs.width / needs.head_width.max(1);
    products(needs, activations, vocab).max(attention_decode(samples, needs.keys, heads, needs.head_width))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_planned_for_any_number_of_rows_up_to_its_own() {
        let (vocab, width) = (50257, 768);
        for rows in [1, 8, 9, 16, 100, 2048] {
            let needs =
                Needs { rows, keys: 16, width, head_width: 64, inner: 4 * width, rank: 1, dropout: false };
            for activations in [DType::F16, DType::BF16, DType::F32] {
                let planned = training(needs, activations, vocab, 1000);
                for n in 1..=rows {
                    let head = product(activations, n, (vocab, width));
                    assert!(head <= planned, "{n} of {rows} rows: {head} bytes where {planned} are planned");
                }
            }
        }
    }
}
