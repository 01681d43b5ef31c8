//! Speeds that predicted times are made of, and the nominal ones of each kind of device.

use serde::{Deserialize, Serialize};

/// Speeds of a device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// `matmul::frozen_nn`: forward of a linear layer.
    pub product_forward: ProductRate,
    /// `matmul::frozen_nt`: backward of a linear layer.
    pub product_backward: ProductRate,
    /// Thin products of a delta, in FLOP/s.
    pub thin: f64,
    /// Attention, in FLOP/s: 2 products of 2 FLOP a pair and element of a head forward, 5 backward.
    pub attention: RatePair,
    /// Logits, `frozen_nt` with a vocabulary of columns, in FLOP/s (2 a weight and row).
    pub head: f64,
    /// Layer norm, in bytes/s read and written: 8 an element forward, 16 backward.
    pub layernorm: RatePair,
    /// GELU, in bytes/s read and written: 8 an element forward, 12 backward.
    pub activation: RatePair,
    /// AdamW, in elements/s.
    pub adamw: f64,
    /// First touch of each page of a mapped file that is in memory, in bytes/s.
    pub reading: f64,
}

/// A speed forward and another backward.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RatePair {
    /// Speed of the forward kernel.
    pub forward: f64,
    /// Speed of the backward kernel.
    pub backward: f64,
}

/// Speed of a frozen product at two numbers of rows. Weights are widened once a call, so few rows are slower.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ProductRate {
    /// The point with few rows.
    pub few: RatePoint,
    /// The point with many rows.
    pub many: RatePoint,
}

/// Speed of a product at one number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RatePoint {
    /// Rows of the activations.
    pub rows: usize,
    /// FLOP/s, 2 a weight and row.
    pub flops: f64,
}

impl RatePoint {
    /// Seconds for one weight and all rows.
    fn weight_seconds(self) -> f64 {
        2.0 * self.rows as f64 / self.flops
    }
}

impl ProductRate {
    /// Seconds of a product of `rows` with a matrix of `weights` elements: a part for widening the matrix and
    /// one that grows with the rows, as the two points tell them.
    pub fn seconds(&self, rows: usize, weights: usize) -> f64 {
        let (few, many) = (self.few.weight_seconds(), self.many.weight_seconds());
        let between = (self.many.rows as f64 - self.few.rows as f64).max(1.0);
        // Noise may turn the line downwards or start it below zero; it then goes through the origin.
        let slope = ((many - few) / between).clamp(0.0, 2.0 / self.many.flops);
        let fixed = (many - slope * self.many.rows as f64).max(0.0);
        (fixed + slope * rows as f64) * weights as f64
    }
}

impl Rates {
    /// Of a server's CPU with AVX-512 and two threads.
    pub const NOMINAL_CPU: Self = Self {
        product_forward: ProductRate {
            few: RatePoint { rows: 128, flops: 1.2e11 },
            many: RatePoint { rows: 1024, flops: 1.5e11 },
        },
        product_backward: ProductRate {
            few: RatePoint { rows: 128, flops: 1.1e11 },
            many: RatePoint { rows: 1024, flops: 1.5e11 },
        },
        thin: 4.5e10,
        attention: RatePair { forward: 4e10, backward: 5e10 },
        head: 1.25e11,
        layernorm: RatePair { forward: 5e9, backward: 5e9 },
        activation: RatePair { forward: 3.5e9, backward: 5e9 },
        adamw: 1.4e9,
        reading: 3e10,
    };

    /// Of a data-centre GPU (H100, 3.35 TB/s) computing in FP16: estimates, not measured. `layernorm` and `activation`
    /// count bytes as if activations were FP32, so a device that stores half of them has twice its bandwidth here.
    pub const NOMINAL_GPU: Self = Self {
        product_forward: ProductRate {
            few: RatePoint { rows: 512, flops: 3e14 },
            many: RatePoint { rows: 8192, flops: 6e14 },
        },
        product_backward: ProductRate {
            few: RatePoint { rows: 512, flops: 3e14 },
            many: RatePoint { rows: 8192, flops: 6e14 },
        },
        thin: 9e12,
        attention: RatePair { forward: 1.7e14, backward: 1.6e14 },
        head: 5e14,
        layernorm: RatePair { forward: 4e12, backward: 4e12 },
        activation: RatePair { forward: 5e12, backward: 5e12 },
        adamw: 5e10,
        reading: 2e10,
    };
}
