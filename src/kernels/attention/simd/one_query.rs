//! Attention of one query for each row, as in decoding. It is memory-bound: a task reads keys and values of its heads
//! token by token, in the order of memory, and each once.

use std::ops::Range;

use super::{
    super::{CacheRows, Inputs, Shape},
    Head, LINE, RowsMut, Shared, Simd, each, normalise, powers, row, with_scratch,
};

/// Tokens that are taken side by side.
const SIDE: usize = 4;
/// Tokens that are fetched ahead of their use.
const AHEAD: usize = 8;
/// Most heads of a task, whose scores are in scratch.
const MOST_HEADS: usize = 32;
/// Tasks for each thread, so that rows of different lengths even out.
const TASKS: usize = 4;

/// Whether there is one query for each row, and heads are whole vectors.
pub fn fits<S: Simd>(_: S, shape: &Shape) -> bool {
    shape.queries == 1 && shape.width.is_multiple_of(S::LANES)
}

/// The op's forward: `out (b, c)` and the log-sum-exp of every head, `lse (b, h)`. A head's result does not depend on the
/// others of its task.
pub fn forward<S: Simd>(s: S, inputs: Inputs, rows: Option<CacheRows>, out: &mut [f32], lse: &mut [f32]) {
    let Inputs { q, k, v, prefix, starts, scale, shape } = inputs;
    let Shape { batch, heads, width, prefix: p, .. } = shape;
    let c = heads * width;
    assert!(out.len() == batch * c && lse.len() == batch * heads, "attention shapes");
    let starts: &[u32] = starts.host();
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    let parts = (TASKS * rayon::current_num_threads()).div_ceil(batch.max(1));
    let count = heads.div_ceil(parts).clamp(1, MOST_HEADS);
    let parts = heads.div_ceil(count);
    each(batch * parts, |task| {
        let (b, first) = (task / parts, task % parts * count);
        let count = count.min(heads - first);
        let (slot, past) = rows.map_or((b, shape.past), |rows| rows.of(b));
        let tokens = starts[b] as usize..past + 1;
        let head = |heads, row| Head::new(heads, row, first, width);
        let heads_of = |vectors| Vectors { vectors, count, width };
        let (keys, values) = (heads_of(head(k, slot)), heads_of(head(v, slot)));
        let prefix = prefix.map(|prefix| (heads_of(head(prefix.k, b)), heads_of(head(prefix.v, b))));
        let query = head(q, b).vector(0, count * width);
        // SAFETY: these heads of out and lse belong to this task.
        let (out, lse) = unsafe {
            let at = b * heads + first;
            (out.range(at * width, count * width), lse.range(at, count))
        };
        let columns = p + tokens.len();
        let row = row(columns);
        with_scratch(count * row, |scores| {
            s.enter(
                #[inline(always)]
                || {
                    if let Some((keys, _)) = &prefix {
                        keys.products(s, query, 0..p, scale, scores, (row, 0));
                    }
                    keys.products(s, query, tokens.clone(), scale, scores, (row, p));
                    let mut factors = [0.0; MOST_HEADS];
                    for (head, scores) in scores.chunks_exact_mut(row).enumerate() {
                        (lse[head], factors[head]) = powers(s, scores, p, p..columns);
                    }
                    out.fill(0.0);
                    if let Some((_, values)) = &prefix {
                        values.mix(s, 0..p, scores, (row, 0), out);
                    }
                    values.mix(s, tokens, scores, (row, p), out);
                    let to = RowsMut { data: out.as_mut_ptr(), row: width };
                    // SAFETY: out has this many heads.
                    unsafe { normalise(s, to, width, &factors[..count]) }
                },
            );
        });
    });
}

/// Some neighbouring heads of keys or values.
struct Vectors<'a> {
    /// From the first of the heads on.
    vectors: Head<'a>,
    count: usize,
    /// Width d of a head.
    width: usize,
}

