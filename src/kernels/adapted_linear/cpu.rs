//! CPU side: thin products around the frozen one, in tasks over tokens, columns or inputs; passes with vectors.

use std::ops::Range;

use super::{AdaptedLinear, BackwardBuffers, Delta, DeltaScratch, Dropout, Vector, columns::Block};
use crate::device::{
    DType, View, ViewMut,
    cpu::{
        Shared, Strides, gemm,
        tasks::{cut, each, shares},
        vectors, widen, with_scratch,
    },
};

/// Tokens a task takes; its slice of `y` stays in the second-level cache.
const TOKENS: usize = 128;
/// Tokens up to which a task takes columns of `y` instead: there would be one task.
const SMALL_BATCH: usize = 64;
/// Columns of y, and of A or rows of B, come in multiples of this many where there is a task for every thread.
const COLUMNS: usize = 64;
/// Columns of A or rows of B a task takes.
const OUTER: usize = 256;

/// Floats of scratch that a task uses, and floats that are lent or packed while it has those.
///
/// A thread keeps its scratch for the next op, one piece for each depth of nesting, as large as any op needed there. So
/// the pieces of an op that nests come beside the largest tile of all ops: with up to [`SMALL_BATCH`] tokens a task has
/// its own xa, within that rows of B times d and e, and within those a panel.
pub fn scratch(needs: DeltaScratch) -> (usize, usize) {
    let DeltaScratch { tokens: n, widest, rank, .. } = needs;
    let packing = packing(n, widest, rank);
    let xa = if n <= SMALL_BATCH { n * rank } else { 0 };
    // Rows of B times d and e.
    let scaled = if needs.vectors { OUTER.min(widest) * rank } else { 0 };
    let dropped = if needs.dropout { (TOKENS.min(n) * widest).max(n * OUTER.min(widest)) } else { 0 };
    let outer = xa.max(dropped);
    match vectors() {
        true if outer + scaled == 0 => (packing, 0),
        true if outer == 0 => (scaled.max(packing), packing),
        true => (outer.max(scaled).max(packing), scaled + packing),
        // The crate `gemm` packs into memory of its own.
        false => (outer + scaled, packing),
    }
}

fn packing(n: usize, widest: usize, rank: usize) -> usize {
    let sizes = [(TOKENS, widest, rank), (TOKENS, rank, widest), (OUTER, rank, n), (rank, OUTER, n)];
    sizes.into_iter().map(|(m, n, k)| crate::device::cpu::packing(m, n, k)).max().unwrap_or(0)
}

/// A delta with its values, for its own n tokens.
struct Part<'a> {
    delta: &'a Delta,
    values: &'a [f32],
    dropout: Dropout,
    n: usize,
    inputs: usize,
    outputs: usize,
}

impl<'a> Part<'a> {
    fn a(&self) -> &'a [f32] {
        &self.values[self.delta.a..][..self.delta.rank * self.inputs]
    }

    fn a_strides(&self) -> Strides {
        if self.delta.transposed { Strides::rows(self.delta.rank) } else { Strides::columns(self.inputs) }
    }

    fn b(&self) -> &'a [f32] {
        &self.values[self.delta.b..][..self.delta.rank * self.delta.columns.len()]
    }

    fn d(&self) -> Option<&'a [f32]> {
        self.delta.d.map(|d| &self.values[d.at..][..self.delta.rank])
    }

    fn e(&self) -> Option<&'a [f32]> {
        self.delta.e.map(|e| &self.values[e.at..][..self.delta.columns.len()])
    }

    /// Hands out `(d * B^T * e) (r, columns)`: B itself where neither is present, else copies of some columns at a time.
    fn with_b(
        &self,
        d: Option<&[f32]>,
        columns: Range<usize>,
        mut body: impl FnMut(Range<usize>, *const f32, Strides),
    ) {
        let (b, rank, e) = (self.b(), self.delta.rank, self.e());
        let (strides, column) = match self.delta.transposed {
            true => (Strides::rows(self.delta.columns.len()), 1),
            false => (Strides::columns(rank), rank),
        };
        if (d.is_none() && e.is_none()) || columns.is_empty() {
            return body(columns.clone(), b[columns.start * column..].as_ptr(), strides);
        }
        with_scratch(OUTER.min(columns.len()) * rank, |scaled| {
            for start in columns.clone().step_by(OUTER) {
                let some = start..columns.end.min(start + OUTER);
                for (j, scaled) in some.clone().zip(scaled.chunks_exact_mut(rank)) {
                    let e = e.map_or(1.0, |e| e[j]);
                    for (r, scaled) in scaled.iter_mut().enumerate() {
                        *scaled = b[j * strides.column + r * strides.row] * e * d.map_or(1.0, |d| d[r]);
                    }
                }
                body(some, scaled.as_ptr(), Strides::columns(rank));
            }
        });
    }
}

