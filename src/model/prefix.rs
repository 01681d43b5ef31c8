//! The prefix of a model: keys and values for every layer, learned directly or through a small network.

use std::sync::Arc;

use crate::{
    device::{
        Buffer,
        DType::{self, F32},
        View, ViewMut,
        arena::{Arenas, Placement},
        cpu::on_pool,
    },
    error::Result,
    kernels::{
        activation::{self, Activation},
        adamw, elementwise,
        matmul::{self, DenseGradients, DenseShape},
    },
};

use super::{
    Base, Config, Decoder,
    bindings::{AdapterBindings, PrefixBinding, PrefixSource, Projection},
};

/// Keys and values `(p, 2 l c)` of a prefix, their gradient, and the network that yields them if there is one.
///
/// The layout is PEFT's: vectors 2l and 2l + 1 of a row are key and value of layer l.
pub struct PrefixState {
    length: usize,
    source: PrefixSource,
    /// `(p, 2 l c)`; used only with a network.
    values: Buffer,
    /// `(p, 2 l c)` in the type of activations that are not FP32.
    cast: Option<Buffer>,
    /// `(p, 2 l c)`; empty unless trained.
    gradient: Buffer,
    /// Inside of the network, `(p, hidden)`: before and after tanh, and its gradient.
    hidden: [Buffer; 3],
    /// Width c of the base.
    width: usize,
    /// Values of a virtual token: 2 l c, keys and values of l layers.
    row: usize,
}

impl PrefixState {
    /// Prepares the prefix of bindings, if they have one, with memory from `arenas`, for activations of a type.
    ///
    /// # Errors
    /// When memory cannot be reserved.
    pub fn new(
        bindings: &AdapterBindings,
        config: &Config,
        activations: DType,
        training: bool,
        arenas: &mut Arenas,
    ) -> Result<Option<Self>> {
        let Some(PrefixBinding { length, source }) = bindings.prefix else { return Ok(None) };
        let whole = [length, 2 * config.layers * config.width];
        let (projected, hidden) = match source {
            PrefixSource::Direct(_) => ([0, 0], 0),
            PrefixSource::Projected(network) => (whole, network.hidden),
        };
        let state = arenas.build("prefix", Placement::Memory, |arena| {
            Ok(Self {
                length,
                source,
                values: arena.take("projected", F32, &projected)?,
                cast: match activations {
                    F32 => None,
                    other => Some(arena.take("in activations", other, &whole)?),
                },
                gradient: arena.take("d prefix", F32, if training { &whole } else { &[0, 0] })?,
                hidden: [
                    arena.take("before tanh", F32, &[length, hidden])?,
                    arena.take("after tanh", F32, &[length, hidden])?,
                    arena.take("d hidden", F32, &[length, hidden])?,
                ],
                width: config.width,
                row: whole[1],
            })
        })?;
        Ok(Some(state))
    }

    /// Brings keys and values up to date with the flat store, and clears their gradient.
    pub fn refresh(&mut self, store: View) {
        self.gradient.view_mut().clear();
        if let PrefixSource::Projected(network) = self.source {
            on_pool(|| self.forward_network(network, store));
        }
        if let Some(cast) = &mut self.cast {
            let values = match self.source {
                PrefixSource::Direct(at) => store.slice(at, self.length * self.row),
                PrefixSource::Projected(_) => self.values.view(),
            };
            elementwise::cast(values, cast.view_mut());
        }
    }

    fn forward_network(&mut self, network: Projection, store: View) {
        let Projection { hidden, embedding, in_weight, in_bias, out_weight, out_bias } = network;
        let (p, c, outputs) = (self.length, self.width, self.row);
        let [before, after, _] = &mut self.hidden;
        let tensor = |at: usize, len: usize| store.slice(at, len);
        let (w, b) = (tensor(in_weight, hidden * c), tensor(in_bias, hidden));
        let shape = DenseShape { n: p, inputs: c, outputs: hidden };
        matmul::dense_forward(tensor(embedding, p * c), w, b, before.view_mut(), shape);
        activation::forward(Activation::Tanh, before.view(), after.view_mut());
        let (w, b) = (tensor(out_weight, outputs * hidden), tensor(out_bias, outputs));
        let shape = DenseShape { n: p, inputs: hidden, outputs };
        matmul::dense_forward(after.view(), w, b, self.values.view_mut(), shape);
    }

