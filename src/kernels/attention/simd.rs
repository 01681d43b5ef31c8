//! Attention, vectorised: a task is one head of one row; queries are taken in groups of a tile's rows.
//!
//! Keys (in the backward values too) are transposed once per head into a panel; its columns are the prefix, then all
//! tokens. The scores of a group stay in the first-level cache, those of a block of groups, which the gradients
//! of keys and values are summed over, in the second-level one. Queries and keys that do not see each other are left
//! out as far as tiles allow, and set to 0 inside them.

use std::ops::Range;

use super::{
    Heads, Inputs, Shape,
    cpu::{Head, Rows, RowsMut},
};
use crate::device::cpu::{
    LINE, Shared,
    simd::{
        Simd, exp, fold, load_or, replace,
        tile::{Begin, ROWS, Tile, pack_transposed},
    },
    tasks::each,
    with_scratch,
};

mod backward;
pub mod one_query;
#[cfg(target_arch = "x86_64")]
mod pairs;

pub use self::backward::backward_head;

/// Tokens whose vectors are prefetched.
const AHEAD: usize = 2 * LINE;

/// Whether heads are whole vectors, and the queries enough for transposing the keys to pay.
pub fn fits<S: Simd>(_: S, width: usize, queries: usize) -> bool {
    width.is_multiple_of(S::LANES) && queries >= ROWS
}

/// Floats of scratch of a task for `keys` columns, prefix included, and heads of `width`.
pub fn scratch(keys: usize, width: usize) -> usize {
    let most = backward::scratch(row(keys), width);
    #[cfg(target_arch = "x86_64")]
    let most = most.max(pairs::scratch(row(keys), width));
    most
}

/// Distance between rows of scores, in floats: an odd number of cache lines. A column of them is read too, and with a
/// power of two between its elements they would all map to the same sets of the first-level cache.
fn row(columns: usize) -> usize {
    LINE * (columns.div_ceil(LINE) | 1)
}

/// Form of a float in the factors of a product: a number, or a pair of BF16 values, see [`pairs`].
trait Kind: Copy {
    /// Instructions that tiles are computed with.
    type S: Simd;
    /// Steps of a product that a float stands for.
    const STEPS: usize;

    /// Computes `rows` rows of a tile.
    ///
    /// # Safety
    /// As [`Tile::rows`].
    unsafe fn run(self, tile: &Tile, rows: usize);
}

/// Floats that are FP32 numbers.
#[derive(Clone, Copy)]
struct Floats<S>(S);

impl<S: Simd> Kind for Floats<S> {
    type S = S;
    const STEPS: usize = 1;

    #[inline(always)]
    unsafe fn run(self, tile: &Tile, rows: usize) {
        // SAFETY: the caller's promise.
        unsafe { tile.rows(self.0, rows) }
    }
}

/// Vectors of a weighted sum: `depth` of them, `row` apart, for weights from column `at`.
struct Stretch<'a> {
    vectors: &'a [f32],
    row: usize,
    at: usize,
    depth: usize,
}

