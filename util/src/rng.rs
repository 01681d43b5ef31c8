//! Counter-based random numbers: a value is a pure function of a key and an index.
//!
//! Nothing is stored between two numbers, so a recomputed forward sees the same dropout mask and a
//! resumed run goes on where the first one stopped. The mixing function is the 64-bit finaliser of
//! SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
//! Not for cryptography.

use std::f64::consts::TAU;

/// 2^64 / golden ratio, odd: consecutive counters end up far apart.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[inline]
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// One key from the numbers that name a stream, such as (seed, step, site); the order matters.
pub fn key(parts: &[u64]) -> u64 {
    parts.iter().fold(mix(GOLDEN ^ parts.len() as u64), |state, &part| {
        mix(state.wrapping_add(GOLDEN) ^ mix(part.wrapping_add(GOLDEN)))
    })
}

/// A number for a name, to be a part of a [`key`] (FNV-1a, 64 bits).
pub fn name(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// 64 uniformly distributed bits.
#[inline]
pub fn bits(key: u64, index: u64) -> u64 {
    // Two rounds: with one, the streams of two keys would be shifted copies of each other.
    mix(mix(index.wrapping_mul(GOLDEN).wrapping_add(key)) ^ key)
}

/// Uniform in [0, 1), a multiple of 2^-24.
#[inline]
pub fn uniform(key: u64, index: u64) -> f32 {
    (bits(key, index) >> 40) as f32 * (1.0 / (1u32 << 24) as f32)
}

/// Standard normal (Box and Muller 1958), computed in f64; at most 6.7 in magnitude.
pub fn normal(key: u64, index: u64) -> f32 {
    const UNIT: f64 = 1.0 / (1u64 << 32) as f64;
    let bits = bits(key, index);
    let radius = ((bits >> 32) + 1) as f64 * UNIT; // (0, 1]: the logarithm stays finite
    let angle = (bits & 0xffff_ffff) as f64 * UNIT;
    ((-2.0 * radius.ln()).sqrt() * (TAU * angle).cos()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    const N: u64 = 100_000;

    fn moments(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
        let mean = values.clone().sum::<f64>() / N as f64;
        (mean, values.map(|x| (x - mean).powi(2)).sum::<f64>() / N as f64)
    }

    #[test]
    fn uniform_has_the_moments_and_the_range() {
        let draws = (0..N).map(|i| f64::from(uniform(key(&[7]), i)));
        let (mean, variance) = moments(draws.clone());
        assert!((mean - 0.5).abs() < 4e-3, "{mean}"); // 4 standard errors: 4 * 0.289 / sqrt(N)
        assert!((variance - 1.0 / 12.0).abs() < 2e-3, "{variance}");
        assert!(draws.clone().all(|x| (0.0..1.0).contains(&x)));
        let mut bins = [0u32; 64];
        draws.for_each(|x| bins[(x * 64.0) as usize] += 1);
        let expected = N as f64 / 64.0;
        let chi2: f64 = bins.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        assert!(chi2 < 120.0, "{chi2}"); // 63 degrees of freedom: mean 63, deviation 11
    }

    #[test]
    fn normal_has_the_moments() {
        let draws = (0..N).map(|i| f64::from(normal(key(&[3, 1]), i)));
        let (mean, variance) = moments(draws.clone());
        assert!(mean.abs() < 0.013 && (variance - 1.0).abs() < 0.018, "{mean} {variance}");
        let tail = draws.filter(|x| x.abs() > 1.959_964).count() as f64 / N as f64;
        assert!((tail - 0.05).abs() < 0.003, "{tail}");
    }

    #[test]
    fn neighbouring_keys_and_indices_are_uncorrelated() {
        for (a, b) in [((1, 0), (2, 0)), ((1, 0), (1, 1))] {
            let product: f64 = (0..N)
                .map(|i| f64::from(normal(key(&[a.0]), i + a.1)) * f64::from(normal(key(&[b.0]), i + b.1)))
                .sum();
            assert!((product / N as f64).abs() < 0.013);
        }
    }

    #[test]
    fn keys_tell_order_length_and_value_apart() {
        let keys = [key(&[]), key(&[0]), key(&[0, 0]), key(&[1, 0]), key(&[0, 1]), key(&[name("a")])];
        for (i, a) in keys.iter().enumerate() {
            assert!(keys[i + 1..].iter().all(|b| a != b));
        }
    }

    /// Files of earlier runs depend on these numbers: they never change.
    #[test]
    fn the_stream_is_pinned() {
        assert_eq!([bits(key(&[42]), 0), bits(key(&[42]), 1)], PINNED);
    }

    const PINNED: [u64; 2] = [8_388_002_236_734_080_021, 12_054_217_958_129_975_205];
}
