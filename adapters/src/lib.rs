//! PEFT adapters for [candle](https://github.com/huggingface/candle), the Rust tensor library.
//!
//! - **Use** an adapter in a model of candle-transformers, or in one of your own, without a change to the model:
//!   [`candle::with_adapter`] folds it into the weights while they load.
//! - **Train** a LoRA with candle's autograd and optimizers: [`candle::LoraLinear`].
//! - **Read and write** the files of [PEFT](https://github.com/huggingface/peft), strictly: what is not understood is
//!   refused with a sentence, and nothing in a file is passed over in silence.
//! - **Describe** an adapter as data, for an engine with kernels of its own: [`AdapterSet`].
//!
//! # An adapter in a candle model
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
//! let model = load(vb)?;  // Llama::load, BertModel::load, ..
//! adapter.finish()?;      // an error if the model left out a part of the adapter
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! LoRA (also rsLoRA and DoRA), IA3 and LN tuning are folded, with trained biases and whole modules
//! (`modules_to_save`). The module [`candle`] says more, and the examples `fold_adapter` and `train_lora` run
//! without a file.
//!
//! # Adapters as data
//!
//! An adapter is described by an [`AdapterSpec`], resolved against a [`BaseDescription`] into an
//! [`AdapterSet`] (which tensors exist, and where in one flat F32 store), and read from or written to
//! PEFT files by [`peft`]. [`reference`](mod@reference) is what the adapters compute, in plain candle tensors.
//!
//! For example: an adapter is loaded, and an adapted linear computed.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use engraft_adapters::{
//!     AdapterSet, BaseDescription, LoraSpec, SiteDescription, peft, reference,
//! };
//!
//! // A description of your model.
//! let base = BaseDescription {
//!     name: "my/model".into(),
//!     revision: None,
//!     fingerprint: Some("5d41402a".into()),
//!     layers: 2,
//!     heads: 1,
//!     width: 4,
//!     positions: 16,
//!     vocab: 10,
//!     sites: vec![SiteDescription {
//!         name: "mlp.up".into(),
//!         key: "model.layers.{layer}.mlp.up".into(),
//!         inputs: 4,
//!         outputs: 6,
//!         fan_in_fan_out: false,
//!         parts: vec![],
//!     }],
//!     token_embedding: None,
//!     norms: vec![],
//! };
//!
//! // Somebody made an adapter for it ...
//! # let folder = tempfile::tempdir()?;
//! # let dir = folder.path().join("adapter");
//! let lora = LoraSpec { rank: 2, targets: "mlp.up".parse()?, ..LoraSpec::default() };
//! let set = AdapterSet::new(&lora.into(), &base)?;
//! peft::save(&dir, &set, &set.init(1)?, None, &base)?;
//!
//! // ... and you use it: y = x W + s (x A^T) B^T, W as [inputs, outputs].
//! let loaded = peft::load(&dir, &base, false)?;
//! let lora = &loaded.set.loras[0];
//! let tensor = |slot: usize| {
//!     let slot = &loaded.set.layout.tensors[slot];
//!     Tensor::from_slice(&loaded.values[slot.range()], slot.shape.as_slice(), &Device::Cpu)
//! };
//! let x = Tensor::ones((3, 4), candle_core::DType::F32, &Device::Cpu)?;
//! let w = Tensor::ones((4, 6), candle_core::DType::F32, &Device::Cpu)?;
//! let y = reference::lora_linear(&x, &w, None, &tensor(lora.a)?, &tensor(lora.b)?, lora.scale.into())?;
//! assert_eq!(y.to_vec2::<f32>()?, [[4.0; 6]; 3]); // B starts at zero: still the base
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod base;
pub mod candle;
mod combine;
mod compare;
mod contribution;
mod error;
mod extract;
mod fold;
mod init;
mod kinds;
mod layout;
mod mersenne;
mod methods;
pub mod peft;
mod plain;
mod problem;
pub mod reference;
mod set;
mod svd;
mod targets;
#[cfg(test)]
mod testing;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub use base::{
    BaseDescription, BaseWeights, NormDescription, NormWeights, PartDescription, SiteDescription,
};
pub use combine::{CombineMethod, CombineOptions, CombinePart, Combined, MajoritySign, combine};
pub use compare::{DeltaSize, SiteDifference, compare_deltas};
pub use contribution::{
    Contribution, EmbeddingDelta, Lora, NormVectors, OutputScale, Prefix, PrefixValues, Prompt,
    RankAllocation, SiteVectors, Triplets,
};
pub use error::{Error, Result};
pub use extract::{Extracted, extract};
pub use fold::{FoldPart, Folding};
pub use kinds::Kinds;
pub use layout::{Group, Layout, Segment, TensorSlot};
pub use methods::{
    AdapterSpec, Kind,
    adalora::AdaLoraSpec,
    dora::DoraSpec,
    ia3::Ia3Spec,
    kinds,
    ln_tuning::LnTuningSpec,
    lora::{LoraSpec, beside::TrainedBiases, initial::InitialFactors},
    prefix::PrefixSpec,
    prompt_tuning::PromptTuningSpec,
    vera::VeraSpec,
};
pub use plain::{PlainLora, from_plain, plain_loras, whole_loras};
pub use problem::Problem;
pub use set::AdapterSet;
pub use targets::Targets;
