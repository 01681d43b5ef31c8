//! Singular values and vectors in F64, by one-sided Jacobi rotations (Hestenes 1958; Golub and Van Loan, section 8.6.3).
//!
//! It is short, accurate to rounding, and needs no other crate; a library that is faster for dense matrices (faer) took
//! 107 s of CPU time to compile. Products of low rank, of which most deltas consist, are reduced to their ranks before.

mod leading;

/// A matrix in F64, row-major.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Matrix {
    pub rows: usize,
    pub cols: usize,
    pub values: Vec<f64>,
}

/// `U diag(s) V^T`, singular values falling.
#[derive(Debug, Clone)]
pub(crate) struct Svd {
    /// [rows, k], stored as k vectors, one after another.
    pub u: Vec<Vec<f64>>,
    /// `[k]`.
    pub values: Vec<f64>,
    /// [cols, k], as k vectors.
    pub v: Vec<Vec<f64>>,
}

/// Vectors that are this close to a right angle are one: the rounding of their dot product.
const ORTHOGONAL: f64 = 1e-15;
/// Sweeps over all pairs; a dozen are enough for any matrix that was seen.
const MOST_SWEEPS: usize = 60;

impl Matrix {
    pub fn new(rows: usize, cols: usize, values: Vec<f64>) -> Self {
        assert_eq!(values.len(), rows * cols, "a value for each place");
        Self { rows, cols, values }
    }

    fn columns(&self) -> Vec<Vec<f64>> {
        (0..self.cols).map(|col| self.values.iter().skip(col).step_by(self.cols).copied().collect()).collect()
    }

    fn row_vectors(&self) -> Vec<Vec<f64>> {
        self.values.chunks(self.cols.max(1)).map(<[f64]>::to_vec).collect()
    }
}

impl Svd {
    /// Of any matrix.
    pub fn of(matrix: &Matrix) -> Self {
        // Fewer vectors than elements of each: a wide matrix by its rows.
        if matrix.cols > matrix.rows {
            Self::tall(matrix.row_vectors()).swapped()
        } else {
            Self::tall(matrix.columns())
        }
    }

    /// Of `left right`, [rows, r] and [r, cols], without making the product: with QR of both factors it is
    /// `Q1 (R1 R2^T) Q2^T`, and the middle has r rows.
    pub fn of_product(left: &Matrix, right: &Matrix) -> Self {
        assert_eq!(left.cols, right.rows, "an inner size");
        let rank = left.cols;
        if rank >= left.rows.min(right.cols) {
            return Self::of(&product(left, right));
        }
        let (q1, r1) = qr(left.columns());
        let (q2, r2) = qr(right.row_vectors());
        // R1 R2^T, rows of which are dot products of rows of upper triangles.
        let middle = (0..rank * rank).map(|at| {
            let (i, j) = (at / rank, at % rank);
            (i.max(j)..rank).map(|k| r1[i * rank + k] * r2[j * rank + k]).sum()
        });
        let inner = Self::of(&Matrix::new(rank, rank, middle.collect()));
        let turned =
            |q: &[Vec<f64>], inner: &[Vec<f64>]| inner.iter().map(|small| combined(q, small)).collect();
        Self { u: turned(&q1, &inner.u), v: turned(&q2, &inner.v), values: inner.values }
    }

    /// Of the matrix with these columns, at most as many as each has elements.
    fn tall(columns: Vec<Vec<f64>>) -> Self {
        let count = columns.len();
        // Rotating the triangle of a QR instead of long columns costs less, and its rows converge sooner.
        let (q, r) = qr(columns);
        let mut rotated: Vec<Vec<f64>> = r.chunks(count.max(1)).map(<[f64]>::to_vec).collect();
        let mut turns: Vec<Vec<f64>> =
            (0..count).map(|at| (0..count).map(|other| f64::from(at == other)).collect()).collect();
        // R^T W = V diag(s), so that R = W diag(s) V^T with the rotations W.
        for _ in 0..MOST_SWEEPS {
            if !sweep(&mut rotated, &mut turns) {
                break;
            }
        }
        let lengths: Vec<f64> = rotated.iter().map(|vector| norm(vector)).collect();
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by(|&a, &b| lengths[b].total_cmp(&lengths[a]));
        let unit = |at: usize| {
            let length = if lengths[at] > 0.0 { lengths[at] } else { 1.0 };
            rotated[at].iter().map(|x| x / length).collect()
        };
        Self {
            u: order.iter().map(|&at| combined(&q, &turns[at])).collect(),
            values: order.iter().map(|&at| lengths[at]).collect(),
            v: order.iter().map(|&at| unit(at)).collect(),
        }
    }