    /// Keys and values `(p, 2 l c)` in the type of the activations, as of the last [`PrefixState::refresh`].
    pub fn view<'a>(&'a self, store: View<'a>) -> View<'a> {
        match (&self.cast, self.source) {
            (Some(cast), _) => cast.view(),
            (None, PrefixSource::Direct(at)) => store.slice(at, self.length * self.row),
            (None, PrefixSource::Projected(_)) => self.values.view(),
        }
    }

    /// Keys and values, and where the blocks add their gradient.
    pub fn parts<'a>(&'a mut self, store: View<'a>) -> (View<'a>, ViewMut<'a>) {
        let view = match (&self.cast, self.source) {
            (Some(cast), _) => cast.view(),
            (None, PrefixSource::Direct(at)) => store.slice(at, self.length * self.row),
            (None, PrefixSource::Projected(_)) => self.values.view(),
        };
        (view, self.gradient.view_mut())
    }

    /// Keys and values that the network yields, `(p, 2 l c)`; `None` without one.
    pub fn projected(&self) -> Option<Vec<f32>> {
        matches!(self.source, PrefixSource::Projected(_)).then(|| self.values.view().to_vec())
    }

    /// Carries the gradient of keys and values on to the gradient of the flat store.
    pub fn backward(&mut self, store: View, grads: ViewMut) {
        match self.source {
            PrefixSource::Direct(at) => {
                let len = self.gradient.len();
                adamw::add(self.gradient.view(), grads.slice(at, len));
            }
            PrefixSource::Projected(network) => on_pool(|| self.backward_network(network, store, grads)),
        }
    }

    /// In the forward pass this was `values = tanh(E W1^T + b1) W2^T + b2`.
    fn backward_network(&mut self, network: Projection, store: View, mut grads: ViewMut) {
        let Projection { hidden, embedding, in_weight, in_bias, out_weight, out_bias } = network;
        let (p, c, outputs) = (self.length, self.width, self.row);
        let [before, after, d_hidden] = &mut self.hidden;
        let w = store.slice(out_weight, outputs * hidden);
        let shape = DenseShape { n: p, inputs: hidden, outputs };
        let (dw, db) = pair(grads.reborrow(), (out_weight, outputs * hidden), (out_bias, outputs));
        let gradients = DenseGradients { dw, db, dx: Some(d_hidden.view_mut()) };
        matmul::dense_backward(self.gradient.view(), after.view(), w, gradients, shape);
        activation::backward(Activation::Tanh, before.view(), d_hidden.view_mut());
        let (w, x) = (store.slice(in_weight, hidden * c), store.slice(embedding, p * c));
        let (dw, db) = pair(grads.reborrow(), (in_weight, hidden * c), (in_bias, hidden));
        let shape = DenseShape { n: p, inputs: c, outputs: hidden };
        matmul::dense_backward(d_hidden.view(), x, w, DenseGradients { dw, db, dx: None }, shape);
        let d_embedding = grads.slice(embedding, p * c);
        matmul::dense_input_gradient(d_hidden.view(), w, d_embedding, shape, true);
    }
}

/// Two disjoint ranges of one gradient, the second after the first.
fn pair<'a>(grads: ViewMut<'a>, first: (usize, usize), second: (usize, usize)) -> (ViewMut<'a>, ViewMut<'a>) {
    let (head, tail) = grads.split_at(second.0);
    (head.slice(first.0, first.1), tail.slice(0, second.1))
}

/// Keys and values `(p, 2 l c)` of the base reading `ids`, p of them: a prefix made of real text. With
/// `stream`, layers of the base are in memory one after another only.
///
/// # Errors
/// When an id is outside the vocabulary or there are more ids than positions.
pub fn prefix_from_text(base: &Arc<Base>, ids: &[u32], stream: bool) -> Result<Vec<f32>> {
    let config = &base.config;
    let mut decoder =
        Decoder::new(Arc::clone(base), AdapterBindings::none(config.layers), Vec::new(), 1, ids.len())?;
    decoder.stream(stream)?;
    decoder.feed(ids)?;
    let (c, row) = (config.width, 2 * config.layers * config.width);
    let mut values = vec![0f32; ids.len() * row];
    for layer in 0..config.layers {
        let (k, v) = decoder.keys_and_values(layer);
        for (token, values) in values.chunks_exact_mut(row).enumerate() {
            values[2 * layer * c..][..c].copy_from_slice(&k[token * c..][..c]);
            values[(2 * layer + 1) * c..][..c].copy_from_slice(&v[token * c..][..c]);
        }
    }
    Ok(values)
}
