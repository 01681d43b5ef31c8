//! REFERENCE twin, in any precision, written out element by element.

use engraft_util::real::Real;

/// The embedding of n tokens.
pub struct Embedding<'a, T> {
    /// Token ids `(n)`.
    pub ids: &'a [u32],
    /// Rows of the position embedding `(n)`.
    pub positions: &'a [u32],
    /// `wte (v, c)`.
    pub wte: &'a [T],
    /// `wpe (positions, c)`.
    pub wpe: &'a [T],
    /// Width c of the embeddings.
    pub width: usize,
    /// Rows `(p, c)` of the ids from v on.
    pub prompt: &'a [T],
    /// Low-rank deltas of the token embedding.
    pub deltas: Vec<Delta<'a, T>>,
}

/// A delta of an [`Embedding`].
pub struct Delta<'a, T> {
    /// `A (r, v)`.
    pub a: &'a [T],
    /// `B (c, r)`.
    pub b: &'a [T],
    /// Rank r, the rows of A.
    pub rank: usize,
    /// Factor s of the delta.
    pub scale: T,
}

/// Gradients of an [`Embedding`].
pub struct Gradients<T> {
    /// Of the prompt `(p, c)`.
    pub prompt: Vec<T>,
    /// Gradients of each delta's factors.
    pub deltas: Vec<DeltaGradients<T>>,
}

/// Gradients of a [`Delta`].
pub struct DeltaGradients<T> {
    /// Of A `(r, v)`.
    pub a: Vec<T>,
    /// Of B `(c, r)`.
    pub b: Vec<T>,
}

/// `x (n, c)`.
pub fn forward<T: Real>(embedding: &Embedding<T>) -> Vec<T> {
    let Embedding { ids, positions, wte, wpe, width, prompt, deltas } = embedding;
    let (c, vocab) = (*width, wte.len() / width);
    let mut x = Vec::with_capacity(ids.len() * c);
    for (&id, &position) in ids.iter().zip(*positions) {
        let (id, position) = (id as usize, position as usize);
        for j in 0..c {
            if id >= vocab {
                x.push(prompt[(id - vocab) * c + j] + wpe[position * c + j]);
                continue;
            }
            let mut sum = wte[id * c + j] + wpe[position * c + j];
            for delta in deltas {
                for r in 0..delta.rank {
                    sum += delta.scale * delta.b[j * delta.rank + r] * delta.a[r * vocab + id];
                }
            }
            x.push(sum);
        }
    }
    x
}

/// Gradients of all that is learned, from `dx (n, c)`.
pub fn backward<T: Real>(embedding: &Embedding<T>, dx: &[T]) -> Gradients<T> {
    let Embedding { ids, wte, width, prompt, deltas, .. } = embedding;
    let (c, vocab) = (*width, wte.len() / width);
    let mut d_prompt = vec![T::zero(); prompt.len()];
    for (dx, &id) in dx.chunks_exact(c).zip(*ids).filter(|(_, id)| **id as usize >= vocab) {
        let to = &mut d_prompt[(id as usize - vocab) * c..][..c];
        to.iter_mut().zip(dx).for_each(|(to, dx)| *to += *dx);
    }
    let gradients = deltas.iter().map(|delta| {
        let (mut a, mut b) = (vec![T::zero(); delta.a.len()], vec![T::zero(); delta.b.len()]);
        let real = ids.iter().enumerate().filter(|(_, id)| (**id as usize) < vocab);
        for (token, &id) in real {
            for j in 0..c {
                for r in 0..delta.rank {
                    let (at_a, at_b) = (r * vocab + id as usize, j * delta.rank + r);
                    let d = delta.scale * dx[token * c + j];
                    a[at_a] += d * delta.b[at_b];
                    b[at_b] += d * delta.a[at_a];
                }
            }
        }
        DeltaGradients { a, b }
    });
    Gradients { prompt: d_prompt, deltas: gradients.collect() }
}