    /// Of the transpose.
    pub fn swapped(self) -> Self {
        Self { u: self.v, v: self.u, ..self }
    }

    /// The best factors of `rank`: `U diag(s)` [rows, rank] and `V^T` [rank, cols], with zeros where the matrix has no
    /// more singular vectors.
    pub fn factors(&self, rank: usize) -> (Vec<f32>, Vec<f32>) {
        let (rows, cols) = (self.u.first().map_or(0, Vec::len), self.v.first().map_or(0, Vec::len));
        let (mut left, mut right) = (vec![0.0; rows * rank], vec![0.0; rank * cols]);
        for (k, ((u, v), s)) in self.u.iter().zip(&self.v).zip(&self.values).take(rank).enumerate() {
            u.iter().enumerate().for_each(|(row, u)| left[row * rank + k] = (u * s) as f32);
            v.iter().enumerate().for_each(|(col, v)| right[k * cols + col] = *v as f32);
        }
        (left, right)
    }
}

/// `left right`, [rows, inner] and [inner, cols].
pub(crate) fn product(left: &Matrix, right: &Matrix) -> Matrix {
    let cols = right.cols;
    let mut values = vec![0.0; left.rows * cols];
    for (row, own) in values.chunks_exact_mut(cols.max(1)).zip(left.values.chunks(left.cols.max(1))) {
        for (factor, other) in own.iter().zip(right.values.chunks(cols.max(1))) {
            row.iter_mut().zip(other).for_each(|(sum, x)| *sum += factor * x);
        }
    }
    Matrix::new(left.rows, cols, values)
}

/// Turns every pair of vectors to a right angle, and the rows of `turns` along; whether any had to be.
fn sweep(vectors: &mut [Vec<f64>], turns: &mut [Vec<f64>]) -> bool {
    let mut turned = false;
    for i in 0..vectors.len() {
        for j in i + 1..vectors.len() {
            let (alpha, beta) = (dot(&vectors[i], &vectors[i]), dot(&vectors[j], &vectors[j]));
            let gamma = dot(&vectors[i], &vectors[j]);
            if gamma == 0.0 || gamma.abs() <= ORTHOGONAL * (alpha * beta).sqrt() {
                continue;
            }
            turned = true;
            let zeta = (beta - alpha) / (2.0 * gamma);
            let tangent = zeta.signum() / (zeta.abs() + (1.0 + zeta * zeta).sqrt());
            let cosine = 1.0 / (1.0 + tangent * tangent).sqrt();
            rotate(vectors, (i, j), cosine, cosine * tangent);
            rotate(turns, (i, j), cosine, cosine * tangent);
        }
    }
    turned
}

fn rotate(vectors: &mut [Vec<f64>], (i, j): (usize, usize), cosine: f64, sine: f64) {
    let (before, after) = vectors.split_at_mut(j);
    for (x, y) in before[i].iter_mut().zip(&mut after[0]) {
        (*x, *y) = (cosine * *x - sine * *y, sine * *x + cosine * *y);
    }
}

/// The orthonormal vectors of a QR decomposition of `columns`: zeros for a column that depends on those before it.
pub(crate) fn orthonormal(columns: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    qr(columns).0
}

/// Orthonormal vectors, and the upper triangle R [k, k], row-major, with which `columns` are their sums. By
/// Gram-Schmidt, done twice, which makes right angles to the last bits. A column that depends on those before it gets a
/// zero on the diagonal and a vector of zeros.
fn qr(columns: Vec<Vec<f64>>) -> (Vec<Vec<f64>>, Vec<f64>) {
    let count = columns.len();
    let (mut q, mut r): (Vec<Vec<f64>>, _) = (Vec::with_capacity(count), vec![0.0; count * count]);
    for (j, mut column) in columns.into_iter().enumerate() {
        let whole = norm(&column);
        for _ in 0..2 {
            for (i, known) in q.iter().enumerate() {
                let part = dot(known, &column);
                r[i * count + j] += part;
                column.iter_mut().zip(known).for_each(|(x, known)| *x -= part * known);
            }
        }
        let length = norm(&column);
        // What is left of a column in the span of the others is rounding, and points anywhere.
        let is_new = length > 1e-14 * whole;
        r[j * count + j] = if is_new { length } else { 0.0 };
        column.iter_mut().for_each(|x| *x = if is_new { *x / length } else { 0.0 });
        q.push(column);
    }
    (q, r)
}

/// The sum of `vectors` times `factors`.
fn combined(vectors: &[Vec<f64>], factors: &[f64]) -> Vec<f64> {
    let mut sum = vec![0.0; vectors.first().map_or(0, Vec::len)];
    for (vector, factor) in vectors.iter().zip(factors) {
        sum.iter_mut().zip(vector).for_each(|(sum, x)| *sum += factor * x);
    }
    sum
}

