//! engraft: small adapters (LoRA, prefix) trained on a frozen FP16 GPT-2, and run on it.
//!
//! Start reading at [`train`], whose loop is prose, or at [`model`], whose forward and backward are
//! explicit functions over planned buffers. `docs/ARCHITECTURE.md` names the rooms and what never
//! happens in them.

pub mod cli;
pub mod convert;
pub mod data;
pub mod device;
pub mod embedded;
pub mod engine;
pub mod error;
pub mod generate;
pub mod hub;
pub mod kernels;
pub mod model;
pub mod observe;
pub mod optim;
pub mod plan;
pub mod saved;
#[cfg(test)]
mod testing;
pub mod train;
