//! CUDA side of a layer norm and the linear layer after it, whose only delta is fused: the norm makes xa from rows
//! that it has in registers, and the delta is 8 or 16 more terms of the frozen product. Nothing reads or writes y for
//! it.
//!
//! | launch | reads | writes |
//! |---|---|---|
//! | `delta_norm` | x, A, B | `[normed, xa / 16]`, xa, statistics; `16 s B^T` after the rows of W |
//! | product | these, `[W; 16 s B^T]` | `normed W + s xa B^T + b`, perhaps GELU of it |
//! | `delta_pass` | dy, xa, B | shares of d_xa and of dB |
//! | product | dy, W | `dy W^T` |
//! | `delta_norm_pass` | x, shares of d_xa | shares of dA |
//! | `delta_norm_back` | x, `dy W^T`, A, all shares | gradient of x, with that of the delta; dA and dB |
//!
//! The rows after W are scratch from the first launch to the product, which scratch's lock keeps together: they have
//! no state.

use super::{
    AdaptedLinear, NormedBackward, NormedForward, SavedProducts,
    device_scratch::{LINES, MOST_FUSED_RANKS, MOST_NORMED, Pass},
    fused::FusedDelta,
};
use crate::{
    device::{
        DType, View,
        cuda::{Argument, Gpu, Grid, arguments, named},
    },
    kernels::{
        layernorm::Norm,
        matmul::{self, InitialValue, Matrix},
    },
};

/// Rows of a block of the norm's kernels.
const ROWS: usize = 16;

/// Shares of the gradient of a factor, as the kernels take them.
#[derive(Clone, Copy)]
#[repr(C)]
struct Shares {
    from: u64,
    to: u64,
    count: i32,
    columns: i32,
}

/// A layer norm, and the delta of the linear layer after it.
#[derive(Clone, Copy)]
pub struct NormedDelta<'a> {
    fused: FusedDelta<'a>,
    norm: Norm<'a>,
    weight: Matrix<'a>,
}

impl<'a> NormedDelta<'a> {
    /// The delta of `linear`, if it is fused, no vector scales the layer, the norm is the base's, and the weight has
    /// room for more rows.
    pub fn of(
        gpu: &'static Gpu,
        linear: &AdaptedLinear<'a>,
        norm: Norm<'a>,
        dtype: DType,
        n: usize,
    ) -> Option<Self> {
        let fused = FusedDelta::of(gpu, linear, dtype, n)?;
        let (c, weight, vectors) = (fused.inputs, linear.layer.weight, linear.vectors);
        assert_eq!(norm.gain.len(), c, "shapes of a norm and the layer after it");
        let plain = vectors.g.is_empty() && vectors.bias.is_none();
        let frozen = [norm.gain, norm.bias].iter().all(|parameter| parameter.dtype() == DType::F16);
        let has_rows = weight.data.len() >= (c + MOST_FUSED_RANKS) * fused.outputs;
        (plain && frozen && c <= MOST_NORMED && has_rows).then_some(Self { fused, norm, weight })
    }

    /// Threads of a block of the norm's kernels.
    fn threads(self) -> usize {
        32 * self.fused.inputs.div_ceil(LINES.0 * LINES.1)
    }

    /// As [`super::forward_normed`].
    pub fn forward(self, gpu: &'static Gpu, linear: &AdaptedLinear, x: View, to: NormedForward) {
        let Self { fused: FusedDelta { delta, a, b, inputs, outputs, ranks, n }, norm, weight } = self;
        let NormedForward { normed, stats, xa, y, activated } = to;
        let xa = xa.as_view().typed(x.dtype());
        let width = inputs + ranks;
        assert!(x.len() >= n * inputs && y.len() >= n * outputs, "shapes of a normed layer");
        assert!(
            normed.len() >= n * width && stats.len() >= 2 * n && xa.len() >= n * ranks,
            "shapes of a normed layer"
        );
        let rows = weight.data.slice(inputs * outputs, ranks * outputs);
        let wide = Matrix { rows: width, ..weight };
        let start = InitialValue::Bias(linear.layer.bias);
        // Nothing of scratch, but its lock: no other thread's launches come between, which could write the same rows.
        gpu.scratch(0, |_| {
            let [n_, c, out, rank] = [n, inputs, outputs, delta.rank].map(Argument::int);
            let (gain, bias, epsilon) = (norm.gain, norm.bias, norm.epsilon);
            let arguments = arguments![
                x,
                gain,
                bias,
                epsilon,
                &normed,
                &stats,
                a,
                xa,
                b,
                rows,
                n_,
                c,
                out,
                rank,
                delta.scale
            ];
            let threads = self.threads();
            let blocks = n.div_ceil(ROWS) + (ranks * outputs / 8).div_ceil(threads);
            let grid = Grid::row(blocks, threads);
            gpu.launch(&super::cuda::IMAGE, &named("delta_norm", x.dtype()), grid, arguments);
            let input = normed.as_view();
            match activated {
                Some(activated) => matmul::frozen_nn_activated(input, wide, start, y, activated, n),
                None => matmul::frozen_nn(input, wide, start, y, n),
            }
        });
    }

