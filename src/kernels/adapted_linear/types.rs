//! Types of the op: a layer, its deltas and vectors, dropout, and the buffers of both directions.

use std::ops::Range;

use crate::{
    device::{View, ViewMut},
    kernels::{activation::Activation, matmul::Matrix},
};

/// A frozen linear layer.
#[derive(Clone, Copy)]
pub struct Layer<'a> {
    /// Conv1D weight `(in, out)`.
    pub weight: Matrix<'a>,
    /// FP16 bias `(out)`.
    pub bias: View<'a>,
}

/// A vector in the flat buffers: its values, and its gradient at the same offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vector {
    /// Where it begins in the flat buffers.
    pub at: usize,
    /// Whether it has no gradient; the buffer of gradients may then be too short for it.
    pub frozen: bool,
}

impl Vector {
    /// The trainable vector that begins at `at`.
    pub const fn trained(at: usize) -> Self {
        Self { at, frozen: false }
    }

    /// The frozen vector that begins at `at`.
    pub const fn frozen(at: usize) -> Self {
        Self { at, frozen: true }
    }
}

/// A low-rank delta of a linear layer. [`Delta::default`] has rank 0 and scale 1, and no optional part.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    /// Where `A (r, in)` begins in the flat buffers.
    pub a: usize,
    /// Where `B (columns, r)` begins in the flat buffers.
    pub b: usize,
    /// Rank r, the rows of A.
    pub rank: usize,
    /// Output columns that the delta adds to.
    pub columns: Range<usize>,
    /// Factor of the delta.
    pub scale: f32,
    /// Whether A is stored as `(in, r)` and B as `(r, columns)`, which products of few rows read faster. For CPUs, and
    /// [`super::forward`] alone.
    pub transposed: bool,
    /// Tokens `0 .. n` that the delta is for; all of them without a range.
    pub tokens: Option<Range<usize>>,
    /// `d (r)`: multiplies `drop(x) A^T`.
    pub d: Option<Vector>,
    /// `e (columns)`: multiplies the columns of the delta.
    pub e: Option<Vector>,
    /// Whether A gets no gradient.
    pub a_frozen: bool,
    /// Whether B gets no gradient.
    pub b_frozen: bool,
    /// Number that tells this delta's dropout masks from those of others; `a` where there is none. Deltas that share A
    /// need one each, or they drop the same elements.
    pub mask: Option<usize>,
}

impl Default for Delta {
    fn default() -> Self {
        Self {
            a: 0,
            b: 0,
            rank: 0,
            columns: 0..0,
            scale: 1.0,
            transposed: false,
            tokens: None,
            d: None,
            e: None,
            a_frozen: false,
            b_frozen: false,
            mask: None,
        }
    }
}

impl Delta {
    /// The tokens of `n` that the delta is for.
    ///
    /// # Panics
    /// When its range leaves them.
    pub fn tokens_of(&self, n: usize) -> Range<usize> {
        let tokens = self.tokens.clone().unwrap_or(0..n);
        assert!(tokens.start <= tokens.end && tokens.end <= n, "a delta is for tokens that are not there");
        tokens
    }

    /// Whether d or e is present.
    pub fn scales(&self) -> bool {
        self.d.is_some() || self.e.is_some()
    }

    /// Whether anything of it gets a gradient.
    pub fn trains(&self) -> bool {
        let trained = |vector: Option<Vector>| vector.is_some_and(|vector| !vector.frozen);
        !self.a_frozen || !self.b_frozen || trained(self.d) || trained(self.e)
    }

    /// What its dropout masks are told from others by.
    pub(super) fn mask_id(&self) -> usize {
        self.mask.unwrap_or(self.a)
    }
}

/// Floats of `drop(x) A^T` of all `deltas` for `n` tokens: a delta has `(tokens, r)` of them, after those of the delta
/// before it.
pub fn xa_len(deltas: &[Delta], n: usize) -> usize {
    deltas.iter().map(|delta| delta.rank * delta.tokens_of(n).len()).sum()
}

/// A vector that multiplies some columns of a layer's input or output, for some tokens; the others stay as they are.
#[derive(Debug, Clone, PartialEq)]
pub struct Scaling {
    /// The factors `(columns)`.
    pub vector: Vector,
    /// Columns of the input, or of the output.
    pub columns: Range<usize>,
    /// Tokens `0 .. n` that it is for; all of them without a range.
    pub tokens: Option<Range<usize>>,
}

