//! The backward of one head: probabilities are made again from scores, a block of groups at a time.

use super::{Group, Task, hide, scratch};
use crate::kernels::{
    attention::{
        Seen, Shape,
        cpu::{Gradients, Head},
        packed,
    },
    cpu::with_scratch,
    simd::{
        Simd, exp, load_or, replace_both,
        tile::{Begin, ROWS, Tile},
    },
};

/// Queries of a block.
pub const BLOCK: usize = 12 * ROWS;

/// Adds the gradients of one head to where they go.
pub fn backward_head<S: Simd>(s: S, dout: &[f32], seen: Seen, scale: f32, shape: &Shape, to: &Gradients) {
    let (t, c) = (shape.queries, shape.heads * shape.width);
    let (b, h) = to.task;
    let heads = packed(seen.qkv, t, c);
    let task = Task::new(heads, seen.prefix, seen.starts.host(), to.task, (*shape, scale));
    let first = b * t * c + h * shape.width;
    let (dout, out) = (Head::of(dout, first, c), Head::of(seen.out.host(), first, c));
    let lse = &seen.lse.host::<f32>()[(b * shape.heads + h) * t..][..t];
    with_scratch(scratch(task.columns(), shape.width), |scratch| {
        s.enter(
            #[inline(always)]
            // SAFETY: all gradients of `to` are this task's.
            || unsafe { Backward { task, dout, out, lse, to }.run(s, scratch) },
        );
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
    /// The targets belong to the calling task.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, s: S, scratch: &mut [f32]) {
        let (task, row) = (&self.task, self.task.row());
        let (keys, rest) = scratch.split_at_mut(row * task.shape.width);
        let (values, rest) = rest.split_at_mut(row * task.shape.width);
        let (probabilities, d_scores) = rest.split_at_mut(row * BLOCK);
        // SAFETY: the caller's promise.
        unsafe {
            task.turn(s, task.prefix.map(|p| p.0), task.k, keys);
            task.turn(s, task.prefix.map(|p| p.1), task.v, values);
            for first in (0..task.shape.queries).step_by(BLOCK) {
                let block = task.group(first, BLOCK.min(task.shape.queries - first));
                for at in (0..block.rows).step_by(ROWS) {
                    let group = task.group(first + at, ROWS.min(block.rows - at));
                    let (p, d) = (&mut probabilities[at * row..], &mut d_scores[at * row..]);
                    task.fetch(s, &group, &[task.q, self.dout, self.out]);
                    self.scores(s, &group, &block, (keys, values), p, d);
                    let target = ((self.to.d_at)(0, group.first), self.to.row);
                    task.mix(s, &group, d, (task.prefix.map(|p| p.0), task.k), target);
                }
                self.add(s, &block, (probabilities, d_scores));
            }
        }
    }

    /// Probabilities and `ds = scale p (dp - delta)` of a group, zeros in whatever else of the block's columns.
    #[inline(always)]
    fn scores<S: Simd>(
        &self,
        s: S,
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
            task.products(s, group, left, keys, task.scale, probabilities);
            task.products(s, group, d_left, values, 1.0, d_scores);
        }
        for row in 0..group.rows {
            let query = group.first + row;
            let seen = task.seen(query);
            let delta =
                dot(s, self.dout.vector(query, task.shape.width), self.out.vector(query, task.shape.width));
            let columns = row * task.row()..row * task.row() + p + block.tokens.end;
            let (p_row, d_row) = (&mut probabilities[columns.clone()], &mut d_scores[columns]);
            hide(p_row, (p + block.tokens.start, &seen));
            hide(d_row, (p + block.tokens.start, &seen));
            for range in [0..p, seen] {
                gradient(
                    s,
                    &mut p_row[range.clone()],
                    &mut d_row[range],
                    (self.lse[query], delta, task.scale),
                );
            }
        }
    }

    /// `dK += ds^T Q`, `dV += P^T do` for all columns that a block sees.
    ///
    /// # Safety
    /// As [`Backward::run`].
    unsafe fn add<S: Simd>(&self, s: S, block: &Group, (probabilities, d_scores): (&[f32], &[f32])) {
        let (task, p) = (&self.task, self.task.shape.prefix);
        for at in (0..p).step_by(ROWS) {
            let rows = ROWS.min(p - at);
            for (part, weights, from) in [(0, d_scores, task.q), (1, probabilities, self.dout)] {
                let target = ((self.to.prefix_at)(part, at), task.shape.heads * task.shape.width);
                // SAFETY: the caller's promise.
                unsafe { self.add_rows(s, (block, 0), (at, rows), weights, from, target) }
            }
        }
        for token in block.tokens.clone().step_by(ROWS) {
            let rows = ROWS.min(block.tokens.end - token);
            // Queries before these tokens do not see them.
            let before = token.saturating_sub(task.shape.past + block.first) / ROWS * ROWS;
            for (part, weights, from) in [(1, d_scores, task.q), (2, probabilities, self.dout)] {
                let target = ((self.to.d_at)(part, token), self.to.row);
                // SAFETY: the caller's promise.
                unsafe { self.add_rows(s, (block, before), (p + token, rows), weights, from, target) }
            }
        }
    }

    /// Adds to `rows` rows of a target what the queries of a block, those before `before` left out, give to
    /// the columns from `column` on.
    ///
    /// # Safety
    /// As [`Backward::run`].
    unsafe fn add_rows<S: Simd>(
        &self,
        s: S,
        (block, before): (&Group, usize),
        (column, rows): (usize, usize),
        weights: &[f32],
        from: Head,
        (y, y_row): (*mut f32, usize),
    ) {
        let (row, width) = (self.task.row(), self.task.shape.width);
        assert!(weights.len() >= block.rows * row && column + rows <= row, "weights of a block");
        for start in (0..width).step_by(S::COLUMNS) {
            let columns = S::COLUMNS.min(width - start);
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
            unsafe { tile.rows(s, rows) }
        }
    }
}

/// From scores and `dp` to probabilities and `ds`, in place.
#[inline(always)]
fn gradient<S: Simd>(s: S, scores: &mut [f32], d_scores: &mut [f32], (lse, delta, scale): (f32, f32, f32)) {
    let (lse, delta, scale) = (s.splat(lse), s.splat(delta), s.splat(scale));
    replace_both(
        s,
        scores,
        d_scores,
        #[inline(always)]
        |score, d| {
            let p = exp(s, s.sub(score, lse));
            (p, s.mul(s.mul(scale, p), s.sub(d, delta)))
        },
    );
}

/// Scalar product of two vectors of one length.
#[inline(always)]
fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = s.zero();
    for (a, b) in a.chunks(S::LANES).zip(b.chunks(S::LANES)) {
        sum = s.fma(load_or(s, a, 0.0), load_or(s, b, 0.0), sum);
    }
    s.sum(sum)
}