/// Hands `work` each delta of `linear` with its first token, and where its part of xa begins.
fn for_each<'a>(linear: &AdaptedLinear<'a>, n: usize, mut work: impl FnMut(Part<'a>, usize, usize)) {
    let mut xa_at = 0;
    for delta in linear.deltas {
        let tokens = delta.tokens_of(n);
        let part = Part {
            delta,
            values: linear.values.host(),
            dropout: linear.dropout.starting_at(tokens.start),
            n: tokens.len(),
            inputs: linear.inputs(),
            outputs: linear.outputs(),
        };
        if part.n * delta.rank > 0 {
            work(part, tokens.start, xa_at);
        }
        xa_at += tokens.len() * delta.rank;
    }
}

pub fn add_deltas(linear: &AdaptedLinear, x: &[f32], xa: &mut [f32], y: &mut [f32], n: usize) {
    let (xa, y) = (Shared::new(xa), Shared::new(y));
    for_each(linear, n, |part, first, xa_at| {
        let Part { delta, n, inputs, outputs, .. } = part;
        let (rank, x) = (delta.rank, &x[first * inputs..]);
        let add = |xa: *const f32, tokens: Range<usize>, columns: Range<usize>| {
            // SAFETY: called for tokens of xa and elements of y that belong to the calling task.
            part.with_b(part.d(), columns, |columns, b, b_strides| unsafe {
                gemm(
                    (tokens.len(), columns.len(), rank),
                    y.at((first + tokens.start) * outputs + delta.columns.start + columns.start),
                    Strides::rows(outputs),
                    1.0,
                    xa,
                    Strides::rows(rank),
                    b,
                    b_strides,
                    delta.scale,
                );
            });
        };
        if n <= SMALL_BATCH && part.dropout.p == 0.0 {
            let (tasks, width) = cut(delta.columns.len(), COLUMNS);
            each(tasks, |task| {
                // Making `xa` in every task costs less than waiting for one that makes it.
                with_scratch(n * rank, |own| {
                    // SAFETY: n x rank floats of this task.
                    unsafe { thin(&part, x, own.as_mut_ptr(), n) };
                    add(own.as_ptr(), 0..n, task * width..delta.columns.len().min((task + 1) * width));
                    if task == 0 {
                        // SAFETY: only this task writes xa.
                        unsafe { xa.range(xa_at, n * rank) }.copy_from_slice(own);
                    }
                });
            });
        } else {
            each(n.div_ceil(TOKENS), |task| {
                let tokens = task * TOKENS..n.min((task + 1) * TOKENS);
                let xa_here = xa.at(xa_at + tokens.start * rank);
                with_dropped(&part, x, tokens.clone(), 0..inputs, |x| {
                    // SAFETY: these tokens of xa belong to this task; the operands are only read.
                    unsafe { thin(&part, x, xa_here, tokens.len()) };
                    add(xa_here, tokens, 0..delta.columns.len());
                });
            });
        }
    });
}

/// The first product of [`add_deltas`] alone, in the same tasks.
pub fn xa(linear: &AdaptedLinear, x: &[f32], xa: &mut [f32], n: usize) {
    let xa = Shared::new(xa);
    for_each(linear, n, |part, first, xa_at| {
        let (n, rank, x) = (part.n, part.delta.rank, &x[first * part.inputs..]);
        each(n.div_ceil(TOKENS), |task| {
            let tokens = task * TOKENS..n.min((task + 1) * TOKENS);
            with_dropped(&part, x, tokens.clone(), 0..part.inputs, |x| {
                // SAFETY: these tokens of xa belong to this task; the operands are only read.
                unsafe { thin(&part, x, xa.at(xa_at + tokens.start * rank), tokens.len()) };
            });
        });
    });
}

