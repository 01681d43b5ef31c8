//! One pass of a decoder: pieces of some rows are uploaded, computed in groups of like rows, and their logits are left.

use super::{Decoder, Recorded, RowState, RowTokens};
use crate::{
    device::graph::Graph,
    error::Result,
    kernels::{
        adapted_linear::Dropout,
        attention::CacheRows,
        matmul::{self, InitialValue},
        noise::Noise,
    },
    model::{
        base::MANY,
        block::rows,
        cache::CachedRows,
        layers::{MicroBatch, RowGroup},
        stack::head_matrix,
    },
};

/// Tokens that a pass reads for one row.
#[derive(Clone, Copy)]
pub(super) struct Piece<'a> {
    row: usize,
    ids: &'a [u32],
    /// Whether they are the last of their row, whose logits are asked for.
    ends: bool,
}

/// Pieces that follow one another and are computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shared {
    /// Index of the first piece.
    first: usize,
    /// Number of pieces.
    count: usize,
    /// Tokens of each piece.
    tokens: usize,
    /// Number of their adapters.
    adapter: usize,
}

impl Decoder {
    /// Reads one pass; the logits of the pieces that end go to rows `to` and following.
    pub(super) fn pass(&mut self, pieces: &[Piece], to: usize) -> Result<()> {
        let inputs = self.upload(pieces);
        let groups = self.shared(pieces);
        if pieces.iter().all(|piece| piece.ends && piece.ids.len() == 1) {
            self.tokens(&groups, pieces, inputs, to)?;
        } else {
            self.compute(&groups, pieces, inputs, to)?;
        }
        pieces.iter().for_each(|piece| self.rows[piece.row].cached += piece.ids.len());
        Ok(())
    }

    /// Brings what a pass reads to the device.
    fn upload(&mut self, pieces: &[Piece]) -> PassInputs {
        let (mut ends, mut ids, mut positions) = (Vec::new(), Vec::new(), Vec::new());
        let counts = pieces.iter().map(|piece| self.rows[piece.row].cached as u32);
        let slots = pieces.iter().map(|piece| piece.row as u32);
        let mut numbers: Vec<u32> = counts.chain(slots).collect();
        for piece in pieces {
            let RowState { adapter, cached } = self.rows[piece.row];
            let first = (cached + self.adapters[adapter].bindings.prefix_len()) as u32;
            ids.extend_from_slice(piece.ids);
            positions.extend((first..).take(piece.ids.len()));
            if piece.ends {
                ends.push(ids.len() as u32 - 1);
            }
        }
        let inputs = PassInputs { pieces: pieces.len(), ends: ends.len(), n: ids.len() };
        numbers.extend(ends.into_iter().chain(ids).chain(positions));
        self.inputs.view_mut().upload(&numbers);
        inputs
    }

    /// Cuts pieces into those that are computed together: neighbours of one token with the same adapters.
    fn shared(&self, pieces: &[Piece]) -> Vec<Shared> {
        let mut groups: Vec<Shared> = Vec::new();
        for (first, piece) in pieces.iter().enumerate() {
            let (tokens, adapter) = (piece.ids.len(), self.rows[piece.row].adapter);
            match groups.last_mut() {
                Some(last) if tokens == 1 && last.tokens == 1 && last.adapter == adapter => last.count += 1,
                _ => groups.push(Shared { first, count: 1, tokens, adapter }),
            }
        }
        groups
    }

    /// A pass of one further token a row; on a device recorded the second time, and started as one from then on.
    fn tokens(&mut self, groups: &[Shared], pieces: &[Piece], inputs: PassInputs, to: usize) -> Result<()> {
        match &self.recorded {
            Recorded::For(of, graph) if of == groups && graph.replay() => return Ok(()),
            Recorded::Not(of) if of == groups => {
                let mut done = Ok(());
                let device = self.layers.base.device;
                let graph = Graph::new(device, || done = self.compute(groups, pieces, inputs, to));
                done?;
                match graph.filter(Graph::replay) {
                    Some(graph) => {
                        self.recorded = Recorded::For(groups.to_vec(), graph);
                        return Ok(());
                    }
                    // Nothing was computed.
                    None => self.recorded = Recorded::Never,
                }
            }
            Recorded::For(..) | Recorded::Not(_) => self.recorded = Recorded::Not(groups.to_vec()),
            Recorded::Never => {}
        }
        self.compute(groups, pieces, inputs, to)
    }

