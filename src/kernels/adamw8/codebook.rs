//! The two books of 256 values, and the search for the nearest value by the bits of a float.
//!
//! The dynamic map with 7 exponent bits (Dettmers 2016, "8-Bit Approximations for Parallelism in Deep
//! Learning"; bitsandbytes' `create_dynamic_map`): decade i of 0 .. 7 spans 10^(i-7) to 10^(i-6) and is cut
//! into equal parts whose middles are in the book: 2^i parts for each sign, or 2^(i+1) parts without sign. 0 and 1
//! complete it; -1 is in no book, the signed one begins at -0.993.

use std::sync::LazyLock;

/// Buckets of positive floats share sign, exponent and 7 bits of the mantissa. Below 2^-23 all is
/// nearest to zero; the largest float that matters is 1.
const LOWEST: u32 = ((127 - 23) << 7) - 1;
const HIGHEST: u32 = 127 << 7;
const BUCKETS: usize = (HIGHEST - LOWEST + 1) as usize;
/// Index of zero in the signed book, which is the number of its negative values.
const ZERO: u32 = 127;

/// Values in order, and the search for the nearest.
pub struct Codebook {
    /// The value of each code, ascending.
    pub values: [f32; 256],
    /// Entry of a bucket: the steps from zero up to it, times 2^16, plus what is missing at the border of
    /// the next step to 2^16. A bucket holds one border at most, so adding the low 16 bits of a float
    /// carries into the upper half exactly when the float is above the border.
    buckets: Box<[u32; BUCKETS]>,
}

/// The signed book, of first moments.
pub static SIGNED: LazyLock<Codebook> = LazyLock::new(|| {
    let positive = positive(|decade| 1 << decade);
    let mut values = [0f32; 256];
    for (at, &value) in positive.iter().enumerate() {
        values[ZERO as usize + at] = value;
        // There is no -1.
        if at < ZERO as usize + 1 {
            values[ZERO as usize - at] = -value;
        }
    }
    Codebook { values, buckets: buckets(&positive) }
});

/// The unsigned book, of second moments.
pub static UNSIGNED: LazyLock<Codebook> = LazyLock::new(|| {
    let positive = positive(|decade| 2 << decade);
    let mut values = [0f32; 256];
    values.copy_from_slice(&positive);
    Codebook { values, buckets: buckets(&positive) }
});

/// 0, the middles of `parts(i)` equal parts of every decade i, 1.
fn positive(parts: impl Fn(u32) -> u32) -> Vec<f32> {
    let mut values = vec![0f32];
    for decade in 0..7 {
        let parts = parts(decade);
        let top = 10f64.powi(decade as i32 - 6);
        let middle = |part: u32| 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(parts);
        values.extend((0..parts).map(|part| (top * middle(part)) as f32));
    }
    values.push(1.0);
    values
}

/// The largest float from which the nearest of two neighbours is the lower one.
fn border(low: f32, high: f32) -> f32 {
    // A sum of two floats of similar size is exact in f64.
    let middle = (f64::from(low) + f64::from(high)) / 2.0;
    let rounded = middle as f32;
    if f64::from(rounded) > middle { rounded.next_down() } else { rounded }
}

fn buckets(positive: &[f32]) -> Box<[u32; BUCKETS]> {
    let borders: Vec<u32> = positive.windows(2).map(|pair| border(pair[0], pair[1]).to_bits()).collect();
    let mut buckets = Box::new([0u32; BUCKETS]);
    // The first bucket serves all smaller values too: zero.
    for (bucket, key) in buckets.iter_mut().zip(LOWEST..).skip(1) {
        let below = borders.partition_point(|&border| border >> 16 < key);
        let inside = borders.get(below).filter(|&&border| border >> 16 == key);
        // Without a border inside, no low half reaches 2^16.
        let missing = inside.map_or(0, |border| 0xffff - (border & 0xffff));
        *bucket = ((below as u32) << 16) + missing;
    }
    buckets
}

impl Codebook {
    /// Steps from zero to the value nearest to `x >= 0`, of two equally near ones the lower.
    #[inline(always)]
    fn steps(&self, bits: u32) -> u32 {
        let key = (bits >> 16).clamp(LOWEST, HIGHEST) - LOWEST;
        (self.buckets[key as usize] + (bits & 0xffff)) >> 16
    }

    /// Code of the value nearest to `x` in -1 ..= 1 in the signed book.
    #[inline(always)]
    pub fn signed_code(&self, x: f32) -> u32 {
        let bits = x.to_bits();
        let steps = self.steps(bits & 0x7fff_ffff);
        if bits >> 31 == 0 { ZERO + steps } else { ZERO - steps.min(ZERO) }
    }

    /// Code of the value nearest to `x` in 0 ..= 1 in the unsigned book.
    #[inline(always)]
    pub fn unsigned_code(&self, x: f32) -> u32 {
        self.steps(x.to_bits())
    }
}
