//! VeRA: gradients, choices of memory, and the programs: training, resuming, generating, other methods beside it, refusals.

use engraft_adapters::{AdapterSpec, Ia3Spec, LoraSpec, VeraSpec};
use serde_json::{Value, json};

use crate::{
    cli_support::{Finished, Sandbox, evaluated, learned_and_resumed, losses, names, planned_for},
    method_policies,
    setup::within,
};

/// A run that takes no time, of 20 steps.
const RUN: &str = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --threads 1 --lr 0.05 --steps 20 \
                   --save-every 10 --json";

/// Every module: two widths of inputs, and three of outputs.
fn everywhere(dropout: f64) -> AdapterSpec {
    VeraSpec { rank: 5, targets: "all-linear".parse().unwrap(), dropout, ..VeraSpec::default() }.into()
}

/// The deltas of two methods on one module, whose output is scaled.
fn with_others(dropout: f64) -> AdapterSpec {
    let lora =
        LoraSpec { rank: 3, alpha: 7.5, targets: "q,v".parse().unwrap(), dropout, ..LoraSpec::default() };
    let vera = VeraSpec { rank: 5, targets: "c_attn,c_fc".parse().unwrap(), dropout, ..VeraSpec::default() };
    let ia3 = Some(Ia3Spec::default());
    AdapterSpec { lora: Some(lora), vera: Some(vera), ia3, ..AdapterSpec::default() }
}

#[test]
fn gradients_are_those_of_autograd() {
    for dropout in [0.0, 0.2] {
        method_policies::gradients("vera", &everywhere(dropout));
    }
    method_policies::gradients("lora, vera and ia3", &with_others(0.2));
}

#[test]
fn choices_of_memory_change_no_bit_or_rounding_alone() {
    method_policies::memory_choices("vera", &everywhere(0.2));
    method_policies::memory_choices("lora, vera and ia3", &with_others(0.0));
}

#[test]
fn generation_computes_what_training_does() {
    method_policies::generation("vera", &everywhere(0.0));
    // One shape alone: factors are read transposed.
    let alike = VeraSpec { rank: 5, ..VeraSpec::default() };
    method_policies::generation("vera on c_attn", &alike.into());
    method_policies::generation("lora, vera and ia3", &with_others(0.0));
}

#[test]
fn options_of_memory_give_what_they_must() {
    method_policies::program(&format!(
        "{RUN} --method vera --rank 16 --targets all-linear --vera-dropout 0.1"
    ));
}

/// Its factors are cut to each module's size, and so are those that are folded.
#[test]
fn a_vera_of_every_module_is_merged() {
    let sandbox = Sandbox::new();
    train(&sandbox, "run", "--method vera --rank 16 --targets all-linear");
    sandbox.engraft("merge --base embedded --adapter run --output merged --dtype f32").succeeds();
    let line = "eval --base merged --data data.jsonl --no-pack --seq-len 24 --json";
    let merged = sandbox.engraft(line).succeeds().events()[0]["loss"].as_f64().unwrap();
    let (beside, alone) = (evaluated(&sandbox, Some("run")), evaluated(&sandbox, None));
    assert!(beside < 0.8 * alone, "{beside} {alone}");
    // The folder's weights are rounded to FP16 again when they are loaded.
    within((merged / beside - 1.0).abs(), 1e-3, "loss of the merged model");
}

fn train(sandbox: &Sandbox, output: &str, more: &str) -> Finished {
    sandbox.engraft(&format!("{RUN} --output {output} {more}")).succeeds()
}

#[test]
fn lambdas_are_trained_resumed_and_used() {
    let sandbox = Sandbox::new();
    let run = train(&sandbox, "run", "--method vera");
    learned_and_resumed(&sandbox, &run);

    assert!(evaluated(&sandbox, Some("run")) < 0.8 * evaluated(&sandbox, None));
    let look = sandbox.engraft("inspect run/adapter --json").succeeds().events().remove(0);
    assert_eq!(look["adapters"][0]["kind"], "vera");
    let vera = json!({"rank": 256, "targets": ["c_attn"], "dropout": 0.0, "d_initial": 0.1, "projection_prng_key": 0});
    assert_eq!(look["adapters"][0]["vera"], vera);
    let card = std::fs::read_to_string(sandbox.path("run/adapter/README.md")).unwrap();
    for part in ["# vera adapter", "| method | vera, rank 256, projections of key 0 |"] {
        assert!(card.contains(part), "{card}");
    }
}

