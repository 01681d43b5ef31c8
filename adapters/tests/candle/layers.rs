//! `LoraLinear`: gradients, training, merging, and PEFT files in and out.

use candle_core::{DType, Device, Module, ModuleT, Tensor, Var};
use candle_nn::{AdamW, Linear, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use engraft_adapters::{
    Error, LoraSpec,
    candle::{LoraLinear, load, save, with_adapter},
};
use serde_json::Value;

use crate::support::{Copy, adapter_of, base, builder, distance, noise};

/// A layer from 5 to 7 of rank 3 in f64, with B not zero, and the map of its variables.
fn layer(spec: &LoraSpec, path: &str, dtype: DType) -> (LoraLinear, VarMap) {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, dtype, &Device::Cpu);
    let cast = |x: Tensor| x.to_dtype(dtype).unwrap();
    let base = Linear::new(cast(noise(&[7, 5], 1)), Some(cast(noise(&[7], 2))));
    let layer = LoraLinear::new(base, spec, vb.pp(path)).unwrap();
    set(&varmap, &format!("{path}.lora_B.weight"), &cast(noise(&[7, spec.rank], 3)));
    (layer, varmap)
}

fn set(varmap: &VarMap, name: &str, value: &Tensor) {
    varmap.data().lock().unwrap()[name].set(value).unwrap();
}

fn variable(varmap: &VarMap, name: &str) -> Var {
    varmap.data().lock().unwrap()[name].clone()
}

fn spec() -> LoraSpec {
    LoraSpec { rank: 3, alpha: 4.0, rslora: true, ..LoraSpec::default() }
}

fn scalar(x: &Tensor) -> f64 {
    x.to_dtype(DType::F64).unwrap().to_scalar().unwrap()
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let (layer, varmap) = layer(&spec(), "up", DType::F64);
    let x = Var::from_tensor(&noise(&[2, 3, 5], 4)).unwrap();
    let weights = noise(&[2, 3, 7], 5);
    // A loss that is not linear in the output.
    let loss = |x: &Tensor| {
        let y = layer.forward_t(x, true).unwrap(); // dropout is 0
        ((y.sqr().unwrap() + y).unwrap() * &weights).unwrap().sum_all().unwrap()
    };
    let gradients = loss(&x).backward().unwrap();
    let step = 1e-6;
    for (name, var) in [
        ("x", x.clone()),
        ("A", variable(&varmap, "up.lora_A.weight")),
        ("B", variable(&varmap, "up.lora_B.weight")),
    ] {
        let exact = gradients.get(&var).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let values = var.flatten_all().unwrap().to_vec1::<f64>().unwrap();
        for (index, exact) in exact.iter().enumerate() {
            let at = |change: f64| {
                let mut moved = values.clone();
                moved[index] += change;
                var.set(&Tensor::from_vec(moved, var.shape(), &Device::Cpu).unwrap()).unwrap();
                scalar(&loss(&x))
            };
            let numeric = (at(step) - at(-step)) / (2.0 * step);
            at(0.0);
            assert!(
                (exact - numeric).abs() < 1e-7 * (1.0 + numeric.abs()),
                "{name} {index}: {exact} {numeric}"
            );
            assert!(exact.abs() > 1e-9, "{name} {index} has no gradient");
        }
    }
}

