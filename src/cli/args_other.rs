//! The verbs of both programs, and the options of all verbs but `train`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use super::{
    args::TrainArgs,
    values::{BaseDtype, DeviceName, Precision, ScaledAdapter, SplitName, Switch, TokenIds},
};

/// Trains small adapters (LoRA, prefix) on a frozen GPT-2
#[derive(Debug, Parser)]
#[command(name = "engraft", version, subcommand_required = true, arg_required_else_help = true)]
pub struct Engraft {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs of `engraft`.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Train an adapter; with no option at all, a LoRA on the embedded base and data
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Train(Box<TrainArgs>),
    /// Tell what a training run would take of memory and time; trains nothing, needs no weights
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Plan(Box<TrainArgs>),
    /// Loss and perplexity of a base with an adapter, or alone
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Eval(EvalArgs),
    /// Tell what an adapter, a base or a run folder is
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Inspect(InspectArgs),
}

/// Runs a frozen GPT-2 with adapters
#[derive(Debug, Parser)]
#[command(name = "engraft-infer", version, subcommand_required = true, arg_required_else_help = true)]
pub struct EngraftInfer {
    /// What to do.
    #[command(subcommand)]
    pub verb: InferVerb,
}

/// The verbs of `engraft-infer`.
#[derive(Debug, Subcommand)]
pub enum InferVerb {
    /// Continue prompts
    #[command(args_override_self = true, allow_negative_numbers = true)]
    Generate(GenerateArgs),
}

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

/// Options of `eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Which base.
    #[command(flatten)]
    pub base: BaseArgs,
    /// Adapter folder; without it the base alone
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// .txt or .jsonl file, or folder; repeatable [default: the embedded data]
    #[arg(long, value_name = "PATH")]
    pub data: Vec<PathBuf>,
    /// Which files of a folder
    #[arg(long, value_name = "SPLIT", default_value = "valid")]
    pub split: SplitName,
    /// Longest row in tokens [default: 256, or what the base's positions leave]
    #[arg(long, value_name = "N")]
    pub seq_len: Option<usize>,
    /// Put several documents in a row (the default)
    #[arg(long, overrides_with = "no_pack")]
    pub pack: bool,
    /// One record a row
    #[arg(long, overrides_with = "pack")]
    pub no_pack: bool,
    /// A .txt file is one document per line instead of one document
    #[arg(long)]
    pub line_by_line: bool,
    /// Count the loss on prompts too
    #[arg(long)]
    pub train_on_prompt: bool,
    /// Rows at a time
    #[arg(long, value_name = "N", default_value_t = 8, visible_alias = "batch")]
    pub micro_batch: usize,
    /// Rows of logits held at a time by the head
    #[arg(long, value_name = "N", default_value_t = crate::model::Policy::HEAD_ROWS)]
    pub head_rows: usize,
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// One JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// Options of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Folder of an adapter, a base or a run
    #[arg(value_name = "PATH")]
    pub path: PathBuf,
    /// One JSON object on stdout
    #[arg(long)]
    pub json: bool,
}

/// Options of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Which base.
    #[command(flatten)]
    pub base: BaseArgs,
    /// Adapter folder, with =SCALE if wished; repeatable, LoRAs are summed
    #[arg(long, value_name = "DIR[=SCALE]")]
    pub adapter: Vec<ScaledAdapter>,

    /// The text to continue [default: standard input]
    #[arg(long, value_name = "TEXT", help_heading = "Prompt", conflicts_with_all = ["prompt_file", "input_ids"])]
    pub prompt: Option<String>,
    /// File with one prompt a line
    #[arg(long, value_name = "FILE", help_heading = "Prompt", conflicts_with = "input_ids")]
    pub prompt_file: Option<PathBuf>,
    /// The prompt as token ids between commas
    #[arg(long, value_name = "IDS", help_heading = "Prompt")]
    pub input_ids: Option<TokenIds>,

    /// Most new tokens per sample
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Sampling")]
    pub max_new_tokens: usize,
    /// No end-of-text before this many new tokens
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Sampling")]
    pub min_new_tokens: usize,
    /// 0 always takes the likeliest token
    #[arg(long, value_name = "T", default_value_t = 1.0, help_heading = "Sampling")]
    pub temperature: f64,
    /// Sample from the K likeliest tokens; 0 from all
    #[arg(long, value_name = "K", default_value_t = 0, help_heading = "Sampling")]
    pub top_k: usize,
    /// Sample from the likeliest tokens that together reach probability P
    #[arg(long, value_name = "P", default_value_t = 1.0, help_heading = "Sampling")]
    pub top_p: f64,
    /// Divide positive and multiply negative logits of tokens seen before
    #[arg(long, value_name = "R", default_value_t = 1.0, help_heading = "Sampling")]
    pub repetition_penalty: f64,
    /// Stop at this text, which is not printed; repeatable
    #[arg(long, value_name = "TEXT", help_heading = "Sampling")]
    pub stop: Vec<String>,
    /// Seed of the samples
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Sampling")]
    pub seed: u64,
    /// Samples per prompt
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Sampling")]
    pub num_samples: usize,
    /// Samples of a prompt made at a time; more than one are shown when all are done
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Sampling")]
    pub micro_batch: usize,

    #[command(flatten)]
    pub compute: ComputeArgs,
    /// One JSON object per sample on stdout, nothing else there
    #[arg(long)]
    pub json: bool,
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
