//! A tile of a matrix product: its sums stay in registers for all steps of a panel.

use half::f16;

use super::{MOST, Simd, array, widened};
use crate::device::cpu::LINE;

/// Rows of a tile. With [`Simd::VECTORS`] vectors of columns its sums fill the registers, except those for a weight of
/// each vector and elements of x.
pub const ROWS: usize = 6;
/// Steps of a panel that are fetched ahead of their use.
const AHEAD: usize = 8;

/// The initial value of the output, to which the product is added.
#[derive(Clone, Copy)]
pub enum Begin {
    /// Zero for every element.
    Zero,
    /// The present content of the output.
    Keep,
    /// A bias of the tile's columns.
    Bias(*const f16),
    /// A residual in the layout of the output, and a bias of the columns.
    Residual(*const f32, *const f16),
}

/// `y (rows, columns) = begin + scale x (rows, depth) w (depth, columns)`.
///
/// An element is one chain of fused multiply-adds from step 0 to the last, then times `scale`, then added.
#[derive(Clone, Copy)]
pub struct Tile {
    /// First element of x.
    pub x: *const f32,
    /// Elements from a row of x to the next.
    pub x_row: usize,
    /// Elements from a step of x to the next.
    pub x_step: usize,
    /// First row of the panel, of which whole vectors are read; E in [`Tile::rows_of_narrow`].
    pub panel: *const f32,
    /// Elements from a step of the panel to the next.
    pub panel_row: usize,
    /// Number of steps: terms of each sum.
    pub depth: usize,
    /// First element of the output.
    pub y: *mut f32,
    /// Elements from a row of the output to the next.
    pub y_row: usize,
    /// Columns that are written, at most those of a tile.
    pub columns: usize,
    /// The value that the product is added to.
    pub begin: Begin,
    /// Factor of the product, not of the initial value.
    pub scale: f32,
}

/// Calls `$tile.$run::<_, rows, vectors of columns>($s, $more)`.
macro_rules! sized {
    (@ $tile:ident, $s:ident, $run:ident, $m:tt $(, $more:ident)?) => {
        match $tile.columns.div_ceil(S::LANES) {
            1 => $tile.$run::<S, $m, 1>($s $(, $more)?),
            2 => $tile.$run::<S, $m, 2>($s $(, $more)?),
            3 => $tile.$run::<S, $m, 3>($s $(, $more)?),
            _ => $tile.$run::<S, $m, 4>($s $(, $more)?),
        }
    };
    ($tile:ident, $s:ident, $rows:expr, $run:ident $(, $more:ident)?) => {
        match $rows {
            1 => sized!(@ $tile, $s, $run, 1 $(, $more)?),
            2 => sized!(@ $tile, $s, $run, 2 $(, $more)?),
            3 => sized!(@ $tile, $s, $run, 3 $(, $more)?),
            4 => sized!(@ $tile, $s, $run, 4 $(, $more)?),
            5 => sized!(@ $tile, $s, $run, 5 $(, $more)?),
            _ => sized!(@ $tile, $s, $run, ROWS $(, $more)?),
        }
    };
}

/// Addresses of a step of a tile.
#[derive(Clone, Copy)]
struct Step {
    /// The step's row of the panel.
    weights: *const f32,
    /// The step's element in the first row of x.
    x: *const f32,
}

impl Tile {
    /// Computes `rows` rows, at most ROWS.
    ///
    /// # Safety
    /// All pointers are valid for these rows, nobody else uses y, and there are no more columns than a tile has.
    #[inline]
    pub unsafe fn rows<S: Simd>(&self, s: S, rows: usize) {
        // SAFETY: the caller's promise.
        unsafe { sized!(self, s, rows, run) }
    }

    /// # Safety
    /// As [`Tile::rows`].
    unsafe fn run<S: Simd, const M: usize, const V: usize>(&self, s: S) {
        s.enter(
            #[inline(always)]
            || {
                // SAFETY: the caller's promise.
                unsafe {
                    self.steps::<S, M, V>(
                        s,
                        #[inline(always)]
                        |x, w, sum| s.fma(x, w, sum),
                        #[inline(always)]
                        |_| {},
                    );
                }
            },
        );
    }

    /// Computes the whole tile: `multiply(x, weights, sums)` adds the products of a step, and `meanwhile(i)` runs
    /// before steps `4 i .. 4 i + 4`.
    ///
    /// # Safety
    /// As [`Tile::rows`].
    #[inline(always)]
    unsafe fn steps<S: Simd, const M: usize, const V: usize>(
        &self,
        s: S,
        multiply: impl Fn(S::Floats, S::Floats, S::Floats) -> S::Floats,
        meanwhile: impl Fn(usize),
    ) {
        let mut sums = [[s.zero(); V]; M];
        self.fetch::<S, M, V>(s);
        // SAFETY: the caller's promise.
        unsafe {
            let mut at = Step { weights: self.panel, x: self.x };
            for i in 0..self.depth / 4 {
                meanwhile(i);
                sums = self.step(s, at, sums, &multiply);
                sums = self.step(s, self.after(at, 1), sums, &multiply);
                sums = self.step(s, self.after(at, 2), sums, &multiply);
                sums = self.step(s, self.after(at, 3), sums, &multiply);
                at = self.after(at, 4);
            }
            for _ in 0..self.depth % 4 {
                sums = self.step(s, at, sums, &multiply);
                at = self.after(at, 1);
            }
            self.end(s, sums);
        }
    }

