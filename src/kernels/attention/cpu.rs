//! CPU side: a task is one head of one row; it takes one tile of queries after another.
//!
//! The scores of a tile, TILE x (p + keys) floats, stay in the second-level cache. A task writes only
//! its own head's columns.

use std::ops::Range;

use super::{CacheRows, Heads, Inputs, Seen, Shape, simd};
use crate::device::cpu::{Shared, Strides, exp, gemm, simd::at_level, tasks::each, vectorised, with_scratch};

/// Queries of a tile: 64 x 1044 scores are 267 KiB.
const TILE: usize = 64;

/// Floats of scratch of a task for `keys` keys, prefix included, and heads of `width`; and floats that packing takes
/// beside it.
pub fn scratch(keys: usize, width: usize) -> (usize, usize) {
    if at_level!(s => simd::fits(s, width, keys)) == Some(true) {
        return (simd::scratch(keys, width), 0);
    }
    (2 * TILE * keys, packing(keys, width))
}

fn packing(keys: usize, width: usize) -> usize {
    let sizes = [(TILE, keys, width), (TILE, width, keys), (keys, width, TILE)];
    sizes.into_iter().map(|(m, n, k)| crate::device::cpu::packing(m, n, k)).max().unwrap_or(0)
}

/// One head of one row, with its strides.
#[derive(Clone, Copy)]
pub struct Head<'a> {
    /// The elements, from the first vector.
    pub data: &'a [f32],
    /// Elements from a token to the next.
    pub row: usize,
}

impl<'a> Head<'a> {
    pub fn new(heads: Heads<'a>, batch: usize, head: usize, width: usize) -> Self {
        let data: &[f32] = heads.data.host();
        Self { data: &data[batch * heads.batch + head * width..], row: heads.row }
    }

    /// Vectors `row` apart, the first one at `start`.
    pub fn of(data: &'a [f32], start: usize, row: usize) -> Self {
        Self { data: &data[start..], row }
    }

    /// The vectors from `token` to the end.
    pub fn from(&self, token: usize) -> Rows {
        Rows { data: self.data[token * self.row..].as_ptr(), row: self.row }
    }

    /// The vector of one token `(width)`.
    pub fn vector(&self, token: usize, width: usize) -> &'a [f32] {
        &self.data[token * self.row..][..width]
    }
}

/// Vectors in memory that are read.
#[derive(Clone, Copy)]
pub struct Rows {
    /// Address of the first one.
    pub data: *const f32,
    /// Floats from one to the next.
    pub row: usize,
}

/// Vectors in memory that are written.
#[derive(Clone, Copy)]
pub struct RowsMut {
    /// Address of the first one.
    pub data: *mut f32,
    /// Floats from one to the next.
    pub row: usize,
}

/// A tile of queries and the tokens that any of them sees.
struct Tile {
    first: usize,
    rows: usize,
    /// First and past-the-last token among the keys.
    keys: Range<usize>,
    /// Rows p of the prefix, which every query sees.
    prefix: usize,
    /// Columns of the score matrix: prefix, then keys.
    columns: usize,
    /// Width d of a head.
    width: usize,
}

fn tiles<'a>(starts: &'a [u32], shape: &'a Shape) -> impl Iterator<Item = Tile> + 'a {
    (0..shape.queries).step_by(TILE).map(move |first| {
        let rows = TILE.min(shape.queries - first);
        let start = starts[first..first + rows].iter().copied().min().unwrap_or(0) as usize;
        let keys = start..shape.past + first + rows;
        let Shape { prefix, width, .. } = *shape;
        Tile { first, rows, prefix, columns: prefix + keys.len(), width, keys }
    })
}

impl Tile {
    /// Columns of the score matrix that query `row` of the tile sees beyond the prefix.
    fn visible(&self, row: usize, starts: &[u32], shape: &Shape) -> Range<usize> {
        let query = self.first + row;
        let shift = shape.prefix;
        let from = starts[query] as usize - self.keys.start;
        shift + from..shift + shape.past + query + 1 - self.keys.start
    }

