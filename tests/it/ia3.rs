//! IA3: gradients, choices of memory, and the programs: training, resuming, generating, other methods beside it, refusals.

use engraft_adapters::{AdapterSpec, Ia3Spec, LoraSpec};
use serde_json::{Value, json};

use crate::{
    cli_support::{Finished, Sandbox, evaluated, learned_and_resumed, losses, names},
    method_policies,
};

/// A run that takes no time, of 20 steps.
const RUN: &str = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --threads 1 --lr 0.05 --steps 20 \
                   --save-every 10 --json";

/// Every module has a vector: outputs in attention, inputs in the MLP.
fn everywhere() -> AdapterSpec {
    Ia3Spec {
        targets: "all-linear".parse().unwrap(),
        feedforward: Some("mlp.c_fc,mlp.c_proj".parse().unwrap()),
    }
    .into()
}

/// Vectors, two of them on modules with a LoRA.
fn with_lora() -> AdapterSpec {
    let lora = LoraSpec { rank: 3, alpha: 7.5, targets: "q,v,c_fc".parse().unwrap(), ..LoraSpec::default() };
    let ia3 = Ia3Spec { targets: "c_attn,mlp.c_fc,mlp.c_proj".parse().unwrap(), feedforward: None };
    AdapterSpec { lora: Some(lora), ia3: Some(ia3), ..AdapterSpec::default() }
}

#[test]
fn gradients_are_those_of_autograd() {
    method_policies::gradients("ia3", &everywhere());
    method_policies::gradients("lora and ia3", &with_lora());
}

#[test]
fn choices_of_memory_change_no_bit_or_rounding_alone() {
    method_policies::memory_choices("ia3", &everywhere());
    method_policies::memory_choices("lora and ia3", &with_lora());
}

#[test]
fn generation_computes_what_training_does() {
    method_policies::generation("ia3", &everywhere());
    method_policies::generation("lora and ia3", &with_lora());
}

#[test]
fn options_of_memory_give_what_they_must() {
    method_policies::program(&format!("{RUN} --method ia3"));
}

fn train(sandbox: &Sandbox, output: &str, more: &str) -> Finished {
    sandbox.engraft(&format!("{RUN} --output {output} {more}")).succeeds()
}

#[test]
fn vectors_are_trained_resumed_and_used() {
    let sandbox = Sandbox::new();
    let run = train(&sandbox, "run", "--method ia3");
    let losses = learned_and_resumed(&sandbox, &run);
    assert!((losses[0] - evaluated(&sandbox, None)).abs() < 0.5, "it starts as the base: {losses:?}");
    assert!(evaluated(&sandbox, Some("run")) < 0.8 * evaluated(&sandbox, None));
    let look = sandbox.engraft("inspect run/adapter --json").succeeds().events().remove(0);
    assert_eq!(look["adapters"][0]["kind"], "ia3");
    assert_eq!(
        look["adapters"][0]["ia3"],
        json!({"targets": ["c_attn", "mlp.c_proj"], "feedforward": ["mlp.c_proj"]})
    );
    let card = std::fs::read_to_string(sandbox.path("run/adapter/README.md")).unwrap();
    for part in ["# ia3 adapter", "| targets | c_attn,mlp.c_proj |", "| feedforward | mlp.c_proj |"] {
        assert!(card.contains(part), "{card}");
    }
}

#[test]
fn an_adapter_of_vectors_is_trained_further() {
    let sandbox = Sandbox::new();
    let first = train(&sandbox, "run", "--method ia3 --targets c_attn,c_fc --feedforward none");
    let second = train(&sandbox, "again", "--init-adapter run/adapter --feedforward none");
    assert!(losses(&second)[0] < 0.8 * losses(&first)[0]);
    let config = |run: &str| -> Value {
        let file = sandbox.path(run).join("adapter/adapter_config.json");
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
    };
    assert_eq!(config("again"), config("run"));
    assert_eq!(config("again")["feedforward_modules"], json!([]));
    let third = sandbox.engraft(&format!(
        "{RUN} --output third --init-adapter run/adapter --targets c_attn --feedforward c_fc"
    ));
    third.refused(&[
        "--targets c_attn (the adapter has c_attn,c_fc), --feedforward c_fc (the adapter has none); leave",
    ]);
}

