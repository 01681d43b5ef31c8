//! Compares with candle: its AdamW, its cross-entropy, its autograd of an adapted layer.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, loss::cross_entropy};
use engraft::kernels::{
    adamw::{self, Update},
    adapted_linear::{
        self, AdaptedLinear, BackwardBuffers, BiasPlace, Delta, Dropout, ForwardBuffers, Layer,
        SavedProducts, Scaling, SiteVectors, Vector,
    },
    head_loss::{self, HeadScratch, Supervised},
    matmul::Matrix,
};
use engraft_util::rng;
use half::f16;

fn drawn(seed: u64, len: usize) -> Vec<f32> {
    (0..len as u64).map(|at| rng::normal(rng::key(&[seed]), at)).collect()
}

fn assert_near(found: &[f32], expected: &[f32], bound: f32, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() <= bound * (1.0 + expected.abs()),
            "{what}: {found} against {expected}"
        );
    }
}

#[test]
fn adamw_moves_as_candles_does() {
    let len = 1003;
    let start = drawn(1, len);
    let (mut values, mut first, mut second) = (start.clone(), vec![0f32; len], vec![0f32; len]);
    let var = Var::from_slice(&start, len, &Device::Cpu).unwrap();
    let params = ParamsAdamW { lr: 3e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.02 };
    let mut theirs = candle_nn::AdamW::new(vec![var.clone()], params).unwrap();
    for step in 1..=7 {
        let gradient = drawn(1 + step, len);
        let update =
            Update { step, lr: 3e-3, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.02, factor: 1.0 };
        let moments = (first.as_mut_slice().into(), second.as_mut_slice().into());
        adamw::update(values.as_mut_slice().into(), gradient[..].into(), moments.0, moments.1, update);
        // The gradient of sum(x g) is g.
        let loss = (var.as_tensor() * Tensor::from_slice(&gradient, len, &Device::Cpu).unwrap()).unwrap();
        theirs.backward_step(&loss.sum_all().unwrap()).unwrap();
    }
    assert_near(&values, &var.as_tensor().to_vec1::<f32>().unwrap(), 1e-6, "values after seven updates");
}

#[test]
fn head_and_loss_agree_with_candles_cross_entropy() {
    let (m, c, v) = (19, 11, 83);
    let hidden = drawn(1, m * c);
    let head: Vec<f16> = drawn(2, v * c).into_iter().map(f16::from_f32).collect();
    let rows: Vec<u32> = (0..m as u32).collect();
    let targets: Vec<i32> = (0..m as i32).map(|row| row * 7 % v as i32).collect();
    let (mut gathered, mut logits) = (vec![0f32; 4 * c], vec![0f32; 4 * v]);
    let (mut losses, mut gradient) = (vec![0f32; m], vec![0f32; m * c]);
    let input = Supervised {
        hidden: hidden[..].into(),
        rows: Some(rows[..].into()),
        targets: targets[..].into(),
        smoothing: 0.0,
    };
    let matrix = Matrix::f16(head[..].into(), v, c);
    let work = HeadScratch { gathered: gathered.as_mut_slice().into(), logits: logits.as_mut_slice().into() };
    let to = Some((gradient.as_mut_slice().into(), 1.0 / m as f32));
    head_loss::forward_backward(input, matrix, work, losses.as_mut_slice().into(), to);

    let wide: Vec<f32> = head.iter().map(|x| x.to_f32()).collect();
    let x = Var::from_slice(&hidden, (m, c), &Device::Cpu).unwrap();
    let w = Tensor::from_slice(&wide, (v, c), &Device::Cpu).unwrap();
    let ids: Vec<u32> = targets.iter().map(|&target| target as u32).collect();
    let ids = Tensor::from_slice(&ids, m, &Device::Cpu).unwrap();
    let loss = cross_entropy(&x.as_tensor().matmul(&w.t().unwrap()).unwrap(), &ids).unwrap();
    let mean = losses.iter().sum::<f32>() / m as f32;
    assert_near(&[mean], &[loss.to_scalar::<f32>().unwrap()], 1e-6, "mean loss");
    let expected = loss.backward().unwrap().get(x.as_tensor()).unwrap().flatten_all().unwrap();
    assert_near(&gradient, &expected.to_vec1::<f32>().unwrap(), 1e-6, "gradient of the hidden states");
}

/// Sizes of an adapted layer.
const INPUTS: usize = 13;
const OUTPUTS: usize = 21;
const TOKENS: usize = 14;
const RANK: usize = 3;

/// Places in the flat store: A (shared), B of both deltas, d, e, u, g, the bias; then what is derived and has a gradient.
const PARTS: [(&str, usize, (usize, usize)); 8] = [
    ("A", 0, (RANK, INPUTS)),
    ("B", 39, (OUTPUTS, RANK)),
    ("B of some tokens", 102, (10, RANK)),
    ("d", 132, (1, RANK)),
    ("e", 135, (1, OUTPUTS)),
    ("u", 156, (1, INPUTS)),
    ("g", 169, (1, OUTPUTS)),
    ("bias", 190, (1, OUTPUTS)),
];
const STORE: usize = 211;

fn at(name: &str) -> Vector {
    Vector::trained(PARTS.iter().find(|part| part.0 == name).unwrap().1)
}

