//! The options of `engraft train`, one definition each.

use std::{
    io,
    path::{Path, PathBuf},
};

use engraft_adapters::{
    AdaLoraSpec, DoraSpec, Ia3Spec, InitialFactors, Kinds, LnTuningSpec, LoraSpec, PrefixSpec,
    PromptTuningSpec, Targets, TrainedBiases, VeraSpec,
};
use serde::{Deserialize, Serialize};

use crate::{
    cli::common::{
        args::{BaseArgs, ComputeArgs},
        options::{
            BELOW_ONE, Check, FROM_ONE, OnResume, above_zero, from_zero, options, switch, unless, value,
        },
        progress::reading,
        values::{
            FormatName, LayerList, MemoryName, Optimizer, Pattern, PrefixInit, PromptInit, RecomputeName,
            RowsName, ScheduleName, Switch, Warmup,
        },
    },
    data::{Keys, ReadOptions},
    optim::AdamWOptions,
    plan::budget::Limit,
    train::AdapterOptions,
};

options! {
    /// Data files, and how rows are made from them.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case", default)]
    DataArgs {}

    "Data" {
        /// Files (.txt, .jsonl, .json, .csv or .tsv, also with .gz or .zst), folders with train.*, perhaps valid.* and
        /// test.*, patterns, or - for the standard input; FILE:2 takes its rows twice; repeatable
        #[arg(num_args = 1..)]
        data: Vec<PathBuf> =>
            value("PATH").otherwise("the embedded data").on_resume(OnResume::OwnRule).basic();
        /// Format of all data files: txt, jsonl, json, csv or tsv, and parquet where it was built in
        data_format: FormatName => value("NAME").otherwise("told by each file's extension");
        /// Key or column of the prompts, where it is not prompt
        prompt_key: String => value("KEY").excludes("text-key");
        /// Key or column of the completions, where it is not completion
        completion_key: String => value("KEY").excludes("text-key");
        /// Key or column of the texts, where it is not text
        text_key: String => value("KEY");
        /// Tokenize anew, and keep no tokenised rows in the cache
        no_token_cache: bool => switch().on_resume(OnResume::Free);
        /// A .txt file is one document per line instead of one document
        line_by_line: bool => switch();
        /// Count the loss on prompts too, not only on completions
        train_on_prompt: bool => switch();
        /// Longest row in tokens
        seq_len: usize =>
            value("N").otherwise("256, or what the base has left").check(FROM_ONE).basic();
        /// Put several documents in a row; they do not see each other
        #[arg(overrides_with = "no_pack")]
        pack: bool => switch().default(|args: &DataArgs| args.no_pack.map(|alone| !alone))
            .otherwise("where there are many rows");
        /// One window of a record in a row
        #[arg(overrides_with = "pack")]
        no_pack: bool => switch().excludes("pack");
    }
}

/// Folder of tokenised rows in the cache.
const TOKENS: &str = "tokens";

impl DataArgs {
    /// Whether a row holds several documents; `None` where no option says so.
    pub fn packs(&self) -> Option<bool> {
        self.pack.or(self.no_pack.map(|alone| !alone))
    }

    /// How files are read, with tokens kept in the folder `cache`.
    pub fn read_options(&self, cache: Option<&Path>) -> ReadOptions {
        ReadOptions {
            keys: Keys {
                prompt: self.prompt_key.clone(),
                completion: self.completion_key.clone(),
                text: self.text_key.clone(),
            },
            format: self.data_format.map(|name| name.0),
            standard_input: Some(|| Box::new(io::stdin())),
            token_cache: cache.filter(|_| self.no_token_cache != Some(true)).map(|cache| cache.join(TOKENS)),
            watch: reading(),
        }
    }
}

/// A larger batch is taken for a typing error.
const LARGEST_BATCH: usize = 1_000_000;
/// A larger rank is taken for a typing error: no base is that wide.
const LARGEST_RANK: f64 = 1e6;

