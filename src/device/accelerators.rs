//! GPUs that times are predicted for: their published peaks, and the shares of these that our kernels are expected to
//! reach. The peaks are those of NVIDIA's data sheets (SXM modules, dense). **No share was measured**: those of the H100 are
//! an estimate from reading the kernels, made before any GPU had run them, and a first run is held against them.

/// What a kernel's time is limited by, beside its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A product of the library, by the width of the model.
    Product,
    /// Attention on tensor cores, forward.
    AttentionForward,
    /// Attention on tensor cores: gradient of queries.
    AttentionQueries,
    /// Attention on tensor cores: gradients of keys and values.
    AttentionKeys,
    /// Products with a rank on one side, outside of tensor cores.
    Thin,
    /// A pass over activations, one element after another.
    Elementwise,
    /// Products with a rank on one side, on tensor cores.
    Delta,
    /// One pass over activations for products with a rank on one side, on tensor cores, through stages of shared
    /// memory.
    Pass,
    /// A pass over activations by rows, a warp or a block each, without loads in flight between two parts of its work.
    Rows,
    /// A layer norm, a block a row in registers.
    Norm,
    /// Losses and gradients of FP32 logits.
    Logits,
    /// Products of few rows, which read each weight once.
    Weights,
    /// A launch of a layer for one token of each sample.
    Decode,
}

/// A GPU by its data sheet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Accelerator {
    /// Its name.
    pub name: &'static str,
    /// FLOP/s of dense FP16 products with FP32 sums.
    pub tensor_peak: f64,
    /// FLOP/s of FP32 outside of tensor cores.
    pub fp32_peak: f64,
    /// Bytes/s of its memory.
    pub bandwidth: f64,
    /// FLOP/s that large products are taken to reach at best: what shares of a step are of.
    pub ceiling: f64,
    /// Share of `tensor_peak` that products reach at widths of 768, 1024 and 1600.
    products: [f64; 3],
    /// Shares of `tensor_peak` of attention: forward, gradient of queries, gradients of keys and values; counted as 2, 2 and 3
    /// products a visible pair.
    attention: [f64; 3],
    /// Share of the bandwidth of cross-entropy, for the bytes of one read.
    logits: f64,
}

/// The widths of `Accelerator::products`: GPT-2 small, medium and XL.
const WIDTHS: [f64; 3] = [768.0, 1024.0, 1600.0];

/// Seconds between two kernels of a stream: the end of one, its memory flushed, and the start of the next.
pub const GAP: f64 = 2e-6;
/// Most bytes of shared memory of a block on devices of compute capability 9.0 and 10.x: an H100, an H200.
pub const MOST_SHARED: usize = 227 << 10;
/// Seconds that the shortest kernel takes: a chain of dependent loads and one barrier.
pub const SHORTEST: f64 = 1.5e-6;

/// Share of the bandwidth of an elementwise pass.
const ELEMENTWISE: f64 = 0.9;
/// Share of a pass by rows: a warp or a block a row leaves loads in flight unused between two parts of its work.
const ROWS: f64 = 0.57;
/// Share of layer norms. A row is read once, into the registers of one or two warps: 32 rows on a multiprocessor have their
/// loads on the way, and those that add up or store leave the memory to the others. It was 0.57 with a warp a row, which was
/// read two or three times.
const NORM: f64 = 0.8;
/// Share of products of few rows: one 16-byte load in flight a thread.
const WEIGHTS: f64 = 0.5;
/// Share of a layer's launches for one token. Four 16-byte loads in flight a thread ask for nearly all weights at once, so
/// that a launch of 2 to 3 us waits for the way of the first one alone, 0.7 us.
const DECODE: f64 = 0.7;
/// Share of `fp32_peak` of thin products: tiles of 16 ranks where 8 are used, stores with bank conflicts.
const THIN: f64 = 0.125;
/// Share of the bandwidth of a delta's kernels and products. 8192 rows are 256 blocks of 4 warps, two on a multiprocessor,
/// and each step waits for factors of the level-2 cache; the library cuts the gradients of factors into shares.
const DELTA: f64 = 0.6;
/// Share of the bandwidth of a pass for a delta's gradients. Two stages of 17 KB are on their way for each of up to
/// three blocks of a multiprocessor, 34 to 102 KB, where 15 KB hide 600 ns of the memory's latency; and it takes no
/// factor from the level-2 cache between them. It is what layer norms are taken to have, whose loads on the way are no
/// more.
const PASS: f64 = NORM;
/// Share of the speed of products that they have: 8 of 64 columns of a tile are used.
const DELTA_TILES: f64 = 0.125;

