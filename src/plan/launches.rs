//! Every kernel and product that a device is given in a training step or for a token, from sizes alone, with the bytes it
//! moves and its operations.
//!
//! It covers adapters that are deltas of linear sites (LoRA), without dropout's or recomputation's extra work. A base of codes
//! is widened before each product (`coded`).
//! The names are those of the kernels without the type at their end; `product` is a call of the library.
//! `benchmarks/launches.py` runs real steps on the driver of `cuda-shim/driver` and holds every kernel and product, in order,
//! against this table: whoever changes what an op launches changes its lines here.
//!
//! Bytes count each operand once: activations and weights have two bytes an element, statistics, ranks and logits four; but
//! ranks of a delta that is fused into a product have two.
//! n tokens of the pass, m of them with a loss, c width, f inner width, r rank, v vocabulary, t tokens of a row.

use engraft_adapters::{AdapterSet, Lora};

use crate::{
    device::accelerators::{Accelerator, Work},
    kernels::{activation::Activation, matmul::device_scratch::SMALL_BATCH},
    model::{
        BaseDType, Config,
        arch::{Arch, SiteShape},
    },
};

use self::deltas::Fused;
use super::calibrate::attention_flops;

mod coded;
mod deltas;
mod head;
mod token;

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
    /// Share of it that is there for an adapter: all of a launch of its own; of others that of their bytes or
    /// operations.
    pub for_adapter: f64,
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
    /// Type that its matrices are kept in.
    pub base: BaseDType,
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
        step.embedding();
        for layer in 0..layers {
            (step.part, step.layer) = (Part::Forward, Some(layer));
            step.block_forward(layer);
        }
        (step.part, step.layer) = (Part::Around, None);
        step.norm("last norm", "layernorm_forward", 4.0);
        step.part = Part::Head;
        step.head(m);
        step.part = Part::Around;
        step.norm("last norm", "layernorm_backward", 8.0);
        step.part = Part::Backward;
        for layer in (lowest..layers).rev() {
            step.layer = Some(layer);
            step.block_backward(layer, layer > lowest);
        }
        (step.part, step.layer) = (Part::Update, None);
        step.update(self.set.layout.len);
        step.launches
    }

    /// The launches of one more token of each sample, in order, where it is the largest logit that is taken.
    pub fn token(&self) -> Vec<Launch> {
        let mut step =
            Step { pass: *self, n: self.batch, part: Part::Around, layer: None, launches: Vec::new() };
        step.embedding();
        step.part = Part::Forward;
        for layer in 0..self.config.layers {
            step.layer = Some(layer);
            step.block_token(layer);
        }
        (step.part, step.layer) = (Part::Head, None);
        step.norm("last norm", "layernorm_forward", 4.0);
        step.choice();
        step.launches
    }
}

