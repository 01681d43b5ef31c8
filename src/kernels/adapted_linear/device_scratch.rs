//! How much scratch of a CUDA device this op takes beside its buffers, from sizes alone: plans count it
//! on machines without a device.

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

/// Columns of xa of a delta that is fused into a product, in 16-bit numbers: its rank rounded up to whole tiles. `None` of ranks
/// that do not join: above two tiles, or so small that these columns take more than xa in FP32.
pub fn fused_rank(rank: usize) -> Option<usize> {
    let ranks = rank.next_multiple_of(8);
    (0 < ranks && ranks <= 16 && ranks <= 2 * rank).then_some(ranks)
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
