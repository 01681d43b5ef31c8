//! The host's CPU: code that the CPU sides of all ops share.

mod gemm;
mod level;
mod math;
mod scratch;
pub(crate) mod simd;
mod strides;
pub mod tasks;

pub use self::{
    gemm::{gemm, packing, slab},
    level::{Level, bf16, dispatch_level, force_bf16, level, limit_level, reports_bf16, vectorised, vectors},
    math::{exp, wide, widen},
    scratch::{LINE, Shared, release_shared_scratch, with_scratch, with_shared_scratch},
    strides::Strides,
};

/// Runs `pass` on a thread of the global pool: its ops then wake no thread from outside, and only threads of the pool
/// keep scratch.
pub fn on_pool<R: Send>(pass: impl FnOnce() -> R + Send) -> R {
    rayon::scope(|_| pass())
}