/// One head of one row of the batch.
struct Task<'a> {
    q: Head<'a>,
    k: Head<'a>,
    v: Head<'a>,
    /// Keys and values of the prefix, `(p, d)` each.
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
    /// Head `h` of row `b` of the batch.
    fn new(inputs: Inputs<'a>, b: usize, h: usize) -> Self {
        let Inputs { q, k, v, prefix, starts, scale, shape } = inputs;
        let head = |heads: Heads<'a>| Head::new(heads, b, h, shape.width);
        Self {
            q: head(q),
            k: head(k),
            v: head(v),
            prefix: prefix.map(|p| (head(p.k), head(p.v))),
            starts: &starts.host()[b * shape.queries..][..shape.queries],
            shape,
            scale,
        }
    }

    /// Prefetches the vectors of some tokens that are AHEAD of a group.
    #[inline(always)]
    fn fetch<S: Simd>(&self, s: S, group: &Group, heads: &[Head]) {
        for head in heads {
            for row in 0..group.rows {
                let vector = head.from(group.first).data.wrapping_add((row + AHEAD) * head.row);
                for at in (0..self.shape.width).step_by(LINE) {
                    s.fetch(vector.wrapping_add(at));
                }
            }
        }
    }

    fn group(&self, first: usize, rows: usize) -> Group {
        let start = self.starts[first..first + rows].iter().copied().min().unwrap_or(0) as usize;
        Group { first, rows, tokens: start..self.shape.past + first + rows }
    }

    /// Number of columns: prefix and tokens.
    fn columns(&self) -> usize {
        self.shape.prefix + self.shape.past + self.shape.queries
    }

    /// Elements from a row of scores to the next.
    fn row(&self) -> usize {
        row(self.columns())
    }

    /// Columns of tokens that query `query` sees.
    fn seen(&self, query: usize) -> Range<usize> {
        let Shape { prefix, past, .. } = self.shape;
        prefix + self.starts[query] as usize..prefix + past + query + 1
    }

    /// The vector of a column: prefix, then tokens.
    #[inline(always)]
    fn vector<'v>(&self, prefix: Option<Head<'v>>, tokens: Head<'v>, column: usize) -> &'v [f32] {
        let (p, width) = (self.shape.prefix, self.shape.width);
        match prefix {
            Some(prefix) if column < p => prefix.vector(column, width),
            _ => tokens.vector(column - p, width),
        }
    }

    /// Transposes the vectors of prefix and tokens into a panel `(width, columns)`.
    #[inline(always)]
    fn pack_panel<S: Simd>(&self, s: S, prefix: Option<Head>, tokens: Head, panel: &mut [f32]) {
        pack_transposed(
            s,
            panel,
            self.shape.width,
            self.columns(),
            #[inline(always)]
            |column, step, steps| {
                let vector = self.vector(prefix, tokens, column);
                // Vectors of one head are far apart; no CPU prefetches them by itself.
                s.fetch(vector.as_ptr().wrapping_add(AHEAD * tokens.row + step));
                load_or(s, &vector[step..][..steps], 0.0)
            },
        );
    }

    /// `scores = scale left panel` in all columns of tiles that the group sees any of.
    ///
    /// # Safety
    /// `left` points at the group's vectors.
    unsafe fn products<K: Kind>(
        &self,
        kind: K,
        group: &Group,
        left: Rows,
        panel: &[f32],
        scale: f32,
        scores: &mut [f32],
    ) {
        let (p, depth, columns, row) =
            (self.shape.prefix, self.shape.width / K::STEPS, self.columns(), self.row());
        assert!(scores.len() >= group.rows * row && panel.len() >= depth * row, "room for scores");
        let hidden = p..p + group.tokens.start;
        for at in (0..p + group.tokens.end).step_by(K::S::COLUMNS) {
            if hidden.start <= at && at + K::S::COLUMNS <= hidden.end {
                continue;
            }
            // Rows of scores and of the panel are whole vectors; nothing after the last token is read.
            let count = K::S::COLUMNS.min((p + group.tokens.end - at).next_multiple_of(K::S::LANES));
            let tile = Tile {
                x: left.data,
                x_row: left.row,
                x_step: 1,
                panel: panel[at * depth..].as_ptr(),
                panel_row: K::S::COLUMNS.min(columns - at).next_multiple_of(K::S::LANES),
                depth,
                y: scores[at..].as_mut_ptr(),
                y_row: row,
                columns: count,
                begin: Begin::Zero,
                scale,
            };
            // SAFETY: the caller's promise, and the sizes checked above.
            unsafe { kind.run(&tile, group.rows) }
        }
    }

    /// The stretches of vectors that a group adds: of the prefix, and of visible tokens.
    fn seen_of<'v>(&self, group: &Group, prefix: Option<Head<'v>>, tokens: Head<'v>) -> [Stretch<'v>; 2] {
        let (p, Range { start, end }) = (self.shape.prefix, group.tokens.clone());
        let prefix = prefix.filter(|_| p > 0).unwrap_or(Head { data: &[], row: 0 });
        [
            Stretch { vectors: prefix.data, row: prefix.row, at: 0, depth: p },
            Stretch {
                vectors: &tokens.data[start * tokens.row..],
                row: tokens.row,
                at: p + start,
                depth: end - start,
            },
        ]
    }

    /// `y (rows, width) = weights vectors` over stretches, the last of which is not empty.
    ///
    /// # Safety
    /// y is the caller's; `weights` holds the group's rows.
    unsafe fn mix<K: Kind>(
        &self,
        kind: K,
        group: &Group,
        weights: &[f32],
        stretches: &[Stretch; 2],
        y: RowsMut,
    ) {
        let row = self.row();
        for column in (0..self.shape.width).step_by(K::S::COLUMNS) {
            let columns = K::S::COLUMNS.min(self.shape.width - column);
            let mut begin = Begin::Zero;
            for part in stretches.iter().filter(|part| part.depth > 0) {
                let vectors = &part.vectors[column..];
                assert!(vectors.len() >= (part.depth - 1) * part.row + columns, "vectors of all tokens");
                assert!(weights.len() >= (group.rows - 1) * row + part.at + part.depth, "weights of a group");
                let tile = Tile {
                    x: weights[part.at..].as_ptr(),
                    x_row: row,
                    x_step: 1,
                    panel: vectors.as_ptr(),
                    panel_row: part.row,
                    depth: part.depth,
                    y: y.data.wrapping_add(column),
                    y_row: y.row,
                    columns,
                    begin,
                    scale: 1.0,
                };
                // SAFETY: the caller's promise, and the sizes checked above.
                unsafe { kind.run(&tile, group.rows) }
                begin = Begin::Keep;
            }
        }
    }
}

