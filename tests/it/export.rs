//! `engraft export`: what the files contain, what is read back from them, files of other programs, and what is refused.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::BufReader,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor, quantized::gguf_file::Content};
use engraft::model::Base;
use engraft_adapters::{
    AdapterSet, AdapterSpec, DoraSpec, FoldPart, Folding, LoraSpec, Targets, VeraSpec, peft,
};
use serde_json::{Value, json};

use crate::{
    cli_support::{Finished, Sandbox, evaluated, names},
    setup::{Case, case, golden, prefix},
};

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

fn export(sandbox: &Sandbox, base: &Path, line: &str) -> Finished {
    sandbox.engraft(&format!("export --base {} {line} --json", base.display()))
}

/// Shape and values of tensors, by name.
type GgufTensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A GGUF file as candle reads it: its metadata, and values and shape of each tensor.
fn gguf(path: &Path) -> (Content, GgufTensors) {
    let mut file = BufReader::new(File::open(path).unwrap());
    let content = Content::read(&mut file).unwrap();
    let tensor = |name: &String| {
        let tensor = content.tensor(&mut file, name, &Device::Cpu).unwrap().dequantize(&Device::Cpu).unwrap();
        (name.clone(), (tensor.dims().to_vec(), tensor.flatten_all().unwrap().to_vec1().unwrap()))
    };
    let tensors = content.tensor_infos.keys().map(tensor).collect();
    (content, tensors)
}

