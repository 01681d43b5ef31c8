//! `engraft merge`: against PEFT's merge_and_unload, against base and adapter themselves, on every form of base, and what
//! it refuses.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use candle_core::{DType, Device, Tensor};
use engraft::{
    convert::{Merge, WeightDtype, compare},
    model::{Base, BaseSource},
};
use engraft_adapters::{
    AdapterSet, AdapterSpec, EmbeddingDelta, FoldPart, Folding, LnTuningSpec, Lora, NormVectors, OutputScale,
    SiteVectors, TensorSlot, peft,
};
use engraft_util::rng;
use serde_json::{Value, json};

use crate::{
    cli_support::{Finished, Sandbox, names},
    embedding_parts::empty,
    setup::{Case, case, golden, lora, prefix, row, within},
};

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path)
}

type Tensors = BTreeMap<String, Tensor>;

fn tensors(path: &Path) -> Tensors {
    candle_core::safetensors::load(path, &Device::Cpu).unwrap().into_iter().collect()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn merge(sandbox: &Sandbox, base: &Path, adapter: &str, more: &str) -> Finished {
    sandbox.engraft(&format!(
        "merge --base {} --adapter {adapter} --output merged --threads 1 --json {more}",
        base.display()
    ))
}

/// Loads a folder as a base, with the sandbox's cache.
fn load(sandbox: &Sandbox, name: &str) -> Arc<Base> {
    let source = BaseSource::Folder(sandbox.path(name));
    Arc::new(Base::load(&source, name, &sandbox.path("cache")).unwrap())
}

#[test]
fn a_lora_is_merged_as_peft_merges_it() {
    let sandbox = Sandbox::new();
    let folder = fixture("cases/lora_all_rslora_patterns");
    let adapter = folder.join("adapter").display().to_string();
    let event =
        merge(&sandbox, &fixture("bases/tiny"), &adapter, "--dtype f32").succeeds().events().remove(0);
    let expected = tensors(&folder.join("merged.safetensors"));
    let before = tensors(&fixture("bases/tiny/model.safetensors"));
    let merged = tensors(&sandbox.path("merged/model.safetensors"));
    assert_eq!(merged.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>());
    assert_eq!(expected.len(), 12);
    assert_eq!((event["changed"].as_u64(), event["methods"].clone()), (Some(12), json!(["lora"])));
    for (name, found) in &merged {
        assert_eq!(found.dtype(), DType::F32);
        let wanted = expected.get(name).unwrap_or(&before[name]);
        let (found, wanted) = (values(found), values(wanted));
        if expected.contains_key(name) {
            // Sums of at most five products in another order.
            let largest = wanted.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            let error = found.iter().zip(&wanted).map(|(f, w)| (f - w).abs()).fold(0.0, f64::max);
            within(error / largest, 3e-7, name);
            assert!(found != values(&before[name]), "{name} is the base's");
        } else {
            assert!(found == wanted, "{name} changed");
        }
    }
    // The program itself computes in FP16 weights, which round the merged ones once more.
    let logits = &event["logits"];
    let [largest, mean, size] =
        ["largest_difference", "mean_difference", "largest_logit"].map(|key| logits[key].as_f64().unwrap());
    assert!(0.0 < mean && mean < largest && largest < 4e-3 * size, "{logits}");
    assert_eq!((logits["tokens"].as_u64(), logits["text"].as_str()), (Some(8 * 40), Some("random text")));
}

#[test]
fn trained_norms_take_the_place_of_the_base_s() {
    let sandbox = Sandbox::new();
    let adapter = fixture("cases/ln_tuning/adapter");
    let event = merge(&sandbox, &fixture("bases/tiny"), &adapter.display().to_string(), "--dtype f32");
    let event = event.succeeds().events().remove(0);
    let merged = tensors(&sandbox.path("merged/model.safetensors"));
    let trained = tensors(&adapter.join("adapter_model.safetensors"));
    assert_eq!((event["changed"].as_u64(), trained.len()), (Some(14), 14));
    for (name, trained) in trained {
        let name = name.strip_prefix("base_model.model.").unwrap().replace(".ln_tuning_layers", "");
        assert!(values(&merged[&name]) == values(&trained), "{name}");
    }
}

/// A LoRA for the base in `folder`, written to `adapter` in the sandbox.
fn write_adapter(sandbox: &Sandbox, folder: &Path) {
    let base = Base::load(&BaseSource::Folder(folder.to_owned()), "base", &sandbox.path("cache")).unwrap();
    let Case { set, values, .. } = case("lora", &base, Some(lora("c_attn,c_fc", 0.0)), None);
    peft::save(&sandbox.path("adapter"), &set, &values, None, &base.description()).unwrap();
}

#[test]
fn every_form_of_base_is_merged_from_its_own_precision() {
    for (name, file, dtype) in [
        ("tiny", "model.safetensors", "f16"),
        ("tiny", "model.safetensors", "bf16"),
        ("bf16", "model.safetensors", "bf16"),
        ("f32_rounded", "model.safetensors", "f32"),
        ("old_upload", "model.safetensors", "f16"),
        ("sharded", "", "f16"),
        ("torch_bin", "", "f32"),
        ("untied", "model.safetensors", "f16"),
        ("n_inner", "model.safetensors", "f16"),
    ] {
        let sandbox = Sandbox::new();
        let folder = fixture("bases").join(name);
        write_adapter(&sandbox, &folder);
        let event =
            merge(&sandbox, &folder, "adapter", &format!("--dtype {dtype}")).succeeds().events().remove(0);
        assert_eq!(names(&sandbox.path("merged")), ["config.json", "model.safetensors"], "{name}");
        let logits = &event["logits"];
        let [largest, size] =
            ["largest_difference", "largest_logit"].map(|key| logits[key].as_f64().unwrap());
        // BF16 has 8 bits, FP16 11.
        let bound = if dtype == "bf16" { 4e-2 } else { 5e-3 };
        assert!(largest > 0.0 && largest < bound * size, "{name} in {dtype}: {logits}");
        let merged = tensors(&sandbox.path("merged/model.safetensors"));
        let wanted = ["f16", "bf16", "f32"].iter().position(|&known| known == dtype).unwrap();
        let wanted = [DType::F16, DType::BF16, DType::F32][wanted];
        assert!(merged.values().all(|tensor| tensor.dtype() == wanted), "{name}");
        assert_eq!(merged.contains_key("lm_head.weight"), name == "untied");
        if !file.is_empty() {
            // What no adapter changed is the source's, rounded once; in its own type not at all.
            let source = tensors(&folder.join(file));
            let before = source.get("transformer.wpe.weight").or(source.get("wpe.weight")).unwrap();
            assert!(
                values(&merged["transformer.wpe.weight"]) == values(&before.to_dtype(wanted).unwrap()),
                "{name}"
            );
        }
        let config: Value =
            serde_json::from_slice(&fs::read(sandbox.path("merged/config.json")).unwrap()).unwrap();
        let torch = [("f16", "float16"), ("bf16", "bfloat16"), ("f32", "float32")];
        assert_eq!(config["dtype"], torch.iter().find(|(known, _)| *known == dtype).unwrap().1);
        // A base like any other.
        let look = sandbox.engraft("inspect merged --json").succeeds().events().remove(0);
        assert_eq!(look["kind"], "base");
    }
}

#[test]
fn a_large_model_is_cut_into_files_as_transformers_cuts_it() {
    let sandbox = Sandbox::new();
    let base = fixture("bases/tiny");
    write_adapter(&sandbox, &base);
    merge(&sandbox, &base, "adapter", "").succeeds();
    let whole = load(&sandbox, "merged").weights.fingerprint.clone();
    fs::remove_dir_all(sandbox.path("merged")).unwrap();
    // Empty folders are taken as they are.
    fs::create_dir(sandbox.path("merged")).unwrap();
    let event = merge(&sandbox, &base, "adapter", "--max-shard-size 12KiB").succeeds().events().remove(0);
    let files = names(&sandbox.path("merged"));
    let shards: Vec<&String> = files.iter().filter(|name| name.ends_with(".safetensors")).collect();
    assert!(shards.len() > 3 && shards[0].starts_with("model-00001-of-0000"), "{files:?}");
    assert_eq!(event["files"].as_array().unwrap().len(), shards.len());
    for shard in &shards {
        let bytes =
            tensors(&sandbox.path("merged").join(shard)).values().map(|x| 2 * x.elem_count()).sum::<usize>();
        assert!(bytes <= 12 << 10, "{shard} holds {bytes} bytes");
    }
    let index = fs::read(sandbox.path("merged/model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], event["bytes"]);
    assert_eq!(load(&sandbox, "merged").weights.fingerprint, whole);
}

#[test]
fn a_trained_adapter_is_merged_and_the_result_says_the_same() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 20 --method lora+ln_tuning").succeeds();
    let merged = sandbox.engraft("merge --adapter run --output merged --threads 1 --texts 3").succeeds();
    let text = merged.stdout();
    for part in
        ["merged   lora+ln_tuning into embedded: ", "wrote    merged: ", "logits   differ by ", "try it: "]
    {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(names(&sandbox.path("merged")), ["config.json", "model.safetensors", "tokenizer.json"]);
    let options = "generate --prompt row --max-new-tokens 12 --temperature 0 --threads 1";
    let with_adapter = sandbox.infer(&format!("{options} --adapter run")).succeeds().stdout();
    assert_eq!(sandbox.infer(&format!("{options} --base merged")).succeeds().stdout(), with_adapter);
    assert_ne!(sandbox.infer(options).succeeds().stdout(), with_adapter);
    // Half of the adapter is not the whole, and the sum of two halves is.
    let loss = |more: &str| {
        let line = format!("eval --data data.jsonl --no-pack --seq-len 24 --threads 1 --json {more}");
        sandbox.engraft(&line).succeeds().events()[0]["loss"].as_f64().unwrap()
    };
    sandbox.train("--steps 20 --output lora").succeeds();
    for (output, adapters) in
        [("half", "--adapter lora=0.5"), ("both", "--adapter lora=0.5 --adapter lora/adapter=0.5")]
    {
        sandbox.engraft(&format!("merge {adapters} --output {output} --threads 1")).succeeds();
    }
    let [whole, half, both] = ["--base embedded --adapter lora", "--base half", "--base both"].map(loss);
    assert!(
        (whole - both).abs() < 2e-3 * whole && (whole - half).abs() > 2e-2 * whole,
        "{whole} {half} {both}"
    );
}

/// Adds a tensor of N(mean, spread^2).
fn tensor(case: &mut Case, name: &str, shape: &[usize], (mean, spread): (f32, f32)) -> usize {
    let layout = &mut case.set.layout;
    let slot = TensorSlot {
        name: name.to_owned(),
        shape: shape.to_vec(),
        offset: layout.len,
        group: 0,
        method: "by hand",
    };
    let key = rng::key(&[7, rng::name(name)]);
    case.values.extend((0..slot.len() as u64).map(|at| mean + spread * rng::normal(key, at)));
    layout.len += slot.len();
    layout.tensors.push(slot);
    layout.tensors.len() - 1
}

/// A set with every kind of part that weights can hold: at one site g over norms, at another u, g with the bias, and a
/// bias; d and e in both; norms; a delta of the embedding.
fn everything(base: &Base) -> Case {
    let (mut case, description) = (empty("everything"), base.description());
    for (site, over_norms) in [(0, true), (3, false)] {
        let (layer, rank) = (1, 3);
        let (inputs, outputs) = (description.sites[site].inputs, description.sites[site].outputs);
        let columns = if over_norms { 0..outputs } else { 3..outputs - 2 };
        let mut add =
            |what: &str, shape: &[usize], spread| tensor(&mut case, &format!("{site} {what}"), shape, spread);
        let a = add("A", &[rank, inputs], (0.0, 0.3));
        let b = add("B", &[columns.len(), rank], (0.0, 0.2));
        let (d, e) = (add("d", &[rank], (1.0, 0.3)), add("e", &[columns.len()], (1.0, 0.3)));
        let vector = add("g", &[outputs], (1.0, 0.2));
        let u = (!over_norms).then(|| add("u", &[inputs], (1.0, 0.2)));
        let bias = (!over_norms).then(|| add("bias", &[outputs], (0.0, 0.1)));
        let (d, e, part, alpha, scale) = (Some(d), Some(e), None, 1.0, 0.6);
        case.set.loras.push(Lora { layer, site, part, columns, rank, alpha, scale, a, b, d, e });
        let g = Some(OutputScale { vector, over_norms, with_bias: !over_norms });
        case.set.vectors.push(SiteVectors { layer, site, u, g, bias });
    }
    let c = base.config.width;
    let gain = tensor(&mut case, "gain", &[c], (1.0, 0.2));
    let bias = tensor(&mut case, "norm bias", &[c], (0.0, 0.1));
    case.set.norms = vec![
        NormVectors { layer: Some(0), norm: 1, gain: Some(gain), bias: None },
        NormVectors { layer: None, norm: 0, gain: None, bias: Some(bias) },
    ];
    let a = tensor(&mut case, "embedding A", &[2, base.config.vocab], (0.0, 0.3));
    let b = tensor(&mut case, "embedding B", &[c, 2], (0.0, 0.2));
    case.set.embedding = Some(EmbeddingDelta { rank: 2, scale: 1.5, a, b });
    case
}

/// The model's own kernels compute the parts; what is folded has to agree with them up to the rounding of FP16.
#[test]
fn every_part_of_a_contribution_is_folded() {
    for name in ["tiny", "untied"] {
        let (sandbox, base) = (Sandbox::new(), golden(name));
        let Case { set, values, .. } = everything(&base);
        let folding = Folding::new(vec![FoldPart { set: &set, values: &values, factor: 1.0 }]).unwrap();
        let merge = Merge { base: &base, folding: &folding, dtype: WeightDtype::F32, max_shard: u64::MAX };
        let merged = merge.write(&sandbox.path("merged"), &|_, _| {}).unwrap();
        // Two weights, one bias, a gain, a norm's bias, the embedding; a tied head gets a tensor of its own.
        assert_eq!((merged.changed, merged.untied), (if name == "tiny" { 7 } else { 6 }, name == "tiny"));
        let texts: Vec<Vec<u32>> = (0..4).map(|seed| row(seed, 12, 0, base.config.vocab).ids).collect();
        let merged = load(&sandbox, "merged");
        assert!(!merged.config.tied);
        let found = compare(&base, &[(&set, &values, 1.0)], &merged, &texts).unwrap();
        assert!(found.largest > 0.0 && found.tokens == 48, "{found:?}");
        within(found.largest / found.largest_logit, 4e-3, name);
        // The bound can tell them apart: without the adapter the logits are others.
        let without = compare(&base, &[], &merged, &texts).unwrap();
        assert!(without.largest > 0.1 * found.largest_logit, "{without:?}");
    }
}

#[test]
fn what_cannot_be_merged_is_refused_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    let base = fixture("bases/tiny");
    write_adapter(&sandbox, &base);
    let tiny = golden("tiny");
    let put = |name: &str, Case { set, values, .. }: Case| {
        peft::save(&sandbox.path(name), &set, &values, None, &tiny.description()).unwrap();
    };
    put("prefix", case("prefix", &tiny, None, Some(prefix(3, None))));
    put("both", case("both", &tiny, Some(lora("c_attn", 0.0)), Some(prefix(3, None))));
    let set = AdapterSet::new(&AdapterSpec::from(LnTuningSpec::default()), &tiny.description()).unwrap();
    let values = vec![0.5; set.layout.len];
    put("norms", Case { name: "norms", set, values });

    let refused = |adapter: &str, more: &str, parts: &[&str]| {
        merge(&sandbox, &base, adapter, more).refused(parts);
        let left = names(&sandbox.path(""));
        assert!(!left.iter().any(|name| name == "merged" || name.contains(".engraft")), "{left:?}");
    };
    let why = "is no weight of the base";
    refused("prefix", "", &["--adapter prefix: a prefix (", why, "what can be merged: lora"]);
    refused("both", "", &["--adapter both: a prefix (", why]);
    refused("norms=0.5", "", &["--adapter norms=0.5: has no low-rank delta", "leave =0.5 out"]);
    refused("norms --adapter norms", "", &["the same layer norm"]);
    refused(
        "adapter=1e9",
        "",
        &["--dtype f16: transformer.h.0.attn.c_attn.weight becomes", "give --dtype f32"],
    );
    for dtype in ["q8", "nf4"] {
        let (option, why) =
            (format!("--base-dtype {dtype}"), "merging reads the base's own files, not codes");
        refused("adapter", &option, &[&format!("{option}: {why}; leave it out")]);
    }
    refused("adapter", "--dtype q8", &["--dtype q8: is an invalid value; give f16, f32 or bf16"]);
    refused(
        "adapter",
        "--max-shard-size many",
        &["--max-shard-size many: is an invalid value; give a size such as 5GB"],
    );
    refused("adapter", "--data none.txt", &["none.txt: cannot be read"]);
    sandbox.engraft(&format!("merge --base {} --output merged", base.display())).refused(&["--adapter"]);
    sandbox.engraft("merge --adapter adapter").refused(&["--output"]);

    let full = sandbox.path("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("mine"), "kept").unwrap();
    let line = format!("merge --base {} --adapter adapter --output", base.display());
    sandbox
        .engraft(&format!("{line} full"))
        .refused(&["--output full: is not empty; name a folder that is new"]);
    sandbox.engraft(&format!("{line} data.jsonl")).refused(&["--output data.jsonl: is no folder"]);
    assert_eq!(names(&full), ["mine"]);
    // A value beyond FP16 is none beyond F32.
    let large = merge(&sandbox, &base, "adapter=1e6", "--dtype f32");
    assert!(large.stderr().contains("merged is complete, but was not compared: "), "{}", large.stderr());
    assert_eq!(large.succeeds().events()[0]["logits"], Value::Null);
}
