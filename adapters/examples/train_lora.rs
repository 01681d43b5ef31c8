//! Trains two LoRA layers with candle's autograd and optimizer, and saves them as a folder that PEFT reads.
//!
//!     cargo run -p engraft-adapters --example train_lora -- FOLDER
//!
//! A frozen network of two random layers learns what another random network computes; only A and B move. The
//! folder (`adapter` if none is named) then holds `adapter_config.json` and `adapter_model.safetensors`.

use std::error::Error;

use candle_core::{DType, Device, ModuleT, Tensor};
use candle_nn::{AdamW, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, loss::mse};
use engraft_adapters::{
    LoraSpec,
    candle::{LoraLinear, load, save},
};

/// Linear, tanh, linear.
struct Network {
    up: LoraLinear,
    down: LoraLinear,
}

impl Network {
    /// A LoRA beside each of two frozen layers; `vb` has their A and B, or makes them.
    fn new(frozen: &[Linear; 2], spec: &LoraSpec, vb: &VarBuilder) -> candle_core::Result<Self> {
        let [up, down] = frozen.clone();
        Ok(Self {
            up: LoraLinear::new(up, spec, vb.pp("up"))?,
            down: LoraLinear::new(down, spec, vb.pp("down"))?,
        })
    }
}

impl ModuleT for Network {
    fn forward_t(&self, x: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.down.forward_t(&self.up.forward_t(x, train)?.tanh()?, train)
    }
}

fn random_layers(device: &Device) -> candle_core::Result<[Linear; 2]> {
    let linear = |outputs: usize, inputs: usize| {
        let weight = Tensor::randn(0f32, 1.0, (outputs, inputs), device)?;
        Ok::<_, candle_core::Error>(Linear::new((weight / (inputs as f64).sqrt())?, None))
    };
    Ok([linear(32, 8)?, linear(4, 32)?])
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).unwrap_or("adapter".to_owned());
    let device = Device::Cpu;
    let frozen = random_layers(&device)?;
    let [up, down] = random_layers(&device)?;
    let x = Tensor::randn(0f32, 1.0, (256, 8), &device)?;
    let target = down.forward(&up.forward(&x)?.tanh()?)?;

    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &device);
    let spec = LoraSpec { rank: 4, alpha: 8.0, dropout: 0.01, ..LoraSpec::default() };
    let network = Network::new(&frozen, &spec, &vb)?;
    let options = ParamsAdamW { lr: 0.01, weight_decay: 0.0, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(varmap.all_vars(), options)?;
    let loss = |network: &Network| mse(&network.forward_t(&x, false)?, &target)?.to_scalar::<f32>();
    println!("step   0: loss {:.4}", loss(&network)?);
    for step in 1..=300 {
        optimizer.backward_step(&mse(&network.forward_t(&x, true)?, &target)?)?;
        if step % 100 == 0 {
            println!("step {step}: loss {:.4}", loss(&network)?);
        }
    }
    save(&folder, &[&network.up, &network.down], "a random base", None)?;

    // The layers that are loaded from the files compute the same.
    let varmap = VarMap::new();
    let saved = load(&folder, &varmap, DType::F32, &device)?;
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &device);
    let again = Network::new(&frozen, &saved.spec, &vb)?;
    println!("saved in {folder} ({}): loss {:.4}", saved.modules.join(", "), loss(&again)?);
    Ok(())
}
