//! Attention whose products are made of BF16 pairs, as those of `--precision bf16` with frozen matrices are: scores,
//! their softmax and all sums are FP32; queries, keys, values, gradients of the output, and, once they are known,
//! probabilities and gradients of scores are rounded.
//!
//! A pair holds two neighbours along the depth of its product: of a vector for scores, of tokens where weights mix
//! vectors, of queries for the gradients of keys and values. Tokens are counted from the first row of the prefix.

use std::ops::Range;

use super::{
    Group, Head, Kind, Stretch, Task,
    backward::{BLOCK, Backward, Given},
    hide, normalise, powers,
};
use crate::{
    device::cpu::simd::{
        Simd,
        avx512::Avx512,
        pairs::{interleaved, paired, round, round_in_place},
        tile::{ROWS, Tile, pack_transposed},
    },
    kernels::attention::{
        Shape,
        cpu::{Rows, RowsMut},
    },
};

const LANES: usize = Avx512::LANES;

/// Whether to compute in pairs: requested, fast on this CPU, and heads are whole vectors of pairs.
pub fn fits(shape: &Shape) -> bool {
    shape.arithmetic.in_pairs() && shape.width.is_multiple_of(2 * LANES)
}

/// Floats of scratch of a forward for rows of `row` scores.
pub fn scratch_forward(row: usize, width: usize) -> usize {
    parts_forward(row, width).iter().sum()
}

/// Floats of scratch of a backward, or a forward, for rows of `row` scores.
pub fn scratch(row: usize, width: usize) -> usize {
    parts(row, width).iter().sum()
}

/// Queries in a block, `row` at most.
fn block(row: usize) -> usize {
    BLOCK.min(row.next_multiple_of(ROWS))
}

/// Lengths of the parts of a backward's scratch: transposed keys and values, pairs of keys; pairs of a block's
/// probabilities, gradients of scores, queries and gradients of the output; a group's scores, their gradients, and
/// rounded queries and gradients of the output.
fn parts(row: usize, width: usize) -> [usize; 11] {
    let (panel, scores, vectors) = (row * width / 2, row * block(row) / 2, width * block(row) / 2);
    let (group, rounded) = (row * ROWS, width * ROWS / 2);
    [panel, panel, panel, scores, scores, vectors, vectors, group, group, rounded, rounded]
}

/// The same of a forward: transposed keys, pairs of values, a group's rounded queries and scores.
fn parts_forward(row: usize, width: usize) -> [usize; 4] {
    [row * width / 2, row * width / 2, width * ROWS / 2, row * ROWS]
}

/// Floats that are pairs of BF16 values.
#[derive(Clone, Copy)]
struct Pairs(Avx512);

impl Kind for Pairs {
    type S = Avx512;
    const STEPS: usize = 2;

    #[inline(always)]
    unsafe fn run(self, tile: &Tile, rows: usize) {
        // The next operands are in the cache: nothing to prefetch.
        // SAFETY: the caller's promise; this is made where the CPU has the instructions.
        unsafe { tile.rows_of_pairs(self.0, rows, [tile.x; 2]) }
    }
}

