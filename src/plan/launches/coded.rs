//! What a base of codes adds to the launches: of each matrix a stretch of rows is widened before its product, and few rows are
//! multiplied with the codes by kernels of their own.

use super::Step;
use crate::{
    device::{DType, accelerators::Work},
    kernels::matmul::device_scratch::converted_rows,
    model::{
        BaseDType,
        arch::{HEAD, TOKEN_EMBEDDING},
    },
};

impl Step<'_> {
    /// Rows of the token embedding.
    pub(super) fn embedding(&mut self) {
        let kernel = match self.pass.base.of_matrix(TOKEN_EMBEDDING) {
            BaseDType::Q8 => "embed_q8",
            BaseDType::F16 | BaseDType::Nf4 => "embed",
        };
        self.rows("embedding", kernel, 6.0);
    }

    /// Type that the head is kept in.
    pub(super) fn head_type(&self) -> BaseDType {
        self.pass.base.of_matrix(HEAD)
    }

    /// Numbers of rows of a matrix that products read at a time.
    pub(super) fn stretches(&self, kept: BaseDType, rows: usize, cols: usize) -> Vec<usize> {
        let most = match kept {
            BaseDType::F16 => rows.max(1),
            BaseDType::Q8 | BaseDType::Nf4 => converted_rows(rows, cols, DType::F16),
        };
        (0..rows).step_by(most).map(|first| most.min(rows - first)).collect()
    }

    /// The values of some rows of a matrix in FP16, where it is kept as codes.
    pub(super) fn widen(&mut self, kept: BaseDType, rows: usize, cols: usize) {
        let kernel = match kept {
            BaseDType::F16 => return,
            BaseDType::Q8 => "q8_widen",
            BaseDType::Nf4 => "nf4_widen",
        };
        let bytes = kept.matrix_bytes(rows, cols) as f64 + (2 * rows * cols) as f64;
        self.add("weights", kernel, Work::Elementwise, bytes, (rows * cols) as f64);
    }
}
