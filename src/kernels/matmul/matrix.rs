//! A frozen matrix, in FP16 or with 8-bit weights.

use half::f16;

use crate::kernels::{
    cpu::widen,
    device::{DType, Frozen, View},
    pages::Region,
    q8,
};

/// A frozen matrix `(rows, cols)`, row-major: FP16, or codes with scales as [`q8`] describes them.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    /// Its elements, FP16 or I8.
    pub data: View<'a>,
    /// Scales of its blocks, `(rows, blocks)` in FP16, where its elements are codes.
    pub scales: Option<View<'a>>,
    /// Rows: inputs of a linear layer, vocabulary of the head.
    pub rows: usize,
    /// Columns: outputs of a linear layer, width of the head.
    pub cols: usize,
    /// How a CPU multiplies with it; a device goes by the type of the activations.
    pub arithmetic: Arithmetic,
}

/// How a CPU computes products with a frozen matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arithmetic {
    /// Weights are widened, all else is FP32.
    #[default]
    F32,
    /// Both factors are rounded to BF16 and products are added up in FP32, where the CPU does that faster
    /// ([`bf16`](crate::kernels::cpu::bf16)) and there are enough rows for it to matter; as [`Arithmetic::F32`]
    /// elsewhere.
    Bf16,
}

impl<'a> Matrix<'a> {
    /// `(rows, cols)` of FP16.
    pub fn halves(data: View<'a>, rows: usize, cols: usize) -> Self {
        Self { data, scales: None, rows, cols, arithmetic: Arithmetic::F32 }
    }

    /// `(rows, cols)` of codes with scales `(rows, blocks)`.
    pub fn codes(data: View<'a>, scales: View<'a>, rows: usize, cols: usize) -> Self {
        Self { data, scales: Some(scales), rows, cols, arithmetic: Arithmetic::F32 }
    }

    /// Its elements on the host.
    ///
    /// # Panics
    /// When there are fewer than its sizes say, or they are of another type.
    pub(in crate::kernels) fn host(self) -> Elements<'a> {
        let Self { data, scales, rows, cols, .. } = self;
        assert!(data.len() >= rows * cols, "a matrix of {rows} x {cols} has more elements");
        match scales {
            None => Elements::Halves(data.host()),
            Some(scales) => {
                assert!(scales.len() >= rows * q8::blocks(cols), "a scale for every block");
                Elements::Codes(data.host(), scales.host())
            }
        }
    }

    /// Copies all of it to the host, as FP32 `(rows, cols)`. For tests and small tools.
    pub fn to_floats(self) -> Vec<f32> {
        let Some(scales) = self.scales else { return self.data.to_floats() };
        assert_eq!(self.data.dtype(), DType::I8, "codes are 8-bit");
        let (codes, scales) = (self.data.to_vec::<i8>(), scales.to_vec::<f16>());
        let elements = Elements::Codes(&codes, &scales);
        let mut floats = vec![0f32; self.rows * self.cols];
        for (row, floats) in floats.chunks_exact_mut(self.cols.max(1)).enumerate() {
            elements.widen(self.cols, (row, 0), floats);
        }
        floats
    }
}

/// A read-only matrix of the base, `(rows, cols)`: FP16, or 8-bit codes with their scales.
#[derive(Debug, Clone)]
pub struct FrozenMatrix {
    /// Its elements, FP16 or I8.
    pub data: Frozen,
    /// Scales of its blocks, where its elements are codes.
    pub scales: Option<Frozen>,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// How a CPU multiplies with it.
    pub arithmetic: Arithmetic,
}

impl FrozenMatrix {
    /// Read access.
    pub fn view(&self) -> Matrix<'_> {
        let &Self { ref data, ref scales, rows, cols, arithmetic } = self;
        Matrix { data: data.view(), scales: scales.as_ref().map(Frozen::view), rows, cols, arithmetic }
    }

    /// The tensors it is made of.
    pub fn tensors(&self) -> impl Iterator<Item = &Frozen> {
        std::iter::once(&self.data).chain(&self.scales)
    }

    /// As [`FrozenMatrix::tensors`], to be replaced.
    pub fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Frozen> {
        std::iter::once(&mut self.data).chain(&mut self.scales)
    }

    /// The pages of all of them.
    pub fn regions(&self) -> Vec<Region> {
        self.tensors().map(Frozen::region).collect()
    }
}

/// Elements of a frozen matrix in memory of the host.
#[derive(Clone, Copy)]
pub(in crate::kernels) enum Elements<'a> {
    /// FP16.
    Halves(&'a [f16]),
    /// Codes, and the scales of their blocks.
    Codes(&'a [i8], &'a [f16]),
}

impl Elements<'_> {
    /// Values of a matrix with `cols` columns, in `row` from `column` on, as many as there is room for in that row.
    pub(in crate::kernels) fn widen(self, cols: usize, (row, column): (usize, usize), to: &mut [f32]) {
        let start = row * cols + column;
        match self {
            Self::Halves(halves) => widen(&halves[start..][..to.len()], to),
            Self::Codes(codes, scales) => {
                let blocks = q8::blocks(cols);
                q8::widen(&codes[start..][..to.len()], &scales[row * blocks..][..blocks], column, to);
            }
        }
    }
}