/// Whether g multiplies the bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BiasPlace {
    /// `g * (x W + b)`, as in IA3.
    Inside,
    /// `g * (x W) + b`, as in DoRA.
    #[default]
    Outside,
}

/// The vectors of a layer beside its deltas. Trainable scalings of one side may not overlap; frozen ones multiply.
#[derive(Debug, Clone, Copy, Default)]
pub struct SiteVectors<'a> {
    /// `u`: multiplies the input of the frozen product, not that of the deltas.
    pub u: &'a [Scaling],
    /// `g`: multiplies the sum of the frozen product and the deltas.
    pub g: &'a [Scaling],
    /// An FP32 bias `(out)` in place of the layer's.
    pub bias: Option<Vector>,
    /// Whether g multiplies the bias.
    pub bias_place: BiasPlace,
}

impl SiteVectors<'_> {
    /// A layer without any of the vectors.
    pub const NONE: Self = Self { u: &[], g: &[], bias: None, bias_place: BiasPlace::Outside };

    /// Whether a forward needs [`ForwardBuffers::scaled_x`].
    pub fn needs_scaled_x(&self) -> bool {
        !self.u.is_empty()
    }

    /// Whether a forward that a backward follows needs [`ForwardBuffers::product`].
    pub fn keeps_product(&self) -> bool {
        self.g.iter().any(|scaling| !scaling.vector.frozen)
    }

    /// Whether a backward needs [`BackwardBuffers::d_product`].
    pub fn needs_d_product(&self) -> bool {
        !self.g.is_empty()
    }

    /// Whether a backward needs [`BackwardBuffers::dx`] whoever asks for it.
    pub fn needs_dx(&self) -> bool {
        self.u.iter().any(|scaling| !scaling.vector.frozen)
    }
}

/// A frozen layer with its adapters.
#[derive(Clone, Copy)]
pub struct AdaptedLinear<'a> {
    /// Frozen weight and bias.
    pub layer: Layer<'a>,
    /// Low-rank deltas on ranges of its columns.
    pub deltas: &'a [Delta],
    /// Vectors that scale the layer as a whole.
    pub vectors: SiteVectors<'a>,
    /// The flat buffer that holds all factors and vectors, FP32.
    pub values: View<'a>,
    /// Dropout of the deltas' input.
    pub dropout: Dropout,
}

impl<'a> AdaptedLinear<'a> {
    /// A layer with `deltas` and no vectors of its own.
    pub fn new(layer: Layer<'a>, deltas: &'a [Delta], values: View<'a>, dropout: Dropout) -> Self {
        Self { layer, deltas, vectors: SiteVectors::NONE, values, dropout }
    }

    pub(super) fn inputs(&self) -> usize {
        self.layer.weight.rows
    }

    pub(super) fn outputs(&self) -> usize {
        self.layer.weight.cols
    }
}

/// What a forward of n tokens writes.
pub struct ForwardBuffers<'a> {
    /// `drop(x) A^T` of every delta, [`xa_len`] floats.
    pub xa: ViewMut<'a>,
    /// The result `(n, out)`.
    pub y: ViewMut<'a>,
    /// Workspace for `u * x (n, in)`, of y's type, where there is a u.
    pub scaled_x: Option<ViewMut<'a>>,
    /// What g multiplies `(n, out)`, of y's type: kept for the gradient of a trainable g, else not needed.
    pub product: Option<ViewMut<'a>>,
    /// A function f, and the place of `f(y) (n, out)`, where that is asked for too. A device may compute f before it
    /// rounds y.
    pub activated: Option<(Activation, ViewMut<'a>)>,
}

impl<'a> ForwardBuffers<'a> {
    /// The buffers of a layer without vectors.
    pub fn new(xa: ViewMut<'a>, y: ViewMut<'a>) -> Self {
        Self { xa, y, scaled_x: None, product: None, activated: None }
    }
}

/// What the forward of a layer norm and a layer writes as one op.
pub struct NormedForward<'a> {
    /// Workspace for the norm's output and what follows it, `(n, in + 16)`.
    pub normed: ViewMut<'a>,
    /// Mean and rstd of each row `(n, 2)`.
    pub stats: ViewMut<'a>,
    /// As [`ForwardBuffers::xa`].
    pub xa: ViewMut<'a>,
    /// As [`ForwardBuffers::y`].
    pub y: ViewMut<'a>,
    /// As [`ForwardBuffers::activated`].
    pub activated: Option<(Activation, ViewMut<'a>)>,
}