/// A larger number of passes is taken for a typing error.
const MOST_EPOCHS: f64 = 1e6;

// The kinds of methods that an option belongs to.
const LORA: &[&str] = &[LoraSpec::KIND.name, DoraSpec::KIND.name];
const WITH_ALPHA: &[&str] = &[LoraSpec::KIND.name, DoraSpec::KIND.name, AdaLoraSpec::KIND.name];
const LOW_RANK: &[&str] = &[LoraSpec::KIND.name, DoraSpec::KIND.name, VeraSpec::KIND.name];
const WITH_LAYERS: &[&str] =
    &[LoraSpec::KIND.name, DoraSpec::KIND.name, VeraSpec::KIND.name, AdaLoraSpec::KIND.name];
const WITH_TARGETS: &[&str] = &[
    LoraSpec::KIND.name,
    DoraSpec::KIND.name,
    VeraSpec::KIND.name,
    AdaLoraSpec::KIND.name,
    Ia3Spec::KIND.name,
];
const VERA: &[&str] = &[VeraSpec::KIND.name];
const ADALORA: &[&str] = &[AdaLoraSpec::KIND.name];
const IA3: &[&str] = &[Ia3Spec::KIND.name];
const LN_TUNING: &[&str] = &[LnTuningSpec::KIND.name];
const PREFIX: &[&str] = &[PrefixSpec::KIND.name];
const PROMPT_TUNING: &[&str] = &[PromptTuningSpec::KIND.name];

/// Decays of means.
const INSIDE_ONE: Check<f64> = Check {
    refused: |&beta| unless(beta > 0.0 && beta < 1.0, beta),
    fault: "is not between 0 and 1",
    remedy: "give a number such as 0.85",
};

/// At least one row, or `auto`.
const ROWS: Check<RowsName> = Check {
    refused: |rows| unless(rows.fixed() != Some(0), 0),
    fault: "is too small",
    remedy: "give a whole number from 1, or auto",
};

