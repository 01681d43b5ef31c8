//! The memory of a run, cut from arenas: activations kept for the backward, workspace, inputs.
//!
//! Shapes use the alphabet b rows, t tokens, n = b t, c width, f inner width of the MLP, h heads,
//! r sum of the ranks at a site, p prefix rows, v vocabulary.

use crate::{
    device::{
        Buffer,
        DType::{self, F32, I32, U8, U32},
        View, ViewMut,
        arena::{ALIGN, Arena},
    },
    error::Result,
    kernels::{adapted_linear::device_scratch::columns_of_xa, head_loss},
};

use super::{
    Config,
    arch::{Arch, SITES, Site, SiteShape},
    bindings::{AdapterBindings, SiteBinding},
    policy::Keep,
};

/// The largest micro-batch that a model is prepared for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Rows b of a micro-batch.
    pub rows: usize,
    /// Tokens t of the longest row, virtual ones included.
    pub tokens: usize,
}

impl Limits {
    /// n = b t.
    pub fn cells(&self) -> usize {
        self.rows * self.tokens
    }
}

/// The sizes that every buffer of a pass follows from.
#[derive(Clone, Copy)]
pub struct Sizes<'a> {
    /// Sizes of the base.
    pub config: &'a Config,
    /// Largest b and t.
    pub limits: Limits,
    /// Type of activations; statistics and everything small stay FP32.
    pub activations: DType,
}

/// The activations of one block between its forward and its backward, beside its input.
pub struct BlockBuffers {
    /// Statistics and thin products.
    pub statistics: BlockStatistics,
    /// Queries, keys, values `(n, 3c)`.
    pub qkv: Buffer,
    /// Outputs of the attention half.
    pub outputs: Outputs,
    /// The MLP before its activation `(n, f)`.
    pub inner: Buffer,
    /// What a trainable g multiplies at each site `(n, out)`.
    pub products: [Option<Buffer>; SITES],
}

/// What the adapters of a layer have its block keep, by site.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeptWidths {
    /// Sum of the ranks of all deltas, for each site of a layer.
    pub ranks: [usize; SITES],
    /// Columns of what a trainable g multiplies; 0 without one.
    pub products: [usize; SITES],
}

impl KeptWidths {
    /// Those of a site, which a backward follows if `training`.
    pub fn add(&mut self, binding: &SiteBinding, shape: &SiteShape, training: bool) {
        let site = shape.site as usize;
        let product = if training && binding.vectors().keeps_product() { shape.outputs } else { 0 };
        self.ranks[site] = self.ranks[site].max(binding.ranks());
        self.products[site] = self.products[site].max(product);
    }

    /// As much as either keeps.
    pub fn max(self, other: Self) -> Self {
        Self {
            ranks: std::array::from_fn(|site| self.ranks[site].max(other.ranks[site])),
            products: std::array::from_fn(|site| self.products[site].max(other.products[site])),
        }
    }
}

/// The part of a block, as [`BlockActivations::kept`] counts them, that what g multiplies at each site is kept with.
const PART_OF: [usize; SITES] = [1, 2, 3, 2];

/// Statistics and thin products of a block.
pub struct BlockStatistics {
    /// Mean and rstd of the first layer norm `(n, 2)`.
    pub stats_1: Buffer,
    /// Log-sum-exp of the scores `(b, h, t)`.
    pub lse: Buffer,
    /// Mean and rstd of the second layer norm `(n, 2)`.
    pub stats_2: Buffer,
    /// `drop(x) A^T` of each site, `(n, r)`.
    pub xa: [Buffer; SITES],
}

/// Outputs of the attention half of a block.
pub struct Outputs {
    /// Output of attention before its projection `(n, c)`.
    pub mixed: Buffer,
    /// Residual stream between the two halves `(n, c)`.
    pub middle: Buffer,
}

