//! A transposed copy of a frozen matrix for a CPU: it makes `x W^T` of some rows faster, as logits of many samples.

use half::f16;

use super::{FrozenMatrix, InitialValue, Layout, ProductShape, Scales, frozen_nn, matrix::STRIP, simd};
use crate::{
    device::{
        Frozen, View, ViewMut,
        cpu::{simd::at_level, vectors},
    },
    error::Result,
};

/// The transpose `(cols, rows)` of a matrix `(rows, cols)` in strips of 32 of its columns. Products have the same bits as
/// with the matrix in rows.
#[derive(Debug, Clone)]
pub struct TransposedMatrix(Form);

#[derive(Debug, Clone)]
enum Form {
    F16(FrozenMatrix),
    /// 8-bit codes; scales of 32 steps of a column each, `(blocks, 32)` FP16 for each strip.
    Q8 {
        codes: Frozen,
        scales: Frozen,
        rows: usize,
        cols: usize,
    },
}

impl TransposedMatrix {
    /// The transpose of `matrix`, or `None` where this CPU's kernels would not be faster with it.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::error::Error::Memory) when there is no memory for it.
    pub fn of(matrix: &FrozenMatrix) -> Result<Option<Self>> {
        let &FrozenMatrix { ref data, ref scales, rows, cols, layout, arithmetic } = matrix;
        if layout != Layout::Rows || !vectors() {
            return Ok(None);
        }
        let form = match scales {
            None => Form::F16(FrozenMatrix {
                data: data.transposed::<f16>(rows, cols, STRIP)?,
                scales: None,
                rows: cols,
                cols: rows,
                layout: Layout::Strips,
                arithmetic,
            }),
            Some(Scales::Q8(scales)) if !arithmetic.in_pairs() => {
                let codes = data.transposed::<i8>(rows, cols, STRIP)?;
                let scales = scales.transposed::<f16>(rows, scales.len() / rows.max(1), STRIP)?;
                Form::Q8 { codes, scales, rows, cols }
            }
            Some(_) => return Ok(None),
        };
        Ok(Some(Self(form)))
    }

    /// `y (n, rows) = x (n, cols) W^T`.
    pub fn product(&self, x: View, y: ViewMut, n: usize) {
        match &self.0 {
            Form::F16(matrix) => frozen_nn(x, matrix.view(), InitialValue::Zero, y, n),
            Form::Q8 { codes, scales, rows, cols } => {
                let (codes, scales) = (codes.view().host(), scales.view().host());
                let shape = ProductShape { n, inner: *cols, outer: *rows };
                at_level!(s => simd::strips::nn_of_columns(s, x.host(), (codes, scales), shape, y.host()));
            }
        }
    }
}
