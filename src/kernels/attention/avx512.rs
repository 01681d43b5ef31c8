//! AVX-512 side of attention: a task is one head of one row; queries go in groups of a tile's rows.
//!
//! Keys (in the backward values too) are turned once per head into a panel; their columns are the prefix, then all
//! tokens. The scores of a group stay in the first-level cache, those of a block of groups, which the gradients
//! of keys and values are summed over, in the second-level one. Queries and keys that do not see each other are left
//! out as far as tiles allow, and set to 0 inside them.

use std::{arch::x86_64::*, ops::Range};

use super::{
    Heads, Prefix, Seen, Shape,
    cpu::{Gradients, Head},
};
use crate::kernels::{
    avx512::{
        LANES, exp, first, fold, load_or, replace, replace_both,
        tile::{Begin, COLUMNS, ROWS, Tile, pack_turned},
    },
    cpu::{Shared, with_scratch},
    tasks::each,
};

/// Queries of a block in the backward.
const BLOCK: usize = 12 * ROWS;
/// Tokens whose vectors are fetched before their turn.
const AHEAD: usize = 2 * LANES;

/// Whether heads are whole vectors and queries are worth turning the keys for.
pub fn fits(width: usize, queries: usize) -> bool {
    width.is_multiple_of(LANES) && queries >= ROWS
}

/// Floats of scratch a task uses for `keys` columns, prefix included, and heads of `width`.
pub fn scratch(keys: usize, width: usize) -> usize {
    2 * row(keys) * (width + BLOCK)
}

/// Distance between rows of scores, in floats: an odd number of cache lines. A column of them is read too, and with a
/// power of two between its elements they would all fight for the same places of the first-level cache.
fn row(columns: usize) -> usize {
    LANES * (columns.div_ceil(LANES) | 1)
}

/// One head of one row of the batch.
struct Task<'a> {
    q: Head<'a>,
    k: Head<'a>,
    v: Head<'a>,
    /// Keys and values.
    prefix: Option<(Head<'a>, Head<'a>)>,
    /// First visible token of each query.
    starts: &'a [u32],
    shape: Shape,
    scale: f32,
}

/// Queries `first .. first + rows`, and the tokens that any of them sees.
#[derive(Clone)]
struct Group {
    first: usize,
    rows: usize,
    tokens: Range<usize>,
}

impl<'a> Task<'a> {
    fn new(
        (q, k, v): (Heads<'a>, Heads<'a>, Heads<'a>),
        prefix: Option<Prefix<'a>>,
        starts: &'a [u32],
        (b, h): (usize, usize),
        (shape, scale): (Shape, f32),
    ) -> Self {
        let head = |heads: Heads<'a>| Head::new(heads, b, h, shape.width);
        Self {
            q: head(q),
            k: head(k),
            v: head(v),
            prefix: prefix.map(|p| (head(p.k), head(p.v))),
            starts: &starts[b * shape.queries..][..shape.queries],
            shape,
            scale,
        }
    }

    /// Has the vectors of some tokens brought near that are AHEAD of a group.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn fetch(&self, group: &Group, heads: &[Head]) {
        for head in heads {
            for row in 0..group.rows {
                let vector = head.from(group.first).wrapping_add((row + AHEAD) * head.row);
                for at in (0..self.shape.width).step_by(LANES) {
                    _mm_prefetch::<_MM_HINT_T0>(vector.wrapping_add(at).cast());
                }
            }
        }
    }

    fn group(&self, first: usize, rows: usize) -> Group {
        let start = self.starts[first..first + rows].iter().copied().min().unwrap_or(0) as usize;
        Group { first, rows, tokens: start..self.shape.past + first + rows }
    }

    /// Columns: prefix and tokens.
    fn columns(&self) -> usize {
        self.shape.prefix + self.shape.past + self.shape.queries
    }

    /// Distance between rows of scores.
    fn row(&self) -> usize {
        row(self.columns())
    }

