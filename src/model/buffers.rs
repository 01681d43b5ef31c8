//! What a run holds in memory, cut from arenas: activations kept for backward, workspace, inputs.
//!
//! Shapes use the alphabet b rows, t tokens, n = b t, c width, f inner width of the MLP, h heads,
//! r sum of the ranks at a site, p prefix rows, v vocabulary.

use crate::{
    error::Result,
    kernels::device::{
        Arena, Buffer,
        DType::{F32, I32, U32},
    },
};

use super::{
    Config,
    wiring::{SITES, Wiring},
};

/// The largest micro-batch that a model is prepared for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Rows b of a micro-batch.
    pub rows: usize,
    /// Tokens t of the longest row.
    pub tokens: usize,
}

impl Limits {
    /// n = b t.
    pub fn cells(&self) -> usize {
        self.rows * self.tokens
    }
}

/// What one block keeps between its forward and its backward, beside its input.
pub struct BlockBuffers {
    /// Mean and rstd of the first layer norm `(n, 2)`.
    pub stats_1: Buffer,
    /// Queries, keys, values `(n, 3c)`.
    pub qkv: Buffer,
    /// Output of attention before its projection `(n, c)`.
    pub mixed: Buffer,
    /// Log-sum-exp of the scores `(b, h, t)`.
    pub lse: Buffer,
    /// Residual stream between the two halves `(n, c)`.
    pub middle: Buffer,
    /// Mean and rstd of the second layer norm `(n, 2)`.
    pub stats_2: Buffer,
    /// The MLP before its activation `(n, f)`.
    pub inner: Buffer,
    /// Each site's `drop(x) A^T`, `(n, r)`.
    pub low: [Buffer; SITES],
}

impl BlockBuffers {
    /// Cuts the buffers of a block whose sites have these sums of ranks.
    ///
    /// # Errors
    /// When the arena is exhausted.
    pub fn cut(
        arena: &mut Arena,
        name: &str,
        config: &Config,
        limits: Limits,
        ranks: [usize; SITES],
    ) -> Result<Self> {
        let (n, c) = (limits.cells(), config.width);
        let mut take = |part: &str, shape: &[usize]| arena.take(format!("{name} {part}"), F32, shape);
        Ok(Self {
            stats_1: take("stats_1", &[n, 2])?,
            qkv: take("qkv", &[n, 3 * c])?,
            mixed: take("mixed", &[n, c])?,
            lse: take("lse", &[limits.rows, config.heads, limits.tokens])?,
            middle: take("middle", &[n, c])?,
            stats_2: take("stats_2", &[n, 2])?,
            inner: take("inner", &[n, config.inner])?,
            low: [
                take("low c_attn", &[n, ranks[0]])?,
                take("low attn.c_proj", &[n, ranks[1]])?,
                take("low c_fc", &[n, ranks[2]])?,
                take("low mlp.c_proj", &[n, ranks[3]])?,
            ],
        })
    }
}

/// Buffers that are free again when an op or a block is done.
pub struct Work {
    /// Output of a layer norm `(n, c)`.
    pub normed: Buffer,
    /// The MLP after its activation `(n, f)`.
    pub activated: Buffer,
}

/// Further workspace that only a backward needs.
pub struct BackwardWork {
    /// Gradient of the residual stream `(n, c)`.
    pub grad: Buffer,
    /// Gradient of a half's input or of attention's output `(n, c)`.
    pub narrow: Buffer,
    /// Gradient of the MLP's inside or of qkv, `(n, max(f, 3c))`.
    pub wide: Buffer,
    /// Gradient of `low`, `(n, r)`.
    pub d_low: Buffer,
    /// Parts of the gradient of a prefix `(b, 2, p, c)`.
    pub d_prefix: Buffer,
}

impl Work {
    /// Cuts the workspace of a forward.
    ///
    /// # Errors
    /// When the arena is exhausted.
    pub fn cut(arena: &mut Arena, config: &Config, limits: Limits) -> Result<Self> {
        let n = limits.cells();
        Ok(Self {
            normed: arena.take("normed", F32, &[n, config.width])?,
            activated: arena.take("activated", F32, &[n, config.inner])?,
        })
    }
}

impl BackwardWork {
    /// Cuts the further workspace of a backward.
    ///
    /// # Errors
    /// When the arena is exhausted.
    pub fn cut(arena: &mut Arena, config: &Config, limits: Limits, wiring: &Wiring) -> Result<Self> {
        let (n, c) = (limits.cells(), config.width);
        Ok(Self {
            grad: arena.take("d residual", F32, &[n, c])?,
            narrow: arena.take("d narrow", F32, &[n, c])?,
            wide: arena.take("d wide", F32, &[n, config.inner.max(3 * c)])?,
            d_low: arena.take("d low", F32, &[n, wiring.most_ranks()])?,
            d_prefix: arena.take("d prefix", F32, &[limits.rows, 2, wiring.prefix_len(), c])?,
        })
    }
}

/// Workspace of head and loss.
pub struct HeadWork {
    /// Statistics of the last layer norm `(n, 2)`.
    pub stats: Buffer,
    /// Hidden states of a chunk `(chunk, c)`.
    pub gathered: Buffer,
    /// Logits of a chunk `(chunk, v)`.
    pub logits: Buffer,
    /// Losses of the supervised rows `(n)`.
    pub losses: Buffer,
}

impl HeadWork {
    /// Cuts workspace for chunks of `rows` rows of logits.
    ///
    /// # Errors
    /// When the arena is exhausted.
    pub fn cut(arena: &mut Arena, config: &Config, limits: Limits, rows: usize) -> Result<Self> {
        let n = limits.cells();
        let chunk = rows.clamp(1, n.max(1));
        Ok(Self {
            stats: arena.take("stats_f", F32, &[n, 2])?,
            gathered: arena.take("gathered", F32, &[chunk, config.width])?,
            logits: arena.take("logits", F32, &[chunk, config.vocab])?,
            losses: arena.take("losses", F32, &[n])?,
        })
    }
}

/// A micro-batch on the device.
pub struct Inputs {
    /// Token ids `(n)`.
    pub ids: Buffer,
    /// Rows of the position embedding `(n)`.
    pub positions: Buffer,
    /// First visible token of each token's document `(n)`.
    pub starts: Buffer,
    /// Indices of the supervised tokens `(m)`, m <= n.
    pub rows: Buffer,
    /// Their targets `(m)`.
    pub targets: Buffer,
}

impl Inputs {
    /// Cuts room for the largest micro-batch.
    ///
    /// # Errors
    /// When the arena is exhausted.
    pub fn cut(arena: &mut Arena, limits: Limits) -> Result<Self> {
        let n = limits.cells();
        Ok(Self {
            ids: arena.take("ids", U32, &[n])?,
            positions: arena.take("positions", U32, &[n])?,
            starts: arena.take("starts", U32, &[n])?,
            rows: arena.take("supervised rows", U32, &[n])?,
            targets: arena.take("targets", I32, &[n])?,
        })
    }
}
