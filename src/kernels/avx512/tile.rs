//! A tile of a matrix product: sums stay in registers while they run down a panel.

use std::arch::x86_64::*;

use half::f16;

use super::{LANES, first, widened};

/// Rows of a tile. With VECTORS vectors of columns a tile has 24 sums; the 32 registers also hold a weight of
/// each vector and elements of x. 8 rows of 3 vectors, 12 of 2 and 14 of 2 are 1 to 2% slower.
pub const ROWS: usize = 6;
/// Vectors of columns of a tile.
pub const VECTORS: usize = 4;
/// Columns of a tile: as many as most heads are wide.
pub const COLUMNS: usize = VECTORS * LANES;
/// Rows of a tile that widens FP16 itself: again 24 sums, of the two vectors that a cache line holds.
pub const TALL: usize = 12;
/// Steps of a panel that are fetched ahead of their use.
const AHEAD: usize = 8;
/// The same where it comes from memory and is read in one stretch.
const FAR: usize = 24;

/// Callers of [`Tile::end`].
const FLOATS: u8 = 0;
const PAIRS: u8 = 1;
const HALVES: u8 = 2;

/// What stands in the output before the product is added.
#[derive(Clone, Copy)]
pub enum Begin {
    /// Zero.
    Zero,
    /// What is there.
    Keep,
    /// A bias of the tile's columns.
    Bias(*const f16),
    /// A residual, laid out as the output, and a bias.
    Residual(*const f32, *const f16),
}

/// `y (rows, columns) = begin + scale x (rows, depth) w (depth, columns)`.
///
/// An element is one chain of fused multiply-adds from step 0 to the last, then times `scale`, then added.
#[derive(Clone, Copy)]
pub struct Tile {
    /// First element of x.
    pub x: *const f32,
    /// Distance between rows of x.
    pub x_row: usize,
    /// Distance between steps of x.
    pub x_step: usize,
    /// First row of the panel; whole vectors of it are read. Of FP16 in [`Tile::rows_of_halves`].
    pub panel: *const f32,
    /// Distance between steps of the panel.
    pub panel_row: usize,
    /// Steps.
    pub depth: usize,
    /// First element of the output.
    pub y: *mut f32,
    /// Distance between its rows.
    pub y_row: usize,
    /// Columns, at most COLUMNS.
    pub columns: usize,
    /// What the product is added to.
    pub begin: Begin,
    /// Factor of the product.
    pub scale: f32,
}

/// Calls `$tile.$run::<rows, vectors of columns>()`.
macro_rules! sized {
    (@ $tile:ident, $run:ident, $m:tt) => {
        match $tile.columns.div_ceil(LANES) {
            1 => $tile.$run::<$m, 1>(),
            2 => $tile.$run::<$m, 2>(),
            3 => $tile.$run::<$m, 3>(),
            _ => $tile.$run::<$m, VECTORS>(),
        }
    };
    ($tile:ident, $rows:expr, $run:ident) => {
        match $rows {
            1 => sized!(@ $tile, $run, 1),
            2 => sized!(@ $tile, $run, 2),
            3 => sized!(@ $tile, $run, 3),
            4 => sized!(@ $tile, $run, 4),
            5 => sized!(@ $tile, $run, 5),
            _ => sized!(@ $tile, $run, ROWS),
        }
    };
}

