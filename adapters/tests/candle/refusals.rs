//! Adapters that are refused, and the sentences.

use candle_core::{DType, Device, Tensor};
use engraft_adapters::candle::{Adapter, with_adapter};
use serde_json::json;

use crate::support::{Copy, adapter_of, base, builder, golden};

#[track_caller]
fn refused(copy: &Copy, parts: &[&str]) {
    let error = Adapter::open(copy.path()).unwrap_err();
    let text = error.to_string();
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    assert!(error.is_input(), "{text}");
}

#[test]
fn methods_that_do_not_fold_into_weights_are_refused() {
    for method in ["PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "LOKR"] {
        let copy = Copy::of("bigcode_lora").set("peft_type", json!(method));
        refused(&copy, &[method, "a method that folds into weights is expected: LORA, IA3 or LN_TUNING"]);
    }
    // Several methods in one folder: the prefix is the one that cannot be folded.
    let several = golden().parent().unwrap().join("fixtures/lora_and_prefix");
    let text = Adapter::open(several).unwrap_err().to_string();
    assert!(text.contains("PREFIX_TUNING") && !text.contains("num_virtual_tokens"), "{text}");
}

#[test]
fn fields_that_would_change_the_result_are_refused() {
    for (field, value) in [
        ("init_lora_weights", json!("pissa")),
        ("layer_replication", json!([[0, 2], [1, 3]])),
        ("target_parameters", json!(["experts.gate_up_proj"])),
        ("trainable_token_indices", json!([1, 2])),
        ("alora_invocation_tokens", json!([5])),
        ("bias", json!("some")),
        ("a_field_of_a_later_version", json!(true)),
    ] {
        refused(&Copy::of("bigcode_lora").set(field, value.clone()), &[field, &value.to_string()]);
    }
    refused(&Copy::of("bigcode_lora").set("r", json!(0)), &["rank", "at least 1"]);
    refused(&Copy::of("bigcode_lora").set("rank_pattern", json!({"(": 2})), &["rank_pattern", "("]);
}

#[test]
fn config_and_tensors_must_belong_together() {
    let a = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight";
    let b = "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight";
    let of = |change: &dyn Fn(&mut crate::support::Tensors)| Copy::of("bigcode_lora").tensors(change);
    refused(&of(&|tensors| drop(tensors.remove(b))), &[b, "is missing"]);
    refused(
        &Copy::of("bigcode_lora").set("use_dora", json!(true)),
        &["lora_magnitude_vector is missing", "more"],
    );
    refused(
        &Copy::of("llama_dora").set("use_dora", json!(false)),
        &["lora_magnitude_vector is not expected"],
    );
    refused(&Copy::of("bert_lora_bias").set("lora_bias", json!(false)), &["lora_B.bias is not expected"]);
    refused(
        &Copy::of("bigcode_ln_tuning").tensors(|tensors| {
            let gain = tensors["base_model.model.transformer.ln_f.ln_tuning_layers.weight"].clone();
            tensors.insert("base_model.model.transformer.ln_f.ia3_l".to_owned(), gain);
        }),
        &["ln_f.ia3_l is not expected"],
    );
    refused(&Copy::of("bigcode_lora").set("rank_pattern", json!({})), &["has shape [2, 24] where [3, 24]"]);
    refused(
        &of(&|tensors| {
            let scalar = tensors[a].flatten_all().unwrap();
            tensors.insert(a.to_owned(), scalar);
        }),
        &[a, "has shape [72]"],
    );
    refused(
        &of(&|tensors| {
            let convolution = tensors[a].reshape((3, 24, 1, 1)).unwrap();
            tensors.insert(a.to_owned(), convolution);
        }),
        &["h.0.attn.c_attn where a linear module or an embedding is supported", "merge_and_unload"],
    );
    refused(
        &of(&|tensors| {
            let nan = (&tensors[a] * f64::NAN).unwrap();
            tensors.insert(a.to_owned(), nan);
        }),
        &[a, "is not finite at 0"],
    );
    refused(
        &of(&|tensors| {
            let moved = tensors.remove(a).unwrap();
            tensors.insert("transformer.h.0.attn.c_attn.lora_A.weight".to_owned(), moved);
        }),
        &["tensor transformer.h.0.attn.c_attn.lora_A.weight is not expected", "lora_A.weight is missing"],
    );
}

