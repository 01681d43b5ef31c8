//! Frozen matrices, in FP16 or as 8-bit codes with scales.

use half::f16;

use crate::{
    device::{
        DType, Frozen, View,
        cpu::{bf16, vectors, widen},
        frozen::Order,
        page_cache::Region,
    },
    error::Result,
    kernels::q8,
};

/// A frozen matrix `(rows, cols)`: FP16, or codes with scales as [`q8`] describes them.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    /// The elements, FP16 or I8; on a device rows of zeros may follow.
    pub data: View<'a>,
    /// Scales of the blocks, `(rows, blocks)` in FP16, where the elements are codes.
    pub scales: Option<View<'a>>,
    /// Rows: inputs of a linear layer, vocabulary of the head.
    pub rows: usize,
    /// Columns: outputs of a linear layer, width of the head.
    pub cols: usize,
    /// Order of its elements in memory.
    pub layout: Layout,
    /// Arithmetic of a CPU that multiplies with it; a device follows the type of the activations.
    pub arithmetic: Arithmetic,
}

/// Order of the elements of a matrix in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layout {
    /// Row by row: everywhere except in copies that a CPU process made for its kernels.
    #[default]
    Rows,
    /// Strips of 32 columns one after another, each row by row: reading some columns of all rows is one sequential
    /// read. FP16 alone; the last strip is padded.
    Strips,
}

/// Columns of a strip: a cache line of FP16.
pub const STRIP: usize = 32;

/// Arithmetic of a CPU in products with a frozen matrix and in attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arithmetic {
    /// Weights are widened, everything is FP32.
    #[default]
    F32,
    /// Both factors are rounded to BF16 and products are added up in FP32, where the CPU does that faster
    /// ([`bf16`](crate::device::cpu::bf16)) and there are enough rows for it to matter; as [`Arithmetic::F32`]
    /// elsewhere.
    Bf16,
}

impl Arithmetic {
    /// Whether products are made of pairs of BF16 values on this CPU.
    pub fn in_pairs(self) -> bool {
        self == Self::Bf16 && bf16()
    }
}

impl<'a> Matrix<'a> {
    /// A matrix `(rows, cols)` of FP16 values.
    pub fn f16(data: View<'a>, rows: usize, cols: usize) -> Self {
        Self { data, scales: None, rows, cols, layout: Layout::Rows, arithmetic: Arithmetic::F32 }
    }

    /// A matrix `(rows, cols)` of codes with scales `(rows, blocks)`.
    pub fn codes(data: View<'a>, scales: View<'a>, rows: usize, cols: usize) -> Self {
        Self { data, scales: Some(scales), rows, cols, layout: Layout::Rows, arithmetic: Arithmetic::F32 }
    }

    /// Its elements on the host.
    ///
    /// # Panics
    /// When it has fewer elements than its sizes say, or of another type.
    pub(in crate::kernels) fn host(self) -> Elements<'a> {
        let Self { data, scales, rows, cols, layout, .. } = self;
        let padded = if layout == Layout::Strips { cols.next_multiple_of(STRIP) } else { cols };
        assert!(data.len() >= rows * padded, "a matrix of {rows} x {cols} has more elements");
        match (scales, layout) {
            (None, Layout::Rows) => Elements::F16(data.host()),
            (None, Layout::Strips) => Elements::Strips(data.host(), rows),
            (Some(scales), _) => {
                assert!(scales.len() >= rows * q8::blocks(cols), "a scale for every block");
                Elements::Codes(data.host(), scales.host())
            }
        }
    }

    /// The matrix with the rows of zeros that follow it.
    pub fn padded(self) -> Self {
        Self { rows: self.data.len() / self.cols.max(1), ..self }
    }

    /// One row of a matrix in rows.
    ///
    /// # Panics
    /// When it has no such row, or is in strips.
    pub fn row(self, row: usize) -> Self {
        assert_eq!(self.layout, Layout::Rows, "a row of strips is not in one piece");
        let blocks = q8::blocks(self.cols);
        Self {
            data: self.data.slice(row * self.cols, self.cols),
            scales: self.scales.map(|scales| scales.slice(row * blocks, blocks)),
            rows: 1,
            ..self
        }
    }

    /// A copy on the host, as FP32 `(rows, cols)`. For tests and small tools.
    pub fn to_floats(self) -> Vec<f32> {
        let (values, codes, factors);
        let elements = match (self.scales, self.layout) {
            (None, Layout::Rows) => return self.data.slice(0, self.rows * self.cols).to_floats(),
            (None, Layout::Strips) => {
                values = self.data.to_vec::<f16>();
                Elements::Strips(&values, self.rows)
            }
            (Some(scales), _) => {
                assert_eq!(self.data.dtype(), DType::I8, "codes are 8-bit");
                (codes, factors) = (self.data.to_vec::<i8>(), scales.to_vec::<f16>());
                Elements::Codes(&codes, &factors)
            }
        };
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
    /// The elements, FP16 or I8.
    pub data: Frozen,
    /// Scales of the blocks, where the elements are codes.
    pub scales: Option<Frozen>,
    /// Number of rows, the inputs of a layer.
    pub rows: usize,
    /// Number of columns, the outputs of a layer.
    pub cols: usize,
    /// Order of its elements in memory.
    pub layout: Layout,
    /// Arithmetic of a CPU that multiplies with it.
    pub arithmetic: Arithmetic,
}

