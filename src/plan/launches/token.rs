//! The launches of one more token of each sample.

use engraft_adapters::Lora;

use super::{Beside, Pass, Step, flops};
use crate::{
    device::accelerators::Work,
    kernels::{
        decode_layer::{MOST_DELTAS, MOST_RANKS, device_scratch::shares as decode_shares},
        matmul::device_scratch::{SMALL_BATCH, shares_of},
    },
    model::{
        BaseDType,
        arch::{Arch, SiteShape},
    },
    plan::calibrate::attention_flops,
};

impl Step<'_> {
    /// A layer for one token of each sample: five launches, or op by op where these do not take its deltas or weights.
    pub(super) fn block_token(&mut self, layer: usize) {
        let arch = Arch::of(self.pass.config);
        let is_covered = |site: &SiteShape| {
            let ranks: Vec<usize> = self.deltas(layer, site).map(|delta| delta.rank).collect();
            ranks.len() <= MOST_DELTAS
                && ranks.iter().sum::<usize>() <= MOST_RANKS
                && site.outputs.is_multiple_of(8)
        };
        let is_coded = self.pass.base != BaseDType::F16;
        if is_coded || self.n > SMALL_BATCH || !arch.sites.iter().all(is_covered) {
            return self.block_token_by_ops(layer);
        }
        let [c_attn, attn_proj, c_fc, mlp_proj] = &arch.sites;
        let kernels = match self.n {
            1 => ["decode_norm_product_row", "decode_add_row", "decode_add_activated_row"],
            _ => ["decode_norm_product", "decode_add", "decode_add_activated"],
        };
        // What a launch leaves for the next one, which adds it up.
        let n = self.n;
        let open = |site: &SiteShape| 4.0 * (decode_shares(site.inputs) * n * site.outputs) as f64;
        let (open_qkv, open_inner) = (open(c_attn), open(c_fc));
        self.decode_product(layer, c_attn, kernels[0], open_qkv);
        let (forward, cached) = self.cached();
        let new = 6.0 * (self.n * self.pass.config.width) as f64;
        self.add("attention", "decode_attend", Work::Decode, open_qkv + cached + new, forward);
        self.decode_product(layer, attn_proj, kernels[1], 2.0 * open(attn_proj));
        self.decode_product(layer, c_fc, kernels[0], open_inner);
        self.decode_product(layer, mlp_proj, kernels[2], open_inner + 2.0 * open(mlp_proj));
    }

    /// A product of a few rows with its deltas, which moves `more` bytes than weights, input and factors.
    fn decode_product(&mut self, layer: usize, site: &SiteShape, kernel: &'static str, more: f64) {
        let (n, inputs, outputs) = (self.n, site.inputs, site.outputs);
        let mut bytes = 2.0 * (inputs * outputs + n * inputs) as f64 + more;
        let mut operations = flops(n, outputs, inputs);
        for delta in self.deltas(layer, site) {
            let width = inputs + delta.columns.len();
            bytes += 4.0 * (delta.rank * width) as f64;
            operations += flops(n, delta.rank, width);
        }
        self.add(site.label, kernel, Work::Decode, bytes, operations);
    }

    /// Operations of attention of one token of each sample, and the bytes of the keys and values that it sees.
    fn cached(&self) -> (f64, f64) {
        let Pass { config, tokens: keys, .. } = self.pass;
        let pairs = self.n * keys;
        let (forward, _) = attention_flops(config.heads, config.head_width(), pairs);
        (forward, 4.0 * (pairs * config.width) as f64)
    }

    fn block_token_by_ops(&mut self, layer: usize) {
        let arch = Arch::of(self.pass.config);
        let [c_attn, attn_proj, c_fc, mlp_proj] = &arch.sites;
        self.normed_linear_token(layer, c_attn, Beside::Nothing);
        self.rows("append", "attention_append", 8.0);
        let (forward, cached) = self.cached();
        self.add("attention", "attention_decode", Work::Weights, cached, forward);
        self.rows("attention", "attention_decode_finish", 8.0);
        self.linear_token(layer, attn_proj, Beside::Residual);
        self.normed_linear_token(layer, c_fc, Beside::Activation);
        self.linear_token(layer, mlp_proj, Beside::Residual);
    }

    /// A layer norm and a linear.
    fn normed_linear_token(&mut self, layer: usize, site: &SiteShape, beside: Beside) {
        if self.n > SMALL_BATCH {
            return self.normed_linear(layer, site, beside);
        }
        self.norm("layer norm", "layernorm_forward", 4.0);
        self.linear_token(layer, site, beside);
    }

    /// A linear of few rows: one delta's `x A^T` beside the product, its B where the product's shares are added.
    fn linear_token(&mut self, layer: usize, site: &SiteShape, beside: Beside) {
        if self.n > SMALL_BATCH {
            return self.linear(layer, site, beside);
        }
        self.small_batch(layer, site);
        if beside == Beside::Activation {
            self.inner("activation", "activation_forward", 4.0);
        }
    }

    fn small_batch(&mut self, layer: usize, site: &SiteShape) {
        let (n, inputs, outputs) = (self.n, site.inputs, site.outputs);
        let base = self.pass.base;
        let shares = 4.0 * (shares_of(base.element_type(), inputs, outputs) * n * outputs) as f64;
        let weights = base.matrix_bytes(inputs, outputs) as f64 + 2.0 * (n * inputs) as f64;
        let arithmetic = flops(n, outputs, inputs);
        let deltas: Vec<&Lora> = self.deltas(layer, site).collect();
        // A delta beside the product is for FP16 weights.
        let ([delta], BaseDType::F16) = (&deltas[..], base) else {
            let kernel = match base {
                BaseDType::F16 => "gemv_nn",
                BaseDType::Q8 => "q8_gemv_nn",
                BaseDType::Nf4 => "nf4_gemv_nn",
            };
            self.add(site.label, kernel, Work::Weights, weights + shares, arithmetic);
            self.add(site.label, "gemv_nn_finish", Work::Elementwise, shares, 0.0);
            for delta in deltas {
                let (rank, columns) = (delta.rank, delta.columns.len());
                let a = 4.0 * (rank * inputs) as f64;
                self.add("x A^T", "lora_xa_small_batch", Work::Weights, a, flops(n, rank, inputs));
                let b = 4.0 * (rank * columns) as f64;
                self.add("+ xa B^T", "lora_add", Work::Weights, b, flops(n, columns, rank));
            }
            return;
        };
        let (rank, columns) = (delta.rank, delta.columns.len());
        let [a, b] = [inputs, columns].map(|width| 4.0 * (rank * width) as f64);
        let thin = flops(n, rank, inputs + columns);
        self.add(site.label, "lora_small_batch", Work::Weights, weights + shares + a, arithmetic + thin);
        self.add(site.label, "lora_small_batch_finish", Work::Elementwise, shares + b, 0.0);
        // Both are there without the delta too.
        let last = self.launches.len() - 2;
        self.launches[last..].iter_mut().for_each(|launch| {
            (launch.is_adapter, launch.for_adapter) = (false, 0.0);
        });
    }

    /// Logits, and the largest of each sample.
    pub(super) fn choice(&mut self) {
        let (n, v) = (self.n, self.pass.config.vocab);
        self.logits(n, v);
        self.add("choice", "argmax", Work::Rows, 4.0 * (n * v) as f64, 0.0);
    }
}
