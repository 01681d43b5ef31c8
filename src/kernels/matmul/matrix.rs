//! Frozen matrices, in FP16 or as codes of 8 or 4 bits with scales.

use std::ops::Range;

use half::f16;

use crate::{
    device::{
        Frozen, View,
        cpu::{bf16, vectors, widen},
        frozen::Order,
        page_cache::Region,
    },
    error::Result,
    kernels::{
        nf4::{Nf4, Sizes},
        q8,
    },
};

/// The scales of a matrix of codes.
#[derive(Debug, Clone, Copy)]
pub enum Scales<T> {
    /// Of 8-bit codes as [`q8`] describes them: `(rows, blocks)` in FP16.
    Q8(T),
    /// Of 4-bit codes, see [`nf4`](crate::kernels::nf4).
    Nf4 {
        /// Codes of the scales, `(cols, blocks)` in U8.
        codes: T,
        /// Their offset and factors, F32.
        nested: T,
    },
}

impl<T> Scales<T> {
    /// The same with other tensors.
    fn map<V>(self, mut with: impl FnMut(T) -> V) -> Scales<V> {
        match self {
            Self::Q8(scales) => Scales::Q8(with(scales)),
            Self::Nf4 { codes, nested } => Scales::Nf4 { codes: with(codes), nested: with(nested) },
        }
    }

    /// Its tensors.
    pub fn tensors(self) -> impl Iterator<Item = T> {
        let (first, second) = match self {
            Self::Q8(scales) => (scales, None),
            Self::Nf4 { codes, nested } => (codes, Some(nested)),
        };
        [Some(first), second].into_iter().flatten()
    }

    fn as_ref(&self) -> Scales<&T> {
        match self {
            Self::Q8(scales) => Scales::Q8(scales),
            Self::Nf4 { codes, nested } => Scales::Nf4 { codes, nested },
        }
    }

    fn as_mut(&mut self) -> Scales<&mut T> {
        match self {
            Self::Q8(scales) => Scales::Q8(scales),
            Self::Nf4 { codes, nested } => Scales::Nf4 { codes, nested },
        }
    }
}