impl Task<'_> {
    /// Transposes the vectors of prefix and tokens into a panel `(width / 2, columns)` of pairs.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn pack_pair_panel(&self, s: Avx512, prefix: Option<Head>, tokens: Head, panel: &mut [f32]) {
        pack_transposed(s, panel, self.shape.width / 2, self.columns(), |column, step, _| {
            let vector = self.vector(prefix, tokens, column);
            for line in [0, LANES] {
                s.fetch(vector.as_ptr().wrapping_add(super::AHEAD * tokens.row + 2 * step + line));
            }
            pair_of(s, &vector[2 * step..])
        });
    }

    /// The vectors of columns `2 i` and `2 i + 1` in row `i` of a panel `(columns / 2, width)` of pairs; the
    /// partner of an odd last one is 0.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn couple(&self, s: Avx512, prefix: Option<Head>, tokens: Head, panel: &mut [f32]) {
        let columns = self.columns();
        for (pair, to) in panel.chunks_exact_mut(self.shape.width).enumerate().take(columns.div_ceil(2)) {
            let vector = |column: usize| self.vector(prefix, tokens, column);
            let second = (2 * pair + 1 < columns).then(|| vector(2 * pair + 1));
            couple(s, vector(2 * pair), second, to);
        }
    }

    /// The stretches of a panel of [`Task::couple`] that a group sees.
    fn pairs_seen_of<'v>(&self, group: &Group, panel: &'v [f32]) -> [Stretch<'v>; 2] {
        let (p, row) = (self.shape.prefix, self.shape.width);
        let (prefix, tokens) = (p.div_ceil(2), (p + group.tokens.start) / 2);
        let end = (p + group.tokens.end).div_ceil(2);
        // Prefix and tokens are one stretch where no hidden token is between them, or a pair spans both.
        let ranges = if tokens > prefix { [0..prefix, tokens..end] } else { [0..0, 0..end] };
        ranges.map(|Range { start, end }| Stretch {
            vectors: &panel[start * row..],
            row,
            at: start,
            depth: end - start,
        })
    }
}

/// The first 32 values as 16 pairs.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn pair_of(s: Avx512, values: &[f32]) -> <Avx512 as Simd>::Floats {
    let values = values[..2 * LANES].as_ptr();
    // SAFETY: two vectors of floats.
    unsafe { paired(s.load(values), s.load(values.add(LANES))) }
}

/// Pairs of the elements of two rows, the second of which may be missing, as zeros. All are whole vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn couple(s: Avx512, first: &[f32], second: Option<&[f32]>, to: &mut [f32]) {
    let vectors = to.len() / LANES * LANES;
    assert!(first.len() >= vectors && second.is_none_or(|second| second.len() >= vectors), "rows of a pair");
    for at in (0..vectors).step_by(LANES) {
        // SAFETY: vectors of the rows, which are long enough.
        unsafe {
            let high = second.map_or(s.zero(), |second| s.load(second.as_ptr().add(at)));
            s.store(to.as_mut_ptr().add(at), interleaved(s.load(first.as_ptr().add(at)), high));
        }
    }
}

/// Rounds the vectors of a group, `width / 2` pairs each.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round_group(s: Avx512, group: &Group, from: Head, width: usize, to: &mut [f32]) {
    for (row, to) in to.chunks_exact_mut(width / 2).enumerate().take(group.rows) {
        round(s, from.vector(group.first + row, width), to);
    }
}

/// As [`super::forward_head`].
///
/// # Safety
/// The CPU has AVX-512 F, BW and BF16; `to(query)` are the outputs from that query on, which belong to the task.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub unsafe fn forward_head(task: &Task, scratch: &mut [f32], to: &dyn Fn(usize) -> RowsMut, lse: &mut [f32]) {
    // SAFETY: the caller's promise.
    let s = unsafe { Avx512::new() };
    let kind = Pairs(s);
    let (width, row, p) = (task.shape.width, task.row(), task.shape.prefix);
    let [keys, values, queries, scores] = cut(scratch, parts_forward(row, width));
    task.pack_pair_panel(s, task.prefix.map(|p| p.0), task.k, keys);
    task.couple(s, task.prefix.map(|p| p.1), task.v, values);
    for first in (0..task.shape.queries).step_by(ROWS) {
        let group = task.group(first, ROWS.min(task.shape.queries - first));
        let mut factors = [0.0; ROWS];
        task.fetch(s, &group, &[task.q]);
        round_group(s, &group, task.q, width, queries);
        let left = Rows { data: queries.as_ptr(), row: width / 2 };
        // SAFETY: these are the group's rows; the output is the caller's promise.
        unsafe { task.products(kind, &group, left, keys, task.scale, scores) };
        let columns = (p + group.tokens.end).next_multiple_of(LANES);
        for (i, scores) in scores.chunks_exact_mut(row).enumerate().take(group.rows) {
            let (seen, scores) = (task.seen(first + i), &mut scores[..columns]);
            hide(scores, p, &seen);
            (lse[first + i], factors[i]) = powers(s, scores, p, seen);
            round_in_place(s, scores);
        }
        // SAFETY: as above.
        unsafe {
            task.mix(kind, &group, scores, &task.pairs_seen_of(&group, values), to(first));
            normalise(s, to(first), width, &factors[..group.rows]);
        }
    }
}