/// The op's forward: `out (b t, c)` and the log-sum-exp of every head and query.
pub fn forward<S: Simd>(s: S, inputs: Inputs, out: &mut [f32], lse: &mut [f32]) {
    let Shape { batch, queries: t, heads: h, width, .. } = inputs.shape;
    let c = h * width;
    assert!(out.len() == batch * t * c && lse.len() == batch * h * t, "attention shapes");
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    each(batch * h, |index| {
        let (b, head) = (index / h, index % h);
        let task = Task::new(inputs, b, head);
        // SAFETY: this head of lse belongs to this task.
        let lse = unsafe { lse.range(index * t, t) };
        let to = |query: usize| RowsMut { data: out.at((b * t + query) * c + head * width), row: c };
        #[cfg(target_arch = "x86_64")]
        if pairs::fits(&inputs.shape) {
            return with_scratch(pairs::scratch_forward(task.row(), width), |scratch| {
                // SAFETY: the CPU has the instructions, and this head's columns of out belong to this task.
                unsafe { pairs::forward_head(&task, scratch, &to, lse) }
            });
        }
        with_scratch(task.row() * (width + ROWS), |scratch| {
            s.enter(
                #[inline(always)]
                // SAFETY: this head's columns of out belong to this task.
                || unsafe { forward_head(s, &task, scratch, &to, lse) },
            );
        });
    });
}

/// # Safety
/// `to(query)` are the outputs from that query on, which belong to the task.
#[inline(always)]
unsafe fn forward_head<S: Simd>(
    s: S,
    task: &Task,
    scratch: &mut [f32],
    to: &dyn Fn(usize) -> RowsMut,
    lse: &mut [f32],
) {
    let (panel, scores) = scratch.split_at_mut(task.row() * task.shape.width);
    let p = task.shape.prefix;
    // SAFETY: the caller's promise.
    unsafe {
        task.pack_panel(s, task.prefix.map(|p| p.0), task.k, panel);
        for first in (0..task.shape.queries).step_by(ROWS) {
            let group = task.group(first, ROWS.min(task.shape.queries - first));
            let mut factors = [0.0; ROWS];
            task.fetch(s, &group, &[task.q, task.v]);
            task.products(Floats(s), &group, task.q.from(first), panel, task.scale, scores);
            for row in 0..group.rows {
                let seen = task.seen(first + row);
                let scores = &mut scores[row * task.row()..][..p + group.tokens.end];
                hide(scores, p + group.tokens.start, &seen);
                (lse[first + row], factors[row]) = powers(s, scores, p, seen);
            }
            let values = task.seen_of(&group, task.prefix.map(|p| p.1), task.v);
            task.mix(Floats(s), &group, scores, &values, to(first));
            normalise(s, to(first), task.shape.width, &factors[..group.rows]);
        }
    }
}

/// Multiplies each row of a group's output by its factor.
///
/// # Safety
/// The output is the caller's.
#[inline(always)]
unsafe fn normalise<S: Simd>(s: S, to: RowsMut, width: usize, factors: &[f32]) {
    for (row, &factor) in factors.iter().enumerate() {
        // SAFETY: the caller's promise.
        let out = unsafe { std::slice::from_raw_parts_mut(to.data.add(row * to.row), width) };
        replace(
            s,
            out,
            #[inline(always)]
            |x| s.mul(x, s.splat(factor)),
        );
    }
}

/// Sets the elements to 0 that a row does not see, from column `from`.
fn hide(row: &mut [f32], from: usize, seen: &Range<usize>) {
    row[from..seen.start].fill(0.0);
    row[seen.end..].fill(0.0);
}

/// Replaces scores of the first `prefix` elements and of `seen` by exp(score - max). Returns ln sum exp(score) and
/// the factor that turns them into probabilities.
#[inline(always)]
fn powers<S: Simd>(s: S, row: &mut [f32], prefix: usize, seen: Range<usize>) -> (f32, f32) {
    let ranges = [0..prefix, seen];
    let mut most = s.splat(f32::NEG_INFINITY);
    for range in &ranges {
        most = fold(
            s,
            &row[range.clone()],
            f32::NEG_INFINITY,
            most,
            #[inline(always)]
            |most, x| s.max(x, most),
        );
    }
    let max = s.largest(most);
    for range in &ranges {
        replace(
            s,
            &mut row[range.clone()],
            #[inline(always)]
            |x| exp(s, s.sub(x, s.splat(max))),
        );
    }
    let mut sums = s.zero();
    for range in ranges {
        sums = fold(
            s,
            &row[range],
            0.0,
            sums,
            #[inline(always)]
            |sums, x| s.add(sums, x),
        );
    }
    let sum = s.sum(sums);
    (max + sum.ln(), 1.0 / sum)
}
