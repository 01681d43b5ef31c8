//! CUDA side: tiled thin products; sums over tokens go through shares that are added in order.

use super::device_scratch::{deltas as parts_of, row_shares, scaled_factor, term_parts, term_shares};
use super::{
    AdaptedLinear, BackwardBuffers, Delta, Dropout, ForwardBuffers, Summands, Vector, columns::Block,
    fused::FusedDelta,
};
use crate::{
    device::{
        DType, View, ViewMut,
        cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
    },
    kernels::{
        activation,
        matmul::{
            self,
            cuda::operands,
            device_scratch::{SMALL_BATCH, product_shares},
        },
    },
};

pub(super) static IMAGE: Image = image!("adapted_linear");

/// A [`Dropout`] as the kernels take it, the delta's masks mixed into its key.
#[derive(Clone, Copy)]
#[repr(C)]
struct Dropped {
    key: u64,
    p: f32,
    first_row: i32,
    seq_len: i32,
    stride: i32,
}

/// A delta with its values, for its own n tokens.
#[derive(Clone, Copy)]
struct Part<'a> {
    gpu: &'static Gpu,
    delta: &'a Delta,
    values: View<'a>,
    dropout: Dropout,
    /// Its first token of all.
    first: usize,
    n: usize,
    inputs: usize,
    outputs: usize,
    /// Where its part of xa begins.
    xa: usize,
}

impl<'a> Part<'a> {
    fn a(&self) -> View<'a> {
        self.values.slice(self.delta.a, self.delta.rank * self.inputs)
    }

    fn b(&self) -> View<'a> {
        self.values.slice(self.delta.b, self.delta.rank * self.delta.columns.len())
    }

    fn d(&self) -> Option<View<'a>> {
        self.delta.d.map(|d| self.values.slice(d.at, self.delta.rank))
    }

    fn e(&self) -> Option<View<'a>> {
        self.delta.e.map(|e| self.values.slice(e.at, self.delta.columns.len()))
    }

    /// Hands out `e * B * d`, or B itself where neither is present, and `more` bytes of scratch.
    fn with_b(&self, more: usize, work: impl FnOnce(Argument, u64)) {
        let (columns, rank) = (self.delta.columns.len(), self.delta.rank);
        let scaled = if self.delta.scales() { scaled_factor(columns, rank) } else { 0 };
        if scaled + more == 0 {
            return work(Argument::from(self.b()), 0);
        }
        self.gpu.scratch(scaled + more, |to| {
            if scaled == 0 {
                return work(Argument::from(self.b()), to);
            }
            let [columns_, rank_] = [columns, rank].map(Argument::int);
            let arguments = arguments![self.b(), self.d(), self.e(), to, columns_, rank_];
            let grid = Grid::row((columns * rank).div_ceil(256), 256);
            self.gpu.launch(&IMAGE, "lora_scaled_b", grid, arguments);
            work(Argument::from(to), to + scaled as u64);
        });
    }

    /// A thin product `to (n, r)` over `terms`, made by `product(result, shares)` as one or as shares in `parts`, which are
    /// added in order.
    fn join(&self, terms: usize, to: &ViewMut, parts: u64, product: impl FnOnce(Argument, usize)) {
        let shares = term_shares(self.n, terms, self.delta.rank);
        if shares == 1 {
            return product(Argument::from(to), 1);
        }
        product(Argument::from(parts), shares);
        let count = self.xa_len();
        let arguments = arguments![parts, Argument::int(shares), to, Argument::long(count)];
        self.gpu.launch(&IMAGE, "lora_join", Grid::row(count.div_ceil(256), 256), arguments);
    }

    /// This delta's tokens of activations with rows of `width`.
    fn tokens<'v>(&self, view: View<'v>, width: usize) -> View<'v> {
        view.slice(self.first * width, self.n * width)
    }

    fn tokens_mut<'v>(&self, view: ViewMut<'v>, width: usize) -> ViewMut<'v> {
        view.slice(self.first * width, self.n * width)
    }

    /// Elements of its part of xa.
    fn xa_len(&self) -> usize {
        self.n * self.delta.rank
    }

    fn dropped(&self) -> Argument {
        Argument::structure(Dropped {
            key: self.dropout.key_of(self.delta.mask_id()),
            p: self.dropout.p,
            first_row: self.dropout.first_row as i32,
            seq_len: self.dropout.seq_len.max(1) as i32,
            stride: self.dropout.stride as i32,
        })
    }
}

