//! REFERENCE twin, in any precision; `factors (n, in)` are the dropout factors of the one delta.

use engraft_util::real::Real;

/// Sizes of an adapted linear layer with one delta on `columns` outputs from `first` on.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Rows.
    pub n: usize,
    /// Inputs.
    pub inputs: usize,
    /// Outputs.
    pub outputs: usize,
    /// Rank.
    pub rank: usize,
    /// First adapted output column.
    pub first: usize,
    /// Number of adapted output columns.
    pub columns: usize,
}

/// `y = x W + b + scale * ((x * factors) A^T) B^T` on the adapted columns.
#[allow(clippy::too_many_arguments, reason = "plain maths")]
pub fn forward<T: Real>(
    x: &[T],
    w: &[T],
    bias: &[T],
    a: &[T],
    b: &[T],
    scale: T,
    factors: &[T],
    s: Shape,
) -> Vec<T> {
    let mut y = Vec::with_capacity(s.n * s.outputs);
    for row in 0..s.n {
        let x_at = |i: usize| x[row * s.inputs + i];
        let low: Vec<T> = (0..s.rank)
            .map(|r| (0..s.inputs).map(|i| x_at(i) * factors[row * s.inputs + i] * a[r * s.inputs + i]).sum())
            .collect();
        for j in 0..s.outputs {
            let mut sum = bias[j] + (0..s.inputs).map(|i| x_at(i) * w[i * s.outputs + j]).sum::<T>();
            if (s.first..s.first + s.columns).contains(&j) {
                sum += scale * (0..s.rank).map(|r| low[r] * b[(j - s.first) * s.rank + r]).sum::<T>();
            }
            y.push(sum);
        }
    }
    y
}

/// Gradients `(dx, da, db)` of [`forward`].
#[allow(clippy::too_many_arguments, reason = "plain maths")]
pub fn backward<T: Real>(
    dy: &[T],
    x: &[T],
    w: &[T],
    a: &[T],
    b: &[T],
    scale: T,
    factors: &[T],
    s: Shape,
) -> (Vec<T>, Vec<T>, Vec<T>) {
    let mut dx = vec![T::zero(); x.len()];
    let (mut da, mut db) = (vec![T::zero(); a.len()], vec![T::zero(); b.len()]);
    for row in 0..s.n {
        let dy = &dy[row * s.outputs..][..s.outputs];
        for i in 0..s.inputs {
            dx[row * s.inputs + i] = (0..s.outputs).map(|j| dy[j] * w[i * s.outputs + j]).sum();
        }
        for r in 0..s.rank {
            let low: T = (0..s.inputs)
                .map(|i| x[row * s.inputs + i] * factors[row * s.inputs + i] * a[r * s.inputs + i])
                .sum();
            let d_low: T = (0..s.columns).map(|j| scale * dy[s.first + j] * b[j * s.rank + r]).sum();
            for j in 0..s.columns {
                db[j * s.rank + r] += scale * dy[s.first + j] * low;
            }
            for i in 0..s.inputs {
                let (at, factor) = (row * s.inputs + i, factors[row * s.inputs + i]);
                da[r * s.inputs + i] += d_low * x[at] * factor;
                dx[at] += d_low * a[r * s.inputs + i] * factor;
            }
        }
    }
    (dx, da, db)
}