/// In eight sums, which the compiler makes vectors of.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    let (a8, b8) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a8.0.iter().zip(b8.0) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f64>() + a8.1.iter().zip(b8.1).map(|(a, b)| a * b).sum::<f64>()
}

fn norm(vector: &[f64]) -> f64 {
    dot(vector, vector).sqrt()
}

#[cfg(test)]
mod tests {
    use engraft_util::rng;

    use super::*;

    fn random(rows: usize, cols: usize, seed: u64) -> Matrix {
        let key = rng::key(&[seed]);
        Matrix::new(rows, cols, (0..(rows * cols) as u64).map(|at| rng::normal(key, at).into()).collect())
    }

    fn distance(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }

    /// `U diag(s) V^T`, and the largest departure of U and V from right angles.
    fn put_together(svd: &Svd) -> (Vec<f64>, f64) {
        let (rows, cols) = (svd.u[0].len(), svd.v[0].len());
        let mut sum = vec![0.0; rows * cols];
        let mut worst = 0.0f64;
        for (k, ((u, v), s)) in svd.u.iter().zip(&svd.v).zip(&svd.values).enumerate() {
            for (at, sum) in sum.iter_mut().enumerate() {
                *sum += u[at / cols] * s * v[at % cols];
            }
            for other in 0..k {
                worst = worst.max(dot(u, &svd.u[other]).abs()).max(dot(v, &svd.v[other]).abs());
            }
        }
        (sum, worst)
    }

    #[test]
    fn any_matrix_is_put_together_again() {
        for (rows, cols) in [(7, 5), (5, 7), (24, 24), (1, 9), (9, 1), (40, 13)] {
            let matrix = random(rows, cols, 1);
            let svd = Svd::of(&matrix);
            let (again, worst) = put_together(&svd);
            assert!(distance(&again, &matrix.values) < 1e-13 && worst < 1e-13, "{rows} {cols}: {worst}");
            assert!(svd.values.is_sorted_by(|a, b| a >= b) && svd.values.len() == rows.min(cols));
            let squares: f64 = svd.values.iter().map(|s| s * s).sum();
            assert!((squares - dot(&matrix.values, &matrix.values)).abs() < 1e-11);
        }
    }

    #[test]
    fn known_singular_values_are_found() {
        // [[3, 0], [4, 5]] has 3 sqrt(5) and sqrt(5).
        let svd = Svd::of(&Matrix::new(2, 2, vec![3.0, 0.0, 4.0, 5.0]));
        assert!(distance(&svd.values, &[45f64.sqrt(), 5f64.sqrt()]) < 1e-14);
        let zero = Svd::of(&Matrix::new(3, 2, vec![0.0; 6]));
        assert_eq!(zero.values, [0.0, 0.0]);
        assert_eq!(zero.factors(2), (vec![0.0; 6], vec![0.0; 4]));
    }

    #[test]
    fn a_product_has_the_values_of_the_matrix_it_makes() {
        for rank in [1, 3, 6, 9] {
            let (mut left, right) = (random(11, rank, 2), random(rank, 8, 3));
            // Columns that depend on each other, as in two adapters of one A.
            if rank == 6 {
                left.values.chunks_mut(rank).for_each(|row| row[4] = 2.0 * row[1]);
            }
            let (of_both, of_one) = (Svd::of_product(&left, &right), Svd::of(&product(&left, &right)));
            let shared = of_both.values.len().min(of_one.values.len());
            assert!(distance(&of_both.values[..shared], &of_one.values[..shared]) < 1e-12);
            assert!(of_one.values[shared..].iter().all(|s| *s < 1e-12));
            let (again, _) = put_together(&of_both);
            assert!(distance(&again, &product(&left, &right).values) < 1e-12);
        }
    }

    #[test]
    fn the_best_factors_of_a_rank_leave_out_the_smallest_values() {
        let matrix = random(9, 6, 4);
        let svd = Svd::of(&matrix);
        let (left, right) = svd.factors(4);
        let wide = |values: &[f32]| values.iter().map(|&x| x.into()).collect();
        let near = product(&Matrix::new(9, 4, wide(&left)), &Matrix::new(4, 6, wide(&right)));
        let error: f64 = near.values.iter().zip(&matrix.values).map(|(a, b)| (a - b).powi(2)).sum();
        // Eckart and Young 1936.
        let lost: f64 = svd.values[4..].iter().map(|s| s * s).sum();
        assert!((error - lost).abs() < 1e-5 * lost, "{error} {lost}");
        let (wide, _) = svd.factors(8);
        assert!(wide.chunks(8).all(|row| row[6..] == [0.0, 0.0]));
    }
}
