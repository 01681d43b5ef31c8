//! The maths of adapters in plain candle tensors: the twin that fused kernels are compared with.
//!
//! Every function is made of differentiable candle ops, works in any float type, and favours
//! being read over being fast. Each is in the file of its method.

pub use crate::methods::{
    lora::{lora_linear, merge_delta, merged},
    prefix::{prefix_attention, prefix_of_layer, project_prefix},
};

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor, Var};

    use super::*;
    use engraft_util::rng;

    fn random(shape: &[usize], seed: u64) -> Tensor {
        let len = shape.iter().product::<usize>() as u64;
        let values: Vec<f64> = (0..len).map(|i| rng::normal(rng::key(&[seed]), i).into()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    fn distance(a: &Tensor, b: &Tensor) -> f64 {
        (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
    }

    #[test]
    fn a_merged_weight_gives_the_same_output() {
        let (x, w, bias) = (random(&[2, 7, 5], 1), random(&[5, 9], 2), random(&[9], 3));
        let (a, b) = (random(&[3, 5], 4), random(&[9, 3], 5));
        let adapted = lora_linear(&x, &w, Some(&bias), &a, &b, 0.7).unwrap();
        let folded = merged(&w, &a, &b, 0.7).unwrap();
        let plain = x.broadcast_matmul(&folded).unwrap().broadcast_add(&bias).unwrap();
        assert!(distance(&adapted, &plain) < 1e-13);
        let unscaled = lora_linear(&x, &w, Some(&bias), &a, &b, 1.0).unwrap();
        assert!(distance(&adapted, &unscaled) > 0.1);
    }

    /// A prefix is a text that every token sees: attention over [prefix; text] with the causal
    /// offset is what the last t rows of plain causal attention over p + t tokens give.
    #[test]
    fn a_prefix_is_seen_like_earlier_tokens() {
        let (p, t) = (3, 7);
        let all = |seed| random(&[1, 2, p + t, 4], seed);
        let (q, k, v) = (all(1), all(2), all(3));
        let whole = prefix_attention(&q, &k, &v, None, 0.5).unwrap();
        let tail = |x: &Tensor| x.narrow(2, p, t).unwrap();
        let head = |x: &Tensor| x.narrow(2, 0, p).unwrap().squeeze(0).unwrap();
        let behind =
            prefix_attention(&tail(&q), &tail(&k), &tail(&v), Some((&head(&k), &head(&v))), 0.5).unwrap();
        assert!(distance(&behind, &tail(&whole)) < 1e-14);
    }

    #[test]
    fn a_prefix_is_cut_as_key_then_value_of_each_layer() {
        let (layers, heads, length, head_width) = (2, 3, 5, 4);
        let prefix = random(&[length, 2 * layers * heads * head_width], 6);
        let (k, v) = prefix_of_layer(&prefix, 1, layers, heads).unwrap();
        assert_eq!(k.dims(), [heads, length, head_width]);
        let flat = prefix.to_vec2::<f64>().unwrap();
        let (k, v) = (k.to_vec3::<f64>().unwrap(), v.to_vec3::<f64>().unwrap());
        let d = heads * head_width;
        assert_eq!(k[2][4][3], flat[4][2 * d + 2 * head_width + 3]);
        assert_eq!(v[1][0][2], flat[0][3 * d + head_width + 2]);
    }

    #[test]
    fn gradients_reach_every_input() {
        let vars: Vec<Var> =
            (0..3).map(|seed| Var::from_tensor(&random(&[1, 2, 4, 3], seed)).unwrap()).collect();
        let prefix: Vec<Var> =
            (3..5).map(|seed| Var::from_tensor(&random(&[2, 5, 3], seed)).unwrap()).collect();
        let loss = |prefix: &[Tensor]| {
            let y = prefix_attention(&vars[0], &vars[1], &vars[2], Some((&prefix[0], &prefix[1])), 0.5);
            y.unwrap().sqr().unwrap().sum_all().unwrap()
        };
        let tensors: Vec<Tensor> = prefix.iter().map(|var| var.as_tensor().clone()).collect();
        let gradients = loss(&tensors).backward().unwrap();
        for var in vars.iter().chain(&prefix) {
            let gradient = gradients.get(var).expect("a gradient").abs().unwrap();
            assert!(gradient.sum_all().unwrap().to_scalar::<f64>().unwrap() > 1e-3);
        }
        // f64 central difference along a random direction in the prefix's keys.
        let direction = random(&[2, 5, 3], 9);
        let at = |step: f64| {
            let moved = (&tensors[0] + (&direction * step).unwrap()).unwrap();
            loss(&[moved, tensors[1].clone()]).to_scalar::<f64>().unwrap()
        };
        let numeric = (at(1e-5) - at(-1e-5)) / 2e-5;
        let exact = (gradients.get(&prefix[0]).unwrap() * &direction).unwrap().sum_all().unwrap();
        assert!((numeric - exact.to_scalar::<f64>().unwrap()).abs() < 1e-8);
    }

    #[test]
    fn a_projection_is_a_tanh_between_two_linears() {
        let (e, u, u0) = (random(&[2, 3], 1), random(&[5, 3], 2), random(&[5], 3));
        let (v, v0) = (random(&[8, 5], 4), random(&[8], 5));
        let prefix = project_prefix(&e, &u, &u0, &v, &v0).unwrap();
        assert_eq!((prefix.dims(), prefix.dtype()), (&[2, 8][..], DType::F64));
        let [e, u, v] = [e, u, v].map(|x| x.to_vec2::<f64>().unwrap());
        let [u0, v0] = [u0, v0].map(|x| x.to_vec1::<f64>().unwrap());
        let hidden = |j: usize| (u0[j] + (0..3).map(|i| e[1][i] * u[j][i]).sum::<f64>()).tanh();
        let expected = v0[6] + (0..5).map(|j| v[6][j] * hidden(j)).sum::<f64>();
        assert!((prefix.to_vec2::<f64>().unwrap()[1][6] - expected).abs() < 1e-13);
    }
}
