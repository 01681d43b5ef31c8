//! The plain twin, in f64.

use engraft_util::rng;

use super::Noise;

/// `x (n, c)` with the noise of the tokens `ids (n)` added.
pub fn add(noise: Noise, ids: &[u32], x: &[f64]) -> Vec<f64> {
    let c = x.len() / ids.len();
    let Noise { key, magnitude, first_row, seq_len, stride, vocab } = noise;
    let mut sum = x.to_vec();
    for (token, sum) in sum.chunks_mut(c).enumerate() {
        let (row, place) = (first_row + token / seq_len, token % seq_len);
        for (column, sum) in sum.iter_mut().enumerate() {
            if (ids[token] as usize) < vocab {
                let uniform = rng::uniform(key, ((row * stride + place) * c + column) as u64);
                *sum += f64::from(magnitude) * (2.0 * f64::from(uniform) - 1.0);
            }
        }
    }
    sum
}