    /// Columns of tokens that query `query` sees.
    fn seen(&self, query: usize) -> Range<usize> {
        let Shape { prefix, past, .. } = self.shape;
        prefix + self.starts[query] as usize..prefix + past + query + 1
    }

    /// Turns the vectors of prefix and tokens into a panel `(width, columns)`.
    ///
    /// # Safety
    /// The CPU has AVX-512 F.
    #[target_feature(enable = "avx512f")]
    unsafe fn turn(&self, prefix: Option<Head>, tokens: Head, panel: &mut [f32]) {
        let p = self.shape.prefix;
        let load = |column: usize, step: usize, steps: usize| {
            let vector = match prefix {
                Some(prefix) if column < p => prefix.vector(column, self.shape.width),
                _ => tokens.vector(column - p, self.shape.width),
            };
            // Vectors of one head lie far apart; no CPU sees them coming.
            let ahead = vector.as_ptr().wrapping_add(AHEAD * tokens.row + step);
            _mm_prefetch::<_MM_HINT_T0>(ahead.cast());
            load_or(&vector[step..][..steps], 0.0)
        };
        // SAFETY: the caller's promise.
        unsafe { pack_turned(panel, (self.shape.width, self.columns()), load) }
    }

    /// `scores = scale left panel` in all columns of tiles that the group sees any of.
    ///
    /// # Safety
    /// The CPU has AVX-512 F; `left` points at the group's vectors, `left_row` apart.
    #[target_feature(enable = "avx512f")]
    unsafe fn products(
        &self,
        group: &Group,
        (left, left_row): (*const f32, usize),
        panel: &[f32],
        scale: f32,
        scores: &mut [f32],
    ) {
        let (p, width, columns, row) = (self.shape.prefix, self.shape.width, self.columns(), self.row());
        assert!(scores.len() >= group.rows * row && panel.len() >= width * row, "room for scores");
        let hidden = p..p + group.tokens.start;
        for at in (0..p + group.tokens.end).step_by(COLUMNS) {
            if hidden.start <= at && at + COLUMNS <= hidden.end {
                continue;
            }
            let count = COLUMNS.min(p + group.tokens.end - at);
            let tile = Tile {
                x: left,
                x_row: left_row,
                x_step: 1,
                panel: panel[at * width..].as_ptr(),
                panel_row: COLUMNS.min(columns - at).next_multiple_of(LANES),
                depth: width,
                y: scores[at..].as_mut_ptr(),
                y_row: row,
                columns: count,
                begin: Begin::Zero,
                scale,
            };
            // SAFETY: the caller's promise, and the sizes checked above.
            unsafe { tile.rows(group.rows) }
        }
    }

    /// `y (rows, width) = weights values` over prefix and visible tokens of a group.
    ///
    /// # Safety
    /// The CPU has AVX-512 F; y is the caller's, rows `y_row` apart; `weights` holds the group's rows.
    #[target_feature(enable = "avx512f")]
    unsafe fn mix(
        &self,
        group: &Group,
        weights: &[f32],
        (prefix, tokens): (Option<Head>, Head),
        (y, y_row): (*mut f32, usize),
    ) {
        let (p, row) = (self.shape.prefix, self.row());
        assert!(weights.len() >= (group.rows - 1) * row + p + group.tokens.end, "weights of a group");
        for column in (0..self.shape.width).step_by(COLUMNS) {
            let part = |from: Head, at: usize, (token, depth): (usize, usize), begin: Begin| {
                let vectors = &from.data[token * from.row + column..];
                let columns = COLUMNS.min(self.shape.width - column);
                assert!(vectors.len() >= (depth - 1) * from.row + columns, "vectors of all tokens");
                let tile = Tile {
                    x: weights[at..].as_ptr(),
                    x_row: row,
                    x_step: 1,
                    panel: vectors.as_ptr(),
                    panel_row: from.row,
                    depth,
                    y: y.wrapping_add(column),
                    y_row,
                    columns,
                    begin,
                    scale: 1.0,
                };
                // SAFETY: the caller's promise, and the sizes checked above.
                unsafe { tile.rows(group.rows) }
            };
            let mut begin = Begin::Zero;
            if let Some(prefix) = prefix.filter(|_| p > 0) {
                part(prefix, 0, (0, p), begin);
                begin = Begin::Keep;
            }
            part(tokens, p + group.tokens.start, (group.tokens.start, group.tokens.len()), begin);
        }
    }
}

