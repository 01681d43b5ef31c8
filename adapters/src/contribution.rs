//! What the methods of a set add to a model, as data: a model binds it to its own layers.
//!
//! A linear site of a layer computes, for input x, frozen weight W `[inputs, outputs]` and bias b,
//!
//! `y = g * ((u * x) W [+ b] + sum over deltas of s e * (((drop(x) A^T) * d) B^T)) [+ b] + residual`
//!
//! where u, d, e and g are vectors that may be absent, and b stands inside or outside g.
//! All `usize` fields named after a tensor are indices into [`Layout::tensors`](crate::Layout::tensors);
//! several fields may name the same tensor.

use std::ops::Range;

use crate::{Error, Result};

/// All that one method, or a set of methods, adds to a model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Contribution {
    /// Low-rank deltas, ordered by layer, site, part.
    pub loras: Vec<Lora>,
    /// Vectors of linear sites, ordered by layer and site; at most one entry a site.
    pub vectors: Vec<SiteVectors>,
    /// Vectors of layer norms, ordered by layer and norm, the one before the head last; at most one entry a norm.
    pub norms: Vec<NormVectors>,
    /// A low-rank delta on the token embedding.
    pub embedding: Option<EmbeddingDelta>,
    /// Learned keys and values.
    pub prefix: Option<Prefix>,
    /// Learned embeddings in front of the tokens.
    pub prompt: Option<Prompt>,
    /// How ranks of deltas are allocated in training.
    pub allocation: Option<RankAllocation>,
}

/// A low-rank delta on a module, or on a part of its output columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Lora {
    /// Layer of the base, from 0.
    pub layer: usize,
    /// Index into [`BaseDescription::sites`](crate::BaseDescription::sites).
    pub site: usize,
    /// Name of the part, `None` for the whole module.
    pub part: Option<String>,
    /// Output columns it adds to.
    pub columns: Range<usize>,
    /// Rank r, the rows of A.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Scale s of the delta.
    pub scale: f32,
    /// A, [rank, inputs].
    pub a: usize,
    /// B, [columns.len(), rank], or more rows than that, of which it reads the first.
    pub b: usize,
    /// d `[rank]`: multiplies `x A^T`.
    pub d: Option<usize>,
    /// e `[columns.len()]`: multiplies what the delta adds.
    pub e: Option<usize>,
}

/// How training allocates a budget of ranks among deltas, and keeps their factors orthogonal (AdaLoRA, Zhang et al. 2023,
/// arXiv:2303.10512).
///
/// A triplet is an element of d with its row of A and its column of B. The loss gets `penalty` times the mean over all A
/// and B of `||P P^T - I||_F`, with P = A and P = B^T. After update t, counted from 0, the elements of d of the triplets
/// that are least important become 0. Of n triplets `budget + (n - budget) (1 - (t - tinit) / (steps - tfinal - tinit))^3`
/// are kept, rounded down; from update `steps - tfinal` on they stay the same.
#[derive(Debug, Clone, PartialEq)]
pub struct RankAllocation {
    /// The deltas, in the order of the set.
    pub triplets: Vec<Triplets>,
    /// Modules that were chosen, also those of which no rank is left: the mean is over two tensors of each.
    pub modules: usize,
    /// Sum of the ranks that are left in the end.
    pub budget: usize,
    /// First steps, in which all are left.
    pub tinit: u64,
    /// Last steps, in which the same ones are left.
    pub tfinal: u64,
    /// Steps between two allocations.
    pub every: u64,
    /// Decay of the means of importance and of its uncertainty.
    pub betas: (f64, f64),
    /// Weight of the penalty.
    pub penalty: f64,
    /// Steps of the whole training; 0 where nothing is trained.
    pub steps: u64,
}

/// The tensors of a delta whose ranks are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Triplets {
    /// A, [rank, inputs].
    pub a: usize,
    /// B, [outputs, rank].
    pub b: usize,
    /// d, `rank` values.
    pub d: usize,
}

/// Vectors of one linear site that act on the whole module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SiteVectors {
    /// Layer of the base, from 0.
    pub layer: usize,
    /// Index into [`BaseDescription::sites`](crate::BaseDescription::sites).
    pub site: usize,
    /// u `[inputs]`: multiplies the input of the frozen product.
    pub u: Option<usize>,
    /// g: multiplies the output.
    pub g: Option<OutputScale>,
    /// b `[outputs]`, in place of the base's.
    pub bias: Option<usize>,
}