fn parts<'a>(gpu: &'static Gpu, linear: &AdaptedLinear<'a>, n: usize) -> impl Iterator<Item = Part<'a>> {
    let (inputs, outputs, values, dropout) =
        (linear.inputs(), linear.outputs(), linear.values, linear.dropout);
    let mut xa = 0;
    let all = linear.deltas.iter().map(move |delta| {
        let tokens = delta.tokens_of(n);
        let (first, n) = (tokens.start, tokens.len());
        let part =
            Part { gpu, delta, values, dropout: dropout.starting_at(first), first, n, inputs, outputs, xa };
        xa += part.xa_len();
        part
    });
    all.filter(|part| part.xa_len() > 0)
}

pub(super) fn forward(gpu: &'static Gpu, of: Summands, x: View, to: ForwardBuffers, n: usize) {
    let ForwardBuffers { xa, mut y, activated, .. } = to;
    let (linear, weight) = (&of.linear, of.linear.layer.weight);
    if let Some(fused) = FusedDelta::of(gpu, linear, x.dtype(), n) {
        return fused.forward(gpu, of, x, ForwardBuffers { activated, ..ForwardBuffers::new(xa, y) });
    }
    let activated = match activated {
        Some((f, to)) if linear.deltas.is_empty() => {
            return matmul::frozen_nn_activated(of.input, weight, of.start, y, (f, to), n);
        }
        activated => activated,
    };
    if let ([delta], 1..=SMALL_BATCH, true) = (linear.deltas, n, linear.vectors.u.is_empty())
        && delta.tokens.is_none()
        && !delta.scales()
        // Codes are read by kernels of their own.
        && weight.scales.is_none()
        && let Some(part) = parts(gpu, linear, n).next()
    {
        small_batch(part, of, x, xa, y.reborrow());
    } else {
        matmul::frozen_nn(of.input, weight, of.start, y.reborrow(), n);
        add_deltas(gpu, linear, x, xa, y.reborrow(), n);
    }
    if let Some((f, to)) = activated {
        activation::forward(f, y.as_view(), to);
    }
}

pub fn add_deltas(gpu: &'static Gpu, linear: &AdaptedLinear, x: View, xa: ViewMut, y: ViewMut, n: usize) {
    let (mut xa, mut y) = (xa, y);
    for part in parts(gpu, linear, n) {
        let xa = xa.reborrow().slice(part.xa, part.xa_len());
        thin(part, x, &xa);
        add_delta(part, &xa, y.reborrow());
    }
}

/// Few tokens and one delta, as most adapters have at a site: xa beside the frozen product, B where its shares are
/// added. Two launches where there would be four, and each is launch-bound.
fn small_batch(part: Part, to: Summands, x: View, xa: ViewMut, y: ViewMut) {
    let Part { gpu, delta, n, inputs, outputs, .. } = part;
    let (rank, weight) = (delta.rank, to.linear.layer.weight);
    assert!(x.len() >= n * inputs && y.len() >= n * outputs && xa.len() >= n * rank, "shapes of a delta");
    matmul::cuda::check_type(weight, y.dtype());
    let (residual, bias) = operands(to.start, &y);
    let splits = product_shares(inputs, outputs);
    gpu.scratch(4 * splits * n * outputs, |parts| {
        let [n_, rows, cols, rank_] = [n, inputs, outputs, rank].map(Argument::int);
        let arguments =
            arguments![x, weight.data, parts, n_, rows, cols, part.a(), part.dropped(), &xa, rank_];
        let blocks = outputs.div_ceil(32) + (n * rank).div_ceil(8);
        let kernel = named("lora_small_batch", y.dtype());
        gpu.launch(&IMAGE, &kernel, Grid::of((blocks, splits, 1), 256), arguments);
        let splits = Argument::int(splits);
        let [first, columns] = [delta.columns.start, delta.columns.len()].map(Argument::int);
        let arguments = arguments![
            parts,
            splits,
            residual,
            bias,
            &y,
            n_,
            cols,
            &xa,
            part.b(),
            delta.scale,
            first,
            columns,
            rank_
        ];
        let grid = Grid::row((n * outputs).div_ceil(256), 256);
        gpu.launch(&IMAGE, &named("lora_small_batch_finish", y.dtype()), grid, arguments);
    });
}

/// `y[:, columns] += scale * e * ((xa * d) B^T)`.
fn add_delta(part: Part, xa: &ViewMut, y: ViewMut) {
    let Part { gpu, delta, n, outputs, .. } = part;
    let (columns, y) = (delta.columns.len(), part.tokens_mut(y, outputs));
    part.with_b(0, |b, _| {
        let sizes = [n, outputs, delta.columns.start, columns, delta.rank].map(Argument::int);
        let [n_, outputs, first, columns_, rank] = sizes;
        let arguments = arguments![xa, b, delta.scale, &y, n_, outputs, first, columns_, rank];
        let grid = Grid::of((n.div_ceil(64), columns.div_ceil(64), 1), 256);
        gpu.launch(&IMAGE, &named("lora_add", y.dtype()), grid, arguments);
    });
}