#[test]
fn a_layer_computes_the_formula_and_merges_to_it() {
    for dtype in [DType::F64, DType::F32] {
        let (layer, varmap) = layer(&spec(), "up", dtype);
        let x = noise(&[2, 3, 5], 4).to_dtype(dtype).unwrap();
        let [a, b] =
            ["A", "B"].map(|name| variable(&varmap, &format!("up.lora_{name}.weight")).as_tensor().clone());
        let scale = 4.0 / 3f64.sqrt();
        assert_eq!(layer.scale(), scale);
        let linear = |x: &Tensor, w: &Tensor| x.broadcast_matmul(&w.t().unwrap()).unwrap();
        let delta = (linear(&linear(&x, &a), &b) * scale).unwrap();
        let bias = layer.base().bias().unwrap();
        let wanted = (linear(&x, layer.base().weight()).broadcast_add(bias).unwrap() + delta).unwrap();
        let merged = layer.merge().unwrap();
        let tolerance = if dtype == DType::F64 { 1e-13 } else { 1e-5 };
        for found in [
            layer.forward(&x).unwrap(),
            layer.forward_t(&x, false).unwrap(),
            x.apply(&layer.without_dropout()).unwrap(),
            merged.forward(&x).unwrap(),
        ] {
            assert!(distance(&found, &wanted) < tolerance);
        }
        assert!(distance(merged.weight(), layer.base().weight()) > 0.1);
    }
}

#[test]
fn a_half_precision_base_keeps_its_dtype_and_is_rounded_once() {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let half = noise(&[7, 5], 1).to_dtype(DType::F16).unwrap();
    let layer = LoraLinear::new(Linear::new(half.clone(), None), &spec(), vb.pp("up")).unwrap();
    set(&varmap, "up.lora_B.weight", &noise(&[7, 3], 3).to_dtype(DType::F32).unwrap());
    let y = layer.forward(&noise(&[2, 5], 4).to_dtype(DType::F16).unwrap()).unwrap();
    assert_eq!((y.dtype(), layer.a().dtype()), (DType::F16, DType::F32));
    let delta = (layer.b().matmul(layer.a()).unwrap() * layer.scale()).unwrap();
    let wanted = (half.to_dtype(DType::F32).unwrap() + delta).unwrap().to_dtype(DType::F16).unwrap();
    assert_eq!(distance(layer.merge().unwrap().weight(), &wanted), 0.0);
}

#[test]
fn dropout_acts_on_the_branch_alone_and_only_when_asked_for() {
    let spec = LoraSpec { dropout: 0.4, ..spec() };
    let (layer, _) = layer(&spec, "up", DType::F64);
    let x = noise(&[4, 5], 4);
    let plain = layer.forward(&x).unwrap();
    assert_eq!(distance(&layer.forward_t(&x, false).unwrap(), &plain), 0.0);
    assert!(distance(&x.apply_t(&layer, true).unwrap(), &plain) > 1e-3);
    // The mean over many masks is the value without dropout: the branch is scaled by 1 / (1 - p).
    let draws = 4000;
    let repeated = x.repeat((draws, 1)).unwrap();
    let mean = layer.forward_t(&repeated, true).unwrap().reshape((draws, 4, 7)).unwrap().mean(0).unwrap();
    let spread = distance(&plain, &layer.base().forward(&x).unwrap());
    assert!(distance(&mean, &plain) < 0.1 * spread, "{} of {spread}", distance(&mean, &plain));
}

/// Two layers with a tanh between them learn what two other layers compute.
#[test]
fn training_lowers_the_loss_and_leaves_the_base_alone() {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let frozen = VarMap::new();
    let frozen_vb = VarBuilder::from_varmap(&frozen, DType::F32, &Device::Cpu);
    let spec = LoraSpec { rank: 2, alpha: 4.0, dropout: 0.02, ..LoraSpec::default() };
    let make = |inputs, outputs, path: &str| {
        let base = candle_nn::linear(inputs, outputs, frozen_vb.pp(path)).unwrap();
        LoraLinear::new(base, &spec, vb.pp(path)).unwrap()
    };
    let (first, second) = (make(5, 9, "first"), make(9, 3, "second"));
    assert_eq!(varmap.all_vars().len(), 4);
    let before: Vec<Tensor> = frozen.all_vars().iter().map(|var| var.as_tensor().copy().unwrap()).collect();
    let x = noise(&[32, 5], 6).to_dtype(DType::F32).unwrap();
    let teacher = noise(&[3, 5], 7).to_dtype(DType::F32).unwrap();
    let target = x.matmul(&teacher.t().unwrap()).unwrap().tanh().unwrap();
    let loss = |drops| {
        let hidden = first.forward_t(&x, drops).unwrap().tanh().unwrap();
        candle_nn::loss::mse(&second.forward_t(&hidden, drops).unwrap(), &target).unwrap()
    };
    let mut optimizer =
        AdamW::new(varmap.all_vars(), ParamsAdamW { lr: 0.02, weight_decay: 0.0, ..ParamsAdamW::default() })
            .unwrap();
    let start = scalar(&loss(false));
    for _ in 0..200 {
        optimizer.backward_step(&loss(true)).unwrap();
    }
    let end = scalar(&loss(false));
    assert!(end < 0.25 * start, "{start} {end}");
    // The base is made of variables here, and none got a gradient.
    let gradients = loss(true).backward().unwrap();
    for (var, before) in frozen.all_vars().iter().zip(before) {
        assert!(gradients.get(var).is_none());
        assert_eq!(distance(var, &before), 0.0);
    }
}

