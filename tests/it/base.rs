//! Bases from files: every form of upload, conversion to FP16, the cache, fingerprints, refusals.

use std::{fs, path::Path};

use engraft::model::{Activation, Base, BaseSource, TokenizerFiles};
use half::f16;
use safetensors::Dtype;
use serde_json::json;

use crate::base_files::{
    Values, files, fingerprint, folder, golden, load, refused, values, write, write_config,
};

#[test]
fn every_form_of_one_model_has_one_fingerprint() {
    let values = values("transformer.");
    let wanted = fingerprint(&values, false);
    let cache = tempfile::tempdir().unwrap();
    for dtype in [Dtype::F16, Dtype::BF16, Dtype::F32, Dtype::F64] {
        let dir = folder(&values, dtype);
        let base = load(dir.path(), cache.path()).unwrap();
        assert_eq!(base.weights.fingerprint, wanted, "{dtype:?}");
        let (_, fc) = &values["transformer.h.1.mlp.c_fc.weight"];
        let halves: Vec<_> = fc.iter().map(|&value| f16::from_f32(value)).collect();
        assert_eq!(base.weights.blocks[1].c_fc.weight.data.view().host::<f16>(), halves);
        let fc = &base.weights.blocks[1].c_fc.weight;
        assert_eq!((fc.rows, fc.cols), (6, 10));
    }

    // As the first uploads were: no prefix, mask buffers of any type.
    let mut old = crate::base_files::values("");
    for layer in 0..2 {
        old.insert(format!("h.{layer}.attn.bias"), (vec![1, 1, 5, 5], vec![1.0; 25]));
        old.insert(format!("h.{layer}.attn.masked_bias"), (vec![], vec![-1e4]));
    }
    assert_eq!(load(folder(&old, Dtype::F16).path(), cache.path()).unwrap().weights.fingerprint, wanted);

    // The embedding saved twice.
    let mut twice = values.clone();
    twice.insert("lm_head.weight".into(), values["transformer.wte.weight"].clone());
    let base = load(folder(&twice, Dtype::F32).path(), cache.path()).unwrap();
    assert_eq!(base.weights.fingerprint, wanted);
    assert!(base.weights.head.is_none());

    // Another value is another base.
    let mut other = values.clone();
    other.get_mut("transformer.ln_f.bias").unwrap().1[0] += 1.0;
    assert_ne!(load(folder(&other, Dtype::F16).path(), cache.path()).unwrap().weights.fingerprint, wanted);
}

#[test]
fn a_head_of_its_own_is_loaded_and_hashed() {
    let mut values = values("transformer.");
    let (shape, mut head) = values["transformer.wte.weight"].clone();
    head[3] += 1.0;
    values.insert("lm_head.weight".into(), (shape, head.clone()));
    let cache = tempfile::tempdir().unwrap();
    let dir = folder(&values, Dtype::F32);

    let error = refused(dir.path());
    assert!(error.contains("lm_head.weight differs from transformer.wte.weight"), "{error}");
    assert!(error.contains("tie_word_embeddings"), "{error}");

    write_config(dir.path(), json!({"tie_word_embeddings": false}));
    let base = load(dir.path(), cache.path()).unwrap();
    assert_eq!(base.weights.fingerprint, fingerprint(&values, true));
    let loaded = base.weights.head.as_ref().unwrap().data.view();
    assert_eq!(loaded.host::<f16>()[3], f16::from_f32(head[3]));

    values.remove("lm_head.weight");
    write(&dir.path().join("model.safetensors"), &values, Dtype::F32);
    assert!(refused(dir.path()).contains("lm_head.weight is missing"));
}