/// A frozen matrix `(rows, cols)`: FP16, or codes with scales.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    /// The elements: FP16, I8, or words of 4-bit codes as bytes, U8; on a device rows of zeros may follow FP16 and I8.
    pub data: View<'a>,
    /// Scales of the blocks, where the elements are codes.
    pub scales: Option<Scales<View<'a>>>,
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
    /// Row by row: everywhere except in copies that a CPU process made for its kernels. Codes of 4 bits have an order of
    /// their own and count as this.
    #[default]
    Rows,
    /// Strips of 32 columns one after another, each row by row: reading some columns of all rows is one sequential
    /// read. The last strip of FP16 is padded; 8-bit codes have whole strips alone, with the scales of one strip after
    /// those of the other.
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

    /// A matrix `(rows, cols)` of 8-bit codes with scales `(rows, blocks)`.
    pub fn codes(data: View<'a>, scales: View<'a>, rows: usize, cols: usize) -> Self {
        Self { scales: Some(Scales::Q8(scales)), ..Self::f16(data, rows, cols) }
    }

    /// A matrix of 4-bit codes.
    pub fn nf4(matrix: Nf4<'a>) -> Self {
        let Nf4 { sizes, codes, scales, nested } = matrix;
        let scales = Scales::Nf4 { codes: scales.into(), nested: nested.into() };
        Self { scales: Some(scales), ..Self::f16(codes.into(), sizes.rows, sizes.cols) }
    }

    /// Its elements on the host.
    ///
    /// # Panics
    /// When it has fewer elements than its sizes say, or of another type.
    pub(in crate::kernels) fn host(self) -> Elements<'a> {
        let Self { data, scales, rows, cols, layout, .. } = self;
        if let Some(Scales::Nf4 { codes, nested }) = scales {
            let sizes = Sizes { rows, cols };
            let matrix = Nf4 { sizes, codes: data.host(), scales: codes.host(), nested: nested.host() };
            return Elements::Nf4(matrix.check());
        }
        let padded = if layout == Layout::Strips { cols.next_multiple_of(STRIP) } else { cols };
        assert!(data.len() >= rows * padded, "a matrix of {rows} x {cols} has more elements");
        match (scales, layout) {
            (None, Layout::Rows) => Elements::F16(data.host()),
            (None, Layout::Strips) => Elements::Strips(data.host(), rows),
            (Some(scales), layout) => {
                let scales: &[f16] = scales.tensors().next().map(View::host).unwrap_or_default();
                assert!(scales.len() >= rows * q8::blocks(cols), "a scale for every block");
                match layout {
                    Layout::Rows => Elements::Codes(data.host(), scales),
                    Layout::Strips => Elements::CodesInStrips(data.host(), scales, rows),
                }
            }
        }
    }

    /// The matrix with the rows of zeros that follow it, which 4-bit codes never have.
    pub fn padded(self) -> Self {
        match self.scales {
            Some(Scales::Nf4 { .. }) => self,
            _ => Self { rows: self.data.len() / self.cols.max(1), ..self },
        }
    }

    /// One row of a matrix in rows.
    ///
    /// # Panics
    /// When it has no such row, or is in strips or codes of 4 bits.
    pub fn row(self, row: usize) -> Self {
        let in_rows = self.layout == Layout::Rows && !matches!(self.scales, Some(Scales::Nf4 { .. }));
        assert!(in_rows, "a row of strips is not in one piece");
        let blocks = q8::blocks(self.cols);
        Self {
            data: self.data.slice(row * self.cols, self.cols),
            scales: self.scales.map(|scales| scales.map(|scales| scales.slice(row * blocks, blocks))),
            rows: 1,
            ..self
        }
    }

    /// Hands out a copy in the memory of the host, or the matrix itself where the host sees it.
    pub(in crate::kernels) fn with_host_copy(self, work: impl FnOnce(Matrix)) {
        let Self { data, rows, cols, .. } = self;
        if data.device().is_host_visible() {
            return work(self);
        }
        match self.scales {
            None => {
                // No device has a matrix with values that FP16 does not hold: BF16 is rounded from it.
                let copy: Vec<f16> = self.to_floats().into_iter().map(f16::from_f32).collect();
                work(Matrix::f16((&copy[..]).into(), rows, cols));
            }
            Some(Scales::Q8(scales)) => {
                let (codes, scales) = (data.to_vec::<i8>(), scales.to_vec::<f16>());
                work(Matrix::codes((&codes[..]).into(), (&scales[..]).into(), rows, cols));
            }
            Some(Scales::Nf4 { codes: scales, nested }) => {
                let (codes, scales, nested) =
                    (data.to_vec::<u8>(), scales.to_vec::<u8>(), nested.to_vec::<f32>());
                let sizes = Sizes { rows, cols };
                work(Matrix::nf4(Nf4 { sizes, codes: &codes, scales: &scales, nested: &nested }));
            }
        }
    }

    /// A copy on the host, as FP32 `(rows, cols)`. For tests and small tools.
    pub fn to_floats(self) -> Vec<f32> {
        let (values, eight, four, codes, factors, nested);
        let elements = match (self.scales, self.layout) {
            (None, Layout::Rows) => return self.data.slice(0, self.rows * self.cols).to_floats(),
            (None, Layout::Strips) => {
                values = self.data.to_vec::<f16>();
                Elements::Strips(&values, self.rows)
            }
            (Some(Scales::Q8(scales)), layout) => {
                (eight, factors) = (self.data.to_vec::<i8>(), scales.to_vec::<f16>());
                match layout {
                    Layout::Rows => Elements::Codes(&eight, &factors),
                    Layout::Strips => Elements::CodesInStrips(&eight, &factors, self.rows),
                }
            }
            (Some(Scales::Nf4 { codes: of_scales, nested: rest }), _) => {
                four = self.data.to_vec::<u8>();
                (codes, nested) = (of_scales.to_vec::<u8>(), rest.to_vec::<f32>());
                let sizes = Sizes { rows: self.rows, cols: self.cols };
                Elements::Nf4(Nf4 { sizes, codes: &four, scales: &codes, nested: &nested }.check())
            }
        };
        let mut floats = vec![0f32; self.rows * self.cols];
        elements.widen_rows(self.cols, 0..self.rows, 0..self.cols, &mut floats);
        floats
    }
}

