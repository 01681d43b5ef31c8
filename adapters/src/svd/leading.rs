//! The largest singular values of a matrix, with their vectors, by products with thin blocks alone.
//!
//! A random block (Halko, Martinsson and Tropp 2011, arXiv:0909.4061) is multiplied by the matrix and by its transpose in
//! turn. All blocks together are the basis, a block Krylov space (Musco and Musco 2015, arXiv:1504.05477), in which the
//! singular vectors are looked for. When the basis is full, it begins again from the best vectors so far and their
//! residuals (Wu and Simon 2000, thick restarts). It ends when the residuals are small, so the result is that of
//! [`Svd::of`] up to [`TOLERANCE`], and the time does not depend on luck with the random block.

use candle_core::{Device, Tensor};
use engraft_util::rng;

use super::{Matrix, Svd, combined, dot, norm};

/// Vectors of a block beyond those that are asked for; they make the last of these converge as fast as the others.
const MORE: usize = 8;
/// Blocks of a full basis. More of them converge in fewer products, and take longer in between.
const BLOCKS: usize = 5;
/// Largest norm of `A^T u - s v`, over the largest singular value. The error of a singular value is its square.
const TOLERANCE: f64 = 1e-6;
/// Restarts after which the matrix is rotated as a whole. Two to ten are usual.
const MOST_RESTARTS: usize = 60;
/// Seed of the first block: the same matrix gives the same result.
const SEED: u64 = 0x5_eed;

impl Svd {
    /// The `rank` largest singular values of a matrix, and their vectors: all of them where it has no more.
    pub fn leading(matrix: &Matrix, rank: usize) -> Self {
        let (long, short) = (matrix.rows.max(matrix.cols), matrix.rows.min(matrix.cols));
        let block = rank + MORE;
        let whole = || {
            let mut all = Self::of(matrix);
            all.cut(rank);
            all
        };
        // A basis of nearly all directions costs more than rotating all of them.
        if rank == 0 || BLOCKS * block >= short {
            return whole();
        }
        let is_wide = matrix.cols > matrix.rows;
        let found = Tall::new(matrix, is_wide, (long, short)).and_then(|tall| tall.leading(rank, block));
        // No product of these sizes fails; if one does, there is another way.
        match found {
            Ok(Some(found)) if is_wide => found.swapped(),
            Ok(Some(found)) => found,
            _ => whole(),
        }
    }

    /// Leaves the first `rank` values and vectors.
    fn cut(&mut self, rank: usize) {
        self.u.truncate(rank);
        self.v.truncate(rank);
        self.values.truncate(rank);
    }
}

/// A matrix of at least as many rows as columns.
struct Tall {
    /// [rows, cols].
    matrix: Tensor,
    cols: usize,
}

/// Orthonormal vectors v, and what the matrix makes of them.
#[derive(Default)]
struct Basis {
    vectors: Vec<Vec<f64>>,
    images: Vec<Vec<f64>>,
}

impl Tall {
    fn new(matrix: &Matrix, is_wide: bool, (rows, cols): (usize, usize)) -> candle_core::Result<Self> {
        let tensor = Tensor::from_slice(&matrix.values, (matrix.rows, matrix.cols), &Device::Cpu)?;
        let tall = if is_wide { tensor.t()? } else { tensor };
        debug_assert_eq!(tall.dims(), [rows, cols]);
        Ok(Self { matrix: tall, cols })
    }

    /// The matrix, or its transpose, times vectors.
    fn times(&self, vectors: &[Vec<f64>], transposed: bool) -> candle_core::Result<Vec<Vec<f64>>> {
        let Some(len) = vectors.first().map(Vec::len) else { return Ok(Vec::new()) };
        // [len, count], as the transpose of vectors one after another.
        let block = Tensor::from_vec(vectors.concat(), (vectors.len(), len), &Device::Cpu)?.t()?;
        let product =
            if transposed { self.matrix.t()?.matmul(&block)? } else { self.matrix.matmul(&block)? };
        product.t()?.contiguous()?.to_vec2()
    }

