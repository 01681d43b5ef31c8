//! The whole model: embedding, blocks, head and loss, forwards and backwards over planned buffers.

use std::sync::Arc;

use engraft_adapters::rng;

use crate::{
    data::{Batch, NO_LOSS},
    error::{Error, Result},
    kernels::{
        adapted_linear::Dropout,
        device::{Arena, Buffer, DType::F32, TableRow, View},
        embed,
        head_loss::{self, Supervised},
        layernorm,
        matmul::Matrix,
    },
};

use super::{
    Base, Limits,
    block::{Block, Gradients, Saved, rows},
    buffers::{BackwardWork, BlockBuffers, HeadWork, Inputs, Work},
    wiring::Wiring,
};

/// Which blocks are computed again in the backward instead of being kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recompute {
    /// None: every block keeps its activations.
    #[default]
    None,
    /// Every k-th block is computed again, the others are kept; 1 is the same as all.
    Every(usize),
    /// All: only the inputs of blocks are kept.
    All,
}

impl Recompute {
    /// Whether block `layer` is computed again.
    pub fn includes(self, layer: usize) -> bool {
        match self {
            Self::None => false,
            Self::Every(k) => (layer + 1).is_multiple_of(k.max(1)),
            Self::All => true,
        }
    }
}

/// What trades memory against time and changes no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// Blocks to compute again.
    pub recompute: Recompute,
    /// Rows of logits in memory at a time.
    pub head_rows: usize,
}

impl Policy {
    /// Rows of logits where nothing else is asked for: 103 MB at GPT-2's vocabulary. The head is widened
    /// twice for each chunk; with half as many rows a step of gpt2 at 4 x 512 is 2% slower.
    pub const HEAD_ROWS: usize = 512;
}

impl Default for Policy {
    fn default() -> Self {
        Self { recompute: Recompute::None, head_rows: Self::HEAD_ROWS }
    }
}

/// Trained values as a forward needs them.
#[derive(Clone, Copy)]
pub struct Trained<'a> {
    /// The flat store.
    pub values: View<'a>,
    /// Keys and values of the prefix `(p, 2 l c)`.
    pub prompt: Option<View<'a>>,
}

/// Losses of the supervised tokens of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LossSum {
    /// Their sum, in f64 over FP32 losses, in the order of the tokens.
    pub sum: f64,
    /// How many there are.
    pub tokens: usize,
}

/// How a training pass weighs and disturbs a micro-batch.
#[derive(Debug, Clone, Copy)]
pub struct Pass {
    /// Factor of every token's gradient: one over the supervised tokens of the optimizer step.
    pub factor: f32,
    /// Label smoothing.
    pub smoothing: f32,
    /// Dropout in front of every A.
    pub dropout: Dropout,
}

impl Pass {
    /// Dropout of a micro-batch: rows are numbered within the step, so that cutting a batch into
    /// micro-batches changes no mask.
    pub fn dropout(p: f64, seed: u64, step: u64, first_row: usize, seq_len: usize, stride: usize) -> Dropout {
        let key = rng::key(&[seed, rng::name("dropout"), step]);
        Dropout { key, p: p as f32, first_row, seq_len: seq_len.max(1), stride }
    }
}

/// What only training holds.
struct Backward {
    work: BackwardWork,
    /// Memory of each block that is kept; `None` for one that is computed again.
    kept: Vec<Option<BlockBuffers>>,
}

/// A base prepared for micro-batches up to a limit.
pub struct Stack {
    base: Arc<Base>,
    wiring: Wiring,
    limits: Limits,
    inputs: Inputs,
    /// Inputs of the blocks and output of the last, `(n, c)`: l + 1 in training, else two in turn.
    residual: Vec<Buffer>,
    /// Memory of blocks that are not kept.
    shared: Option<BlockBuffers>,
    work: Work,
    head: HeadWork,
    backward: Option<Backward>,
    table: Vec<TableRow>,
}