    /// Adds the products of one step to the sums.
    ///
    /// # Safety
    /// As [`Tile::rows`]; the addresses are those of one of the tile's steps.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
    unsafe fn step<S: Simd, const M: usize, const V: usize>(
        &self,
        s: S,
        Step { weights, x }: Step,
        mut sums: [[S::Floats; V]; M],
        multiply: &impl Fn(S::Floats, S::Floats, S::Floats) -> S::Floats,
    ) -> [[S::Floats; V]; M] {
        for v in (0..V).step_by((LINE / S::LANES).max(1)) {
            s.fetch(weights.wrapping_add(AHEAD * self.panel_row + v * S::LANES));
        }
        // SAFETY: the panel has V vectors for each of depth steps, and x one element a step in M rows.
        unsafe {
            let mut w = [s.zero(); V];
            for v in 0..V {
                w[v] = s.load(weights.add(v * S::LANES));
            }
            for m in 0..M {
                let x = s.splat(*x.add(m * self.x_row));
                for v in 0..V {
                    sums[m][v] = multiply(x, w[v], sums[m][v]);
                }
            }
        }
        sums
    }

    /// The addresses `steps` steps later.
    #[inline(always)]
    fn after(&self, at: Step, steps: usize) -> Step {
        Step {
            weights: at.weights.wrapping_add(steps * self.panel_row),
            x: at.x.wrapping_add(steps * self.x_step),
        }
    }

    /// Adds the sums to the initial value and writes the output.
    ///
    /// # Safety
    /// As [`Tile::rows`].
    #[inline(always)]
    unsafe fn end<S: Simd, const M: usize, const V: usize>(&self, s: S, sums: [[S::Floats; V]; M]) {
        // A loop for each initial value: with the choice inside, the sums would go through memory.
        // SAFETY: only the tile's elements are read, all of them the caller's.
        unsafe {
            if !S::MASKS && self.columns < V * S::LANES {
                return self.end_of_parts(s, sums);
            }
            match self.begin {
                Begin::Zero => self.finish(
                    s,
                    sums,
                    #[inline(always)]
                    |_, _| s.zero(),
                ),
                Begin::Keep => self.finish(
                    s,
                    sums,
                    #[inline(always)]
                    |m, v| self.part(s, self.y, m, v),
                ),
                Begin::Bias(bias) => {
                    let bias = self.bias::<S, V>(s, bias);
                    self.finish(
                        s,
                        sums,
                        #[inline(always)]
                        |_, v| bias[v],
                    );
                }
                Begin::Residual(residual, bias) => {
                    let bias = self.bias::<S, V>(s, bias);
                    self.finish(
                        s,
                        sums,
                        #[inline(always)]
                        |m, v| s.add(self.part(s, residual, m, v), bias[v]),
                    );
                }
            }
        }
    }

    /// Prefetches the initial value while the product is computed.
    #[inline(always)]
    fn fetch<S: Simd, const M: usize, const V: usize>(&self, s: S) {
        let matrix = match self.begin {
            Begin::Zero | Begin::Bias(_) => return,
            Begin::Keep => self.y.cast_const(),
            Begin::Residual(residual, _) => residual,
        };
        for m in 0..M {
            for v in (0..V).step_by((LINE / S::LANES).max(1)) {
                s.fetch(matrix.wrapping_add(m * self.y_row + v * S::LANES));
            }
        }
    }

    /// Writes `begin(m, v) + scale * sums`.
    ///
    /// # Safety
    /// As [`Tile::rows`]; all vectors are whole where parts of vectors are slow.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
    unsafe fn finish<S: Simd, const M: usize, const V: usize>(
        &self,
        s: S,
        sums: [[S::Floats; V]; M],
        begin: impl Fn(usize, usize) -> S::Floats,
    ) {
        let scale = s.splat(self.scale);
        for m in 0..M {
            for v in 0..V {
                let value = s.fma(scale, sums[m][v], begin(m, v));
                // SAFETY: only the tile's elements are written.
                unsafe {
                    // A vector without columns may be outside the output.
                    let to = self.y.wrapping_add(m * self.y_row + v * S::LANES);
                    if S::MASKS { s.store_first(to, self.left::<S>(v), value) } else { s.store(to, value) }
                }
            }
        }
    }

