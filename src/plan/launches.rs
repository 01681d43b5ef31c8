//! Every kernel and product that a device is given in a training step or for a token, from sizes alone, with the bytes it
//! moves and its operations.
//!
//! It covers an FP16 base whose adapters are deltas of linear sites (LoRA) without dropout's or recomputation's extra work.
//! The names are those of the kernels without the type at their end; `product` is a call of the library.
//! `benchmarks/launches.py` runs real steps on the driver of `cuda-shim/driver` and holds every kernel and product, in order,
//! against this table: whoever changes what an op launches changes its lines here.
//!
//! Bytes count each operand once: activations and weights have two bytes an element, statistics, ranks and logits four.
//! n tokens of the pass, m of them with a loss, c width, f inner width, r rank, v vocabulary, t tokens of a row.

use engraft_adapters::{AdapterSet, Lora};

use crate::{
    device::accelerators::{Accelerator, Work},
    kernels::{
        adapted_linear::device_scratch::{row_shares, term_shares},
        matmul::device_scratch::{SMALL_BATCH, product_shares},
    },
    model::{
        Config,
        arch::{Arch, SiteShape},
    },
};

use super::calibrate::attention_flops;

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Embedding and last norm, and what a step clears.
    Around,
    /// Blocks, forward.
    Forward,
    /// Head and loss, both directions.
    Head,
    /// Blocks, backward.
    Backward,
    /// Norm of the gradient, clipping, AdamW.
    Update,
}

impl Part {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Around => "around",
            Self::Forward => "forward",
            Self::Head => "head",
            Self::Backward => "backward",
            Self::Update => "update",
        }
    }
}

/// Name of a call of the library.
pub const PRODUCT: &str = "product";

/// One launch, or one product.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The part of the step that it belongs to.
    pub part: Part,
    /// The layer, of a block.
    pub layer: Option<usize>,
    /// What it computes, for a table: `c_attn`, `layer norm`.
    pub op: String,
    /// The kernel's name without its type, or [`PRODUCT`].
    pub kernel: &'static str,
    /// Rows, columns and summed terms of a product.
    pub sizes: Option<[usize; 3]>,
    /// What limits it beside its bytes.
    pub work: Work,
    /// Bytes of memory that it reads and writes.
    pub bytes: f64,
    /// Operations.
    pub flops: f64,
    /// Whether it is there for an adapter.
    pub is_adapter: bool,
}

impl Launch {
    /// Predicted seconds on `gpu` in a model of `width`.
    pub fn seconds(&self, gpu: &Accelerator, width: usize) -> f64 {
        gpu.seconds(self.work, width, self.bytes, self.flops)
    }
}

/// A training step of one micro-batch, or one token of each sample.
#[derive(Debug, Clone, Copy)]
pub struct Pass<'a> {
    /// Sizes of the base.
    pub config: &'a Config,
    /// The adapter.
    pub set: &'a AdapterSet,
    /// Sequences b.
    pub batch: usize,
    /// Tokens t of each in training; keys that a new token sees in decoding.
    pub tokens: usize,
    /// Rows of logits at a time.
    pub head_rows: usize,
}

/// Elements that one update takes: ranges of the flat store.
const UPDATED: usize = 1 << 20;