/// The output scale g `[outputs]` of a linear site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutputScale {
    /// The learned vector `[outputs]`.
    pub vector: usize,
    /// Whether g is the vector over the norms of the columns of `W + sum of s A^T diag(d) B^T diag(e)`, derived once
    /// a step and not differentiated, or the vector itself. A column of norm 0 then has g = 0.
    pub over_norms: bool,
    /// Whether g multiplies the bias too.
    pub with_bias: bool,
}

/// Vectors of one layer norm, which computes `gain * (x - mean) / deviation + bias`. A vector that
/// is given replaces the base's, whose values it starts from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NormVectors {
    /// Layer of the base, `None` for the norm before the head.
    pub layer: Option<usize>,
    /// Which norm of the layer, in the order in which a token meets them.
    pub norm: usize,
    /// Gain `[width]`, in place of the base's.
    pub gain: Option<usize>,
    /// Bias `[width]`, in place of the base's.
    pub bias: Option<usize>,
}

/// A low-rank delta on the token embedding: row t of the table gets `scale * (B A)` column t added.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingDelta {
    /// Rank r, the rows of A.
    pub rank: usize,
    /// Scale s of the delta.
    pub scale: f32,
    /// A, [rank, vocab].
    pub a: usize,
    /// B, [width, rank].
    pub b: usize,
}

/// Learned keys and values in front of every sequence; each takes a position of the base.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix {
    /// Length p, in virtual tokens.
    pub length: usize,
    /// How the values come about.
    pub values: PrefixValues,
}

/// What is learned of a prefix; each tensor is an index into the layout. d width, L layers.
///
/// Viewed as [P, 2L, heads, d / heads], index 2l is the key and 2l + 1 the value of layer l.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PrefixValues {
    /// The keys and values themselves.
    Direct {
        /// [P, 2Ld].
        values: usize,
    },
    /// `tanh(embedding in_weight^T + in_bias) out_weight^T + out_bias`, [P, 2Ld].
    Projected {
        /// Width of the hidden layer.
        hidden: usize,
        /// [P, d].
        embedding: usize,
        /// [hidden, d].
        in_weight: usize,
        /// `[hidden]`.
        in_bias: usize,
        /// [2Ld, hidden].
        out_weight: usize,
        /// `[2Ld]`.
        out_bias: usize,
    },
}

/// Learned embeddings in front of the tokens' own; they take positions as tokens do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Length p, in virtual tokens.
    pub length: usize,
    /// [P, width].
    pub embeddings: usize,
}

impl Contribution {
    /// Adds what another method contributes.
    ///
    /// # Errors
    /// [`Error::Conflict`] where both set the same thing and a model has room for one.
    pub(crate) fn extend(&mut self, other: Self) -> Result<()> {
        self.loras.extend(other.loras);
        for vectors in other.vectors {
            self.add_vectors(vectors)?;
        }
        for vectors in other.norms {
            self.add_norm(vectors)?;
        }
        one(&mut self.embedding, other.embedding, "the delta on the embedding")?;
        one(&mut self.prefix, other.prefix, "the prefix")?;
        one(&mut self.prompt, other.prompt, "the prompt")?;
        one(&mut self.allocation, other.allocation, "the allocation of ranks")
    }

    fn add_vectors(&mut self, new: SiteVectors) -> Result<()> {
        let place = (new.layer, new.site);
        let Some(known) = self.vectors.iter_mut().find(|known| (known.layer, known.site) == place) else {
            let at = self.vectors.partition_point(|known| (known.layer, known.site) < place);
            self.vectors.insert(at, new);
            return Ok(());
        };
        one(&mut known.u, new.u, "the input scale of a module")?;
        one(&mut known.g, new.g, "the output scale of a module")?;
        one(&mut known.bias, new.bias, "the bias of a module")
    }

    fn add_norm(&mut self, new: NormVectors) -> Result<()> {
        // The norm before the head has no layer and comes last.
        let place = |vectors: &NormVectors| (vectors.layer.unwrap_or(usize::MAX), vectors.norm);
        let Some(known) = self.norms.iter_mut().find(|known| place(known) == place(&new)) else {
            let at = self.norms.partition_point(|known| place(known) < place(&new));
            self.norms.insert(at, new);
            return Ok(());
        };
        one(&mut known.gain, new.gain, "the gain of a layer norm")?;
        one(&mut known.bias, new.bias, "the bias of a layer norm")
    }
}

fn one<T>(own: &mut Option<T>, new: Option<T>, what: &'static str) -> Result<()> {
    if own.is_some() && new.is_some() {
        return Err(Error::Conflict { what });
    }
    *own = own.take().or(new);
    Ok(())
}
