//! CUDA side: values for products of the library, and products of small batches that read each code once.
//!
//! Codes are on a device in the order of the file: a warp reads one row of words of a strip, 256 bytes side by side, and
//! has eight rows of 64 columns, which it writes as whole rows of 128 bytes. Scales are read a byte each, from as many
//! places as there are columns; they are a 32nd of the codes, and the four codes of a column that a block needs at a time
//! are neighbours.

use std::ops::Range;

use super::{BLOCK, STRIP, Sizes};
use crate::device::{
    DType, View,
    cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
};

static IMAGE: Image = image!("nf4");

/// A matrix of 4-bit codes on a device.
#[derive(Clone, Copy)]
pub struct Codes<'a> {
    /// Sizes of the matrix.
    pub sizes: Sizes,
    /// Words of codes as [`Nf4::codes`](super::Nf4::codes), byte by byte, U8.
    pub codes: View<'a>,
    /// Codes of the scales, `(cols, blocks)`, U8.
    pub scales: View<'a>,
    /// The offset, then the factors, F32.
    pub nested: View<'a>,
}

/// [`Codes`] as kernels take it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Coded {
    words: u64,
    scales: u64,
    nested: u64,
    rows: i32,
    cols: i32,
}

impl Codes<'_> {
    /// Whether the tensors have the types and lengths that the sizes say.
    pub fn is_whole(self) -> bool {
        let Self { sizes, codes, scales, nested } = self;
        let types = (codes.dtype(), scales.dtype(), nested.dtype()) == (DType::U8, DType::U8, DType::F32);
        let enough = codes.len() >= sizes.codes() && scales.len() >= sizes.scales();
        types && enough && nested.len() >= sizes.nested()
    }

    /// The matrix as an argument of a kernel.
    pub fn argument(self) -> Argument {
        let Self { sizes: Sizes { rows, cols }, codes, scales, nested } = self;
        Argument::structure(Coded {
            words: codes.address(),
            scales: scales.address(),
            nested: nested.address(),
            rows: rows as i32,
            cols: cols as i32,
        })
    }

    /// Writes the values of some rows, rounded to `dtype`, to address `to`. The first row begins a block.
    pub fn widen(self, gpu: &'static Gpu, rows: Range<usize>, to: u64, dtype: DType) {
        assert!(rows.start.is_multiple_of(BLOCK), "rows from the first one of a block on");
        let count = rows.len();
        let grid = Grid::of((self.sizes.cols.div_ceil(STRIP), count.div_ceil(4 * BLOCK), 1), 256);
        let arguments = arguments![self.argument(), to, Argument::int(rows.start), Argument::int(count)];
        gpu.launch(&IMAGE, &named("nf4_widen", dtype), grid, arguments);
    }

    /// Writes `splits` shares of `x (n, rows) W`, `(splits, n, cols)` in FP32, to address `parts`; n is at most 8.
    pub fn shares(self, gpu: &'static Gpu, x: View, parts: u64, n: usize, splits: usize) {
        let grid = Grid::of((self.sizes.cols.div_ceil(STRIP), splits, if n == 0 { 0 } else { 1 }), 256);
        let arguments = arguments![x, self.argument(), parts, Argument::int(n)];
        gpu.launch(&IMAGE, &named("nf4_gemv_nn", x.dtype()), grid, arguments);
    }
}
