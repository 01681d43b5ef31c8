//! Single weights: orientation, dtypes, every way to ask for a weight, names.

use std::collections::HashMap;

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::{
    Init, VarBuilder, VarMap,
    var_builder::{Backend, Shard, ShardedSafeTensors, VarBuilderArgs},
};
use engraft_adapters::candle::{Adapter, with_adapter};
use serde_json::json;

use crate::support::{Copy, adapter_of, base, builder, distance, expected, golden, noise};

/// Relative to weights of about 1: one rounding of the sum, and products of rank 3.
const TOLERANCE: f64 = 1e-6;

#[test]
fn conv1d_weights_are_those_that_peft_merged() {
    for case in ["conv1d_lora", "conv1d_dora", "conv1d_ia3"] {
        let (vb, adapter) =
            with_adapter(builder(base("conv1d")), adapter_of(case), DType::F32, &Device::Cpu).unwrap();
        let merged = expected(case);
        assert!(merged.len() > 1);
        for (name, wanted) in &merged {
            let name = name.strip_prefix("merged.").unwrap();
            let (module, last) = name.rsplit_once('.').unwrap();
            // Every way to ask: with a path, with hints, without a shape.
            let vb_of_module = vb.pp(module);
            let all = [
                vb_of_module.get(wanted.shape().clone(), last).unwrap(),
                vb.get_with_hints(wanted.shape().clone(), name, Init::Const(3.0)).unwrap(),
                vb.get_unchecked(name).unwrap(),
            ];
            let plain = base("conv1d")[name].to_dtype(DType::F32).unwrap();
            assert!(distance(&all[0], &plain) > 1e-2, "{case} {name}");
            for found in &all {
                assert!(distance(found, wanted) < TOLERANCE, "{case} {name}");
            }
        }
        assert_eq!(adapter.unused(), [""; 0], "{case}");
        adapter.finish().unwrap();
    }
}

#[test]
fn square_weights_follow_the_flag_and_others_their_shape() {
    let folded = |fan_in_fan_out: bool, name: &str| {
        let copy = Copy::of("conv1d_lora").set("fan_in_fan_out", json!(fan_in_fan_out));
        let (vb, _) = with_adapter(builder(base("conv1d")), copy.path(), DType::F32, &Device::Cpu).unwrap();
        vb.get_unchecked(name).unwrap()
    };
    let square = "transformer.h.0.attn.c_proj.weight";
    let delta = |flag| (folded(flag, square) - base("conv1d")[square].to_dtype(DType::F32).unwrap()).unwrap();
    assert!(distance(&delta(true), &delta(false).t().unwrap()) < TOLERANCE);
    assert!(distance(&delta(true), &delta(false)) > 1e-2);
    let wide = "transformer.h.0.attn.c_attn.weight";
    assert_eq!(distance(&folded(true, wide), &folded(false, wide)), 0.0);
}

#[test]
fn weights_are_rounded_once_to_the_dtype_that_is_asked_for() {
    let name = "transformer.h.0.attn.c_attn.weight";
    let in_dtype = |dtype| {
        let (vb, _) =
            with_adapter(builder(base("bigcode")), adapter_of("bigcode_lora"), dtype, &Device::Cpu).unwrap();
        assert_eq!(vb.dtype(), dtype);
        vb.get((40, 24), name).unwrap()
    };
    let [exact, single, half, brain] = [DType::F64, DType::F32, DType::F16, DType::BF16].map(in_dtype);
    assert_eq!((exact.dtype(), half.dtype(), brain.dtype()), (DType::F64, DType::F16, DType::BF16));
    assert!(distance(&exact, &single) < 1e-6 && distance(&exact, &single) > 0.0);
    for low in [half, brain] {
        assert_eq!(distance(&single.to_dtype(low.dtype()).unwrap(), &low), 0.0);
        // An F16 sum of rounded parts would differ: the delta alone has bits below F16's last.
        assert!(distance(&single, &low) > 1e-6);
    }
}

