//! Keys and values of tokens already seen, so that a new token costs one row.

use crate::{
    device::{
        Buffer, DType, View,
        arena::{Arena, Arenas, Place},
    },
    error::Result,
    kernels::attention::{self, Heads},
};

use super::Config;

/// Keys and values of one layer, `(b, capacity, c)` each.
pub struct LayerCache {
    k: Buffer,
    v: Buffer,
    capacity: usize,
    filled: usize,
}

impl LayerCache {
    /// Appends `tokens` new keys and values a row, behind as many as `count` says on the device or else as there are;
    /// returns how many were there before, or may have been.
    pub(super) fn append(
        &mut self,
        (k, v): (Heads, Heads),
        (rows, tokens, c): (usize, usize, usize),
        count: Option<View>,
    ) -> usize {
        let (past, batch, sizes) = (self.filled, self.capacity * c, (rows, tokens, c));
        self.filled += tokens;
        let (to_k, to_v) = (self.k.view_mut(), self.v.view_mut());
        if let Some(count) = count {
            attention::append_behind((k, v), (to_k, to_v), sizes, batch, count);
            return self.capacity - tokens;
        }
        attention::append(k, to_k, sizes, (past * c, batch));
        attention::append(v, to_v, sizes, (past * c, batch));
        past
    }

    /// All keys and values.
    pub(super) fn heads(&self, c: usize) -> (Heads<'_>, Heads<'_>) {
        let batch = self.capacity * c;
        (Heads { data: self.k.view(), row: c, batch }, Heads { data: self.v.view(), row: c, batch })
    }
}

impl LayerCache {
    /// Copies the first row to rows `1 .. rows`.
    fn fork(&mut self, rows: usize, c: usize) {
        let sizes = (1, self.filled, c);
        for buffer in [&mut self.k, &mut self.v] {
            let (first, mut others) = buffer.view_mut().split_at(self.capacity * c);
            let from = Heads { data: first.as_view(), row: c, batch: 0 };
            for row in 0..rows.saturating_sub(1) {
                attention::append(from, others.reborrow(), sizes, (row * self.capacity * c, 0));
            }
        }
    }
}

/// The caches of all layers.
pub struct Cache {
    /// By layer.
    pub(super) layers: Vec<LayerCache>,
    capacity: usize,
}

impl Cache {
    /// Room for `capacity` tokens in each of `rows` rows, in the type of the activations.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    pub fn new(
        config: &Config,
        rows: usize,
        capacity: usize,
        activations: DType,
        arenas: &mut Arenas,
    ) -> Result<Self> {
        let cut = |arena: &mut Arena| {
            let shape = [rows, capacity, config.width];
            (0..config.layers)
                .map(|layer| {
                    let k = arena.take(format!("layer {layer} keys"), activations, &shape)?;
                    let v = arena.take(format!("layer {layer} values"), activations, &shape)?;
                    Ok(LayerCache { k, v, capacity, filled: 0 })
                })
                .collect()
        };
        let layers = arenas.build("KV cache", Place::Memory, cut)?;
        Ok(Self { layers, capacity })
    }

    /// As many more tokens a row were appended by work that was recorded.
    pub(super) fn advance(&mut self, tokens: usize) {
        self.layers.iter_mut().for_each(|layer| layer.filled += tokens);
    }

    /// Tokens that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens seen so far.
    pub fn filled(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.filled)
    }

    /// Copies the first row of `c` wide keys and values to rows `1 .. rows`.
    pub(super) fn fork(&mut self, rows: usize, c: usize) {
        self.layers.iter_mut().for_each(|layer| layer.fork(rows, c));
    }

    /// Forgets all but the first `tokens`.
    pub fn truncate(&mut self, tokens: usize) {
        self.layers.iter_mut().for_each(|layer| layer.filled = layer.filled.min(tokens));
    }
}
