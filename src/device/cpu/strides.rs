//! Strides of a matrix in memory.

/// Distances in elements: element (i, j) of a matrix is at `start + i * row + j * column`.
#[derive(Clone, Copy)]
pub struct Strides {
    /// Elements from a row to the next.
    pub row: usize,
    /// Elements from a column to the next.
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