/// Layers of different ranks and alphas; the path of one is the end of another's.
fn three(varmap: &VarMap) -> Vec<LoraLinear> {
    let vb = VarBuilder::from_varmap(varmap, DType::F32, &Device::Cpu);
    let each = [("a.up", 3, 4.0, 5, 7), ("up", 2, 1.5, 7, 5), ("b.down", 3, 9.0, 4, 4)];
    let layers = each.map(|(path, rank, alpha, inputs, outputs)| {
        let weight = noise(&[outputs, inputs], 8).to_dtype(DType::F32).unwrap();
        let spec = LoraSpec { rank, alpha, dropout: 0.1, ..LoraSpec::default() };
        let layer = LoraLinear::new(Linear::new(weight, None), &spec, vb.pp(path)).unwrap();
        let b = noise(&[outputs, rank], 9).to_dtype(DType::F32).unwrap();
        set(varmap, &format!("{path}.lora_B.weight"), &b);
        layer
    });
    layers.into()
}

#[test]
fn what_is_saved_is_loaded_and_folded_the_same() {
    let layers = three(&VarMap::new());
    let all: Vec<&LoraLinear> = layers.iter().collect();
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("adapter");
    save(&dir, &all, "my/base", Some("SEQ_CLS")).unwrap();
    let config: Value =
        serde_json::from_slice(&std::fs::read(dir.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(
        (&config["task_type"], &config["base_model_name_or_path"], &config["r"], &config["lora_dropout"]),
        (&"SEQ_CLS".into(), &"my/base".into(), &3.into(), &0.1.into())
    );
    // As layers again.
    let varmap = VarMap::new();
    let saved = load(&dir, &varmap, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(
        (saved.modules.join(" ").as_str(), saved.base.as_deref()),
        ("a.up b.down up", Some("my/base"))
    );
    assert_eq!(varmap.all_vars().len(), 6);
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    for layer in &layers {
        let again = LoraLinear::new(layer.base().clone(), &saved.spec, vb.pp(layer.path())).unwrap();
        assert_eq!(again.scale(), layer.scale(), "{}", layer.path());
        assert_eq!(distance(again.a(), layer.a()), 0.0);
        assert_eq!(distance(again.b(), layer.b()), 0.0);
    }
    assert_eq!(varmap.all_vars().len(), 6); // none was made anew
    // Folded into the weights of a model.
    let weights =
        layers.iter().map(|layer| (format!("{}.weight", layer.path()), layer.base().weight().clone()));
    let (vb, adapter) = with_adapter(builder(weights.collect()), &dir, DType::F32, &Device::Cpu).unwrap();
    for layer in &layers {
        let found = vb.get_unchecked(&format!("{}.weight", layer.path())).unwrap();
        assert_eq!(distance(&found, layer.merge().unwrap().weight()), 0.0, "{}", layer.path());
    }
    adapter.finish().unwrap();
}

#[test]
fn an_adapter_of_peft_becomes_layers() {
    let varmap = VarMap::new();
    let saved = load(adapter_of("bigcode_lora"), &varmap, DType::F32, &Device::Cpu).unwrap();
    assert_eq!((saved.modules.len(), varmap.all_vars().len()), (8, 16));
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let (folded, _) =
        with_adapter(builder(base("bigcode")), adapter_of("bigcode_lora"), DType::F32, &Device::Cpu).unwrap();
    for module in &saved.modules {
        let name = format!("{module}.weight");
        let weight = base("bigcode")[&name].to_dtype(DType::F32).unwrap();
        let layer = LoraLinear::new(Linear::new(weight, None), &saved.spec, vb.pp(module)).unwrap();
        assert_eq!(
            distance(layer.merge().unwrap().weight(), &folded.get_unchecked(&name).unwrap()),
            0.0,
            "{module}"
        );
    }
}

#[test]
fn what_a_layer_does_not_have_is_not_loaded() {
    for (case, part) in [
        ("llama_dora", "model.embed_tokens.weight is not expected"),
        ("bert_lora_bias", ".bias is not expected"),
        ("bigcode_biases", ".bias is not expected"),
        ("llama_all_linear", "lm_head.weight is not expected"),
        ("bigcode_ia3", "peft_type is IA3 where a LoRA is expected"),
        ("bigcode_ln_tuning", "peft_type is LN_TUNING where a LoRA is expected"),
    ] {
        let varmap = VarMap::new();
        let text = load(adapter_of(case), &varmap, DType::F32, &Device::Cpu).unwrap_err().to_string();
        assert!(text.contains(part), "{case}: {text}");
        assert_eq!(varmap.all_vars().len(), 0);
    }
}

#[test]
fn layers_that_are_no_single_adapter_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("adapter");
    let refused = |layers: &[&LoraLinear], part: &str| {
        let text = save(&dir, layers, "base", None).unwrap_err().to_string();
        assert!(text.contains(part) && !dir.exists(), "{text}");
    };
    let (plain, varmap) = layer(&spec(), "up", DType::F32);
    let (dropping, _) = layer(&LoraSpec { dropout: 0.5, ..spec() }, "down", DType::F32);
    let (unscaled, _) = layer(&LoraSpec { rslora: false, ..spec() }, "down", DType::F32);
    refused(&[], "no adapter");
    refused(&[&plain, &plain], "up is there twice");
    refused(&[&plain, &dropping], "down has another dropout");
    refused(&[&plain, &unscaled], "down has another dropout or rslora");
    let rootless = VarMap::new();
    let vb = VarBuilder::from_varmap(&rootless, DType::F32, &Device::Cpu);
    refused(&[&LoraLinear::new(plain.base().clone(), &spec(), vb).unwrap()], "no path");
    set(&varmap, "up.lora_B.weight", &Tensor::full(f32::NAN, (7, 3), &Device::Cpu).unwrap());
    refused(&[&plain], "lora_B.weight: value 0 is NaN");
}

#[test]
fn a_spec_that_nothing_can_compute_with_is_refused() {
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let base = Linear::new(Tensor::zeros((7, 5), DType::F32, &Device::Cpu).unwrap(), None);
    for (spec, part) in [
        (LoraSpec { rank: 0, ..spec() }, "rank"),
        (LoraSpec { dropout: 1.0, ..spec() }, "dropout"),
        (LoraSpec { alpha: f64::NAN, ..spec() }, "alpha"),
    ] {
        let text = LoraLinear::new(base.clone(), &spec, vb.pp("up")).unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    }
    assert!(matches!(save("nowhere", &[], "base", None), Err(Error::Empty)));
    let copy = Copy::of("bigcode_lora");
    std::fs::remove_file(copy.path().join("adapter_model.safetensors")).unwrap();
    let text = load(copy.path(), &VarMap::new(), DType::F32, &Device::Cpu).unwrap_err().to_string();
    assert!(text.contains("adapter_model.safetensors: cannot be read"), "{text}");
}
