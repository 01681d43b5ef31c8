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
/// Steps of a panel that are fetched ahead of their use.
const AHEAD: usize = 8;

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
    /// First row of the panel; whole vectors of it are read.
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
            self.end::<M, V, false>(sums);
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
            self.end::<M, V, true>(sums);
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

    /// Adds the sums to what the output begins with. `OF_PAIRS` tells the callers apart: what has one caller is
    /// compiled into it, and of two the sums would come through memory.
    ///
    /// # Safety
    /// As [`Tile::rows`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn end<const M: usize, const V: usize, const OF_PAIRS: bool>(&self, sums: [[__m512; V]; M]) {
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

    /// The columns of vector `v`.
    #[inline]
    fn mask(&self, v: usize) -> __mmask16 {
        first(self.columns - v * LANES)
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
            let left = (self.columns - v * LANES).min(LANES);
            // SAFETY: the caller's promise.
            widened(unsafe { std::slice::from_raw_parts(bias.add(v * LANES), left) })
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
