//! Descriptions of row-major matrix products for cuBLASLt, which is column-major.
//!
//! cuBLASLt computes `D (m, n) = op(A) (m, k) op(B) (k, n) + beta C` on column-major matrices; ours are
//! row-major. The same bytes, read the other way, are the transpose: a row-major `M (r, c)` with `ld` elements
//! between its rows is a column-major `M^T (c, r)` with `ld` between its columns. So for a row-major
//! `Y (rows, cols) = L (rows, inner) R (inner, cols)` we ask for `Y^T = R^T L^T`:
//!
//! - D is the buffer of Y, with m = cols, n = rows, k = inner;
//! - A is the buffer of R: read column-major it *is* `R^T (m, k)`, no op. Where the buffer holds
//!   `R^T (cols, inner)` row-major, column-major it is `R (k, m)`, and op is T;
//! - B is the buffer of L: read column-major it *is* `L^T (k, n)`, no op. Where the buffer holds
//!   `L^T (inner, rows)` row-major, column-major it is `L (n, k)`, and op is T;
//! - a bias of the rows of Y is one of the columns of D, as long as m, which is what the epilogue adds.
//!
//! | product | L | R |
//! |---|---|---|
//! | `y (n, cols) = x W (rows, cols)` | x as it is | W as it is |
//! | `y (n, rows) = x W^T` | x as it is | the buffer holds the transpose |
//! | `dW (out, in) = dy^T x` | the buffer holds the transpose | x as it is |

/// Largest alignment in bytes that an algorithm is chosen for: no one asks for more than its 16-byte loads need. Buffers
/// of one run may begin at multiples of 64 or of 256 bytes, by policy, and policies change no bit.
const MOST_ALIGNED: u64 = 16;

/// The alignment of an address in bytes that decides the algorithm of a product, 16 at most.
pub fn alignment(address: u64) -> u32 {
    1 << (address | MOST_ALIGNED).trailing_zeros()
}

/// A row-major factor in its buffer, as it is or transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FactorLayout {
    /// Whether the buffer holds the transpose.
    pub transposed: bool,
    /// Elements from a row of the buffer to the next.
    pub ld: usize,
}

impl FactorLayout {
    /// The buffer holds the factor as it is.
    pub fn plain(ld: usize) -> Self {
        Self { transposed: false, ld }
    }

    /// The buffer holds its transpose.
    pub fn transposed(ld: usize) -> Self {
        Self { transposed: true, ld }
    }
}

/// A column-major matrix in memory, and whether its transpose is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Whether its transpose is multiplied: op is T.
    pub transposed: bool,
    /// Rows in memory, before op.
    pub rows: usize,
    /// Columns in memory, before op.
    pub cols: usize,
    /// Elements from a column to the next.
    pub ld: usize,
}

/// Sizes and layouts of `D (m, n) = op(A) op(B) + beta C`, column-major; C has the layout of D.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemmLayout {
    /// Columns of the row-major result.
    pub m: usize,
    /// Rows of the row-major result.
    pub n: usize,
    /// Terms of each sum: the inner size.
    pub k: usize,
    /// A: the buffer of the right factor.
    pub a: Operand,
    /// B: the buffer of the left factor.
    pub b: Operand,
    /// D: the buffer of the result.
    pub d: Operand,
}

impl GemmLayout {
    /// Row-major `Y (rows, cols) = L (rows, inner) R (inner, cols)`, whose rows are `ld` elements apart.
    pub fn of(
        (rows, cols, inner): (usize, usize, usize),
        left: FactorLayout,
        right: FactorLayout,
        ld: usize,
    ) -> Self {
        let (m, n, k) = (cols, rows, inner);
        let operand = |stored: FactorLayout, plain: (usize, usize)| {
            let (rows, cols) = if stored.transposed { (plain.1, plain.0) } else { plain };
            Operand { transposed: stored.transposed, rows, cols, ld: stored.ld }
        };
        let d = Operand { transposed: false, rows: m, cols: n, ld };
        Self { m, n, k, a: operand(right, (m, k)), b: operand(left, (k, n)), d }
    }

    /// Row-major `y (n, cols) = x (n, rows) W (rows, cols)`, all dense.
    pub fn nn(n: usize, rows: usize, cols: usize) -> Self {
        Self::of((n, cols, rows), FactorLayout::plain(rows), FactorLayout::plain(cols), cols)
    }

    /// Row-major `y (n, rows) = x (n, cols) W^T` of a `W (rows, cols)`, all dense.
    pub fn nt(n: usize, rows: usize, cols: usize) -> Self {
        Self::of((n, rows, cols), FactorLayout::plain(cols), FactorLayout::transposed(cols), rows)
    }