fn safetensors(path: &Path) -> BTreeMap<String, Tensor> {
    let read = candle_core::safetensors::load(path, &Device::Cpu).unwrap().into_iter();
    read.map(|(name, tensor)| (name, tensor.to_dtype(DType::F32).unwrap())).collect()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// The table by hand: our name to that of GGUF, and whether the matrix stands transposed there.
fn in_gguf(name: &str) -> (String, bool) {
    let mut found = name.replace("transformer.", "").replace("lm_head", "output");
    let transposed = found.starts_with("h.") && !found.contains("ln_") && found.ends_with("weight");
    for (ours, theirs) in [
        ("h.", "blk."),
        ("wte", "token_embd"),
        ("wpe", "position_embd"),
        ("ln_f", "output_norm"),
        ("ln_1", "attn_norm"),
        ("ln_2", "ffn_norm"),
        ("attn.c_attn", "attn_qkv"),
        ("attn.c_proj", "attn_output"),
        ("mlp.c_fc", "ffn_up"),
        ("mlp.c_proj", "ffn_down"),
    ] {
        let is_layer = ours == "h." && !found.starts_with("h.");
        if !is_layer {
            found = found.replacen(ours, theirs, 1);
        }
    }
    (found, transposed)
}

/// Largest difference between the tensors of a GGUF file and a safetensors file, each relative to its largest value.
fn largest_error(gguf: &GgufTensors, model: &BTreeMap<String, Tensor>) -> f32 {
    assert_eq!(gguf.len(), model.len());
    let mut worst: f32 = 0.0;
    for (name, tensor) in model {
        let (name, transposed) = in_gguf(name);
        let tensor = if transposed { tensor.t().unwrap() } else { tensor.clone() };
        let (shape, found) = &gguf[&name];
        assert_eq!(shape, tensor.dims(), "{name}");
        let expected = values(&tensor.contiguous().unwrap());
        let largest = expected.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        let error = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        worst = worst.max(error / largest);
    }
    worst
}

#[test]
fn a_base_is_written_as_gguf() {
    let embedded = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/base");
    // Half a step of Q8_0 is 1/254 of the largest of a block. The scale is FP16, off by 1/2048 of itself at most, and is
    // multiplied by codes of up to 127: ggml's own quantiser reaches 4.12e-3 on this base, too.
    for (base, dtype, bound) in [
        (embedded.clone(), "f32", 0.0),
        (embedded.clone(), "f16", 0.0),
        (embedded, "q8_0", 1.0 / 254.0 + 1.0 / 2048.0),
        (fixture("bases/untied"), "f32", 0.0),
        (fixture("bases/n_inner"), "f16", 0.0),
        (fixture("bases/f32_rounded"), "f32", 0.0),
        (fixture("bases/odd_heads"), "q8_0", 0.0),
    ] {
        let sandbox = Sandbox::new();
        let line = format!("--to gguf --output base.gguf --dtype {dtype}");
        let event = export(&sandbox, &base, &line).succeeds().events().remove(0);
        let (content, tensors) = gguf(&sandbox.path("base.gguf"));
        let error = largest_error(&tensors, &safetensors(&base.join("model.safetensors")));
        assert!(
            error <= bound && (dtype != "q8_0" || bound == 0.0 || error > 0.0),
            "{}: {error}",
            base.display()
        );
        assert_eq!(event["bytes"].as_u64().unwrap(), fs::metadata(sandbox.path("base.gguf")).unwrap().len());
        let config: Value = serde_json::from_slice(&fs::read(base.join("config.json")).unwrap()).unwrap();
        let number = |key: &str| u64::from(content.metadata[key].to_u32().unwrap());
        for (key, field) in [
            ("gpt2.block_count", "n_layer"),
            ("gpt2.context_length", "n_positions"),
            ("gpt2.embedding_length", "n_embd"),
            ("gpt2.attention.head_count", "n_head"),
            ("gpt2.vocab_size", "vocab_size"),
        ] {
            assert_eq!(number(key), config[field].as_u64().unwrap(), "{key}");
        }
        let inner = config["n_inner"].as_u64().unwrap_or(4 * number("gpt2.embedding_length"));
        assert_eq!(number("gpt2.feed_forward_length"), inner);
        let changes: Vec<&str> =
            event["changes"].as_array().unwrap().iter().map(|change| change.as_str().unwrap()).collect();
        let tokenizer = content.metadata["tokenizer.ggml.model"].to_string().unwrap().as_str();
        if base.join("tokenizer.json").exists() {
            assert!(changes.is_empty(), "{changes:?}");
            let tokens = content.metadata["tokenizer.ggml.tokens"].to_vec().unwrap();
            assert_eq!((tokenizer, tokens.len() as u64), ("gpt2", number("gpt2.vocab_size")));
            assert_eq!(tokens[0].to_string().unwrap(), "<|endoftext|>");
            assert_eq!(number("tokenizer.ggml.eos_token_id"), 0);
        } else {
            assert_eq!((tokenizer, changes.last().unwrap().contains("no tokenizer")), ("no_vocab", true));
        }
        // Rows of 15 have no blocks of 32, and those of 60 neither.
        assert_eq!(changes.iter().any(|change| change.contains("in f16")), base.ends_with("odd_heads"));
    }
}

fn spec(lora: LoraSpec) -> AdapterSpec {
    lora.into()
}

fn odd() -> LoraSpec {
    LoraSpec { rank: 3, alpha: 7.0, targets: Targets::AllLinear, ..LoraSpec::default() }
}

/// Adapters of the base tiny that are plain LoRAs, or can be made ones.
fn plain_specs() -> Vec<(&'static str, AdapterSpec)> {
    let patterns = LoraSpec {
        rank_pattern: [("h.1.mlp.c_fc".to_owned(), 5)].into(),
        alpha_pattern: [("attn.c_proj".to_owned(), -2.0)].into(),
        rslora: true,
        ..odd()
    };
    let parts = LoraSpec { targets: "q,v".parse().unwrap(), layers: Some(vec![0, 2]), ..odd() };
    vec![
        ("all", spec(odd())),
        ("patterns", spec(patterns)),
        ("parts", spec(parts)),
        ("vera", VeraSpec { rank: 4, targets: "c_fc".parse().unwrap(), ..VeraSpec::default() }.into()),
    ]
}

/// Writes an adapter of the base tiny into the sandbox.
fn put(sandbox: &Sandbox, name: &str, spec: &AdapterSpec) -> (AdapterSet, Vec<f32>) {
    let base = golden("tiny").description();
    let set = AdapterSet::new(spec, &base).unwrap();
    let values = crate::setup::values(&set);
    peft::save(&sandbox.path(name), &set, &values, None, &base).unwrap();
    (set, values)
}

/// What an adapter adds to every weight of the base tiny, `[inputs, outputs]`, by the module's name in GGUF.
fn deltas(set: &AdapterSet, values: &[f32], factor: f32) -> BTreeMap<String, Vec<f32>> {
    let base = golden("tiny").description();
    let folding = Folding::new(vec![FoldPart { set, values, factor }]).unwrap();
    let mut all = BTreeMap::new();
    for layer in 0..base.layers {
        for (site, of) in
            base.sites.iter().enumerate().filter(|(site, _)| folding.changes_linear(layer, *site))
        {
            let mut weight = vec![0.0; of.inputs * of.outputs];
            folding.linear(layer, site, &mut weight, &mut vec![0.0; of.outputs]);
            all.insert(in_gguf(&format!("{}.weight", of.module(layer))).0, weight);
        }
    }
    all
}

#[test]
fn a_lora_in_gguf_adds_what_the_adapter_adds() {
    for (name, spec) in plain_specs() {
        let sandbox = Sandbox::new();
        let (set, stored) = put(&sandbox, name, &spec);
        for (scale, dtype, bound) in [(1.0, "f32", 2e-6), (-0.5, "f32", 2e-6), (1.0, "f16", 2e-3)] {
            let line =
                format!("--to gguf --adapter {name}={scale} --output {dtype}{scale}.gguf --dtype {dtype}");
            export(&sandbox, &fixture("bases/tiny"), &line).succeeds();
            let (content, tensors) = gguf(&sandbox.path(&format!("{dtype}{scale}.gguf")));
            for (key, text) in
                [("general.type", "adapter"), ("adapter.type", "lora"), ("general.architecture", "gpt2")]
            {
                assert_eq!(content.metadata[key].to_string().unwrap(), text);
            }
            // llama.cpp: y += alpha / rank (x A^T) B^T, the rank that of each pair.
            let alpha = content.metadata["adapter.lora.alpha"].to_f32().unwrap();
            let expected = deltas(&set, &stored, scale);
            assert_eq!(tensors.len(), 2 * expected.len());
            for (weight, expected) in expected {
                let (a_shape, a) = &tensors[&format!("{weight}.lora_a")];
                let (b_shape, b) = &tensors[&format!("{weight}.lora_b")];
                let (rank, inputs, outputs) = (a_shape[0], a_shape[1], b_shape[0]);
                assert_eq!((b_shape[1], inputs * outputs), (rank, expected.len()));
                let largest = expected.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                for (at, expected) in expected.iter().enumerate() {
                    let (i, o) = (at / outputs, at % outputs);
                    let sum: f32 = (0..rank).map(|r| a[r * inputs + i] * b[o * rank + r]).sum();
                    let error = (alpha / rank as f32 * sum - expected).abs() / largest;
                    assert!(error < bound, "{name} {dtype}: {error} at {at} of {weight}");
                }
            }
        }
    }
}

#[test]
fn a_merged_gguf_has_the_weights_of_the_merged_folder() {
    let sandbox = Sandbox::new();
    let base = fixture("bases/tiny");
    put(&sandbox, "lora", &spec(odd()));
    put(&sandbox, "dora", &DoraSpec { lora: odd() }.into());
    for adapters in ["--adapter lora=0.5 --adapter lora=-0.25", "--adapter dora"] {
        let line = format!("merge --base {} {adapters} --output merged --dtype f32 --json", base.display());
        let changed = sandbox.engraft(&line).succeeds().events()[0]["changed"].clone();
        assert!(changed.as_u64().unwrap() > 0);
        for (dtype, bound) in [("f32", 0.0), ("f16", 5e-4), ("q8_0", 1.0 / 254.0 + 1.0 / 2048.0)] {
            let line = format!("--to merged-gguf {adapters} --output {dtype}.gguf --dtype {dtype}");
            export(&sandbox, &base, &line).succeeds();
            let (_, tensors) = gguf(&sandbox.path(&format!("{dtype}.gguf")));
            let error = largest_error(&tensors, &safetensors(&sandbox.path("merged/model.safetensors")));
            assert!(error <= bound, "{dtype}: {error}");
            fs::remove_file(sandbox.path(&format!("{dtype}.gguf"))).unwrap();
        }
        fs::remove_dir_all(sandbox.path("merged")).unwrap();
    }
}

#[test]
fn every_export_is_read_as_the_adapter_it_came_from() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 10 --targets q,v").succeeds();
    let expected = evaluated(&sandbox, Some("run"));
    assert!((evaluated(&sandbox, None) - expected).abs() > 0.05, "the adapter does nothing");
    for (to, output) in [("gguf", "a.gguf"), ("mlx", "mlx"), ("peft", "peft"), ("loralib", "a.pt")] {
        let text =
            sandbox.engraft(&format!("export --to {to} --adapter run --output {output}")).succeeds().stdout();
        for part in [
            "exported run for embedded: attn.c_attn.q: layers 0-5",
            &format!("wrote    {output}"),
            "try it: ",
        ] {
            assert!(text.contains(part), "{text}");
        }
        let inspected = sandbox.engraft(&format!("inspect {output}")).succeeds().stdout();
        assert!(inspected.contains("kind: adapter"), "{inspected}");
    }
    let names_of = |folder: &str| names(&sandbox.path(folder));
    assert_eq!(names_of("peft"), ["README.md", "adapter_config.json", "adapter_model.safetensors"]);
    assert_eq!(names_of("mlx"), ["adapter_config.json", "adapters.safetensors"]);
    let line = "export --to peft --base embedded --adapter a.pt --lora-alpha 5 --output back";
    sandbox.engraft(line).succeeds();
    let close = |loss: f64| assert!((loss - expected).abs() < 1e-5, "{loss} {expected}");
    for adapter in ["a.gguf", "peft", "back", "mlx"] {
        close(evaluated(&sandbox, Some(adapter)));
    }
    // The parts are still apart, so that a training keeps their zeros.
    let back: Value =
        serde_json::from_str(&sandbox.engraft("inspect back --json").succeeds().stdout()).unwrap();
    assert_eq!(back["adapters"][0]["lora"]["targets"], json!(["attn.c_attn.q", "attn.c_attn.v"]));
    // A GGUF file names its base, and is trained further.
    let more = sandbox.engraft(
        "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --steps 1 --threads 1 --init-adapter a.gguf --output \
         more --lr 1e-12 --json",
    );
    more.succeeds();
    close(evaluated(&sandbox, Some("more")));
    let refused = sandbox.engraft("eval --adapter a.pt --base embedded --data data.jsonl");
    refused.refused(&[
        "a.pt: does not tell the alpha",
        "engraft export --to peft --adapter a.pt --lora-alpha N",
    ]);
    let none = sandbox.engraft("eval --adapter a.pt --data data.jsonl");
    none.refused(&["--adapter a.pt: names no base; give the one that it was trained on with --base"]);
}

