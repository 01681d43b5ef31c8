//! REFERENCE twin, in any precision, written out element by element. `p (r, n)`.

use engraft_util::real::Real;

/// `P P^T - I (r, r)`.
fn gram<T: Real>(p: &[T], rank: usize) -> Vec<T> {
    let n = p.len() / rank;
    let dot = |i: usize, j: usize| (0..n).map(|k| p[i * n + k] * p[j * n + k]).sum::<T>();
    let element = |i: usize, j: usize| dot(i, j) - if i == j { T::one() } else { T::zero() };
    (0..rank * rank).map(|at| element(at / rank, at % rank)).collect()
}

/// `R = || P P^T - I ||_F`.
pub fn penalty<T: Real>(p: &[T], rank: usize) -> T {
    gram(p, rank).into_iter().map(|x| x * x).sum::<T>().sqrt()
}

/// `dR/dP (r, n)`; in the forward pass `R = sqrt(sum of (P P^T - I)^2)`.
pub fn backward<T: Real>(p: &[T], rank: usize) -> Vec<T> {
    let (n, gram, penalty) = (p.len() / rank, gram(p, rank), penalty(p, rank));
    if penalty == T::zero() {
        return vec![T::zero(); p.len()];
    }
    let element = |i: usize, k: usize| (0..rank).map(|j| gram[i * rank + j] * p[j * n + k]).sum::<T>();
    (0..p.len()).map(|at| T::of(2.0) / penalty * element(at / n, at % n)).collect()
}
