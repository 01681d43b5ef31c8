//! The hook between backward and update: where gradients of several processes are summed, or a method changes
//! its tensors by their gradients.

use engraft_adapters::Layout;

use crate::{device::ViewMut, error::Result};

/// A step whose gradient is complete and whose values have not changed yet.
pub struct PendingUpdate<'a> {
    /// The flat gradient, F32: that of the mean loss over `supervised` tokens, times `gradient_scale`.
    pub gradient: ViewMut<'a>,
    /// The flat store, F32.
    pub values: ViewMut<'a>,
    /// Tensors and groups of both.
    pub layout: &'a Layout,
    /// Supervised tokens of the step, in this process.
    pub supervised: usize,
    /// Number of the step, from 1. A step whose gradient overflowed is computed again under its number.
    pub step: u64,
    /// Factor by which the gradient is too large: the loss scale.
    pub gradient_scale: f64,
}

/// A step between backward and update. Norm and clipping are computed after it.
///
/// A sum over processes multiplies the gradient by `supervised`, adds it up, and divides it by the sum of all
/// `supervised`.
pub trait BeforeUpdate: Send {
    /// Called once in every step, before the norm is computed.
    ///
    /// # Errors
    /// An error that must end the run; the values are then unchanged.
    fn before_update(&mut self, update: PendingUpdate) -> Result<()>;
}
