//! Bytes a run holds besides its planned buffers.

use crate::{
    kernels::device::{DType, Frozen},
    model::{Linear, Norm, Weights},
};

/// Bytes of the base's tensors, all of which a training step touches.
pub fn base_bytes(weights: &Weights) -> usize {
    let norm = |norm: &Norm| norm.gain.len() + norm.bias.len();
    let linear = |linear: &Linear| linear.weight.len() + linear.bias.len();
    let blocks: usize = weights
        .blocks
        .iter()
        .map(|block| {
            norm(&block.ln_1)
                + linear(&block.c_attn)
                + linear(&block.attn_proj)
                + norm(&block.ln_2)
                + linear(&block.c_fc)
                + linear(&block.mlp_proj)
        })
        .sum();
    let head = weights.head.as_ref().map_or(0, Frozen::len);
    (weights.wte.len() + weights.wpe.len() + blocks + norm(&weights.ln_f) + head) * DType::F16.size()
}