impl BlockStatistics {
    fn cut(arena: &mut Arena, name: &str, sizes: Sizes, ranks: [usize; SITES]) -> Result<Self> {
        let Sizes { config, limits, .. } = sizes;
        let n = limits.cells();
        let mut take = |part: &str, shape: &[usize]| arena.take(format!("{name} {part}"), F32, shape);
        Ok(Self {
            stats_1: take("stats_1", &[n, 2])?,
            lse: take("lse", &[limits.rows, config.heads, limits.tokens])?,
            stats_2: take("stats_2", &[n, 2])?,
            xa: {
                let [c_attn, attn_proj, c_fc, mlp_proj] = &Arch::of(config).sites;
                let mut xa =
                    |site: &SiteShape| take(&format!("xa {}", site.label), &[n, ranks[site.site as usize]]);
                [xa(c_attn)?, xa(attn_proj)?, xa(c_fc)?, xa(mlp_proj)?]
            },
        })
    }
}

/// The memory of a block, some of which may be missing: parts that a layer keeps, or that layers share.
#[derive(Default)]
pub struct BlockActivations {
    statistics: Option<BlockStatistics>,
    qkv: Option<Buffer>,
    outputs: Option<Outputs>,
    inner: Option<Buffer>,
    products: [Option<Buffer>; SITES],
}

/// Which parts of a [`BlockBuffers`] belong to the layer; the others were lent by the shared ones.
#[derive(Clone, Copy)]
pub struct OwnedMask([bool; 4]);

impl OwnedMask {
    /// The policy under which a layer owns these parts.
    pub fn keep(self) -> Keep {
        let kept = |keep: &Keep| BlockActivations::kept(*keep) == self.0;
        [Keep::All, Keep::Attention, Keep::Outputs].into_iter().find(kept).unwrap_or(Keep::Input)
    }
}

impl BlockActivations {
    /// Cuts what a layer keeps.
    ///
    /// # Errors
    /// When the arena is exhausted.
    pub fn cut(
        arena: &mut Arena,
        name: &str,
        sizes: Sizes,
        widths: KeptWidths,
        parts: [bool; 4],
    ) -> Result<Self> {
        let (n, c) = (sizes.limits.cells(), sizes.config.width);
        let [statistics, qkv, outputs, inner] = parts;
        let statistics =
            statistics.then(|| BlockStatistics::cut(arena, name, sizes, widths.ranks)).transpose()?;
        let mut take =
            |part: &str, width: usize| arena.take(format!("{name} {part}"), sizes.activations, &[n, width]);
        let mut products = <[Option<Buffer>; SITES]>::default();
        for (site, shape) in Arch::of(sizes.config).sites.iter().enumerate() {
            if parts[PART_OF[site]] && widths.products[site] > 0 {
                products[site] = Some(take(&format!("product {}", shape.label), widths.products[site])?);
            }
        }
        Ok(Self {
            products,
            statistics,
            qkv: qkv.then(|| take("qkv", Arch::of(sizes.config).qkv())).transpose()?,
            outputs: if outputs {
                Some(Outputs { mixed: take("mixed", c)?, middle: take("middle", c)? })
            } else {
                None
            },
            inner: inner.then(|| take("inner", sizes.config.inner)).transpose()?,
        })
    }

    /// Which parts `keep` keeps: statistics, qkv, outputs, inner.
    pub fn kept(keep: Keep) -> [bool; 4] {
        match keep {
            Keep::All => [true; 4],
            Keep::Attention => [true, true, true, false],
            Keep::Outputs => [true, false, true, false],
            Keep::Input => [false; 4],
        }
    }

    /// Whether nothing is missing for a block.
    pub fn is_whole(&self) -> bool {
        self.statistics.is_some() && self.qkv.is_some() && self.outputs.is_some() && self.inner.is_some()
    }

    /// A whole block out of these parts and, for those that are missing, `shared` ones; `None` when a
    /// part is in neither, which only an earlier failure can bring about.
    pub fn assemble(&mut self, shared: &mut Self) -> Option<(BlockBuffers, OwnedMask)> {
        let owned =
            [self.statistics.is_some(), self.qkv.is_some(), self.outputs.is_some(), self.inner.is_some()];
        let mut products = <[Option<Buffer>; SITES]>::default();
        for (site, product) in products.iter_mut().enumerate() {
            let from = if owned[PART_OF[site]] { &mut *self } else { &mut *shared };
            *product = from.products[site].take();
        }
        let buffers = BlockBuffers {
            products,
            statistics: self.statistics.take().or_else(|| shared.statistics.take())?,
            qkv: self.qkv.take().or_else(|| shared.qkv.take())?,
            outputs: self.outputs.take().or_else(|| shared.outputs.take())?,
            inner: self.inner.take().or_else(|| shared.inner.take())?,
        };
        Some((buffers, OwnedMask(owned)))
    }

