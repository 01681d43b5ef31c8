//! The backward of one head: probabilities are recomputed from scores, one block of groups at a time.

use std::ops::Range;

use super::{Floats, Group, Kind, Task, hide};
use crate::{
    device::cpu::{
        simd::{
            Simd, exp, load_or, replace_both,
            tile::{Begin, ROWS, Tile},
        },
        with_scratch,
    },
    kernels::attention::{
        Seen, Shape,
        cpu::{Gradients, Head, RowsMut},
    },
};

/// Queries in a block.
pub const BLOCK: usize = 12 * ROWS;

/// Floats of scratch of a task for rows of `row` scores.
pub fn scratch(row: usize, width: usize) -> usize {
    2 * row * (width + BLOCK)
}

/// Adds the gradients of one head to their destinations.
pub fn backward_head<S: Simd>(s: S, dout: &[f32], seen: Seen, scale: f32, shape: &Shape, to: &Gradients) {
    let (t, c) = (shape.queries, shape.heads * shape.width);
    let (b, h) = to.task;
    let task = Task::new(seen.inputs(scale, *shape), b, h);
    let first = b * t * c + h * shape.width;
    let (dout, out) = (Head::of(dout, first, c), Head::of(seen.out.host(), first, c));
    let lse = &seen.lse.host::<f32>()[(b * shape.heads + h) * t..][..t];
    let head = Backward { task, dout, out, lse, to };
    #[cfg(target_arch = "x86_64")]
    if super::pairs::fits(shape) {
        return with_scratch(super::pairs::scratch(head.task.row(), shape.width), |scratch| {
            // SAFETY: the CPU has the instructions, and all gradients of `to` belong to this task.
            unsafe { head.run_pairs(scratch) }
        });
    }
    with_scratch(scratch(head.task.row(), shape.width), |scratch| {
        s.enter(
            #[inline(always)]
            // SAFETY: as above.
            || unsafe { head.run(s, scratch) },
        );
    });
}

/// Inputs of the backward of one head.
pub struct Backward<'a> {
    pub(super) task: Task<'a>,
    /// Gradient of the output `(queries, width)`.
    pub(super) dout: Head<'a>,
    /// The forward's output `(queries, width)`.
    pub(super) out: Head<'a>,
    pub(super) lse: &'a [f32],
    pub(super) to: &'a Gradients<'a>,
}