#[test]
fn golden_bases_load() {
    let cache = tempfile::tempdir().unwrap();
    let mut seen = 0;
    for entry in fs::read_dir(golden("")).unwrap() {
        let dir = entry.unwrap().path();
        let base = load(&dir, cache.path()).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        let again = load(&dir, cache.path()).unwrap();
        assert_eq!(base.weights.fingerprint, again.weights.fingerprint);
        assert_eq!(base.weights.blocks.len(), base.config.layers);
        assert_eq!(base.weights.head.is_some(), !base.config.tied, "{}", dir.display());
        seen += 1;
    }
    assert!(seen >= 15, "{seen}");
    let of = |name: &str| load(&golden(name), cache.path()).unwrap();
    assert_eq!(of("gelu").config.activation, Activation::Gelu);
    assert_eq!(of("relu").config.activation, Activation::Relu);
    assert!(!of("unscaled_attn").config.scale_attn);
    assert!(of("inverse_layer_idx").config.scale_attn_by_layer);
    assert_eq!(of("odd_heads").config.width % 2, 1);
}

/// Files that PyTorch wrote: candle's reader, which reads a file at once, against our streaming reader.
#[test]
fn a_pytorch_file_gives_its_rounded_values() {
    let cache = tempfile::tempdir().unwrap();
    let base = load(&golden("torch_bin"), cache.path()).unwrap();
    let tensors = candle_core::pickle::read_all(golden("torch_bin/pytorch_model.bin")).unwrap();
    let of = |suffix: &str| {
        let (_, tensor) = tensors.iter().find(|(name, _)| name.ends_with(suffix)).unwrap();
        tensor.to_dtype(candle_core::DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    let check = |frozen: &engraft::device::Frozen, suffix: &str| {
        let wanted: Vec<_> = of(suffix).into_iter().map(f16::from_f32).collect();
        assert_eq!(frozen.view().host::<f16>(), wanted, "{suffix}");
    };
    check(&base.weights.wte.data, "wte.weight");
    check(&base.weights.ln_f.gain, "ln_f.weight");
    check(&base.weights.blocks[1].c_attn.weight.data, "h.1.attn.c_attn.weight");
    check(&base.weights.blocks[0].mlp_proj.bias, "h.0.mlp.c_proj.bias");
}

#[test]
fn rounding_is_to_nearest_even() {
    let mut values = values("transformer.");
    // 2049 is midway between 2048 and 2050; 65519 still rounds to 65504.
    values.get_mut("transformer.ln_f.bias").unwrap().1[..5]
        .copy_from_slice(&[2049.0, 2051.0, 65519.0, 1e-9, -0.0]);
    let cache = tempfile::tempdir().unwrap();
    let base = load(folder(&values, Dtype::F32).path(), cache.path()).unwrap();
    let bits: Vec<_> =
        base.weights.ln_f.bias.view().host::<f16>().iter().map(|value| value.to_bits()).collect();
    let wanted = [f16::from_f32(2048.0), f16::from_f32(2052.0), f16::MAX, f16::ZERO, f16::NEG_ZERO];
    assert_eq!(bits[..5], wanted.map(f16::to_bits));
}

#[test]
fn fp16_is_mapped_in_place_and_others_are_converted_once() {
    let values = values("transformer.");
    let cache = tempfile::tempdir().unwrap();
    let half = folder(&values, Dtype::F16);
    load(half.path(), cache.path()).unwrap();
    assert_eq!(files(cache.path()), [".lock", "fingerprint", "source"]);

    let cache = tempfile::tempdir().unwrap();
    let wide = folder(&values, Dtype::F32);
    let first = load(wide.path(), cache.path()).unwrap();
    assert_eq!(files(cache.path()), [".lock", "fingerprint", "model.safetensors", "source"]);
    let entry = fs::read_dir(cache.path()).unwrap().next().unwrap().unwrap().path();
    let written = fs::metadata(entry.join("model.safetensors")).unwrap().modified().unwrap();
    // A kept fingerprint is believed: nothing is read again.
    let record = fs::read_to_string(entry.join("fingerprint")).unwrap();
    let copy = record.split_once('\n').unwrap().1;
    fs::write(entry.join("fingerprint"), format!("engraft1:blake3:kept\n{copy}")).unwrap();
    let second = load(wide.path(), cache.path()).unwrap();
    assert_eq!(second.weights.fingerprint, "engraft1:blake3:kept");
    assert_eq!(fs::metadata(entry.join("model.safetensors")).unwrap().modified().unwrap(), written);

    // A copy that somebody wrote to is made again, although it has the right form.
    drop(second);
    let model = entry.join("model.safetensors");
    let mut bytes = fs::read(&model).unwrap();
    *bytes.last_mut().unwrap() ^= 0x40;
    fs::write(&model, bytes).unwrap();
    let again = load(wide.path(), cache.path()).unwrap();
    assert_eq!(again.weights.fingerprint, first.weights.fingerprint);
    let last_bias = |base: &Base| base.weights.ln_f.bias.view().host::<f16>().to_vec();
    assert_eq!(last_bias(&again), last_bias(&load(half.path(), cache.path()).unwrap()));

    // A damaged copy is made again; a copy without its fingerprint is not trusted.
    fs::write(entry.join("model.safetensors"), b"short").unwrap();
    assert_eq!(load(wide.path(), cache.path()).unwrap().weights.fingerprint, first.weights.fingerprint);
    fs::remove_file(entry.join("fingerprint")).unwrap();
    assert_eq!(load(wide.path(), cache.path()).unwrap().weights.fingerprint, first.weights.fingerprint);

    // A changed source is another entry.
    let mut changed = values.clone();
    changed.get_mut("transformer.ln_f.bias").unwrap().1[0] += 1.0;
    write(&wide.path().join("model.safetensors"), &changed, Dtype::F32);
    assert_ne!(load(wide.path(), cache.path()).unwrap().weights.fingerprint, first.weights.fingerprint);

    // The copy is a plain model: it loads as one, with the same fingerprint.
    fs::copy(wide.path().join("config.json"), entry.join("config.json")).unwrap();
    let other = tempfile::tempdir().unwrap();
    assert_eq!(load(&entry, other.path()).unwrap().weights.fingerprint, first.weights.fingerprint);
}

#[test]
fn concurrent_loads_convert_safely() {
    let dir = folder(&values("transformer."), Dtype::F32);
    let cache = tempfile::tempdir().unwrap();
    let wanted = fingerprint(&values("transformer."), false);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert_eq!(load(dir.path(), cache.path()).unwrap().weights.fingerprint, wanted));
        }
    });
    assert_eq!(files(cache.path()), [".lock", "fingerprint", "model.safetensors", "source"]);
}