/// xa of a forward alone, with the same sums in the same order.
pub fn xa(gpu: &'static Gpu, linear: &AdaptedLinear, x: View, xa: ViewMut, n: usize) {
    if let Some(fused) = FusedDelta::of(gpu, linear, x.dtype(), n) {
        return fused.xa(gpu, x, xa);
    }
    let mut xa = xa;
    for part in parts(gpu, linear, n) {
        thin(part, x, &xa.reborrow().slice(part.xa, part.xa_len()));
    }
}

/// `xa (n, r) = drop(x) A^T`.
fn thin(part: Part, x: View, xa: &ViewMut) {
    let Part { gpu, n, inputs, .. } = part;
    let (rank, x) = (part.delta.rank, part.tokens(x, inputs));
    let product = |kernel: &str, grid: Grid, to: Argument| {
        let sizes = [n, inputs, rank].map(Argument::int);
        let arguments = arguments![x, part.a(), part.dropped(), to, sizes[0], sizes[1], sizes[2]];
        gpu.launch(&IMAGE, &named(kernel, x.dtype()), grid, arguments);
    };
    if n <= SMALL_BATCH {
        let grid = Grid::of((rank.div_ceil(4), n, 1), 128);
        return product("lora_xa_small_batch", grid, Argument::from(xa));
    }
    let tiles =
        |to, shares| product("lora_xa", Grid::of((n.div_ceil(64), rank.div_ceil(16), shares), 256), to);
    match term_parts(n, inputs, rank) {
        0 => tiles(Argument::from(xa), 1),
        bytes => gpu.scratch(bytes, |parts| part.join(inputs, xa, parts, tiles)),
    }
}

/// The deltas' part of the backward: `dy (n, out)` is the gradient of what g multiplies.
pub fn backward_deltas(
    gpu: &'static Gpu,
    linear: &AdaptedLinear,
    (dy, x, xa): (View, View, View),
    to: BackwardBuffers,
    n: usize,
) {
    let BackwardBuffers { mut grads, mut d_xa, dx, .. } = to;
    let mut dx = dx;
    for part in parts(gpu, linear, n) {
        let Part { delta, n, inputs, outputs, .. } = part;
        let (x, dy) = (part.tokens(x, inputs), part.tokens(dy, outputs));
        let d_xa = d_xa.reborrow().slice(part.xa, part.xa_len());
        let terms = delta.columns.len();
        part.with_b(term_parts(n, terms, delta.rank), |b, parts| {
            part.join(terms, &d_xa, parts, |to, shares| {
                let [n_, outputs_, first, columns, rank] =
                    [n, outputs, delta.columns.start, terms, delta.rank].map(Argument::int);
                let arguments = arguments![dy, b, delta.scale, to, n_, outputs_, first, columns, rank];
                let grid = Grid::of((n.div_ceil(64), delta.rank.div_ceil(16), shares), 256);
                gpu.launch(&IMAGE, &named("lora_d_xa", dy.dtype()), grid, arguments);
            });
        });
        b_gradient(part, dy, xa.slice(part.xa, part.xa_len()), grads.reborrow());
        if !delta.a_frozen {
            a_gradient(part, x, d_xa.as_view(), grads.reborrow());
        }
        if let Some(dx) = &mut dx {
            let dx = part.tokens_mut(dx.reborrow(), inputs);
            let [n_, inputs_, rank] = [n, inputs, delta.rank].map(Argument::int);
            let arguments = arguments![&d_xa, part.a(), part.dropped(), &dx, n_, inputs_, rank];
            let grid = Grid::of((n.div_ceil(64), inputs.div_ceil(64), 1), 256);
            gpu.launch(&IMAGE, &named("lora_dx", dx.dtype()), grid, arguments);
        }
    }
}