/// A read-only matrix of the base, `(rows, cols)`: FP16, or codes of 8 or 4 bits with their scales.
#[derive(Debug, Clone)]
pub struct FrozenMatrix {
    /// The elements: FP16, I8, or words of 4-bit codes as bytes, U8.
    pub data: Frozen,
    /// Scales of the blocks, where the elements are codes.
    pub scales: Option<Scales<Frozen>>,
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
            scales: scales.as_ref().map(|scales| scales.as_ref().map(Frozen::view)),
            rows,
            cols,
            layout,
            arithmetic,
        }
    }

    /// Copies matrices and `others` from mapped files into large pages of the process, the matrices in strips where
    /// this CPU's kernels read them faster for products of `rows` rows, if these are known. Does nothing where there are
    /// no large pages.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::error::Error::Memory) when there is too little memory; nothing is changed then.
    pub fn settle(matrices: &mut [&mut Self], others: Vec<&mut Frozen>, rows: Option<usize>) -> Result<()> {
        let layouts: Vec<Layout> = matrices.iter().map(|matrix| matrix.best_layout(rows)).collect();
        let mut tensors = Vec::new();
        for (matrix, &layout) in matrices.iter_mut().zip(&layouts) {
            let rows = matrix.rows;
            let order = |bytes: usize| match layout {
                Layout::Rows => Order::AsItIs,
                Layout::Strips => Order::Strips { rows, bytes },
            };
            let width = STRIP * matrix.data.view().dtype().size();
            tensors.push((&mut matrix.data, order(width)));
            // A strip of a row of 8-bit codes is a block.
            let scales = matrix.scales.iter_mut().flat_map(|scales| scales.as_mut().tensors());
            tensors.extend(scales.map(|scales| (scales, order(size_of::<f16>()))));
        }
        tensors.extend(others.into_iter().map(|tensor| (tensor, Order::AsItIs)));
        if Frozen::settle(&mut tensors)? {
            for (matrix, layout) in matrices.iter_mut().zip(layouts) {
                matrix.layout = layout;
            }
        }
        Ok(())
    }

    fn best_layout(&self, rows: Option<usize>) -> Layout {
        let faster = match self.scales {
            None => true,
            // For passes of few rows, as in generation: one row takes 0.7 of the time, 8 rows 0.8 to 0.9, 32 rows 0.65.
            Some(Scales::Q8(_)) => rows.is_some(),
            // They have an order of their own.
            Some(Scales::Nf4 { .. }) => false,
        };
        let whole = faster && self.cols.is_multiple_of(STRIP);
        if whole && vectors() { Layout::Strips } else { Layout::Rows }
    }

    /// Its tensors: elements, and scales of codes.
    pub fn tensors(&self) -> impl Iterator<Item = &Frozen> {
        std::iter::once(&self.data).chain(self.scales.iter().flat_map(|scales| scales.as_ref().tensors()))
    }

    /// As [`FrozenMatrix::tensors`], for replacing them.
    pub fn tensors_mut(&mut self) -> impl Iterator<Item = &mut Frozen> {
        let scales = self.scales.iter_mut().flat_map(|scales| scales.as_mut().tensors());
        std::iter::once(&mut self.data).chain(scales)
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
    /// 8-bit codes, and the scales of their blocks.
    Codes(&'a [i8], &'a [f16]),
    /// 8-bit codes in strips, their scales strip by strip, and the number of rows.
    CodesInStrips(&'a [i8], &'a [f16], usize),
    /// 4-bit codes.
    Nf4(Nf4<'a>),
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
            Self::CodesInStrips(codes, scales, rows) => {
                let mut column = column;
                let mut to = to;
                while !to.is_empty() {
                    let count = (STRIP - column % STRIP).min(to.len());
                    let (piece, rest) = to.split_at_mut(count);
                    let scale = &scales[column / STRIP * rows + row..][..1];
                    q8::widen(
                        &codes[strip_start(rows, row, column)..][..count],
                        scale,
                        column % STRIP,
                        piece,
                    );
                    column += count;
                    to = rest;
                }
            }
            Self::Nf4(matrix) => matrix.widen(row..row + 1, column..column + to.len(), to),
        }
    }

    /// Widens some rows and columns of a matrix with `cols` columns, `(rows, columns)`.
    pub(in crate::kernels) fn widen_rows(
        self,
        cols: usize,
        rows: Range<usize>,
        columns: Range<usize>,
        to: &mut [f32],
    ) {
        if let Self::Nf4(matrix) = self {
            // The scales of a block of rows are decoded once.
            return matrix.widen(rows, columns, to);
        }
        for (row, to) in rows.zip(to.chunks_exact_mut(columns.len().max(1))) {
            self.widen(cols, (row, columns.start), to);
        }
    }
}
