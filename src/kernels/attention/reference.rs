//! REFERENCE twin: one head, one row of the batch, the whole matrix of probabilities.

use engraft_util::real::Real;

/// Sizes of one head.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Number of queries t.
    pub queries: usize,
    /// Number of keys before the first query.
    pub past: usize,
    /// Number of prefix rows p; they come first in `k` and `v`.
    pub prefix: usize,
    /// Width d of the head.
    pub width: usize,
}

impl Shape {
    fn sees(&self, query: usize, key: usize, starts: &[u32]) -> bool {
        key < self.prefix || (starts[query] as usize..=self.past + query).contains(&(key - self.prefix))
    }
}

/// `(out (t, d), probabilities (t, p + keys))` with `k`, `v` of shape `(p + keys, d)`.
pub fn forward<T: Real>(q: &[T], k: &[T], v: &[T], starts: &[u32], scale: T, s: Shape) -> (Vec<T>, Vec<T>) {
    let (d, keys) = (s.width, k.len() / s.width);
    let (mut out, mut probabilities) = (Vec::new(), Vec::new());
    for i in 0..s.queries {
        let score = |j: usize| scale * (0..d).map(|e| q[i * d + e] * k[j * d + e]).sum::<T>();
        let visible = |j: &usize| s.sees(i, *j, starts);
        // Softmax of scores less the largest is the same, and no exponential overflows.
        let largest = (0..keys).filter(visible).map(score).fold(T::neg_infinity(), T::max);
        let power = |j: usize| if visible(&j) { (score(j) - largest).exp() } else { T::zero() };
        let powers: Vec<T> = (0..keys).map(power).collect();
        let sum: T = powers.iter().copied().sum();
        let p: Vec<T> = powers.into_iter().map(|power| power / sum).collect();
        out.extend((0..d).map(|e| (0..keys).map(|j| p[j] * v[j * d + e]).sum::<T>()));
        probabilities.extend(p);
    }
    (out, probabilities)
}

/// `(dq, dk, dv)`.
///
/// In the forward pass `o_i = sum_j p_ij v_j` with `p_i = softmax(s_i)`, so
/// `dp_ij = do_i v_j`, `ds_ij = p_ij (dp_ij - sum_k p_ik dp_ik)`, `dq_i = scale sum_j ds_ij k_j`.
#[allow(clippy::too_many_arguments, reason = "plain maths")]
pub fn backward<T: Real>(
    dout: &[T],
    q: &[T],
    k: &[T],
    v: &[T],
    starts: &[u32],
    scale: T,
    s: Shape,
) -> (Vec<T>, Vec<T>, Vec<T>) {
    let (d, keys) = (s.width, k.len() / s.width);
    let (_, p) = forward(q, k, v, starts, scale, s);
    let mut dq = vec![T::zero(); q.len()];
    let (mut dk, mut dv) = (vec![T::zero(); k.len()], vec![T::zero(); v.len()]);
    for i in 0..s.queries {
        let dp: Vec<T> = (0..keys).map(|j| (0..d).map(|e| dout[i * d + e] * v[j * d + e]).sum()).collect();
        let mean: T = (0..keys).map(|j| p[i * keys + j] * dp[j]).sum();
        for j in 0..keys {
            let probability = p[i * keys + j];
            let ds = scale * probability * (dp[j] - mean);
            for e in 0..d {
                dq[i * d + e] += ds * k[j * d + e];
                dk[j * d + e] += ds * q[i * d + e];
                dv[j * d + e] += probability * dout[i * d + e];
            }
        }
    }
    (dq, dk, dv)
}
