//! CPU side: a task takes some rows of the output; thin products around columns of A that are gathered.

use half::f16;

use super::{DeltaGradients, EmbeddingDelta, Tables, Tokens};
use crate::device::cpu::{
    Shared, Strides, gemm,
    tasks::{each, shares},
    vectors, wide, with_scratch,
};

/// Rows that a task takes.
const ROWS: usize = 64;
/// Rows of B that a task takes, and what they come in multiples of where there is a task for every thread.
const OUTER: usize = 256;
const COLUMNS: usize = 64;

pub fn forward(ids: &[u32], positions: &[u32], tables: Tables, x: &mut [f32]) {
    let Tables { wte, wpe, prompt } = tables;
    let (n, c, tokens, wpe) = (ids.len(), wte.cols, wte.host(), wpe.host::<f16>());
    let prompt = prompt.map_or(&[][..], |prompt| prompt.host::<f32>());
    assert!(positions.len() == n && x.len() == n * c, "embed shapes");
    let x = Shared::new(x);
    each(n.div_ceil(ROWS), |task| {
        for row in task * ROWS..n.min((task + 1) * ROWS) {
            let position = &wpe[positions[row] as usize * c..][..c];
            // SAFETY: this row belongs to this task.
            let x = unsafe { x.range(row * c, c) };
            match (ids[row] as usize).checked_sub(wte.rows) {
                None => tokens.widen(c, (ids[row] as usize, 0), x),
                Some(index) => x.copy_from_slice(&prompt[index * c..][..c]),
            }
            x.iter_mut().zip(position).for_each(|(x, &position)| *x += wide(position));
        }
    });
}

/// Floats of scratch that a task uses, and floats that packing takes beside it.
pub fn scratch(n: usize, c: usize, rank: usize) -> (usize, usize) {
    if rank == 0 {
        return (0, 0);
    }
    let rows = ROWS.min(n);
    let sizes = [(rows, c, rank), (rows, rank, c), (OUTER.min(c), rank, n)];
    let packing = sizes.into_iter().map(|(m, n, k)| crate::device::cpu::packing(m, n, k)).max().unwrap_or(0);
    // Our own packing is scratch like any other.
    if vectors() { (rows * rank + packing, 0) } else { (rows * rank, packing) }
}

/// The factors of a delta, for tokens of width c.
struct Factors<'a> {
    rank: usize,
    vocab: usize,
    a: &'a [f32],
    b: &'a [f32],
}

impl<'a> Factors<'a> {
    fn new(delta: &EmbeddingDelta, vocab: usize, c: usize, values: &'a [f32]) -> Self {
        let rank = delta.rank;
        Self { rank, vocab, a: &values[delta.a.at..][..rank * vocab], b: &values[delta.b.at..][..c * rank] }
    }

    /// `xa (ids, r)`: columns of A; zeros for an id without one.
    fn gather(&self, ids: &[u32], xa: &mut [f32]) {
        for (&id, xa) in ids.iter().zip(xa.chunks_exact_mut(self.rank)) {
            let id = id as usize;
            for (r, xa) in xa.iter_mut().enumerate() {
                *xa = if id < self.vocab { self.a[r * self.vocab + id] } else { 0.0 };
            }
        }
    }
}

pub fn add_delta(delta: &EmbeddingDelta, tokens: Tokens, values: &[f32], x: &mut [f32]) {
    let (ids, rank) = (tokens.ids.host::<u32>(), delta.rank);
    let c = x.len() / ids.len();
    assert_eq!(x.len(), ids.len() * c, "embed shapes");
    let factors = Factors::new(delta, tokens.vocab, c, values);
    let x = Shared::new(x);
    each(ids.len().div_ceil(ROWS), |task| {
        let rows = task * ROWS..ids.len().min((task + 1) * ROWS);
        with_scratch(rows.len() * rank, |xa| {
            factors.gather(&ids[rows.clone()], xa);
            // SAFETY: these rows of x belong to this task; the operands are only read.
            unsafe {
                gemm(
                    (rows.len(), c, rank),
                    x.at(rows.start * c),
                    Strides::rows(c),
                    1.0,
                    xa.as_ptr(),
                    Strides::rows(rank),
                    factors.b.as_ptr(),
                    Strides::columns(rank),
                    delta.scale,
                );
            }
        });
    });
}