#[test]
fn beside_other_methods_vectors_have_a_folder_of_their_own() {
    let sandbox = Sandbox::new();
    let alone = losses(&train(&sandbox, "lora", "--method lora"));
    for (method, more, folders) in [
        ("ia3+lora", "", &["README.md", "ia3", "lora"][..]),
        ("ia3+prefix", "--prefix-len 3", &["README.md", "ia3", "prefix"]),
        ("lora+ia3+ln_tuning+prefix", "--prefix-len 3", &["README.md", "ia3", "ln_tuning", "lora", "prefix"]),
    ] {
        let both = losses(&train(&sandbox, method, &format!("--method {method} {more}")));
        assert_eq!(names(&sandbox.path(method).join("adapter")), folders);
        assert!(both[19] < 0.8 * both[0], "{method}: {both:?}");
        if method == "ia3+lora" {
            // Vectors begin as ones, and each method has its own targets.
            assert!((both[0] - alone[0]).abs() < 1e-6 && both[19] != alone[19], "{both:?} {alone:?}");
            let config = std::fs::read_to_string(sandbox.path("ia3+lora/adapter/lora/adapter_config.json"));
            assert!(!config.unwrap().contains("mlp.c_proj"));
        }
        let again =
            losses(&train(&sandbox, &format!("again-{method}"), &format!("--init-adapter {method}/adapter")));
        assert!(again[0] < 0.8 * both[0], "{method}: {again:?}");
        assert!(evaluated(&sandbox, Some(method)) < 0.8 * evaluated(&sandbox, None));
        let card = std::fs::read_to_string(sandbox.path(method).join("adapter/README.md")).unwrap();
        let [lora, ia3] = ["\"lora\")", "\"ia3\")"].map(|folder| card.find(folder));
        assert!(ia3.is_some() && lora < ia3, "PEFT wraps the LoRA in the vectors: {card}");
    }
}

#[test]
fn what_vectors_cannot_do_is_refused() {
    let sandbox = Sandbox::new();
    let run = |more: &str| sandbox.engraft(&format!("{RUN} --output run {more}"));
    run("--method ia3 --rank 3").refused(&["--rank: means nothing with --method ia3"]);
    run("--method ia3 --layers 1").refused(&["--layers: means nothing with --method ia3"]);
    run("--feedforward c_fc").refused(&["--feedforward: means nothing with --method lora"]);
    run("--method prefix --targets c_fc")
        .refused(&["give --method lora, dora, vera, adalora, ia3 or lora+prefix"]);
    run("--method ia3 --targets q,v")
        .refused(&["--targets: `q` is a part of attn.c_attn, and ia3 attaches to"]);
    run("--method ia3 --feedforward c_fc")
        .refused(&["--feedforward: `c_fc` matches no module among the targets c_attn,mlp.c_proj"]);
    run("--method ia3+lora --targets mlp.c_proj")
        .refused(&["--targets: ia3 scales the input of `transformer.h.0.mlp.c_proj` and lora adds"]);
    train(&sandbox, "run", "--method ia3");
    train(&sandbox, "lora", "--targets c_attn,mlp.c_proj");
    train(&sandbox, "above", "--targets c_attn");
    let generate = "generate --prompt row --max-new-tokens 2";
    sandbox
        .infer(&format!("{generate} --adapter run=0.5"))
        .refused(&["a vector that scales a module cannot be scaled"]);
    sandbox
        .infer(&format!("{generate} --adapter run --adapter run/adapter"))
        .refused(&["two of the adapters scale the same module"]);
    for both in ["--adapter run --adapter lora", "--adapter lora=0.5 --adapter run"] {
        sandbox
            .infer(&format!("{generate} {both}"))
            .refused(&["one of the adapters scales the input of a module (IA3)"]);
    }
    sandbox.infer(&format!("{generate} --adapter above=0.5 --adapter run")).succeeds();
}
