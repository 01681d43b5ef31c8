//! Properties of each kind of device, readable on machines without one.
//!
//! Code outside `device/` and `kernels/` never asks which device it has. It asks for the property that it depends on:
//! does the host see its memory, where do offloaded buffers go, which types does it compute in. A further kind of
//! device is one more constant here.

use super::{DType, arena::Placement, cpu, rates::Rates};

/// Bytes that the tensors of a base on a CUDA device are aligned to: with 256 cuBLASLt has all of its algorithms.
pub(crate) const CUDA_ALIGNMENT: usize = 256;
/// Rows of a CUDA device's copy of the head are a multiple of this: whole tiles of cuBLASLt's kernels.
pub(crate) const HEAD_ROWS: usize = 64;
/// Rows that follow the weights behind a layer norm on a CUDA device: the largest rank of a delta that is fused into a
/// product.
pub(crate) const DELTA_ROWS: usize = 16;
/// Bytes of cuBLASLt's workspace.
pub(crate) const CUDA_WORKSPACE: usize = 32 << 20;
/// Bytes for what the update of the optimizer leaves for the host: norm, factor of clipping, whether it was skipped.
pub(crate) const CUDA_CONTROL: usize = 256;
/// Bytes of the codebooks of 8-bit moments: four of 256 FP16-sized entries.
const CUDA_CODEBOOKS: usize = 4 * 2 * 256;

/// Memory of a device that is not the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnMemory {
    /// Every tensor of the base starts at a multiple of this many bytes.
    pub alignment: usize,
    /// Rows of zeros follow the head's matrix up to a multiple of this many rows.
    pub head_rows: usize,
    /// Rows that follow each matrix behind a layer norm, for a delta that is a part of its product.
    pub delta_rows: usize,
    /// Bytes of the context, of loaded kernels, of the libraries and of `fixed`: an estimate, not measured. Context and
    /// cuBLASLt take 500 to 600 MiB of recent data-centre devices.
    pub runtime: u64,
    /// The line of a memory plan that counts `runtime`.
    pub runtime_name: &'static str,
    /// Bytes that kernels always need, allocated at first use and kept.
    pub fixed: usize,
}

/// A kind of device.
#[derive(Debug, Clone, Copy)]
pub struct DeviceKind {
    /// Its name in `--device` and in run folders.
    pub name: &'static str,
    /// Its name in messages, with article.
    pub label: &'static str,
    /// Its own memory; `None` where buffers take the host's.
    pub own_memory: Option<OwnMemory>,
    /// Type of activations where nobody asks for another.
    pub default_activations: DType,
    /// Types of activations that can be asked for.
    activations: &'static [DType],
    /// Those of these types whose activations are stored as F32; only the factors of products are rounded.
    rounds_factors_to: &'static [DType],
    /// Whether it multiplies BF16 factors faster than F32 ones.
    fast_bf16: fn() -> bool,
    /// Whether its speeds are measured before a plan is chosen. Without, a plan shows ratios of nominal speeds.
    pub is_calibrated: bool,
    /// Speeds of a usual device of this kind. Sizes that rounding depends on are chosen by these, so that the same
    /// command makes the same choice on every machine with room for it.
    pub nominal_rates: Rates,
    /// Whether copies run beside kernels instead of taking time from them.
    pub copies_beside_kernels: bool,
    /// Whether kernels read matrices faster from a copy in large pages than from the mapped file.
    pub wants_settled_weights: bool,
    /// Whether decoding reads the two factors of a LoRA faster transposed.
    pub wants_transposed_factors: bool,
    /// Numbers of rows of logits in memory at a time to choose from.
    pub head_chunks: &'static [usize],
    /// Whether a product may compute the activation of its own result: whoever computes the result again, to the same
    /// bits, computes both again.
    pub activates_in_products: bool,
    /// Whether many small launches can be recorded and started as one ([`Graph`](super::graph::Graph)).
    pub records_graphs: bool,
}

