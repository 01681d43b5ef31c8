//! Adapted linear layers on the device, and the norms of their columns, against the CPU side.

use engraft::{
    device::DType::F32,
    error::Result,
    kernels::{
        activation::Activation,
        adapted_linear::{
            self, AdaptedLinear, BackwardBuffers, BiasPlace, Delta, Dropout, ForwardBuffers, Layer,
            NormedBackward, NormedForward, SavedProducts, Scaling, SiteVectors, Vector, xa_len,
        },
        column_norms::{self, AdaptedMatrix},
        layernorm::{self, Norm},
        matmul::Matrix,
    },
};

use crate::{inputs::On, ops::Outputs};

pub fn linears(on: On, n: usize) -> Result<Outputs> {
    let (inputs, outputs) = (96, 120);
    let (w, bias) = (on.weight(1, inputs, outputs)?, on.frozen(2, outputs)?);
    let layer = Layer { weight: w.view(), bias: bias.view() };
    // A at 1, B after it; then a second delta on some columns.
    let first =
        Delta { a: 1, b: 1 + 3 * inputs, rank: 3, columns: 0..outputs, scale: 1.7, ..Delta::default() };
    let at = first.b + 3 * outputs;
    let second =
        Delta { a: at, b: at + 17 * inputs, rank: 17, columns: 40..77, scale: 0.3, ..Delta::default() };
    let trainables = second.b + 17 * 37;
    let deltas = [first, second];
    let dropout = Dropout { key: 99, p: 0.2, first_row: 2, seq_len: n.div_ceil(2), stride: n };
    let (values, x, dy) =
        (on.wide(3, trainables)?, on.activations(4, n * inputs)?, on.activations(5, n * outputs)?);
    let residual = on.activations(6, n * outputs)?;
    let (mut xa, mut d_xa) = (on.zeros(F32, n * 20)?, on.zeros(F32, n * 20)?);
    let (mut y, mut dx, mut grads) = (on.room(n * outputs)?, on.room(n * inputs)?, on.wide(7, trainables)?);
    let skip = Some(residual.view());
    let linear = AdaptedLinear::new(layer, &deltas, values.view(), dropout);
    adapted_linear::forward(linear, x.view(), skip, n, ForwardBuffers::new(xa.view_mut(), y.view_mut()));
    let saved = SavedProducts::new(xa.view());
    let to = BackwardBuffers::new(grads.view_mut(), d_xa.view_mut(), Some(dx.view_mut()));
    adapted_linear::backward(linear, dy.view(), x.view(), saved, n, to);
    Ok(vec![
        ("y", y.view().to_floats()),
        ("x A^T", xa.view().to_vec()),
        ("gradients of A and B", grads.view().to_vec()),
        ("dx", dx.view().to_floats()),
    ])
}

/// One delta on all columns and no dropout: on a device it is fused into the product, and so are activation and residual.
/// Ranks of one tile and of two, and one that is not fused.
pub fn whole_deltas(on: On, n: usize) -> Result<Outputs> {
    let (inputs, outputs) = (96, 120);
    let (w, bias) = (on.weight(1, inputs, outputs)?, on.frozen(2, outputs)?);
    let layer = Layer { weight: w.view(), bias: bias.view() };
    let mut results = Vec::new();
    for (rank, f) in [(5, None), (16, Some(Activation::GeluTanh)), (8, Some(Activation::Silu)), (17, None)] {
        let (a, b) = (3, 3 + rank * inputs);
        let deltas = [Delta { a, b, rank, columns: 0..outputs, scale: 0.3, ..Delta::default() }];
        let len = b + rank * outputs;
        let (values, x, dy) =
            (on.wide(3, len)?, on.activations(4, n * inputs)?, on.activations(5, n * outputs)?);
        let (residual, z) = (on.activations(6, n * outputs)?, on.activations(8, n * inputs)?);
        let (mut xa, mut d_xa) = (on.zeros(F32, n * rank)?, on.zeros(F32, n * rank)?);
        let (mut y, mut dx, mut grads) = (on.room(n * outputs)?, on.room(n * inputs)?, on.wide(7, len)?);
        let mut activated = on.room(n * outputs)?;
        let linear = AdaptedLinear::new(layer, &deltas, values.view(), Dropout::NONE);
        let to = ForwardBuffers {
            activated: f.map(|f| (f, activated.view_mut())),
            ..ForwardBuffers::new(xa.view_mut(), y.view_mut())
        };
        let skip = f.is_none().then(|| residual.view());
        adapted_linear::forward(linear, x.view(), skip, n, to);
        let saved = SavedProducts { input_of: f.map(|f| (f, z.view())), ..SavedProducts::new(xa.view()) };
        let to = BackwardBuffers::new(grads.view_mut(), d_xa.view_mut(), Some(dx.view_mut()));
        adapted_linear::backward(linear, dy.view(), x.view(), saved, n, to);
        results.extend([("y", y.view().to_floats()), ("dx", dx.view().to_floats())]);
        results.push(("gradients of A and B", grads.view().to_vec()));
        if f.is_some() {
            results.push(("f(y)", activated.view().to_floats()));
        }
    }
    Ok(results)
}