pub fn delta_backward(
    delta: &EmbeddingDelta,
    tokens: Tokens,
    by_id: &[u32],
    values: &[f32],
    dx: &[f32],
    to: DeltaGradients,
) {
    let ids = tokens.ids.host::<u32>();
    let (n, c) = (ids.len(), dx.len() / ids.len());
    assert!(dx.len() == n * c && by_id.len() == n, "embed shapes");
    let factors = Factors::new(delta, tokens.vocab, c, values);
    let (grads, d_xa) = (to.grads.host::<f32>(), &mut to.d_xa.host::<f32>()[..n * delta.rank]);
    if !delta.b.frozen {
        each_rows(n, delta.rank, d_xa, |rows, xa| factors.gather(&ids[rows], xa));
        b_gradient(delta, dx, d_xa, c, grads);
    }
    if !delta.a.frozen {
        each_rows(n, delta.rank, d_xa, |rows, d_xa| {
            // SAFETY: the product is as large as `d_xa`; the operands are only read.
            unsafe {
                gemm(
                    (rows.len(), delta.rank, c),
                    d_xa.as_mut_ptr(),
                    Strides::rows(delta.rank),
                    0.0,
                    dx[rows.start * c..].as_ptr(),
                    Strides::rows(c),
                    factors.b.as_ptr(),
                    Strides::rows(delta.rank),
                    delta.scale,
                );
            }
        });
        a_gradient(&factors, ids, by_id, d_xa, &mut grads[delta.a.at..][..factors.a.len()]);
    }
}

/// Hands out rows of `width` floats of `to` in tasks.
fn each_rows(
    n: usize,
    width: usize,
    to: &mut [f32],
    work: impl Fn(std::ops::Range<usize>, &mut [f32]) + Sync + Send,
) {
    let to = Shared::new(to);
    each(n.div_ceil(ROWS), |task| {
        let rows = task * ROWS..n.min((task + 1) * ROWS);
        // SAFETY: these rows belong to this task.
        let to = unsafe { to.range(rows.start * width, rows.len() * width) };
        work(rows, to);
    });
}

/// `dB (c, r) += scale * dx (n, c)^T xa (n, r)`.
fn b_gradient(delta: &EmbeddingDelta, dx: &[f32], xa: &[f32], c: usize, grads: &mut [f32]) {
    let (n, rank) = (dx.len() / c, delta.rank);
    let gradient = Shared::new(&mut grads[delta.b.at..][..c * rank]);
    let (tasks, height) = shares(c, OUTER, COLUMNS);
    each(tasks, |task| {
        let j = task * height;
        let count = height.min(c - j);
        // SAFETY: these rows of dB belong to this task; the operands are only read.
        unsafe {
            gemm(
                (count, rank, n),
                gradient.at(j * rank),
                Strides::rows(rank),
                1.0,
                dx[j..].as_ptr(),
                Strides::columns(c),
                xa.as_ptr(),
                Strides::rows(rank),
                delta.scale,
            );
        }
    });
}

pub fn prompt_backward(tokens: Tokens, by_id: &[u32], dx: &[f32], d_prompt: &mut [f32]) {
    let ids = tokens.ids.host::<u32>();
    let c = dx.len() / ids.len();
    assert!(dx.len() == ids.len() * c && by_id.len() == ids.len(), "embed shapes");
    let d_prompt = Shared::new(d_prompt);
    each_id(ids, by_id, |id, places| {
        let Some(index) = (id as usize).checked_sub(tokens.vocab) else { return };
        // SAFETY: the row of an id belongs to the task that has its first token.
        let to = unsafe { d_prompt.range(index * c, c) };
        for &token in places {
            let dx = &dx[token as usize * c..][..c];
            to.iter_mut().zip(dx).for_each(|(to, dx)| *to += dx);
        }
    });
}

/// Hands out each id once, with the indices of its tokens in ascending order.
fn each_id(ids: &[u32], by_id: &[u32], work: impl Fn(u32, &[u32]) + Sync + Send) {
    let (n, id_at) = (ids.len(), |place: usize| ids[by_id[place] as usize]);
    each(n.div_ceil(ROWS), |task| {
        for first in task * ROWS..n.min((task + 1) * ROWS) {
            let id = id_at(first);
            if first == 0 || id_at(first - 1) != id {
                let end = (first..n).find(|&place| id_at(place) != id).unwrap_or(n);
                work(id, &by_id[first..end]);
            }
        }
    });
}

/// `dA (r, v)[:, id] += d_xa (n, r)[i]` for each token i of that id, in the order of `by_id`.
fn a_gradient(factors: &Factors, ids: &[u32], by_id: &[u32], d_xa: &[f32], gradient: &mut [f32]) {
    let (rank, vocab) = (factors.rank, factors.vocab);
    let gradient = Shared::new(gradient);
    each_id(ids, by_id, |id, tokens| {
        if id as usize >= vocab {
            return;
        }
        for &token in tokens {
            let d_xa = &d_xa[token as usize * rank..][..rank];
            for (r, d) in d_xa.iter().enumerate() {
                // SAFETY: the column of an id belongs to the task that has its first token.
                unsafe { gradient.range(r * vocab + id as usize, 1)[0] += d };
            }
        }
    });
}
