//! Generation: tokens in, logits of the last one out, with keys and values of all earlier ones cached.
//!
//! A decoder has rows, one for each sequence that it reads. A row has a position, adapters and a part of the cache of its
//! own, so that requests of different lengths and adapters can be read together.

mod pass;
mod size;

use std::{borrow::Cow, sync::Arc};

pub use self::size::ScratchPlace;
use self::{
    pass::{Shared, next_pieces},
    size::DecoderSize,
};
use crate::{
    device::{
        Buffer, DType, View,
        arena::{Arenas, TableRow},
        cpu::on_pool,
        graph::Graph,
    },
    error::{Error, Result},
    kernels::argmax::{self, Largest},
};

use super::{
    Base, Config, activations::ActivationBuffers, bindings::AdapterBindings, block::rows, cache::Cache,
    layers::Layers, output_scales::OutputScales, policy::Policy, prefix::PrefixState, scratch::FactorTypes,
    stack::check_length, weight_streamer::WeightStreamer,
};

/// A base with adapters, reading one sequence of tokens, or several side by side.
pub struct Decoder {
    layers: Layers,
    /// Adapters that rows can be given, by number.
    adapters: Vec<DecoderAdapter>,
    rows: Vec<RowState>,
    cache: Cache,
    /// Most tokens of a pass.
    most: usize,
    /// Logits of the sequences that were read last `(rows, v)`.
    logits: Buffer,
    /// Logits of a device, copied.
    on_host: Vec<f32>,
    /// The largest of them `(rows, 2)`, as [`argmax`] leaves them.
    largest: Buffer,
    /// The numbers that a pass reads, in one upload: see [`PassInputs`].
    inputs: Buffer,
    /// First visible token of each token `(n)`: 0 of all.
    starts: Buffer,
    recorded: Recorded,
}

/// Adapters of a row: deltas and a prefix, with their values.
struct DecoderAdapter {
    bindings: AdapterBindings,
    /// The flat store of the bindings.
    values: Buffer,
    prefix: Option<PrefixState>,
}

/// A sequence that is being read.
#[derive(Clone, Copy, Default)]
struct RowState {
    /// Number of its adapters.
    adapter: usize,
    /// How many tokens the cache has of it: what it has read, after the virtual tokens of its prompt.
    cached: usize,
}

/// Tokens for one row of a [`Decoder`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowTokens<'a> {
    /// Number of the row.
    pub row: usize,
    /// The tokens that it reads next.
    pub ids: &'a [u32],
}

/// The launches of a pass of one token a row, of which a device starts hundreds: recorded, it starts them as one.
enum Recorded {
    /// Never recorded: CPU, streamed base, or the capture failed.
    Never,
    /// Not yet, for the groups of the last pass: a first one loads kernels and scratch.
    Not(Vec<Shared>),
    /// Recorded for these groups.
    For(Vec<Shared>, Graph),
}

impl Decoder {
    /// Prepares for up to `rows` sequences of up to `capacity` tokens, all of them with `bindings`, whose flat store is
    /// `values`.
    ///
    /// # Errors
    /// When `capacity` exceeds the positions, or memory cannot be reserved.
    pub fn new(
        base: Arc<Base>,
        bindings: AdapterBindings,
        values: Vec<f32>,
        rows: usize,
        capacity: usize,
    ) -> Result<Self> {
        check_length(&base, &bindings, capacity)?;
        let config = &base.config;
        let (device, activations) = (base.device, base.activations);
        let mut arenas = Arenas::real(None).on(device);
        let rows = rows.max(1);
        let size = DecoderSize { rows, cached: capacity + bindings.prompt_len() };
        let (cache, [logits, largest, inputs, starts]) = size.cut(config, activations, &mut arenas)?;
        let mut streamer = WeightStreamer::new(Policy::default(), &base)?;
        let adapter = DecoderAdapter::new(&base, &mut streamer, bindings, values)?;
        let buffers = workspace(&base, std::slice::from_ref(&adapter), size)?;
        let records = device.kind().records_graphs && !base.is_streamed();
        let recorded = if records { Recorded::Not(Vec::new()) } else { Recorded::Never };
        Ok(Self {
            layers: Layers { base, buffers, streamer },
            adapters: vec![adapter],
            rows: vec![RowState::default(); rows],
            cache,
            most: size.most(),
            logits,
            on_host: Vec::new(),
            largest,
            inputs,
            starts,
            recorded,
        })
    }

