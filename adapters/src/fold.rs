//! Adapters folded into the weights of their base, from what a [`Contribution`](crate::Contribution) says alone: a new
//! method needs nothing here.
//!
//! A site computes `y = g * ((u * x) W [+ b] + sum of s e * (((x A^T) * d) B^T)) [+ b]`, so that with
//!
//! ```text
//! W' = g * (u W + sum of s (A^T diag(d) B^T) diag(e))        row i of W times u_i, column j times e_j and g_j
//! b' = g * b where b stands inside g, else b                 b is the base's, or the adapter's in its place
//! ```
//!
//! `y = x W' + b'`. Layer norms are replaced, and a delta on the token embedding is added to its rows. A prefix and a
//! prompt are no weights. All is computed in F32.

use crate::{AdapterSet, Error, Lora, NormVectors, OutputScale, Result, SiteVectors};

/// An adapter to be folded.
#[derive(Debug, Clone, Copy)]
pub struct FoldPart<'a> {
    /// What its tensors do.
    pub set: &'a AdapterSet,
    /// Its flat store.
    pub values: &'a [f32],
    /// Multiplies its low-rank deltas; 1 leaves them as they are.
    pub factor: f32,
}

/// Adapters that are folded together, as they are used together.
#[derive(Debug, Clone)]
pub struct Folding<'a> {
    parts: Vec<FoldPart<'a>>,
}

impl AdapterSet {
    /// Checks that weights can hold all that the set does.
    ///
    /// # Errors
    /// [`Error::NotFoldable`] for a prefix or a prompt.
    pub fn check_foldable(&self) -> Result<()> {
        let what = match (&self.prefix, &self.prompt) {
            (Some(_), _) => "prefix (keys and values in front of every text)",
            (_, Some(_)) => "prompt (embeddings in front of every text)",
            _ => return Ok(()),
        };
        Err(Error::NotFoldable { what })
    }

    /// Whether a factor means something for it: it has low-rank deltas.
    pub fn is_scalable(&self) -> bool {
        !self.loras.is_empty() || self.embedding.is_some()
    }
}

impl<'a> Folding<'a> {
    /// Adapters that are summed: deltas add up, and all else is there once.
    ///
    /// # Errors
    /// [`Error::NotFoldable`] as [`AdapterSet::check_foldable`], [`Error::ValueCount`] for a store of another length, and
    /// [`Error::Conflict`] where two adapters set the same thing, or one scales columns by norms that another changes.
    pub fn new(parts: Vec<FoldPart<'a>>) -> Result<Self> {
        for FoldPart { set, values, .. } in &parts {
            set.check_foldable()?;
            crate::peft::check_count("the flat store", values, set.layout.len)?;
        }
        let folding = Self { parts };
        folding.check_together()?;
        Ok(folding)
    }

    fn check_together(&self) -> Result<()> {
        let conflict = |what| Err(Error::Conflict { what });
        for (index, part) in self.parts.iter().enumerate() {
            for other in self.parts.iter().enumerate().filter(|(at, _)| *at != index).map(|(_, other)| other)
            {
                for vectors in &part.set.vectors {
                    let place = (vectors.layer, vectors.site);
                    let over_norms = vectors.g.is_some_and(|g| g.over_norms);
                    if over_norms && other.set.loras.iter().any(|lora| (lora.layer, lora.site) == place) {
                        return conflict("the columns of a module that one scales by their norms");
                    }
                    let mut same =
                        other.set.vectors.iter().filter(|other| (other.layer, other.site) == place);
                    if same.any(|other| vectors.meets(other)) {
                        return conflict("the scales or the bias of a module");
                    }
                }
                let meets = |norm: &NormVectors| other.set.norms.iter().any(|other| norm.meets(other));
                if part.set.norms.iter().any(meets) {
                    return conflict("the same layer norm");
                }
            }
        }
        Ok(())
    }