#[test]
fn shards_load_and_hostile_indices_do_not() {
    let values = values("transformer.");
    let wanted = fingerprint(&values, false);
    for dtype in [Dtype::F16, Dtype::F32] {
        let dir = tempfile::tempdir().unwrap();
        write_config(dir.path(), json!({}));
        let mut shards = [Values::new(), Values::new()];
        let mut map = serde_json::Map::new();
        for (index, (name, value)) in values.iter().enumerate() {
            shards[index % 2].insert(name.clone(), value.clone());
            map.insert(name.clone(), format!("model-{}.safetensors", index % 2).into());
        }
        for (index, shard) in shards.iter().enumerate() {
            write(&dir.path().join(format!("model-{index}.safetensors")), shard, dtype);
        }
        let index = dir.path().join("model.safetensors.index.json");
        fs::write(&index, json!({"weight_map": map}).to_string()).unwrap();
        let cache = tempfile::tempdir().unwrap();
        assert_eq!(load(dir.path(), cache.path()).unwrap().weights.fingerprint, wanted);

        for (text, cause) in [
            (
                json!({"weight_map": {"a": "../../secret.safetensors"}}).to_string(),
                "../../secret.safetensors",
            ),
            (json!({"weight_map": {}}).to_string(), "names no shard"),
            (json!([]).to_string(), "has no weight_map"),
            ("{".to_owned(), "is no JSON"),
        ] {
            fs::write(&index, text).unwrap();
            let error = refused(dir.path());
            assert!(error.contains(cause) && error.contains("index.json"), "{error}");
        }
    }
}

