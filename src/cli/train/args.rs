//! The options of `engraft train`: one definition each, for the command line and for config files.
//!
//! Every field is optional: what was not given comes from the next layer (`layers.rs`). A default
//! named in a help text is compared with the real one by a test in `layers`.

use std::path::PathBuf;

use engraft_adapters::Targets;
use serde::{Deserialize, Serialize};

use crate::cli::common::values::{
    BaseDtype, DeviceName, LayerList, MemoryName, Method, Optimizer, Pattern, Precision, PrefixInit,
    RecomputeName, RowsName, ScheduleName, Switch, Warmup,
};

/// Options of `train` as typed, or as read from a TOML file whose keys are the options' names.
#[derive(Debug, Clone, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
#[command(next_line_help = false)]
#[allow(missing_docs, reason = "the doc comments are the help texts")]
pub struct TrainArgs {
    /// TOML file with any option as a key of the same name; the command line wins
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Threads to compute with; results do not depend on them [default: all cores]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// One JSON object per line on stdout, nothing else there
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub json: Option<bool>,
    /// Print a step line every N steps where there is no progress bar [default: 10]
    #[arg(long, value_name = "N")]
    pub log_every: Option<u64>,

    /// Hub id (gpt2, openai-community/gpt2-xl, any GPT2LMHeadModel) or folder [default: the embedded base]
    #[arg(long, value_name = "NAME|DIR", help_heading = "Base")]
    pub base: Option<String>,
    /// Branch, tag or commit of a base from the hub
    #[arg(long, value_name = "REV", help_heading = "Base")]
    pub revision: Option<String>,
    /// Use the hub's local cache only
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", help_heading = "Base")]
    pub offline: Option<bool>,
    /// What matrices of the base are kept in: f16, or q8 for 8 bits with a scale for each 32 weights [default: f16]
    #[arg(long, value_name = "TYPE", help_heading = "Base")]
    pub base_dtype: Option<BaseDtype>,
    /// Accept an --init-adapter that was trained on another base
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", help_heading = "Base")]
    pub allow_base_mismatch: Option<bool>,

    /// .txt or .jsonl file, or folder with train.*, perhaps valid.* and test.*; repeatable [default: the embedded data]
    #[arg(long, value_name = "PATH", help_heading = "Data")]
    pub data: Option<Vec<PathBuf>>,
    /// Held-out data; repeatable
    #[arg(long, value_name = "PATH", help_heading = "Data")]
    pub eval_data: Option<Vec<PathBuf>>,
    /// Hold out this part of the training rows, below 1
    #[arg(long, value_name = "F", help_heading = "Data")]
    pub eval_fraction: Option<f64>,
    /// A .txt file is one document per line instead of one document
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", help_heading = "Data")]
    pub line_by_line: Option<bool>,
    /// Put the loss on prompts too, not only on completions
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", help_heading = "Data")]
    pub train_on_prompt: Option<bool>,
    /// Longest row in tokens [default: 256, or what the base's positions leave]
    #[arg(long, value_name = "N", help_heading = "Data")]
    pub seq_len: Option<usize>,
    /// Put several documents in a row; they do not see each other [default: true]
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", help_heading = "Data", overrides_with = "no_pack")]
    pub pack: Option<bool>,
    /// One record a row
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", help_heading = "Data", overrides_with = "pack")]
    pub no_pack: Option<bool>,
    /// Keep the rows in the order of the files
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", help_heading = "Data")]
    pub no_shuffle: Option<bool>,

    /// What to train [default: lora]
    #[arg(long, value_name = "METHOD", help_heading = "Adapter")]
    pub method: Option<Method>,
    /// Start from this adapter (PEFT files), whose config gives the options below
    #[arg(long, value_name = "DIR", help_heading = "Adapter")]
    pub init_adapter: Option<PathBuf>,
    /// Rank of the LoRA [default: 8]
    #[arg(long, value_name = "R", help_heading = "Adapter")]
    pub rank: Option<usize>,
    /// The LoRA's delta is scaled by alpha / rank [default: 16]
    #[arg(long, value_name = "A", help_heading = "Adapter")]
    pub alpha: Option<f64>,
    /// c_attn, attn.c_proj, c_fc, mlp.c_proj, q, k, v, all-linear, a list of them, or /regex/ [default: c_attn]
    #[arg(long, value_name = "LIST", help_heading = "Adapter")]
    pub targets: Option<Targets>,
    /// Layers with a LoRA, such as 0,2,5-11 [default: all]
    #[arg(long, value_name = "LIST", help_heading = "Adapter")]
    pub layers: Option<LayerList>,
    /// Dropout on the LoRA's input [default: 0]
    #[arg(long, value_name = "P", help_heading = "Adapter")]
    pub lora_dropout: Option<f64>,
    /// Scale by alpha / sqrt(rank)
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", help_heading = "Adapter")]
    pub rslora: Option<bool>,
    /// Another rank for sites that match KEY, a regular expression; repeatable
    #[arg(long, value_name = "KEY=R", help_heading = "Adapter")]
    pub rank_pattern: Option<Vec<Pattern>>,
    /// Another alpha for sites that match KEY, a regular expression; repeatable
    #[arg(long, value_name = "KEY=A", help_heading = "Adapter")]
    pub alpha_pattern: Option<Vec<Pattern>>,
    /// Length of the prefix [default: 20]
    #[arg(long, value_name = "P", help_heading = "Adapter")]
    pub prefix_len: Option<usize>,
    /// What the prefix starts from [default: text, with --prefix-projection random]
    #[arg(long, value_name = "INIT", help_heading = "Adapter")]
    pub prefix_init: Option<PrefixInit>,
    /// The text the prefix starts from [default: the first training row]
    #[arg(long, value_name = "TEXT", help_heading = "Adapter")]
    pub prefix_text: Option<String>,
    /// Train the prefix through a tanh layer of this width
    #[arg(long, value_name = "HIDDEN", help_heading = "Adapter")]
    pub prefix_projection: Option<usize>,