impl Stack {
    /// Prepares `base` with `wiring` for micro-batches up to `limits`; `training` adds what a backward
    /// needs.
    ///
    /// # Errors
    /// When rows are longer than the base's positions allow, or memory cannot be reserved.
    pub fn new(
        base: Arc<Base>,
        wiring: Wiring,
        limits: Limits,
        policy: Policy,
        training: bool,
    ) -> Result<Self> {
        check_length(&base, &wiring, limits.tokens)?;
        let config = &base.config;
        let layers = config.layers;
        let mut table = Vec::new();
        let ranks = |layer: usize| std::array::from_fn(|site| wiring.ranks(layer, site));
        let most: [usize; 4] =
            std::array::from_fn(|site| (0..layers).map(|layer| wiring.ranks(layer, site)).max().unwrap_or(0));
        let lowest = wiring.lowest();
        let kept = |layer: usize| training && layer >= lowest && !policy.recompute.includes(layer);
        let ((residual, blocks, shared), rows) = Arena::build("saved", |arena| {
            let inputs = if training { layers + 1 } else { 2 };
            let residual = (0..inputs)
                .map(|layer| arena.take(format!("residual {layer}"), F32, &[limits.cells(), config.width]))
                .collect::<Result<Vec<_>>>()?;
            let blocks = (0..layers)
                .map(|layer| {
                    let name = format!("block {layer}");
                    kept(layer)
                        .then(|| BlockBuffers::cut(arena, &name, config, limits, ranks(layer)))
                        .transpose()
                })
                .collect::<Result<Vec<_>>>()?;
            // An evaluation borrows one block for all layers, so a kept one serves only if all are alike.
            let alike = (0..layers).all(|layer| ranks(layer) == most);
            let shared = match alike && blocks.iter().all(Option::is_some) {
                true => None,
                false => Some(BlockBuffers::cut(arena, "shared block", config, limits, most)?),
            };
            Ok((residual, blocks, shared))
        })?;
        table.extend(rows);
        let ((work, head, inputs, back), rows) = Arena::build("workspace", |arena| {
            let work = Work::cut(arena, config, limits)?;
            let head = HeadWork::cut(arena, config, limits, policy.head_rows)?;
            let inputs = Inputs::cut(arena, limits)?;
            let back = training.then(|| BackwardWork::cut(arena, config, limits, &wiring)).transpose()?;
            Ok((work, head, inputs, back))
        })?;
        table.extend(rows);
        let backward = back.map(|work| Backward { work, kept: blocks });
        Ok(Self { base, wiring, limits, inputs, residual, shared, work, head, backward, table })
    }

    /// The base it runs on.
    pub fn base(&self) -> &Arc<Base> {
        &self.base
    }

    /// Every buffer it holds.
    pub fn table(&self) -> &[TableRow] {
        &self.table
    }

    /// Losses of a micro-batch, without gradients, dropout or smoothing.
    ///
    /// # Errors
    /// When the batch is larger than the limits, or a token is outside the vocabulary.
    pub fn loss(&mut self, trained: Trained, batch: &Batch) -> Result<LossSum> {
        let supervised = self.upload(batch)?;
        if supervised == 0 {
            return Ok(LossSum::default());
        }
        self.embed(batch);
        let (mut buffers, owner) = self.borrow_block()?;
        for layer in 0..self.base.config.layers {
            let (from, to) = (layer % 2, (layer + 1) % 2);
            let (base, inputs) = (Arc::clone(&self.base), &self.inputs);
            let block = block(&base, &self.wiring, inputs, trained, layer, batch, Dropout::NONE);
            let (x, y) = two(&mut self.residual, from, to);
            let n = batch.ids.len();
            let c = base.config.width;
            let saved = block.forward(rows!(x, n, c), buffers, &mut self.work, None, rows!(mut y, n, c));
            buffers = saved.discard();
        }
        self.return_block(buffers, owner);
        let last = self.base.config.layers % 2;
        let none = Pass { factor: 0.0, smoothing: 0.0, dropout: Dropout::NONE };
        Ok(self.head(batch, last, supervised, none, false))
    }

    /// Losses of a micro-batch, and the gradients of all trainables added to `to`.
    ///
    /// # Errors
    /// As [`Stack::loss`]; and when the stack was not made for training.
    pub fn loss_and_gradients(
        &mut self,
        trained: Trained,
        to: &mut Gradients,
        batch: &Batch,
        pass: Pass,
    ) -> Result<LossSum> {
        let supervised = self.upload(batch)?;
        if supervised == 0 {
            return Ok(LossSum::default());
        }
        self.embed(batch);
        let saved = self.forward(trained, batch, pass.dropout)?;
        let losses = self.head(batch, self.base.config.layers, supervised, pass, true);
        self.backward(trained, to, batch, pass.dropout, saved)?;
        Ok(losses)
    }

    /// Forward through all blocks, keeping what the policy says.
    fn forward(&mut self, trained: Trained, batch: &Batch, dropout: Dropout) -> Result<Vec<Option<Saved>>> {
        let (n, base) = (batch.ids.len(), Arc::clone(&self.base));
        let c = base.config.width;
        let mut saved = Vec::with_capacity(base.config.layers);
        for layer in 0..base.config.layers {
            let block = block(&base, &self.wiring, &self.inputs, trained, layer, batch, dropout);
            let own = self.backward.as_mut().and_then(|backward| backward.kept[layer].take());
            let keep = own.is_some();
            let buffers = own.or_else(|| self.shared.take()).ok_or_else(lost)?;
            let (x, y) = two(&mut self.residual, layer, layer + 1);
            let state = block.forward(rows!(x, n, c), buffers, &mut self.work, None, rows!(mut y, n, c));
            if keep {
                saved.push(Some(state));
            } else {
                self.shared = Some(state.discard());
                saved.push(None);
            }
        }
        Ok(saved)
    }