    /// Row-major `dW (outputs, inputs) = dy^T x` of `dy (n, outputs)` and `x (n, inputs)`, all dense.
    pub fn tn(n: usize, inputs: usize, outputs: usize) -> Self {
        Self::of((outputs, inputs, n), FactorLayout::transposed(outputs), FactorLayout::plain(inputs), inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::doubles;

    /// The product that cuBLASLt's manual defines for the descriptor, in plain loops; memory that no matrix covers
    /// must not be touched.
    fn interpret(
        p: GemmLayout,
        a: &[f64],
        b: &[f64],
        c: &[f64],
        beta: f64,
        bias: Option<&[f64]>,
    ) -> Vec<f64> {
        let at = |operand: Operand, row: usize, column: usize| {
            let (row, column) = if operand.transposed { (column, row) } else { (row, column) };
            assert!(row < operand.rows && column < operand.cols && operand.ld >= operand.rows, "{operand:?}");
            row + column * operand.ld
        };
        let mut d = c.to_vec();
        for j in 0..p.n {
            for i in 0..p.m {
                let sum: f64 = (0..p.k).map(|k| a[at(p.a, i, k)] * b[at(p.b, k, j)]).sum();
                let place = at(p.d, i, j);
                d[place] = sum + beta * c[place] + bias.map_or(0.0, |bias| bias[i]);
            }
        }
        d
    }

    fn close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        found.iter().zip(expected).for_each(|(a, b)| assert!((a - b).abs() < 1e-12, "{a} against {b}"));
    }

    #[test]
    fn a_layer_forward_has_its_bias_and_residual() {
        let (n, rows, cols) = (5, 3, 7);
        let (x, w, bias) = (doubles(1, n * rows), doubles(2, rows * cols), doubles(3, cols));
        let residual = doubles(4, n * cols);
        let mut expected = residual.clone();
        for i in 0..n {
            for j in 0..cols {
                let sum: f64 = (0..rows).map(|k| x[i * rows + k] * w[k * cols + j]).sum();
                expected[i * cols + j] += sum + bias[j];
            }
        }
        close(&interpret(GemmLayout::nn(n, rows, cols), &w, &x, &residual, 1.0, Some(&bias)), &expected);
    }

    #[test]
    fn a_layer_backward_reads_the_same_bytes_transposed() {
        let (n, rows, cols) = (4, 6, 5);
        let (dy, w) = (doubles(1, n * cols), doubles(2, rows * cols));
        let mut expected = vec![0.0; n * rows];
        for i in 0..n {
            for j in 0..rows {
                expected[i * rows + j] = (0..cols).map(|k| dy[i * cols + k] * w[j * cols + k]).sum();
            }
        }
        close(&interpret(GemmLayout::nt(n, rows, cols), &w, &dy, &vec![0.0; n * rows], 0.0, None), &expected);
    }

    #[test]
    fn a_weight_gradient_is_added() {
        let (n, inputs, outputs) = (6, 3, 4);
        let (dy, x, before) = (doubles(1, n * outputs), doubles(2, n * inputs), doubles(3, outputs * inputs));
        let mut expected = before.clone();
        for o in 0..outputs {
            for i in 0..inputs {
                expected[o * inputs + i] +=
                    (0..n).map(|k| dy[k * outputs + o] * x[k * inputs + i]).sum::<f64>();
            }
        }
        close(&interpret(GemmLayout::tn(n, inputs, outputs), &x, &dy, &before, 1.0, None), &expected);
    }

    #[test]
    fn buffers_of_an_arena_have_the_algorithms_of_any_other() {
        // Arenas align to 64 bytes, allocations to 256; rows of FP16 matrices of odd widths to less.
        assert_eq!([0x100, 0x40, 0x50, 0x1000].map(alignment), [16; 4]);
        assert_eq!([0x108, 0x44, 0x42, 0x41].map(alignment), [8, 4, 2, 1]);
        assert_eq!(alignment(0), 16);
    }

    #[test]
    fn rows_that_stand_apart_leave_what_is_between_them() {
        // Logits: y (n, v) of hidden (n, c) and E (v, c), rows of y padded to `ld`; then a stretch of E alone.
        let (n, v, c, ld) = (3, 5, 4, 8);
        let (hidden, table) = (doubles(1, n * c), doubles(2, v * c));
        let padding = vec![9.0; n * ld];
        let mut expected = padding.clone();
        for i in 0..n {
            for j in 0..v {
                expected[i * ld + j] = (0..c).map(|k| hidden[i * c + k] * table[j * c + k]).sum();
            }
        }
        let whole = GemmLayout::of((n, v, c), FactorLayout::plain(c), FactorLayout::transposed(c), ld);
        let y = interpret(whole, &table, &hidden, &padding, 0.0, None);
        close(&y, &expected);
        let part = GemmLayout::of((n, 2, c), FactorLayout::plain(c), FactorLayout::transposed(c), ld);
        let stretch = interpret(part, &table[3 * c..], &hidden, &padding[3..], 0.0, None);
        (0..n).for_each(|i| close(&stretch[i * ld..i * ld + 2], &expected[i * ld + 3..i * ld + 5]));
    }

    #[test]
    fn a_product_may_be_summed_in_stretches_of_its_inner_size() {
        let (n, rows, cols) = (3, 7, 4);
        let (x, w) = (doubles(1, n * rows), doubles(2, rows * cols));
        let whole = interpret(GemmLayout::nn(n, rows, cols), &w, &x, &vec![0.0; n * cols], 0.0, None);
        let stretch = |count| {
            GemmLayout::of((n, cols, count), FactorLayout::plain(rows), FactorLayout::plain(cols), cols)
        };
        let first = interpret(stretch(5), &w, &x, &vec![0.0; n * cols], 0.0, None);
        close(&interpret(stretch(2), &w[5 * cols..], &x[5..], &first, 1.0, None), &whole);
    }
}
