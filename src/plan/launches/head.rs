//! The launches of the head and the loss.

use super::{Pass, Step, flops};
use crate::{
    device::{
        DType,
        accelerators::{MOST_SHARED, Work},
    },
    kernels::{head_loss::stride, matmul::device_scratch::SMALL_BATCH},
    model::BaseDType,
};

impl Step<'_> {
    /// Logits, losses and the gradient of `m` hidden rows, in chunks. Logits have columns for the rows of zeros after the
    /// head.
    pub(super) fn head(&mut self, m: usize) {
        let Pass { config, head_rows, .. } = self.pass;
        let (c, v, columns) = (config.width, config.vocab, stride(config.vocab, DType::F16));
        // Read once where a block may hold a row, else for the loss and for the gradient; written in the activations' type.
        let (kernel, bytes) = match 4 * v.next_multiple_of(8) + (1 << 10) <= MOST_SHARED {
            true => ("cross_entropy_once", 6.0),
            false => ("cross_entropy", 10.0),
        };
        for first in (0..m).step_by(head_rows.max(1)) {
            let rows = head_rows.min(m - first);
            let moved = 4.0 * (rows * c) as f64;
            self.add("gather", "gather", Work::Elementwise, moved, 0.0);
            self.logits(rows, columns);
            let logits = (rows * v) as f64;
            self.add("cross-entropy", kernel, Work::Logits, bytes * logits, 12.0 * logits);
            let mut bytes = 2.0;
            for count in self.stretches(self.head_type(), columns, c) {
                self.widen(self.head_type(), count, c);
                self.product("logits dx", [rows, c, count], bytes);
                // The others add to it.
                bytes = 4.0;
            }
            self.add("scatter", "scatter", Work::Elementwise, moved, 0.0);
        }
    }

    /// FP32 logits `(rows, columns)`; few rows read each weight once.
    pub(super) fn logits(&mut self, rows: usize, columns: usize) {
        let c = self.pass.config.width;
        if rows > SMALL_BATCH {
            for count in self.stretches(self.head_type(), columns, c) {
                self.widen(self.head_type(), count, c);
                self.product("logits", [rows, count, c], 4.0);
            }
            return;
        }
        let bytes = self.head_type().matrix_bytes(columns, c) as f64 + (4 * rows * columns) as f64;
        let kernel = if self.head_type() == BaseDType::Q8 { "q8_gemv_nt" } else { "gemv_nt" };
        self.add("logits", kernel, Work::Weights, bytes, flops(rows, columns, c));
    }
}
