//! Kernels: slices and shapes, never layers or adapters. One folder per op.
//!
//! In each folder `mod.rs` holds the maths, the shapes and the dispatch on the device, `reference.rs`
//! the plain twin that runs in any precision, `cpu.rs` the CPU side. Forward and backward of an op
//! stand side by side. All outputs are parameters: a kernel allocates nothing that grows with the model.

pub mod activation;
pub mod adamw;
pub mod adamw8;
pub mod adapted_linear;
pub mod arena;
pub mod attention;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
pub mod device_scratch;
pub mod elementwise;
pub mod embed;
pub mod frozen;
pub mod head_loss;
pub mod layernorm;
pub mod matmul;
pub mod mover;
pub mod pages;
#[cfg(any(feature = "cuda", test))]
pub mod product;
pub mod q8;
pub mod real;
pub mod recording;
pub mod rows;
pub mod scratch;
pub(crate) mod simd;
pub mod stages;
pub mod tasks;
#[cfg(test)]
pub mod testing;
pub mod view;
