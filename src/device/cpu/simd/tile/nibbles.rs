//! Tiles that look their weights up: codes of four bits, with scales.

use super::{Simd, Tile};

/// Bytes of codes that are fetched ahead of their use.
const AHEAD: usize = 2048;
/// Steps whose codes make a word.
const WORD: usize = 8;

/// The weights of a tile: a value of the table for each code, times the scale of its column and block of steps.
#[derive(Clone, Copy)]
pub struct Nibbles<'a> {
    /// The value of each code.
    pub table: &'a [f32; 16],
    /// Codes of the first eight steps of the first column: a word, in the order of [`Simd::look_up`].
    pub words: *const u8,
    /// Bytes to the next eight steps.
    pub words_row: usize,
    /// Scales of the first block.
    pub scales: *const f32,
    /// Floats to those of the next block.
    pub scales_row: usize,
    /// Steps of a block, a multiple of eight.
    pub block: usize,
}

impl Tile {
    /// Rows and vectors of columns of a tile for `left` rows. Few rows take more vectors: a sum is one chain, and four
    /// chains hide its latency.
    pub fn of_nibbles<S: Simd>(left: usize) -> (usize, usize) {
        match (S::MANY_REGISTERS, S::LANES) {
            // Sums, weights and scales fill the registers.
            (true, 16) if left > 3 => (left.div_ceil(left.div_ceil(11)), 2),
            (true, _) if left > 3 => (left.div_ceil(left.div_ceil(5)), 4),
            (true, _) => (left, 4),
            (false, _) if left > 2 => (left.div_ceil(left.div_ceil(4)), 2),
            (false, _) => (left, 4),
        }
    }

    /// Computes `rows` rows with weights of four bits; `panel` is not read. Rows and vectors are those of
    /// [`Tile::of_nibbles`].
    ///
    /// # Safety
    /// As [`Tile::rows`]; words and scales are valid for whole vectors of columns.
    #[inline]
    pub unsafe fn rows_of_nibbles<S: Simd>(&self, s: S, weights: Nibbles, rows: usize, vectors: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match (vectors, rows) {
                (4, 1) => self.run_nibbles::<S, 1, 4>(s, weights),
                (4, 2) => self.run_nibbles::<S, 2, 4>(s, weights),
                (4, 3) => self.run_nibbles::<S, 3, 4>(s, weights),
                (4, 4) => self.run_nibbles::<S, 4, 4>(s, weights),
                (4, _) => self.run_nibbles::<S, 5, 4>(s, weights),
                (_, 2) => self.run_nibbles::<S, 2, 2>(s, weights),
                (_, 3) => self.run_nibbles::<S, 3, 2>(s, weights),
                (_, 4) => self.run_nibbles::<S, 4, 2>(s, weights),
                (_, 5) => self.run_nibbles::<S, 5, 2>(s, weights),
                (_, 6) => self.run_nibbles::<S, 6, 2>(s, weights),
                (_, 7) => self.run_nibbles::<S, 7, 2>(s, weights),
                (_, 8) => self.run_nibbles::<S, 8, 2>(s, weights),
                (_, 9) => self.run_nibbles::<S, 9, 2>(s, weights),
                (_, 10) => self.run_nibbles::<S, 10, 2>(s, weights),
                _ => self.run_nibbles::<S, 11, 2>(s, weights),
            }
        }
    }

    /// # Safety
    /// As [`Tile::rows_of_nibbles`].
    unsafe fn run_nibbles<S: Simd, const M: usize, const V: usize>(&self, s: S, weights: Nibbles) {
        let tile = *self;
        s.enter(
            #[inline(always)]
            move || {
                let Nibbles { table, words, words_row, scales, scales_row, block } = weights;
                let table = s.table(table);
                let mut sums = [[s.zero(); V]; M];
                tile.fetch::<S, M, V>(s);
                for first in (0..tile.depth).step_by(block) {
                    let steps = block.min(tile.depth - first);
                    // SAFETY: words and scales are valid for V vectors, x for these steps of M rows.
                    unsafe {
                        let scales = scales.add(first / block * scales_row);
                        for at in (first..first + steps / WORD * WORD).step_by(WORD) {
                            let (words, x) = (words.add(at / WORD * words_row), tile.x.add(at));
                            for line in (0..4 * V * S::LANES).step_by(64) {
                                s.fetch(words.wrapping_add(AHEAD + line));
                            }
                            sums = tile.word::<S, M, V>(s, (table, words, scales), x, sums, WORD);
                        }
                        if !steps.is_multiple_of(WORD) {
                            let at = first + steps / WORD * WORD;
                            let (words, x) = (words.add(at / WORD * words_row), tile.x.add(at));
                            sums = tile.word::<S, M, V>(s, (table, words, scales), x, sums, steps % WORD);
                        }
                    }
                }
                // SAFETY: the caller's promise.
                unsafe { tile.end(s, sums) }
            },
        );
    }

    /// Adds the products of the first `steps` steps of a word.
    ///
    /// # Safety
    /// As [`Tile::rows_of_nibbles`]; the addresses are those of the steps.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
    unsafe fn word<S: Simd, const M: usize, const V: usize>(
        &self,
        s: S,
        (table, words, scales): (S::Table, *const u8, *const f32),
        x: *const f32,
        mut sums: [[S::Floats; V]; M],
        steps: usize,
    ) -> [[S::Floats; V]; M] {
        if S::MANY_REGISTERS {
            // One look-up costs two operations, and an element of x serves all vectors.
            for n in 0..WORD {
                if n < steps {
                    // SAFETY: the caller's promise.
                    unsafe {
                        let mut w = [s.zero(); V];
                        for v in 0..V {
                            let words = s.words(words.add(4 * v * S::LANES));
                            let scales = s.load(scales.add(v * S::LANES));
                            w[v] = s.mul(s.look_up(table, words, n), scales);
                        }
                        for m in 0..M {
                            let x = s.splat(*x.add(m * self.x_row + n));
                            for v in 0..V {
                                sums[m][v] = s.fma(x, w[v], sums[m][v]);
                            }
                        }
                    }
                }
            }
            return sums;
        }
        // SAFETY: the caller's promise.
        unsafe {
            for v in 0..V {
                let (words, scales) =
                    (s.words(words.add(4 * v * S::LANES)), s.load(scales.add(v * S::LANES)));
                for half in 0..2 {
                    let values = s.look_up_four(table, words, half == 1);
                    for i in 0..WORD / 2 {
                        let n = half * WORD / 2 + i;
                        if n < steps {
                            let w = s.mul(values[i], scales);
                            for m in 0..M {
                                let x = s.splat(*x.add(m * self.x_row + n));
                                sums[m][v] = s.fma(x, w, sums[m][v]);
                            }
                        }
                    }
                }
            }
        }
        sums
    }
}
