//! PEFT adapters in candle models: folded into weights while a model loads, or as layers with gradients.
//!
//! # An adapter in any model
//!
//! [`with_adapter`] puts a PEFT folder between a `VarBuilder` and the model that is built from it. The model needs
//! no change: the weights that it asks for come with the adapter folded in.
//!
//! ```no_run
//! # fn load(vb: candle_nn::VarBuilder) -> candle_core::Result<()> { Ok(()) }
//! # use candle_core::{DType, Device};
//! # use candle_nn::VarBuilder;
//! # let device = Device::Cpu;
//! # let base = VarBuilder::zeros(DType::F16, &device);
//! use engraft_adapters::candle::with_adapter;
//!
//! let (vb, adapter) = with_adapter(base, "adapter", DType::F16, &device)?;
//! let model = load(vb)?;  // Llama::load, BertModel::load, a model of your own ..
//! adapter.finish()?;      // an error if the model left out a part of the adapter
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What PEFT 0.21.2 can fold into weights is read: LoRA with ranks and alphas by pattern, chosen layers, rsLoRA,
//! DoRA, biases of their own (`lora_bias`) and LoRA on embeddings; IA3; LN tuning; and with each of them trained
//! biases and `modules_to_save`. Methods that need a changed forward pass (prefix and prompt tuning) are refused.
//! All is computed in F32 (in F64 for F64 weights) and rounded once. [`Adapter`] has the details: models with
//! other names, sharded weights.
//!
//! # Training
//!
//! [`LoraLinear`] is a frozen `candle_nn::Linear` with a trainable LoRA; [`save`] writes any number of them as a
//! folder that PEFT reads, and [`load`] reads one. It is a layer for models of your own: those of candle-transformers
//! hold layers of a fixed type, so to train one of them, copy its file and put a `LoraLinear` where a `Linear` was.

mod adapter;
mod builder;
mod changes;
mod fold;
mod lora_linear;
mod names;
mod saved;
mod source;

pub use adapter::{Adapter, with_adapter};
pub use builder::{Adapted, Slice};
pub use lora_linear::{LoraLinear, WithoutDropout};
pub use saved::{SavedLora, load, save};
