//! Token plus position embedding: `x[i] = wte[ids[i]] + wpe[positions[i]]`, rows of frozen tables.

use super::matmul::Matrix;
use crate::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

/// `x (n, c)` from `ids (n)` and `positions (n)`; every id and position must be inside its table, `wte (v, c)` and
/// `wpe (positions, c)` in FP16.
pub fn forward(ids: View, positions: View, wte: Matrix, wpe: View, x: ViewMut) {
    match x.device() {
        Device::Cpu => cpu::forward(ids.host(), positions.host(), wte, wpe.host(), x.host()),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(gpu, ids, positions, wte.data, wpe, x, wte.cols),
    }
}