/// `xa (n, r) = x (n, in) A^T`.
///
/// # Safety
/// `xa` points at that many floats, which nothing else uses meanwhile.
unsafe fn thin(part: &Part, x: &[f32], xa: *mut f32, n: usize) {
    let (rank, inputs) = (part.delta.rank, part.inputs);
    // SAFETY: promised by the caller.
    unsafe {
        gemm(
            (n, rank, inputs),
            xa,
            Strides::rows(rank),
            0.0,
            x.as_ptr(),
            Strides::rows(inputs),
            part.a().as_ptr(),
            part.a_strides(),
            1.0,
        );
    }
}

/// The deltas' part of the backward: `dy (n, out)` is the gradient of what g multiplies.
pub fn backward_deltas(
    linear: &AdaptedLinear,
    dy: &[f32],
    x: &[f32],
    xa: &[f32],
    to: BackwardBuffers,
    n: usize,
) {
    let (grads, d_xa) = (to.grads.host(), to.d_xa.host());
    let mut dx = to.dx.map(ViewMut::host);
    for_each(linear, n, |part, first, xa_at| {
        let (delta, count) = (part.delta, part.n * part.delta.rank);
        let (dy, x) = (&dy[first * part.outputs..], &x[first * part.inputs..]);
        let (xa, d_xa) = (&xa[xa_at..][..count], &mut d_xa[xa_at..][..count]);
        b_gradient(&part, dy, xa, grads);
        if delta.a_frozen && dx.is_none() && delta.d.is_none_or(|d| d.frozen) {
            return;
        }
        xa_gradient(&part, dy, d_xa);
        if let Some(d) = delta.d {
            let block = Block { token: 0, n: part.n, column: 0, columns: delta.rank, width: delta.rank };
            if !d.frozen {
                sum_block(xa, Some(d_xa), &mut grads[d.at..][..delta.rank], block);
            }
            scale_block(None, part.d(), d_xa, block);
        }
        if !delta.a_frozen {
            a_gradient(&part, x, d_xa, grads);
        }
        if let Some(dx) = &mut dx {
            add_dx(&part, d_xa, &mut dx[first * part.inputs..]);
        }
    });
}

/// `d_xa (n, r) = scale * dy[:, columns] (e * B)`, the gradient of `xa * d`.
fn xa_gradient(part: &Part, dy: &[f32], d_xa: &mut [f32]) {
    let (n, delta, outputs) = (part.n, part.delta, part.outputs);
    let rank = delta.rank;
    let d_xa = Shared::new(d_xa);
    each(n.div_ceil(TOKENS), |task| {
        let tokens = task * TOKENS..n.min((task + 1) * TOKENS);
        part.with_b(None, 0..delta.columns.len(), |columns, b, b_strides| {
            // SAFETY: these tokens of d_xa belong to this task; the operands are only read.
            unsafe {
                gemm(
                    (tokens.len(), rank, columns.len()),
                    d_xa.at(tokens.start * rank),
                    Strides::rows(rank),
                    if columns.start == 0 { 0.0 } else { 1.0 },
                    dy[tokens.start * outputs + delta.columns.start + columns.start..].as_ptr(),
                    Strides::rows(outputs),
                    b,
                    Strides { row: b_strides.column, column: b_strides.row },
                    delta.scale,
                );
            }
        });
    });
}

