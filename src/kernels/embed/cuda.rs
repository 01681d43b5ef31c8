//! CUDA side: a block for each token, or a few; sums over tokens in an order that follows from shapes and ids alone.

use super::{DeltaGradients, EmbeddingDelta, Tables, Tokens};
use crate::{
    device::{
        View, ViewMut,
        cuda::{Argument, Gpu, Grid, Image, arguments, image, named},
    },
    kernels::matmul::cuda::{Codes, check_type},
};

static IMAGE: Image = image!("embed");

pub fn forward(gpu: &'static Gpu, ids: View, positions: View, tables: Tables, x: ViewMut) {
    let Tables { wte, wpe, prompt } = tables;
    let (n, c) = (ids.len(), wte.cols);
    assert!(positions.len() == n && x.len() == n * c, "embed shapes");
    check_type(wte, x.dtype());
    let [vocab, c] = [wte.rows, c].map(Argument::int);
    if let Some(Codes::Q8(codes)) = Codes::of(wte) {
        let arguments = arguments![ids, positions, codes.argument(), wpe, prompt, &x, vocab];
        return gpu.launch(&IMAGE, &named("embed_q8", x.dtype()), Grid::row(n, 128), arguments);
    }
    assert!(wte.scales.is_none(), "4-bit codes are of linear layers");
    let arguments = arguments![ids, positions, wte.data, wpe, prompt, &x, vocab, c];
    gpu.launch(&IMAGE, &named("embed", x.dtype()), Grid::row(n, 128), arguments);
}

pub fn prompt_backward(gpu: &'static Gpu, tokens: Tokens, by_id: View, dx: View, d_prompt: ViewMut) {
    let Tokens { ids, vocab } = tokens;
    let (n, c) = (ids.len(), dx.len() / ids.len());
    assert!(by_id.len() == n && dx.len() == n * c, "embed shapes");
    let [n_, c, vocab] = [n, c, vocab].map(Argument::int);
    let arguments = arguments![ids, by_id, dx, &d_prompt, n_, c, vocab];
    gpu.launch(&IMAGE, &named("prompt_backward", dx.dtype()), Grid::row(n, 128), arguments);
}

/// A and B of a delta, for tokens of width c.
fn factors<'a>(delta: &EmbeddingDelta, vocab: usize, c: usize, values: View<'a>) -> [View<'a>; 2] {
    [values.slice(delta.a.at, delta.rank * vocab), values.slice(delta.b.at, c * delta.rank)]
}

pub fn add_delta(gpu: &'static Gpu, delta: &EmbeddingDelta, tokens: Tokens, values: View, x: ViewMut) {
    let Tokens { ids, vocab } = tokens;
    let (n, c) = (ids.len(), x.len() / ids.len());
    let [a, b] = factors(delta, vocab, c, values);
    let [n_, c_, vocab, rank] = [n, c, vocab, delta.rank].map(Argument::int);
    let arguments = arguments![ids, a, b, delta.scale, &x, n_, c_, vocab, rank];
    let grid = Grid::of((n.div_ceil(8), c.div_ceil(128), 1), 128);
    gpu.launch(&IMAGE, &named("embedding_add", x.dtype()), grid, arguments);
}

pub fn delta_backward(
    gpu: &'static Gpu,
    delta: &EmbeddingDelta,
    tokens: Tokens,
    by_id: View,
    values: View,
    dx: View,
    to: DeltaGradients,
) {
    let Tokens { ids, vocab } = tokens;
    let (n, c, rank) = (ids.len(), dx.len() / ids.len(), delta.rank);
    assert!(by_id.len() == n, "embed shapes");
    let DeltaGradients { grads, d_xa } = to;
    let (mut grads, d_xa) = (grads, d_xa.slice(0, n * rank));
    let [a, b] = factors(delta, vocab, c, values);
    let [n_, c_, vocab_, rank_] = [n, c, vocab, rank].map(Argument::int);
    if !delta.b.frozen {
        let arguments = arguments![ids, a, &d_xa, n_, vocab_, rank_];
        gpu.launch(&IMAGE, "embedding_xa", Grid::row((n * rank).div_ceil(256), 256), arguments);
        let to = grads.reborrow().slice(delta.b.at, c * rank);
        let arguments = arguments![dx, &d_xa, delta.scale, &to, n_, c_, rank_];
        let grid = Grid::of((c.div_ceil(32), rank.div_ceil(8), 1), 256);
        gpu.launch(&IMAGE, &named("embedding_db", dx.dtype()), grid, arguments);
    }
    if !delta.a.frozen {
        let arguments = arguments![dx, b, delta.scale, &d_xa, n_, c_, rank_];
        let grid = Grid::row(n.div_ceil(8), 256);
        gpu.launch(&IMAGE, &named("embedding_d_xa", dx.dtype()), grid, arguments);
        let to = grads.slice(delta.a.at, rank * vocab);
        let arguments = arguments![ids, by_id, &d_xa, &to, n_, vocab_, rank_];
        gpu.launch(&IMAGE, "embedding_da", grid, arguments);
    }
}
