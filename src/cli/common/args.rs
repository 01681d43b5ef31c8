//! Options that both programs have: the base, and what computes.

use clap::Args;

use super::values::{BaseDtype, DeviceName, Precision, Switch};

/// Which base, and how to find it.
#[derive(Debug, Clone, Default, Args)]
pub struct BaseArgs {
    /// Hub id or folder [default: the embedded base]
    #[arg(help_heading = "Base", long, value_name = "NAME|DIR")]
    pub base: Option<String>,
    /// Branch, tag or commit of a base from the hub
    #[arg(help_heading = "Base", long, value_name = "REV")]
    pub revision: Option<String>,
    /// Use the hub's local cache only
    #[arg(help_heading = "Base", long)]
    pub offline: bool,
    /// What matrices of the base are kept in: f16, or q8 for 8 bits with a scale for each 32 weights [default: f16]
    #[arg(help_heading = "Base", long, value_name = "TYPE")]
    pub base_dtype: Option<BaseDtype>,
    /// Accept an adapter that was trained on another base
    #[arg(help_heading = "Base", long)]
    pub allow_base_mismatch: bool,
}

/// What a program computes with.
#[derive(Debug, Args)]
pub struct ComputeArgs {
    /// Where to compute: cpu, cuda, cuda:N, or auto for CUDA where there is a device
    #[arg(help_heading = "Machine", long, value_name = "DEVICE", default_value = "auto")]
    pub device: DeviceName,
    /// Arithmetic of activations: f32, and on CUDA also f16 or bf16 [default: f32 on a CPU, f16 on CUDA]
    #[arg(help_heading = "Machine", long, value_name = "TYPE")]
    pub precision: Option<Precision>,
    /// Threads to compute with [default: all cores]
    #[arg(help_heading = "Machine", long, value_name = "N")]
    pub threads: Option<usize>,
    /// Bring the layers of the base when they are needed: two at a time are in memory [default: off]
    #[arg(help_heading = "Machine", long, value_name = "WHEN")]
    pub stream_base: Option<Switch>,
}

impl ComputeArgs {
    /// Whether the base is streamed; there is no plan that could choose it.
    pub fn streams(&self) -> bool {
        self.stream_base.and_then(Switch::fixed).unwrap_or(false)
    }
}
