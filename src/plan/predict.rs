//! Predicts times: counted work at the speeds of a machine.
//!
//! Counted are products (2 FLOP a weight and row; weights are widened once a call), attention, the
//! pointwise ops by their bytes, the head by chunks, recomputation, the optimizer, and bytes
//! that are read or written. c width, f inner width, v vocabulary, n rows of activations.

use engraft_adapters::AdapterSet;

use super::{
    BaseBytes, PlannedBase, PlannedDevice,
    calibrate::{Rates, attention_flops},
};
use crate::{
    device::arena::Placement,
    model::{
        Keep, Policy,
        arch::{Arch, Site, SiteShape},
    },
};

/// Writing a page of a file through a mapping costs about this many times reading it.
const WRITING: f64 = 3.0;

/// Forward and backward of a micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct MicroBatch<'a> {
    /// The frozen base that it runs on.
    pub base: PlannedBase<'a>,
    /// The adapter, whose gradient is wanted.
    pub set: &'a AdapterSet,
    /// The device that runs the pass.
    pub device: PlannedDevice,
    /// Sequences b of the pass.
    pub batch: usize,
    /// Tokens t of the longest.
    pub seq_len: usize,
    /// Tokens with a loss, at most b t.
    pub supervised: usize,
    /// Which activations are kept, computed again and moved.
    pub policy: Policy,
}

impl MicroBatch<'_> {
    /// Tokens n = b t.
    fn n(&self) -> usize {
        self.batch * self.seq_len
    }

    /// Tokens that the last block computes after its attention: the supervised ones, unless those are nearly all
    /// (`Block::wanted` in the model).
    fn wanted(&self) -> usize {
        if self.supervised * 8 <= self.n() * 7 { self.supervised } else { self.n() }
    }

    /// Predicted seconds of the pass.
    pub fn seconds(&self, rates: &Rates) -> f64 {
        let layers = self.base.config.layers;
        let lowest = self.lowest();
        let (all, last) = (Block::new(self, self.n(), rates), Block::new(self, self.wanted(), rates));
        let block = |layer: usize| if layer + 1 == layers { &last } else { &all };
        let mut total: f64 = (0..layers).map(|layer| block(layer).forward()).sum();
        total += (lowest..layers).map(|layer| block(layer).backward()).sum::<f64>();
        total +=
            (lowest..layers).map(|layer| block(layer).again(self.policy.recompute.keeps(layer))).sum::<f64>();
        total += self.deltas(rates) + self.head(rates);
        let moved = self.moved(rates);
        if self.device.kind.copies_beside_kernels { total.max(moved) } else { total + moved }
    }

    /// The lowest layer with anything trainable.
    fn lowest(&self) -> usize {
        let layers = self.base.config.layers;
        let AdapterSet { prefix, embedding, prompt, .. } = self.set;
        if prefix.is_some() || embedding.is_some() || prompt.is_some() {
            return 0;
        }
        let deltas = self.set.loras.iter().map(|lora| lora.layer);
        let vectors = self.set.vectors.iter().map(|vectors| vectors.layer);
        let norms = self.set.norms.iter().filter_map(|norm| norm.layer);
        deltas.chain(vectors).chain(norms).min().unwrap_or(layers).min(layers)
    }

    /// Deltas, forward and backward: 2 and 4 FLOP a value and row.
    fn deltas(&self, rates: &Rates) -> f64 {
        let arch = Arch::of(self.base.config);
        let values: usize = self
            .set
            .loras
            .iter()
            .map(|lora| {
                lora.rank * (arch.sites.get(lora.site).map_or(0, |site| site.inputs) + lora.columns.len())
            })
            .sum();
        let embedding = self.set.embedding.as_ref().map_or(0, |delta| delta.rank * self.base.config.width);
        6.0 * ((values + embedding) * self.n()) as f64 / rates.thin
    }

    /// Head and loss, forward and backward, in chunks: the head is widened twice for each.
    fn head(&self, rates: &Rates) -> f64 {
        let (config, n) = (self.base.config, self.supervised);
        let weights = config.vocab * config.width;
        let chunk = self.policy.head_rows.clamp(1, n.max(1));
        let chunks = n.div_ceil(chunk) as f64;
        let both =
            rates.product_backward.seconds(chunk, weights) + rates.product_forward.seconds(chunk, weights);
        // Softmax and its gradient read and write a row of logits about twice.
        let softmax = (n * config.vocab * 16) as f64 / rates.activation.forward;
        chunks * both + softmax
    }

    /// Seconds for bytes of the base and of inputs that come and go; the core that moves them takes its
    /// time from those that compute.
    fn moved(&self, rates: &Rates) -> f64 {
        let PlannedBase { config, dtype } = self.base;
        let threads = self.device.cores.map_or(1.0, |cores| cores.threads.max(1) as f64);
        let parts = BaseBytes::of(config, dtype);
        let streamed = if self.policy.stream { 2 * parts.blocks + parts.embeddings + parts.head } else { 0 };
        let each = (config.layers * self.n() * config.width * self.policy.activations.size()) as f64;
        let inputs = match self.policy.inputs {
            Placement::Disk => each * (1.0 + WRITING),
            Placement::Host => 2.0 * each,
            Placement::Memory => 0.0,
        };
        (streamed as f64 + inputs) / (threads * rates.reading)
    }
}

