//! A tile of a matrix product: sums stay in registers while they run down a panel.

use std::arch::x86_64::*;

use half::f16;

use super::{LANES, first, widened};

/// Rows of a tile. With VECTORS vectors of columns a tile has 24 sums; the 32 registers also hold a weight of
/// each vector and an element of x.
pub const ROWS: usize = 8;
/// Vectors of columns of a tile.
pub const VECTORS: usize = 3;
/// Columns of a tile.
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

impl Tile {
    /// Computes `rows` rows, at most ROWS.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, all pointers are valid for these rows, and nobody else uses y.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub unsafe fn rows(&self, rows: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match rows {
                1 => self.columns::<1>(),
                2 => self.columns::<2>(),
                3 => self.columns::<3>(),
                4 => self.columns::<4>(),
                5 => self.columns::<5>(),
                6 => self.columns::<6>(),
                7 => self.columns::<7>(),
                _ => self.columns::<ROWS>(),
            }
        }
    }

    /// # Safety
    /// As [`Tile::rows`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn columns<const M: usize>(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.columns.div_ceil(LANES) {
                1 => self.run::<M, 1>(),
                2 => self.run::<M, 2>(),
                _ => self.run::<M, VECTORS>(),
            }
        }
    }

    /// # Safety
    /// As [`Tile::rows`].
    #[inline(never)]
    #[target_feature(enable = "avx512f")]
    unsafe fn run<const M: usize, const V: usize>(&self) {
        let mut sums = [[_mm512_setzero_ps(); V]; M];
        let (mut weights, mut x) = (self.panel, self.x);
        for _ in 0..self.depth {
            // SAFETY: the panel has V vectors for each of depth steps, and x as many elements in M rows;
            // prefetches may point anywhere.
            unsafe {
                let w: [__m512; V] = std::array::from_fn(|v| _mm512_loadu_ps(weights.add(v * LANES)));
                for v in 0..V {
                    let ahead = weights.wrapping_add(AHEAD * self.panel_row + v * LANES);
                    _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let x = _mm512_set1_ps(*x.add(m * self.x_row));
                    for v in 0..V {
                        sums[v] = _mm512_fmadd_ps(x, w[v], sums[v]);
                    }
                }
            }
            weights = weights.wrapping_add(self.panel_row);
            x = x.wrapping_add(self.x_step);
        }
        let scale = _mm512_set1_ps(self.scale);
        for (m, sums) in sums.iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                let at = m * self.y_row + v * LANES;
                // SAFETY: masked elements alone are read and written.
                unsafe {
                    let begin = self.begin.vector(self.y, at, v * LANES, self.columns - v * LANES);
                    let value = _mm512_fmadd_ps(scale, sum, begin);
                    _mm512_mask_storeu_ps(self.y.add(at), first(self.columns - v * LANES), value);
                }
            }
        }
    }
}

impl Begin {
    /// What stands before the product in the elements `at` behind the tile's first, in column `column`.
    ///
    /// # Safety
    /// The first `left` elements there, of a residual and of a bias are valid.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn vector(self, y: *const f32, at: usize, column: usize, left: usize) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe {
            let bias =
                |bias: *const f16| widened(std::slice::from_raw_parts(bias.add(column), left.min(LANES)));
            match self {
                Self::Zero => _mm512_setzero_ps(),
                Self::Keep => _mm512_maskz_loadu_ps(first(left), y.add(at)),
                Self::Bias(b) => bias(b),
                Self::Residual(residual, b) => {
                    _mm512_add_ps(_mm512_maskz_loadu_ps(first(left), residual.add(at)), bias(b))
                }
            }
        }
    }
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