#[test]
fn shards_are_those_of_the_folded_weight() {
    let file = golden().join("bases/bigcode.safetensors");
    for case in ["bigcode_lora", "bigcode_ia3", "bigcode_biases"] {
        let whole = Adapter::open(adapter_of(case)).unwrap();
        let whole = whole.fold_into(builder(base("bigcode")), DType::F32, &Device::Cpu);
        // SAFETY: nothing changes the golden file while it is mapped.
        let sharded = unsafe { ShardedSafeTensors::var_builder(&[&file], DType::F32, &Device::Cpu) }.unwrap();
        let adapter = Adapter::open(adapter_of(case)).unwrap();
        let vb = VarBuilderArgs::new_with_args(adapter.over(sharded), DType::F32, &Device::Cpu);
        for (name, shape) in [
            ("transformer.h.1.attn.c_attn.weight", vec![40, 24]),
            ("transformer.h.1.mlp.c_proj.weight", vec![24, 40]),
            ("transformer.h.1.attn.c_attn.bias", vec![40]),
            ("transformer.wpe.weight", vec![16, 24]),
        ] {
            let all = whole.get(shape.clone(), name).unwrap();
            for dim in 0..shape.len() {
                for rank in 0..4 {
                    let shard = Shard { dim, rank, world_size: 4 };
                    let found = vb.get_with_hints(shape.clone(), name, shard).unwrap();
                    let block = shape[dim] / 4;
                    let wanted = all.narrow(dim, rank * block, block).unwrap();
                    assert_eq!(distance(&found, &wanted), 0.0, "{case} {name} {dim} {rank}");
                }
            }
            assert_eq!(distance(&vb.get(shape.clone(), name).unwrap(), &all), 0.0);
        }
    }
}

#[test]
fn a_base_that_is_made_on_demand_is_adapted_too() {
    let varmap = VarMap::new();
    let random = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let (vb, _) = with_adapter(random, adapter_of("bigcode_lora"), DType::F32, &Device::Cpu).unwrap();
    let name = "transformer.h.0.attn.c_attn.weight";
    let init = Init::Randn { mean: 0.0, stdev: 1.0 };
    let found = vb.get_with_hints((40, 24), name, init).unwrap();
    let plain = varmap.data().lock().unwrap()[name].as_tensor().clone();
    let delta = |plain: &Tensor, found: &Tensor| (found - plain).unwrap();
    let (vb, _) =
        with_adapter(builder(base("bigcode")), adapter_of("bigcode_lora"), DType::F32, &Device::Cpu).unwrap();
    let stored = base("bigcode")[name].to_dtype(DType::F32).unwrap();
    let wanted = delta(&stored, &vb.get((40, 24), name).unwrap());
    assert!(distance(&delta(&plain, &found), &wanted) < TOLERANCE);
}

#[test]
fn what_the_adapter_replaces_need_not_be_in_the_base() {
    let mut weights = base("llama");
    weights.remove("lm_head.weight");
    let (vb, adapter) =
        with_adapter(builder(weights), adapter_of("llama_all_linear"), DType::F32, &Device::Cpu).unwrap();
    assert!(vb.contains_tensor("lm_head.weight") && !vb.contains_tensor("lm_head.bias"));
    let head = vb.pp("lm_head").get((37, 24), "weight").unwrap();
    let stored = candle_core::safetensors::load(
        adapter_of("llama_all_linear").join("adapter_model.safetensors"),
        &Device::Cpu,
    );
    assert_eq!(distance(&head, &stored.unwrap()["base_model.model.lm_head.weight"]), 0.0);
    let wrong = vb.get((38, 24), "lm_head.weight").unwrap_err().to_string();
    assert!(wrong.contains("lm_head.weight"), "{wrong}");
    assert!(!adapter.unused().contains(&"lm_head.weight".to_owned()));
}

/// A backend with weights under any name.
struct Anything;

impl Backend for Anything {
    type Hints = Init;