    /// `scores (rows, columns) = scale * left right^T` over prefix and keys.
    ///
    /// # Safety
    /// `left` points at the tile's `rows` vectors of `width` floats.
    unsafe fn products(&self, left: Rows, prefix: Option<Head>, right: Head, scale: f32, scores: &mut [f32]) {
        let mut part = |columns: usize, at: usize, right: Rows| {
            // SAFETY: `at + columns` is inside a row of scores; the operands hold that many vectors.
            unsafe {
                gemm(
                    (self.rows, columns, self.width),
                    scores[at..].as_mut_ptr(),
                    Strides::rows(self.columns),
                    0.0,
                    left.data,
                    Strides::rows(left.row),
                    right.data,
                    Strides::columns(right.row),
                    scale,
                );
            }
        };
        if let Some(prefix) = prefix {
            part(self.prefix, 0, prefix.from(0));
        }
        part(self.keys.len(), self.prefix, right.from(self.keys.start));
    }
}

/// The op's forward; with `rows`, of one query for each row after its row of the cache.
pub fn forward(inputs: Inputs, rows: Option<CacheRows>, out: &mut [f32], lse: &mut [f32]) {
    let Inputs { q, k, v, prefix, starts, scale, shape } = inputs;
    let starts: &[u32] = starts.host();
    let Shape { batch, queries: t, heads, width, .. } = shape;
    let c = heads * width;
    assert!(out.len() == batch * t * c && lse.len() == batch * heads * t, "attention shapes");
    let vectors = at_level!(s => {
        if simd::one_query::fits(s, &shape) {
            return simd::one_query::forward(s, inputs, rows, out, lse);
        }
        let fits = rows.is_none() && simd::fits(s, width, t);
        if fits {
            simd::forward(s, inputs, &mut *out, &mut *lse);
        }
        fits
    });
    if vectors == Some(true) {
        return;
    }
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    each(batch * heads, |task| {
        let (b, h) = (task / heads, task % heads);
        let (slot, past) = rows.map_or((b, shape.past), |rows| rows.of(b));
        let shape = Shape { past, ..shape };
        let (q, k, v) =
            (Head::new(q, b, h, width), Head::new(k, slot, h, width), Head::new(v, slot, h, width));
        let prefix = prefix.map(|p| (Head::new(p.k, b, h, width), Head::new(p.v, b, h, width)));
        let starts = &starts[b * t..][..t];
        // SAFETY: this head of lse belongs to this task.
        let lse = unsafe { lse.range(task * t, t) };
        with_scratch(TILE * (shape.prefix + shape.past + t), |scores| {
            for tile in tiles(starts, &shape) {
                // SAFETY: q holds the tile's queries.
                unsafe { tile.products(q.from(tile.first), prefix.map(|p| p.0), k, scale, scores) };
                for (row, scores) in scores.chunks_exact_mut(tile.columns).take(tile.rows).enumerate() {
                    lse[tile.first + row] = softmax(scores, shape.prefix, tile.visible(row, starts, &shape));
                }
                let target = out.at((b * t + tile.first) * c + h * width);
                let add = |columns: usize, at: usize, values: Rows, keep: f32| {
                    // SAFETY: these rows and columns of out belong to this task.
                    unsafe {
                        gemm(
                            (tile.rows, width, columns),
                            target,
                            Strides::rows(c),
                            keep,
                            scores[at..].as_ptr(),
                            Strides::rows(tile.columns),
                            values.data,
                            Strides::rows(values.row),
                            1.0,
                        );
                    }
                };
                add(tile.keys.len(), shape.prefix, v.from(tile.keys.start), 0.0);
                if let Some((_, values)) = prefix {
                    add(shape.prefix, 0, values.from(0), 1.0);
                }
            }
        });
    });
}