    /// Takes the parts of a block back to where they were.
    pub fn dissolve(&mut self, buffers: BlockBuffers, owned: OwnedMask, shared: &mut Self) {
        let BlockBuffers { statistics, qkv, outputs, inner, products } = buffers;
        for (site, product) in products.into_iter().enumerate() {
            (if owned.0[PART_OF[site]] { &mut *self } else { &mut *shared }).products[site] = product;
        }
        let OwnedMask([own_statistics, own_qkv, own_outputs, own_inner]) = owned;
        (if own_statistics { &mut *self } else { &mut *shared }).statistics = Some(statistics);
        (if own_qkv { &mut *self } else { &mut *shared }).qkv = Some(qkv);
        (if own_outputs { &mut *self } else { &mut *shared }).outputs = Some(outputs);
        (if own_inner { &mut *self } else { &mut *shared }).inner = Some(inner);
    }
}

/// Buffers that are free again when an op or a block is done.
pub struct Workspace {
    /// Output of a layer norm `(n, c)`, and room for xa of the delta after it.
    pub normed: Buffer,
    /// Scratch shared by the widest tensors.
    pub shared: SharedScratch,
    /// `u * x (n, in)` of a site in a forward, or `g * dy (n, out)` in a backward, where a site has a u or a g.
    pub scaled: Option<Buffer>,
}

/// Memory shared by the widest tensors of a pass: the MLP after its activation `(n, f)`, and before it attention's
/// output of the tokens that are wanted `(m, c)`; in a backward the
/// gradient of its inside or of qkv, `(n, max(f, 3c))`, after the former where an adapter needs both; between forward
/// and backward the logits of a chunk `(chunk, v)`, the rows of 16-bit activations a little apart.
pub struct SharedScratch {
    bytes: Buffer,
    activations: DType,
    /// Bytes before the gradient.
    before: usize,
    /// Bytes of the logits of a chunk.
    logits: usize,
}

/// The passes that memory is cut for.
#[derive(Clone, Copy)]
pub struct Passes<'a> {
    /// Rows of logits at a time; 0 where they have memory of their own.
    pub head_rows: usize,
    /// The adapters of a backward.
    pub backward: Option<&'a AdapterBindings>,
    /// Columns of [`Workspace::scaled`].
    pub scaled: usize,
    /// Whether any site has a delta.
    pub deltas: bool,
}

impl Sizes<'_> {
    /// Columns of the output of a layer norm, with room for xa of a delta of the layer after it.
    fn normed(self, deltas: bool) -> usize {
        self.config.width + if deltas { columns_of_xa(self.activations) } else { 0 }
    }
}

impl SharedScratch {
    fn cut(arena: &mut Arena, sizes: Sizes, passes: Passes) -> Result<Self> {
        let Sizes { config, limits, activations } = sizes;
        let (n, rows) = (limits.cells(), passes.head_rows);
        let activated = (n * config.inner * activations.size()).next_multiple_of(ALIGN);
        let wide = n * config.inner.max(Arch::of(config).qkv()) * activations.size();
        let (before, backward) = match passes.backward {
            None => (0, 0),
            Some(bindings) if bindings.reads_input(Site::MlpProj) => (activated, activated + wide),
            Some(_) => (0, wide),
        };
        let logits = rows.min(n.max(1)) * head_loss::stride(config.vocab, activations) * F32.size();
        let mixed = n * config.width * activations.size();
        let bytes = activated.max(backward).max(logits).max(mixed);
        Ok(Self {
            bytes: arena.take("activated, d wide or logits", U8, &[bytes])?,
            activations,
            before,
            logits,
        })
    }

    /// The activated MLP `(n, f)` and whatever follows it.
    pub fn activated(&self) -> View<'_> {
        self.bytes.view().typed(self.activations)
    }

    /// The same, to write.
    pub fn activated_mut(&mut self) -> ViewMut<'_> {
        self.bytes.view_mut().typed(self.activations)
    }

    /// A wide gradient and whatever follows it.
    pub fn wide(&self) -> View<'_> {
        let bytes = self.bytes.view();
        bytes.slice(self.before, bytes.len() - self.before).typed(self.activations)
    }

    /// The same, to write, and the activated MLP, of which nothing is there where no adapter needs it.
    pub fn wide_mut(&mut self) -> (View<'_>, ViewMut<'_>) {
        let (activated, wide) = self.bytes.view_mut().split_at(self.before);
        (activated.into_view().typed(self.activations), wide.typed(self.activations))
    }

    /// The logits of a chunk.
    pub fn logits(&mut self) -> ViewMut<'_> {
        self.bytes.view_mut().slice(0, self.logits).typed(F32)
    }
}