    fn get(&self, s: Shape, _: &str, _: Init, dtype: DType, dev: &Device) -> candle_core::Result<Tensor> {
        Tensor::zeros(s, dtype, dev)
    }

    fn get_unchecked(&self, _: &str, dtype: DType, dev: &Device) -> candle_core::Result<Tensor> {
        Tensor::zeros((24, 24), dtype, dev)
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

#[test]
fn one_parameter_under_two_names_is_an_error() {
    let adapter = Adapter::open(adapter_of("bert_inner")).unwrap();
    let any = VarBuilderArgs::new_with_args(Anything, DType::F32, &Device::Cpu);
    let vb = VarBuilderArgs::new_with_args(adapter.over(any), DType::F32, &Device::Cpu);
    let query = "encoder.layer.0.attention.self.query.weight";
    vb.pp("text").get((24, 24), query).unwrap();
    vb.pp("text").get((24, 24), query).unwrap(); // a tied weight
    for other in ["vision.", ""] {
        let error = vb.get((24, 24), &format!("{other}{query}")).unwrap_err().to_string();
        let names = [format!("text.{query}"), format!("{other}{query}"), "rename_f".to_owned()];
        assert!(names.iter().all(|name| error.contains(name)), "{error}");
    }
    // Nor may other parameters have another prefix.
    let error =
        vb.get((24, 24), "vision.encoder.layer.1.attention.self.query.weight").unwrap_err().to_string();
    assert!(error.contains("text.encoder.layer.1") && error.contains("vision.encoder.layer.1"), "{error}");
    // A name that fits several parameters is none of them, and the config wants one here.
    let error = vb.get((24, 24), "text.self.query.weight").unwrap_err().to_string();
    assert!(error.contains("self.query.* is missing"), "{error}");
    // What is beside the wrapped model is not the adapter's.
    vb.get((24, 24), "vision.encoder.layer.7.attention.self.query.weight").unwrap();
    assert_eq!(adapter.unused().len(), 3);
}

/// Deltas by hand: magnitudes, biases and factors on a 5 x 3 weight in f64.
#[test]
fn a_dora_divides_by_the_norms_of_the_sum() {
    let (a, b, m) = (noise(&[2, 3], 1), noise(&[5, 2], 2), noise(&[5], 3));
    let w = noise(&[5, 3], 4);
    let folder = tempfile::tempdir().unwrap();
    let key = |end: &str| format!("base_model.model.up.{end}");
    let single = |x: &Tensor| x.to_dtype(DType::F32).unwrap();
    let tensors = HashMap::from([
        (key("lora_A.weight"), single(&a)),
        (key("lora_B.weight"), single(&b)),
        (key("lora_magnitude_vector"), single(&m)),
    ]);
    candle_core::safetensors::save(&tensors, folder.path().join("adapter_model.safetensors")).unwrap();
    let config = json!({
        "peft_type": "LORA", "r": 2, "lora_alpha": 3, "use_rslora": true, "use_dora": true,
        "target_modules": "all-linear", "fan_in_fan_out": false,
    });
    std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
    let weights = HashMap::from([("up.weight".to_owned(), w.clone())]);
    let (vb, _) = with_adapter(builder(weights), folder.path(), DType::F64, &Device::Cpu).unwrap();
    let found = vb.get((5, 3), "up.weight").unwrap().to_vec2::<f64>().unwrap();
    let [w, a, b] = [&w, &a, &b].map(|x| x.to_vec2::<f64>().unwrap());
    let m = m.to_vec1::<f64>().unwrap();
    for (o, row) in found.iter().enumerate() {
        let sum: Vec<f64> =
            (0..3).map(|i| w[o][i] + 3.0 / 2f64.sqrt() * (b[o][0] * a[0][i] + b[o][1] * a[1][i])).collect();
        let norm = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        for (found, sum) in row.iter().zip(sum) {
            assert!((found - m[o] * sum / norm).abs() < 1e-6, "{found}");
        }
    }
}