/// In place softmax over the prefix columns and `visible`; all others become 0. Returns ln sum exp.
fn softmax(scores: &mut [f32], prefix: usize, visible: Range<usize>) -> f32 {
    let (before, tokens) = scores.split_at_mut(visible.start);
    let (prefix, hidden) = before.split_at_mut(prefix);
    let (tokens, future) = tokens.split_at_mut(visible.len());
    hidden.fill(0.0);
    future.fill(0.0);
    vectorised(
        #[inline(always)]
        || {
            let max = largest(prefix).max(largest(tokens));
            let sum = powers(prefix, max) + powers(tokens, max);
            let factor = 1.0 / sum;
            prefix.iter_mut().chain(tokens).for_each(|p| *p *= factor);
            max + sum.ln()
        },
    )
}

#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    let mut most = [f32::NEG_INFINITY; 16];
    let (body, rest) = values.as_chunks::<16>();
    for chunk in body {
        for lane in 0..16 {
            most[lane] = if chunk[lane] > most[lane] { chunk[lane] } else { most[lane] };
        }
    }
    most.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| a.max(b))
}

/// Replaces each value by exp(value - max) and returns their sum.
#[inline(always)]
fn powers(values: &mut [f32], max: f32) -> f32 {
    let mut sums = [0f32; 16];
    let (body, rest) = values.as_chunks_mut::<16>();
    for chunk in body {
        for lane in 0..16 {
            chunk[lane] = exp(chunk[lane] - max);
            sums[lane] += chunk[lane];
        }
    }
    let mut sum: f32 = sums.iter().sum();
    for value in rest {
        *value = exp(*value - max);
        sum += *value;
    }
    sum
}

pub fn backward(dout: &[f32], seen: Seen, scale: f32, shape: Shape, d_qkv: &mut [f32], d_prefix: &mut [f32]) {
    let Shape { batch, queries: t, heads, width, prefix: p, .. } = shape;
    let c = heads * width;
    assert!(d_qkv.len() == batch * t * 3 * c && d_prefix.len() >= batch * 2 * p * c, "attention shapes");
    let (d_qkv, d_prefix) = (Shared::new(d_qkv), Shared::new(d_prefix));
    each(batch * heads, |task| {
        let (b, h) = (task / heads, task % heads);
        let column = h * width;
        let d_at = |part: usize, token: usize| d_qkv.at((b * t + token) * 3 * c + part * c + column);
        for token in 0..t {
            for part in 1..3 {
                // SAFETY: this head's columns of dK and dV belong to this task.
                unsafe { d_qkv.range((b * t + token) * 3 * c + part * c + column, width) }.fill(0.0);
            }
        }
        for row in 0..2 * p {
            // SAFETY: this head's columns of this row's part belong to this task.
            unsafe { d_prefix.range((b * 2 * p + row) * c + column, width) }.fill(0.0);
        }
        let targets = Gradients {
            task: (b, h),
            row: 3 * c,
            d_at: &d_at,
            prefix_at: &|part, row| d_prefix.at(((b * 2 + part) * p + row) * c + column),
        };
        let vectors = at_level!(s => {
            let fits = simd::fits(s, width, t);
            if fits {
                simd::backward_head(s, dout, seen, scale, &shape, &targets);
            }
            fits
        });
        if vectors == Some(true) {
            return;
        }
        backward_head(dout, seen, scale, &shape, &targets);
    });
}

/// The destinations of one head's gradients.
pub struct Gradients<'a> {
    /// Row of the batch, and head.
    pub task: (usize, usize),
    /// Elements from a token to the next, 3c.
    pub row: usize,
    /// Query, key or value gradient (0, 1, 2) of a token.
    pub d_at: &'a dyn Fn(usize, usize) -> *mut f32,
    /// Key or value gradient (0, 1) of a prefix row; rows are c apart.
    pub prefix_at: &'a dyn Fn(usize, usize) -> *mut f32,
}