impl Tile {
    /// Computes `rows` rows, at most ROWS.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, all pointers are valid for these rows, and nobody else uses y.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub unsafe fn rows(&self, rows: usize) {
        // SAFETY: the caller's promise.
        unsafe { sized!(self, rows, run) }
    }

    /// The same where a float of x and of the panel is a pair of BF16 values, the earlier step in its low half: a step
    /// adds the products of both, in FP32.
    ///
    /// # Safety
    /// As [`Tile::rows`], and the CPU has AVX-512 BF16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub unsafe fn rows_of_pairs(&self, rows: usize) {
        // SAFETY: the caller's promise.
        unsafe { sized!(self, rows, run_pairs) }
    }

    /// Computes `rows` rows, at most TALL, with a panel of FP16 two vectors wide.
    ///
    /// # Safety
    /// As [`Tile::rows`]; the panel is `(depth, 2 LANES)` FP16 values.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub unsafe fn rows_of_halves(&self, rows: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match rows {
                0 => {}
                1 => self.run_halves::<1>(),
                2 => self.run_halves::<2>(),
                3 => self.run_halves::<3>(),
                4 => self.run_halves::<4>(),
                5 => self.run_halves::<5>(),
                6 => self.run_halves::<6>(),
                7 => self.run_halves::<7>(),
                8 => self.run_halves::<8>(),
                9 => self.run_halves::<9>(),
                10 => self.run_halves::<10>(),
                11 => self.run_halves::<11>(),
                _ => self.run_halves::<TALL>(),
            }
        }
    }

    /// # Safety
    /// As [`Tile::rows_of_halves`].
    #[inline(never)]
    #[target_feature(enable = "avx512f")]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
    unsafe fn run_halves<const M: usize>(&self) {
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        self.fetch::<M, 2>();
        let (mut weights, mut x) = (self.panel.cast::<__m256i>(), self.x);
        for _ in 0..self.depth {
            // SAFETY: the panel has two vectors for each of depth steps, and x as many elements in M rows; prefetches
            // may point anywhere.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(weights.wrapping_add(2 * FAR).cast());
                let w: [__m512; 2] =
                    std::array::from_fn(|v| _mm512_cvtph_ps(_mm256_loadu_si256(weights.add(v))));
                for m in 0..M {
                    let x = _mm512_set1_ps(*x.add(m * self.x_row));
                    for v in 0..2 {
                        sums[m][v] = _mm512_fmadd_ps(x, w[v], sums[m][v]);
                    }
                }
            }
            weights = weights.wrapping_add(2);
            x = x.wrapping_add(self.x_step);
        }
        // SAFETY: the caller's promise.
        unsafe { self.end::<M, 2, HALVES>(sums) }
    }

    /// # Safety
    /// As [`Tile::rows`].
    #[inline(never)]
    #[target_feature(enable = "avx512f")]
    unsafe fn run<const M: usize, const V: usize>(&self) {
        let mut sums = [[_mm512_setzero_ps(); V]; M];
        self.fetch::<M, V>();
        // SAFETY: the caller's promise.
        unsafe {
            let mut at = (self.panel, self.x);
            for _ in 0..self.depth / 4 {
                sums = self.step(at, sums);
                sums = self.step(self.behind(at, 1), sums);
                sums = self.step(self.behind(at, 2), sums);
                sums = self.step(self.behind(at, 3), sums);
                at = self.behind(at, 4);
            }
            for _ in 0..self.depth % 4 {
                sums = self.step(at, sums);
                at = self.behind(at, 1);
            }
            self.end::<M, V, FLOATS>(sums);
        }
    }

    /// Adds the products of a step.
    ///
    /// # Safety
    /// As [`Tile::rows`]; the places are those of one of the tile's steps.
    #[inline]
    #[target_feature(enable = "avx512f")]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
    unsafe fn step<const M: usize, const V: usize>(
        &self,
        (weights, x): (*const f32, *const f32),
        mut sums: [[__m512; V]; M],
    ) -> [[__m512; V]; M] {
        self.fetch_step::<V>(weights);
        // SAFETY: the panel has V vectors for each of depth steps, and x as many elements in M rows.
        unsafe {
            let w: [__m512; V] = std::array::from_fn(|v| _mm512_loadu_ps(weights.add(v * LANES)));
            for m in 0..M {
                let x = _mm512_set1_ps(*x.add(m * self.x_row));
                for v in 0..V {
                    sums[m][v] = _mm512_fmadd_ps(x, w[v], sums[m][v]);
                }
            }
        }
        sums
    }

    /// # Safety
    /// As [`Tile::rows_of_pairs`].
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn run_pairs<const M: usize, const V: usize>(&self) {
        let mut sums = [[_mm512_setzero_ps(); V]; M];
        self.fetch::<M, V>();
        // SAFETY: the caller's promise.
        unsafe {
            let mut at = (self.panel, self.x);
            for _ in 0..self.depth {
                sums = self.step_of_pairs(at, sums);
                at = self.behind(at, 1);
            }
            self.end::<M, V, PAIRS>(sums);
        }
    }

    /// The same of pairs.
    ///
    /// # Safety
    /// As [`Tile::rows_of_pairs`]; the places are those of one of the tile's steps.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
    unsafe fn step_of_pairs<const M: usize, const V: usize>(
        &self,
        (weights, x): (*const f32, *const f32),
        mut sums: [[__m512; V]; M],
    ) -> [[__m512; V]; M] {
        self.fetch_step::<V>(weights);
        // SAFETY: as in `step`.
        unsafe {
            let w: [__m512bh; V] = std::array::from_fn(|v| pairs(_mm512_loadu_ps(weights.add(v * LANES))));
            for m in 0..M {
                let x = pairs(_mm512_set1_ps(*x.add(m * self.x_row)));
                for v in 0..V {
                    sums[m][v] = _mm512_dpbf16_ps(sums[m][v], x, w[v]);
                }
            }
        }
        sums
    }

    /// Where the panel and x are `steps` further on.
    #[inline]
    fn behind(&self, (weights, x): (*const f32, *const f32), steps: usize) -> (*const f32, *const f32) {
        (weights.wrapping_add(steps * self.panel_row), x.wrapping_add(steps * self.x_step))
    }

    /// Has the weights of a later step brought near.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn fetch_step<const V: usize>(&self, weights: *const f32) {
        for v in 0..V {
            let ahead = weights.wrapping_add(AHEAD * self.panel_row + v * LANES);
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
        }
    }

    /// Adds the sums to what the output begins with. `CALLER` tells the callers apart: what has one caller is
    /// compiled into it, and of two the sums would come through memory.
    ///
    /// # Safety
    /// As [`Tile::rows`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn end<const M: usize, const V: usize, const CALLER: u8>(&self, sums: [[__m512; V]; M]) {
        // A loop for each beginning: with the choice inside, the sums would go through memory.
        // SAFETY: masked elements alone are read, all of them the caller's.
        unsafe {
            match self.begin {
                Begin::Zero => self.finish(sums, |_, _| _mm512_setzero_ps()),
                Begin::Keep => self.finish(sums, |m, v| self.masked(self.y, m, v)),
                Begin::Bias(bias) => {
                    let bias = self.bias::<V>(bias);
                    self.finish(sums, |_, v| bias[v]);
                }
                Begin::Residual(residual, bias) => {
                    let bias = self.bias::<V>(bias);
                    self.finish(sums, |m, v| _mm512_add_ps(self.masked(residual, m, v), bias[v]));
                }
            }
        }
    }

    /// Has what the product is added to brought near while the product is made.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn fetch<const M: usize, const V: usize>(&self) {
        let matrix = match self.begin {
            Begin::Zero | Begin::Bias(_) => return,
            Begin::Keep => self.y.cast_const(),
            Begin::Residual(residual, _) => residual,
        };
        for m in 0..M {
            for v in 0..V {
                _mm_prefetch::<_MM_HINT_T0>(matrix.wrapping_add(m * self.y_row + v * LANES).cast());
            }
        }
    }

    /// Writes `begin(m, v) + scale * sums`.
    ///
    /// # Safety
    /// As [`Tile::rows`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
    unsafe fn finish<const M: usize, const V: usize>(
        &self,
        sums: [[__m512; V]; M],
        begin: impl Fn(usize, usize) -> __m512,
    ) {
        let scale = _mm512_set1_ps(self.scale);
        for m in 0..M {
            for v in 0..V {
                let value = _mm512_fmadd_ps(scale, sums[m][v], begin(m, v));
                // SAFETY: masked elements alone are written.
                unsafe { _mm512_mask_storeu_ps(self.y.add(m * self.y_row + v * LANES), self.mask(v), value) }
            }
        }
    }

    /// The columns of vector `v`; none of one behind the last, which a tile of FP16 may have.
    #[inline]
    fn mask(&self, v: usize) -> __mmask16 {
        first(self.columns.saturating_sub(v * LANES))
    }

    /// Vector `v` of row `m` of a matrix laid out as the output.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, and the tile's elements of the matrix are valid.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn masked(&self, matrix: *const f32, m: usize, v: usize) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(self.mask(v), matrix.add(m * self.y_row + v * LANES)) }
    }

    /// The tile's columns of a bias.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, and the bias has these columns.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn bias<const V: usize>(&self, bias: *const f16) -> [__m512; V] {
        std::array::from_fn(|v| {
            let left = self.columns.saturating_sub(v * LANES).min(LANES);
            // SAFETY: the caller's promise.
            widened(unsafe { std::slice::from_raw_parts(bias.wrapping_add(v * LANES), left) })
        })
    }
}