    /// Every buffer that a decoder of one row of `capacity` tokens with `bindings` would hold; needs no base.
    ///
    /// # Errors
    /// None but those of arenas that plan.
    pub fn plan(
        config: &Config,
        bindings: &AdapterBindings,
        capacity: usize,
        activations: DType,
    ) -> Result<Vec<TableRow>> {
        DecoderSize::of_one(bindings, capacity).plan(config, bindings, activations)
    }

    /// Bytes of the scratch that kernels take in a decoder as in [`Decoder::plan`].
    pub fn scratch(
        config: &Config,
        bindings: &AdapterBindings,
        capacity: usize,
        place: ScratchPlace,
    ) -> usize {
        DecoderSize::of_one(bindings, capacity).scratch(config, &[bindings], place)
    }

    /// Adds adapters that rows can be given; returns their number. Those of [`Decoder::new`] have number 0.
    ///
    /// # Errors
    /// When prefix and prompt leave no position for a token, or memory cannot be reserved.
    pub fn add_adapter(&mut self, bindings: AdapterBindings, values: Vec<f32>) -> Result<usize> {
        let Layers { base, streamer, .. } = &mut self.layers;
        check_length(base, &bindings, 1)?;
        let (prompt, cells) = (bindings.prompt_len(), self.cache.capacity());
        if prompt >= cells {
            return Err(Error::input(format!(
                "a prompt of {prompt} virtual tokens leaves no room in a decoder for {cells} tokens; make it for more"
            )));
        }
        self.adapters.push(DecoderAdapter::new(base, streamer, bindings, values)?);
        let size = DecoderSize { rows: self.rows.len(), cached: self.cache.capacity() };
        let buffers = workspace(base, &self.adapters, size);
        match buffers {
            Ok(buffers) => self.layers.buffers = buffers,
            Err(error) => {
                self.adapters.pop();
                return Err(error);
            }
        }
        if !matches!(self.recorded, Recorded::Never) {
            self.recorded = Recorded::Not(Vec::new());
        }
        Ok(self.adapters.len() - 1)
    }

    /// Gives `row` the adapters of number `adapter`, and forgets what it has read.
    ///
    /// # Errors
    /// When there is no such row or adapter.
    pub fn assign(&mut self, row: usize, adapter: usize) -> Result<()> {
        self.check_row(row)?;
        if adapter >= self.adapters.len() {
            let count = self.adapters.len();
            return Err(Error::input(format!("adapter {adapter} is not one of the {count} of this decoder")));
        }
        self.rows[row] = RowState { adapter, cached: 0 };
        Ok(())
    }

