//! The one op that carries all linear adapters: a frozen linear layer, deltas of low rank, and vectors that scale.
//!
//! ```text
//! y = g * ((u * x) W [+ b] + sum of s e * (((drop(x) A^T) * d) B^T)) [+ b] + residual
//! ```
//!
//! `*` is per element. `W (in, out)` is frozen. A delta has `A (r, in)` and `B (columns, r)` (LoRA, Hu et al. 2021), its
//! scale `s`, and vectors `d (r)` and `e (columns)` (VeRA, Kopiczko et al. 2023). A layer has `u (in)` and `g (out)`: IA3
//! (Liu et al. 2022) has b inside g; DoRA (Liu et al. 2024) has it outside, and derives g from trainables. `drop` is
//! inverted dropout: each element is zeroed with probability p or divided by 1 - p. A part that is absent costs nothing.
//!
//! A delta adds to a range of the output columns, for a range of the n tokens; u and g have such ranges too.
//!
//! Factors, vectors and their gradients are ranges of two flat FP32 buffers, so an optimizer sees one vector. Layers may
//! share a range: gradients add. After the trainables, both buffers may continue with what is derived from them, and
//! `values` with what is frozen.

use super::{
    activation,
    layernorm::Norm,
    matmul::{self, InitialValue},
};
use crate::device::{Device, View, ViewMut};

#[cfg(test)]
mod activation_tests;
mod columns;
mod cpu;
#[cfg(feature = "cuda")]
pub(super) mod cuda;
pub mod device_scratch;
#[cfg(feature = "cuda")]
mod fused;
#[cfg(feature = "cuda")]
mod normed;
pub mod reference;
#[cfg(test)]
mod tests;
mod types;

pub use types::{
    AdaptedLinear, BackwardBuffers, BiasPlace, Delta, DeltaScratch, Dropout, ForwardBuffers, Layer,
    NormedBackward, NormedForward, SavedProducts, Scaling, SiteVectors, Vector, xa_len,
};

/// Floats of scratch that a CPU thread uses, and floats that packing takes beside it.
pub fn scratch(needs: DeltaScratch) -> (usize, usize) {
    cpu::scratch(needs)
}

/// Forward of the `n` tokens `x (n, in)`.
///
/// # Panics
/// When a buffer that [`SiteVectors`] asks for is missing.
pub fn forward(linear: AdaptedLinear, x: View, residual: Option<View>, n: usize, to: ForwardBuffers) {
    let ForwardBuffers { xa, mut y, scaled_x, product, activated } = to;
    let (layer, vectors, shape) = (linear.layer, linear.vectors, (n, linear.outputs()));
    assert!(scaled_x.is_some() || !vectors.needs_scaled_x(), "a layer with u needs a buffer for u * x");
    let mut scaled_x = scaled_x;
    let input = match &mut scaled_x {
        Some(to) if vectors.needs_scaled_x() => {
            columns::scale(Some(x), vectors.u, linear.values, to.reborrow(), (n, linear.inputs()));
            to.as_view()
        }
        _ => x,
    };
    if vectors.g.is_empty() && vectors.bias.is_none() {
        let start =
            residual.map_or(InitialValue::Bias(layer.bias), |r| InitialValue::Residual(r, layer.bias));
        let to = ForwardBuffers { activated, ..ForwardBuffers::new(xa, y) };
        return sum(Summands { linear, input, start }, x, to, n);
    }
    // What g multiplies is made where it is kept.
    let trained = vectors.bias.map(|bias| linear.values.slice(bias.at, shape.1));
    let bias = trained.unwrap_or(layer.bias);
    let inside = vectors.bias_place == BiasPlace::Inside;
    let make = |mut z: ViewMut| {
        let in_product = inside && trained.is_none();
        let start = if in_product { InitialValue::Bias(layer.bias) } else { InitialValue::Zero };
        sum(Summands { linear, input, start }, x, ForwardBuffers::new(xa, z.reborrow()), n);
        if inside && !in_product {
            columns::add_bias(z, Some(bias), None, shape);
        }
    };
    match product {
        Some(mut product) => {
            make(product.reborrow());
            columns::scale(Some(product.as_view()), vectors.g, linear.values, y.reborrow(), shape);
        }
        None => {
            make(y.reborrow());
            columns::scale(None, vectors.g, linear.values, y.reborrow(), shape);
        }
    }
    columns::add_bias(y.reborrow(), (!inside).then_some(bias), residual, shape);
    if let Some((f, to)) = activated {
        activation::forward(f, y.as_view(), to);
    }
}

/// What a forward adds the deltas to: `start + input W`.
#[derive(Clone, Copy)]
pub(super) struct Summands<'a> {
    pub(super) linear: AdaptedLinear<'a>,
    /// `u * x`.
    input: View<'a>,
    start: InitialValue<'a>,
}

