//! Which row comes next: a permutation for each epoch, known from the seed alone.

use std::sync::{Mutex, PoisonError};

/// Draws rows for ever; draw `k` is a pure function of (length, seed, `k`), so a run that stopped
/// after `k` draws goes on with draw `k` and needs nothing else.
///
/// Every epoch is a permutation of all rows (Fisher-Yates), or the order of the file. Draws run
/// across the end of an epoch, so batches are always full.
#[derive(Debug)]
pub struct Sampler {
    len: usize,
    seed: u64,
    shuffle: bool,
    /// The last permutation made, with its epoch; a cache, never state.
    last: Mutex<Option<(u64, Vec<u32>)>>,
}

impl Sampler {
    /// A sampler over `len` rows; a [`Dataset`](super::Dataset) has at least one, and 0 counts as 1.
    pub fn new(len: usize, seed: u64, shuffle: bool) -> Self {
        Self { len: len.max(1), seed, shuffle, last: Mutex::new(None) }
    }

    /// Bytes of heap that a sampler of `rows` rows needs for their order in an epoch.
    pub fn bytes(rows: usize) -> usize {
        rows * size_of::<u32>()
    }

    /// Rows that it draws from, at least 1.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to draw from: never.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The row of draw `k`, counted from 0 at the start of training.
    pub fn row(&self, k: u64) -> usize {
        let (epoch, index) = (self.epoch(k), (k % self.len as u64) as usize);
        if !self.shuffle {
            return index;
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some((cached, order)) if *cached == epoch => order[index] as usize,
            _ => {
                // Before the next one is made: two orders are never in memory.
                *last = None;
                let order = permutation(self.len, self.seed, epoch);
                let row = order[index] as usize;
                *last = Some((epoch, order));
                row
            }
        }
    }

    /// The rows of `count` draws from draw `first` on: a batch.
    pub fn rows(&self, first: u64, count: usize) -> Vec<usize> {
        (first..first + count as u64).map(|k| self.row(k)).collect()
    }

    /// The epoch that draw `k` belongs to, from 0.
    pub fn epoch(&self, k: u64) -> u64 {
        k / self.len as u64
    }

    /// Optimizer steps of `batch` rows that cover `epochs` passes over the data, at least 1.
    pub fn steps(&self, epochs: f64, batch: usize) -> u64 {
        (epochs * self.len as f64 / batch.max(1) as f64).ceil().max(1.0) as u64
    }
}

/// A permutation of `0..len` by Fisher and Yates, keyed by (seed, epoch).
fn permutation(len: usize, seed: u64, epoch: u64) -> Vec<u32> {
    let key = mix(mix(seed).wrapping_add(epoch));
    let mut order: Vec<u32> = (0..len as u32).collect();
    for last in (1..len).rev() {
        order.swap(last, below(mix(key.wrapping_add(last as u64)), last as u64 + 1) as usize);
    }
    order
}

/// Maps 64 random bits to `0..bound` by the high half of a product; the bias is under bound / 2^64.
fn below(bits: u64, bound: u64) -> u64 {
    ((u128::from(bits) * u128::from(bound)) >> 64) as u64
}

/// One output of SplitMix64 for the state `index` (Steele, Lea, Flood 2014).
fn mix(index: u64) -> u64 {
    let mut bits = index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_epoch_is_a_permutation_of_its_own() {
        let sampler = Sampler::new(50, 7, true);
        let epochs = [0, 1, 2].map(|epoch| sampler.rows(epoch * 50, 50));
        for epoch in &epochs {
            let mut sorted = epoch.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..50).collect::<Vec<_>>());
        }
        assert_ne!(epochs[0], epochs[1]);
        assert_ne!(epochs[1], epochs[2]);
        assert_ne!(epochs[0], Sampler::new(50, 8, true).rows(0, 50));
    }

    #[test]
    fn a_draw_depends_on_nothing_drawn_before() {
        let forward = Sampler::new(9, 3, true).rows(0, 40);
        let backward = Sampler::new(9, 3, true);
        for k in (0..40).rev() {
            assert_eq!(backward.row(k), forward[k as usize]);
            assert_eq!(Sampler::new(9, 3, true).row(k), forward[k as usize]);
        }
    }

    #[test]
    fn batches_run_across_the_end_of_an_epoch() {
        let sampler = Sampler::new(3, 0, false);
        assert_eq!(sampler.rows(2, 5), [2, 0, 1, 2, 0]);
        assert_eq!((sampler.epoch(2), sampler.epoch(3)), (0, 1));
        assert_eq!(Sampler::new(1, 5, true).rows(0, 3), [0, 0, 0]);
    }

    #[test]
    fn epochs_become_steps() {
        let sampler = Sampler::new(10, 0, true);
        assert_eq!([sampler.steps(1.0, 4), sampler.steps(2.0, 4), sampler.steps(0.01, 4)], [3, 5, 1]);
    }

    #[test]
    fn places_are_drawn_evenly() {
        // Row 0 over 6000 epochs of 6 rows: 1000 a place expected, standard deviation 29.
        let mut counts = [0usize; 6];
        for epoch in 0..6000 {
            let order = permutation(6, 11, epoch);
            counts[order.iter().position(|&row| row == 0).unwrap()] += 1;
        }
        assert!(counts.iter().all(|count| (870..1130).contains(count)), "{counts:?}");
    }

    #[test]
    fn mix_is_splitmix64() {
        // First outputs of SplitMix64 seeded with 0.
        assert_eq!([mix(0), mix(1)], [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4]);
    }
}