    /// Whether [`Folding::linear`] changes this module.
    pub fn changes_linear(&self, layer: usize, site: usize) -> bool {
        self.deltas(layer, site).next().is_some() || self.vectors(layer, site).next().is_some()
    }

    /// Folds into the module `site` of `layer`: `weight` [inputs, outputs], row-major, and `bias` `[outputs]`.
    ///
    /// # Panics
    /// When lengths are not those of the module.
    pub fn linear(&self, layer: usize, site: usize, weight: &mut [f32], bias: &mut [f32]) {
        let outputs = bias.len();
        let mut scales = None;
        for (part, vectors) in self.vectors(layer, site) {
            if let Some(replaced) = vectors.bias {
                bias.copy_from_slice(part.tensor(replaced));
            }
            scales = scales.or(vectors.g.map(|g| (part, g)));
        }
        // Norms are those of the columns before u (the model derives them so), and of all deltas.
        let norms = match scales {
            Some((_, OutputScale { over_norms: true, .. })) => {
                let mut sum = weight.to_vec();
                self.add_deltas(layer, site, &mut sum, outputs);
                Some(column_norms(&sum, outputs))
            }
            _ => None,
        };
        for (part, u) in self.vectors(layer, site).filter_map(|(part, vectors)| Some((part, vectors.u?))) {
            for (row, u) in weight.chunks_exact_mut(outputs).zip(part.tensor(u)) {
                row.iter_mut().for_each(|w| *w *= u);
            }
        }
        self.add_deltas(layer, site, weight, outputs);
        if let Some((part, OutputScale { vector, with_bias, .. })) = scales {
            let g = match norms {
                Some(norms) => part.tensor(vector).iter().zip(norms).map(over).collect(),
                None => part.tensor(vector).to_vec(),
            };
            let rows = weight.chunks_exact_mut(outputs).chain(with_bias.then_some(bias));
            rows.for_each(|row| row.iter_mut().zip(&g).for_each(|(w, g)| *w *= g));
        }
    }

    /// Adds all deltas of a module to `weight` [inputs, outputs].
    fn add_deltas(&self, layer: usize, site: usize, weight: &mut [f32], outputs: usize) {
        for (part, lora) in self.deltas(layer, site) {
            let (a, b) = (part.tensor(lora.a), part.b(lora));
            let one = |vector: Option<usize>, at: usize| vector.map_or(1.0, |index| part.tensor(index)[at]);
            let (rank, columns) = (lora.rank, lora.columns.len());
            let inputs = weight.len() / outputs;
            // B^T diag(e), [rank, columns]: the loop below runs along rows of the weight.
            let mut right = vec![0.0; rank * columns];
            for (column, row) in b.chunks_exact(rank).enumerate() {
                let e = one(lora.e, column);
                row.iter().enumerate().for_each(|(r, b)| right[r * columns + column] = b * e);
            }
            let scale = lora.scale * part.factor;
            let mut delta = vec![0.0f32; columns];
            for (i, row) in weight.chunks_exact_mut(outputs).enumerate() {
                delta.fill(0.0);
                for (r, right) in right.chunks_exact(columns).enumerate() {
                    let left = a[r * inputs + i] * one(lora.d, r);
                    delta.iter_mut().zip(right).for_each(|(sum, right)| *sum += left * right);
                }
                row[lora.columns.clone()].iter_mut().zip(&delta).for_each(|(w, delta)| *w += scale * delta);
            }
        }
    }

    /// Gain and bias `[width]` of a layer norm, where they are not the base's. Without a layer it is the one before the
    /// head.
    pub fn norm(&self, layer: Option<usize>, norm: usize) -> (Option<&'a [f32]>, Option<&'a [f32]>) {
        let (mut gain, mut bias) = (None, None);
        for part in &self.parts {
            let own = part.set.norms.iter().filter(|own| (own.layer, own.norm) == (layer, norm));
            for vectors in own {
                gain = gain.or(vectors.gain.map(|index| part.tensor(index)));
                bias = bias.or(vectors.bias.map(|index| part.tensor(index)));
            }
        }
        (gain, bias)
    }