impl FrozenMatrix {
    /// The matrix for kernels.
    pub fn view(&self) -> Matrix<'_> {
        let &Self { ref data, ref scales, rows, cols, layout, arithmetic } = self;
        Matrix {
            data: data.view(),
            scales: scales.as_ref().map(Frozen::view),
            rows,
            cols,
            layout,
            arithmetic,
        }
    }

    /// Copies matrices and `others` from mapped files into large pages of the process, the matrices in strips where
    /// this CPU's kernels read them faster. Does nothing where there are no large pages.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::error::Error::Memory) when there is too little memory; nothing is changed then.
    pub fn settle(matrices: &mut [&mut Self], others: Vec<&mut Frozen>) -> Result<()> {
        let layouts: Vec<Layout> = matrices.iter().map(|matrix| matrix.best_layout()).collect();
        let mut tensors = Vec::new();
        for (matrix, &layout) in matrices.iter_mut().zip(&layouts) {
            let rows = matrix.rows;
            let order = match layout {
                Layout::Rows => Order::AsItIs,
                Layout::Strips => Order::Strips { rows, bytes: STRIP * size_of::<f16>() },
            };
            tensors.push((&mut matrix.data, order));
            tensors.extend(matrix.scales.iter_mut().map(|scales| (scales, Order::AsItIs)));
        }
        tensors.extend(others.into_iter().map(|tensor| (tensor, Order::AsItIs)));
        if Frozen::settle(&mut tensors)? {
            for (matrix, layout) in matrices.iter_mut().zip(layouts) {
                matrix.layout = layout;
            }
        }
        Ok(())
    }

    /// Its transpose in strips, for CPUs that read that faster in `x W^T` of some rows: FP16 and vector kernels, else
    /// `None`. Products have the same bits as with the matrix in rows.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::error::Error::Memory) when there is no memory for it.
    pub fn transposed(&self) -> Result<Option<Self>> {
        if self.scales.is_some() || self.layout != Layout::Rows || !vectors() {
            return Ok(None);
        }
        let data = self.data.transposed(self.rows, self.cols, STRIP)?;
        let (rows, cols) = (self.cols, self.rows);
        Ok(Some(Self { data, scales: None, rows, cols, layout: Layout::Strips, arithmetic: self.arithmetic }))
    }

    fn best_layout(&self) -> Layout {
        let whole = self.scales.is_none() && self.cols.is_multiple_of(STRIP);
        if whole && vectors() { Layout::Strips } else { Layout::Rows }
    }

    /// Its tensors: elements, and scales of codes.
    pub fn tensors(&self) -> impl Iterator<Item = &Frozen> {
        std::iter::once(&self.data).chain(&self.scales)
    }

    /// As [`FrozenMatrix::tensors`], for replacing them.
    pub fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Frozen> {
        std::iter::once(&mut self.data).chain(&mut self.scales)
    }

    /// The pages of all its tensors.
    pub fn regions(&self) -> Vec<Region> {
        self.tensors().map(Frozen::region).collect()
    }
}

/// Elements of a frozen matrix in memory of the host.
#[derive(Clone, Copy)]
pub(in crate::kernels) enum Elements<'a> {
    /// FP16 row by row.
    F16(&'a [f16]),
    /// FP16 in strips, and the number of rows.
    Strips(&'a [f16], usize),
    /// Codes, and the scales of their blocks.
    Codes(&'a [i8], &'a [f16]),
}

/// Index of an element of a matrix of `rows` rows in strips.
pub(in crate::kernels) fn strip_start(rows: usize, row: usize, column: usize) -> usize {
    (column / STRIP * rows + row) * STRIP + column % STRIP
}

impl Elements<'_> {
    /// Widens values of a matrix with `cols` columns, from `column` of `row`, until `to` is full.
    pub(in crate::kernels) fn widen(self, cols: usize, (row, column): (usize, usize), to: &mut [f32]) {
        let start = row * cols + column;
        match self {
            Self::F16(values) => widen(&values[start..][..to.len()], to),
            Self::Strips(values, rows) => {
                let mut column = column;
                let mut to = to;
                while !to.is_empty() {
                    let count = (STRIP - column % STRIP).min(to.len());
                    let (piece, rest) = to.split_at_mut(count);
                    widen(&values[strip_start(rows, row, column)..][..count], piece);
                    column += count;
                    to = rest;
                }
            }
            Self::Codes(codes, scales) => {
                let blocks = q8::blocks(cols);
                q8::widen(&codes[start..][..to.len()], &scales[row * blocks..][..blocks], column, to);
            }
        }
    }
}
