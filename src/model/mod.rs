//! The frozen GPT-2: files to weights, and explicit forward and backward over planned buffers.
//!
//! [`Base`] is the frozen model; [`Stack`] runs training and evaluation on it, [`Decoder`] generation.
//! Nothing here opens a file but the weights module, prints, or knows an optimizer.

mod activations;
mod adapter_errors;
pub mod arch;
pub mod base;
mod bindings;
mod block;
mod buffers;
pub mod builtin;
mod cache;
pub mod config;
mod decoder;
mod layers;
mod norms;
pub mod not_finite;
mod output_scales;
mod policy;
mod prefix;
pub mod scratch;
mod sites;
mod stack;
mod weight_streamer;
pub mod weights;

pub use crate::kernels::argmax::Largest;
pub use base::{Base, BaseSource, TokenizerFiles};
pub use bindings::{AdapterBindings, PrefixSource, Projection};
pub use block::Gradients;
pub use buffers::Limits;
pub use config::{Activation, Config};
pub use decoder::{Decoder, RowTokens, ScratchPlace};
pub use output_scales::{OutputScales, derived_ranks};
pub use policy::{Keep, Policy, Recompute};
pub use prefix::{PrefixState, prefix_from_text};
pub use stack::{LossSum, Pass, Stack, Trained};
pub use weights::{BaseDType, BlockWeights, Linear, Norm, SourceTensors, Weights};