impl DeviceKind {
    /// The cores of the host.
    pub const CPU: &'static Self = &Self {
        name: "cpu",
        label: "a CPU",
        own_memory: None,
        default_activations: DType::F32,
        activations: &[DType::F32, DType::BF16],
        rounds_factors_to: &[DType::BF16],
        fast_bf16: cpu::bf16,
        is_calibrated: true,
        nominal_rates: Rates::NOMINAL_CPU,
        copies_beside_kernels: false,
        wants_settled_weights: true,
        wants_transposed_factors: true,
        head_chunks: &[512, 128, 32],
        activates_in_products: false,
        records_graphs: false,
    };

    /// NVIDIA GPUs through CUDA.
    pub const CUDA: &'static Self = &Self {
        name: "cuda",
        label: "a CUDA device",
        own_memory: Some(OwnMemory {
            alignment: CUDA_ALIGNMENT,
            head_rows: HEAD_ROWS,
            delta_rows: DELTA_ROWS,
            runtime: 600 << 20,
            runtime_name: "CUDA context, libraries",
            fixed: CUDA_WORKSPACE + CUDA_CONTROL + CUDA_CODEBOOKS,
        }),
        default_activations: DType::F16,
        activations: &[DType::F32, DType::F16, DType::BF16],
        rounds_factors_to: &[],
        fast_bf16: || true,
        is_calibrated: false,
        nominal_rates: Rates::NOMINAL_GPU,
        copies_beside_kernels: true,
        wants_settled_weights: false,
        wants_transposed_factors: false,
        // With 512 rows the head's products fill a tenth of a large device.
        head_chunks: &[4096, 2048, 1024, 512, 128, 32],
        activates_in_products: true,
        records_graphs: true,
    };

    /// All kinds, the one that every machine has first.
    pub const ALL: [&'static Self; 2] = [Self::CPU, Self::CUDA];

    /// Whether its buffers take the host's memory, so that one budget holds for both.
    pub fn shares_host_memory(&self) -> bool {
        self.own_memory.is_none()
    }

    /// Destination of buffers that are moved out of its memory: from a device to its host, from the host to a file.
    pub fn offload_placement(&self) -> Placement {
        if self.shares_host_memory() { Placement::Disk } else { Placement::Host }
    }

    /// Types of activations that can be asked for.
    pub fn activations(&self) -> &'static [DType] {
        self.activations
    }

    /// Whether activations of this type can be asked for.
    pub fn computes_in(&self, activations: DType) -> bool {
        self.activations.contains(&activations)
    }

    /// The type that buffers have where activations of type `asked` were asked for.
    pub fn stored_activations(&self, asked: DType) -> DType {
        if self.rounds_factors_to.contains(&asked) { DType::F32 } else { asked }
    }

    /// Whether it multiplies BF16 factors faster than F32 ones. Without, asking for BF16 gains nothing.
    pub fn has_fast_bf16(&self) -> bool {
        (self.fast_bf16)()
    }
}

impl PartialEq for DeviceKind {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for DeviceKind {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_agree_with_themselves() {
        for kind in DeviceKind::ALL {
            assert!(kind.computes_in(kind.default_activations), "{}", kind.name);
            for &asked in kind.activations() {
                assert!(kind.computes_in(kind.stored_activations(asked)), "{} {asked:?}", kind.name);
            }
            assert!(kind.own_memory.is_none_or(|own| own.alignment.is_power_of_two()), "{}", kind.name);
            assert_eq!(kind.shares_host_memory(), kind.offload_placement() == Placement::Disk);
        }
        assert_ne!(DeviceKind::CPU, DeviceKind::CUDA);
    }

    #[test]
    fn a_device_counts_its_context_and_libraries() {
        let own = DeviceKind::CUDA.own_memory.as_ref().unwrap();
        assert!(own.runtime >= (500 << 20) + own.fixed as u64);
    }

    #[test]
    fn only_cuda_keeps_half_precision_activations() {
        assert!(!DeviceKind::CPU.computes_in(DType::F16) && DeviceKind::CUDA.computes_in(DType::F16));
        assert_eq!(DeviceKind::CPU.stored_activations(DType::BF16), DType::F32);
        assert_eq!(DeviceKind::CUDA.stored_activations(DType::BF16), DType::BF16);
    }
}