    /// Nothing where the residuals stay large.
    fn leading(&self, rank: usize, block: usize) -> candle_core::Result<Option<Svd>> {
        let mut basis = Basis::default();
        let drawn = |at: usize| {
            let key = rng::key(&[SEED, at as u64]);
            (0..self.cols as u64).map(|row| rng::normal(key, row).into()).collect()
        };
        let mut next: Vec<Vec<f64>> = (0..block).map(drawn).collect();
        for _ in 0..MOST_RESTARTS {
            let mut is_closed = false;
            while !is_closed && basis.vectors.len() < BLOCKS * block {
                let fresh = basis.add(next);
                is_closed = fresh == basis.vectors.len();
                let images = self.times(&basis.vectors[fresh..], false)?;
                // A block of no new vectors: the matrix maps the basis onto itself.
                next = if is_closed { Vec::new() } else { self.times(&images, true)? };
                basis.images.extend(images);
            }
            let mut found = basis.best(block);
            let back = self.times(&found.u, true)?;
            let residual = |((back, v), s): ((Vec<f64>, &Vec<f64>), &f64)| -> Vec<f64> {
                back.iter().zip(v).map(|(back, v)| back - s * v).collect()
            };
            next = back.into_iter().zip(&found.v).zip(&found.values).map(residual).collect();
            let largest = found.values.first().copied().unwrap_or(0.0);
            let worst = next.iter().take(rank).map(|residual| norm(residual)).fold(0.0, f64::max);
            if is_closed || worst <= TOLERANCE * largest {
                found.cut(rank);
                return Ok(Some(found));
            }
            let scaled = |(u, s): (&Vec<f64>, &f64)| u.iter().map(|u| u * s).collect();
            basis.images = found.u.iter().zip(&found.values).map(scaled).collect();
            basis.vectors = found.v;
        }
        Ok(None)
    }
}

impl Basis {
    /// Adds the parts of `vectors` outside the present span, made orthonormal; returns the index of the first one.
    fn add(&mut self, vectors: Vec<Vec<f64>>) -> usize {
        let first = self.vectors.len();
        for mut vector in vectors {
            let whole = norm(&vector);
            // Twice makes right angles to the last bits.
            for _ in 0..2 {
                for known in &self.vectors {
                    let part = dot(known, &vector);
                    vector.iter_mut().zip(known).for_each(|(x, known)| *x -= part * known);
                }
            }
            let length = norm(&vector);
            // A vector inside the span of the others leaves only rounding errors, which have no direction.
            if length > 1e-12 * whole {
                vector.iter_mut().for_each(|x| *x /= length);
                self.vectors.push(vector);
            }
        }
        first
    }