impl Backward<'_> {
    /// As `run`.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW and BF16; the targets belong to the calling task.
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub unsafe fn run_pairs(&self, scratch: &mut [f32]) {
        // SAFETY: the caller's promise.
        let s = unsafe { Avx512::new() };
        let kind = Pairs(s);
        let task = &self.task;
        let (width, row, p) = (task.shape.width, task.row(), task.shape.prefix);
        let [keys, values, key_pairs, probabilities, d_scores, q_pairs, d_pairs, scores, d_rows, q, d] =
            cut(scratch, parts(row, width));
        let prefix = (task.prefix.map(|p| p.0), task.prefix.map(|p| p.1));
        task.pack_pair_panel(s, prefix.0, task.k, keys);
        task.pack_pair_panel(s, prefix.1, task.v, values);
        task.couple(s, prefix.0, task.k, key_pairs);
        for first in (0..task.shape.queries).step_by(BLOCK) {
            let block = task.group(first, BLOCK.min(task.shape.queries - first));
            let end = (p + block.tokens.end).next_multiple_of(LANES);
            for at in (0..block.rows).step_by(ROWS) {
                let group = task.group(first + at, ROWS.min(block.rows - at));
                task.fetch(s, &group, &[task.q, self.dout, self.out]);
                round_group(s, &group, task.q, width, q);
                round_group(s, &group, self.dout, width, d);
                let rounded = |rows: &[f32]| Rows { data: rows.as_ptr(), row: width / 2 };
                // SAFETY: these are the group's rows.
                unsafe {
                    task.products(kind, &group, rounded(q), keys, task.scale, scores);
                    task.products(kind, &group, rounded(d), values, 1.0, d_rows);
                }
                self.scores(s, &group, p..end, scores, d_rows);
                for i in (0..group.rows).step_by(2) {
                    let pair = (at + i) / 2;
                    let second = (i + 1 < group.rows).then_some(i + 1);
                    for (from, to) in [(&*scores, &mut *probabilities), (&*d_rows, &mut *d_scores)] {
                        let of = |i: usize| &from[i * row..][..end];
                        couple(s, of(i), second.map(of), &mut to[pair * row..][..end]);
                    }
                    for (from, to) in [(task.q, &mut *q_pairs), (self.dout, &mut *d_pairs)] {
                        let of = |i: usize| from.vector(group.first + i, width);
                        couple(s, of(i), second.map(of), &mut to[pair * width..][..width]);
                    }
                }
                for row in d_rows.chunks_exact_mut(row).take(group.rows) {
                    round_in_place(s, &mut row[..end]);
                }
                let target = RowsMut { data: (self.to.d_at)(0, group.first), row: self.to.row };
                // SAFETY: the caller's promise.
                unsafe { task.mix(kind, &group, d_rows, &task.pairs_seen_of(&group, key_pairs), target) };
            }
            let given = |weights, vectors| Given { weights, vectors, row: width };
            // SAFETY: the caller's promise.
            unsafe { self.add(kind, &block, [given(d_scores, q_pairs), given(probabilities, d_pairs)]) };
        }
    }
}

/// Splits scratch into parts of these lengths.
fn cut<const N: usize>(scratch: &mut [f32], lengths: [usize; N]) -> [&mut [f32]; N] {
    let mut rest = scratch;
    lengths.map(|length| {
        let (part, others) = std::mem::take(&mut rest).split_at_mut(length);
        rest = others;
        part
    })
}