#[test]
fn modules_are_those_that_the_config_chooses() {
    let chosen = |copy: Copy| Adapter::open(copy.path()).map(|_| ()).map_err(|error| error.to_string());
    let of = |targets| Copy::of("bigcode_lora").set("target_modules", targets);
    for targets in [
        json!("all-linear"),
        json!(r"transformer\.h\.\d\.(attn|mlp)\.c_(attn|proj|fc)"),
        json!(r"(?!lm_head).*"), // Python's alone: nothing to compare with
        json!(["c_fc", "c_proj", "attn.c_attn"]),
    ] {
        chosen(of(targets)).unwrap();
    }
    for (copy, module) in [
        (of(json!(["c_attn", "c_proj"])), "h.0.mlp.c_fc"),
        (of(json!(r".*c_(attn|fc)")), "h.0.attn.c_proj"),
        (of(json!(["c_attn", "c_proj", "c_fc"])).set("layers_to_transform", json!([0])), "h.1.attn.c_attn"),
        (of(json!(["c_attn", "c_proj", "c_fc"])).set("exclude_modules", json!(["mlp.c_fc"])), "h.0.mlp.c_fc"),
        (Copy::of("llama_layers").set("layers_pattern", json!("blocks")), "layers.1"),
    ] {
        let text = chosen(copy).unwrap_err();
        assert!(text.contains("target_modules") && text.contains(module), "{text}");
    }
}

#[test]
fn a_module_that_the_config_adapts_and_the_file_lacks_is_refused_when_it_is_loaded() {
    let keep =
        |tensors: &mut crate::support::Tensors| tensors.retain(|name, _| !name.contains("h.1.mlp.c_fc"));
    let copy = Copy::of("bigcode_lora").tensors(keep);
    let (vb, _) = with_adapter(builder(base("bigcode")), copy.path(), DType::F32, &Device::Cpu).unwrap();
    vb.get((40, 24), "transformer.h.0.mlp.c_fc.weight").unwrap();
    vb.get(24, "transformer.h.1.ln_1.weight").unwrap();
    let text = vb.get((40, 24), "transformer.h.1.mlp.c_fc.weight").unwrap_err().to_string();
    assert!(text.contains("transformer.h.1.mlp.c_fc.* is missing"), "{text}");
}

#[test]
fn a_weight_of_another_shape_is_refused_when_it_is_loaded() {
    for (case, name) in [
        ("bigcode_lora", "c_attn"),
        ("bigcode_ia3", "c_attn"),
        ("bigcode_biases", "c_attn"),
        ("bigcode_ia3", "mlp.c_proj"),
    ] {
        let name = format!("transformer.h.0.{}.weight", if name == "c_attn" { "attn.c_attn" } else { name });
        let mut weights = base("bigcode");
        weights.insert(name.clone(), Tensor::zeros((41, 25), DType::F32, &Device::Cpu).unwrap());
        let (vb, _) = with_adapter(builder(weights), adapter_of(case), DType::F32, &Device::Cpu).unwrap();
        let text = vb.get_unchecked(&name).unwrap_err().to_string();
        assert!(text.contains(&name) && text.contains("where [41, 25] is expected"), "{text}");
        assert!(text.contains("give the base that it was trained on"), "{text}");
    }
}

#[test]
fn a_folder_without_an_adapter_is_refused() {
    let empty = tempfile::tempdir().unwrap();
    let text = Adapter::open(empty.path()).unwrap_err().to_string();
    assert!(text.contains("is no adapter"), "{text}");
    let text = Adapter::open(empty.path().join("nowhere")).unwrap_err().to_string();
    assert!(text.contains("nowhere: cannot be read"), "{text}");
}