pub fn forward(
    heads: (Heads, Heads, Heads),
    prefix: Option<Prefix>,
    starts: &[u32],
    scale: f32,
    shape: Shape,
    (out, lse): (&mut [f32], &mut [f32]),
) {
    let Shape { batch, queries: t, heads: h, width, .. } = shape;
    let c = h * width;
    assert!(out.len() == batch * t * c && lse.len() == batch * h * t, "attention shapes");
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    each(batch * h, |index| {
        let (b, head) = (index / h, index % h);
        let task = Task::new(heads, prefix, starts, (b, head), (shape, scale));
        // SAFETY: this head of lse belongs to this task.
        let lse = unsafe { lse.range(index * t, t) };
        let to = |query: usize| (out.at((b * t + query) * c + head * width), c);
        with_scratch(task.row() * (width + ROWS), |scratch| {
            // SAFETY: the caller found the instructions; this head's columns of out belong to this task.
            unsafe { forward_head(&task, scratch, &to, lse) }
        });
    });
}

/// # Safety
/// The CPU has AVX-512 F; `to(query)` points at the task's output, rows that far apart.
#[target_feature(enable = "avx512f")]
unsafe fn forward_head(
    task: &Task,
    scratch: &mut [f32],
    to: &dyn Fn(usize) -> (*mut f32, usize),
    lse: &mut [f32],
) {
    let (panel, scores) = scratch.split_at_mut(task.row() * task.shape.width);
    let p = task.shape.prefix;
    // SAFETY: the caller's promise.
    unsafe {
        task.turn(task.prefix.map(|p| p.0), task.k, panel);
        for first in (0..task.shape.queries).step_by(ROWS) {
            let group = task.group(first, ROWS.min(task.shape.queries - first));
            let mut factors = [0.0; ROWS];
            task.fetch(&group, &[task.q, task.v]);
            task.products(&group, (task.q.from(first), task.q.row), panel, task.scale, scores);
            for row in 0..group.rows {
                let seen = task.seen(first + row);
                let scores = &mut scores[row * task.row()..][..p + group.tokens.end];
                hide(scores, (p + group.tokens.start, &seen));
                (lse[first + row], factors[row]) = powers(scores, p, seen);
            }
            let target = to(first);
            task.mix(&group, scores, (task.prefix.map(|p| p.1), task.v), target);
            for (row, &factor) in factors.iter().enumerate().take(group.rows) {
                // SAFETY: a row of the task's output, which nobody else uses.
                let out = std::slice::from_raw_parts_mut(target.0.add(row * target.1), task.shape.width);
                replace(out, |x| _mm512_mul_ps(x, _mm512_set1_ps(factor)));
            }
        }
    }
}

/// Zeros where a row does not see, from column `from` on.
fn hide(row: &mut [f32], (from, seen): (usize, &Range<usize>)) {
    row[from..seen.start].fill(0.0);
    row[seen.end..].fill(0.0);
}

/// Replaces scores of the first `prefix` elements and of `seen` by exp(score - max). Returns ln sum exp(score) and
/// the factor that makes probabilities of them.
#[target_feature(enable = "avx512f")]
fn powers(row: &mut [f32], prefix: usize, seen: Range<usize>) -> (f32, f32) {
    let ranges = [0..prefix, seen];
    let mut most = _mm512_set1_ps(f32::NEG_INFINITY);
    for range in &ranges {
        most = fold(&row[range.clone()], f32::NEG_INFINITY, most, |most, x| _mm512_max_ps(x, most));
    }
    let max = _mm512_reduce_max_ps(most);
    for range in &ranges {
        replace(&mut row[range.clone()], |x| exp(_mm512_sub_ps(x, _mm512_set1_ps(max))));
    }
    let mut sums = _mm512_setzero_ps();
    for range in ranges {
        sums = fold(&row[range], 0.0, sums, |sums, x| _mm512_add_ps(sums, x));
    }
    let sum = _mm512_reduce_add_ps(sums);
    (max + sum.ln(), 1.0 / sum)
}

