//! LoRA on the embedding of tokens, and starts that follow from the base's weights (PiSSA, OLoRA): gradients, choices of
//! memory, and the programs.

use engraft_adapters::{AdapterSpec, InitialFactors, LoraSpec, PrefixSpec};
use serde_json::{Value, json};

use crate::{
    cli_support::{Finished, Sandbox, evaluated, files_below, losses},
    method_policies,
};

/// A run that takes no time, of 12 steps.
const RUN: &str = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --threads 1 --lr 0.01 --steps 12 \
                   --save-every 6 --json";

fn lora(targets: &str, init: InitialFactors) -> LoraSpec {
    LoraSpec {
        rank: 3,
        alpha: 7.5,
        targets: targets.parse().unwrap(),
        init_lora_weights: init,
        ..LoraSpec::default()
    }
}

/// Every module and the embedding.
fn everywhere(dropout: f64) -> AdapterSpec {
    let all = "c_attn,c_proj,c_fc,wte";
    LoraSpec { dropout, alpha: 2.5, rslora: true, ..lora(all, InitialFactors::Default) }.into()
}

/// Parts and whole modules with frozen copies, and a prefix.
fn with_copies() -> AdapterSpec {
    let lora = Some(lora("q,v,mlp.c_proj,wte", InitialFactors::Pissa));
    let prefix = Some(PrefixSpec { length: 3, projection: None });
    AdapterSpec { lora, prefix, ..AdapterSpec::default() }
}

#[test]
fn gradients_are_those_of_autograd() {
    for dropout in [0.0, 0.2] {
        method_policies::gradients("lora with wte", &everywhere(dropout));
    }
    method_policies::gradients("lora on wte", &lora("wte", InitialFactors::Default).into());
    method_policies::gradients("pissa", &lora("all-linear", InitialFactors::Pissa).into());
    method_policies::gradients(
        "olora",
        &LoraSpec { freeze_a: true, ..lora("c_fc,c_proj", InitialFactors::Olora) }.into(),
    );
    method_policies::gradients("pissa, wte and prefix", &with_copies());
}

#[test]
fn choices_of_memory_change_no_bit_or_rounding_alone() {
    method_policies::memory_choices("lora with wte", &everywhere(0.2));
    method_policies::memory_choices("pissa", &lora("all-linear", InitialFactors::Pissa).into());
    method_policies::memory_choices("pissa, wte and prefix", &with_copies());
}

#[test]
fn generation_computes_what_training_does() {
    method_policies::generation("lora with wte", &everywhere(0.0));
    method_policies::generation("olora", &lora("all-linear", InitialFactors::Olora).into());
    method_policies::generation("pissa, wte and prefix", &with_copies());
}

#[test]
fn options_of_memory_give_what_they_must() {
    // At the rate of the other runs the losses fall so fast that rounding shows.
    let run = RUN.replace("--lr 0.01", "--lr 0.001");
    method_policies::program(&format!("{run} --rank 16 --targets c_attn,c_proj,c_fc,wte --lora-dropout 0.1"));
    method_policies::program(&format!("{run} --rank 16 --targets all-linear --init-lora-weights pissa"));
}

fn train(sandbox: &Sandbox, output: &str, more: &str) -> Finished {
    sandbox.engraft(&format!("{RUN} --output {output} {more}")).succeeds()
}

