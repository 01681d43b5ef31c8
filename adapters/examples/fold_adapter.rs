//! Puts a PEFT adapter into a model of candle-transformers, without a change to the model.
//!
//!     cargo run -p engraft-adapters --example fold_adapter
//!
//! The base is a small random Llama and the adapter a random LoRA that the program writes first, so it runs
//! anywhere. With files of your own only the three lines in `adapted` matter: make `base` with
//! `VarBuilder::from_mmaped_safetensors` and name the adapter's folder.

use std::{error::Error, path::Path};

use candle_core::{DType, Device, Tensor};
use candle_nn::{Init, Linear, VarBuilder, VarMap};
use candle_transformers::models::llama::{Cache, Config, Llama};
use engraft_adapters::{
    LoraSpec,
    candle::{LoraLinear, save, with_adapter},
};

const WIDTH: usize = 64;

fn config() -> Config {
    Config {
        hidden_size: WIDTH,
        intermediate_size: 160,
        vocab_size: 256,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 64,
        tie_word_embeddings: false,
    }
}

/// The model with the adapter folded into its weights.
fn adapted(base: VarBuilder, folder: &Path, device: &Device) -> Result<Llama, Box<dyn Error>> {
    let (vb, adapter) = with_adapter(base, folder, DType::F32, device)?;
    let model = Llama::load(vb, &config())?;
    adapter.finish()?; // the model loaded all of it
    Ok(model)
}

/// The three tokens that the model finds most likely after `tokens`, with their logits.
fn likely(model: &Llama, tokens: &[u32], device: &Device) -> candle_core::Result<String> {
    let mut cache = Cache::new(false, DType::F32, &config(), device)?;
    let logits = model.forward(&Tensor::new(tokens, device)?.unsqueeze(0)?, 0, &mut cache)?.squeeze(0)?;
    let logits = logits.to_vec1::<f32>()?;
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let texts: Vec<String> = ids.iter().take(3).map(|&id| format!("{id} ({:.3})", logits[id])).collect();
    Ok(texts.join(", "))
}

/// A LoRA on q_proj and v_proj of all layers, with random A and B.
fn write_adapter(folder: &Path, device: &Device) -> Result<(), Box<dyn Error>> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
    let spec = LoraSpec { rank: 4, alpha: 8.0, ..LoraSpec::default() };
    let mut layers = Vec::new();
    for layer in 0..config().num_hidden_layers {
        for name in ["q_proj", "v_proj"] {
            let vb = vb.pp(format!("model.layers.{layer}.self_attn.{name}"));
            vb.get_with_hints((WIDTH, 4), "lora_B.weight", Init::Randn { mean: 0.0, stdev: 0.3 })?;
            let frozen = Linear::new(Tensor::zeros((WIDTH, WIDTH), DType::F32, device)?, None);
            layers.push(LoraLinear::new(frozen, &spec, vb)?);
        }
    }
    Ok(save(folder, &layers.iter().collect::<Vec<_>>(), "a random base", Some("CAUSAL_LM"))?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::Cpu;
    let temporary = tempfile::tempdir()?;
    let folder = temporary.path().join("adapter");
    write_adapter(&folder, &device)?;

    // Random weights, made when a model first asks for them.
    let varmap = VarMap::new();
    let base = || VarBuilder::from_varmap(&varmap, DType::F32, &device);
    let tokens = [3, 141, 59, 26];
    let plain = Llama::load(base(), &config())?;
    println!("base alone   {}", likely(&plain, &tokens, &device)?);
    println!("with adapter {}", likely(&adapted(base(), &folder, &device)?, &tokens, &device)?);
    Ok(())
}
