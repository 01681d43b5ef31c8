//! How much memory the kernels take beside their buffers. On a CPU: tiles in per-thread scratch, what tasks share, and
//! what `gemm` packs its operands into. A memory plan counts it; runs count what they take and hold it against the plan.

use super::{
    BaseDType, Config,
    arch::{Arch, HEAD, SiteShape},
};
use crate::{
    device::{DType, cpu},
    kernels::{
        adamw,
        adapted_linear::{self, DeltaScratch},
        attention, column_norms, decode_layer, embed, head_loss, layernorm,
        matmul::{
            self, Arithmetic,
            device_scratch::{SMALL_BATCH, product},
        },
    },
};

/// The sizes that scratch depends on.
#[derive(Debug, Clone, Copy)]
pub struct ScratchNeeds<'a> {
    /// Sizes of the base.
    pub config: &'a Config,
    /// Rows n of a micro-batch's activations.
    pub rows: usize,
    /// Sequences b that they are of, at most.
    pub batch: usize,
    /// Longest row of keys, prefix included.
    pub keys: usize,
    /// Largest rank of a delta.
    pub rank: usize,
    /// Largest rank of a delta of the embedding.
    pub embedding_rank: usize,
    /// Whether deltas drop elements of their input.
    pub dropout: bool,
    /// Whether a delta has d or e.
    pub scaled_deltas: bool,
    /// Largest sum of ranks at a site whose output scale is derived from norms; `None` without one.
    pub derived_ranks: Option<usize>,
    /// Whether a layer norm is trained.
    pub trained_norms: bool,
}

/// The types of the factors of products of a device.
#[derive(Debug, Clone, Copy)]
pub struct FactorTypes {
    /// Type of the activations.
    pub activations: DType,
    /// Type that the matrices of the base are kept in.
    pub base: BaseDType,
}

/// Bytes for a pool of `threads`, with what its tasks share in `arithmetic`.
pub fn bytes(needs: ScratchNeeds, threads: usize, arithmetic: Arithmetic) -> usize {
    let widest = Arch::of(needs.config).widest();
    let ops = [
        matmul::scratch(needs.rows),
        attention::scratch(needs.keys, needs.config.head_width()),
        adapted_linear::scratch(DeltaScratch {
            tokens: needs.rows,
            widest,
            rank: needs.rank,
            dropout: needs.dropout,
            vectors: needs.scaled_deltas,
        }),
        needs.derived_ranks.map_or((0, 0), column_norms::scratch),
        embed::scratch(needs.rows, needs.config.width, needs.embedding_rank),
    ];
    let tiles = ops.iter().map(|op| op.0).max().unwrap_or(0);
    let packed = ops.iter().map(|op| op.1).max().unwrap_or(0);
    let shared = 4 * matmul::shared(needs.rows, arithmetic).next_multiple_of(cpu::LINE);
    threads * (4 * (tiles.next_multiple_of(cpu::LINE) + packed) + cpu::slab()) + shared
}

/// Bytes beside those that tasks share for the scales of a matrix of 4-bit codes.
pub fn scales(config: &Config, dtype: BaseDType) -> usize {
    let sites = Arch::of(config).sites;
    let floats = sites.iter().map(|site| matmul::shared_scales(site.inputs, site.outputs)).max();
    if dtype == BaseDType::Nf4 { 4 * floats.unwrap_or(0).next_multiple_of(cpu::LINE) } else { 0 }
}

/// Bytes of scratch of a training step with `trainables` values.
pub fn training(needs: ScratchNeeds, types: FactorTypes, trainables: usize) -> usize {
    let ScratchNeeds { config, rows, batch, keys, rank, derived_ranks, trained_norms, .. } = needs;
    let (heads, head_width) = (config.heads, config.head_width());
    let norms = |ranks| {
        let sites = Arch::of(config).sites;
        let all = sites.iter().map(|site| (site.inputs, site.outputs));
        all.map(|shape| column_norms::device_scratch::norms(shape, ranks)).max().unwrap_or(0)
    };
    let others = [
        derived_ranks.map_or(0, norms),
        if trained_norms { layernorm::device_scratch::parameter_gradients(rows, config.width) } else { 0 },
        adapted_linear::device_scratch::deltas(rows, Arch::of(config).widest(), rank),
        thin_products(needs),
        passes(needs),
        attention::device_scratch::attention_backward(rows, heads),
        // Rows of one token each, after the prefix.
        attention::device_scratch::attention_decode(batch, keys, heads, head_width),
        adamw::device_scratch::norm(trainables),
    ];
    others.into_iter().fold(products(needs, types), usize::max)
}