impl Accelerator {
    /// A100 80 GB. On its slower tensor cores products reach a larger share, and `mma.sync` is the way to all of them. A row
    /// of logits does not fit into its shared memory: cross-entropy moves 10 bytes a logit for the 6 that are counted.
    pub const A100: Self = Self {
        name: "A100",
        tensor_peak: 312e12,
        fp32_peak: 19.5e12,
        bandwidth: 2.039e12,
        ceiling: 250e12,
        products: [0.70, 0.74, 0.78],
        attention: [0.53, 0.47, 0.38],
        logits: 0.68 * 0.6,
    };

    /// H100 80 GB: 560, 600 and 650 TFLOP/s of products; 210, 194 and 161 of attention. The first two of attention were 172
    /// and 161 with 16 queries a warp, or 742 and 695 operations a cycle of a multiprocessor (132 at 1.755 GHz). 512 bytes of
    /// shared memory, 4 cycles, then fed two products of 4096 operations and feed four now, with 32 queries a warp: 1/4096
    /// of a cycle less for each operation, if none of it was hidden. The gradients of keys and values have 16 a warp as before.
    ///
    /// Of cross-entropy 0.68 was the share of two reads; it stays with one, whose block is the only one of a multiprocessor
    /// and reads nothing while it adds up and writes.
    pub const H100: Self = Self {
        name: "H100",
        tensor_peak: 990e12,
        fp32_peak: 67e12,
        bandwidth: 3.35e12,
        ceiling: 700e12,
        products: [560.0 / 990.0, 600.0 / 990.0, 650.0 / 990.0],
        attention: [210.0 / 990.0, 194.0 / 990.0, 161.0 / 990.0],
        logits: 0.68,
    };

    /// H200: the processor of an H100 with more and faster memory.
    pub const H200: Self = Self { name: "H200", bandwidth: 4.8e12, ..Self::H100 };

    /// All that are predicted.
    pub const ALL: [Self; 3] = [Self::A100, Self::H100, Self::H200];

    /// FLOP/s of products in a model of `width`, straight lines between the widths that are known.
    pub fn product_rate(&self, width: usize) -> f64 {
        let at = (width as f64).clamp(WIDTHS[0], WIDTHS[2]);
        let first = usize::from(at > WIDTHS[1]);
        let part = (at - WIDTHS[first]) / (WIDTHS[first + 1] - WIDTHS[first]);
        let [below, above] = [self.products[first], self.products[first + 1]];
        self.tensor_peak * (below + part * (above - below))
    }

    /// Seconds of one kernel that does `flops` operations on `bytes` of memory in a model of `width`, with the gap after
    /// it: the longer of the two, and no less than [`SHORTEST`].
    pub fn seconds(&self, work: Work, width: usize, bytes: f64, flops: f64) -> f64 {
        let (share, rate) = match work {
            Work::Product => (ELEMENTWISE, self.product_rate(width)),
            Work::AttentionForward => (ELEMENTWISE, self.tensor_peak * self.attention[0]),
            Work::AttentionQueries => (ELEMENTWISE, self.tensor_peak * self.attention[1]),
            Work::AttentionKeys => (ELEMENTWISE, self.tensor_peak * self.attention[2]),
            Work::Thin => (ELEMENTWISE, self.fp32_peak * THIN),
            Work::Delta => (DELTA, self.product_rate(width) * DELTA_TILES),
            Work::Pass => (PASS, self.product_rate(width) * DELTA_TILES),
            Work::Elementwise => (ELEMENTWISE, self.fp32_peak),
            Work::Rows => (ROWS, self.fp32_peak),
            Work::Norm => (NORM, self.fp32_peak),
            Work::Logits => (self.logits, self.fp32_peak),
            Work::Weights => (WEIGHTS, self.fp32_peak),
            Work::Decode => (DECODE, self.fp32_peak),
        };
        (bytes / (share * self.bandwidth)).max(flops / rate).max(SHORTEST) + GAP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_of_products_go_through_the_known_widths() {
        let rates =
            [100, 768, 896, 1024, 1600, 5120].map(|width| Accelerator::H100.product_rate(width) / 1e12);
        let expected = [560.0, 560.0, 580.0, 600.0, 650.0, 650.0];
        for (rate, expected) in rates.into_iter().zip(expected) {
            assert!((rate - expected).abs() < 1e-9, "{rate} {expected}");
        }
    }

    #[test]
    fn a_kernel_takes_the_longer_of_memory_and_arithmetic() {
        let gpu = Accelerator::H100;
        // Nothing to do, 1 GB of elements, and 1 TFLOP of a product on little memory.
        assert_eq!(gpu.seconds(Work::Product, 768, 0.0, 0.0), SHORTEST + GAP);
        assert!((gpu.seconds(Work::Elementwise, 768, 1e9, 1e6) - GAP - 1e9 / (0.9 * 3.35e12)).abs() < 1e-12);
        assert!((gpu.seconds(Work::Product, 768, 1e6, 1e12) - GAP - 1.0 / 560.0).abs() < 1e-12);
    }
}
