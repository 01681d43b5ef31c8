//! The launches of deltas: of their own, and within products and layer norms.

use super::{Beside, Step, flops};
use crate::{
    device::accelerators::Work,
    kernels::{
        adapted_linear::device_scratch::{
            MOST_NORMED, Pass as DeltaPass, fused_rank, row_shares, term_shares,
        },
        matmul::device_scratch::SMALL_BATCH,
    },
    model::{
        BaseDType,
        arch::{Site, SiteShape},
    },
};

/// A delta that is a part of a product: its rank, and the columns of its x A^T.
pub(super) struct Fused {
    pub(super) rank: usize,
    pub(super) rounded: usize,
}

impl Step<'_> {
    /// Has `share` of the last launch be there for an adapter.
    pub(super) fn share(&mut self, share: f64) {
        if let Some(last) = self.launches.last_mut() {
            (last.is_adapter, last.for_adapter) = (false, share);
        }
    }

    /// A layer norm of `(n, c)`, `bytes` an element, which also does what a delta needs, `more` bytes and `flops`.
    pub(super) fn norm_with_delta(
        &mut self,
        op: &str,
        kernel: &'static str,
        bytes: f64,
        (more, flops): (usize, f64),
    ) {
        let elements = (self.n * self.pass.config.width) as f64;
        let all = bytes * elements + more as f64;
        self.add(op, kernel, Work::Norm, all, 8.0 * elements + flops);
        self.share(more as f64 / all);
    }

    /// The gradient `(rows, columns)` of a factor over `terms` tokens, FP32, which is added to: a product of its own.
    pub(super) fn factor_gradient(&mut self, op: &str, sizes: [usize; 3]) {
        self.product(op, sizes, 8.0);
        if let Some(last) = self.launches.last_mut() {
            (last.work, last.is_adapter, last.for_adapter) = (Work::Delta, true, 1.0);
        }
    }

    /// The delta of a site that is a part of its product: the only one, on all columns, of a rank that the kernels
    /// have.
    pub(super) fn fused(&self, layer: usize, site: &SiteShape) -> Option<Fused> {
        let mut deltas = self.deltas(layer, site);
        let (delta, None) = (deltas.next()?, deltas.next()) else { return None };
        let (inputs, outputs) = (site.inputs, site.outputs);
        let fits = inputs.is_multiple_of(8) && outputs.is_multiple_of(8) && self.n > SMALL_BATCH;
        let rounded = fused_rank(delta.rank).filter(|_| fits && delta.columns.len() == outputs)?;
        Some(Fused { rank: delta.rank, rounded })
    }

    /// The same of a site behind a layer norm, which then makes what the delta needs: the norm's kernels hold rows up
    /// to a width, and no rows follow codes.
    pub(super) fn normed(&self, layer: usize, site: &SiteShape) -> Option<Fused> {
        let is_normed = matches!(site.site, Site::CAttn | Site::CFc) && site.inputs <= MOST_NORMED;
        self.fused(layer, site).filter(|_| is_normed && self.pass.base == BaseDType::F16)
    }

    /// A thin product, `rows x columns` over `terms`, whose shares are joined where it has some.
    pub(super) fn thin(
        &mut self,
        op: &str,
        kernel: &'static str,
        [rows, columns, terms]: [usize; 3],
        bytes: f64,
    ) {
        let shares = term_shares(rows, terms, columns);
        let result = 4.0 * (rows * columns) as f64;
        let parts = result * shares as f64;
        self.add(op, kernel, Work::Thin, bytes + parts, flops(rows, columns, terms));
        if shares > 1 {
            self.add(op, "lora_join", Work::Elementwise, parts + result, 0.0);
        }
    }

    /// A layer norm and the site after it.
    pub(super) fn normed_linear(&mut self, layer: usize, site: &SiteShape, beside: Beside) {
        let (n, inputs, outputs) = (self.n, site.inputs, site.outputs);
        let Some(Fused { rank, rounded }) = self.normed(layer, site) else {
            self.norm("layer norm", "layernorm_forward", 4.0);
            return self.linear(layer, site, beside);
        };
        // xa for the backward and for the product, and B as rows of the weight.
        let more = 4 * n * rounded + 4 * rank * (inputs + outputs) + 2 * rounded * outputs;
        let flops = flops(n, rank, inputs);
        self.norm_with_delta("layer norm, x A^T", "delta_norm", 4.0, (more, flops));
        let activates = beside == Beside::Activation;
        let in_product = activates && self.activates_in_products(site);
        self.product(site.label, [n, outputs, inputs + rounded], if in_product { 4.0 } else { 2.0 });
        self.share(rounded as f64 / (inputs + rounded) as f64);
        if activates && !in_product {
            self.inner("activation", "activation_forward", 4.0);
        }
    }

    /// The deltas of a site one by one, after its product.
    pub(super) fn add_deltas(&mut self, layer: usize, site: &SiteShape) {
        let (n, inputs) = (self.n, site.inputs);
        for delta in self.deltas(layer, site) {
            let (rank, columns) = (delta.rank, delta.columns.len());
            let x = 2.0 * (n * inputs) as f64 + 4.0 * (rank * inputs) as f64;
            self.thin("x A^T", "lora_xa", [n, rank, inputs], x);
            let xa = 4.0 * (n * rank + rank * columns) as f64;
            let y = 4.0 * (n * columns) as f64;
            self.add("+ xa B^T", "lora_add", Work::Thin, xa + y, flops(n, columns, rank));
        }
    }

    /// One pass over the gradient of a site's output, for d xa and dB.
    pub(super) fn delta_pass(&mut self, site: &SiteShape, rank: usize, rounded: usize) -> DeltaPass {
        let (n, outputs) = (self.n, site.outputs);
        let pass = DeltaPass::new(n, outputs, rounded);
        let bytes = 2 * n * (outputs + rounded) + 4 * rank * outputs + pass.bytes();
        self.add("d xa and dB", "delta_pass", Work::Pass, bytes as f64, flops(n, 2 * rank, outputs));
        pass
    }

    /// The way back through a site and the layer norm before it.
    pub(super) fn normed_linear_backward(&mut self, layer: usize, site: &SiteShape) {
        let (n, inputs, outputs) = (self.n, site.inputs, site.outputs);
        let Some(Fused { rank, rounded }) = self.normed(layer, site) else {
            if self.deltas(layer, site).next().is_some() {
                self.norm("layer norm again", "layernorm_forward", 4.0);
            }
            self.linear_backward(layer, site, true, false);
            return self.norm("layer norm dx", "layernorm_backward", 8.0);
        };
        let pass = self.delta_pass(site, rank, rounded);
        self.product(&format!("{} dx", site.label), [n, inputs, outputs], 2.0);
        let inner = DeltaPass::new(n, inputs, rounded);
        let (d_xa, of_a, of_b) = (4 * pass.d_xa(), 4 * inner.db(), 4 * pass.db());
        let bytes = 2 * n * inputs + 8 * n + d_xa + of_a;
        self.add("dA", "delta_norm_pass", Work::Pass, bytes as f64, flops(n, rank, inputs));
        // A and d xa, and the sums of both factors' shares.
        let more = d_xa + 4 * rank * inputs + of_a + of_b + 8 * rank * (inputs + outputs);
        let flops = flops(n, rank, inputs);
        self.norm_with_delta("layer norm dx, d xa A", "delta_norm_back", 8.0, (more, flops));
    }

    /// The gradients of the deltas of a site one by one, after its product.
    pub(super) fn deltas_backward(&mut self, layer: usize, site: &SiteShape, dx: bool) {
        let (n, inputs) = (self.n, site.inputs);
        for delta in self.deltas(layer, site) {
            let (rank, columns) = (delta.rank, delta.columns.len());
            let [dy, x] = [columns, inputs].map(|width| 2.0 * (n * width) as f64);
            let thin = 4.0 * (n * rank) as f64;
            let shares = row_shares(n) as f64;
            self.thin("d xa", "lora_d_xa", [n, rank, columns], dy);
            for (op, kernel, input, width) in [("dB", "lora_db", dy, columns), ("dA", "lora_da", x, inputs)] {
                let gradient = 4.0 * (rank * width) as f64;
                self.add(op, kernel, Work::Thin, input + thin + shares * gradient, flops(n, width, rank));
                self.add(op, "sum_parts", Work::Elementwise, (shares + 2.0) * gradient, 0.0);
            }
            if dx {
                self.add("+ d xa A", "lora_dx", Work::Thin, thin + 2.0 * x, flops(n, inputs, rank));
            }
        }
    }
}
