//! What candle-nn has for the same purpose: its AdamW and its cross-entropy, as a second opinion.

use candle_core::{Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, loss::cross_entropy};
use engraft::kernels::{
    adamw::{self, Update},
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
