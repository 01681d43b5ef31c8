//! Token plus position embedding: `x[i] = wte[ids[i]] + wpe[positions[i]]`, rows of frozen FP16 tables.

use super::device::{Device, View, ViewMut};

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

/// `x (n, c)` from `ids (n)` and `positions (n)`; every id and position must lie inside its table.
pub fn forward(ids: View, positions: View, wte: View, wpe: View, x: ViewMut, width: usize) {
    match x.device() {
        Device::Cpu => cpu::forward(ids.host(), positions.host(), wte.host(), wpe.host(), x.host(), width),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => cuda::forward(gpu, ids, positions, wte, wpe, x, width),
    }
}