    /// As [`super::backward_normed`].
    pub fn backward(
        self,
        gpu: &'static Gpu,
        (dy, x, stats): (View, View, View),
        saved: SavedProducts,
        to: NormedBackward,
    ) {
        let Self { fused, norm, weight } = self;
        let FusedDelta { delta, a, inputs, outputs, ranks, n, .. } = fused;
        let NormedBackward { grads, d_normed, dx } = to;
        let (mut grads, mut d_normed) = (grads, d_normed);
        let xa = saved.xa.typed(dy.dtype());
        assert!(
            dy.len() >= n * outputs && x.len() >= n * inputs && stats.len() >= 2 * n,
            "shapes of a normed layer"
        );
        assert!(
            xa.len() >= n * ranks && d_normed.len() >= n * inputs && dx.len() >= n * inputs,
            "shapes of a normed layer"
        );
        let (pass, inner) = (Pass::new(n, outputs, ranks), Pass::new(n, inputs, ranks));
        let mut gradient = |is_frozen: bool, at: usize, columns: usize| {
            let to = grads.reborrow().slice(at, columns * delta.rank);
            if is_frozen { 0 } else { to.address() }
        };
        let (db, da) =
            (gradient(delta.b_frozen, delta.b, outputs), gradient(delta.a_frozen, delta.a, inputs));
        gpu.scratch(pass.bytes() + 4 * inner.db(), |parts| {
            let of_b = parts + 4 * pass.d_xa() as u64;
            let of_a = of_b + 4 * pass.db() as u64;
            fused.pass(gpu, pass, (dy, xa), (parts, of_b));
            matmul::frozen_nt(dy, weight, InitialValue::Zero, d_normed.reborrow(), n);
            let [n_, c, rank, groups, rows] =
                [n, inputs, delta.rank, pass.groups, inner.rows].map(Argument::int);
            if !delta.a_frozen {
                let arguments =
                    arguments![x, stats, norm.gain, norm.bias, parts, groups, of_a, n_, c, rank, rows];
                let grid = Grid::of((inner.groups, inner.shares, 1), 128).with_shared(inner.shared());
                gpu.launch(&super::cuda::IMAGE, &named("delta_norm_pass", dy.dtype()), grid, arguments);
            }
            let shares = |from, to, pass: Pass| {
                Argument::structure(Shares {
                    from,
                    to,
                    count: pass.shares as i32,
                    columns: pass.outputs as i32,
                })
            };
            let (b_shares, a_shares) = (shares(of_b, db, pass), shares(of_a, da, inner));
            let gain = norm.gain;
            let arguments = arguments![
                &d_normed,
                x,
                stats,
                gain,
                &dx,
                parts,
                groups,
                a,
                n_,
                c,
                rank,
                delta.scale,
                b_shares,
                a_shares
            ];
            let threads = self.threads();
            let sums = |to: u64, columns: usize| {
                if to == 0 { 0 } else { (columns * delta.rank).div_ceil(threads) }
            };
            let grid = Grid::row(n.div_ceil(ROWS) + sums(db, outputs) + sums(da, inputs), threads);
            gpu.launch(&super::cuda::IMAGE, &named("delta_norm_back", dy.dtype()), grid, arguments);
        });
    }
}
