//! The predicted time of a step and of a token on GPUs that need not be here: the launches of
//! [`launches`](super::launches), each at the speeds of an [`Accelerator`].
//!
//! Assumed: one stream, so that times add up; the published peaks and the shares of them in `device/accelerators.rs`; a gap
//! after each launch; the base and all buffers in the device's memory; no time of the host but the gaps, no padding. Sums are
//! per micro-batch, with the update of the step.

use super::launches::{Launch, PRODUCT, Part, Pass};
use crate::{device::accelerators::Accelerator, model::Config};

/// Launches of one op in one part of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Op {
    /// The part.
    pub part: Part,
    /// The op's name.
    pub name: String,
    /// Kernel, or [`PRODUCT`] with its sizes.
    pub kernel: String,
    /// Number of launches.
    pub launches: usize,
    /// Bytes of all of them.
    pub bytes: f64,
    /// Operations of all of them.
    pub flops: f64,
    /// Predicted seconds of all of them, by [`Accelerator::ALL`].
    pub seconds: [f64; GPUS],
    /// Whether they are there for an adapter.
    pub is_adapter: bool,
    /// Seconds of them that are there for an adapter, by [`Accelerator::ALL`].
    pub adapter_seconds: [f64; GPUS],
}

/// Number of GPUs that are predicted.
pub const GPUS: usize = Accelerator::ALL.len();

/// Sums of a step or a token on one GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Predicted {
    /// Seconds of all launches with their gaps.
    pub seconds: f64,
    /// Tokens/s.
    pub tokens_per_s: f64,
    /// Share of the GPU's ceiling that the useful operations are.
    pub share: f64,
    /// Share of the seconds that adapters take.
    pub adapters: f64,
}

/// The predicted time of a training step or of a token.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceTime {
    /// Ops in the order of their first launch.
    pub ops: Vec<Op>,
    /// Sums, by [`Accelerator::ALL`].
    pub gpus: [Predicted; GPUS],
    /// Every launch in order: a kernel without its type, or a product with its sizes.
    pub order: Vec<String>,
    /// Most launches of a layer forward, and backward.
    pub by_layer: (usize, usize),
}

impl DeviceTime {
    /// Of a training step.
    pub fn of_training(pass: Pass) -> Self {
        let Pass { config, batch, tokens, .. } = pass;
        Self::of(pass, pass.training(), batch * tokens, step_flops(config, tokens))
    }

    /// Of one more token of each sample.
    pub fn of_token(pass: Pass) -> Self {
        let weights = parameters(pass.config) as f64;
        Self::of(pass, pass.token(), pass.batch, 2.0 * weights)
    }

    fn of(pass: Pass, launches: Vec<Launch>, tokens: usize, flops: f64) -> Self {
        let width = pass.config.width;
        let most = |part| {
            let of = |layer| {
                launches.iter().filter(|launch| (launch.part, launch.layer) == (part, Some(layer))).count()
            };
            (0..pass.config.layers).map(of).max().unwrap_or(0)
        };
        let by_layer = (most(Part::Forward), most(Part::Backward));
        let (mut ops, mut order): (Vec<Op>, Vec<String>) = (Vec::new(), Vec::new());
        for launch in &launches {
            let kernel = match launch.sizes {
                Some([rows, columns, terms]) => format!("{PRODUCT} {rows} x {columns} x {terms}"),
                None => launch.kernel.to_owned(),
            };
            order.push(kernel.clone());
            let same = |op: &&mut Op| (op.part, &op.name, &op.kernel) == (launch.part, &launch.op, &kernel);
            let seconds = Accelerator::ALL.each_ref().map(|gpu| launch.seconds(gpu, width));
            let adapter = seconds.map(|seconds| launch.for_adapter * seconds);
            match ops.iter_mut().find(same) {
                Some(op) => {
                    op.launches += 1;
                    op.bytes += launch.bytes;
                    op.flops += launch.flops;
                    op.seconds.iter_mut().zip(seconds).for_each(|(sum, seconds)| *sum += seconds);
                    op.adapter_seconds.iter_mut().zip(adapter).for_each(|(sum, seconds)| *sum += seconds);
                }
                None => ops.push(Op {
                    part: launch.part,
                    name: launch.op.clone(),
                    kernel,
                    launches: 1,
                    bytes: launch.bytes,
                    flops: launch.flops,
                    seconds,
                    is_adapter: launch.is_adapter,
                    adapter_seconds: adapter,
                }),
            }
        }
        let gpus = std::array::from_fn(|at| {
            // An empty sum of floats is -0.
            let sum = |of: fn(&Op) -> &[f64; GPUS]| ops.iter().fold(0.0, |sum, op| sum + of(op)[at]);
            let seconds: f64 = sum(|op| &op.seconds);
            Predicted {
                seconds,
                tokens_per_s: tokens as f64 / seconds,
                share: flops * tokens as f64 / seconds / Accelerator::ALL[at].ceiling,
                adapters: sum(|op| &op.adapter_seconds) / seconds,
            }
        });
        Self { ops, gpus, order, by_layer }
    }
}