/// A layer norm and a layer with one delta on all columns, which a device makes as one op where the rank allows it.
pub fn normed_deltas(on: On, n: usize) -> Result<Outputs> {
    let (inputs, outputs) = (136, 120);
    // Room for the delta's rows.
    let (w, bias) = (on.weight(1, inputs + 16, outputs)?, on.frozen(2, outputs)?);
    let layer = Layer { weight: Matrix { rows: inputs, ..w.view() }, bias: bias.view() };
    let (gain, shift) = (on.frozen(9, inputs)?, on.frozen(10, inputs)?);
    let norm = Norm { gain: gain.view(), bias: shift.view(), epsilon: 1e-5 };
    let mut results = Vec::new();
    for (rank, f) in [(5, None), (16, Some(Activation::GeluTanh)), (8, Some(Activation::Silu)), (17, None)] {
        let (a, b) = (3, 3 + rank * inputs);
        let deltas = [Delta { a, b, rank, columns: 0..outputs, scale: 0.3, ..Delta::default() }];
        let len = b + rank * outputs;
        let (values, x, dy) =
            (on.wide(3, len)?, on.activations(4, n * inputs)?, on.activations(5, n * outputs)?);
        let (mut xa, mut d_xa) = (on.zeros(F32, n * rank)?, on.zeros(F32, n * rank)?);
        let (mut normed, mut stats) = (on.room(n * (inputs + 16))?, on.zeros(F32, 2 * n)?);
        let (mut y, mut activated) = (on.room(n * outputs)?, on.room(n * outputs)?);
        let (mut d_normed, mut dx, mut grads) =
            (on.room(n * inputs)?, on.activations(6, n * inputs)?, on.wide(7, len)?);
        let linear = AdaptedLinear::new(layer, &deltas, values.view(), Dropout::NONE);
        let to = NormedForward {
            normed: normed.view_mut(),
            stats: stats.view_mut(),
            xa: xa.view_mut(),
            y: y.view_mut(),
            activated: f.map(|f| (f, activated.view_mut())),
        };
        if !adapted_linear::forward_normed(linear, norm, x.view(), n, to) {
            let mut normed = normed.view_mut().slice(0, n * inputs);
            layernorm::forward(x.view(), norm, normed.reborrow(), stats.view_mut());
            let to = ForwardBuffers {
                activated: f.map(|f| (f, activated.view_mut())),
                ..ForwardBuffers::new(xa.view_mut(), y.view_mut())
            };
            adapted_linear::forward(linear, normed.as_view(), None, n, to);
        }
        let (saved, of) = (SavedProducts::new(xa.view()), (dy.view(), x.view(), stats.view()));
        let to = NormedBackward { grads: grads.view_mut(), d_normed: d_normed.view_mut(), dx: dx.view_mut() };
        if !adapted_linear::backward_normed(linear, norm, of, saved, n, to) {
            let normed = normed.view().slice(0, n * inputs);
            let to = BackwardBuffers::new(grads.view_mut(), d_xa.view_mut(), Some(d_normed.view_mut()));
            adapted_linear::backward(linear, dy.view(), normed, saved, n, to);
            layernorm::backward(d_normed.view(), x.view(), stats.view(), norm, dx.view_mut());
        }
        results.extend([("y", y.view().to_floats()), ("dx", dx.view().to_floats())]);
        results
            .extend([("statistics", stats.view().to_vec()), ("gradients of A and B", grads.view().to_vec())]);
        if f.is_some() {
            results.push(("f(y)", activated.view().to_floats()));
        }
    }
    Ok(results)
}

