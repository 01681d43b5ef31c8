//! Keys and values of tokens already read, so that a new token costs one row of products.

use crate::{
    device::{
        Buffer, DType, ViewMut,
        arena::{Arena, Arenas, Placement},
    },
    error::Result,
    kernels::{
        attention::{self, CacheRows, Heads},
        decode_layer,
    },
};

use super::{Config, arch::Arch};

/// Where rows of a batch go on in a cache.
#[derive(Clone, Copy)]
pub enum CachedRows<'a> {
    /// A single row: row `slot` of the cache, which has `past` tokens.
    One { slot: usize, past: usize },
    /// One further token for each of several rows, which the device looks up.
    Each(CacheRows<'a>),
}

/// Keys and values of one layer, `(rows, capacity, c)` each.
pub struct LayerCache {
    k: Buffer,
    v: Buffer,
    /// Tickets of [`decode_layer`], all 0.
    tickets: Buffer,
    /// Tokens that a row has room for.
    capacity: usize,
    /// Width c of a key.
    width: usize,
}

impl LayerCache {
    /// Appends the keys and values of `tokens` new tokens for each of `batch` rows.
    pub(super) fn append(&mut self, k: Heads, v: Heads, batch: usize, tokens: usize, at: CachedRows) {
        let (sizes, row) = ((batch, tokens, self.width), self.capacity * self.width);
        match at {
            CachedRows::One { slot, past } => {
                let place = (slot * row + past * self.width, row);
                attention::append(k, self.k.view_mut(), sizes, place);
                attention::append(v, self.v.view_mut(), sizes, place);
            }
            CachedRows::Each(rows) => {
                attention::append_rows((k, v), (self.k.view_mut(), self.v.view_mut()), sizes, row, rows);
            }
        }
    }

    /// Tokens that a row has room for.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Keys and values of all rows, `(rows, capacity, c)` each, and the tickets of [`decode_layer`].
    pub(super) fn parts(&mut self) -> ((ViewMut<'_>, ViewMut<'_>), ViewMut<'_>) {
        ((self.k.view_mut(), self.v.view_mut()), self.tickets.view_mut())
    }

    /// Keys and values as attention reads them: those of the one row, or the whole cache.
    pub(super) fn heads(&self, at: CachedRows) -> (Heads<'_>, Heads<'_>) {
        let row = self.capacity * self.width;
        let part = |buffer: &Buffer| match at {
            CachedRows::One { slot, .. } => (slot * row, row),
            CachedRows::Each(_) => (0, buffer.len()),
        };
        let heads = |buffer| {
            let (start, len) = part(buffer);
            Heads { data: buffer.view().slice(start, len), row: self.width, batch: row }
        };
        (heads(&self.k), heads(&self.v))
    }

    /// Most tokens that precede the next token of any row.
    pub(super) fn most_past(&self, at: CachedRows) -> usize {
        match at {
            CachedRows::One { past, .. } => past,
            CachedRows::Each(_) => self.capacity - 1,
        }
    }

    /// Copies the first `tokens` tokens of row `from` to row `to`.
    fn copy(&mut self, from: usize, to: usize, tokens: usize) {
        let (row, width) = (self.capacity * self.width, self.width);
        for buffer in [&mut self.k, &mut self.v] {
            let (left, right) = buffer.view_mut().split_at(from.max(to) * row);
            let (source, target) = if from < to {
                (left.into_view().slice(from * row, row), right)
            } else {
                (right.into_view(), left.slice(to * row, row))
            };
            let source = Heads { data: source, row: width, batch: 0 };
            attention::append(source, target, (1, tokens, width), (0, 0));
        }
    }

    /// The first `tokens` keys and values of row 0, `(tokens, c)` each.
    pub(super) fn first_row(&self, tokens: usize) -> (Vec<f32>, Vec<f32>) {
        let floats = |buffer: &Buffer| buffer.view().slice(0, tokens * self.width).to_floats();
        (floats(&self.k), floats(&self.v))
    }
}

/// The caches of all layers.
pub struct Cache {
    /// One cache a layer.
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
        let width = Arch::of(config).kv();
        let tickets = decode_layer::device_scratch::tickets(rows, config.width, config.heads);
        let cut = |arena: &mut Arena| {
            let shape = [rows, capacity, width];
            (0..config.layers)
                .map(|layer| {
                    let k = arena.take(format!("layer {layer} keys"), activations, &shape)?;
                    let v = arena.take(format!("layer {layer} values"), activations, &shape)?;
                    let tickets = arena.take(format!("layer {layer} tickets"), DType::U32, &[tickets])?;
                    Ok(LayerCache { k, v, tickets, capacity, width })
                })
                .collect()
        };
        let layers = arenas.build("KV cache", Placement::Memory, cut)?;
        Ok(Self { layers, capacity })
    }

    /// Tokens that a row has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Copies the first `tokens` tokens of row `from` to row `to`.
    pub(super) fn copy(&mut self, from: usize, to: usize, tokens: usize) {
        if from != to && tokens > 0 {
            self.layers.iter_mut().for_each(|layer| layer.copy(from, to, tokens));
        }
    }
}
