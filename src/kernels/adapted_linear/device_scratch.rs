//! How much scratch of a CUDA device this op takes beside its buffers, from sizes alone: plans count it
//! on machines without a device.

use crate::device::{DELTA_ROWS, DType};

/// Blocks that a thin product should have at least: a few for each multiprocessor of a large device.
const BLOCKS: usize = 512;
/// Rows and ranks of the result of a block.
const TILE: (usize, usize) = (64, 16);
/// Terms of a step of the kernels; a share is whole steps.
const STEP: usize = 64;
/// Most shares that the terms of a product are cut into.
const MOST_SHARES: usize = 32;

/// Shares that the sums of `x A^T (n, r)` over `terms` inputs are cut into, or those of its gradient over columns: one
/// where there are blocks enough.
pub fn term_shares(n: usize, terms: usize, rank: usize) -> usize {
    let blocks = n.div_ceil(TILE.0) * rank.div_ceil(TILE.1);
    let steps = terms.div_ceil(STEP).max(1);
    let wanted = (BLOCKS / blocks.max(1)).clamp(1, MOST_SHARES.min(steps));
    // None is empty.
    steps.div_ceil(steps.div_ceil(wanted))
}

/// Bytes of these shares.
pub fn term_parts(n: usize, terms: usize, rank: usize) -> usize {
    match term_shares(n, terms, rank) {
        1 => 0,
        shares => 4 * shares * n * rank,
    }
}

/// Most bytes that [`term_parts`] is for up to `n` tokens and ranks up to `rank`: more than one share is made of at most
/// `BLOCKS` tiles in all.
pub fn most_term_parts(n: usize, rank: usize) -> usize {
    4 * (MOST_SHARES * n * rank).min(BLOCKS * TILE.0 * rank.min(TILE.1))
}

/// Most columns of xa of a delta that is fused into a product: two tiles. As many rows follow a weight on a device
/// that has a layer norm in front of it, and as many columns follow the norm's.
pub const MOST_FUSED_RANKS: usize = DELTA_ROWS;

/// Columns of a line of a warp in the kernels of a layer norm with a delta after it, lines of a warp, warps of a block.
pub const LINES: (usize, usize, usize) = (32, 4, 16);
/// Widest layer norm that these kernels have.
pub const MOST_NORMED: usize = LINES.0 * LINES.1 * LINES.2;

/// Columns that follow those of a layer norm, with activations of type `dtype`, for xa of a delta of the layer after
/// it.
pub fn columns_of_xa(dtype: DType) -> usize {
    if dtype.size() == 2 { MOST_FUSED_RANKS } else { 0 }
}

/// Columns of xa of a delta that is fused into a product, in 16-bit numbers: its rank rounded up to whole tiles. `None` of ranks
/// that do not join: above two tiles, or so small that these columns take more than xa in FP32.
pub fn fused_rank(rank: usize) -> Option<usize> {
    let ranks = rank.next_multiple_of(8);
    (0 < ranks && ranks <= MOST_FUSED_RANKS && ranks <= 2 * rank).then_some(ranks)
}

/// Columns of a block of a pass over the gradient of a fused delta's product.
const PASS_COLUMNS: usize = 256;
/// Rows of a stage of such a pass.
const PASS_ROWS: usize = 32;
/// Blocks that a pass should have at most: three for each of 132 multiprocessors are there at once.
const PASS_BLOCKS: usize = 396;

/// How a pass over the gradient `(n, out)` of a fused delta's product is cut: from sizes alone, since the order of sums
/// follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Rows n.
    pub n: usize,
    /// Columns of the gradient.
    pub outputs: usize,
    /// Columns of xa: the rank rounded up.
    pub ranks: usize,
    /// Blocks beside one another, each of which leaves a share of d_xa `(n, ranks)`.
    pub groups: usize,
    /// Rows of a share of dB `(out, ranks)`.
    pub rows: usize,
    /// Number of these.
    pub shares: usize,
}

impl Pass {
    /// Of a gradient `(n, out)`, n > 0, and an xa `(n, ranks)`.
    pub fn new(n: usize, outputs: usize, ranks: usize) -> Self {
        let groups = outputs.div_ceil(PASS_COLUMNS).max(1);
        let rows = n.div_ceil((PASS_BLOCKS / groups).max(1)).next_multiple_of(PASS_ROWS);
        Self { n, outputs, ranks, groups, rows, shares: n.div_ceil(rows) }
    }

    /// Floats of the shares of d_xa.
    pub fn d_xa(self) -> usize {
        self.groups * self.n * self.ranks
    }