    /// Runs the layers over what was uploaded, and the head over the pieces that end.
    fn compute(&mut self, groups: &[Shared], pieces: &[Piece], inputs: PassInputs, to: usize) -> Result<()> {
        let PassInputs { pieces: count, ends, n } = inputs;
        let numbers = self.inputs.view();
        let mut first = 0;
        let mut ended = 0;
        let mut batches: Vec<RowGroup> = Vec::with_capacity(groups.len());
        for group in groups {
            let adapter = &self.adapters[group.adapter];
            let pieces = &pieces[group.first..][..group.count];
            let before = ended;
            ended += pieces.iter().filter(|piece| piece.ends).count();
            let cached = match pieces {
                [piece] if group.tokens > 1 => {
                    CachedRows::One { slot: piece.row, past: self.rows[piece.row].cached }
                }
                _ => CachedRows::Each(CacheRows {
                    counts: numbers.slice(group.first, group.count),
                    slots: numbers.slice(count + group.first, group.count),
                }),
            };
            batches.push(RowGroup {
                first,
                batch: group.count,
                tokens: group.tokens,
                wanted: before..ended,
                embedding: &adapter.bindings.embedding,
                sites: &adapter.bindings.layers,
                norms: &adapter.bindings.norms,
                values: adapter.values.view(),
                prefix: adapter.prefix(),
                cached: Some(cached),
            });
            first += group.count * group.tokens;
        }
        let micro = MicroBatch {
            ids: numbers.slice(2 * count + ends, n),
            positions: numbers.slice(2 * count + ends + n, n),
            starts: rows!(self.starts, n, 1),
            by_id: None,
            groups: &batches,
            wanted: (ends < n).then(|| numbers.slice(2 * count, ends)),
            dropout: Dropout::NONE,
            noise: Noise::NONE,
        };
        self.layers.forward_only(micro, None, Some(&mut self.cache.layers))?;
        self.layers.streamer.leave(&self.layers.base.weights, None);
        if ends > 0 {
            self.layers.last_norm(micro);
            self.head(ends, to);
        }
        Ok(())
    }

    /// Leaves the logits `(count, v)` of `count` normalised rows in rows `to` and following.
    fn head(&mut self, count: usize, to: usize) {
        let base = &self.layers.base;
        let (c, v) = (base.config.width, base.config.vocab);
        let hidden = rows!(self.layers.buffers.head().1.normed, count, c);
        let logits = self.logits.view_mut().slice(to * v, count * v);
        match &base.weights.head_transposed {
            Some(transposed) if MANY.contains(&count) => transposed.product(hidden, logits, count),
            _ => matmul::frozen_nt(hidden, head_matrix(base), InitialValue::Zero, logits, count),
        }
    }
}

/// How many numbers a pass reads: for each piece the tokens that the cache has of its row, and the row; where the pieces
/// that end do so among the tokens; ids; positions.
#[derive(Clone, Copy)]
pub(super) struct PassInputs {
    pieces: usize,
    ends: usize,
    n: usize,
}

impl PassInputs {
    /// Most numbers of a pass of up to `n` tokens.
    pub(super) fn most(rows: usize, n: usize) -> usize {
        3 * rows + 2 * n
    }
}

/// The pieces that a pass of up to `most` tokens reads of the sequences that are left, which become shorter; and how
/// many of these end in it.
pub(super) fn next_pieces<'a>(left: &mut [RowTokens<'a>], most: usize) -> (Vec<Piece<'a>>, usize) {
    let (mut pieces, mut budget, mut ended) = (Vec::new(), most, 0);
    for sequence in left {
        if budget == 0 {
            break;
        }
        let (ids, rest) = sequence.ids.split_at(sequence.ids.len().min(budget));
        pieces.push(Piece { row: sequence.row, ids, ends: rest.is_empty() });
        budget -= ids.len();
        ended += usize::from(rest.is_empty());
        sequence.ids = rest;
    }
    (pieces, ended)
}