/// With `M (columns, r) = scale * dy[:, columns]^T xa`: `dB += e * M * d`, and the gradients of d and e.
fn b_gradient(part: Part, dy: View, xa: View, grads: ViewMut) {
    let Part { gpu, delta, n, outputs, .. } = part;
    let trained = |vector: Option<Vector>| vector.is_some_and(|vector| !vector.frozen);
    if delta.b_frozen && !trained(delta.d) && !trained(delta.e) {
        return;
    }
    let (columns, rank, splits) = (delta.columns.len(), delta.rank, row_shares(n));
    let mut grads = grads;
    gpu.scratch(parts_of(n, columns, rank), |parts| {
        let [n, outputs, first, count, r] =
            [n, outputs, delta.columns.start, columns, rank].map(Argument::int);
        let arguments = arguments![dy, xa, parts, n, outputs, first, count, r];
        let grid = Grid::of((columns.div_ceil(64), rank.div_ceil(16), splits), 256);
        gpu.launch(&IMAGE, &named("lora_db", dy.dtype()), grid, arguments);
        if !delta.scales() {
            return sum(gpu, parts, splits, delta.scale, grads.slice(delta.b, columns * rank));
        }
        let (splits, scale) = (Argument::int(splits), delta.scale);
        if !delta.b_frozen {
            let to = grads.reborrow().slice(delta.b, columns * rank);
            let arguments = arguments![parts, splits, scale, part.d(), part.e(), &to, count, r];
            let grid = Grid::row((columns * rank).div_ceil(256), 256);
            gpu.launch(&IMAGE, "lora_db_scaled", grid, arguments);
        }
        if let Some(Vector { at, frozen: false }) = delta.e {
            let to = grads.reborrow().slice(at, columns);
            let arguments = arguments![parts, splits, scale, part.b(), part.d(), &to, count, r];
            gpu.launch(&IMAGE, "lora_de", Grid::row(columns.div_ceil(8), 256), arguments);
        }
        if let Some(Vector { at, frozen: false }) = delta.d {
            let to = grads.reborrow().slice(at, rank);
            let arguments = arguments![parts, splits, scale, part.b(), part.e(), &to, count, r];
            gpu.launch(&IMAGE, "lora_dd", Grid::row(rank, 256), arguments);
        }
    });
}

/// `dA (r, in) += d_xa^T drop(x)`.
fn a_gradient(part: Part, x: View, d_xa: View, grads: ViewMut) {
    let Part { gpu, delta, n, inputs, .. } = part;
    let (rank, splits) = (delta.rank, row_shares(n));
    gpu.scratch(parts_of(n, inputs, rank), |parts| {
        let sizes = [n, inputs, rank].map(Argument::int);
        let arguments = arguments![x, d_xa, part.dropped(), parts, sizes[0], sizes[1], sizes[2]];
        let grid = Grid::of((inputs.div_ceil(64), rank.div_ceil(16), splits), 256);
        gpu.launch(&IMAGE, &named("lora_da", x.dtype()), grid, arguments);
        sum(gpu, parts, splits, 1.0, grads.slice(delta.a, rank * inputs));
    });
}

/// `gradient += scale * sum of shares`.
fn sum(gpu: &'static Gpu, parts: u64, splits: usize, scale: f32, gradient: ViewMut) {
    let count = gradient.len();
    let arguments = arguments![parts, Argument::int(splits), scale, &gradient, Argument::long(count)];
    gpu.launch(&IMAGE, "sum_parts", Grid::row(count.div_ceil(256), 256), arguments);
}

/// Writes a block of `to`: that of `from`, or its own, times `factors`.
pub fn scale_block(gpu: &'static Gpu, from: Option<View>, factors: Option<View>, to: ViewMut, block: Block) {
    let to = to.slice(block.start(), block.len());
    let from = from.map_or(Argument::from(&to), |from| from.slice(block.start(), block.len()).into());
    let [n, columns, width] = [block.n, block.columns, block.width].map(Argument::int);
    let grid = Grid::row((block.n * block.columns.div_ceil(8)).div_ceil(256), 256);
    let arguments = arguments![from, factors, &to, n, columns, width];
    gpu.launch(&IMAGE, &named("scale_columns", to.dtype()), grid, arguments);
}

/// `to (columns) += sum over tokens of x`, or of `x * y`.
pub fn sum_block(gpu: &'static Gpu, x: View, y: Option<View>, to: ViewMut, block: Block) {
    let splits = row_shares(block.n);
    let of_block = |view: View| view.slice(block.start(), block.len()).address();
    gpu.scratch(parts_of(block.n, block.columns, 1), |parts| {
        let [n, columns, width] = [block.n, block.columns, block.width].map(Argument::int);
        let y = y.map_or(Argument::NULL, |y| of_block(y).into());
        let arguments = arguments![of_block(x), y, parts, n, columns, width];
        let grid = Grid::of((block.columns.div_ceil(256), splits, 1), 256);
        gpu.launch(&IMAGE, &named("sum_columns", x.dtype()), grid, arguments);
        sum(gpu, parts, splits, 1.0, to);
    });
}

/// `y (n, width) += bias (width) + residual (n, width)`.
pub fn add_bias(
    gpu: &'static Gpu,
    y: ViewMut,
    bias: Option<View>,
    residual: Option<View>,
    (n, width): (usize, usize),
) {
    let (half, trained) =
        (bias.filter(|b| b.dtype() == DType::F16), bias.filter(|b| b.dtype() == DType::F32));
    let sizes = [n, width].map(Argument::int);
    let arguments = arguments![&y, half, trained, residual, sizes[0], sizes[1]];
    let grid = Grid::row((n * width).div_ceil(256), 256);
    gpu.launch(&IMAGE, &named("add_bias", y.dtype()), grid, arguments);
}
