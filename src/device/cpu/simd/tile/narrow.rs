//! Tiles whose weights are FP16 or 8-bit integers, which they widen themselves.

use half::f16;

use super::{Simd, Tile};

/// Steps that are fetched ahead of their use, times the bytes of an element: the panel is read from memory, front to back.
const FAR: usize = 48;

/// Elements of a panel that a tile widens itself.
pub trait Narrow: Copy {
    /// Reads LANES elements as floats.
    ///
    /// # Safety
    /// `from` is valid for LANES elements.
    unsafe fn widen<S: Simd>(s: S, from: *const Self) -> S::Floats;
}

impl Narrow for f16 {
    #[inline(always)]
    unsafe fn widen<S: Simd>(s: S, from: *const Self) -> S::Floats {
        // SAFETY: the caller's promise.
        unsafe { s.widen(from) }
    }
}

impl Narrow for i8 {
    #[inline(always)]
    unsafe fn widen<S: Simd>(s: S, from: *const Self) -> S::Floats {
        // SAFETY: the caller's promise.
        unsafe { s.whole(from) }
    }
}

/// Scales of a panel's columns, by which elements are multiplied after they were widened.
pub trait ColumnScales: Copy {
    /// `values` of a step from `column` on, times their scales.
    ///
    /// # Safety
    /// There are scales for a vector of columns of this step.
    unsafe fn times<S: Simd>(self, s: S, values: S::Floats, step: usize, column: usize) -> S::Floats;
}

/// No scales.
impl ColumnScales for () {
    #[inline(always)]
    unsafe fn times<S: Simd>(self, _: S, values: S::Floats, _: usize, _: usize) -> S::Floats {
        values
    }
}

/// Scales of N columns for each N steps, `(steps / N, N)`, from the panel's first column on.
#[derive(Clone, Copy)]
pub struct BlockScales<const N: usize>(pub *const f32);

impl<const N: usize> ColumnScales for BlockScales<N> {
    #[inline(always)]
    unsafe fn times<S: Simd>(self, s: S, values: S::Floats, step: usize, column: usize) -> S::Floats {
        // SAFETY: the caller's promise.
        s.mul(values, unsafe { s.load(self.0.add(step / N * N + column)) })
    }
}

impl Tile {
    /// Computes `rows` rows with a panel of FP16 or 8-bit integers, of 2 or 4 vectors of columns; `rows` is at most 12 or 6.
    ///
    /// # Safety
    /// As [`Tile::rows`]; the panel is valid for whole vectors of E, and so are the scales.
    #[inline]
    pub unsafe fn rows_of_narrow<S: Simd, E: Narrow>(
        &self,
        s: S,
        scales: impl ColumnScales,
        rows: usize,
        vectors: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match (vectors, rows) {
                (_, 0) => {}
                (2, 1) => self.run_narrow::<S, E, 1, 2>(s, scales),
                (2, 2) => self.run_narrow::<S, E, 2, 2>(s, scales),
                (2, 3) => self.run_narrow::<S, E, 3, 2>(s, scales),
                (2, 4) => self.run_narrow::<S, E, 4, 2>(s, scales),
                (2, 5) => self.run_narrow::<S, E, 5, 2>(s, scales),
                (2, 6) => self.run_narrow::<S, E, 6, 2>(s, scales),
                (2, 7) => self.run_narrow::<S, E, 7, 2>(s, scales),
                (2, 8) => self.run_narrow::<S, E, 8, 2>(s, scales),
                (2, 9) => self.run_narrow::<S, E, 9, 2>(s, scales),
                (2, 10) => self.run_narrow::<S, E, 10, 2>(s, scales),
                (2, 11) => self.run_narrow::<S, E, 11, 2>(s, scales),
                (2, _) => self.run_narrow::<S, E, 12, 2>(s, scales),
                (_, 1) => self.run_narrow::<S, E, 1, 4>(s, scales),
                (_, 2) => self.run_narrow::<S, E, 2, 4>(s, scales),
                (_, 3) => self.run_narrow::<S, E, 3, 4>(s, scales),
                (_, 4) => self.run_narrow::<S, E, 4, 4>(s, scales),
                (_, 5) => self.run_narrow::<S, E, 5, 4>(s, scales),
                _ => self.run_narrow::<S, E, 6, 4>(s, scales),
            }
        }
    }

    /// # Safety
    /// As [`Tile::rows_of_narrow`].
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
    unsafe fn run_narrow<S: Simd, E: Narrow, const M: usize, const V: usize>(
        &self,
        s: S,
        scales: impl ColumnScales,
    ) {
        s.enter(
            #[inline(always)]
            || {
                let mut sums = [[s.zero(); V]; M];
                self.fetch::<S, M, V>(s);
                let (mut weights, mut x) = (self.panel.cast::<E>(), self.x);
                let ahead = FAR / size_of::<E>() * self.panel_row;
                for step in 0..self.depth {
                    s.fetch(weights.wrapping_add(ahead));
                    // SAFETY: the panel has V vectors for each of depth steps, and x one element a step in M rows.
                    unsafe {
                        let mut w = [s.zero(); V];
                        for v in 0..V {
                            let values = E::widen(s, weights.add(v * S::LANES));
                            w[v] = scales.times(s, values, step, v * S::LANES);
                        }
                        for m in 0..M {
                            let x = s.splat(*x.add(m * self.x_row));
                            for v in 0..V {
                                sums[m][v] = s.fma(x, w[v], sums[m][v]);
                            }
                        }
                    }
                    weights = weights.wrapping_add(self.panel_row);
                    x = x.wrapping_add(self.x_step);
                }
                // SAFETY: the caller's promise.
                unsafe { self.end(s, sums) }
            },
        );
    }
}
