//! REFERENCE twin of head and loss: all logits at once.

use engraft_util::real::Real;

/// Losses of rows `hidden (m, c)` against `targets (m)` with `head (v, c)`, and the gradient of
/// their sum with respect to `hidden`.
pub fn forward_backward<T: Real>(
    hidden: &[T],
    targets: &[i32],
    head: &[T],
    c: usize,
    e: T,
) -> (Vec<T>, Vec<T>) {
    let v = head.len() / c;
    let size = T::of(v as f64);
    let (mut losses, mut gradient) = (Vec::new(), Vec::new());
    for (h, &target) in hidden.chunks_exact(c).zip(targets) {
        let z: Vec<T> =
            head.chunks_exact(c).map(|row| row.iter().zip(h).map(|(&a, &b)| a * b).sum()).collect();
        let lse = z.iter().map(|z| z.exp()).sum::<T>().ln();
        let mean = z.iter().copied().sum::<T>() / size;
        losses.push((T::one() - e) * (lse - z[target as usize]) + e * (lse - mean));
        let dz = |j: usize| {
            let hit = if j == target as usize { T::one() - e } else { T::zero() };
            (z[j] - lse).exp() - hit - e / size
        };
        gradient.extend((0..c).map(|i| (0..v).map(|j| dz(j) * head[j * c + i]).sum::<T>()));
    }
    (losses, gradient)
}