fn config(sandbox: &Sandbox, run: &str) -> Value {
    let file = sandbox.path(run).join("adapter/adapter_config.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

/// Each begins as the base, learns, resumes to the same bytes, goes on from its folder, and is merged to the same model.
#[test]
fn each_is_trained_resumed_merged_and_used() {
    let sandbox = Sandbox::new();
    let first = losses(&train(&sandbox, "plain", "--steps 1"))[0];
    for (name, options) in [
        ("wte", "--rank 3 --targets c_attn,wte --layers 1"),
        ("only-wte", "--rank 3 --targets wte --lr 0.05"),
        ("pissa", "--rank 3 --targets all-linear --init-lora-weights pissa"),
        (
            "parts",
            "--rank 2 --targets q,v,wte --init-lora-weights pissa_niter_16 --optimizer adamw8bit --rslora",
        ),
        ("olora", "--rank 3 --init-lora-weights olora --base-dtype q8"),
        ("dora", "--rank 3 --method dora --init-lora-weights pissa"),
        ("bf16", "--rank 3 --targets c_attn,c_fc,c_proj,wte --init-lora-weights pissa --precision bf16"),
        ("gaussian", "--rank 3 --init-lora-weights gaussian"),
        ("orthogonal", "--rank 4 --init-lora-weights orthogonal --lora-plus-ratio 4"),
    ] {
        let course = losses(&train(&sandbox, name, options));
        let near = if ["olora", "bf16"].contains(&name) { 2e-2 } else { 1e-5 };
        assert!((course[0] - first).abs() < near * first, "{name}: {first} {course:?}");
        assert!(course.len() == 12 && course[11] < 0.93 * course[0], "{name}: {course:?}");
        let expected = files_below(&sandbox.path(name).join("adapter"));
        sandbox.engraft(&format!("train --resume --output {name} --resume-from 6 --json")).succeeds();
        assert!(files_below(&sandbox.path(name).join("adapter")) == expected, "{name}: resumed");

        let dtype = if name == "olora" { "--base-dtype q8" } else { "" };
        let again = format!("{name}-again");
        let line = format!("{RUN} --output {again} --init-adapter {name}/adapter {dtype} --lr 1e-6");
        let further = losses(&sandbox.engraft(&line.replace("--lr 0.01 ", "")).succeeds());
        assert!(further[0] < 0.93 * course[0], "{name}: {further:?}");
        assert_eq!(config(&sandbox, &again), config(&sandbox, name), "{name}");
        sandbox
            .infer(&format!("generate --prompt row --max-new-tokens 4 --temperature 0 --adapter {name}"))
            .succeeds();
        let look = sandbox.engraft(&format!("inspect {name}/adapter --json")).succeeds().events().remove(0);
        assert_eq!(look["adapters"][0]["unsupported"], json!([]), "{name}");
        if dtype.is_empty() {
            let with = evaluated(&sandbox, Some(name));
            sandbox.engraft(&format!("merge --adapter {name} --dtype f32 --output {name}-merged")).succeeds();
            let line = format!("eval --base {name}-merged --data data.jsonl --no-pack --seq-len 24 --json");
            let merged = sandbox.engraft(&line).succeeds().events()[0]["loss"].as_f64().unwrap();
            // The merged weights are rounded to FP16.
            assert!((merged - with).abs() < 2e-3 * with, "{name}: {merged} {with}");
        }
    }
    let ranks = |run: &str| (config(&sandbox, run)["r"].clone(), config(&sandbox, run)["lora_alpha"].clone());
    assert_eq!(ranks("pissa"), (json!(6), json!(32)));
    assert_eq!(ranks("gaussian"), (json!(3), json!(16)));
    assert_eq!(config(&sandbox, "wte")["target_modules"], json!(["c_attn", "transformer.wte"]));
    let card = std::fs::read_to_string(sandbox.path("pissa/adapter/README.md")).unwrap();
    assert!(card.contains("| initial | pissa |"), "{card}");
}

/// The file has A and B at twice the rank: 256 KiB for a module of 512 columns, more than the plan has for lists.
#[test]
fn what_is_put_together_for_the_file_is_planned() {
    let sandbox = Sandbox::new();
    let run = train(&sandbox, "run", "--targets all-linear --rank 64 --init-lora-weights olora");
    let done = run.events_of("done").remove(0);
    let [counted, planned] =
        ["counted_bytes", "planned_counted_bytes"].map(|key| done[key].as_u64().unwrap());
    assert!(counted <= planned, "{counted} bytes counted, {planned} planned");
}

#[test]
fn what_is_no_start_is_refused() {
    let sandbox = Sandbox::new();
    let run = |more: &str| sandbox.engraft(&format!("{RUN} --output run {more}"));
    run("--init-lora-weights eva").refused(&[
        "--init-lora-weights eva: is an invalid value; give default, gaussian, orthogonal, pissa or olora",
    ]);
    run("--init-lora-weights pissa --rank 100000")
        .refused(&["--init-lora-weights: pissa takes as many", "lower the rank"]);
    run("--init-lora-weights olora --lora-dropout 0.1")
        .refused(&["--init-lora-weights: olora begins with a part"]);
    run("--init-lora-weights orthogonal --rank 3")
        .refused(&["--init-lora-weights: orthogonal needs even ranks"]);
    run("--method prefix --init-lora-weights pissa").refused(&["means nothing with --method prefix"]);
    run("--targets wte --freeze-a").refused(&["--freeze-a: A of transformer.wte starts at 0"]);
    run("--targets c_attn,wte --method dora")
        .refused(&["--targets: transformer.wte is the embedding of tokens"]);
    run("--targets wte --method vera").refused(&["--targets: `wte` matches no module"]);
    run("--targets wpe").refused(&["--targets: `wpe` matches no module", "wte"]);
    run("--pissa").refused(&["--init-lora-weights"]);
    assert!(!sandbox.path("run").exists());
    train(&sandbox, "run", "--steps 1 --init-lora-weights pissa");
    let line = format!("{RUN} --output again --init-adapter run/adapter");
    sandbox
        .engraft(&format!("{line} --init-lora-weights olora"))
        .refused(&["A and B start from --init-adapter"]);
    sandbox.engraft(&format!("{line} --lora-dropout 0.1")).refused(&["leave the dropout out"]);
}