#[test]
fn an_adapted_layer_agrees_with_candles_autograd() {
    let (x, dy) = (drawn(1, TOKENS * INPUTS), drawn(2, TOKENS * OUTPUTS));
    let (residual, values) = (drawn(3, TOKENS * OUTPUTS), drawn(4, STORE));
    let weight: Vec<f16> = drawn(5, INPUTS * OUTPUTS).into_iter().map(f16::from_f32).collect();
    let bias = [f16::ZERO; OUTPUTS];
    let layer = Layer { weight: Matrix::f16(weight[..].into(), INPUTS, OUTPUTS), bias: bias[..].into() };
    let (d, e) = (Some(at("d")), Some(at("e")));
    let first =
        Delta { b: at("B").at, rank: RANK, columns: 0..OUTPUTS, scale: 1.7, d, e, ..Delta::default() };
    let tokens = Some(4..9);
    let second = Delta { b: at("B of some tokens").at, columns: 5..15, scale: -0.4, tokens, ..first.clone() };
    let deltas = [first, Delta { d: None, e: None, ..second }];
    let scaling = |name, columns: usize| [Scaling { vector: at(name), columns: 0..columns, tokens: None }];
    let (u, g) = (scaling("u", INPUTS), scaling("g", OUTPUTS));
    for bias_place in [BiasPlace::Inside, BiasPlace::Outside] {
        let vectors = SiteVectors { u: &u, g: &g, bias: Some(at("bias")), bias_place };
        let plain = AdaptedLinear::new(layer, &deltas, values[..].into(), Dropout::NONE);
        let linear = AdaptedLinear { vectors, ..plain };
        let len = adapted_linear::xa_len(&deltas, TOKENS);
        let (mut xa, mut d_xa, mut y) = (vec![0f32; len], vec![0f32; len], vec![0f32; dy.len()]);
        let (mut scaled, mut dx) = (vec![0f32; x.len()], vec![0f32; x.len()]);
        let (mut product, mut d_product) = (vec![0f32; dy.len()], vec![0f32; dy.len()]);
        let mut grads = vec![0f32; STORE];
        let to = ForwardBuffers {
            xa: xa.as_mut_slice().into(),
            y: y.as_mut_slice().into(),
            scaled_x: Some(scaled.as_mut_slice().into()),
            product: Some(product.as_mut_slice().into()),
            activated: None,
        };
        adapted_linear::forward(linear, x[..].into(), Some(residual[..].into()), TOKENS, to);
        let saved = SavedProducts { product: Some(product[..].into()), ..SavedProducts::new(xa[..].into()) };
        let to = BackwardBuffers {
            grads: grads.as_mut_slice().into(),
            d_xa: d_xa.as_mut_slice().into(),
            dx: Some(dx.as_mut_slice().into()),
            d_product: Some(d_product.as_mut_slice().into()),
        };
        adapted_linear::backward(linear, dy[..].into(), x[..].into(), saved, TOKENS, to);

        let var = |values: &[f32], shape: (usize, usize)| {
            let wide: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
            Var::from_tensor(&Tensor::from_vec(wide, shape, &Device::Cpu).unwrap()).unwrap()
        };
        let vars =
            PARTS.map(|(_, start, (rows, columns))| var(&values[start..][..rows * columns], (rows, columns)));
        let x_var = var(&x, (TOKENS, INPUTS));
        let wide: Vec<f32> = weight.iter().map(|x| x.to_f32()).collect();
        let (w, residual) = (var(&wide, (INPUTS, OUTPUTS)), var(&residual, (TOKENS, OUTPUTS)));
        let inside = bias_place == BiasPlace::Inside;
        let theirs = twin(&x_var, &w, &vars, inside).unwrap().add(&residual).unwrap();
        let floats = |tensor: &Tensor| {
            tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap()
        };
        assert_near(&y, &floats(&theirs), 2e-6, "y");
        let loss = (theirs * var(&dy, (TOKENS, OUTPUTS)).as_tensor()).unwrap().sum_all().unwrap();
        let theirs = loss.backward().unwrap();
        assert_near(&dx, &floats(theirs.get(x_var.as_tensor()).unwrap()), 1e-5, "dx");
        for (var, (name, start, (rows, columns))) in vars.iter().zip(PARTS) {
            let expected = floats(theirs.get(var.as_tensor()).unwrap());
            assert_near(&grads[start..][..rows * columns], &expected, 1e-5, name);
        }
    }
}

/// The layer in candle's ops, without the residual.
fn twin(x: &Var, w: &Var, vars: &[Var; 8], inside: bool) -> candle_core::Result<Tensor> {
    let [a, b, b_some, d, e, u, g, bias] = vars.each_ref().map(Var::as_tensor);
    let xa = x.matmul(&a.t()?)?;
    let delta = (xa.broadcast_mul(d)?.matmul(&b.t()?)?.broadcast_mul(e)? * f64::from(1.7f32))?;
    let some = (xa.narrow(0, 4, 5)?.matmul(&b_some.t()?)? * f64::from(-0.4f32))?;
    let some = some.pad_with_zeros(0, 4, TOKENS - 9)?.pad_with_zeros(1, 5, OUTPUTS - 15)?;
    let product = x.broadcast_mul(u)?.matmul(w)?.add(&delta)?.add(&some)?;
    if inside {
        product.broadcast_add(bias)?.broadcast_mul(g)
    } else {
        product.broadcast_mul(g)?.broadcast_add(bias)
    }
}