/// Width 128, 6 layers: factors of rank 16 for c_attn, and two vectors of each layer.
#[test]
fn projections_have_no_moments() {
    let sandbox = Sandbox::new();
    let plan = |more: &str| {
        let line = RUN.replace("train ", "plan ").replace("--save-every 10", "");
        sandbox.engraft(&format!("{line} --method vera --rank 16 {more}")).succeeds().events().remove(0)
    };
    let (learned, projections) = (6 * (3 * 128 + 16), 16 * 128 + 3 * 128 * 16);
    let all = plan("");
    assert_eq!(planned_for(&all, "moments"), 2 * 4 * learned);
    // Values and gradient.
    let trainables = planned_for(&all, "trainables");
    let both = 2 * 4 * (learned + projections);
    assert!((both..both + 1024).contains(&trainables), "{trainables} for {both}");
    let run = train(&sandbox, "run", "--method vera --rank 16");
    assert_eq!(run.events_of("start")[0]["trainables"], learned);
}

#[test]
fn a_vera_is_trained_further() {
    let sandbox = Sandbox::new();
    let options = "--rank 16 --targets c_fc,mlp.c_proj --layers 1-5 --projection-prng-key 9 --d-initial 0.2";
    let first = train(&sandbox, "run", &format!("--method vera {options}"));
    let second =
        train(&sandbox, "again", &format!("--init-adapter run/adapter {options} --vera-dropout 0.1"));
    assert!(losses(&second)[0] < 0.8 * losses(&first)[0]);
    let config = |run: &str| -> Value {
        let file = sandbox.path(run).join("adapter/adapter_config.json");
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
    };
    let mut expected = config("run");
    expected["vera_dropout"] = json!(0.1);
    assert_eq!(config("again"), expected);
    let third = sandbox.engraft(&format!(
        "{RUN} --output third --init-adapter run/adapter --rank 8 --layers 0 --projection-prng-key 0 --lora-dropout 0"
    ));
    third.refused(&[
        "--rank 8 (the adapter has 16), --layers [0] (the adapter has [1, 2, 3, 4, 5])",
        "--projection-prng-key 0 (the adapter has 9)",
    ]);
}

#[test]
fn beside_other_methods_a_vera_has_a_folder_of_its_own() {
    let sandbox = Sandbox::new();
    let alone = losses(&train(&sandbox, "lora", "--method lora"));
    for (method, more, folders) in [
        ("vera+lora", "", &["README.md", "lora", "vera"][..]),
        ("vera+prefix", "--rank 16 --prefix-len 3", &["README.md", "prefix", "vera"]),
        ("lora+vera+ia3+ln_tuning", "--rank 16", &["README.md", "ia3", "ln_tuning", "lora", "vera"]),
    ] {
        let both = losses(&train(&sandbox, method, &format!("--method {method} {more}")));
        assert_eq!(names(&sandbox.path(method).join("adapter")), folders);
        assert!(both[19] < 0.8 * both[0], "{method}: {both:?}");
        if method == "vera+lora" {
            // lambda_b begins as zeros, and each method has its own rank.
            assert!((both[0] - alone[0]).abs() < 1e-6 && both[19] != alone[19], "{both:?} {alone:?}");
            let look = sandbox.engraft("inspect vera+lora/adapter --json").succeeds().events().remove(0);
            assert_eq!(
                [&look["adapters"][0]["lora"]["rank"], &look["adapters"][1]["vera"]["rank"]],
                [8, 256]
            );
        }
        let again =
            losses(&train(&sandbox, &format!("again-{method}"), &format!("--init-adapter {method}/adapter")));
        assert!(again[0] < 0.8 * both[0], "{method}: {again:?}");
        assert!(evaluated(&sandbox, Some(method)) < 0.8 * evaluated(&sandbox, None));
    }
}

#[test]
fn what_a_vera_cannot_do_is_refused() {
    let sandbox = Sandbox::new();
    let run = |more: &str| sandbox.engraft(&format!("{RUN} --output run {more}"));
    run("--method vera --alpha 3").refused(&["--alpha: means nothing with --method vera"]);
    run("--vera-dropout 0.1").refused(&["--vera-dropout: means nothing with --method lora"]);
    run("--method vera --d-initial 1e99").refused(&["--d-initial", "give a number such as 0.1"]);
    run("--method vera --targets q").refused(&["--targets: `q` is a part of attn.c_attn, and vera attaches"]);
    run("--method lora+vera --lora-dropout 0.1").refused(&[
        "--lora-dropout: one method drops 0.1 of its input and another one 0; give them the same",
    ]);
}
