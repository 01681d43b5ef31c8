//! How long an optimizer step will take, from counts of work and the speeds of this machine.
//!
//! Counted are products (2 FLOP a weight and row; weights are widened once a call), attention, the
//! pointwise ops by their bytes, the head by chunks, what is computed again, the optimizer, and bytes
//! that are read or written. c width, f inner width, v vocabulary, n rows of activations.

use super::{
    calibrate::{Rates, attention_flops},
    table::{BaseBytes, Job, Setting, Target},
};
use crate::{device::arena::Place, model::Keep, optim::OptimizerKind};

/// An update of 8-bit states takes this many times that of FP32 ones (docs/BENCHMARKS.md).
const EIGHT_BIT: f64 = 1.35;
/// Writing a page of a file through a mapping costs about this many times reading it.
const WRITING: f64 = 3.0;

/// Seconds of an optimizer step.
pub fn seconds(job: &Job, setting: Setting, rates: &Rates) -> f64 {
    let passes = job.batch.div_ceil(setting.micro_batch.max(1)) as f64;
    passes * micro_batch(job, setting, rates) + update(job, setting, rates)
}

/// Seconds of a micro-batch, forward and backward.
fn micro_batch(job: &Job, setting: Setting, rates: &Rates) -> f64 {
    let config = job.config;
    let n = setting.micro_batch * job.seq_len;
    let lowest = lowest(job);
    let block = Block::new(job, n, setting.micro_batch, rates);
    let mut total = config.layers as f64 * block.forward();
    total += (config.layers - lowest) as f64 * block.backward();
    total +=
        (lowest..config.layers).map(|layer| block.again(setting.policy.recompute.keeps(layer))).sum::<f64>();
    total += deltas(job, n, rates) + head(job, n, setting.policy.head_rows, rates);
    let moved = moved(job, setting, n, rates);
    match job.target {
        Target::Cpu { .. } => total + moved,
        // Copies go on beside the kernels.
        Target::Cuda => total.max(moved),
    }
}

/// The lowest layer with anything trainable.
fn lowest(job: &Job) -> usize {
    let layers = job.config.layers;
    if job.set.prefix.is_some() {
        return 0;
    }
    job.set.loras.iter().map(|lora| lora.layer).min().unwrap_or(layers).min(layers)
}

/// Seconds of the parts of a block, forward.
struct Block {
    c_attn: f64,
    attention: (f64, f64),
    attn_proj: f64,
    c_fc: f64,
    mlp_proj: f64,
    norm: (f64, f64),
    activation: (f64, f64),
    /// All products backward.
    products_backward: f64,
}

impl Block {
    fn new(job: &Job, n: usize, rows: usize, rates: &Rates) -> Self {
        let config = job.config;
        let (c, f) = (config.width, config.inner);
        let forward = |weights: usize| rates.product_forward.seconds(n, weights);
        let t = job.seq_len;
        let prefix = job.set.prefix.as_ref().map_or(0, |prefix| prefix.length);
        let pairs = rows * (t * (t + 1) / 2 + t * prefix);
        let (attend, attend_back) = attention_flops(config.heads, config.head_width(), pairs);
        let bytes = |width: usize, each: usize| (n * width * each) as f64;
        Self {
            c_attn: forward(3 * c * c),
            attention: (attend / rates.attention.forward, attend_back / rates.attention.backward),
            attn_proj: forward(c * c),
            c_fc: forward(c * f),
            mlp_proj: forward(f * c),
            norm: (bytes(c, 8) / rates.layernorm.forward, bytes(c, 16) / rates.layernorm.backward),
            activation: (bytes(f, 8) / rates.activation.forward, bytes(f, 12) / rates.activation.backward),
            products_backward: rates.product_backward.seconds(n, 4 * c * c + 2 * c * f),
        }
    }

    fn forward(&self) -> f64 {
        self.c_attn
            + self.attention.0
            + self.attn_proj
            + self.mlp()
            + self.activation.0
            + self.mlp_proj
            + self.norm.0
    }

    fn mlp(&self) -> f64 {
        self.norm.0 + self.c_fc
    }

    /// With the norms' and the activation's outputs made again.
    fn backward(&self) -> f64 {
        self.products_backward
            + self.attention.1
            + 2.0 * (self.norm.0 + self.norm.1)
            + self.activation.0
            + self.activation.1
    }

    /// What a block that keeps `keep` makes again.
    fn again(&self, keep: Keep) -> f64 {
        match keep {
            Keep::All => 0.0,
            Keep::Attention => self.mlp(),
            Keep::Outputs => self.norm.0 + self.c_attn + self.mlp(),
            Keep::Input => {
                self.norm.0 + self.c_attn + self.attention.0 + self.attn_proj + self.mlp() + self.activation.0
            }
        }
    }
}

/// Deltas, forward and backward: 2 and 4 FLOP a value and row.
fn deltas(job: &Job, n: usize, rates: &Rates) -> f64 {
    let config = job.config;
    let inputs = [config.width, config.width, config.width, config.inner];
    let values: usize = job
        .set
        .loras
        .iter()
        .map(|lora| lora.rank * (inputs.get(lora.site).copied().unwrap_or(0) + lora.columns.len()))
        .sum();
    6.0 * (values * n) as f64 / rates.thin
}

/// Head and loss, forward and backward, in chunks: the head is widened twice for each.
fn head(job: &Job, n: usize, rows: usize, rates: &Rates) -> f64 {
    let weights = job.config.vocab * job.config.width;
    let chunk = rows.clamp(1, n.max(1));
    let chunks = n.div_ceil(chunk) as f64;
    let both = rates.product_backward.seconds(chunk, weights) + rates.product_forward.seconds(chunk, weights);
    // Softmax and its gradient read and write a row of logits about twice.
    let softmax = (n * job.config.vocab * 16) as f64 / rates.activation.forward;
    chunks * both + softmax
}

/// Seconds for bytes of the base and of inputs that come and go; on a CPU the thread that moves them takes its time from
/// those that compute.
fn moved(job: &Job, setting: Setting, n: usize, rates: &Rates) -> f64 {
    let threads = match job.target {
        Target::Cpu { threads, .. } => threads.max(1) as f64,
        Target::Cuda => 1.0,
    };
    let parts = BaseBytes::of(job.config, job.base_dtype);
    let streamed = if setting.policy.stream { 2 * parts.blocks + parts.embeddings + parts.head } else { 0 };
    let each = (job.config.layers * n * job.config.width * setting.policy.activations.size()) as f64;
    let inputs = match setting.policy.inputs {
        Place::Disk => each * (1.0 + WRITING),
        Place::Host => 2.0 * each,
        Place::Memory => 0.0,
    };
    (streamed as f64 + inputs) / (threads * rates.reading)
}

/// Norm, clipping and AdamW.
fn update(job: &Job, setting: Setting, rates: &Rates) -> f64 {
    let len = job.set.layout.len as f64;
    let (work, bytes) = match setting.optimizer {
        OptimizerKind::AdamW => (1.0, 8.0),
        OptimizerKind::AdamW8bit => (EIGHT_BIT, 2.0),
    };
    let moved = match setting.policy.moments {
        Place::Disk => len * bytes * (1.0 + WRITING) / rates.reading,
        // Read and written at the same time, each in its direction.
        Place::Host => len * bytes / rates.reading,
        Place::Memory => 0.0,
    };
    len * work / rates.adamw + moved
}
