//! CUDA side of a delta that is fused into the frozen product: one launch makes `x A^T` and what the product then adds
//! to, on tensor cores; in the backward one pass over dy makes the shares of d_xa and of dB.
//!
//! | launch | reads | writes |
//! |---|---|---|
//! | `delta_start` | x, A, B, residual | xa, `residual + s xa B^T` in the place of y |
//! | product | x, W, y | `y + x W + b`, perhaps GELU of it |
//! | `delta_pass` | dy, xa, B | shares of d_xa and of dB |
//! | `delta_spread` | the shares, A | d_xa, `s d_xa A` in the place of dx, `dB += s dy^T xa` |
//! | product | dy, W, dx | `dx + dy W^T`, perhaps times the derivative of GELU |
//! | product | d_xa, x | `dA += s d_xa^T x` |
//!
//! xa and d_xa are of the type of the activations, `(n, R)` with R the rank rounded up to 8 or 16.

use super::{
    AdaptedLinear, BackwardBuffers, Delta, ForwardBuffers, SavedProducts, Summands,
    device_scratch::{Pass, fused_rank},
};
use crate::{
    device::{
        DType, View, ViewMut,
        cuda::{Argument, Gpu, Grid, arguments, named},
    },
    kernels::{
        activation::{self, Activation},
        matmul::{self, InitialValue, cuda::GeluProduct, device_scratch::SMALL_BATCH},
    },
};

/// The only delta of a layer, where it is fused into the product.
#[derive(Clone, Copy)]
pub struct FusedDelta<'a> {
    pub(super) delta: &'a Delta,
    pub(super) a: View<'a>,
    pub(super) b: View<'a>,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// The rank rounded up.
    pub(super) ranks: usize,
    pub(super) n: usize,
}

impl<'a> FusedDelta<'a> {
    /// The delta of `linear`, if it is the only one, on all columns and tokens, without vectors of its own or an input that
    /// is scaled or dropped, of a rank that the kernels have, and activations `dtype` and weights are multiplied in
    /// one 16-bit type.
    pub fn of(gpu: &'static Gpu, linear: &AdaptedLinear<'a>, dtype: DType, n: usize) -> Option<Self> {
        let (inputs, outputs) = (linear.inputs(), linear.outputs());
        let [delta] = linear.deltas else { return None };
        let ranks = fused_rank(delta.rank)?;
        let whole =
            delta.columns == (0..outputs) && delta.tokens.as_ref().is_none_or(|tokens| *tokens == (0..n));
        let plain = !delta.scales() && linear.dropout.p == 0.0 && linear.vectors.u.is_empty();
        // Codes are widened to this type.
        let weight = linear.layer.weight;
        let multiplied_in_it = weight.scales.is_some() || weight.data.dtype() == dtype;
        let fits = inputs.is_multiple_of(8) && outputs.is_multiple_of(8) && n > SMALL_BATCH;
        let fuses = gpu.fuses()
            && dtype.size() == 2
            && multiplied_in_it
            && whole
            && plain
            && fits
            && !delta.transposed;
        fuses.then(|| Self {
            delta,
            a: linear.values.slice(delta.a, delta.rank * inputs),
            b: linear.values.slice(delta.b, delta.rank * outputs),
            inputs,
            outputs,
            ranks,
            n,
        })
    }

    /// `xa` and, with `y`, what the product adds to.
    fn start(
        self,
        gpu: &'static Gpu,
        x: View,
        xa: View,
        (residual, bias): (Option<View>, Option<View>),
        y: Option<&ViewMut>,
    ) {
        let Self { delta, a, b, inputs, outputs, n, .. } = self;
        assert!(x.len() >= n * inputs && xa.len() >= n * self.ranks, "shapes of a delta");
        assert!(y.is_none_or(|y| y.len() >= n * outputs), "shapes of a delta");
        let y = y.map_or(Argument::NULL, Argument::from);
        let [n_, inputs, outputs, rank] = [n, inputs, outputs, delta.rank].map(Argument::int);
        let arguments = arguments![x, a, b, xa, residual, bias, y, n_, inputs, outputs, rank, delta.scale];
        let grid = Grid::row(n.div_ceil(32), 128);
        gpu.launch(&super::cuda::IMAGE, &named("delta_start", x.dtype()), grid, arguments);
    }

    /// xa of a forward alone, to the same bits.
    pub fn xa(self, gpu: &'static Gpu, x: View, xa: ViewMut) {
        self.start(gpu, x, xa.as_view().typed(x.dtype()), (None, None), None);
    }