#[test]
fn files_of_loralib_mean_what_loralib_makes_of_them() {
    let base = golden("tiny").description();
    let before = safetensors(&fixture("bases/tiny/model.safetensors"));
    let merged = safetensors(&fixture("loralib/merged.safetensors"));
    for file in ["loralib/adapter.pt", "loralib/nested.pt"] {
        let sandbox = Sandbox::new();
        let line = format!("--to peft --adapter {} --lora-alpha 7 --output peft", fixture(file).display());
        export(&sandbox, &fixture("bases/tiny"), &line).succeeds();
        let loaded = peft::load(&sandbox.path("peft"), &base, false).unwrap();
        let found = deltas(&loaded.set, &loaded.values, 1.0);
        assert_eq!((found.len(), merged.len()), (6, 6));
        for (name, merged) in &merged {
            let (found, before) = (&found[&in_gguf(name).0], values(&before[name]));
            let merged = values(merged);
            let changed = merged.iter().zip(&before).map(|(a, b)| a - b).collect::<Vec<_>>();
            let largest = changed.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            let error = found.iter().zip(&changed).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // The difference of two weights loses some bits of them.
            assert!(largest > 0.3 && error < 1e-6 * largest.max(1.0), "{name}: {error} of {largest}");
        }
    }
}

/// The fields that each version's LoraConfig had; the folder is that of 0.2.
#[test]
fn adapters_of_old_versions_of_peft_are_read() {
    let base = golden("tiny").description();
    let new = peft::load(&fixture("cases/lora_c_attn/adapter"), &base, false).unwrap();
    let config: Value =
        serde_json::from_slice(&fs::read(fixture("old_peft/adapter_config.json")).unwrap()).unwrap();
    let since_0_3 = json!({ "enable_lora": null, "merge_weights": null, "init_lora_weights": true });
    let since_0_6 = json!({
        "layers_to_transform": null, "layers_pattern": null, "rank_pattern": {}, "alpha_pattern": {}, "revision": null,
        "auto_mapping": null,
    });
    let since_0_10 = json!({
        "use_rslora": false, "megatron_config": null, "megatron_core": "megatron.core", "loftq_config": {},
        "use_dora": false, "layer_replication": null,
    });
    let mut fields = config.as_object().unwrap().clone();
    for (version, added) in [("0.2", json!({})), ("0.3", since_0_3), ("0.6", since_0_6), ("0.10", since_0_10)]
    {
        let sandbox = Sandbox::new();
        fields.extend(added.as_object().unwrap().clone());
        sandbox.write("adapter_config.json", Value::from(fields.clone()).to_string());
        fs::copy(fixture("old_peft/adapter_model.bin"), sandbox.path("adapter_model.bin")).unwrap();
        let old = peft::load(&sandbox.path(""), &base, false).unwrap();
        assert!(old.values.iter().any(|value| *value != 0.0));
        assert_eq!((&old.values, &old.set), (&new.values, &new.set), "{version}");
        let described = peft::describe(&sandbox.path("")).unwrap();
        assert!(described.adapters[0].unsupported.is_empty(), "{version}");
        assert_eq!(described.adapters[0].parameters, old.values.len());
        if version == "0.2" {
            // One A and B for two parts: no delta of the whole module.
            let merged = json!({ "enable_lora": [true, false, true] });
            let mut fields = fields.clone();
            fields.extend(merged.as_object().unwrap().clone());
            sandbox.write("adapter_config.json", Value::from(fields).to_string());
            let error = peft::load(&sandbox.path(""), &base, false).unwrap_err().to_string();
            assert!(error.contains("enable_lora is [true,false,true]"), "{error}");
        }
    }
}