options! {
    /// Options of `train`, from the command line or from a TOML file whose keys are the options' names.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case", default)]
    TrainArgs {
        #[serde(skip)]
        base: BaseArgs,
        #[serde(skip)]
        data: DataArgs,
        #[serde(skip)]
        compute: ComputeArgs,
    }

    "" {
        /// TOML file with any option as a key of the same name; the command line wins
        #[serde(skip)]
        config: PathBuf => value("FILE").on_resume(OnResume::OfTheCall).basic();
        /// One JSON object per line on stdout, nothing else there
        json: bool => switch().on_resume(OnResume::OfTheCall).basic();
        /// Print a step line every N steps where there is no progress bar; 0 prints none
        log_every: u64 = 10 => value("N").on_resume(OnResume::Free);
    }

    "Data" {
        /// Held-out data; repeatable
        #[arg(num_args = 1..)]
        eval_data: Vec<PathBuf> => value("PATH").on_resume(OnResume::Free).basic();
        /// Evaluate on at most N of the held-out rows, evenly spread
        eval_max_rows: usize => value("N").otherwise("all").on_resume(OnResume::Free).check(FROM_ONE);
        /// Hold out this part of the training rows; 0 holds out none
        eval_fraction: f64 => value("F").excludes("eval-data").basic().check(Check {
            refused: |&part| unless((0.0..1.0).contains(&part), part),
            fault: "is no part from 0 to below 1",
            remedy: "give a number such as 0.1, or 0 for no held-out data",
        });
        /// Keep the rows in the order of the files
        no_shuffle: bool => switch();
    }

    "Adapter" {
        /// Kind of adapter to train: lora, vera, adalora, ia3, ln_tuning, dora, prefix, prompt_tuning, or several such as
        /// lora+prefix
        method: Kinds => value("METHOD")
            .default(|args: &TrainArgs| args.init_adapter.is_none().then(AdapterOptions::default_kinds))
            .in_adapter(true)
            .basic();
        /// Start from this adapter (PEFT files), whose config gives the method and the options below
        init_adapter: PathBuf => value("DIR").basic();
        /// Rank of the LoRA, DoRA or VeRA
        rank: usize => value("R").of(LOW_RANK).check(FROM_ONE).basic()
            .default(|args: &TrainArgs| args.method.as_ref().and_then(default_rank))
            .otherwise("8, or with vera 256");
        /// Scale the delta of a LoRA, DoRA or AdaLoRA by alpha / rank
        alpha: f64 = LoraSpec::default().alpha =>
            value("A").of(WITH_ALPHA).check(above_zero("give a number such as 16")).basic();
        /// c_attn, attn.c_proj, c_fc, mlp.c_proj, q, k, v, wte (lora), all-linear, a list of them, or /regex/
        targets: Targets => value("LIST").of(WITH_TARGETS).basic()
            .default(|args: &TrainArgs| args.method.as_ref().and_then(default_targets))
            .otherwise("c_attn, or with ia3 c_attn,mlp.c_proj");
        /// Layers with low-rank deltas, such as 0,2,5-11
        layers: LayerList => value("LIST").of(WITH_LAYERS)
            .default(|_| LoraSpec::default().layers.map(LayerList)).otherwise("all");
        /// Dropout on the input of a LoRA or AdaLoRA
        lora_dropout: f64 = LoraSpec::default().dropout =>
            value("P").of(WITH_ALPHA).in_adapter(false).check(BELOW_ONE);
        /// Scale by alpha / sqrt(rank)
        rslora: bool = LoraSpec::default().rslora => switch().of(LORA);
        /// Another rank for sites that match KEY, a regular expression; repeatable
        rank_pattern: Vec<Pattern> => value("KEY=R").of(LORA).check(Check {
            refused: |patterns| refused_pattern(patterns, |rank| {
                rank.fract() == 0.0 && (1.0..=LARGEST_RANK).contains(&rank)
            }),
            fault: "has no rank",
            remedy: "give a whole number from 1, such as h.0.attn.c_attn=4",
        });
        /// Another alpha for sites that match KEY, a regular expression; repeatable
        alpha_pattern: Vec<Pattern> => value("KEY=A").of(LORA).check(Check {
            refused: |patterns| refused_pattern(patterns, |alpha| alpha.is_finite() && alpha > 0.0),
            fault: "has no finite alpha above 0",
            remedy: "give a number such as h.0.attn.c_attn=16",
        });
        /// Biases that are trained with a LoRA: none, lora_only (of the adapted modules) or all
        bias: TrainedBiases = LoraSpec::default().bias => value("WHICH").of(LORA);
        /// Layer norms that are trained with a LoRA: ln_1, ln_2, ln_f, a list of them, or /regex/
        train_norms: Targets => value("LIST").of(LORA).otherwise("none");
        /// Learning rate of B over that of A (LoRA+)
        lora_plus_ratio: f64 = LoraSpec::default().lora_plus_ratio =>
            value("R").of(LORA).in_adapter(false).check(above_zero("give a number such as 16"));
        /// Keep A as it starts (LoRA-FA)
        freeze_a: bool => switch().of(LORA).in_adapter(false);
        /// Initial A and B: default, gaussian, orthogonal, or of the base's weights pissa or olora
        init_lora_weights: InitialFactors = LoraSpec::default().init_lora_weights =>
            value("INIT").of(LORA);
        /// Dropout on the VeRA's input
        vera_dropout: f64 = VeraSpec::default().dropout =>
            value("P").of(VERA).in_adapter(false).check(BELOW_ONE);
        /// Initial value of the VeRA's lambda_d
        d_initial: f64 = VeraSpec::default().d_initial => value("D").of(VERA).check(Check {
            refused: |&value| unless((value as f32).is_finite(), value),
            fault: "is not finite",
            remedy: "give a number such as 0.1",
        });
        /// Seed of the VeRA's random projections, which PEFT draws alike
        projection_prng_key: u64 = VeraSpec::default().projection_prng_key => value("N").of(VERA);
        /// Rank of every module in the beginning of an AdaLoRA
        init_r: usize = AdaLoraSpec::default().init_r => value("R").of(ADALORA).check(FROM_ONE);
        /// Mean rank that the AdaLoRA's modules have in the end
        target_r: usize = AdaLoraSpec::default().target_r =>
            value("R").of(ADALORA).in_adapter(false).check(FROM_ONE);
        /// First steps, in which the AdaLoRA loses no rank
        tinit: u64 = AdaLoraSpec::default().tinit => value("N").of(ADALORA).in_adapter(false);
        /// Last steps, in which the AdaLoRA keeps its ranks
        tfinal: u64 = AdaLoraSpec::default().tfinal => value("N").of(ADALORA).in_adapter(false);
        /// Steps between two allocations of ranks
        delta_t: u64 = AdaLoraSpec::default().delta_t => value("N").of(ADALORA).in_adapter(false).check(Check {
            refused: |&steps| unless(steps > 0, steps),
            fault: "is no distance",
            remedy: "give a whole number from 1",
        });
        /// Weight of the AdaLoRA's penalty on factors that are not orthogonal
        orth_reg_weight: f64 = AdaLoraSpec::default().orth_reg_weight =>
            value("W").of(ADALORA).in_adapter(false).check(from_zero("give a number such as 0.5, or 0 for none"));
        /// Decay of the mean of the importance by which ranks are allocated
        importance_beta1: f64 = AdaLoraSpec::default().beta1 =>
            value("B").of(ADALORA).in_adapter(false).check(INSIDE_ONE);
        /// Decay of the mean of the importance's uncertainty
        importance_beta2: f64 = AdaLoraSpec::default().beta2 =>
            value("B").of(ADALORA).in_adapter(false).check(INSIDE_ONE);
        /// Targets whose input ia3 scales and not the output: a list, /regex/, or none
        feedforward: Targets => value("LIST").of(IA3)
            .otherwise("mlp.c_proj where it is a target");
        /// Layer norms that ln_tuning trains: ln_1, ln_2, ln_f, a list of them, or /regex/
        norms: Targets = LnTuningSpec::default().norms => value("LIST").of(LN_TUNING);
        /// Length of the prefix in virtual tokens
        prefix_len: usize = PrefixSpec::default().length => value("P").of(PREFIX).check(FROM_ONE);
        /// Initial value of the prefix; with --prefix-projection always random
        prefix_init: PrefixInit => value("INIT").of(PREFIX).default(|args: &TrainArgs| {
            Some(if args.prefix_projection.is_some() { PrefixInit::Random } else { PrefixInit::Text })
        });
        /// Text that --prefix-init text reads
        prefix_text: String => value("TEXT").of(PREFIX).otherwise("the first training row");
        /// Train the prefix through a tanh layer of this width
        prefix_projection: usize => value("HIDDEN").of(PREFIX).check(FROM_ONE);
        /// Virtual tokens that prompt_tuning trains in front of every text
        prompt_len: usize = PromptTuningSpec::default().length =>
            value("P").of(PROMPT_TUNING).check(FROM_ONE);
        /// Initial virtual tokens: embeddings of a text, of random tokens of the vocabulary, or random numbers
        prompt_init: PromptInit = PromptInit::Text => value("INIT").of(PROMPT_TUNING);
        /// Text that --prompt-init text takes the virtual tokens from
        prompt_text: String => value("TEXT").of(PROMPT_TUNING).otherwise("the first training row");
    }

    "Optimization" {
        /// Rows per optimizer step
        batch: usize = 8 => value("N").basic().check(Check {
            refused: |&rows| unless((1..=LARGEST_BATCH).contains(&rows), rows),
            fault: "is out of range",
            remedy: "give a whole number from 1 to 1000000",
        });
        /// Sequences per forward and backward pass, a divisor of --batch; gradients are accumulated
        micro_batch: RowsName = RowsName::AUTO => value("N|auto").on_resume(OnResume::OwnRule).check(ROWS);
        /// Number of optimizer steps
        steps: u64 => value("N").on_resume(OnResume::OwnRule).basic().check(Check {
            refused: |&steps| unless(steps > 0, steps),
            fault: "trains nothing",
            remedy: "give a whole number from 1",
        });
        /// Passes over the training rows, instead of --steps
        epochs: f64 => value("F").excludes("steps").on_resume(OnResume::OwnRule).basic()
            .otherwise("1, or as many as make 200 steps")
            .check(Check {
                refused: |&passes| unless(passes > 0.0 && passes <= MOST_EPOCHS, passes),
                fault: "is out of range",
                remedy: "give a number above 0 and up to 1000000, such as 1",
            });
        /// Highest learning rate
        lr: f64 = 5e-4 => value("LR").check(above_zero("give a number such as 0.0005")).basic();
        /// Learning-rate decay after warm-up
        schedule: ScheduleName = ScheduleName::Linear => value("NAME");
        /// Lowest learning rate after warm-up
        min_lr: f64 => value("LR").otherwise("0").check(from_zero("give a number such as 0.00005"));
        /// Cosines of --schedule cosine-with-restarts
        num_cycles: u32 => value("N").check(Check {
            refused: |&cycles| unless(cycles > 0, cycles),
            fault: "is too small",
            remedy: "give a whole number from 1",
        });
        /// Warm-up steps, or with a dot a part of all steps
        warmup: Warmup = Warmup::Steps(0) => value("N|F").check(Check {
            refused: |warmup| match warmup {
                Warmup::Steps(_) => None,
                Warmup::Fraction(part) => unless((0.0..1.0).contains(part), part),
            },
            fault: "is no part from 0 to below 1",
            remedy: "give a number of steps such as 100, or a part such as 0.1",
        });
        /// Decoupled weight decay on every trainable but layer norms and biases
        weight_decay: f64 = AdamWOptions::default().weight_decay =>
            value("W").check(from_zero("give a number such as 0.01"));
        /// Largest global gradient norm; 0 turns clipping off
        clip: f64 = 1.0 => value("C").check(from_zero("give a number such as 1, or 0 for no clipping"));
        /// Part of the target probability that is spread over the vocabulary
        label_smoothing: f64 = 0.0 => value("E").check(BELOW_ONE);
        /// Noise on the embeddings in training (NEFTune), uniform up to A / sqrt(t c) for rows of t tokens of width c
        neftune_alpha: f64 => value("A").otherwise("0").check(from_zero("give a number such as 5"));
        /// adamw, adamw8bit (moments in a quarter of the memory), or auto (8 bits only if nothing else fits)
        optimizer: Optimizer = Optimizer::Adamw => value("NAME").on_resume(OnResume::OwnRule);
        /// Seed of initial values, order of the data, dropout and noise
        seed: u64 = 0 => value("N").basic();
    }

    "Device and memory" {
        /// Memory for the whole process, such as 4GiB, or auto for nine tenths of the free memory
        memory: MemoryName = MemoryName(Limit::Auto) => value("SIZE|auto").on_resume(OnResume::Free).basic();
        /// Activations that the backward pass computes again: none, mlp, linear, every:K, all, or auto
        recompute: RecomputeName = RecomputeName(None) => value("WHAT").on_resume(OnResume::Free);
        /// Rows of logits that the head holds at a time
        head_rows: RowsName = RowsName::AUTO => value("N|auto").on_resume(OnResume::OwnRule).check(ROWS);
        /// Keep the inputs of blocks outside the memory between forward and backward: in a file of the run
        /// folder, or with CUDA in pinned host memory
        #[arg(num_args = 0..=1, default_missing_value = "on")]
        offload_inputs: Switch = Switch::Auto => value("WHEN").on_resume(OnResume::Free);
        /// Keep the optimizer's moments outside the memory: in a file of the run folder, or with CUDA in
        /// pinned host memory
        #[arg(num_args = 0..=1, default_missing_value = "on")]
        offload_optimizer: Switch = Switch::Auto => value("WHEN").on_resume(OnResume::Free);
        /// Record memory over time in this JSON file, with a picture (.svg) next to it
        memory_trace: PathBuf => value("FILE").on_resume(OnResume::OfTheCall);
    }

    "Run folder" {
        /// Run folder; the adapter is written to its subfolder adapter
        output: PathBuf =>
            value("DIR").otherwise("runs/BASE-METHOD, then -2, -3 ..").on_resume(OnResume::OfTheCall).basic();
        /// Save for --resume every N steps; 0 saves at the end only
        save_every: u64 = 100 => value("N").on_resume(OnResume::Free);
        /// Keep the newest N saves
        keep: usize = 2 => value("N").on_resume(OnResume::Free).check(FROM_ONE);
        /// Evaluate every N steps too, not only before and after; 0 turns this off
        eval_every: u64 = 0 => value("N").on_resume(OnResume::Free);
        /// Keep the adapter with the lowest evaluation loss in the subfolder best; needs --eval-every
        save_best: bool => switch().on_resume(OnResume::Free);
        /// Stop after N evaluations in a row without a lower loss; needs --eval-every
        patience: u64 => value("N").on_resume(OnResume::Free).check(Check {
            refused: |&evaluations| unless(evaluations > 0, evaluations),
            fault: "would stop at once",
            remedy: "give a whole number from 1",
        });
        /// Continue the sample prompts every N steps, and before and after training; 0 turns this off
        sample_every: u64 => value("N").otherwise("0").on_resume(OnResume::Free);
        /// Text that samples continue; repeatable
        sample_prompt: Vec<String> =>
            value("TEXT").otherwise("the beginning of a held-out row").on_resume(OnResume::Free);
        /// Continue the run in --output; options not given come from its config.toml
        resume: bool => switch().on_resume(OnResume::OfTheCall).basic();
        /// Continue the run from its save of this step instead of the newest one; later saves are removed
        resume_from: u64 => value("STEP").on_resume(OnResume::OfTheCall);
    }
}