    /// As [`super::cuda::forward`].
    pub fn forward(self, gpu: &'static Gpu, of: Summands, x: View, to: ForwardBuffers) {
        let ForwardBuffers { xa, y, activated, .. } = to;
        let (n, weight, dtype) = (self.n, of.linear.layer.weight, x.dtype());
        let (residual, bias) = match of.start {
            InitialValue::Zero => (None, None),
            InitialValue::Keep => (Some(y.as_view()), None),
            InitialValue::Bias(bias) => (None, Some(bias)),
            InitialValue::Residual(residual, bias) => (Some(residual), Some(bias)),
        };
        // The product has a bias of its own type alone.
        let (in_product, before) = if dtype == DType::F16 { (bias, None) } else { (None, bias) };
        let xa = xa.as_view().typed(dtype);
        if let Some((Activation::GeluTanh, to)) = &activated
            && let Some(product) = GeluProduct::new(gpu, of.input, weight, in_product, (&y, to), n)
        {
            self.start(gpu, x, xa, (residual, before), Some(to));
            return product.add(gpu, in_product);
        }
        self.start(gpu, x, xa, (residual, before), Some(&y));
        let mut y = y;
        matmul::cuda::add_frozen_nn(gpu, of.input, weight, in_product, y.reborrow(), n);
        if let Some((f, to)) = activated {
            activation::forward(f, y.as_view(), to);
        }
    }

    /// Shares of d_xa and dB in device memory at `d_xa` and `db`.
    pub(super) fn pass(self, gpu: &'static Gpu, pass: Pass, (dy, xa): (View, View), (d_xa, db): (u64, u64)) {
        let Self { delta, b, outputs, n, .. } = self;
        let [n, outputs, rank, rows] = [n, outputs, delta.rank, pass.rows].map(Argument::int);
        let grid = Grid::of((pass.groups, pass.shares, 1), 128).with_shared(pass.shared());
        let arguments = arguments![dy, xa, b, d_xa, db, n, outputs, rank, rows];
        gpu.launch(&super::cuda::IMAGE, &named("delta_pass", dy.dtype()), grid, arguments);
    }

    /// Backward of the frozen product and of the delta: `dy (n, out)` is the gradient of what g multiplies.
    pub fn backward(
        self,
        gpu: &'static Gpu,
        linear: &AdaptedLinear,
        (dy, x): (View, View),
        saved: SavedProducts,
        to: BackwardBuffers,
    ) {
        let Self { delta, a, inputs, outputs, ranks, n, .. } = self;
        let BackwardBuffers { mut grads, d_xa, dx, .. } = to;
        let (xa, d_xa) = (saved.xa.typed(dy.dtype()), d_xa.as_view().typed(dy.dtype()));
        assert!(
            dy.len() >= n * outputs && d_xa.len() >= n * ranks && xa.len() >= n * ranks,
            "shapes of a delta"
        );
        assert!(dx.as_ref().is_none_or(|dx| dx.len() >= n * inputs), "shapes of a delta");
        let pass = Pass::new(n, outputs, ranks);
        let db = (!delta.b_frozen).then(|| grads.reborrow().slice(delta.b, outputs * delta.rank));
        let db = db.as_ref();
        gpu.scratch(pass.bytes(), |parts| {
            let shares = parts + 4 * pass.d_xa() as u64;
            self.pass(gpu, pass, (dy, xa), (parts, shares));
            let [n_, inputs_, outputs_, rank] = [n, inputs, outputs, delta.rank].map(Argument::int);
            let [groups, count] = [pass.groups, pass.shares].map(Argument::int);
            let [place, gradient] = [dx.as_ref(), db].map(|to| to.map_or(Argument::NULL, Argument::from));
            let arguments = arguments![
                parts,
                groups,
                a,
                d_xa,
                place,
                n_,
                inputs_,
                rank,
                delta.scale,
                shares,
                count,
                outputs_,
                gradient
            ];
            let sums = if delta.b_frozen { 0 } else { (outputs * delta.rank).div_ceil(128) };
            let grid = Grid::row(n.div_ceil(32) + sums, 128);
            gpu.launch(&super::cuda::IMAGE, &named("delta_spread", dy.dtype()), grid, arguments);
        });
        if let Some(dx) = dx {
            let weight = linear.layer.weight;
            match saved.input_of {
                Some(f) => matmul::frozen_nt_derived(dy, weight, InitialValue::Keep, dx, f, n),
                None => matmul::frozen_nt(dy, weight, InitialValue::Keep, dx, n),
            }
        }
        if !delta.a_frozen {
            let to = grads.slice(delta.a, delta.rank * inputs);
            let shape = (n, delta.rank, inputs);
            matmul::cuda::add_transposed_product(gpu, (d_xa, ranks), (x, inputs), delta.scale, to, shape);
        }
    }
}