fn backward_head(dout: &[f32], seen: Seen, scale: f32, shape: &Shape, to: &Gradients) {
    let (b, h) = to.task;
    let (t, width, p) = (shape.queries, shape.width, shape.prefix);
    let c = shape.heads * width;
    let Inputs { q, k, v, .. } = seen.inputs(scale, *shape);
    let (q, k, v) = (Head::new(q, b, h, width), Head::new(k, b, h, width), Head::new(v, b, h, width));
    let prefix = seen.prefix.map(|p| (Head::new(p.k, b, h, width), Head::new(p.v, b, h, width)));
    let starts = &seen.starts.host::<u32>()[b * t..][..t];
    let lse = &seen.lse.host::<f32>()[(b * shape.heads + h) * t..][..t];
    let gradient = Head::of(dout, b * t * c + h * width, c);
    let out = seen.out.host::<f32>();
    let most = TILE * (p + t);
    with_scratch(2 * most, |scratch| {
        let (probabilities, d_scores) = scratch.split_at_mut(most);
        for tile in tiles(starts, shape) {
            let d_rows = gradient.from(tile.first);
            // SAFETY: q and dout hold the tile's rows.
            unsafe {
                tile.products(q.from(tile.first), prefix.map(|p| p.0), k, scale, probabilities);
                tile.products(d_rows, prefix.map(|p| p.1), v, 1.0, d_scores);
            }
            for row in 0..tile.rows {
                let at = (b * t + tile.first + row) * c + h * width;
                let delta: f32 =
                    dout[at..][..width].iter().zip(&out[at..][..width]).map(|(a, b)| a * b).sum();
                let lse = lse[tile.first + row];
                let query = Query { prefix: p, visible: tile.visible(row, starts, shape), lse, delta };
                score_gradient(
                    &mut probabilities[row * tile.columns..][..tile.columns],
                    &mut d_scores[row * tile.columns..][..tile.columns],
                    query,
                    scale,
                );
            }
            let prefix_k = prefix.map(|p| p.0);
            let factors = Factors { q, k, prefix_k, d_rows, probabilities, d_scores };
            // SAFETY: all targets are this head's columns; tokens and prefix rows exist.
            unsafe { accumulate(&tile, factors, c, to) }
        }
    });
}

/// A query in the backward.
struct Query {
    /// Prefix rows p: columns `0 .. p` of its scores.
    prefix: usize,
    /// Columns of the tokens that it sees.
    visible: Range<usize>,
    /// ln sum exp of its scores.
    lse: f32,
    /// Scalar product of its output and the output's gradient.
    delta: f32,
}

/// Replaces scores by probabilities, and `dp = do v` by `ds = scale p (dp - delta)`.
fn score_gradient(scores: &mut [f32], d_scores: &mut [f32], query: Query, scale: f32) {
    let Query { prefix, visible, lse, delta } = query;
    for range in [prefix..visible.start, visible.end..scores.len()] {
        scores[range.clone()].fill(0.0);
        d_scores[range].fill(0.0);
    }
    for range in [0..prefix, visible] {
        let (scores, d_scores) = (&mut scores[range.clone()], &mut d_scores[range]);
        vectorised(
            #[inline(always)]
            || {
                for (p, d) in scores.iter_mut().zip(d_scores) {
                    *p = exp(*p - lse);
                    *d = scale * *p * (*d - delta);
                }
            },
        );
    }
}

/// Factors of a tile's gradients.
struct Factors<'a> {
    q: Head<'a>,
    k: Head<'a>,
    prefix_k: Option<Head<'a>>,
    /// Gradients of the tile's outputs.
    d_rows: Rows,
    /// Probabilities P `(rows, columns)`.
    probabilities: &'a [f32],
    /// Gradients ds of the scores `(rows, columns)`.
    d_scores: &'a [f32],
}

