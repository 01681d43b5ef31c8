//! DoRA through the programs: training, resuming, generating, folders beside other methods, policies, refusals.

use serde_json::{Value, json};

use crate::cli_support::{Finished, Sandbox, evaluated, files_below, learned_and_resumed, losses, names};

/// A run that takes no time, of 20 steps.
const RUN: &str = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --threads 1 --lr 0.01 --steps 20 \
                   --save-every 10 --json";

fn train(sandbox: &Sandbox, output: &str, more: &str) -> Finished {
    sandbox.engraft(&format!("{RUN} --output {output} {more}")).succeeds()
}

fn config(sandbox: &Sandbox, folder: &str) -> Value {
    let file = sandbox.path(folder).join("adapter_config.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

#[test]
fn a_dora_is_trained_resumed_and_used() {
    let sandbox = Sandbox::new();
    let run = train(&sandbox, "run", "--method dora --rank 3 --targets all-linear --micro-batch 2");
    let course = learned_and_resumed(&sandbox, &run);
    // The scale m / n begins as 1, and B as 0: as the base, like a LoRA's first step.
    let lora =
        losses(&train(&sandbox, "lora", "--method lora --rank 3 --targets all-linear --micro-batch 2"));
    assert!((course[0] - lora[0]).abs() < 1e-6 * lora[0] && course[1..] != lora[1..], "{course:?} {lora:?}");
    assert_eq!(config(&sandbox, "run/adapter")["use_dora"], true);
    assert!(evaluated(&sandbox, Some("run")) < 0.8 * evaluated(&sandbox, None));
    let look = sandbox.engraft("inspect run/adapter --json").succeeds().events().remove(0);
    let [kind, options] = ["kind", "dora"].map(|key| look["adapters"][0][key].clone());
    assert_eq!(
        (kind, &options["rank"], &look["adapters"][0]["ranks"]),
        (json!("dora"), &json!(3), &json!([3]))
    );
    let card = std::fs::read_to_string(sandbox.path("run/adapter/README.md")).unwrap();
    assert!(card.contains("# dora adapter") && card.contains("rank 3, alpha 16"), "{card}");
}

#[test]
fn parts_are_adapted_with_one_magnitude_and_trained_further() {
    let sandbox = Sandbox::new();
    let first = losses(&train(&sandbox, "run", "--method dora --targets q,v --rank 2 --rslora"));
    let second = losses(&train(&sandbox, "again", "--init-adapter run/adapter"));
    assert!(second[0] < 0.8 * first[0], "{second:?}");
    assert_eq!(config(&sandbox, "again/adapter"), config(&sandbox, "run/adapter"));
    assert_eq!(config(&sandbox, "run/adapter")["r"], 4);
    let further =
        |more: &str| sandbox.engraft(&format!("{RUN} --output third --init-adapter run/adapter {more}"));
    further("--rank 3").refused(&["--rank 3 (the adapter has 2); leave these options out"]);
    further("--method lora").refused(&["--method lora (the adapter has dora)"]);
    further("--lora-dropout 0.1").refused(&["--lora-dropout: 0.1 is not supported with dora"]);
}

#[test]
fn beside_other_methods_it_has_a_folder_of_its_own() {
    let sandbox = Sandbox::new();
    for (method, more, folders) in [
        ("dora+ln_tuning", "", &["README.md", "dora", "ln_tuning"][..]),
        ("dora+prefix", "--prefix-len 3", &["README.md", "dora", "prefix"]),
    ] {
        let method_line = format!("--method {method} {more}");
        let both = losses(&train(&sandbox, "both", &method_line));
        assert_eq!(names(&sandbox.path("both/adapter")), folders);
        assert!(both[19] < 0.8 * both[0], "{method}: {both:?}");
        let again = losses(&train(&sandbox, "again", "--init-adapter both/adapter"));
        assert!(again[0] < 0.8 * both[0], "{method}: {again:?}");
        assert!(evaluated(&sandbox, Some("both")) < 0.8 * evaluated(&sandbox, None));
        ["both", "again"].iter().for_each(|run| std::fs::remove_dir_all(sandbox.path(run)).unwrap());
    }
}

/// Tensors of 4,096 elements and more have moments in 8 bits.
#[test]
fn moments_in_8_bits_learn_as_much() {
    let sandbox = Sandbox::new();
    let run = |name: &str| {
        let options = "--method dora --targets all-linear --rank 48 --micro-batch 4 --lr 0.002";
        losses(&train(&sandbox, name, &format!("{options} --optimizer {name}")))
    };
    let (plain, moments) = (run("adamw"), run("adamw8bit"));
    let last = |course: &[f64]| course[15..].iter().sum::<f64>() / 5.0;
    assert!(moments != plain && last(&plain) < 0.5 * plain[0], "{moments:?} {plain:?}");
    assert!((last(&moments) - last(&plain)).abs() < 0.05 * plain[0], "{moments:?} {plain:?}");
}

/// Recompute, a streamed base and offloading change no bit; other micro-batches change rounding alone.
#[test]
fn policies_change_nothing_of_a_run() {
    let sandbox = Sandbox::new();
    let method = "--method dora --targets all-linear --rank 3";
    let run = |name: &str, more: &str| losses(&train(&sandbox, name, &format!("{method} {more}")));
    let near = |a: &[f64], b: &[f64], bound: f64| a.iter().zip(b).all(|(a, b)| (a - b).abs() <= bound * b);
    for base in ["f16", "q8"] {
        let plain = run(&format!("{base}-plain"), &format!("--base-dtype {base} --micro-batch 4"));
        assert!(plain[19] < 0.8 * plain[0], "{plain:?}");
        for (number, policy) in
            ["--recompute all", "--recompute mlp --stream-base on", "--offload-inputs --offload-optimizer"]
                .into_iter()
                .enumerate()
        {
            let name = format!("{base}-{number}");
            assert_eq!(
                run(&name, &format!("--base-dtype {base} --micro-batch 4 {policy}")),
                plain,
                "{policy}"
            );
            let folder = |run: &str| files_below(&sandbox.path(run).join("adapter"));
            assert!(folder(&name) == folder(&format!("{base}-plain")), "{policy}");
        }
        let cut = run(&format!("{base}-cut"), &format!("--base-dtype {base} --micro-batch 1"));
        // AdamW amplifies rounding from step to step.
        assert!(near(&cut[..6], &plain[..6], 1e-4), "{cut:?} {plain:?}");
    }
}

#[test]
fn what_a_dora_cannot_do_is_refused() {
    let sandbox = Sandbox::new();
    let run = |more: &str| sandbox.engraft(&format!("{RUN} --output run {more}"));
    run("--method dora --lora-dropout 0.1").refused(&["--lora-dropout: 0.1 is not supported with dora"]);
    run("--method lora+dora").refused(&["--method: lora and dora are both LORA in PEFT"]);
    run("--method dora --norms ln_1").refused(&["--norms: means nothing with --method dora"]);
    run("--use-dora").refused(&["--use-dora", "--method dora"]);
    assert!(!sandbox.path("run").exists());
    train(&sandbox, "run", "--method dora --steps 2");
    train(&sandbox, "lora", "--method lora --steps 2");
    train(&sandbox, "elsewhere", "--method lora --steps 2 --targets c_fc");
    let generate = "generate --prompt row --max-new-tokens 2";
    let twice = sandbox.infer(&format!("{generate} --adapter run --adapter run/adapter"));
    twice.refused(&["two of the adapters scale the same module"]);
    let beside = sandbox.infer(&format!("{generate} --adapter run --adapter lora"));
    beside.refused(&["by the norms of its columns (DoRA)", "leave one --adapter out"]);
    sandbox.infer(&format!("{generate} --adapter run --adapter elsewhere")).succeeds();
}
