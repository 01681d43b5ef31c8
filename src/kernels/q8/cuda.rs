//! CUDA side: values for products of the library, and products of small batches that read each code once.
//!
//! Codes and scales are on a device as they are on a host, row by row: eight codes of a thread are one load, and the
//! threads of a warp read 128 or 256 bytes side by side.

use std::ops::Range;

use super::blocks;
use crate::device::{
    DType, View, ViewMut,
    cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
};

static IMAGE: Image = image!("q8");

/// A matrix `(rows, cols)` of 8-bit codes on a device.
#[derive(Clone, Copy)]
pub struct Codes<'a> {
    /// Codes, `(rows, cols)`, I8.
    pub codes: View<'a>,
    /// Scales, `(rows, blocks)`, FP16.
    pub scales: View<'a>,
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub cols: usize,
}

/// [`Codes`] as kernels take it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Coded {
    codes: u64,
    scales: u64,
    rows: i32,
    cols: i32,
}

impl Codes<'_> {
    /// Whether the tensors have the types and lengths that the sizes say.
    pub fn is_whole(self) -> bool {
        let Self { codes, scales, rows, cols } = self;
        let types = (codes.dtype(), scales.dtype()) == (DType::I8, DType::F16);
        types && codes.len() >= rows * cols && scales.len() >= rows * blocks(cols)
    }

    /// The matrix as an argument of a kernel.
    pub fn argument(self) -> Argument {
        let Self { codes, scales, rows, cols } = self;
        Argument::structure(Coded {
            codes: codes.address(),
            scales: scales.address(),
            rows: rows as i32,
            cols: cols as i32,
        })
    }

    /// Writes the values of some rows, rounded to `dtype`, to address `to`.
    pub fn widen(self, gpu: &'static Gpu, rows: Range<usize>, to: u64, dtype: DType) {
        let Self { codes, scales, cols, .. } = self;
        let (first, count) = (rows.start, rows.len());
        let part = Self {
            codes: codes.slice(first * cols, count * cols),
            scales: scales.slice(first * blocks(cols), count * blocks(cols)),
            rows: count,
            cols,
        };
        let grid = Grid::row((count * cols.div_ceil(8)).div_ceil(256), 256);
        gpu.launch(&IMAGE, &named("q8_widen", dtype), grid, arguments![part.argument(), to]);
    }

    /// Writes `splits` shares of `x (n, rows) W`, `(splits, n, cols)` in FP32, to address `parts`; n is at most 8.
    pub fn shares(self, gpu: &'static Gpu, x: View, parts: u64, n: usize, splits: usize) {
        let grid = Grid::of((self.cols.div_ceil(128), splits, if n == 0 { 0 } else { 1 }), 256);
        let arguments = arguments![x, self.argument(), parts, Argument::int(n)];
        gpu.launch(&IMAGE, &named("q8_gemv_nn", x.dtype()), grid, arguments);
    }

    /// `y (n, rows) = x (n, cols) W^T` in FP32, where rows of y are `ld` apart; n is at most 8.
    pub fn transposed_product(self, gpu: &'static Gpu, x: View, (y, ld): (&ViewMut, usize), n: usize) {
        let arguments = arguments![x, self.argument(), y, Argument::int(n), Argument::long(ld)];
        let grid = Grid::row(self.rows.div_ceil(8), 256);
        gpu.launch(&IMAGE, &named("q8_gemv_nt", x.dtype()), grid, arguments);
    }
}