    /// Backward through the blocks from the top to the lowest adapter.
    fn backward(
        &mut self,
        trained: Trained,
        to: &mut Gradients,
        batch: &Batch,
        dropout: Dropout,
        mut saved: Vec<Option<Saved>>,
    ) -> Result<()> {
        let (n, base) = (batch.ids.len(), Arc::clone(&self.base));
        let c = base.config.width;
        let lowest = self.wiring.lowest();
        let backward = self.backward.as_mut().ok_or_else(lost)?;
        for layer in (lowest..base.config.layers).rev() {
            let block = block(&base, &self.wiring, &self.inputs, trained, layer, batch, dropout);
            let kept = saved.pop().flatten();
            let recomputed = kept.is_none();
            let state = match kept {
                Some(state) => state,
                None => {
                    // The block's output is written once more, with the same bits, where it was.
                    let buffers = self.shared.take().ok_or_else(lost)?;
                    let (x, y) = two(&mut self.residual, layer, layer + 1);
                    block.forward(rows!(x, n, c), buffers, &mut self.work, None, rows!(mut y, n, c))
                }
            };
            let x = rows!(self.residual[layer], n, c);
            let buffers = block.backward(x, state, &mut self.work, &mut backward.work, to, layer > lowest);
            if recomputed {
                self.shared = Some(buffers);
            } else {
                backward.kept[layer] = Some(buffers);
            }
        }
        Ok(())
    }

    fn embed(&mut self, batch: &Batch) {
        let (n, c) = (batch.ids.len(), self.base.config.width);
        let weights = &self.base.weights;
        let (ids, positions) = (self.inputs.ids.view().slice(0, n), self.inputs.positions.view().slice(0, n));
        let x = rows!(mut self.residual[0], n, c);
        embed::forward(ids, positions, weights.wte.view(), weights.wpe.view(), x, c);
    }

    /// Last layer norm, head and loss; with `gradient` also the gradient of the last block's output.
    fn head(&mut self, batch: &Batch, last: usize, supervised: usize, pass: Pass, gradient: bool) -> LossSum {
        let (n, c) = (batch.ids.len(), self.base.config.width);
        let (config, weights) = (&self.base.config, &self.base.weights);
        let norm = layernorm::Norm {
            gain: weights.ln_f.gain.view(),
            bias: weights.ln_f.bias.view(),
            epsilon: config.layer_norm_eps,
        };
        let x = rows!(self.residual[last], n, c);
        layernorm::forward(x, norm, rows!(mut self.work.normed, n, c), rows!(mut self.head.stats, n, 2));
        let input = Supervised {
            hidden: rows!(self.work.normed, n, c),
            rows: rows!(self.inputs.rows, supervised, 1),
            targets: rows!(self.inputs.targets, supervised, 1),
            smoothing: pass.smoothing,
        };
        let work =
            head_loss::Work { gathered: self.head.gathered.view_mut(), logits: self.head.logits.view_mut() };
        let losses = rows!(mut self.head.losses, supervised, 1);
        let head = head_matrix(&self.base);
        let back = self.backward.as_mut().filter(|_| gradient).map(|backward| &mut backward.work);
        match back {
            None => head_loss::forward_backward(input, head, work, losses, None),
            Some(back) => {
                let d_normed = rows!(mut back.narrow, n, c);
                head_loss::forward_backward(input, head, work, losses, Some((d_normed, pass.factor)));
                rows!(mut back.grad, n, c).clear();
                let (d_normed, stats) = (rows!(back.narrow, n, c), rows!(self.head.stats, n, 2));
                layernorm::backward(d_normed, x, stats, norm, rows!(mut back.grad, n, c));
            }
        }
        let losses: Vec<f32> = rows!(self.head.losses, supervised, 1).to_vec();
        LossSum { sum: losses.iter().map(|&loss| f64::from(loss)).sum(), tokens: supervised }
    }