/// Bytes of all products of up to `needs.rows` rows.
fn products(needs: ScratchNeeds, types: FactorTypes) -> usize {
    let ScratchNeeds { config, rows, .. } = needs;
    let FactorTypes { activations, base } = types;
    let arch = Arch::of(config);
    let sites = arch.sites.iter().map(|site| (base, (site.inputs, site.outputs)));
    // With the rows of zeros that logits have columns for.
    let head = (base.of_matrix(HEAD), (head_loss::stride(config.vocab, activations), config.width));
    // A chunk of the head, or the last micro-batch, may have few rows where others have many.
    let sizes = [rows, rows.min(SMALL_BATCH)];
    let all = sites.chain([head]).flat_map(|(dtype, matrix)| {
        sizes.map(|rows| product(activations, dtype.element_type(), rows, matrix))
    });
    all.max().unwrap_or(0)
}

/// Bytes of scratch of generation: up to `needs.rows` tokens of a prompt at a time, and one token of each of `samples`
/// after up to `needs.keys` less one; `ranks` is the largest sum of the ranks at a site of all samples.
pub fn decoding(needs: ScratchNeeds, types: FactorTypes, samples: usize, ranks: usize) -> usize {
    let (heads, head_width) = (needs.config.heads, needs.config.head_width());
    let attention = attention::device_scratch::attention_decode(samples, needs.keys, heads, head_width);
    let layer = decode_layer::device_scratch::layer(decode_layer::device_scratch::Sizes {
        n: samples,
        width: needs.config.width,
        inner: needs.config.inner,
        heads,
        keys: needs.keys,
        ranks: ranks.min(decode_layer::MOST_RANKS),
    });
    products(needs, types).max(attention).max(thin_products(needs)).max(layer)
}

/// Bytes of the shares of the gradients of fused deltas.
fn passes(needs: ScratchNeeds) -> usize {
    let sites = Arch::of(needs.config).sites;
    let of = |site: &SiteShape| {
        adapted_linear::device_scratch::most_pass(needs.rows, (site.inputs, site.outputs), needs.rank)
    };
    if needs.rank == 0 { 0 } else { sites.iter().map(of).max().unwrap_or(0) }
}

/// Bytes of the shares of `x A^T` and of its gradient, after B times d and e.
fn thin_products(needs: ScratchNeeds) -> usize {
    let ScratchNeeds { config, rows, rank, .. } = needs;
    let scaled = match needs.scaled_deltas {
        true => adapted_linear::device_scratch::scaled_factor(Arch::of(config).widest(), rank),
        false => 0,
    };
    scaled + adapted_linear::device_scratch::most_term_parts(rows, rank)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::builtin::builtin;

    #[test]
    fn a_step_is_planned_for_any_number_of_rows_up_to_its_own() {
        let config = &builtin("gpt2").unwrap().unwrap();
        for rows in [1, 8, 9, 16, 100, 2048] {
            let needs = ScratchNeeds {
                config,
                rows,
                batch: rows,
                keys: 16,
                rank: 1,
                embedding_rank: 0,
                dropout: false,
                scaled_deltas: false,
                derived_ranks: None,
                trained_norms: false,
            };
            for activations in [DType::F16, DType::BF16, DType::F32] {
                for base in [BaseDType::F16, BaseDType::Q8, BaseDType::Nf4] {
                    let planned = training(needs, FactorTypes { activations, base }, 1000);
                    for n in 1..=rows {
                        let kept = base.of_matrix(HEAD).element_type();
                        let head = product(activations, kept, n, (config.vocab, config.width));
                        let site = product(activations, base.element_type(), n, (config.inner, config.width));
                        let most = head.max(site);
                        assert!(
                            most <= planned,
                            "{n} of {rows} rows: {most} bytes where {planned} are planned"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn single_queries_are_planned_for_sequences_not_for_tokens() {
        let config = &builtin("gpt2-xl").unwrap().unwrap();
        let (batch, t, prefix) = (64, 1024, 20);
        let needs = ScratchNeeds {
            config,
            rows: batch * t,
            batch,
            keys: t + prefix,
            rank: 8,
            dropout: false,
            scaled_deltas: false,
            embedding_rank: 0,
            derived_ranks: None,
            trained_norms: false,
        };
        let types = FactorTypes { activations: DType::F16, base: BaseDType::F16 };
        let planned = training(needs, types, 1000);
        // For all 65536 tokens they took 3.3 GiB.
        assert!(planned < 64 << 20, "{planned} bytes");
        // Rows of one token are attended as a decoder does it.
        let one_token = attention::device_scratch::attention_decode(batch, prefix + 1, 25, 64);
        assert!(one_token <= planned, "{one_token} bytes where {planned} are planned");
        let short = ScratchNeeds { rows: batch, keys: prefix + 1, ..needs };
        assert!(one_token <= training(short, types, 1000));
    }
}