/// A vector of pairs of BF16 values, which is moved about as one of floats.
#[inline]
fn pairs(vector: __m512) -> __m512bh {
    // SAFETY: both are 64 bytes in which every pattern means something.
    unsafe { std::mem::transmute(vector) }
}

/// Turns rows of a matrix into columns of a panel: column `j` of `panel (depth, columns)` becomes row `j` of
/// `depth` elements, for `count` rows that `load(row, step, steps)` reads LANES elements at a time.
///
/// Columns stand in groups of COLUMNS, each group `(depth, its columns as whole vectors)` one after another, zeros
/// behind the last column.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn pack_turned(
    panel: &mut [f32],
    (depth, count): (usize, usize),
    load: impl Fn(usize, usize, usize) -> __m512,
) {
    assert!(panel.len() >= depth * count.next_multiple_of(LANES), "room for a panel");
    if depth == 0 {
        return;
    }
    for start in (0..count).step_by(LANES) {
        let group = start / COLUMNS * COLUMNS;
        let columns = (count - group).min(COLUMNS).next_multiple_of(LANES);
        let to = &mut panel[group * depth + start - group..];
        let rows = LANES.min(count - start);
        for step in (0..depth).step_by(LANES) {
            let steps = LANES.min(depth - step);
            let mut square = [_mm512_setzero_ps(); LANES];
            for (row, vector) in square.iter_mut().enumerate().take(rows) {
                *vector = load(start + row, step, steps);
            }
            let square = super::transposed(square);
            for (i, vector) in square.into_iter().enumerate().take(steps) {
                super::store(&mut to[(step + i) * columns..][..LANES], vector);
            }
        }
    }
}