/// With every optional part: u, g, d, e, a trained bias, frozen factors, ranges of tokens.
pub fn scaled_linears(on: On, n: usize) -> Result<Outputs> {
    let (inputs, outputs, rank) = (96, 120, 5);
    let (w, bias) = (on.weight(1, inputs, outputs)?, on.frozen(2, outputs)?);
    let layer = Layer { weight: w.view(), bias: bias.view() };
    let mut len = 1;
    let mut next = |size: usize| {
        len += size;
        len - size
    };
    let (a, b) = (next(rank * inputs), next(rank * outputs));
    let first = Delta {
        a,
        b,
        rank,
        columns: 0..outputs,
        scale: 1.7,
        d: Some(Vector::trained(next(rank))),
        e: Some(Vector::trained(next(outputs))),
        ..Delta::default()
    };
    let (tokens, mask) = (Some(n / 2..n), Some(1));
    let second = Delta { b: next(40 * rank), columns: 70..110, d: None, tokens, mask, ..first.clone() };
    let third = Delta { b_frozen: true, a_frozen: true, tokens: None, mask: Some(2), ..first.clone() };
    let deltas = [first, Delta { e: None, ..second }, third];
    let mut scaling = |columns, tokens| {
        let columns: std::ops::Range<usize> = columns;
        Scaling { vector: Vector::trained(next(columns.len())), columns, tokens }
    };
    let u = [scaling(0..inputs, None)];
    let g = [scaling(7..101, None), scaling(101..outputs, Some(1..n - 1))];
    let trained_bias = Some(Vector::trained(next(outputs)));
    let (values, x, dy) = (on.wide(3, len)?, on.activations(4, n * inputs)?, on.activations(5, n * outputs)?);
    let residual = on.activations(6, n * outputs)?;
    let dropout = Dropout { key: 99, p: 0.2, first_row: 2, seq_len: n / 2, stride: n };
    let mut results = Vec::new();
    for (bias, bias_place) in [
        (None, BiasPlace::Inside),
        (None, BiasPlace::Outside),
        (trained_bias, BiasPlace::Inside),
        (trained_bias, BiasPlace::Outside),
    ] {
        let vectors = SiteVectors { u: &u, g: &g, bias, bias_place };
        let linear = AdaptedLinear { vectors, ..AdaptedLinear::new(layer, &deltas, values.view(), dropout) };
        let products = xa_len(&deltas, n);
        let (mut xa, mut d_xa) = (on.zeros(F32, products)?, on.zeros(F32, products)?);
        let (mut y, mut dx, mut grads) = (on.room(n * outputs)?, on.room(n * inputs)?, on.wide(7, len)?);
        let (mut scaled_x, mut product) = (on.room(n * inputs)?, on.room(n * outputs)?);
        let mut d_product = on.room(n * outputs)?;
        let to = ForwardBuffers {
            scaled_x: Some(scaled_x.view_mut()),
            product: Some(product.view_mut()),
            ..ForwardBuffers::new(xa.view_mut(), y.view_mut())
        };
        adapted_linear::forward(linear, x.view(), Some(residual.view()), n, to);
        let saved = SavedProducts { product: Some(product.view()), ..SavedProducts::new(xa.view()) };
        let to = BackwardBuffers {
            d_product: Some(d_product.view_mut()),
            ..BackwardBuffers::new(grads.view_mut(), d_xa.view_mut(), Some(dx.view_mut()))
        };
        adapted_linear::backward(linear, dy.view(), x.view(), saved, n, to);
        results.extend([
            ("y", y.view().to_floats()),
            ("gradients of all", grads.view().to_vec()),
            ("dx", dx.view().to_floats()),
        ]);
    }
    Ok(results)
}

/// Of a matrix alone, with a delta on all columns, and with a second one on some that has d and e.
pub fn column_norms(on: On) -> Result<Outputs> {
    let (inputs, outputs) = (600, 333);
    let whole = Delta { a: 0, b: 8 * inputs, rank: 8, columns: 0..outputs, scale: 1.7, ..Delta::default() };
    let at = whole.b + 8 * outputs;
    let (d, e) = (at + 3 * inputs + 3 * 60, at + 3 * inputs + 3 * 60 + 3);
    let some = Delta {
        a: at,
        b: at + 3 * inputs,
        rank: 3,
        columns: 40..100,
        scale: 0.3,
        d: Some(Vector::trained(d)),
        e: Some(Vector::trained(e)),
        ..Delta::default()
    };
    let deltas = [whole, some];
    let (w, values) = (on.weight(1, inputs, outputs)?, on.wide(2, e + 60)?);
    let (m, mut g, mut dm) = (on.wide(3, outputs)?, on.zeros(F32, outputs)?, on.wide(4, outputs)?);
    let mut results = Vec::new();
    for deltas in [&deltas[..0], &deltas[..1], &deltas[..]] {
        let weight = w.view();
        let mut norms = on.zeros(F32, outputs)?;
        column_norms::forward(AdaptedMatrix { weight, deltas, values: values.view() }, norms.view_mut());
        column_norms::output_scale(m.view(), norms.view(), g.view_mut());
        column_norms::output_scale_backward(g.view(), norms.view(), dm.view_mut());
        results.extend([
            ("norms", norms.view().to_vec()),
            ("g", g.view().to_vec()),
            ("dm", dm.view().to_vec()),
        ]);
    }
    Ok(results)
}
