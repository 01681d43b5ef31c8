//! Products with 4-bit weights: a word of a vector holds the codes of eight rows, and a permutation of a table looks
//! them up. Values are rounded to FP32 as `VALUES[code] * scale`, so every element has the bits that panels of these
//! values give.

use super::{InitialValue, ProductShape, begin, check, weights::Weights};
use crate::{
    device::cpu::{
        Shared,
        simd::{
            MOST, Simd,
            tile::{Nibbles, Tile},
        },
        tasks::{cut, each},
        with_scratch, with_shared_scratch,
    },
    kernels::nf4::{BLOCK, Nf4, STRIP, Sizes, VALUES, WORD},
};

/// Largest batch for which tiles that look codes up are faster than panels of values; products of BF16 pairs round more
/// rows.
pub fn rows<S: Simd>(pairs: bool) -> usize {
    match () {
        () if pairs => super::small_batch::ROWS,
        () if S::LANES == MOST => 48,
        () => 12,
    }
}

/// `y (n, outer) = start + x (n, inner) W (inner, outer)`, a task for each group of strips. Codes are read once, from
/// the first byte to the last.
pub fn nn<S: Simd>(s: S, x: &[f32], w: Nf4, shape: ProductShape, start: InitialValue, y: &mut [f32]) {
    shape.check(x, y);
    let ProductShape { n, inner: rows, outer: cols } = shape;
    check(start, n, cols);
    let (out, deep) = (Shared::new(y), S::PANEL.0);
    const { assert!(S::PANEL.0.is_multiple_of(BLOCK)) };
    let scales = w.sizes.blocks() * STRIP;
    let (tasks, width) = cut(cols, STRIP);
    each(tasks, |task| {
        with_scratch(scales, |scales| {
            for first in (task * width..cols.min((task + 1) * width)).step_by(STRIP) {
                let codes = w.codes[Nf4::word_at(w.sizes, 0, first)..].as_ptr();
                // Memory is fetched while scales are decoded.
                for line in 0..64 {
                    s.fetch(codes.wrapping_add(64 * line));
                }
                w.decode_strip(first / STRIP, scales);
                for k in (0..rows.max(1)).step_by(deep) {
                    let start = if k == 0 { start } else { InitialValue::Keep };
                    let mut row = 0;
                    while row < n {
                        let (tall, vectors) = Tile::of_nibbles::<S>(n - row);
                        for column in (first..cols.min(first + STRIP)).step_by(vectors * S::LANES) {
                            let at = row * cols + column;
                            let tile = Tile {
                                x: x[row * rows + k..].as_ptr(),
                                x_row: rows,
                                x_step: 1,
                                panel: std::ptr::null(),
                                panel_row: 0,
                                depth: deep.min(rows - k),
                                y: out.at(at),
                                y_row: cols,
                                columns: (vectors * S::LANES).min(cols - column),
                                begin: begin(start, at, column),
                                scale: 1.0,
                            };
                            let nibbles = Nibbles {
                                table: &VALUES,
                                words: codes.wrapping_add(4 * (k / WORD * STRIP + column - first)),
                                words_row: 4 * STRIP,
                                scales: scales[k / BLOCK * STRIP + column - first..].as_ptr(),
                                scales_row: STRIP,
                                block: BLOCK,
                            };
                            // SAFETY: the tile is inside the checked lengths, words and scales are filled up to whole
                            // strips; these columns belong to this task.
                            unsafe { tile.rows_of_nibbles(s, nibbles, tall, vectors) }
                        }
                        row += tall;
                    }
                }
            }
        });
    });
}

/// Runs `work` with the weights and all their scales decoded.
pub fn with_decoded<R>(w: Nf4, work: impl FnOnce(FourBits) -> R) -> R {
    let strip = (w.sizes.blocks() * STRIP).max(1);
    with_shared_scratch(w.sizes.decoded(), |scales| {
        let to = Shared::new(scales);
        each(w.sizes.cols.div_ceil(STRIP), |index| {
            // SAFETY: this strip belongs to this task.
            w.decode_strip(index, unsafe { to.range(index * strip, strip) });
        });
        work(FourBits { codes: w.codes, scales, sizes: w.sizes })
    })
}

/// Words of codes, and their scales as [`Nf4::decode_strip`] writes them.
#[derive(Clone, Copy)]
pub struct FourBits<'a> {
    codes: &'a [u8],
    scales: &'a [f32],
    sizes: Sizes,
}

impl Weights for FourBits<'_> {
    /// Columns of eight rows.
    const LINE: usize = 16;
    const STRIP: usize = usize::MAX;
    type Factors = ();

    #[inline(always)]
    unsafe fn factors<S: Simd>(self, _: S, _: f32, _: usize, _: usize) {}

    // A strip has room for every vector that begins in it.
    #[inline(always)]
    unsafe fn values<S: Simd>(self, s: S, (row, column): (usize, usize), (): &(), _: usize) -> S::Floats {
        // SAFETY: the caller's promise.
        unsafe {
            let words = s.words(self.codes.as_ptr().add(Nf4::word_at(self.sizes, row, column)));
            let scales = s.load(self.scales.as_ptr().add(Nf4::scale_at(self.sizes, row, column)));
            s.mul(s.look_up(s.table(&VALUES), words, row % WORD), scales)
        }
    }

    #[inline(always)]
    unsafe fn part<S: Simd>(self, s: S, row: usize, column: usize, count: usize) -> S::Floats {
        // SAFETY: the caller's promise.
        let values = unsafe { self.values(s, (row, column), &(), 0) };
        if count >= S::LANES {
            return values;
        }
        let mut lanes = [0f32; MOST];
        // SAFETY: no vector is longer than the array.
        unsafe {
            s.store(lanes.as_mut_ptr(), values);
            s.load_first(lanes.as_ptr(), count, 0.0)
        }
    }

    #[inline(always)]
    fn address(self, row: usize, column: usize) -> *const i8 {
        self.codes.as_ptr().wrapping_add(Nf4::word_at(self.sizes, row, column)).cast()
    }
}