impl Vectors<'_> {
    /// Calls `visit(token, tokens)` for groups of SIDE tokens and for each of the others, after checking that all their
    /// vectors are there.
    #[inline(always)]
    fn groups(&self, tokens: Range<usize>, mut visit: impl FnMut(usize, usize)) {
        let Some(last) = tokens.clone().last() else { return };
        let end = last * self.vectors.row + self.count * self.width;
        assert!(self.vectors.data.len() >= end, "vectors of all tokens");
        let whole = tokens.len() - tokens.len() % SIDE;
        for at in (0..whole).step_by(SIDE) {
            visit(tokens.start + at, SIDE);
        }
        for at in whole..tokens.len() {
            visit(tokens.start + at, 1);
        }
    }

    /// `scores (count, row) = scale q k` from column `at`.
    #[inline(always)]
    fn products<S: Simd>(
        &self,
        s: S,
        q: &[f32],
        tokens: Range<usize>,
        scale: f32,
        scores: &mut [f32],
        (row, at): (usize, usize),
    ) {
        let start = tokens.start;
        assert!(q.len() >= self.count * self.width, "a query for each head");
        assert!(scores.len() >= self.count * row && row >= at + tokens.len(), "room for scores");
        self.groups(
            tokens,
            #[inline(always)]
            |token, side| {
                let to = &mut scores[at + token - start..];
                // SAFETY: vectors, query and scores were checked.
                unsafe {
                    match side {
                        SIDE => self.products_of::<S, SIDE>(s, q, token, scale, to, row),
                        _ => self.products_of::<S, 1>(s, q, token, scale, to, row),
                    }
                }
            },
        );
    }

    /// # Safety
    /// There are N tokens from `token`, and a query and scores for each head.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "indices keep the sums in registers")]
    unsafe fn products_of<S: Simd, const N: usize>(
        &self,
        s: S,
        q: &[f32],
        token: usize,
        scale: f32,
        scores: &mut [f32],
        row: usize,
    ) {
        let keys = self.vectors.data.as_ptr().wrapping_add(token * self.vectors.row);
        for head in 0..self.count {
            let mut sums = [s.zero(); N];
            self.fetch(s, keys, head, N);
            for at in (head * self.width..(head + 1) * self.width).step_by(S::LANES) {
                // SAFETY: the caller's promise.
                unsafe {
                    let x = s.load(q.as_ptr().add(at));
                    for n in 0..N {
                        sums[n] = s.fma(x, s.load(keys.add(n * self.vectors.row + at)), sums[n]);
                    }
                }
            }
            for n in 0..N {
                scores[head * row + n] = scale * s.sum(sums[n]);
            }
        }
    }

    /// Adds the vectors of tokens, times `weights (count, row)` from column `at`, to `out (count, width)`.
    #[inline(always)]
    fn mix<S: Simd>(
        &self,
        s: S,
        tokens: Range<usize>,
        weights: &[f32],
        (row, at): (usize, usize),
        out: &mut [f32],
    ) {
        let start = tokens.start;
        assert!(out.len() >= self.count * self.width, "an output for each head");
        assert!(weights.len() >= self.count * row && row >= at + tokens.len(), "weights of all tokens");
        self.groups(
            tokens,
            #[inline(always)]
            |token, side| {
                let weights = &weights[at + token - start..];
                // SAFETY: vectors, weights and out were checked.
                unsafe {
                    match side {
                        SIDE => self.mix_of::<S, SIDE>(s, token, weights, row, out),
                        _ => self.mix_of::<S, 1>(s, token, weights, row, out),
                    }
                }
            },
        );
    }

    /// # Safety
    /// There are N tokens from `token`, and weights and an output for each head.
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "indices keep the weights in registers")]
    unsafe fn mix_of<S: Simd, const N: usize>(
        &self,
        s: S,
        token: usize,
        weights: &[f32],
        row: usize,
        out: &mut [f32],
    ) {
        let values = self.vectors.data.as_ptr().wrapping_add(token * self.vectors.row);
        for head in 0..self.count {
            let mut factors = [s.zero(); N];
            for n in 0..N {
                factors[n] = s.splat(weights[head * row + n]);
            }
            self.fetch(s, values, head, N);
            for at in (head * self.width..(head + 1) * self.width).step_by(S::LANES) {
                // SAFETY: the caller's promise.
                unsafe {
                    let to = out.as_mut_ptr().add(at);
                    let mut sum = s.load(to);
                    for n in 0..N {
                        sum = s.fma(factors[n], s.load(values.add(n * self.vectors.row + at)), sum);
                    }
                    s.store(to, sum);
                }
            }
        }
    }

    /// Prefetches a head of `count` tokens that are AHEAD of the token at `vectors`.
    #[inline(always)]
    fn fetch<S: Simd>(&self, s: S, vectors: *const f32, head: usize, count: usize) {
        for token in AHEAD..AHEAD + count {
            let vector = vectors.wrapping_add(token * self.vectors.row + head * self.width);
            for at in (0..self.width).step_by(LINE) {
                s.fetch(vector.wrapping_add(at));
            }
        }
    }
}
