//! Frozen matrices as the library's products read them: as they are, or widened into scratch, where FP16 meets FP32
//! activations and where W is codes.

use std::ops::Range;

use super::{
    super::{
        Matrix, Scales,
        device_scratch::{converted_rows, shares_of},
    },
    IMAGE,
};
use crate::{
    device::{
        DType, View,
        cuda::{Argument, Gpu, Grid, arguments, named},
    },
    kernels::{elementwise, nf4, q8},
};

/// The codes of a matrix, with their scales.
#[derive(Clone, Copy)]
pub enum Codes<'a> {
    /// Of 8 bits.
    Q8(q8::cuda::Codes<'a>),
    /// Of 4 bits.
    Nf4(nf4::cuda::Codes<'a>),
}

impl<'a> Codes<'a> {
    /// Those of `w`; `None` where its elements are numbers.
    pub fn of(w: Matrix<'a>) -> Option<Self> {
        let Matrix { data: codes, rows, cols, .. } = w;
        Some(match w.scales? {
            Scales::Q8(scales) => Self::Q8(q8::cuda::Codes { codes, scales, rows, cols }),
            Scales::Nf4 { codes: scales, nested } => {
                Self::Nf4(nf4::cuda::Codes { sizes: nf4::Sizes { rows, cols }, codes, scales, nested })
            }
        })
    }

    fn widen(self, gpu: &'static Gpu, rows: Range<usize>, to: u64, dtype: DType) {
        match self {
            Self::Q8(codes) => codes.widen(gpu, rows, to, dtype),
            Self::Nf4(codes) => codes.widen(gpu, rows, to, dtype),
        }
    }
}

/// Holds that a matrix has the elements that its sizes say, of the type that kernels for these activations read: codes, the
/// activations' type, or FP16 beside FP32.
pub fn check_type(w: Matrix, activations: DType) {
    let is_whole = match Codes::of(w) {
        Some(Codes::Q8(codes)) => codes.is_whole(),
        Some(Codes::Nf4(codes)) => codes.is_whole(),
        None => {
            let wanted = if activations == DType::BF16 { DType::BF16 } else { DType::F16 };
            w.data.dtype() == wanted && w.data.len() >= w.rows * w.cols
        }
    };
    assert!(is_whole, "a frozen matrix is of another type or shorter");
}

/// Whether products read W as it is.
fn is_read_in_place(w: Matrix, dtype: DType) -> bool {
    w.scales.is_none() && w.data.dtype() == dtype
}

/// Calls `work(first row, rows, address)` for ranges of rows of W in the type of the activations.
pub fn stretches(gpu: &'static Gpu, w: Matrix, dtype: DType, work: impl Fn(usize, usize, u64)) {
    if is_read_in_place(w, dtype) {
        return work(0, w.rows, w.data.address());
    }
    let codes = Codes::of(w);
    let most = converted_rows(w.rows, w.cols, dtype);
    gpu.scratch(most * w.cols * dtype.size(), |scratch| {
        for first in (0..w.rows).step_by(most) {
            let count = most.min(w.rows - first);
            match codes {
                Some(codes) => codes.widen(gpu, first..first + count, scratch, dtype),
                None => {
                    let rows = w.data.slice(first * w.cols, count * w.cols);
                    elementwise::cuda::cast_at(gpu, rows, scratch, dtype);
                }
            }
            work(first, count, scratch);
        }
    });
}

/// Calls `work(address)` once with all of W in the type of the activations, where [`whole_address`] says that it can be.
pub fn whole(gpu: &'static Gpu, w: Matrix, dtype: DType, work: impl Fn(u64)) {
    stretches(gpu, w, dtype, |_, _, address| work(address));
}

/// An address that is aligned as W will be in [`whole`]: W's own, or as scratch is; `None` where W is FP16 beside FP32, or so
/// large that it is widened in stretches.
pub fn whole_address(w: Matrix, dtype: DType) -> Option<u64> {
    /// Like all memory of a device.
    const OF_SCRATCH: u64 = 256;
    match w.scales {
        None => is_read_in_place(w, dtype).then(|| w.data.address()),
        Some(_) => (converted_rows(w.rows, w.cols, dtype) >= w.rows).then_some(OF_SCRATCH),
    }
}

/// Shares of `x (n, rows) W` of a small batch: hands out their address and number.
pub fn shares(gpu: &'static Gpu, x: View, w: Matrix, n: usize, work: impl FnOnce(u64, usize)) {
    let (rows, cols) = (w.rows, w.cols);
    let splits = shares_of(w.data.dtype(), rows, cols);
    gpu.scratch(4 * splits * n * cols, |parts| {
        match Codes::of(w) {
            Some(Codes::Q8(codes)) => codes.shares(gpu, x, parts, n, splits),
            Some(Codes::Nf4(codes)) => codes.shares(gpu, x, parts, n, splits),
            None => {
                let sizes = [n, rows, cols].map(Argument::int);
                let arguments = arguments![x, w.data, parts, sizes[0], sizes[1], sizes[2]];
                let grid = Grid::of((cols.div_ceil(32), splits, if n == 0 { 0 } else { 1 }), 256);
                gpu.launch(&IMAGE, &named("gemv_nn", x.dtype()), grid, arguments);
            }
        }
        work(parts, splits);
    });
}