/// An odd header moves every tensor to an odd byte, where no FP16 view can begin.
#[test]
fn unaligned_fp16_goes_through_the_cache() {
    let values = values("transformer.");
    let dir = folder(&values, Dtype::F16);
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut odd = (length as u64 + 1).to_le_bytes().to_vec();
    odd.extend(&bytes[8..8 + length]);
    odd.push(b' ');
    odd.extend(&bytes[8 + length..]);
    fs::write(&path, odd).unwrap();
    let cache = tempfile::tempdir().unwrap();
    let base = load(dir.path(), cache.path()).unwrap();
    assert_eq!(base.weights.fingerprint, fingerprint(&values, false));
    assert!(files(cache.path()).contains(&"model.safetensors".to_owned()));
}

#[test]
fn all_mismatches_are_in_one_error() {
    let mut values = values("transformer.");
    values.remove("transformer.ln_f.bias");
    values.insert("transformer.wpe.weight".into(), (vec![4, 6], vec![0.0; 24]));
    values.insert("score.weight".into(), (vec![2], vec![0.0; 2]));
    let error = refused(folder(&values, Dtype::F16).path());
    for part in [
        "model.safetensors: does not hold the model of its config.json",
        "transformer.ln_f.bias is missing",
        "transformer.wpe.weight has shape [4, 6] where [5, 6] is expected",
        "score.weight is no tensor of this GPT-2",
    ] {
        assert!(error.contains(part), "{error}");
    }
    let dir = folder(&crate::base_files::values("transformer."), Dtype::F16);
    write_config(dir.path(), json!({"n_layer": 9}));
    let error = refused(dir.path());
    assert!(error.contains("; and 81 more; use a config.json"), "{error}");

    let error = refused(folder(&crate::base_files::values("transformer."), Dtype::I64).path());
    assert!(error.contains("wte.weight is I64 where F16, BF16, F32 or F64 is expected"), "{error}");

    let mut doubled = crate::base_files::values("transformer.");
    doubled.insert("ln_f.bias".into(), (vec![6], vec![0.0; 6]));
    assert!(refused(folder(&doubled, Dtype::F16).path()).contains("which are the same tensor"));
}

#[test]
fn values_that_fp16_cannot_hold_are_counted() {
    let cases: &[(&[f32], Dtype, &str)] = &[
        (
            &[1.0, 65520.0, -7e4],
            Dtype::F32,
            "holds 2 values beyond 65504, the largest that FP16 can hold, the first 65520",
        ),
        (&[1e5], Dtype::BF16, "holds 1 value beyond 65504"),
        (&[f32::NAN], Dtype::F32, "holds 1 value that cannot be weights, the first NaN"),
        (&[f32::NEG_INFINITY, f32::NAN], Dtype::F16, "holds 2 values that cannot be weights, the first -inf"),
        (&[f32::INFINITY], Dtype::F64, "holds 1 value that cannot be weights, the first inf"),
    ];
    for (bad, dtype, wanted) in cases {
        let mut values = values("transformer.");
        let (_, tensor) = values.get_mut("transformer.h.1.mlp.c_fc.weight").unwrap();
        tensor[7..7 + bad.len()].copy_from_slice(bad);
        let error = refused(folder(&values, *dtype).path());
        assert!(error.contains("model.safetensors: transformer.h.1.mlp.c_fc.weight"), "{error}");
        assert!(error.contains(wanted), "{error}");
    }
    // The second copy of a tied head is checked as well.
    let mut values = values("transformer.");
    values.insert("lm_head.weight".into(), (vec![11, 6], vec![f32::NAN; 66]));
    assert!(refused(folder(&values, Dtype::F16).path()).contains("lm_head.weight holds 66 values"));
}

#[test]
fn damaged_safetensors_are_refused() {
    let dir = folder(&values("transformer."), Dtype::F16);
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let header = |text: &str, data: usize| {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.as_bytes());
        bytes.extend(vec![0; data]);
        bytes
    };
    let huge = format!("{{\"a\":{{\"dtype\":\"F16\",\"shape\":[{}],\"data_offsets\":[0,8]}}}}", u64::MAX);
    let overlap = r#"{"a":{"dtype":"F16","shape":[4],"data_offsets":[0,8]},"b":{"dtype":"F16","shape":[4],"data_offsets":[4,12]}}"#;
    let cases: Vec<(Vec<u8>, &str)> = vec![
        (Vec::new(), "has 0 bytes, which is no safetensors file"),
        (whole[..whole.len() - 2].to_vec(), "where its header names"),
        (whole[..100].to_vec(), "in a file of 100"),
        (u64::MAX.to_le_bytes().to_vec(), "names a header of 18446744073709551615 bytes"),
        (header("{", 0), "has a header that cannot be right"),
        (header(&huge, 8), "has a header that cannot be right"),
        (header(overlap, 12), "has a header that cannot be right"),
    ];
    for (bytes, wanted) in cases {
        fs::write(&path, bytes).unwrap();
        let error = refused(dir.path());
        assert!(error.contains(wanted) && error.ends_with("the file is damaged, get it again"), "{error}");
    }
}