    /// The singular vectors that are closest within the basis, at most `count` of them (Rayleigh and Ritz).
    fn best(&self, count: usize) -> Svd {
        let mut within = Svd::tall(self.images.clone());
        within.cut(count);
        let v = within.v.iter().map(|turn| combined(&self.vectors, turn)).collect();
        Svd { v, ..within }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::svd::product;

    fn random(rows: usize, cols: usize, seed: u64) -> Matrix {
        let key = rng::key(&[seed]);
        Matrix::new(rows, cols, (0..(rows * cols) as u64).map(|at| rng::normal(key, at).into()).collect())
    }

    /// `U diag(values) V^T` with random U and V.
    fn with_values(rows: usize, cols: usize, values: &[f64], seed: u64) -> Matrix {
        let count = values.len();
        let (left, right) = (Svd::of(&random(rows, count, seed)), Svd::of(&random(count, cols, seed + 1)));
        let scaled = (0..rows).flat_map(|row| {
            let left = &left;
            values.iter().enumerate().map(move |(k, s)| left.u[k][row] * s)
        });
        let right = (0..count).flat_map(|k| right.v[k].clone()).collect();
        product(&Matrix::new(rows, count, scaled.collect()), &Matrix::new(count, cols, right))
    }

    /// The sum of the triples, and the largest departure of U and V from right angles and unit length.
    fn put_together(svd: &Svd, cols: usize) -> (Vec<f64>, f64) {
        let mut sum = vec![0.0; svd.u[0].len() * cols];
        let mut worst = 0.0f64;
        for (k, ((u, v), s)) in svd.u.iter().zip(&svd.v).zip(&svd.values).enumerate() {
            sum.iter_mut().enumerate().for_each(|(at, sum)| *sum += u[at / cols] * s * v[at % cols]);
            for other in 0..=k {
                let expected = if other == k { 1.0 } else { 0.0 };
                worst = worst.max((dot(u, &svd.u[other]) - expected).abs());
                worst = worst.max((dot(v, &svd.v[other]) - expected).abs());
            }
        }
        (sum, worst)
    }

    #[test]
    fn the_leading_triples_are_those_of_all() {
        let falling = |count: usize, rate: f64| (0..count).map(|k| rate.powi(k as i32)).collect::<Vec<f64>>();
        for (name, matrix) in [
            ("drawn, tall", random(170, 90, 1)),
            ("drawn, wide", random(80, 130, 2)),
            ("drawn, square", random(101, 101, 3)),
            ("falling", with_values(150, 95, &falling(95, 0.8), 4)),
            ("falling slowly", with_values(90, 140, &falling(90, 0.99), 5)),
            ("one is large", with_values(120, 90, &[&[50.0][..], &falling(89, 0.97)].concat(), 6)),
        ] {
            for rank in [1, 3, 7] {
                let (all, found) = (Svd::of(&matrix), Svd::leading(&matrix, rank));
                assert_eq!((found.values.len(), found.u.len(), found.v.len()), (rank, rank, rank));
                assert_eq!((found.u[0].len(), found.v[0].len()), (matrix.rows, matrix.cols));
                for (found, expected) in found.values.iter().zip(&all.values) {
                    assert!((found / expected - 1.0).abs() < 1e-10, "{name}: {found} {expected}");
                }
                let mut best = all;
                best.cut(rank);
                let (sum, angles) = put_together(&found, matrix.cols);
                let (expected, _) = put_together(&best, matrix.cols);
                let apart = sum.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(apart < 1e-4 * best.values[0] && angles < 1e-12, "{name}: {apart:.1e} {angles:.1e}");
                assert_eq!(Svd::leading(&matrix, rank).u, found.u, "the same again");
            }
        }
    }

    #[test]
    fn values_that_are_equal_and_ranks_that_are_not_there_are_found() {
        let equal = with_values(130, 100, &[&[3.0; 9][..], &[1.0; 60]].concat(), 7);
        let found = Svd::leading(&equal, 4);
        assert!(found.values.iter().all(|s| (s - 3.0).abs() < 1e-10), "{:?}", found.values);
        let (_, angles) = put_together(&found, 100);
        assert!(angles < 1e-12, "{angles}");

        let low = with_values(120, 100, &[2.0, 1.0], 8);
        let found = Svd::leading(&low, 5);
        let largest = [2.0, 1.0, 0.0, 0.0, 0.0];
        assert!(found.values.iter().zip(largest).all(|(a, b)| (a - b).abs() < 1e-12), "{:?}", found.values);
        let (sum, _) = put_together(&found, 100);
        assert!(sum.iter().zip(&low.values).all(|(a, b)| (a - b).abs() < 1e-12));

        let zero = Svd::leading(&Matrix::new(100, 90, vec![0.0; 9000]), 3);
        assert!(zero.values.iter().all(|&s| s == 0.0));
        let (wide, _) = zero.factors(3);
        assert!(wide.iter().all(|&x| x == 0.0));
        assert!(Svd::leading(&random(9, 7, 9), 0).values.is_empty());
        assert_eq!(Svd::leading(&random(9, 7, 9), 12).values.len(), 7);
    }
}
