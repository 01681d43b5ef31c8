//! CUDA kernels on the CPU against the REFERENCE twins: odd shapes, every type of activations, several orders
//! of threads.

mod allocation;
mod attention;
mod codes;
mod column_norms;
mod decoding;
mod decoding_attention;
mod embedding;
mod fused;
mod harness;
mod lora;
mod lora_vectors;
mod normed;
mod optimizer;
mod pointwise;
mod products;
mod rows;
mod shim;