    /// Rows per optimizer step [default: 8]
    #[arg(long, value_name = "N", help_heading = "Optimization")]
    pub batch: Option<usize>,
    /// Rows at a time, a divisor of --batch, or auto; gradients are accumulated [default: auto]
    #[arg(long, value_name = "N|auto", help_heading = "Optimization")]
    pub micro_batch: Option<RowsName>,
    /// Optimizer steps
    #[arg(long, value_name = "N", help_heading = "Optimization")]
    pub steps: Option<u64>,
    /// Passes over the training rows, instead of --steps [default: 1]
    #[arg(long, value_name = "F", help_heading = "Optimization")]
    pub epochs: Option<f64>,
    /// Highest learning rate [default: 0.0005]
    #[arg(long, value_name = "LR", help_heading = "Optimization")]
    pub lr: Option<f64>,
    /// How the learning rate goes after warm-up [default: linear]
    #[arg(long, value_name = "NAME", help_heading = "Optimization")]
    pub schedule: Option<ScheduleName>,
    /// Warm-up steps, or with a dot a part of all steps [default: 0]
    #[arg(long, value_name = "N|F", help_heading = "Optimization")]
    pub warmup: Option<Warmup>,
    /// Decoupled weight decay on every trainable [default: 0.01]
    #[arg(long, value_name = "W", help_heading = "Optimization")]
    pub weight_decay: Option<f64>,
    /// Largest global gradient norm; 0 turns clipping off [default: 1]
    #[arg(long, value_name = "C", help_heading = "Optimization")]
    pub clip: Option<f64>,
    /// Part of the target probability that is spread over the vocabulary [default: 0]
    #[arg(long, value_name = "E", help_heading = "Optimization")]
    pub label_smoothing: Option<f64>,
    /// adamw, adamw8bit (moments in a quarter of the memory), or auto: 8 bits where nothing else fits [default: adamw]
    #[arg(long, value_name = "NAME", help_heading = "Optimization")]
    pub optimizer: Option<Optimizer>,
    /// Seed of everything random [default: 0]
    #[arg(long, value_name = "N", help_heading = "Optimization")]
    pub seed: Option<u64>,

    /// Where to compute: cpu, cuda, cuda:N, or auto for CUDA where there is a device [default: auto]
    #[arg(long, value_name = "DEVICE", help_heading = "Device and memory")]
    pub device: Option<DeviceName>,
    /// Arithmetic of activations: f32, and on CUDA also f16 or bf16 [default: f32 on a CPU, f16 on CUDA]
    #[arg(long, value_name = "TYPE", help_heading = "Device and memory")]
    pub precision: Option<Precision>,
    /// What the run may take, the whole process included: a size such as 4GiB, or auto for what is free [default: auto]
    #[arg(long, value_name = "SIZE|auto", help_heading = "Device and memory")]
    pub memory: Option<MemoryName>,
    /// What blocks compute again in the backward pass: none, mlp, linear, every:K, all, or auto [default: auto]
    #[arg(long, value_name = "WHAT", help_heading = "Device and memory")]
    pub recompute: Option<RecomputeName>,
    /// Rows of logits held at a time by the head, or auto [default: auto]
    #[arg(long, value_name = "N|auto", help_heading = "Device and memory")]
    pub head_rows: Option<RowsName>,
    /// Bring the layers of the base from its file as they are needed [default: auto]
    #[arg(long, value_name = "WHEN", help_heading = "Device and memory")]
    pub stream_base: Option<Switch>,
    /// Keep the inputs of blocks in a file of the run folder, those of a CUDA device in pinned memory of the host, between forward and backward [default: auto]
    #[arg(long, num_args = 0..=1, default_missing_value = "on", value_name = "WHEN", help_heading = "Device and memory")]
    pub offload_inputs: Option<Switch>,
    /// Keep the optimizer's moments in a file of the run folder, those of a CUDA device in pinned memory of the host [default: auto]
    #[arg(long, num_args = 0..=1, default_missing_value = "on", value_name = "WHEN", help_heading = "Device and memory")]
    pub offload_optimizer: Option<Switch>,
    /// Record memory over time in this JSON file, with a picture beside it
    #[arg(long, value_name = "FILE", help_heading = "Device and memory")]
    pub memory_trace: Option<PathBuf>,

    /// Run folder; the adapter is in its folder adapter [default: runs/BASE-METHOD, then -2, -3 ..]
    #[arg(long, value_name = "DIR", help_heading = "Run folder")]
    pub output: Option<PathBuf>,
    /// Save for --resume every N steps; 0 saves at the end only [default: 100]
    #[arg(long, value_name = "N", help_heading = "Run folder")]
    pub save_every: Option<u64>,
    /// Keep the newest N saves [default: 2]
    #[arg(long, value_name = "N", help_heading = "Run folder")]
    pub keep: Option<usize>,
    /// Evaluate every N steps too, besides before and after; 0 does not [default: 0]
    #[arg(long, value_name = "N", help_heading = "Run folder")]
    pub eval_every: Option<u64>,
    /// Go on where the run in --output stopped; options not given come from its config.toml
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL", help_heading = "Run folder")]
    pub resume: Option<bool>,
}