#[test]
fn damaged_pickles_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(golden("torch_bin/config.json"), dir.path().join("config.json")).unwrap();
    let whole = fs::read(golden("torch_bin/pytorch_model.bin")).unwrap();
    let path = dir.path().join("pytorch_model.bin");
    for bytes in [Vec::new(), b"garbage".to_vec(), whole[..whole.len() / 2].to_vec()] {
        fs::write(&path, bytes).unwrap();
        let error = refused(dir.path());
        assert!(error.contains("pytorch_model.bin: cannot be read as a PyTorch"), "{error}");
        assert!(error.ends_with("save the model as model.safetensors"), "{error}");
    }
}

/// With any byte of a header or a pickle changed, loading returns a value or an error and never panics.
#[test]
fn flipped_bytes_never_panic() {
    let cache = tempfile::tempdir().unwrap();
    for (name, file) in [("f32_exact", "model.safetensors"), ("torch_bin", "pytorch_model.bin")] {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(golden(name).join("config.json"), dir.path().join("config.json")).unwrap();
        let whole = fs::read(golden(name).join(file)).unwrap();
        let mut refused = 0;
        for index in (0..2600).step_by(13) {
            let mut bytes = whole.clone();
            bytes[index] ^= 1 << (index % 8);
            fs::write(dir.path().join(file), bytes).unwrap();
            refused += usize::from(load(dir.path(), cache.path()).is_err());
        }
        assert!(refused > 20, "{file}: {refused}");
    }
}

#[test]
fn folders_that_hold_no_base_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    assert!(refused(dir.path()).contains("config.json: cannot be read"));
    write_config(dir.path(), json!({}));
    assert!(
        refused(dir.path())
            .contains("holds no model.safetensors, model.safetensors.index.json or pytorch_model.bin")
    );
}

#[test]
fn a_cache_that_cannot_be_written_matters_to_conversions_only() {
    let values = values("transformer.");
    let blocked = tempfile::NamedTempFile::new().unwrap();
    load(folder(&values, Dtype::F16).path(), blocked.path()).unwrap();
    let error = load(folder(&values, Dtype::F32).path(), blocked.path()).unwrap_err();
    assert_eq!(error.exit_code(), 1);
    assert!(error.to_string().contains("cannot be written"), "{error}");
}

#[test]
fn the_embedded_base_loads_without_a_cache() {
    let base = Base::load(&BaseSource::Embedded, "embedded", Path::new("/nonexistent")).unwrap();
    assert!(matches!(base.tokenizer_files(), TokenizerFiles::Bytes(bytes) if bytes.starts_with(b"{")));
    let description = base.description();
    assert_eq!(description.fingerprint.as_deref(), Some(base.weights.fingerprint.as_str()));
    assert_eq!((description.layers, description.width), (base.config.layers, base.config.width));
    assert_eq!(description.revision, None);
}

#[test]
fn a_snapshot_of_the_hub_names_its_revision() {
    let cache = tempfile::tempdir().unwrap();
    let commit = "607a30d783dfa663caf39e06633721c8d4cfcd7e";
    let snapshot = cache.path().join("snapshots").join(commit);
    fs::create_dir_all(&snapshot).unwrap();
    write_config(&snapshot, json!({}));
    write(&snapshot.join("model.safetensors"), &values("transformer."), Dtype::F16);
    let base = load(&snapshot, &cache.path().join("copies")).unwrap();
    assert_eq!(base.description().revision.as_deref(), Some(commit));
}