    /// The same one element at a time, for widths that are not whole vectors.
    ///
    /// # Safety
    /// As [`Tile::rows`].
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
    unsafe fn end_of_parts<S: Simd, const M: usize, const V: usize>(&self, s: S, sums: [[S::Floats; V]; M]) {
        let mut lanes = [[[0f32; MOST]; V]; M];
        for m in 0..M {
            for v in 0..V {
                // SAFETY: no vector is longer.
                unsafe { s.store(lanes[m][v].as_mut_ptr(), sums[m][v]) }
            }
        }
        for (m, lanes) in lanes.iter().enumerate() {
            for column in 0..self.columns {
                let at = m * self.y_row + column;
                // SAFETY: an element of the tile, and its bias.
                unsafe {
                    let begin = match self.begin {
                        Begin::Zero => 0.0,
                        Begin::Keep => *self.y.add(at),
                        Begin::Bias(bias) => (*bias.add(column)).to_f32(),
                        Begin::Residual(residual, bias) => *residual.add(at) + (*bias.add(column)).to_f32(),
                    };
                    let sum = lanes[column / S::LANES][column % S::LANES];
                    *self.y.add(at) = self.scale.mul_add(sum, begin);
                }
            }
        }
    }

    /// Columns of vector `v`; 0 of one past the last, which a tile of FP16 may have.
    #[inline(always)]
    fn left<S: Simd>(&self, v: usize) -> usize {
        self.columns.saturating_sub(v * S::LANES).min(S::LANES)
    }

    /// Vector `v` of row `m` of a matrix in the layout of the output.
    ///
    /// # Safety
    /// The tile's elements of the matrix are valid; the vector is whole where parts of vectors are slow.
    #[inline(always)]
    unsafe fn part<S: Simd>(&self, s: S, matrix: *const f32, m: usize, v: usize) -> S::Floats {
        // SAFETY: the caller's promise.
        unsafe {
            let from = matrix.wrapping_add(m * self.y_row + v * S::LANES);
            if S::MASKS { s.load_first(from, self.left::<S>(v), 0.0) } else { s.load(from) }
        }
    }

    /// The tile's columns of a bias.
    ///
    /// # Safety
    /// `bias` is valid for the tile's columns.
    #[inline(always)]
    unsafe fn bias<S: Simd, const V: usize>(&self, s: S, bias: *const f16) -> [S::Floats; V] {
        array(
            s.zero(),
            #[inline(always)]
            |v| {
                let left = self.left::<S>(v);
                // SAFETY: the caller's promise.
                widened(s, unsafe { std::slice::from_raw_parts(bias.wrapping_add(v * S::LANES), left) })
            },
        )
    }
}

mod narrow;
mod nibbles;
// After the macro that it uses.
#[cfg(target_arch = "x86_64")]
mod pairs;

pub use self::{narrow::BlockScales, nibbles::Nibbles};

/// Transposes rows of a matrix into columns of a panel: column `j` of `panel (depth, columns)` becomes row `j` of
/// `depth` elements, for `count` rows that `load(row, step, steps)` reads LANES elements at a time.
///
/// Groups of COLUMNS columns follow each other, each `(depth, its columns as whole vectors)`, with zeros after the
/// last column.
#[inline(always)]
pub fn pack_transposed<S: Simd>(
    s: S,
    panel: &mut [f32],
    depth: usize,
    count: usize,
    load: impl Fn(usize, usize, usize) -> S::Floats,
) {
    pack_transposed_scaled(
        s,
        panel,
        depth,
        count,
        load,
        usize::MAX,
        #[inline(always)]
        |_, _, _| None,
    );
}

/// [`pack_transposed`] of rows that are multiplied with factors, each `steps` elements with one: `factors(row, step, rows)`
/// are those of `rows` rows, LANES at most, of the elements from `step` on.
#[inline(always)]
pub fn pack_transposed_scaled<S: Simd>(
    s: S,
    panel: &mut [f32],
    depth: usize,
    count: usize,
    load: impl Fn(usize, usize, usize) -> S::Floats,
    steps: usize,
    factors: impl Fn(usize, usize, usize) -> Option<S::Floats>,
) {
    assert!(panel.len() >= depth * count.next_multiple_of(S::LANES), "room for a panel");
    if depth == 0 {
        return;
    }
    for start in (0..count).step_by(S::LANES) {
        let group = start / S::COLUMNS * S::COLUMNS;
        let columns = (count - group).min(S::COLUMNS).next_multiple_of(S::LANES);
        let to = &mut panel[group * depth + start - group..];
        let rows = S::LANES.min(count - start);
        for first in (0..depth).step_by(steps) {
            let factors = factors(start, first, rows);
            for step in (first..depth.min(first.saturating_add(steps))).step_by(S::LANES) {
                let steps = S::LANES.min(depth - step);
                let mut square = [s.zero(); MOST];
                if rows == S::LANES && steps == S::LANES {
                    // With constants no part of a vector is looked for.
                    for (row, vector) in square.iter_mut().enumerate().take(S::LANES) {
                        *vector = load(start + row, step, S::LANES);
                    }
                } else {
                    for (row, vector) in square.iter_mut().enumerate().take(rows) {
                        *vector = load(start + row, step, steps);
                    }
                }
                let square = s.transposed(square);
                for (i, vector) in square.into_iter().enumerate().take(steps) {
                    let to = to[(step + i) * columns..][..S::LANES].as_mut_ptr();
                    let vector = factors.map_or(vector, |factors| s.mul(vector, factors));
                    // SAFETY: a vector of the panel.
                    unsafe { s.store(to, vector) }
                }
            }
        }
    }
}
