//! REFERENCE twin, in any precision, written out element by element.

use engraft_util::real::Real;

use crate::kernels::adapted_linear::reference::Delta;

/// Norms `(outputs)` of the columns of `w (inputs, outputs)` with `deltas`, whose tokens and dropout play no part.
pub fn forward<T: Real>(w: &[T], (inputs, outputs): (usize, usize), deltas: &[Delta<T>]) -> Vec<T> {
    let one = |vector: Option<&[T]>, at: usize| vector.map_or(T::one(), |vector| vector[at]);
    let element = |i: usize, j: usize| {
        let mut v = w[i * outputs + j];
        for delta in deltas.iter().filter(|delta| delta.columns.contains(&j)) {
            let column = j - delta.columns.start;
            let term =
                |r: usize| delta.a[r * inputs + i] * one(delta.d, r) * delta.b[column * delta.rank + r];
            v += delta.scale * one(delta.e, column) * (0..delta.rank).map(term).sum::<T>();
        }
        v
    };
    (0..outputs).map(|j| (0..inputs).map(|i| element(i, j) * element(i, j)).sum::<T>().sqrt()).collect()
}

/// `x / n` of each element, 0 where n is.
fn over<T: Real>(x: &[T], norms: &[T]) -> Vec<T> {
    x.iter().zip(norms).map(|(&x, &n)| if n == T::zero() { T::zero() } else { x / n }).collect()
}

/// `g = m / norms`.
pub fn output_scale<T: Real>(m: &[T], norms: &[T]) -> Vec<T> {
    over(m, norms)
}

/// The gradient of m from `dg`, norms being constants: in the forward pass `g = m / norms`.
pub fn output_scale_backward<T: Real>(dg: &[T], norms: &[T]) -> Vec<T> {
    over(dg, norms)
}