pub fn backward_head(dout: &[f32], seen: Seen, scale: f32, shape: &Shape, to: &Gradients) {
    let (t, c) = (shape.queries, shape.heads * shape.width);
    let (b, h) = to.task;
    let heads = super::packed(seen.qkv, t, c);
    let task = Task::new(heads, seen.prefix, seen.starts.host(), to.task, (*shape, scale));
    let first = b * t * c + h * shape.width;
    let (dout, out) = (Head::of(dout, first, c), Head::of(seen.out.host(), first, c));
    let lse = &seen.lse.host::<f32>()[(b * shape.heads + h) * t..][..t];
    with_scratch(scratch(task.columns(), shape.width), |scratch| {
        // SAFETY: the caller found the instructions, and all gradients of `to` are this task's.
        unsafe { Backward { task, dout, out, lse, to }.run(scratch) }
    });
}

/// The backward of one head.
struct Backward<'a> {
    task: Task<'a>,
    /// Gradient of the output.
    dout: Head<'a>,
    /// The output.
    out: Head<'a>,
    lse: &'a [f32],
    to: &'a Gradients<'a>,
}

impl Backward<'_> {
    /// # Safety
    /// The CPU has AVX-512 F; the targets belong to the calling task.
    #[target_feature(enable = "avx512f")]
    unsafe fn run(&self, scratch: &mut [f32]) {
        let (task, row) = (&self.task, self.task.row());
        let (keys, rest) = scratch.split_at_mut(row * task.shape.width);
        let (values, rest) = rest.split_at_mut(row * task.shape.width);
        let (probabilities, d_scores) = rest.split_at_mut(row * BLOCK);
        // SAFETY: the caller's promise.
        unsafe {
            task.turn(task.prefix.map(|p| p.0), task.k, keys);
            task.turn(task.prefix.map(|p| p.1), task.v, values);
            for first in (0..task.shape.queries).step_by(BLOCK) {
                let block = task.group(first, BLOCK.min(task.shape.queries - first));
                for at in (0..block.rows).step_by(ROWS) {
                    let group = task.group(first + at, ROWS.min(block.rows - at));
                    let (p, d) = (&mut probabilities[at * row..], &mut d_scores[at * row..]);
                    task.fetch(&group, &[task.q, self.dout, self.out]);
                    self.scores(&group, &block, (keys, values), p, d);
                    let target = ((self.to.d_at)(0, group.first), self.to.row);
                    task.mix(&group, d, (task.prefix.map(|p| p.0), task.k), target);
                }
                self.add(&block, (probabilities, d_scores));
            }
        }
    }

    /// Probabilities and `ds = scale p (dp - delta)` of a group, zeros in whatever else of the block's columns.
    ///
    /// # Safety
    /// The CPU has AVX-512 F.
    #[target_feature(enable = "avx512f")]
    unsafe fn scores(
        &self,
        group: &Group,
        block: &Group,
        (keys, values): (&[f32], &[f32]),
        probabilities: &mut [f32],
        d_scores: &mut [f32],
    ) {
        let (task, p) = (&self.task, self.task.shape.prefix);
        let left = (task.q.from(group.first), task.q.row);
        let d_left = (self.dout.from(group.first), self.dout.row);
        // SAFETY: q and dout hold the group's rows.
        unsafe {
            task.products(group, left, keys, task.scale, probabilities);
            task.products(group, d_left, values, 1.0, d_scores);
        }
        for row in 0..group.rows {
            let query = group.first + row;
            let seen = task.seen(query);
            let delta =
                dot(self.dout.vector(query, task.shape.width), self.out.vector(query, task.shape.width));
            let columns = row * task.row()..row * task.row() + p + block.tokens.end;
            let (s, d) = (&mut probabilities[columns.clone()], &mut d_scores[columns]);
            hide(s, (p + block.tokens.start, &seen));
            hide(d, (p + block.tokens.start, &seen));
            for range in [0..p, seen] {
                gradient(&mut s[range.clone()], &mut d[range], (self.lse[query], delta, task.scale));
            }
        }
    }

    /// `dK += ds^T Q`, `dV += P^T do` for all columns that a block sees.
    ///
    /// # Safety
    /// As [`Backward::run`].
    #[target_feature(enable = "avx512f")]
    unsafe fn add(&self, block: &Group, (probabilities, d_scores): (&[f32], &[f32])) {
        let (task, p) = (&self.task, self.task.shape.prefix);
        for at in (0..p).step_by(ROWS) {
            let rows = ROWS.min(p - at);
            for (part, weights, from) in [(0, d_scores, task.q), (1, probabilities, self.dout)] {
                let target = ((self.to.prefix_at)(part, at), task.shape.heads * task.shape.width);
                // SAFETY: the caller's promise.
                unsafe { self.add_rows(block, 0, (at, rows), weights, from, target) }
            }
        }
        for token in block.tokens.clone().step_by(ROWS) {
            let rows = ROWS.min(block.tokens.end - token);
            // Queries before these tokens do not see them.
            let before = token.saturating_sub(task.shape.past + block.first) / ROWS * ROWS;
            for (part, weights, from) in [(1, d_scores, task.q), (2, probabilities, self.dout)] {
                let target = ((self.to.d_at)(part, token), self.to.row);
                // SAFETY: the caller's promise.
                unsafe { self.add_rows(block, before, (p + token, rows), weights, from, target) }
            }
        }
    }

    /// Adds to `rows` rows of a target what the queries of a block, those before `before` left out, give to
    /// the columns from `column` on.
    ///
    /// # Safety
    /// As [`Backward::run`].
    #[target_feature(enable = "avx512f")]
    unsafe fn add_rows(
        &self,
        block: &Group,
        before: usize,
        (column, rows): (usize, usize),
        weights: &[f32],
        from: Head,
        (y, y_row): (*mut f32, usize),
    ) {
        let (row, width) = (self.task.row(), self.task.shape.width);
        assert!(weights.len() >= block.rows * row && column + rows <= row, "weights of a block");
        for start in (0..width).step_by(COLUMNS) {
            let columns = COLUMNS.min(width - start);
            let vectors = &from.data[(block.first + before) * from.row + start..];
            assert!(vectors.len() >= (block.rows - before - 1) * from.row + columns, "vectors of a block");
            let tile = Tile {
                x: weights[before * row + column..].as_ptr(),
                x_row: 1,
                x_step: row,
                panel: vectors.as_ptr(),
                panel_row: from.row,
                depth: block.rows - before,
                y: y.wrapping_add(start),
                y_row,
                columns,
                begin: Begin::Keep,
                scale: 1.0,
            };
            // SAFETY: the caller's promise, and the sizes checked above.
            unsafe { tile.rows(rows) }
        }
    }
}

/// From scores and `dp` to probabilities and `ds`, in place.
#[target_feature(enable = "avx512f")]
fn gradient(scores: &mut [f32], d_scores: &mut [f32], (lse, delta, scale): (f32, f32, f32)) {
    let (lse, delta, scale) = (_mm512_set1_ps(lse), _mm512_set1_ps(delta), _mm512_set1_ps(scale));
    replace_both(scores, d_scores, |s, d| {
        let p = exp(_mm512_sub_ps(s, lse));
        (p, _mm512_mul_ps(_mm512_mul_ps(scale, p), _mm512_sub_ps(d, delta)))
    });
}

/// Scalar product of two vectors of one length.
#[target_feature(enable = "avx512f")]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sum = _mm512_setzero_ps();
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        sum = _mm512_fmadd_ps(load_or(a, 0.0), load_or(b, 0.0), sum);
    }
    _mm512_mask_reduce_add_ps(first(LANES), sum)
}
