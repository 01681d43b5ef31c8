//! LoRA with trained biases and norms, LoRA+ and LoRA-FA through the programs.

use std::collections::BTreeMap;

use candle_core::{Device, Tensor, safetensors};
use serde_json::{Value, json};

use crate::cli_support::{Finished, Sandbox, counts_what_was_planned, files_below, losses};

/// A run that takes no time, of 12 steps.
const RUN: &str = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --threads 1 --lr 0.01 --steps 12 \
                   --save-every 6 --rank 3 --json";

fn train(sandbox: &Sandbox, output: &str, more: &str) -> Finished {
    sandbox.engraft(&format!("{RUN} --output {output} {more}")).succeeds()
}

fn config(sandbox: &Sandbox, run: &str) -> Value {
    let file = sandbox.path(run).join("adapter/adapter_config.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn tensors(sandbox: &Sandbox, run: &str) -> BTreeMap<String, Vec<f32>> {
    let file = sandbox.path(run).join("adapter/adapter_model.safetensors");
    let flat = |tensor: Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let found = safetensors::load(file, &Device::Cpu).unwrap();
    found.into_iter().map(|(name, tensor)| (name, flat(tensor))).collect()
}

fn evaluated(sandbox: &Sandbox, with: &str) -> f64 {
    let line = format!("eval --base embedded --data data.jsonl --no-pack --seq-len 24 --json {with}");
    sandbox.engraft(&line).succeeds().events()[0]["loss"].as_f64().unwrap()
}

/// Every variant starts as the base, learns, resumes to the same bytes, goes on from its folder, and changes no bit with
/// the policy of memory.
#[test]
fn variants_are_trained_resumed_and_used() {
    let sandbox = Sandbox::new();
    let plain = losses(&train(&sandbox, "plain", ""));
    for (name, options, own) in [
        ("only", "--bias lora_only", &["h.0.attn.c_attn.base_layer.bias"][..]),
        ("all", "--bias all", &["h.0.attn.c_attn.base_layer.bias", "h.1.mlp.c_fc.bias", "ln_f.bias"]),
        ("norms", "--train-norms ln_2,ln_f", &["h.0.ln_2.weight", "h.0.ln_2.bias", "ln_f.weight"]),
        ("plus", "--lora-plus-ratio 8", &[]),
        ("frozen", "--freeze-a --targets q,v", &[]),
        (
            "dora",
            "--method dora --bias lora_only --train-norms ln_1 --lora-plus-ratio 2",
            &["h.0.ln_1.weight"],
        ),
        ("q8", "--base-dtype q8 --bias all --optimizer adamw8bit", &["h.0.attn.c_proj.bias"]),
    ] {
        let run = train(&sandbox, name, &format!("{options} --micro-batch 2"));
        let course = losses(&run);
        assert!(course.len() == 12 && course[11] < 0.9 * course[0], "{name}: {course:?}");
        assert!(
            (course[0] - plain[0]).abs() < 2e-2 * plain[0] && course[1..] != plain[1..],
            "{name}: {course:?}"
        );
        let found = tensors(&sandbox, name);
        for tensor in own {
            let key = format!("base_model.model.transformer.{tensor}");
            assert!(found.contains_key(&key), "{name}: {key} among {:?}", found.keys());
        }
        counts_what_was_planned(&run);

        let bytes = files_below(&sandbox.path(name).join("adapter"));
        let policy = "--recompute all --stream-base on --offload-inputs --offload-optimizer --micro-batch 2";
        let other = format!("{name}-policy");
        assert_eq!(losses(&train(&sandbox, &other, &format!("{options} {policy}"))), course, "{name}");
        assert!(files_below(&sandbox.path(&other).join("adapter")) == bytes, "{name} under other policies");
        sandbox.engraft(&format!("train --resume --output {name} --resume-from 6 --json")).succeeds();
        assert!(
            files_below(&sandbox.path(name).join("adapter")) == bytes,
            "{name}: other bytes when resumed"
        );

        let dtype = if name == "q8" { "--base-dtype q8" } else { "" };
        let again = format!("{name}-again");
        let line = RUN.replace("--rank 3", dtype);
        let further =
            sandbox.engraft(&format!("{line} --output {again} --init-adapter {name}/adapter")).succeeds();
        assert!(losses(&further)[0] < 0.9 * course[0], "{name}");
        assert_eq!(config(&sandbox, &again), config(&sandbox, name));
        let learned = evaluated(&sandbox, &format!("--adapter {name} {dtype}"));
        assert!(learned < 0.9 * evaluated(&sandbox, dtype), "{name}");
        sandbox
            .infer(&format!("generate --prompt row --max-new-tokens 4 --temperature 0 --adapter {name}"))
            .succeeds();
        sandbox.engraft(&format!("inspect {name}/adapter --json")).succeeds();
    }
    assert_eq!(config(&sandbox, "only")["bias"], "lora_only");
    assert_eq!(config(&sandbox, "norms")["modules_to_save"], json!(["ln_2", "ln_f"]));
    let card = std::fs::read_to_string(sandbox.path("norms/adapter/README.md")).unwrap();
    assert!(card.contains("| norms | ln_2,ln_f |"), "{card}");
}

/// A as it starts is a function of the seed and of its name alone.
#[test]
fn a_frozen_a_stays_and_takes_no_moments() {
    let sandbox = Sandbox::new();
    let free = train(&sandbox, "free", "--steps 1");
    let frozen = train(&sandbox, "frozen", "--freeze-a --steps 1");
    let later = train(&sandbox, "later", "--freeze-a");
    // The gradient of A is zero in the first step, where B is zero: weight decay alone moves it.
    let [one, twelve] = ["frozen", "later"].map(|run| tensors(&sandbox, run));
    for (name, tensor) in &one {
        assert_eq!(tensor == &twelve[name], name.contains("lora_A"), "{name}");
    }
    assert_ne!(losses(&later)[11], losses(&train(&sandbox, "free-later", ""))[11]);
    let counted = |run: &Finished| run.events_of("done")[0]["counted_bytes"].as_u64().unwrap();
    assert!(counted(&frozen) < counted(&free));
    assert_eq!(config(&sandbox, "frozen"), config(&sandbox, "free"));
}

#[test]
fn options_that_mean_nothing_or_clash_are_refused() {
    let sandbox = Sandbox::new();
    let run = |more: &str| sandbox.engraft(&format!("{RUN} --output run {more}"));
    run("--bias some").refused(&["--bias some: is an invalid value; give none, lora_only or all"]);
    run("--lora-plus-ratio 0").refused(&["--lora-plus-ratio 0"]);
    run("--train-norms ln_9")
        .refused(&["--train-norms: `ln_9` matches no layer norm; choose among ln_1, ln_2, ln_f"]);
    run("--train-norms ln_f --bias all")
        .refused(&["--train-norms: the biases of norms are trained by bias all already"]);
    run("--method lora+ln_tuning --bias all").refused(&["two methods set the bias of a layer norm"]);
    run("--method lora+ln_tuning --train-norms ln_1").refused(&["two methods set the gain of a layer norm"]);
    run("--modules-to-save ln_f").refused(&["--train-norms"]);
    assert!(!sandbox.path("run").exists());
    let prefix =
        sandbox.engraft(&format!("{} --output run --method prefix --freeze-a", RUN.replace("--rank 3", "")));
    prefix.refused(&["--freeze-a: means nothing with --method prefix"]);
    train(&sandbox, "run", "--bias lora_only");
    let line = RUN.replace("--rank 3", "--output again --init-adapter run/adapter --bias all");
    sandbox.engraft(&line).refused(&["--bias all (the adapter has lora_only)"]);
    let twice = "generate --prompt row --max-new-tokens 2 --adapter run --adapter run/adapter";
    sandbox.infer(twice).refused(&["replace its bias; leave one --adapter out"]);
}