/// With `M (columns, r) = scale * dy[:, columns]^T xa`: `dB += e * M * d`, and `de += sum over r of B * M * d`.
fn b_gradient(part: &Part, dy: &[f32], xa: &[f32], grads: &mut [f32]) {
    let (n, delta, outputs) = (part.n, part.delta, part.outputs);
    let rank = delta.rank;
    let e_trained = matches!(delta.e, Some(Vector { frozen: false, .. }));
    if delta.b_frozen && !e_trained {
        return;
    }
    let grads = Shared::new(grads);
    let (tasks, height) = shares(delta.columns.len(), OUTER, COLUMNS);
    each(tasks, |task| {
        let j = task * height;
        let count = height.min(delta.columns.len() - j);
        // SAFETY: `to` points at these rows of dB or at scratch of that size, both this task's own.
        let product = |to: *mut f32, keep: f32| unsafe {
            gemm(
                (count, rank, n),
                to,
                Strides::rows(rank),
                keep,
                dy[delta.columns.start + j..].as_ptr(),
                Strides::columns(outputs),
                xa.as_ptr(),
                Strides::rows(rank),
                delta.scale,
            );
        };
        if !delta.scales() {
            return product(grads.at(delta.b + j * rank), 1.0);
        }
        with_scratch(count * rank, |m| {
            product(m.as_mut_ptr(), 0.0);
            let (d, e) = (part.d(), part.e());
            for (j, m) in (j..).zip(m.chunks_exact_mut(rank)) {
                if let Some(d) = d {
                    m.iter_mut().zip(d).for_each(|(m, d)| *m *= d);
                }
                if e_trained && let Some(e) = delta.e {
                    let b = &part.b()[j * rank..][..rank];
                    // SAFETY: this element belongs to this task.
                    let to = unsafe { grads.range(e.at + j, 1) };
                    to[0] += m.iter().zip(b).map(|(m, b)| m * b).sum::<f32>();
                }
                if !delta.b_frozen {
                    // SAFETY: this row of dB belongs to this task.
                    let to = unsafe { grads.range(delta.b + j * rank, rank) };
                    let e = e.map_or(1.0, |e| e[j]);
                    to.iter_mut().zip(m).for_each(|(to, m)| *to += e * *m);
                }
            }
        });
    });
}

/// `dA (r, in) += d_xa^T drop(x)`.
fn a_gradient(part: &Part, x: &[f32], d_xa: &[f32], grads: &mut [f32]) {
    let (n, inputs, rank) = (part.n, part.inputs, part.delta.rank);
    let gradient = Shared::new(&mut grads[part.delta.a..][..rank * inputs]);
    let (tasks, width) = shares(inputs, OUTER, COLUMNS);
    each(tasks, |task| {
        let columns = task * width..inputs.min((task + 1) * width);
        with_dropped(part, x, 0..n, columns.clone(), |x| {
            let stride = if part.dropout.p == 0.0 { inputs } else { columns.len() };
            // SAFETY: these columns of dA belong to this task; the operands are only read.
            unsafe {
                gemm(
                    (rank, columns.len(), n),
                    gradient.at(columns.start),
                    Strides::rows(inputs),
                    1.0,
                    d_xa.as_ptr(),
                    Strides::columns(rank),
                    x.as_ptr(),
                    Strides::rows(stride),
                    1.0,
                );
            }
        });
    });
}

/// `dx += drop'(d_xa A)`: the factors of the forward, replayed.
fn add_dx(part: &Part, d_xa: &[f32], dx: &mut [f32]) {
    let (n, inputs, rank, dropout) = (part.n, part.inputs, part.delta.rank, part.dropout);
    let dx = Shared::new(dx);
    each(n.div_ceil(TOKENS), |task| {
        let tokens = task * TOKENS..n.min((task + 1) * TOKENS);
        let add = |to: *mut f32, keep: f32| {
            // SAFETY: `to` points at these tokens of dx or at scratch of that size, both this task's own.
            unsafe {
                gemm(
                    (tokens.len(), inputs, rank),
                    to,
                    Strides::rows(inputs),
                    keep,
                    d_xa[tokens.start * rank..].as_ptr(),
                    Strides::rows(rank),
                    part.a().as_ptr(),
                    Strides::rows(inputs),
                    1.0,
                );
            }
        };
        if dropout.p == 0.0 {
            return add(dx.at(tokens.start * inputs), 1.0);
        }
        with_scratch(tokens.len() * inputs, |added| {
            add(added.as_mut_ptr(), 0.0);
            for (token, added) in tokens.clone().zip(added.chunks_exact(inputs)) {
                // SAFETY: this token belongs to this task.
                let dx = unsafe { dx.range(token * inputs, inputs) };
                for (i, (dx, added)) in dx.iter_mut().zip(added).enumerate() {
                    *dx += added * dropout.factor(part.delta.mask_id(), inputs, token, i);
                }
            }
        });
    });
}

