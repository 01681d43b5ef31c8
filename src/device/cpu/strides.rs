//! How a matrix lies in memory.

/// A strided matrix in memory: element (i, j) stands at `start + i * row + j * column`.
#[derive(Clone, Copy)]
pub struct Strides {
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub column: usize,
}

impl Strides {
    /// Rows one after another, `row` elements apart.
    pub fn rows(row: usize) -> Self {
        Self { row, column: 1 }
    }

    /// The transpose of [`Strides::rows`].
    pub fn columns(column: usize) -> Self {
        Self { row: 1, column }
    }
}