/// The targets of these methods if none are given; `None` where each has others.
fn default_targets(kinds: &Kinds) -> Option<Targets> {
    common(
        kinds,
        &[
            (LORA, LoraSpec::default().targets),
            (VERA, VeraSpec::default().targets),
            (ADALORA, AdaLoraSpec::default().targets),
            (IA3, Ia3Spec::default().targets),
        ],
    )
}

/// The rank of these methods if none is given; `None` where each has another.
fn default_rank(kinds: &Kinds) -> Option<usize> {
    common(kinds, &[(LORA, LoraSpec::default().rank), (VERA, VeraSpec::default().rank)])
}

/// The default of those methods that are trained; `None` where they differ.
fn common<T: Clone + PartialEq>(kinds: &Kinds, defaults: &[(&[&str], T)]) -> Option<T> {
    let mut trained = defaults
        .iter()
        .filter(|(names, _)| names.iter().any(|name| kinds.contains(name)))
        .map(|(_, own)| own);
    let first = trained.next()?;
    trained.all(|other| other == first).then(|| first.clone())
}

/// The first pattern whose number is not good, as text.
fn refused_pattern(patterns: &[Pattern], good: fn(f64) -> bool) -> Option<String> {
    patterns.iter().find(|pattern| !good(pattern.number)).cloned().map(String::from)
}