    /// Whether layers of the base are in memory one after another only.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(super) fn stream(&mut self, stream: bool) -> Result<()> {
        let policy = Policy { stream, ..Policy::default() };
        self.layers.streamer = WeightStreamer::new(policy, &self.layers.base)?;
        Ok(())
    }

    /// Starts every launch of a token by itself, on a device too.
    pub fn never_record(&mut self) {
        self.recorded = Recorded::Never;
    }

    /// Whether the launches of a token are recorded and started as one.
    pub fn is_recorded(&self) -> bool {
        matches!(self.recorded, Recorded::For(..))
    }

    /// Tokens that row 0 has read.
    pub fn position(&self) -> usize {
        self.position_of(0)
    }

    /// Tokens that `row` has read; 0 where there is no such row.
    pub fn position_of(&self, row: usize) -> usize {
        self.rows.get(row).map_or(0, |row| row.cached.saturating_sub(self.prompt_len(row.adapter)))
    }

    /// Virtual tokens in front of what rows of an adapter read.
    fn prompt_len(&self, adapter: usize) -> usize {
        self.adapters[adapter].bindings.prompt_len()
    }

    /// Tokens that a row can read in all; fewer where its prefix or its prompt takes more positions than that of
    /// adapter 0.
    pub fn capacity(&self) -> usize {
        self.cache.capacity() - self.prompt_len(0)
    }

    /// Tokens that `row` can still read.
    fn room(&self, row: usize) -> usize {
        let RowState { adapter, cached } = self.rows[row];
        let positions = self.layers.base.config.positions - self.adapters[adapter].bindings.prefix_len();
        self.cache.capacity().min(positions).saturating_sub(cached.max(self.prompt_len(adapter)))
    }

    /// Forgets all but the first `tokens` of row 0, and all other rows.
    pub fn rewind(&mut self, tokens: usize) {
        self.rows.iter_mut().skip(1).for_each(|row| row.cached = 0);
        self.truncate(0, tokens);
    }

    /// Forgets all but the first `tokens` of `row`; its prompt, too, where none are left.
    pub fn truncate(&mut self, row: usize, tokens: usize) {
        let Some(&RowState { adapter, cached }) = self.rows.get(row) else { return };
        let left = if tokens == 0 { 0 } else { tokens.saturating_add(self.prompt_len(adapter)) };
        self.rows[row].cached = cached.min(left);
    }

    /// Makes the first `rows` rows copies of row 0, at most as many as were prepared for.
    pub fn fork(&mut self, rows: usize) {
        let rows = rows.min(self.rows.len());
        (1..rows).for_each(|row| self.copy(0, row));
    }

    /// Makes each row of `to` a copy of row `from`: what it has read, and its adapters.
    ///
    /// # Errors
    /// When one of the rows does not exist.
    pub fn fork_to(&mut self, from: usize, to: &[usize]) -> Result<()> {
        self.check_row(from)?;
        to.iter().try_for_each(|&row| self.check_row(row))?;
        to.iter().for_each(|&row| self.copy(from, row));
        Ok(())
    }

    fn copy(&mut self, from: usize, to: usize) {
        self.cache.copy(from, to, self.rows[from].cached);
        self.rows[to] = self.rows[from];
    }

    /// Reads `ids` into row 0; returns the logits `(v)` that follow the last of them.
    ///
    /// # Errors
    /// When there is nothing to read, no room left, or an id is outside the vocabulary.
    pub fn feed(&mut self, ids: &[u32]) -> Result<&[f32]> {
        self.feed_rows(&[RowTokens { row: 0, ids }])
    }

    /// Reads one token into each of the first rows; returns the logits `(rows, v)` that follow them.
    ///
    /// # Errors
    /// As [`Decoder::feed`], and when there are more ids than rows.
    pub fn feed_each(&mut self, ids: &[u32]) -> Result<&[f32]> {
        let tokens = ids.chunks(1).enumerate();
        self.feed_rows(&tokens.map(|(row, ids)| RowTokens { row, ids }).collect::<Vec<_>>())
    }

    /// Reads tokens into any rows, as many as each is given; returns the logits `(sequences, v)` that follow the last
    /// token of each, in the order given. Rows of the same adapters are fastest side by side.
    ///
    /// # Errors
    /// As [`Decoder::feed`], and when a row is named twice or does not exist. Nothing is read then.
    pub fn feed_rows(&mut self, sequences: &[RowTokens]) -> Result<&[f32]> {
        self.read(sequences)?;
        self.read_logits(sequences.len())
    }

    /// As [`Decoder::feed_each`]; returns the choice of greedy decoding for each row, and no logits: a device sends few
    /// bytes then.
    ///
    /// # Errors
    /// As [`Decoder::feed_each`].
    pub fn feed_each_greedily(&mut self, ids: &[u32]) -> Result<Vec<Largest>> {
        let tokens = ids.chunks(1).enumerate();
        self.read(&tokens.map(|(row, ids)| RowTokens { row, ids }).collect::<Vec<_>>())?;
        let (count, vocab) = (ids.len(), self.layers.base.config.vocab);
        let largest = rows!(mut self.largest, count, argmax::NUMBERS);
        argmax::forward(rows!(self.logits, count, vocab), largest, vocab);
        let mut numbers: Vec<u32> = Vec::new();
        rows!(self.largest, count, argmax::NUMBERS).read_into(&mut numbers);
        self.layers.base.device.check()?;
        Ok(numbers.chunks(argmax::NUMBERS).filter_map(Largest::of).collect())
    }

    /// Reads tokens, and leaves the logits that follow them.
    fn read(&mut self, sequences: &[RowTokens]) -> Result<()> {
        self.check(sequences)?;
        let whole: Vec<Cow<[u32]>> = sequences.iter().map(|sequence| self.after_prompt(sequence)).collect();
        on_pool(|| {
            let single = whole.iter().all(|ids| ids.len() == 1);
            let most = if single { self.most } else { self.most.min(size::CHUNK) };
            let rows = sequences.iter().map(|sequence| sequence.row);
            let mut left: Vec<RowTokens> =
                rows.zip(&whole).map(|(row, ids)| RowTokens { row, ids }).collect();
            let mut done = 0;
            while done < left.len() {
                let (pieces, ended) = next_pieces(&mut left[done..], most);
                self.pass(&pieces, done)?;
                done += ended;
            }
            Ok(())
        })
    }

    /// The tokens of a sequence, after those virtual ones of its prompt that its row has not read.
    fn after_prompt<'a>(&self, sequence: &RowTokens<'a>) -> Cow<'a, [u32]> {
        let RowState { adapter, cached } = self.rows[sequence.row];
        let (vocab, prompt) = (self.layers.base.config.vocab, self.prompt_len(adapter));
        if cached >= prompt {
            return Cow::Borrowed(sequence.ids);
        }
        let ids = (vocab + cached..vocab + prompt).map(|id| id as u32);
        Cow::Owned(ids.chain(sequence.ids.iter().copied()).collect())
    }

    fn check_row(&self, row: usize) -> Result<()> {
        let rows = self.rows.len();
        if row < rows {
            return Ok(());
        }
        Err(Error::input(format!("row {row} is not one of the {rows} that this decoder was prepared for")))
    }

    fn check(&self, sequences: &[RowTokens]) -> Result<()> {
        let vocab = self.layers.base.config.vocab;
        let ids = sequences.iter().flat_map(|sequence| sequence.ids);
        if let Some(id) = ids.into_iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::input(format!(
                "token {id} is outside the vocabulary of {vocab} of base {}; give ids below that",
                self.layers.base.name
            )));
        }
        let mut named = vec![false; self.rows.len()];
        for &RowTokens { row, ids } in sequences {
            self.check_row(row)?;
            if std::mem::replace(&mut named[row], true) {
                return Err(Error::input(format!(
                    "row {row} is given tokens twice; give all of them at once"
                )));
            }
            let (tokens, room) = (ids.len(), self.room(row));
            if tokens == 0 || tokens > room {
                return Err(Error::input(format!(
                    "{tokens} tokens do not fit where 1 to {room} do; shorten the prompt or lower --max-new-tokens"
                )));
            }
        }
        if sequences.is_empty() {
            return Err(Error::input("no row is given any tokens; give at least one"));
        }
        Ok(())
    }

    /// The first `count` rows of the logits.
    fn read_logits(&mut self, count: usize) -> Result<&[f32]> {
        let logits = rows!(self.logits, count, self.layers.base.config.vocab);
        if logits.device().is_host_visible() {
            return Ok(logits.host());
        }
        logits.read_into(&mut self.on_host);
        self.layers.base.device.check()?;
        Ok(&self.on_host)
    }

    /// Cached keys and values of row 0 at a layer, `(position, c)` each.
    pub(super) fn keys_and_values(&self, layer: usize) -> (Vec<f32>, Vec<f32>) {
        self.cache.layers[layer].first_row(self.position())
    }
}

