//! Passes over activations where a layer has vectors: products with a vector, sums over tokens, and a bias.

#[cfg(feature = "cuda")]
use super::cuda;
use super::{Scaling, cpu};
use crate::device::{Device, View, ViewMut};

/// Tokens and columns of a matrix with rows of `width`.
#[derive(Clone, Copy)]
pub struct Block {
    /// First token of the block, a row.
    pub token: usize,
    /// Number of tokens of the block.
    pub n: usize,
    /// First column of the block.
    pub column: usize,
    /// Number of columns of the block.
    pub columns: usize,
    /// Columns of the matrix.
    pub width: usize,
}

impl Block {
    fn whole((n, width): (usize, usize)) -> Self {
        Self { token: 0, n, column: 0, columns: width, width }
    }

    fn of(scaling: &Scaling, (n, width): (usize, usize)) -> Self {
        let (tokens, columns) = (scaling.tokens.clone().unwrap_or(0..n), scaling.columns.clone());
        assert!(tokens.start <= tokens.end && tokens.end <= n, "a vector is for tokens that are not there");
        assert!(
            columns.start <= columns.end && columns.end <= width,
            "a vector is for columns that are not there"
        );
        Self { token: tokens.start, n: tokens.len(), column: columns.start, columns: columns.len(), width }
    }

    /// Elements of the matrix before the block's first.
    pub fn start(&self) -> usize {
        self.token * self.width + self.column
    }

    /// Elements from its first to its last.
    #[cfg(feature = "cuda")]
    pub fn len(&self) -> usize {
        if self.n * self.columns == 0 { 0 } else { (self.n - 1) * self.width + self.columns }
    }

    fn is_whole(&self, (n, width): (usize, usize)) -> bool {
        self.n == n && self.columns == width
    }

    fn overlaps(&self, other: &Self) -> bool {
        let meet = |a: usize, len_a: usize, b: usize, len_b: usize| a < b + len_b && b < a + len_a;
        meet(self.token, self.n, other.token, other.n)
            && meet(self.column, self.columns, other.column, other.columns)
    }
}

/// `to (n, width) = from * scalings`, from itself without `from`.
pub fn scale(from: Option<View>, scalings: &[Scaling], values: View, mut to: ViewMut, shape: (usize, usize)) {
    let mut from = from;
    if from.is_some() && !matches!(scalings, [one] if Block::of(one, shape).is_whole(shape)) {
        scale_block(from.take(), None, to.reborrow(), Block::whole(shape));
    }
    for scaling in scalings {
        let factors = values.slice(scaling.vector.at, scaling.columns.len());
        scale_block(from, Some(factors), to.reborrow(), Block::of(scaling, shape));
    }
}

/// Writes a block of `to`: that of `from`, or its own, times `factors`, or as it is.
fn scale_block(from: Option<View>, factors: Option<View>, to: ViewMut, block: Block) {
    match to.device() {
        Device::Cpu => cpu::scale_block(from.map(View::host), factors.map(View::host), to.host(), block),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::scale_block(gpu, from, factors, to, block),
    }
}

/// Adds to `grads` the gradient of every trainable vector of `scalings`: the sum over its tokens of
/// `dy (n, width) * x (n, width)`, where x is what it multiplied.
pub fn gradient(scalings: &[Scaling], dy: View, x: View, mut grads: ViewMut, shape: (usize, usize)) {
    for (at, scaling) in scalings.iter().enumerate() {
        let block = Block::of(scaling, shape);
        let alone = scalings[..at].iter().all(|other| !block.overlaps(&Block::of(other, shape)));
        assert!(alone, "trainable vectors of a layer overlap");
        if !scaling.vector.frozen {
            let to = grads.reborrow().slice(scaling.vector.at, block.columns);
            sum_block(dy, Some(x), to, block);
        }
    }
}

/// `to (width) += sum over tokens of x (n, width)`.
pub fn sum(x: View, to: ViewMut, n: usize) {
    let block = Block::whole((n, to.len()));
    sum_block(x, None, to, block);
}

/// `to (columns) += sum over the block's tokens of x`, or of `x * y`.
fn sum_block(x: View, y: Option<View>, to: ViewMut, block: Block) {
    match x.device() {
        Device::Cpu => cpu::sum_block(x.host(), y.map(View::host), to.host(), block),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::sum_block(gpu, x, y, to, block),
    }
}

/// `y (n, width) += bias (width) + residual (n, width)`; the bias is FP16, or FP32 where it is trained.
pub fn add_bias(y: ViewMut, bias: Option<View>, residual: Option<View>, (n, width): (usize, usize)) {
    if bias.is_none() && residual.is_none() {
        return;
    }
    match y.device() {
        Device::Cpu => cpu::add_bias(y.host(), bias, residual.map(View::host), (n, width)),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::add_bias(gpu, y, bias, residual, (n, width)),
    }
}
