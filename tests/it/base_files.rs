//! A small GPT-2 that tests write in every form that uploads have, and the expected result of loading it.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use engraft::model::{Base, BaseSource};
use half::{bf16, f16};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;
use tempfile::TempDir;

pub type Values = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// Layers, width, inner, positions, vocabulary of the model that these tests write.
pub const SIZES: (usize, usize, usize, usize, usize) = (2, 6, 10, 5, 11);

pub fn shapes() -> Vec<(String, Vec<usize>)> {
    let (layers, c, inner, positions, vocab) = SIZES;
    let mut shapes =
        vec![("wte.weight".to_owned(), vec![vocab, c]), ("wpe.weight".to_owned(), vec![positions, c])];
    for layer in 0..layers {
        let block: [(&str, Vec<usize>); 12] = [
            ("ln_1.weight", vec![c]),
            ("ln_1.bias", vec![c]),
            ("attn.c_attn.weight", vec![c, 3 * c]),
            ("attn.c_attn.bias", vec![3 * c]),
            ("attn.c_proj.weight", vec![c, c]),
            ("attn.c_proj.bias", vec![c]),
            ("ln_2.weight", vec![c]),
            ("ln_2.bias", vec![c]),
            ("mlp.c_fc.weight", vec![c, inner]),
            ("mlp.c_fc.bias", vec![inner]),
            ("mlp.c_proj.weight", vec![inner, c]),
            ("mlp.c_proj.bias", vec![c]),
        ];
        shapes.extend(block.map(|(name, shape)| (format!("h.{layer}.{name}"), shape)));
    }
    shapes.extend([("ln_f.weight".to_owned(), vec![c]), ("ln_f.bias".to_owned(), vec![c])]);
    shapes
}

/// Values with few bits, the same in F32, F16 and BF16; all tensors differ.
pub fn values(prefix: &str) -> Values {
    let mut count = 0;
    let mut next = move || {
        count = (count * 37 + 11) % 251;
        (count as f32 - 125.0) / 64.0
    };
    shapes()
        .into_iter()
        .map(|(name, shape)| {
            let values = (0..shape.iter().product::<usize>()).map(|_| next()).collect();
            (format!("{prefix}{name}"), (shape, values))
        })
        .collect()
}

pub fn bytes_of(values: &[f32], dtype: Dtype) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&value| match dtype {
            Dtype::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            Dtype::BF16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            Dtype::F64 => f64::from(value).to_le_bytes().to_vec(),
            Dtype::I64 => (value as i64).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        })
        .collect()
}

/// A folder with a config and one safetensors file.
pub fn folder(values: &Values, dtype: Dtype) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), json!({}));
    write(&dir.path().join("model.safetensors"), values, dtype);
    dir
}

pub fn write_config(dir: &Path, changes: serde_json::Value) {
    let (layers, c, inner, positions, vocab) = SIZES;
    let mut config = json!({
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": layers, "n_embd": c, "n_head": 3,
        "n_inner": inner, "n_positions": positions, "vocab_size": vocab,
    });
    config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

pub fn write(path: &Path, values: &Values, dtype: Dtype) {
    let bytes: Vec<_> = values.values().map(|(_, values)| bytes_of(values, dtype)).collect();
    let views = values.iter().zip(&bytes).map(|((name, (shape, _)), bytes)| {
        (name.clone(), TensorView::new(dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

pub fn load(dir: &Path, cache: &Path) -> engraft::error::Result<Base> {
    Base::load(&BaseSource::Folder(dir.to_owned()), "tiny", cache)
}

pub fn refused(dir: &Path) -> String {
    let cache = tempfile::tempdir().unwrap();
    let error = load(dir, cache.path()).unwrap_err();
    assert_eq!(error.exit_code(), 2, "{error}");
    let left = files(cache.path());
    assert!(left.iter().all(|file| file.ends_with(".lock")), "files left: {left:?}");
    error.to_string()
}

pub fn files(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    found.sort();
    found
}

pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bases").join(name)
}

/// The documented formula, from values in F32.
pub fn fingerprint(values: &Values, own_head: bool) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"engraft1\n");
    let mut names: Vec<_> = shapes().into_iter().map(|(name, _)| format!("transformer.{name}")).collect();
    names.extend(own_head.then(|| "lm_head.weight".to_owned()));
    for name in names {
        let (shape, values) = &values[&name];
        hasher.update(format!("{name}\n").as_bytes()).update(&(shape.len() as u64).to_le_bytes());
        shape.iter().for_each(|&size| {
            hasher.update(&(size as u64).to_le_bytes());
        });
        hasher.update(&bytes_of(values, Dtype::F16));
    }
    format!("engraft1:blake3:{}", hasher.finalize().to_hex())
}
