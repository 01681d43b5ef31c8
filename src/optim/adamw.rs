//! AdamW over one flat FP32 store, with clipping by the global norm.

use crate::{
    error::{Error, Result},
    kernels::{
        adamw::{self, Update},
        arena::{Arenas, Place},
        device::{Buffer, DType::F32, View, ViewMut},
    },
};

/// Numbers of AdamW; the defaults are PyTorch's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWOptions {
    /// Decay of the first and second moment.
    pub betas: (f64, f64),
    /// Added to the bias-corrected root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay, of every trainable.
    pub weight_decay: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01 }
    }
}

/// Both moments of a flat store, and how many updates they have seen.
pub struct AdamW {
    options: AdamWOptions,
    first: Buffer,
    second: Buffer,
    step: u64,
}

impl AdamW {
    /// Zero moments for `len` trainables.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    pub fn new(len: usize, options: AdamWOptions, place: Place, arenas: &mut Arenas) -> Result<Self> {
        let (first, second) = arenas.build("moments", place, |arena| {
            Ok((arena.take("first moment", F32, &[len])?, arena.take("second moment", F32, &[len])?))
        })?;
        Ok(Self { options, first, second, step: 0 })
    }

    /// One update of `values`; returns the norm of the gradient before clipping to `clip` (0: no clipping).
    ///
    /// The factor of clipping is `min(1, clip / (norm + 1e-6))`, as in PyTorch's `clip_grad_norm_`.
    ///
    /// # Errors
    /// When the norm is not finite: values and moments are left as they were.
    pub fn update(&mut self, values: ViewMut, gradient: View, lr: f64, clip: f64) -> Result<f64> {
        let norm = adamw::square_sum(gradient).sqrt();
        if !norm.is_finite() {
            return Err(Error::failed(format!(
                "the gradient of step {} is not finite ({norm}); lower --lr or set --clip 1",
                self.step + 1
            )));
        }
        let factor = if clip > 0.0 { (clip / (norm + 1e-6)).min(1.0) } else { 1.0 };
        let AdamWOptions { betas, eps, weight_decay } = self.options;
        let update = Update { step: self.step + 1, lr, betas, epsilon: eps, weight_decay, factor };
        adamw::update(values, gradient, self.first.view_mut(), self.second.view_mut(), update);
        self.step += 1;
        Ok(norm)
    }

    /// Updates made so far.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// First and second moment.
    pub fn moments(&self) -> (Vec<f32>, Vec<f32>) {
        (self.first.view().to_vec(), self.second.view().to_vec())
    }

    /// Goes on from moments saved after `step` updates.
    pub fn restore(&mut self, step: u64, first: &[f32], second: &[f32]) {
        self.first.view_mut().upload(first);
        self.second.view_mut().upload(second);
        self.step = step;
    }
}