/// Further workspace that only a backward needs.
pub struct BackwardWork {
    /// Gradient of the residual stream `(n, c)`.
    pub grad: Buffer,
    /// Gradient of a half's input or of attention's output `(n, c)`.
    pub narrow: Buffer,
    /// Gradient of `xa`, `(n, r)`.
    pub d_xa: Buffer,
    /// Parts of the gradient of a prefix `(b, 2, p, c)`.
    pub d_prefix: Buffer,
}

impl Workspace {
    /// Cuts the workspace that all passes share.
    ///
    /// # Errors
    /// When the arena is exhausted.
    pub fn cut(arena: &mut Arena, sizes: Sizes, passes: Passes) -> Result<Self> {
        let n = sizes.limits.cells();
        let normed = arena.take("normed", sizes.activations, &[n, sizes.normed(passes.deltas)])?;
        let shared = SharedScratch::cut(arena, sizes, passes)?;
        let scaled = match passes.scaled {
            0 => None,
            columns => Some(arena.take("scaled", sizes.activations, &[n, columns])?),
        };
        Ok(Self { normed, shared, scaled })
    }
}

impl BackwardWork {
    /// Cuts the further workspace of a backward.
    ///
    /// # Errors
    /// When the arena is exhausted.
    pub fn cut(arena: &mut Arena, sizes: Sizes, bindings: &AdapterBindings) -> Result<Self> {
        let Sizes { config, limits, activations } = sizes;
        let (n, c) = (limits.cells(), config.width);
        // It changes places with the output of a layer norm.
        let wide = sizes.normed(bindings.most_ranks() > 0);
        Ok(Self {
            grad: arena.take("d residual", activations, &[n, wide])?,
            narrow: arena.take("d narrow", activations, &[n, c])?,
            d_xa: arena.take("d xa", F32, &[n, bindings.most_ranks().max(bindings.embedding.most_rank())])?,
            d_prefix: arena.take("d prefix", F32, &[limits.rows, 2, bindings.prefix_len(), c])?,
        })
    }
}

/// Workspace of head and loss.
pub struct HeadWork {
    /// Statistics of the last layer norm `(n, 2)`.
    pub stats: Buffer,
    /// Hidden states of a chunk `(chunk, c)`.
    pub gathered: Buffer,
    /// Losses of the supervised rows `(n)`.
    pub losses: Buffer,
}

impl HeadWork {
    /// Cuts workspace for chunks of `rows` rows of logits.
    ///
    /// # Errors
    /// When the arena is exhausted.
    pub fn cut(arena: &mut Arena, sizes: Sizes, rows: usize) -> Result<Self> {
        let (n, config) = (sizes.limits.cells(), sizes.config);
        let chunk = rows.clamp(1, n.max(1));
        Ok(Self {
            stats: arena.take("stats_f", F32, &[n, 2])?,
            gathered: arena.take("gathered", sizes.activations, &[chunk, config.width])?,
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
    /// Indices of the tokens in the order of their ids `(n)`, where a backward comes to the embedding.
    pub by_id: Option<Buffer>,
}

impl Inputs {
    /// Cuts the buffers of the largest micro-batch, with those of a backward to the embedding if `by_id`.
    ///
    /// # Errors
    /// When the arena is exhausted.
    pub fn cut(arena: &mut Arena, limits: Limits, by_id: bool) -> Result<Self> {
        let n = limits.cells();
        Ok(Self {
            ids: arena.take("ids", U32, &[n])?,
            positions: arena.take("positions", U32, &[n])?,
            starts: arena.take("starts", U32, &[n])?,
            rows: arena.take("supervised rows", U32, &[n])?,
            targets: arena.take("targets", I32, &[n])?,
            by_id: if by_id { Some(arena.take("tokens by id", U32, &[n])?) } else { None },
        })
    }
}