/// A weighted sum over a block of queries for each column: weights, and vectors `row` apart (queries, or gradients of
/// the output).
pub struct Given<'a> {
    pub(super) weights: &'a [f32],
    pub(super) vectors: &'a [f32],
    pub(super) row: usize,
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
        let kind = Floats(s);
        // SAFETY: the caller's promise; q and dout hold the rows of all groups.
        unsafe {
            task.pack_panel(s, task.prefix.map(|p| p.0), task.k, keys);
            task.pack_panel(s, task.prefix.map(|p| p.1), task.v, values);
            for first in (0..task.shape.queries).step_by(BLOCK) {
                let block = task.group(first, BLOCK.min(task.shape.queries - first));
                for at in (0..block.rows).step_by(ROWS) {
                    let group = task.group(first + at, ROWS.min(block.rows - at));
                    let (p, d) = (&mut probabilities[at * row..], &mut d_scores[at * row..]);
                    task.fetch(s, &group, &[task.q, self.dout, self.out]);
                    task.products(kind, &group, task.q.from(group.first), keys, task.scale, p);
                    task.products(kind, &group, self.dout.from(group.first), values, 1.0, d);
                    let zeros = task.shape.prefix + block.tokens.start;
                    self.scores(s, &group, zeros..task.shape.prefix + block.tokens.end, p, d);
                    let target = RowsMut { data: (self.to.d_at)(0, group.first), row: self.to.row };
                    let keys = task.seen_of(&group, task.prefix.map(|p| p.0), task.k);
                    task.mix(kind, &group, d, &keys, target);
                }
                let given = [(&*d_scores, task.q), (&*probabilities, self.dout)].map(|(weights, from)| {
                    Given { weights, vectors: &from.data[first * from.row..], row: from.row }
                });
                self.add(kind, &block, given);
            }
        }
    }

    /// Replaces a group's scores by probabilities and `dp` by `ds = scale p (dp - delta)`; both are 0 in `columns`
    /// that a query does not see.
    #[inline(always)]
    pub(super) fn scores<S: Simd>(
        &self,
        s: S,
        group: &Group,
        columns: Range<usize>,
        probabilities: &mut [f32],
        d_scores: &mut [f32],
    ) {
        let (task, p) = (&self.task, self.task.shape.prefix);
        for row in 0..group.rows {
            let query = group.first + row;
            let seen = task.seen(query);
            let delta =
                dot(s, self.dout.vector(query, task.shape.width), self.out.vector(query, task.shape.width));
            let all = row * task.row()..row * task.row() + columns.end;
            let (p_row, d_row) = (&mut probabilities[all.clone()], &mut d_scores[all]);
            hide(p_row, columns.start, &seen);
            hide(d_row, columns.start, &seen);
            let lse = self.lse[query];
            for range in [0..p, seen] {
                gradient(s, &mut p_row[range.clone()], &mut d_row[range], lse, delta, task.scale);
            }
        }
    }

    /// `dK += ds^T Q`, `dV += P^T do` for all columns that a block sees.
    ///
    /// # Safety
    /// As [`Backward::run`].
    pub(super) unsafe fn add<K: Kind>(&self, kind: K, block: &Group, given: [Given; 2]) {
        const { assert!(ROWS.is_multiple_of(K::STEPS), "whole steps before a group") };
        let (task, p) = (&self.task, self.task.shape.prefix);
        let steps = block.rows.div_ceil(K::STEPS);
        for at in (0..p).step_by(ROWS) {
            for (part, given) in given.iter().enumerate() {
                let row = task.shape.heads * task.shape.width;
                let target = RowsMut { data: (self.to.prefix_at)(part, at), row };
                // SAFETY: the caller's promise.
                unsafe { self.add_rows(kind, 0..steps, at..p.min(at + ROWS), given, target) }
            }
        }
        for token in block.tokens.clone().step_by(ROWS) {
            let rows = ROWS.min(block.tokens.end - token);
            // Earlier queries do not see these tokens.
            let before = token.saturating_sub(task.shape.past + block.first) / ROWS * ROWS / K::STEPS;
            for (part, given) in given.iter().enumerate() {
                let target = RowsMut { data: (self.to.d_at)(1 + part, token), row: self.to.row };
                let columns = p + token..p + token + rows;
                // SAFETY: the caller's promise.
                unsafe { self.add_rows(kind, before..steps, columns, given, target) }
            }
        }
    }

    /// Adds the weighted sums over `steps` of a block's queries to a row of `y` for each of the score `columns`.
    ///
    /// # Safety
    /// As [`Backward::run`].
    unsafe fn add_rows<K: Kind>(
        &self,
        kind: K,
        steps: Range<usize>,
        columns: Range<usize>,
        given: &Given,
        y: RowsMut,
    ) {
        let (row, width) = (self.task.row(), self.task.shape.width);
        assert!(given.weights.len() >= steps.end * row && columns.end <= row, "weights of a block");
        for start in (0..width).step_by(K::S::COLUMNS) {
            let wide = K::S::COLUMNS.min(width - start);
            let vectors = &given.vectors[steps.start * given.row + start..];
            assert!(vectors.len() >= (steps.len() - 1) * given.row + wide, "vectors of a block");
            let tile = Tile {
                x: given.weights[steps.start * row + columns.start..].as_ptr(),
                x_row: 1,
                x_step: row,
                panel: vectors.as_ptr(),
                panel_row: given.row,
                depth: steps.len(),
                y: y.data.wrapping_add(start),
                y_row: y.row,
                columns: wide,
                begin: Begin::Keep,
                scale: 1.0,
            };
            // SAFETY: the caller's promise, and the sizes checked above.
            unsafe { kind.run(&tile, columns.len()) }
        }
    }
}

/// Replaces scores by probabilities and `dp` by `ds`.
#[inline(always)]
fn gradient<S: Simd>(s: S, scores: &mut [f32], d_scores: &mut [f32], lse: f32, delta: f32, scale: f32) {
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