/// Lends tokens x columns of `drop(x)`: `x` itself, with its stride, where there is no dropout;
/// else a dense copy.
fn with_dropped(
    part: &Part,
    x: &[f32],
    tokens: Range<usize>,
    columns: Range<usize>,
    body: impl FnOnce(&[f32]),
) {
    let (dropout, inputs) = (part.dropout, part.inputs);
    if dropout.p == 0.0 {
        return body(&x[tokens.start * inputs + columns.start..]);
    }
    let width = columns.len();
    with_scratch(tokens.len() * width, |dropped| {
        for (token, dropped) in tokens.zip(dropped.chunks_exact_mut(width)) {
            for (column, dropped) in columns.clone().zip(dropped) {
                let factor = dropout.factor(part.delta.mask_id(), inputs, token, column);
                *dropped = x[token * inputs + column] * factor;
            }
        }
        body(dropped);
    });
}

/// Writes a block of `to`: that of `from`, or its own, times `factors`.
pub fn scale_block(from: Option<&[f32]>, factors: Option<&[f32]>, to: &mut [f32], block: Block) {
    let to = Shared::new(to);
    each(block.n.div_ceil(TOKENS), |task| {
        for token in task * TOKENS..block.n.min((task + 1) * TOKENS) {
            let start = block.start() + token * block.width;
            // SAFETY: this token belongs to this task.
            let to = unsafe { to.range(start, block.columns) };
            if let Some(from) = from {
                to.copy_from_slice(&from[start..][..block.columns]);
            }
            if let Some(factors) = factors {
                to.iter_mut().zip(factors).for_each(|(to, factor)| *to *= factor);
            }
        }
    });
}

/// `to (columns) += sum over tokens of x`, or of `x * y`, in an order that follows from the number of tokens alone.
pub fn sum_block(x: &[f32], y: Option<&[f32]>, to: &mut [f32], block: Block) {
    let to = Shared::new(to);
    each(block.columns.div_ceil(COLUMNS), |task| {
        let first = task * COLUMNS;
        let count = COLUMNS.min(block.columns - first);
        // SAFETY: these columns belong to this task.
        let to = unsafe { to.range(first, count) };
        for tokens in (0..block.n).step_by(TOKENS) {
            let mut sum = [0f32; COLUMNS];
            for token in tokens..block.n.min(tokens + TOKENS) {
                let at = block.start() + token * block.width + first;
                let (x, sum) = (&x[at..][..count], &mut sum[..count]);
                match y {
                    Some(y) => {
                        let terms = x.iter().zip(&y[at..][..count]);
                        sum.iter_mut().zip(terms).for_each(|(sum, (x, y))| *sum += x * y);
                    }
                    None => sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x),
                }
            }
            to.iter_mut().zip(sum).for_each(|(to, sum)| *to += sum);
        }
    });
}

/// `y (n, width) += bias (width) + residual (n, width)`.
pub fn add_bias(y: &mut [f32], bias: Option<View>, residual: Option<&[f32]>, shape: (usize, usize)) {
    let (n, width) = shape;
    let y = Shared::new(y);
    each(n.div_ceil(TOKENS), |task| {
        let tokens = task * TOKENS..n.min((task + 1) * TOKENS);
        for first in (0..width).step_by(COLUMNS) {
            let count = COLUMNS.min(width - first);
            let mut wide = [0f32; COLUMNS];
            match bias.map(|bias| bias.slice(first, count)) {
                Some(bias) if bias.dtype() == DType::F16 => widen(bias.host(), &mut wide[..count]),
                Some(bias) => wide[..count].copy_from_slice(bias.host()),
                None => {}
            }
            for token in tokens.clone() {
                let at = token * width + first;
                // SAFETY: this token belongs to this task.
                let y = unsafe { y.range(at, count) };
                y.iter_mut().zip(&wide).for_each(|(y, bias)| *y += bias);
                if let Some(residual) = residual {
                    y.iter_mut().zip(&residual[at..]).for_each(|(y, residual)| *y += residual);
                }
            }
        }
    });
}