/// Weights of the products of a pass: blocks and head.
fn parameters(config: &Config) -> usize {
    let Config { layers, width, inner, vocab, .. } = *config;
    layers * (4 * width * width + 2 * width * inner) + vocab * width
}

/// Useful operations of a training step for each token: 4 a weight, forward and back through frozen weights, and 7 products
/// of attention a visible pair.
fn step_flops(config: &Config, tokens: usize) -> f64 {
    4.0 * parameters(config) as f64 + 7.0 * (config.layers * config.width * (tokens + 1)) as f64
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use engraft_adapters::{AdapterSet, LoraSpec, Targets};

    use super::*;
    use crate::{
        kernels::activation::Activation,
        model::{BaseDType, builtin},
    };

    fn config(size: &str) -> Config {
        builtin::builtin(size).unwrap().unwrap()
    }

    fn set(config: &Config, rank: usize, targets: &str) -> AdapterSet {
        let targets = targets.parse::<Targets>().unwrap_or_else(|never| match never {});
        let spec = LoraSpec { rank, targets, ..LoraSpec::default() };
        AdapterSet::new(&spec.into(), &config.describe("base", None)).unwrap()
    }

    fn step(size: &str) -> DeviceTime {
        let config = config(size);
        let set = set(&config, 8, "c_attn");
        let pass = Pass {
            config: &config,
            base: BaseDType::F16,
            set: &set,
            batch: 8,
            tokens: 1024,
            head_rows: 4096,
        };
        assert!(pass.is_covered());
        DeviceTime::of_training(pass)
    }

    /// What docs/BENCHMARKS.md has. Names, order and sizes of launches are held by benchmarks/launches.py; this holds bytes,
    /// operations and shares. A layer norm of each layer is 1% of a step, and half of that is the range.
    #[test]
    fn steps_take_what_the_documents_say() {
        assert_eq!(Accelerator::ALL[1].name, "H100");
        for (size, milliseconds) in [("gpt2", 12.74), ("gpt2-medium", 31.81), ("gpt2-xl", 114.0)] {
            let found = 1e3 * step(size).gpus[1].seconds;
            assert!((found / milliseconds - 1.0).abs() < 0.005, "{size}: {found} ms");
        }
    }

    #[test]
    fn launches_of_layers_and_tokens_are_few() {
        let (config, step) = (config("gpt2-medium"), step("gpt2-medium"));
        assert_eq!(step.by_layer, (7, 10));
        // delta_pass and delta_norm_pass; of the lowest layer delta_pass, delta_spread and dA.
        let of_adapter = |op: &&Op| op.is_adapter;
        assert_eq!(step.ops.iter().filter(of_adapter).map(|op| op.launches).sum::<usize>(), 23 * 2 + 3);
        let set = set(&config, 16, "all-linear");
        let token =
            Pass { config: &config, base: BaseDType::F16, set: &set, batch: 1, tokens: 128, head_rows: 4096 };
        assert_eq!(DeviceTime::of_token(token).order.len(), 24 * 5 + 4);
        // More rows than the five launches take.
        let rows = DeviceTime::of_token(Pass { batch: 9, ..token });
        assert!(rows.order.iter().any(|kernel| kernel == "attention_decode"), "{:?}", rows.order);
    }

    #[test]
    fn codes_are_widened_once_a_product_and_read_as_they_are_by_few_rows() {
        let config = config("gpt2-medium");
        let set = set(&config, 8, "c_attn");
        let of = |base| Pass { config: &config, base, set: &set, batch: 8, tokens: 1024, head_rows: 4096 };
        let count = |order: &[String], kernel: &str| order.iter().filter(|name| *name == kernel).count();
        let launches = |base| DeviceTime::of_training(of(base)).order;
        let (plain, four, eight) =
            (launches(BaseDType::F16), launches(BaseDType::Nf4), launches(BaseDType::Q8));
        // The lowest layer's c_attn has no input gradient.
        assert_eq!(count(&four, "nf4_widen"), 24 * 8 - 1);
        // No rows follow codes: but for the lowest layer, a layer norm and its delta take one launch more forward and two more
        // backward; the lowest one has the first alone.
        assert_eq!(four.len(), plain.len() + (24 * 8 - 1) + 24 + 23 * 2);
        // The head of 50304 rows, in two stretches: twice in each of two chunks.
        assert_eq!(count(&eight, "q8_widen"), 24 * 8 - 1 + 2 * 2 * 2);
        let token = |base| DeviceTime::of_token(Pass { batch: 1, tokens: 128, ..of(base) });
        // Op by op: nine launches of a layer without products, two a product, two of c_attn's delta.
        let (halves, codes) = (token(BaseDType::F16), token(BaseDType::Nf4));
        assert_eq!((halves.order.len(), codes.order.len()), (24 * 5 + 4, 24 * (6 + 8 + 2) + 4));
        assert_eq!(count(&codes.order, "nf4_gemv_nn"), 24 * 4);
        let weights = |time: &DeviceTime, kernel: &str| -> f64 {
            time.ops.iter().filter(|op| op.kernel == kernel).map(|op| op.bytes).sum()
        };
        // 4.13 bits a weight, inputs, and shares of sums.
        let bytes = weights(&codes, "nf4_gemv_nn") / (24.0 * 12.0 * 1024.0 * 1024.0);
        assert!((0.51..0.56).contains(&bytes), "{bytes} bytes a weight");
    }

    #[test]
    fn a_delta_or_an_activation_that_no_product_has_is_a_launch() {
        let text =
            r#"{"model_type":"gpt2","n_layer":2,"n_embd":24,"n_head":3,"n_positions":40,"vocab_size":61}"#;
        let gelu = Config::from_json(text, Path::new("odd")).unwrap();
        let relu = Config { activation: Activation::Relu, ..gelu.clone() };
        let kernels = |config: &Config, rank: usize| {
            let set = set(config, rank, "all-linear");
            DeviceTime::of_training(Pass {
                config,
                base: BaseDType::F16,
                set: &set,
                batch: 2,
                tokens: 8,
                head_rows: 8,
            })
            .order
        };
        let has = |order: &[String], kernel: &str| order.iter().any(|name| name == kernel);
        for rank in [3, 4, 16, 17] {
            let (order, is_fused) = (kernels(&gelu, rank), (4..=16).contains(&rank));
            for kernel in ["delta_start", "delta_norm", "delta_pass", "delta_norm_back", "delta_norm_pass"] {
                assert_eq!(has(&order, kernel), is_fused, "{kernel}, rank {rank}");
            }
            for kernel in ["lora_xa", "lora_dx", "sum_parts", "activation_backward"] {
                assert_eq!(has(&order, kernel), !is_fused, "{kernel}, rank {rank}");
            }
        }
        assert!(has(&kernels(&relu, 8), "activation_backward"));
    }

    #[test]
    fn a_faster_memory_is_never_slower() {
        let step = step("gpt2");
        assert!(step.ops.iter().all(|op| op.seconds[2] <= op.seconds[1]));
        assert!(step.gpus[2].seconds < step.gpus[1].seconds && step.gpus[1].seconds < step.gpus[0].seconds);
    }

    #[test]
    fn products_are_four_operations_a_weight_and_token() {
        let step = step("gpt2");
        let is_base = |op: &&Op| op.kernel.starts_with(PRODUCT) && !op.is_adapter;
        let products: f64 = step.ops.iter().filter(is_base).map(|op| op.flops).sum();
        // Less what the lowest layer's c_attn and the last token of each row save; the head has rows up to a multiple of 64.
        let (c, v, n, m) = (768.0, 50304.0, 8192.0, 8.0 * 1023.0);
        let base = 4.0 * 12.0 * 12.0 * c * c * n + 4.0 * v * c * m - 2.0 * 3.0 * c * c * n;
        // The delta is 8 more terms of each c_attn.
        let expected = base + 12.0 * 2.0 * 8.0 * 3.0 * c * n;
        assert!((products / expected - 1.0).abs() < 1e-12, "{products} {expected}");
    }

    #[test]
    fn what_the_table_does_not_cover_is_told() {
        let text =
            r#"{"model_type":"gpt2","n_layer":2,"n_embd":24,"n_head":3,"n_positions":40,"vocab_size":61}"#;
        let config = Config::from_json(text, Path::new("odd")).unwrap();
        let covered = |set: &AdapterSet| {
            Pass { config: &config, base: BaseDType::F16, set, batch: 1, tokens: 8, head_rows: 8 }
                .is_covered()
        };
        let mut set = set(&config, 2, "c_attn");
        assert!(covered(&set));
        set.loras[0].d = Some(0);
        assert!(!covered(&set));
        set.loras.clear();
        assert!(!covered(&set));
    }
}