    /// Brings a micro-batch to the device; returns how many tokens are supervised.
    fn upload(&mut self, batch: &Batch) -> Result<usize> {
        if batch.rows > self.limits.rows || batch.seq_len > self.limits.tokens {
            return Err(Error::failed(format!(
                "a micro-batch of {} x {} tokens is larger than the {} x {} that memory was planned for; please report this",
                batch.rows, batch.seq_len, self.limits.rows, self.limits.tokens
            )));
        }
        let config = &self.base.config;
        let vocab = config.vocab;
        let outside = batch.ids.iter().copied().find(|&id| id as usize >= vocab);
        let target = batch
            .targets
            .iter()
            .copied()
            .find(|&t| t != NO_LOSS && !(0..vocab as i64).contains(&i64::from(t)));
        if let Some(id) = outside.map(i64::from).or(target.map(i64::from)) {
            return Err(Error::input(format!(
                "token {id} is outside the vocabulary of {vocab} of base {}; tokenise the data for this base",
                self.base.name
            )));
        }
        // Positions of text start behind the prefix.
        let shift = self.wiring.prefix_len() as u32;
        let positions: Vec<u32> = batch.positions.iter().map(|position| position + shift).collect();
        let supervised: Vec<u32> = (0u32..)
            .zip(&batch.targets)
            .filter(|(_, target)| **target != NO_LOSS)
            .map(|(row, _)| row)
            .collect();
        let targets: Vec<i32> = batch.targets.iter().copied().filter(|&target| target != NO_LOSS).collect();
        self.inputs.ids.view_mut().upload(&batch.ids);
        self.inputs.positions.view_mut().upload(&positions);
        self.inputs.starts.view_mut().upload(&batch.starts);
        self.inputs.rows.view_mut().upload(&supervised);
        self.inputs.targets.view_mut().upload(&targets);
        Ok(supervised.len())
    }

    /// Block memory for a pass that keeps nothing, and the block it was borrowed from.
    fn borrow_block(&mut self) -> Result<(BlockBuffers, Option<usize>)> {
        if let Some(buffers) = self.shared.take() {
            return Ok((buffers, None));
        }
        let kept = &mut self.backward.as_mut().ok_or_else(lost)?.kept;
        let (owner, slot) = kept.iter_mut().enumerate().find(|(_, slot)| slot.is_some()).ok_or_else(lost)?;
        Ok((slot.take().ok_or_else(lost)?, Some(owner)))
    }

    fn return_block(&mut self, buffers: BlockBuffers, owner: Option<usize>) {
        match (owner, &mut self.backward) {
            (Some(owner), Some(backward)) => backward.kept[owner] = Some(buffers),
            _ => self.shared = Some(buffers),
        }
    }
}

/// Only an earlier error in the middle of a pass can leave memory unaccounted for.
fn lost() -> Error {
    Error::failed("an earlier failure left the model without workspace; start again")
}

/// The head: its own matrix, or the token embedding `(v, c)`.
pub(super) fn head_matrix(base: &Base) -> Matrix<'_> {
    let data = base.weights.head.as_ref().unwrap_or(&base.weights.wte).view();
    Matrix { data, rows: base.config.vocab, cols: base.config.width }
}

/// Rows of `tokens` behind the prefix must fit the position embedding.
pub(super) fn check_length(base: &Base, wiring: &Wiring, tokens: usize) -> Result<()> {
    let (positions, prefix) = (base.config.positions, wiring.prefix_len());
    if tokens + prefix <= positions {
        return Ok(());
    }
    let behind = if prefix == 0 { String::new() } else { format!(" behind a prefix of {prefix}") };
    Err(Error::input(format!(
        "a row of {tokens} tokens{behind} is longer than the {positions} positions of base {}; use --seq-len {} or less",
        base.name,
        positions.saturating_sub(prefix)
    )))
}

/// Block `layer` as it sees this micro-batch.
fn block<'a>(
    base: &'a Base,
    wiring: &'a Wiring,
    inputs: &'a Inputs,
    trained: Trained<'a>,
    layer: usize,
    batch: &Batch,
    dropout: Dropout,
) -> Block<'a> {
    Block {
        config: &base.config,
        layer,
        weights: &base.weights.blocks[layer],
        deltas: &wiring.layers[layer],
        values: trained.values,
        prompt: trained.prompt.map(|prompt| (prompt, wiring.prefix_len())),
        starts: inputs.starts.view().slice(0, batch.ids.len()),
        rows: batch.rows,
        tokens: batch.seq_len,
        dropout,
    }
}

/// Two different buffers of a list, the first to read, the second to write.
fn two(list: &mut [Buffer], read: usize, write: usize) -> (&Buffer, &mut Buffer) {
    if read < write {
        let (left, right) = list.split_at_mut(write);
        (&left[read], &mut right[0])
    } else {
        let (left, right) = list.split_at_mut(read);
        (&right[0], &mut left[write])
    }
}