/// What a product takes in beside x, W and the bias, or gives out beside y.
#[derive(Clone, Copy, PartialEq)]
enum Beside {
    Nothing,
    /// A residual is added.
    Residual,
    /// The activation of y is written too.
    Activation,
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
        let is_adapter = ["lora", "delta", "sum_parts"].iter().any(|start| kernel.starts_with(start));
        let (op, for_adapter) = (op.to_owned(), f64::from(u8::from(is_adapter)));
        let launch =
            Launch { part, layer, op, kernel, sizes: None, work, bytes, flops, is_adapter, for_adapter };
        self.launches.push(launch);
    }

    /// A pass over activations `(n, c)` of `bytes` an element, by rows.
    fn rows(&mut self, op: &str, kernel: &'static str, bytes: f64) {
        let elements = (self.n * self.pass.config.width) as f64;
        self.add(op, kernel, Work::Rows, bytes * elements, 8.0 * elements);
    }

    /// A layer norm of `(n, c)`, `bytes` an element.
    fn norm(&mut self, op: &str, kernel: &'static str, bytes: f64) {
        let elements = (self.n * self.pass.config.width) as f64;
        self.add(op, kernel, Work::Norm, bytes * elements, 8.0 * elements);
    }

    /// A pass over activations `(n, f)` of `bytes` an element.
    fn inner(&mut self, op: &str, kernel: &'static str, bytes: f64) {
        let elements = (self.n * self.pass.config.inner) as f64;
        self.add(op, kernel, Work::Elementwise, bytes * elements, 20.0 * elements);
    }

    /// A product of `(rows, terms)` and `(terms, columns)`, which moves `bytes` for each element of its result: those that
    /// it writes, and those that it adds to or multiplies with.
    fn product(&mut self, op: &str, sizes: [usize; 3], bytes: f64) {
        let [rows, columns, terms] = sizes;
        let factors = 2.0 * (rows * terms + terms * columns) as f64;
        let moved = factors + bytes * (rows * columns) as f64;
        self.add(op, PRODUCT, Work::Product, moved, flops(rows, columns, terms));
        if let Some(last) = self.launches.last_mut() {
            last.sizes = Some(sizes);
        }
    }

    fn deltas(&self, layer: usize, site: &SiteShape) -> impl Iterator<Item = &'a Lora> + use<'a> {
        let site = site.site as usize;
        self.pass.set.loras.iter().filter(move |lora| lora.layer == layer && lora.site == site)
    }

    /// Whether the MLP's activation and its derivative are parts of the products of a site: of one product with all of W.
    pub(super) fn activates_in_products(&self, site: &SiteShape) -> bool {
        let Config { activation, inner, .. } = *self.pass.config;
        let whole = self.stretches(self.pass.base, site.inputs, site.outputs).len() == 1;
        activation == Activation::GeluTanh && inner.is_multiple_of(8) && self.n > SMALL_BATCH && whole
    }

    /// `y = x W + b [+ residual]`, its deltas, and the activation.
    fn linear(&mut self, layer: usize, site: &SiteShape, beside: Beside) {
        let (n, inputs, outputs) = (self.n, site.inputs, site.outputs);
        let fused = self.fused(layer, site);
        if let Some(Fused { rank, rounded }) = fused {
            let read = 2 * n * inputs + if beside == Beside::Residual { 2 * n * outputs } else { 0 };
            let written = 2 * n * (rounded + outputs);
            let bytes = (read + written + 4 * rank * (inputs + outputs)) as f64;
            let flops = flops(n, rank, inputs + outputs);
            self.add("x A^T and its delta", "delta_start", Work::Delta, bytes, flops);
        }
        let has_deltas = fused.is_none() && self.deltas(layer, site).next().is_some();
        let activates = beside == Beside::Activation;
        let in_product = activates && self.activates_in_products(site) && !has_deltas;
        let mut added = fused.is_some() || beside == Beside::Residual;
        for rows in self.stretches(self.pass.base, inputs, outputs) {
            self.widen(self.pass.base, rows, outputs);
            let bytes = [true, added, in_product].into_iter().filter(|&counts| counts).count();
            self.product(site.label, [n, outputs, rows], 2.0 * bytes as f64);
            added = true;
        }
        if has_deltas {
            self.add_deltas(layer, site);
        }
        if activates && !in_product {
            self.inner("activation", "activation_forward", 4.0);
        }
    }

    /// The way back through a linear: dx where it is wanted, times the derivative of the activation in front of it where
    /// there is one, and the gradients of its deltas.
    fn linear_backward(&mut self, layer: usize, site: &SiteShape, dx: bool, activated: bool) {
        let (n, inputs, outputs) = (self.n, site.inputs, site.outputs);
        let fused = self.fused(layer, site);
        if let Some(Fused { rank, rounded }) = fused {
            let pass = self.delta_pass(site, rank, rounded);
            let (d_xa, db) = (4 * pass.d_xa(), 4 * pass.db());
            let dx = if dx { 2 * n * inputs + 4 * rank * inputs } else { 0 };
            let bytes = d_xa + db + 2 * n * rounded + dx + 8 * rank * outputs;
            let flops = if dx > 0 { flops(n, rank, inputs) } else { 0.0 };
            self.add("d xa A, sums of shares", "delta_spread", Work::Delta, bytes as f64, flops);
        }
        let has_deltas = fused.is_none() && self.deltas(layer, site).next().is_some();
        let in_product = activated && self.activates_in_products(site) && !has_deltas;
        if dx {
            let bytes = [true, fused.is_some(), in_product].into_iter().filter(|&counts| counts).count();
            for rows in self.stretches(self.pass.base, inputs, outputs) {
                self.widen(self.pass.base, rows, outputs);
                self.product(&format!("{} dx", site.label), [n, rows, outputs], 2.0 * bytes as f64);
            }
        }
        if let Some(Fused { rank, .. }) = fused {
            self.factor_gradient("dA", [rank, inputs, n]);
        }
        if has_deltas {
            self.deltas_backward(layer, site, dx);
        }
        if activated && !in_product {
            self.inner("activation dx", "activation_backward", 6.0);
        }
    }

    fn block_forward(&mut self, layer: usize) {
        let arch = Arch::of(self.pass.config);
        let [c_attn, attn_proj, c_fc, mlp_proj] = &arch.sites;
        self.normed_linear(layer, c_attn, Beside::Nothing);
        let (forward, _) = self.attention();
        let (kernel, work) = match self.has_tensor_attention() {
            true => ("attention_forward_mma", Work::AttentionForward),
            false => ("attention_forward", Work::Thin),
        };
        self.add("attention", kernel, work, self.qkv() + self.mixed(), forward);
        self.linear(layer, attn_proj, Beside::Residual);
        self.normed_linear(layer, c_fc, Beside::Activation);
        self.linear(layer, mlp_proj, Beside::Residual);
    }

    fn block_backward(&mut self, layer: usize, input_gradient: bool) {
        let arch = Arch::of(self.pass.config);
        let [c_attn, attn_proj, c_fc, mlp_proj] = &arch.sites;
        if self.deltas(layer, mlp_proj).next().is_some() {
            self.inner("activation again", "activation_forward", 4.0);
        }
        self.linear_backward(layer, mlp_proj, true, true);
        self.normed_linear_backward(layer, c_fc);
        self.linear_backward(layer, attn_proj, true, false);
        self.attention_backward();

        if input_gradient {
            self.normed_linear_backward(layer, c_attn);
        } else if self.deltas(layer, c_attn).next().is_some() {
            self.norm("layer norm again", "layernorm_forward", 4.0);
            self.linear_backward(layer, c_attn, false, false);
        }
    }

    /// Of the five products the scores and dP are computed by both kernels; counted once.
    fn attention_backward(&mut self) {
        let (_, backward) = self.attention();
        let (qkv, mixed) = (self.qkv(), self.mixed());
        let (dq, dkv) = (backward * 2.0 / 5.0, backward * 3.0 / 5.0);
        if self.has_tensor_attention() {
            // It makes delta too, from attention's output.
            self.add("attention dq", "attention_dq_mma", Work::AttentionQueries, qkv + 3.0 * mixed, dq);
            self.add("attention dk dv", "attention_dkv_mma", Work::AttentionKeys, qkv + 3.0 * mixed, dkv);
        } else {
            self.add("attention delta", "attention_delta", Work::Rows, 2.0 * mixed, 0.0);
            self.add("attention dq", "attention_dq", Work::Thin, qkv + 2.0 * mixed, dq);
            self.add("attention dk dv", "attention_dkv", Work::Thin, qkv + 3.0 * mixed, dkv);
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

    fn update(&mut self, trainables: usize) {
        let bytes = 4.0 * trainables as f64;
        self.add("norm", "square_sum_parts", Work::Elementwise, bytes, 2.0 * trainables as f64);
        self.add("norm", "square_sum_finish", Work::Elementwise, 0.0, 0.0);
        for first in (0..trainables).step_by(UPDATED) {
            let count = UPDATED.min(trainables - first) as f64;
            self.add("AdamW", "adamw", Work::Elementwise, 28.0 * count, 20.0 * count);
        }
    }
}

/// Operations of a product.
fn flops(rows: usize, columns: usize, terms: usize) -> f64 {
    2.0 * rows as f64 * columns as f64 * terms as f64
}