/// What the backward of a layer norm and a layer writes as one op.
pub struct NormedBackward<'a> {
    /// The flat buffer that grows by the gradients of all trainables, FP32.
    pub grads: ViewMut<'a>,
    /// Workspace for the gradient that the product gives the norm's output `(n, in)`.
    pub d_normed: ViewMut<'a>,
    /// Grows by the gradient of the norm's input `(n, in)`.
    pub dx: ViewMut<'a>,
}

/// What a backward reads of its forward.
#[derive(Clone, Copy)]
pub struct SavedProducts<'a> {
    /// [`ForwardBuffers::xa`].
    pub xa: View<'a>,
    /// [`ForwardBuffers::product`].
    pub product: Option<View<'a>>,
    /// A function f and z `(n, in)`, where the input was f(z): dx then is the gradient of z.
    pub input_of: Option<(Activation, View<'a>)>,
}

impl<'a> SavedProducts<'a> {
    /// Of a layer without vectors.
    pub fn new(xa: View<'a>) -> Self {
        Self { xa, product: None, input_of: None }
    }
}

/// What a backward of n tokens writes.
pub struct BackwardBuffers<'a> {
    /// The flat buffer that grows by the gradients of all trainables, FP32.
    pub grads: ViewMut<'a>,
    /// Workspace of [`xa_len`] floats.
    pub d_xa: ViewMut<'a>,
    /// The gradient of the input `(n, in)`, where it is asked for; the gradient of u needs it.
    pub dx: Option<ViewMut<'a>>,
    /// Workspace for `g * dy (n, out)`, of dy's type, where there is a g.
    pub d_product: Option<ViewMut<'a>>,
}

impl<'a> BackwardBuffers<'a> {
    /// The buffers of a layer without vectors.
    pub fn new(grads: ViewMut<'a>, d_xa: ViewMut<'a>, dx: Option<ViewMut<'a>>) -> Self {
        Self { grads, d_xa, dx, d_product: None }
    }
}

/// Which elements of a delta's input are dropped: a pure function of seed, step, delta and element,
/// so that recomputing a block replays it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Key of step and seed; [`Delta::mask`] is mixed in.
    pub key: u64,
    /// Probability of dropping an element; 0 turns dropout off.
    pub p: f32,
    /// Number of this micro-batch's first row within the optimizer step.
    pub first_row: usize,
    /// Length `t` of the rows of this micro-batch.
    pub seq_len: usize,
    /// Length that element numbers are counted with, the same for every micro-batch of a run.
    pub stride: usize,
}

impl Dropout {
    /// Keeps every element.
    pub const NONE: Self = Self { key: 0, p: 0.0, first_row: 0, seq_len: 1, stride: 1 };

    /// The key of the delta with these masks.
    #[inline(always)]
    pub(super) fn key_of(&self, mask: usize) -> u64 {
        self.key ^ (mask as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// The factor of input element `column` of token `token` of n, of the delta with these masks.
    #[inline(always)]
    pub(super) fn factor(&self, mask: usize, inputs: usize, token: usize, column: usize) -> f32 {
        let token = (self.first_row + token / self.seq_len) * self.stride + token % self.seq_len;
        let kept = engraft_util::rng::uniform(self.key_of(mask), (token * inputs + column) as u64) >= self.p;
        if kept { 1.0 / (1.0 - self.p) } else { 0.0 }
    }

    /// The same masks for a delta whose tokens begin at `first`.
    ///
    /// # Panics
    /// When it drops elements and that is inside a row.
    pub(super) fn starting_at(self, first: usize) -> Self {
        if first == 0 || self.p == 0.0 {
            return self;
        }
        assert_eq!(first % self.seq_len, 0, "a delta with dropout begins at a row of the batch");
        Self { first_row: self.first_row + first / self.seq_len, ..self }
    }
}

/// What the scratch of a CPU thread depends on.
#[derive(Debug, Clone, Copy)]
pub struct DeltaScratch {
    /// Tokens n at a time.
    pub tokens: usize,
    /// Inputs or outputs of the widest layer.
    pub widest: usize,
    /// Largest rank of a delta.
    pub rank: usize,
    /// Whether deltas drop elements of their input.
    pub dropout: bool,
    /// Whether a delta has d or e.
    pub vectors: bool,
}