impl DecoderAdapter {
    fn new(
        base: &Base,
        streamer: &mut WeightStreamer,
        bindings: AdapterBindings,
        values: Vec<f32>,
    ) -> Result<Self> {
        let (device, activations) = (base.device, base.activations);
        let mut arenas = Arenas::real(None).on(device);
        let mut prefix = PrefixState::new(&bindings, &base.config, activations, false, &mut arenas)?;
        let (mut bindings, mut values) = (bindings, values);
        values.resize(bindings.store_len(), 0.0);
        let mut values = Buffer::on(device, &values)?;
        if let Some(mut scales) = OutputScales::new(&bindings, &mut arenas)? {
            scales.derive(base, streamer, &bindings, values.view_mut());
        }
        if device.kind().wants_transposed_factors {
            bindings.transpose_factors(values.view_mut().host(), &base.config);
        }
        if let Some(prefix) = &mut prefix {
            prefix.refresh(values.view());
        }
        Ok(Self { bindings, values, prefix })
    }

    /// Keys and values of the prefix `(p, 2 l c)`, and p.
    fn prefix(&self) -> Option<(View<'_>, usize)> {
        let prefix = self.prefix.as_ref()?;
        Some((prefix.view(self.values.view()), self.bindings.prefix_len()))
    }
}

/// Memory for passes with any of `adapters`; a device's scratch is reserved, too.
fn workspace(base: &Base, adapters: &[DecoderAdapter], size: DecoderSize) -> Result<ActivationBuffers> {
    let bindings: Vec<&AdapterBindings> = adapters.iter().map(|adapter| &adapter.bindings).collect();
    let (config, activations) = (&base.config, base.activations);
    let types = FactorTypes { activations, base: base.dtype };
    base.device.reserve(size.scratch(config, &bindings, ScratchPlace::Device(types)))?;
    size.workspace(config, &bindings, activations, &mut Arenas::real(None).on(base.device))
}
