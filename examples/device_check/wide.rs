//! A small base whose heads are 64 wide, made here: the attention kernels for tensor cores take no other width.

use std::path::Path;

use engraft::error::{Error, Result};
use engraft_util::rng;
use half::f16;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::json;

const LAYERS: usize = 2;
const WIDTH: usize = 128;
const INNER: usize = 96;
const HEADS: usize = 2;
const POSITIONS: usize = 256;
const VOCAB: usize = 53;

/// Writes config and weights into `folder`: random, of a size that keeps signals as large as they are.
pub fn write(folder: &Path) -> Result<()> {
    let failed = |cause: String| {
        Error::failed(format!("{}: cannot be written: {cause}; free space there", folder.display()))
    };
    let config = json!({
        "model_type": "gpt2", "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_inner": INNER,
        "n_positions": POSITIONS, "vocab_size": VOCAB,
    });
    std::fs::create_dir_all(folder).map_err(|cause| failed(cause.to_string()))?;
    std::fs::write(folder.join("config.json"), config.to_string())
        .map_err(|cause| failed(cause.to_string()))?;
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes()
        .into_iter()
        .map(|(name, shape)| (format!("transformer.{name}"), shape.clone(), draw(&name, &shape)))
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        TensorView::new(Dtype::F16, shape.clone(), bytes).map(|view| (name.clone(), view))
    });
    let views = views.collect::<Result<Vec<_>, _>>().map_err(|cause| failed(cause.to_string()))?;
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors"))
        .map_err(|cause| failed(cause.to_string()))
}

fn shapes() -> Vec<(String, Vec<usize>)> {
    let (c, f) = (WIDTH, INNER);
    let mut shapes =
        vec![("wte.weight".to_owned(), vec![VOCAB, c]), ("wpe.weight".into(), vec![POSITIONS, c])];
    for layer in 0..LAYERS {
        let linears =
            [("attn.c_attn", c, 3 * c), ("attn.c_proj", c, c), ("mlp.c_fc", c, f), ("mlp.c_proj", f, c)];
        for (site, inputs, outputs) in linears {
            shapes.push((format!("h.{layer}.{site}.weight"), vec![inputs, outputs]));
            shapes.push((format!("h.{layer}.{site}.bias"), vec![outputs]));
        }
        for norm in ["ln_1", "ln_2"] {
            shapes.extend(["weight", "bias"].map(|part| (format!("h.{layer}.{norm}.{part}"), vec![c])));
        }
    }
    shapes.extend(["weight", "bias"].map(|part| (format!("ln_f.{part}"), vec![c])));
    shapes
}

/// Matrices N(0, 1) / sqrt(inputs), embeddings smaller, gains around 1, biases around 0.
fn draw(name: &str, shape: &[usize]) -> Vec<u8> {
    let key = rng::key(&[11, rng::name(name)]);
    let gain = name.contains("ln_") && name.ends_with("weight");
    let (mean, spread) = match shape {
        [_] => (f32::from(u8::from(gain)), 0.1),
        _ if name.starts_with('w') => (0.0, 0.3),
        [inputs, ..] => (0.0, 1.0 / (*inputs as f32).sqrt()),
        [] => (0.0, 0.0),
    };
    let len = shape.iter().product::<usize>() as u64;
    (0..len).flat_map(|at| f16::from_f32(mean + spread * rng::normal(key, at)).to_le_bytes()).collect()
}