    /// Whether [`Folding::embedding`] changes the token embedding. A head that is the same tensor stays as it was, and so
    /// needs one of its own.
    pub fn changes_embedding(&self) -> bool {
        self.parts.iter().any(|part| part.set.embedding.is_some())
    }

    /// Folds into the token embedding `table` [vocab, width]: row t gets `s B A_t`, where A_t is column t of A.
    ///
    /// # Panics
    /// When the length is not that of the embedding.
    pub fn embedding(&self, table: &mut [f32]) {
        for part in &self.parts {
            let Some(delta) = &part.set.embedding else { continue };
            let (a, b) = (part.tensor(delta.a), part.tensor(delta.b));
            let (vocab, width) = (a.len() / delta.rank, b.len() / delta.rank);
            for (token, row) in table.chunks_exact_mut(width).enumerate() {
                for (value, b) in row.iter_mut().zip(b.chunks_exact(delta.rank)) {
                    let sum: f32 = b.iter().enumerate().map(|(r, b)| b * a[r * vocab + token]).sum();
                    *value += delta.scale * part.factor * sum;
                }
            }
        }
    }

    fn deltas(&self, layer: usize, site: usize) -> impl Iterator<Item = (&FoldPart<'a>, &'a Lora)> {
        let of = move |lora: &&Lora| (lora.layer, lora.site) == (layer, site);
        self.parts.iter().flat_map(move |part| part.set.loras.iter().filter(of).map(move |lora| (part, lora)))
    }

    fn vectors(&self, layer: usize, site: usize) -> impl Iterator<Item = (&FoldPart<'a>, &'a SiteVectors)> {
        let of = move |vectors: &&SiteVectors| (vectors.layer, vectors.site) == (layer, site);
        self.parts
            .iter()
            .flat_map(move |part| part.set.vectors.iter().filter(of).map(move |vectors| (part, vectors)))
    }
}

impl<'a> FoldPart<'a> {
    /// Values of a tensor of the layout.
    fn tensor(&self, index: usize) -> &'a [f32] {
        &self.values[self.set.layout.tensors[index].range()]
    }

    /// B of a delta, [columns, rank]: the first rows of its tensor, which has more of them where modules of different
    /// widths share it (VeRA).
    pub(crate) fn b(&self, lora: &Lora) -> &'a [f32] {
        &self.tensor(lora.b)[..lora.columns.len() * lora.rank]
    }
}

impl SiteVectors {
    /// Whether both set the same thing of a module that both belong to.
    fn meets(&self, other: &Self) -> bool {
        (self.u.is_some() && other.u.is_some())
            || (self.g.is_some() && other.g.is_some())
            || (self.bias.is_some() && other.bias.is_some())
    }
}

impl NormVectors {
    /// Whether both set the same vector of the same norm.
    fn meets(&self, other: &Self) -> bool {
        (self.layer, self.norm) == (other.layer, other.norm)
            && ((self.gain.is_some() && other.gain.is_some())
                || (self.bias.is_some() && other.bias.is_some()))
    }
}

/// Norms `[outputs]` of the columns of `weight` [inputs, outputs], summed in F64.
fn column_norms(weight: &[f32], outputs: usize) -> Vec<f32> {
    let mut squares = vec![0f64; outputs];
    for row in weight.chunks_exact(outputs) {
        squares.iter_mut().zip(row).for_each(|(sum, &w)| *sum += f64::from(w) * f64::from(w));
    }
    squares.into_iter().map(|sum| sum.sqrt() as f32).collect()
}

/// `m / norm`, 0 for a column without a direction.
fn over((m, norm): (&f32, f32)) -> f32 {
    if norm == 0.0 { 0.0 } else { m / norm }
}

#[cfg(test)]
#[path = "fold_tests.rs"]
mod tests;