#[test]
fn a_gguf_model_is_described() {
    let sandbox = Sandbox::new();
    sandbox.engraft("export --to gguf --output base.gguf --dtype q8_0").succeeds();
    let found: Value =
        serde_json::from_str(&sandbox.engraft("inspect base.gguf --json").succeeds().stdout()).unwrap();
    assert_eq!((found["kind"].as_str(), found["name"].as_str()), (Some("model"), Some("embedded")));
    assert_eq!((found["tokens"].as_u64(), found["sizes"]["block_count"].as_u64()), (Some(1536), Some(6)));
    assert_eq!(found["types"], json!({ "F32": 51, "Q8_0": 25 }));
    let refused = sandbox.engraft("eval --adapter base.gguf --base embedded --data data.jsonl");
    refused.refused(&["base.gguf: general.type is model, not adapter"]);
}

#[test]
fn what_cannot_be_exported_is_refused_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    let base = fixture("bases/tiny");
    let tiny: &Base = &golden("tiny");
    put(&sandbox, "lora", &spec(odd()));
    put(&sandbox, "dora", &DoraSpec { lora: odd() }.into());
    let Case { set, values, .. } = case("prefix", tiny, None, Some(prefix(3, None)));
    peft::save(&sandbox.path("prefix"), &set, &values, None, &tiny.description()).unwrap();
    let before = names(&sandbox.path(""));
    let refused = |line: &str, parts: &[&str]| {
        export(&sandbox, &base, line).refused(parts);
        let mut left = names(&sandbox.path(""));
        left.retain(|name| name != "cache");
        assert_eq!(left, before, "{line}");
    };
    for to in ["gguf", "mlx", "loralib", "peft"] {
        let line = |adapter: &str| format!("--to {to} --adapter {adapter} --output out");
        refused(
            &line("dora"),
            &[
                "--adapter dora: an adapter with magnitudes of columns (DoRA) is no plain LoRA",
                &format!("--to {to} needs; fold it into a model with --to merged-gguf"),
            ],
        );
        refused(
            &line("prefix"),
            &["an adapter with a prefix is no plain LoRA", "use it with engraft or PEFT"],
        );
        refused(
            &line("lora --adapter lora"),
            &[&format!("--to {to}: takes one adapter, not 2"), "engraft combine"],
        );
    }
    refused(
        "--to merged-gguf --adapter prefix --output out",
        &["--adapter prefix: a prefix (", "is no weight"],
    );
    refused(
        "--to merged-gguf --output out",
        &["--to merged-gguf: folds adapters", "--to gguf for the base alone"],
    );
    refused("--to mlx --output out", &["--to mlx: needs an adapter; name it with --adapter"]);
    refused(
        "--to onnx --output out",
        &["--to onnx: is an invalid value; give peft, gguf, mlx, loralib or merged-gguf"],
    );
    refused(
        "--to gguf --adapter lora --output out --dtype q8_0",
        &["--dtype q8_0: rows of a LoRA's B are shorter"],
    );
    refused("--to mlx --adapter lora --output out --dtype f16", &["--dtype: mlx is written in f32"]);
    for dtype in ["q8", "nf4"] {
        let why = "an export reads the base's own files, not codes; leave it out";
        refused(
            &format!("--to gguf --output out --base-dtype {dtype}"),
            &[&format!("--base-dtype {dtype}: {why}")],
        );
    }
    refused("--to gguf --output lora", &["--output lora: is there already; name a new file"]);
    refused("--to gguf --output no/where", &["--output no/where: cannot be written", "check the path"]);
    refused(
        "--to gguf --adapter lora --output out --lora-alpha 3",
        &["--lora-alpha: is for .pt files of loralib alone; leave it out"],
    );
    refused("--to gguf --output out --lora-alpha nan", &["--lora-alpha NaN: is not finite"]);
    refused(
        "--to merged-gguf --adapter lora=1e9 --output out --dtype f16",
        &["--dtype f16: transformer.h.0.attn.c_attn.weight becomes", "give --dtype f32"],
    );
    for (name, what) in [
        ("relu", "activation_function other than gelu_new"),
        ("gelu", "activation_function other than gelu_new"),
        ("unscaled_attn", "scale_attn_weights false"),
        ("inverse_layer_idx", "scale_attn_by_inverse_layer_idx true"),
    ] {
        let other = fixture("bases").join(name);
        export(&sandbox, &other, "--to gguf --output out").refused(&[what, "llama.cpp does not compute"]);
        assert!(!sandbox.path("out").exists());
    }
    let of_another = fixture("bases/untied");
    export(&sandbox, &of_another, "--to gguf --adapter lora --output out").refused(&["lora: does not fit"]);
}