impl Pass<'_> {
    /// Whether the table covers this adapter: deltas without vectors, at linear sites alone.
    pub fn is_covered(&self) -> bool {
        let AdapterSet { loras, vectors, norms, embedding, prefix, prompt, .. } = self.set;
        let plain = |lora: &Lora| lora.d.is_none() && lora.e.is_none();
        let others = vectors.len() + norms.len();
        let more = [embedding.is_some(), prefix.is_some(), prompt.is_some()];
        !loras.is_empty() && loras.iter().all(plain) && others == 0 && more == [false; 3]
    }

    /// The launches of a training step, in order. Of each row the last token has no loss.
    pub fn training(&self) -> Vec<Launch> {
        let (n, m, layers) = (self.batch * self.tokens, self.batch * (self.tokens - 1), self.config.layers);
        let lowest = self.set.loras.iter().map(|lora| lora.layer).min().unwrap_or(layers);
        let mut step = Step { pass: *self, n, part: Part::Around, layer: None, launches: Vec::new() };
        step.rows("embedding", "embed", 6.0);
        for layer in 0..layers {
            (step.part, step.layer) = (Part::Forward, Some(layer));
            step.block_forward(layer);
        }
        (step.part, step.layer) = (Part::Around, None);
        step.rows("last norm", "layernorm_forward", 4.0);
        step.part = Part::Head;
        step.head(m);
        step.part = Part::Around;
        step.rows("last norm", "layernorm_backward", 8.0);
        step.part = Part::Backward;
        for layer in (lowest..layers).rev() {
            step.layer = Some(layer);
            step.block_backward(layer, layer > lowest);
        }
        (step.part, step.layer) = (Part::Update, None);
        step.update(self.set.layout.len);
        step.launches
    }

    /// The launches of one more token of each sample, in order.
    pub fn token(&self) -> Vec<Launch> {
        let mut step =
            Step { pass: *self, n: self.batch, part: Part::Around, layer: None, launches: Vec::new() };
        step.rows("embedding", "embed", 6.0);
        step.part = Part::Forward;
        for layer in 0..self.config.layers {
            step.layer = Some(layer);
            step.block_token(layer);
        }
        (step.part, step.layer) = (Part::Head, None);
        step.rows("last norm", "layernorm_forward", 4.0);
        step.logits();
        step.launches
    }
}

/// The launches of a pass, as they are listed.
struct Step<'a> {
    pass: Pass<'a>,
    /// Tokens n.
    n: usize,
    part: Part,
    layer: Option<usize>,
    launches: Vec<Launch>,
}

impl<'a> Step<'a> {
    fn add(&mut self, op: &str, kernel: &'static str, work: Work, bytes: f64, flops: f64) {
        let (part, layer) = (self.part, self.layer);
        let is_adapter = kernel.starts_with("lora") || kernel == "sum_parts";
        let op = op.to_owned();
        self.launches.push(Launch { part, layer, op, kernel, sizes: None, work, bytes, flops, is_adapter });
    }

    /// A pass over activations `(n, c)` of `bytes` an element, by rows.
    fn rows(&mut self, op: &str, kernel: &'static str, bytes: f64) {
        let elements = (self.n * self.pass.config.width) as f64;
        self.add(op, kernel, Work::Rows, bytes * elements, 8.0 * elements);
    }

    /// A pass over activations `(n, f)` of `bytes` an element.
    fn inner(&mut self, op: &str, kernel: &'static str, bytes: f64) {
        let elements = (self.n * self.pass.config.inner) as f64;
        self.add(op, kernel, Work::Elementwise, bytes * elements, 20.0 * elements);
    }

    /// A product of `(rows, terms)` and `(terms, columns)`; what is added to it is read too.
    fn product(&mut self, op: &str, [rows, columns, terms]: [usize; 3], result: f64, added: bool) {
        let elements = rows * terms + terms * columns;
        let written = (rows * columns) as f64 * if added { 2.0 * result } else { result };
        self.add(op, PRODUCT, Work::Product, 2.0 * elements as f64 + written, flops(rows, columns, terms));
        if let Some(last) = self.launches.last_mut() {
            last.sizes = Some([rows, columns, terms]);
        }
    }

    fn deltas(&self, layer: usize, site: &SiteShape) -> impl Iterator<Item = &'a Lora> + use<'a> {
        let site = site.site as usize;
        self.pass.set.loras.iter().filter(move |lora| lora.layer == layer && lora.site == site)
    }

    /// A thin product, `rows x columns` over `terms`, whose shares are joined where it has some.
    fn thin(&mut self, op: &str, kernel: &'static str, [rows, columns, terms]: [usize; 3], bytes: f64) {
        let shares = term_shares(rows, terms, columns);
        let result = 4.0 * (rows * columns) as f64;
        let parts = result * shares as f64;
        self.add(op, kernel, Work::Thin, bytes + parts, flops(rows, columns, terms));
        if shares > 1 {
            self.add(op, "lora_join", Work::Elementwise, parts + result, 0.0);
        }
    }