/// `y = start + input W`, plus the deltas of `x`; and what is activated of it.
fn sum(of: Summands, x: View, to: ForwardBuffers, n: usize) {
    match to.y.device() {
        Device::Cpu => {
            let ForwardBuffers { xa, mut y, activated, .. } = to;
            matmul::frozen_nn(of.input, of.linear.layer.weight, of.start, y.reborrow(), n);
            cpu::add_deltas(&of.linear, x.host(), xa.host(), y.reborrow().host(), n);
            if let Some((f, to)) = activated {
                activation::forward(f, y.as_view(), to);
            }
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(gpu, of, x, to, n),
    }
}

/// What the deltas of `linear` add to `y (n, out)` in [`forward`], without dropout: for tokens whose adapters are not
/// those of their neighbours, after one frozen product of all tokens. `xa` receives `x A^T` of every delta.
pub fn add_deltas(linear: AdaptedLinear, x: View, xa: ViewMut, y: ViewMut, n: usize) {
    match y.device() {
        Device::Cpu => cpu::add_deltas(&linear, x.host(), xa.host(), y.host(), n),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::add_deltas(gpu, &linear, x, xa, y, n),
    }
}

/// The part of [`forward`] that the backward of the deltas needs: `xa` receives `drop(x) A^T` of every delta.
pub fn xa(linear: AdaptedLinear, x: View, xa: ViewMut, n: usize) {
    assert!(
        linear.deltas.iter().all(|delta| !delta.transposed),
        "factors are stored as they are saved in training"
    );
    match x.device() {
        Device::Cpu => cpu::xa(&linear, x.host(), xa.host(), n),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::xa(gpu, &linear, x, xa, n),
    }
}

/// A layer norm of `x (n, in)` and [`forward`] of its output, as one op of a device that fuses the layer's only delta
/// into both; false, with nothing done, elsewhere.
pub fn forward_normed(linear: AdaptedLinear, norm: Norm, x: View, n: usize, to: NormedForward) -> bool {
    match x.device() {
        Device::Cpu => {
            let _ = (linear, norm, n, to);
            false
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            let delta = normed::NormedDelta::of(gpu, &linear, norm, x.dtype(), n);
            delta.map(|delta| delta.forward(gpu, &linear, x, to)).is_some()
        }
    }
}

/// Backward of a layer norm and the layer after it as one op, as [`forward_normed`]: from the gradient `dy (n, out)`
/// of the layer's output, and x and `stats` of the forward.
pub fn backward_normed(
    linear: AdaptedLinear,
    norm: Norm,
    (dy, x, stats): (View, View, View),
    saved: SavedProducts,
    n: usize,
    to: NormedBackward,
) -> bool {
    match x.device() {
        Device::Cpu => {
            let _ = (linear, norm, dy, stats, saved, n, to);
            false
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => {
            let delta = normed::NormedDelta::of(gpu, &linear, norm, x.dtype(), n);
            delta.map(|delta| delta.backward(gpu, (dy, x, stats), saved, to)).is_some()
        }
    }
}

/// Backward of [`forward`]: adds the gradients of all trainables, and writes `dx (n, in)` where it is asked for.
///
/// `x` is the forward's input; only deltas and a trainable u read it.
///
/// # Panics
/// When a buffer that [`SiteVectors`] asks for is missing, or trainable vectors of one side overlap.
pub fn backward(
    linear: AdaptedLinear,
    dy: View,
    x: View,
    saved: SavedProducts,
    n: usize,
    to: BackwardBuffers,
) {
    let BackwardBuffers { mut grads, d_xa, dx, d_product } = to;
    let (vectors, shape) = (linear.vectors, (n, linear.outputs()));
    let (mut dx, mut d_product) = (dx, d_product);
    assert!(
        saved.product.is_some() || !vectors.keeps_product(),
        "the gradient of g needs the product that g scaled"
    );
    if let Some(product) = saved.product
        && vectors.keeps_product()
    {
        columns::gradient(vectors.g, dy, product, grads.reborrow(), shape);
    }
    assert!(d_product.is_some() || !vectors.needs_d_product(), "a layer with g needs a buffer for g * dy");
    let dz = match &mut d_product {
        Some(to) if vectors.needs_d_product() => {
            columns::scale(Some(dy), vectors.g, linear.values, to.reborrow(), shape);
            to.as_view()
        }
        _ => dy,
    };
    if let Some(Vector { at, frozen: false }) = vectors.bias {
        let dy = if vectors.bias_place == BiasPlace::Inside { dz } else { dy };
        columns::sum(dy, grads.reborrow().slice(at, shape.1), n);
    }
    assert!(dx.is_some() || !vectors.needs_dx(), "the gradient of u needs a buffer for dx");
    #[cfg(feature = "cuda")]
    if let Device::Cuda(gpu) = dz.device()
        && let Some(fused) = fused::FusedDelta::of(gpu, &linear, dz.dtype(), n)
    {
        let to = BackwardBuffers { dx, ..BackwardBuffers::new(grads, d_xa, None) };
        return fused.backward(gpu, &linear, (dz, x), saved, to);
    }
    // A derivative comes last: in the product where nothing else is added to dx.
    let mut input_of = saved.input_of;
    if let Some(dx) = &mut dx {
        let shape = (n, linear.inputs());
        let weight = linear.layer.weight;
        match input_of.take_if(|_| linear.deltas.is_empty() && vectors.u.is_empty()) {
            Some(f) => {
                matmul::frozen_nt_derived(dz, weight, InitialValue::Zero, dx.reborrow(), f, n);
            }
            None => matmul::frozen_nt(dz, weight, InitialValue::Zero, dx.reborrow(), n),
        }
        if vectors.needs_dx() {
            columns::gradient(vectors.u, dx.as_view(), x, grads.reborrow(), shape);
        }
        if !vectors.u.is_empty() {
            columns::scale(None, vectors.u, linear.values, dx.reborrow(), shape);
        }
    }
    let to = BackwardBuffers { grads, d_xa, dx: dx.as_mut().map(ViewMut::reborrow), d_product: None };
    match dy.device() {
        _ if linear.deltas.is_empty() => {}
        Device::Cpu => cpu::backward_deltas(&linear, dz.host(), x.host(), saved.xa.host(), to, n),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::backward_deltas(gpu, &linear, (dz, x, saved.xa), to, n),
    }
    if let (Some(dx), Some((f, before))) = (dx, input_of) {
        activation::backward(f, before, dx);
    }
}