    /// Floats of the shares of dB.
    pub fn db(self) -> usize {
        self.shares * self.outputs * self.ranks
    }

    /// Bytes of both.
    pub fn bytes(self) -> usize {
        4 * (self.d_xa() + self.db())
    }

    /// Bytes of shared memory of a block beside what the kernel declares: three stages of dy and xa.
    pub fn shared(self) -> usize {
        3 * 2 * PASS_ROWS * (PASS_COLUMNS + 8 + self.ranks)
    }
}

/// Most bytes of the shares of a fused delta's gradients at a site `(inputs, outputs)`, for up to `n` rows and a
/// largest rank of `rank`: of d_xa and dB, and behind a layer norm of dA.
pub fn most_pass(n: usize, (inputs, outputs): (usize, usize), rank: usize) -> usize {
    let ranks = rank.next_multiple_of(8).min(MOST_FUSED_RANKS);
    let groups = |columns: usize| columns.div_ceil(PASS_COLUMNS).max(1);
    let shares = |columns: usize| (PASS_BLOCKS / groups(columns)).max(1).min(n.div_ceil(PASS_ROWS)) * columns;
    4 * ranks * (groups(outputs) * n + shares(outputs) + shares(inputs))
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xa_of_a_fused_delta_takes_no_more_than_in_fp32() {
        let fused: Vec<usize> = (0..40).filter(|&rank| fused_rank(rank).is_some()).collect();
        assert_eq!(fused, (4..=16).collect::<Vec<_>>());
        assert_eq!([4, 8, 9, 16].map(|rank| fused_rank(rank).unwrap()), [8, 8, 16, 16]);
    }

    #[test]
    fn a_pass_reads_every_row_once_and_takes_no_more_scratch_than_planned() {
        // GPT-2 small, medium and XL at 8 x 1024: about as many blocks as are there at once, shares below 15% of dy.
        let sizes = [2304, 3072, 4800].map(|outputs| Pass::new(8192, outputs, 8));
        assert_eq!(
            sizes.map(|pass| (pass.groups, pass.rows, pass.shares)),
            [(9, 192, 43), (12, 256, 32), (19, 416, 20)]
        );
        assert!(sizes.iter().all(|pass| pass.bytes() * 100 < 2 * pass.n * pass.outputs * 15));
        for outputs in [8, 256, 264, 2304, 6400] {
            for rank in [4, 8, 13, 16, 64] {
                for most in [9, 32, 33, 1000, 8192] {
                    let planned = most_pass(most, (768, outputs), rank);
                    for n in (1..=most).step_by(1 + most / 50) {
                        let pass = Pass::new(n, outputs, rank.min(16).next_multiple_of(8));
                        assert!(
                            pass.rows * (pass.shares - 1) < n && n <= pass.rows * pass.shares,
                            "{pass:?}"
                        );
                        let inner = Pass::new(n, 768, pass.ranks);
                        assert!(pass.bytes() + 4 * inner.db() <= planned, "{pass:?} of {planned}");
                    }
                }
            }
        }
    }

    #[test]
    fn few_tokens_have_many_blocks_and_no_more_scratch_than_planned() {
        // A batch of 32 samples, K = 1024 and 4096; a prompt of 512 tokens; 8 x 1024 tokens.
        assert_eq!([1024, 4096].map(|terms| term_shares(32, terms, 16)), [16, 32]);
        assert_eq!(term_shares(512, 1024, 16), 16);
        assert_eq!(term_shares(8192, 768, 8), 4);
        assert_eq!((term_shares(65_536, 768, 8), term_parts(65_536, 768, 8)), (1, 0));
        for rank in [1, 8, 16, 17, 64] {
            for most in [1usize, 64, 100, 2000, 9000] {
                let planned = most_term_parts(most, rank);
                for n in (1..=most).step_by(1 + most / 200) {
                    for (terms, r) in
                        [(1, 1), (64, rank), (768, rank.min(16)), (3072, rank), (4097, rank.min(9))]
                    {
                        let shares = term_shares(n, terms, r);
                        let steps = terms.div_ceil(STEP);
                        let share = terms.div_ceil(shares).next_multiple_of(STEP);
                        assert!(share * (shares - 1) < terms, "an empty share of {steps} steps in {shares}");
                        assert!(
                            term_parts(n, terms, r) <= planned,
                            "{n} of {most} tokens, rank {r} of {rank}"
                        );
                    }
                }
            }
        }
    }
}
