//! How much scratch of a CUDA device this op takes beside its buffers, from sizes alone: plans count it
//! on machines without a device.

use crate::kernels::{attention::device_scratch::attention_decode, matmul::device_scratch::SMALL_BATCH};

/// Columns of a tile of a product.
pub const TILE: usize = 64;

/// Rows of a matrix `(rows, cols)` that a block multiplies with: few where there are few, so that many blocks read at the
/// same time.
pub fn share(rows: usize) -> usize {
    if rows <= 2048 { 128 } else { 256 }
}

/// Shares that the rows of a matrix are cut into.
pub fn shares(rows: usize) -> usize {
    rows.div_ceil(share(rows))
}

/// Sizes of a layer and of the batch of one token a row.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Rows n of the batch, up to [`SMALL_BATCH`].
    pub n: usize,
    /// Width c.
    pub width: usize,
    /// Inner width f of the MLP.
    pub inner: usize,
    /// Heads h.
    pub heads: usize,
    /// Most keys of a row, prefix included.
    pub keys: usize,
    /// Largest sum of the ranks at a site.
    pub ranks: usize,
}

/// FP32 numbers of each part of the scratch of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parts {
    /// Shares of c_attn or c_fc.
    pub open: usize,
    /// Their shares of `x A^T`.
    pub open_xa: usize,
    /// Shares of the other two products, or of attention.
    pub joint: usize,
    /// The products' shares of `x A^T`.
    pub joint_xa: usize,
}

impl Parts {
    /// Those of a layer.
    pub fn of(sizes: Sizes) -> Self {
        let Sizes { n, width: c, inner: f, heads, keys, ranks } = sizes;
        let shares_xa = shares(c) * n * ranks;
        let attention = attention_decode(n, keys, heads, c / heads.max(1)) / 4;
        Self {
            open: shares(c) * n * f.max(3 * c),
            open_xa: shares_xa,
            joint: (shares(c).max(shares(f)) * n * c).max(attention),
            joint_xa: c.div_ceil(TILE) * shares(c).max(shares(f)) * n * ranks,
        }
    }

    /// Numbers of all parts, each of which begins at a multiple of 16 bytes.
    pub fn total(self) -> usize {
        [self.open, self.open_xa, self.joint, self.joint_xa].map(|len| len.next_multiple_of(4)).iter().sum()
    }
}

/// Bytes of a layer's scratch for up to `sizes.n` rows.
pub fn layer(sizes: Sizes) -> usize {
    4 * Parts::of(Sizes { n: sizes.n.min(SMALL_BATCH), ..sizes }).total()
}

/// Tickets of a layer: the blocks of a tile, or of a head of a row, draw them to know which of them ends last. They are 0
/// between launches.
pub fn tickets(n: usize, width: usize, heads: usize) -> usize {
    (n.min(SMALL_BATCH) * heads).max(width.div_ceil(TILE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_grows_with_rows_and_ranks() {
        let sizes = Sizes { n: 1, width: 1024, inner: 4096, heads: 16, keys: 1024, ranks: 16 };
        assert_eq!((shares(1024), shares(4096), shares(130)), (8, 16, 2));
        assert_eq!(Parts::of(sizes).open, 8 * 4096);
        let grown = [Sizes { n: 8, ..sizes }, Sizes { ranks: 48, ..sizes }, Sizes { keys: 9000, ..sizes }];
        assert!(grown.iter().all(|more| layer(*more) > layer(sizes)));
        // Passes of more rows take other kernels.
        assert_eq!(layer(Sizes { n: 64, ..sizes }), layer(Sizes { n: 8, ..sizes }));
        assert_eq!((tickets(8, 1024, 16), tickets(1, 1024, 16)), (128, 16));
    }
}