/// A range of keys, and the destination of their gradients.
struct Keys {
    /// Number of keys that are seen.
    count: usize,
    /// Their first column of scores.
    at: usize,
    /// Keys `(count, width)`, a row each.
    keys: Rows,
    /// Gradients of the keys.
    dk: *mut f32,
    /// Gradients of the values.
    dv: *mut f32,
    /// Floats from a gradient to the next.
    row: usize,
    /// 1 adds to the queries' gradients, 0 replaces them.
    keep: f32,
}

/// `dq = ds K`, `dK += ds^T Q`, `dV += P^T do`, for keys and prefix; c is the width of all heads.
///
/// # Safety
/// The targets belong to the calling task.
unsafe fn accumulate(tile: &Tile, factors: Factors, c: usize, to: &Gradients) {
    let Factors { q, k, prefix_k, d_rows, probabilities, d_scores } = factors;
    let width = tile.width;
    let transposed = Strides::columns(tile.columns);
    let one = |part: Keys| {
        let Keys { count, at, keys, dk, dv, row, keep } = part;
        // SAFETY: promised by the caller.
        unsafe {
            let dq = (to.d_at)(0, tile.first);
            let ds = d_scores[at..].as_ptr();
            let sizes = (tile.rows, width, count);
            gemm(
                sizes,
                dq,
                Strides::rows(3 * c),
                keep,
                ds,
                Strides::rows(tile.columns),
                keys.data,
                Strides::rows(keys.row),
                1.0,
            );
            let sizes = (count, width, tile.rows);
            let queries = q.from(tile.first);
            let query_row = Strides::rows(queries.row);
            gemm(sizes, dk, Strides::rows(row), 1.0, ds, transposed, queries.data, query_row, 1.0);
            let p = probabilities[at..].as_ptr();
            let d_row = Strides::rows(d_rows.row);
            gemm(sizes, dv, Strides::rows(row), 1.0, p, transposed, d_rows.data, d_row, 1.0);
        }
    };
    let first = tile.keys.start;
    one(Keys {
        count: tile.keys.len(),
        at: tile.prefix,
        keys: k.from(first),
        dk: (to.d_at)(1, first),
        dv: (to.d_at)(2, first),
        row: 3 * c,
        keep: 0.0,
    });
    if let Some(keys) = prefix_k {
        let (dk, dv) = ((to.prefix_at)(0, 0), (to.prefix_at)(1, 0));
        one(Keys { count: tile.prefix, at: 0, keys: keys.from(0), dk, dv, row: c, keep: 1.0 });
    }
}

pub fn sum_prefix(parts: &[f32], shape: Shape, gradient: &mut [f32], (row, k, v): (usize, usize, usize)) {
    let (p, c) = (shape.prefix, shape.heads * shape.width);
    for part in parts.chunks_exact(p * c).take(2 * shape.batch).enumerate() {
        let (index, part) = part;
        let first = if index % 2 == 0 { k } else { v };
        for (i, part) in part.chunks_exact(c).enumerate() {
            gradient[first + i * row..][..c].iter_mut().zip(part).for_each(|(g, d)| *g += d);
        }
    }
}

pub fn append(
    from: Heads,
    to: &mut [f32],
    (rows, tokens, c): (usize, usize, usize),
    (first, batch): (usize, usize),
) {
    let data: &[f32] = from.data.host();
    for row in 0..rows {
        for token in 0..tokens {
            let source = &data[row * from.batch + token * from.row..][..c];
            to[row * batch + first + token * c..][..c].copy_from_slice(source);
        }
    }
}

pub fn append_rows(
    from: Heads,
    to: &mut [f32],
    (rows, tokens, c): (usize, usize, usize),
    batch: usize,
    at: CacheRows,
) {
    for row in 0..rows {
        let (slot, count) = at.of(row);
        let data = from.data.slice(row * from.batch, from.data.len() - row * from.batch);
        append(Heads { data, ..from }, to, (1, tokens, c), (slot * batch + count * c, batch));
    }
}