/// Norm, clipping and AdamW.
#[derive(Debug, Clone, Copy)]
pub struct Update {
    /// Number of values that are trained; frozen ones have no moments and are not updated.
    pub trainables: usize,
    /// Time of an update divided by that of one with FP32 moments.
    pub work: f64,
    /// Bytes of moments per trainable value.
    pub bytes: f64,
    /// Memory that holds the moments.
    pub moments: Placement,
}

impl Update {
    /// Predicted seconds of the update.
    pub fn seconds(&self, rates: &Rates) -> f64 {
        let len = self.trainables as f64;
        let moved = match self.moments {
            Placement::Disk => len * self.bytes * (1.0 + WRITING) / rates.reading,
            // Read and written at the same time, each in its direction.
            Placement::Host => len * self.bytes / rates.reading,
            Placement::Memory => 0.0,
        };
        len * self.work / rates.adamw + moved
    }
}

/// Seconds of the parts of a block: forward, where there are two forward and backward.
struct Block {
    /// The norm before attention.
    first_norm: (f64, f64),
    c_attn: f64,
    attention: (f64, f64),
    attn_proj: f64,
    /// The norm before the MLP.
    second_norm: (f64, f64),
    c_fc: f64,
    mlp_proj: f64,
    activation: (f64, f64),
    /// All frozen products of the backward pass.
    products_backward: f64,
}

impl Block {
    /// A block that computes `after` tokens after its attention.
    fn new(micro_batch: &MicroBatch, after: usize, rates: &Rates) -> Self {
        let (config, n) = (micro_batch.base.config, micro_batch.n());
        let (c, f, arch) = (config.width, config.inner, Arch::of(config));
        let forward = |site: Site, tokens| rates.product_forward.seconds(tokens, arch.site(site).weights());
        let backward = |site: &SiteShape, tokens| rates.product_backward.seconds(tokens, site.weights());
        let t = micro_batch.seq_len;
        let prefix = micro_batch.set.prefix.as_ref().map_or(0, |prefix| prefix.length);
        let pairs = micro_batch.batch * (t * (t + 1) / 2 + t * prefix);
        let (attend, attend_back) = attention_flops(config.heads, config.head_width(), pairs);
        let bytes = |tokens: usize, width: usize, each: usize| (tokens * width * each) as f64;
        let norm = |tokens: usize| {
            (bytes(tokens, c, 8) / rates.layernorm.forward, bytes(tokens, c, 16) / rates.layernorm.backward)
        };
        Self {
            first_norm: norm(n),
            second_norm: norm(after),
            c_attn: forward(Site::CAttn, n),
            attention: (attend / rates.attention.forward, attend_back / rates.attention.backward),
            attn_proj: forward(Site::AttnProj, after),
            c_fc: forward(Site::CFc, after),
            mlp_proj: forward(Site::MlpProj, after),
            activation: (
                bytes(after, f, 8) / rates.activation.forward,
                bytes(after, f, 12) / rates.activation.backward,
            ),
            products_backward: arch
                .sites
                .iter()
                .enumerate()
                .map(|(site, shape)| backward(shape, if site == Site::CAttn as usize { n } else { after }))
                .sum(),
        }
    }

    fn forward(&self) -> f64 {
        self.c_attn
            + self.attention.0
            + self.attn_proj
            + self.mlp()
            + self.activation.0
            + self.mlp_proj
            + self.first_norm.0
    }

    fn mlp(&self) -> f64 {
        self.second_norm.0 + self.c_fc
    }

    /// Includes computing the outputs of norms and activation again.
    fn backward(&self) -> f64 {
        self.products_backward
            + self.attention.1
            + self.first_norm.0
            + self.first_norm.1
            + self.second_norm.0
            + self.second_norm.1
            + self.activation.0
            + self.activation.1
    }

    /// Recomputation in a block that keeps `keep`.
    fn again(&self, keep: Keep) -> f64 {
        match keep {
            Keep::All => 0.0,
            Keep::Attention => self.mlp(),
            Keep::Outputs => self.first_norm.0 + self.c_attn + self.mlp(),
            Keep::Input => {
                self.first_norm.0
                    + self.c_attn
                    + self.attention.0
                    + self.attn_proj
                    + self.mlp()
                    + self.activation.0
            }
        }
    }
}