    /// `y = x W + b [+ residual]`, and its deltas.
    fn linear(&mut self, layer: usize, site: &SiteShape, residual: bool) {
        let (n, inputs, outputs) = (self.n, site.inputs, site.outputs);
        self.product(site.label, [n, outputs, inputs], 2.0, residual);
        for delta in self.deltas(layer, site) {
            let (rank, columns) = (delta.rank, delta.columns.len());
            let x = 2.0 * (n * inputs) as f64 + 4.0 * (rank * inputs) as f64;
            self.thin("x A^T", "lora_xa", [n, rank, inputs], x);
            let xa = 4.0 * (n * rank + rank * columns) as f64;
            let y = 4.0 * (n * columns) as f64;
            self.add("+ xa B^T", "lora_add", Work::Thin, xa + y, flops(n, columns, rank));
        }
    }

    /// The way back through a linear: dx where it is wanted, and the gradients of its deltas.
    fn linear_backward(&mut self, layer: usize, site: &SiteShape, dx: bool) {
        let (n, inputs, outputs) = (self.n, site.inputs, site.outputs);
        if dx {
            self.product(&format!("{} dx", site.label), [n, inputs, outputs], 2.0, false);
        }
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

    fn block_forward(&mut self, layer: usize) {
        let arch = Arch::of(self.pass.config);
        let [c_attn, attn_proj, c_fc, mlp_proj] = &arch.sites;
        self.rows("layer norm", "layernorm_forward", 4.0);
        self.linear(layer, c_attn, false);
        let (forward, _) = self.attention();
        let (kernel, work) = match self.has_tensor_attention() {
            true => ("attention_forward_mma", Work::AttentionForward),
            false => ("attention_forward", Work::Thin),
        };
        self.add("attention", kernel, work, self.qkv() + self.mixed(), forward);
        self.linear(layer, attn_proj, true);
        self.rows("layer norm", "layernorm_forward", 4.0);
        self.linear(layer, c_fc, false);
        self.inner("activation", "activation_forward", 4.0);
        self.linear(layer, mlp_proj, true);
    }

    fn block_backward(&mut self, layer: usize, input_gradient: bool) {
        let arch = Arch::of(self.pass.config);
        let [c_attn, attn_proj, c_fc, mlp_proj] = &arch.sites;
        if self.deltas(layer, mlp_proj).next().is_some() {
            self.inner("activation again", "activation_forward", 4.0);
        }
        self.linear_backward(layer, mlp_proj, true);
        self.inner("activation dx", "activation_backward", 6.0);
        if self.deltas(layer, c_fc).next().is_some() {
            self.rows("layer norm again", "layernorm_forward", 4.0);
        }
        self.linear_backward(layer, c_fc, true);
        self.rows("layer norm dx", "layernorm_backward", 8.0);
        self.linear_backward(layer, attn_proj, true);

        let (_, backward) = self.attention();
        let (qkv, mixed) = (self.qkv(), self.mixed());
        self.add("attention delta", "attention_delta", Work::Rows, 2.0 * mixed, 0.0);
        // Of the five products the scores and dP are computed in both; counted once.
        let (dq, dkv) = (backward * 2.0 / 5.0, backward * 3.0 / 5.0);
        let (kernels, work) = match self.has_tensor_attention() {
            true => (["attention_dq_mma", "attention_dkv_mma"], Work::AttentionBackward),
            false => (["attention_dq", "attention_dkv"], Work::Thin),
        };
        self.add("attention dq", kernels[0], work, qkv + 2.0 * mixed, dq);
        self.add("attention dk dv", kernels[1], work, qkv + 3.0 * mixed, dkv);

        if !input_gradient && self.deltas(layer, c_attn).next().is_none() {
            return;
        }
        if self.deltas(layer, c_attn).next().is_some() {
            self.rows("layer norm again", "layernorm_forward", 4.0);
        }
        self.linear_backward(layer, c_attn, input_gradient);
        if input_gradient {
            self.rows("layer norm dx", "layernorm_backward", 8.0);
        }
    }

    /// Whether attention's kernels for tensor cores take heads of this width.
    fn has_tensor_attention(&self) -> bool {
        self.pass.config.head_width() == 64
    }

    /// Bytes of queries, keys and values.
    fn qkv(&self) -> f64 {
        6.0 * (self.n * self.pass.config.width) as f64
    }

    /// Bytes of attention's output.
    fn mixed(&self) -> f64 {
        2.0 * (self.n * self.pass.config.width) as f64
    }

    /// Operations of attention, forward and backward.
    fn attention(&self) -> (f64, f64) {
        let Pass { config, batch, tokens: t, .. } = self.pass;
        attention_flops(config.heads, config.head_width(), batch * (t * (t + 1) / 2))
    }

    /// Logits, losses and the gradient of `m` hidden rows, in chunks.
    fn head(&mut self, m: usize) {
        let Pass { config, head_rows, .. } = self.pass;
        let (c, v) = (config.width, config.vocab);
        for first in (0..m).step_by(head_rows.max(1)) {
            let rows = head_rows.min(m - first);
            let moved = 4.0 * (rows * c) as f64;
            self.add("gather", "gather", Work::Elementwise, moved, 0.0);
            self.product("logits", [rows, v, c], 4.0, false);
            let logits = (rows * v) as f64;
            self.add("cross-entropy", "cross_entropy", Work::Logits, 10.0 * logits, 12.0 * logits);
            self.product("logits dx", [rows, c, v], 2.0, false);
            self.add("scatter", "scatter", Work::Elementwise, moved, 0.0);
        }
    }

    fn update(&mut self, trainables: usize) {
        let bytes = 4.0 * trainables as f64;
        self.add("norm", "square_sum_parts", Work::Elementwise, bytes, 2.0 * trainables as f64);
        self.add("norm", "square_sum_finish", Work::Elementwise, 0.0, 0.0);
        for first in (0..trainables).step_by(UPDATED) {
            let count = UPDATED.min(trainables - first) as f64;
            self.add("AdamW", "adamw", Work::Elementwise, 28.0 * count, 20.0 * count);
        }
    }

    fn block_token(&mut self, layer: usize) {
        let arch = Arch::of(self.pass.config);
        let [c_attn, attn_proj, c_fc, mlp_proj] = &arch.sites;
        let Pass { config, tokens: keys, .. } = self.pass;
        self.rows("layer norm", "layernorm_forward", 4.0);
        self.linear_token(layer, c_attn, false);
        self.rows("append", "attention_append", 8.0);
        let cached = 4.0 * (self.n * keys * config.width) as f64;
        let pairs = self.n * keys;
        let (forward, _) = attention_flops(config.heads, config.head_width(), pairs);
        self.add("attention", "attention_decode", Work::Weights, cached, forward);
        self.rows("attention", "attention_decode_finish", 8.0);
        self.linear_token(layer, attn_proj, true);
        self.rows("layer norm", "layernorm_forward", 4.0);
        self.linear_token(layer, c_fc, false);
        self.inner("activation", "activation_forward", 4.0);
        self.linear_token(layer, mlp_proj, true);
    }

    /// A linear of few rows: one delta's `x A^T` beside the product, its B where the product's shares are added.
    fn linear_token(&mut self, layer: usize, site: &SiteShape, residual: bool) {
        let (n, inputs, outputs) = (self.n, site.inputs, site.outputs);
        if n > SMALL_BATCH {
            return self.linear(layer, site, residual);
        }
        let shares = 4.0 * (product_shares(inputs, outputs) * n * outputs) as f64;
        let weights = 2.0 * (inputs * outputs + n * inputs) as f64;
        let arithmetic = flops(n, outputs, inputs);
        let deltas: Vec<&Lora> = self.deltas(layer, site).collect();
        let [delta] = deltas[..] else {
            self.add(site.label, "gemv_nn", Work::Weights, weights + shares, arithmetic);
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
        self.launches[last..].iter_mut().for_each(|launch| launch.is_adapter = false);
    }

    fn logits(&mut self) {
        let (n, c, v) = (self.n, self.pass.config.width, self.pass.config.vocab);
        if n > SMALL_BATCH {
            return self.product("logits", [n, v, c], 4.0, false);
        }
        let bytes = 2.0 * (v * c) as f64 + 4.0 * (n * v) as f64;
        self.add("logits", "gemv_nt", Work::Weights, bytes, flops(n, v, c));
    }
}

/// Operations of a product.
fn flops(rows: usize, columns: usize, terms: usize) -> f64 {
    2.0 * rows as f64 * columns as f64 * terms as f64
}
