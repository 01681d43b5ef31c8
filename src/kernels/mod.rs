//! Kernels: slices and shapes, never layers or adapters. One folder per op.
//!
//! In each folder `mod.rs` holds the maths, the shapes and the dispatch on the device, `reference.rs` the plain twin
//! in any precision, `cpu.rs` and `simd.rs` the CPU side, `cuda.rs` and `kernel.cu` the CUDA side. Forward and
//! backward of an op are in one file. All outputs are parameters: a kernel allocates nothing that grows with the
//! model.

pub mod activation;
pub mod adamw;
pub mod adamw8;
pub mod adapted_linear;
pub mod argmax;
pub mod attention;
pub mod column_norms;
pub mod decode_layer;
pub mod elementwise;
pub mod embed;
pub mod gather;
pub mod head_loss;
pub mod importance;
pub mod layernorm;
pub mod matmul;
pub mod nf4;
pub mod noise;
pub mod orthogonality;
pub mod q8;
