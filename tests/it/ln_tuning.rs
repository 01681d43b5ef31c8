//! LN tuning through the programs: training, resuming, generating, folders beside other methods, refusals.

use serde_json::Value;

use crate::cli_support::{Finished, Sandbox, evaluated, learned_and_resumed, losses, names};

/// A run that takes no time, of 20 steps.
const RUN: &str = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --micro-batch 2 --threads 1 --lr 0.02 \
                   --steps 20 --save-every 10 --json";

fn train(sandbox: &Sandbox, output: &str, more: &str) -> Finished {
    sandbox.engraft(&format!("{RUN} --output {output} {more}")).succeeds()
}

#[test]
fn norms_are_trained_resumed_and_used() {
    let sandbox = Sandbox::new();
    let run = train(&sandbox, "run", "--method ln_tuning");
    learned_and_resumed(&sandbox, &run);

    assert!(evaluated(&sandbox, Some("run")) < 0.8 * evaluated(&sandbox, None));
    let look = sandbox.engraft("inspect run/adapter --json").succeeds().events().remove(0);
    assert_eq!(look["adapters"][0]["kind"], "ln_tuning");
    assert_eq!(look["adapters"][0]["ln_tuning"]["norms"], serde_json::json!(["ln_1", "ln_2", "ln_f"]));
    let card = std::fs::read_to_string(sandbox.path("run/adapter/README.md")).unwrap();
    assert!(card.contains("# ln_tuning adapter") && card.contains("| norms | ln_1,ln_2,ln_f |"), "{card}");
}

#[test]
fn an_adapter_of_norms_is_trained_further() {
    let sandbox = Sandbox::new();
    let first = train(&sandbox, "run", "--method ln_tuning --norms ln_2,ln_f");
    let second = train(&sandbox, "again", "--init-adapter run/adapter");
    assert!(losses(&second)[0] < 0.8 * losses(&first)[0]);
    let config = |run: &str| -> Value {
        let file = sandbox.path(run).join("adapter/adapter_config.json");
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
    };
    assert_eq!(config("again"), config("run"));
    assert_eq!(config("again")["target_modules"], serde_json::json!(["ln_2", "ln_f"]));
    let refused = sandbox.engraft(&format!("{RUN} --output third --init-adapter run/adapter --norms ln_1"));
    refused.refused(&["--norms ln_1 (the adapter has ln_2,ln_f); leave these options out"]);
}

#[test]
fn beside_other_methods_norms_have_a_folder_of_their_own() {
    let sandbox = Sandbox::new();
    let alone = losses(&train(&sandbox, "lora", "--method lora"));
    for (method, more, folders) in [
        ("ln_tuning+lora", "", &["README.md", "ln_tuning", "lora"][..]),
        ("ln_tuning+prefix", "--prefix-len 3", &["README.md", "ln_tuning", "prefix"]),
        ("lora+ln_tuning+prefix", "--prefix-len 3", &["README.md", "ln_tuning", "lora", "prefix"]),
    ] {
        let both = losses(&train(&sandbox, method, &format!("--method {method} {more}")));
        assert_eq!(names(&sandbox.path(method).join("adapter")), folders);
        assert!(both[19] < 0.8 * both[0], "{method}: {both:?}");
        if method == "ln_tuning+lora" {
            // Norms begin as the base's.
            assert!((both[0] - alone[0]).abs() < 1e-6 && both[19] < alone[19], "{both:?} {alone:?}");
        }
        let again =
            losses(&train(&sandbox, &format!("again-{method}"), &format!("--init-adapter {method}/adapter")));
        assert!(again[0] < 0.8 * both[0], "{method}: {again:?}");
        assert!(evaluated(&sandbox, Some(method)) < 0.8 * evaluated(&sandbox, None));
        let card = std::fs::read_to_string(sandbox.path(method).join("adapter/README.md")).unwrap();
        let prefix_is_last = card.contains("\"prefix\").eval()") == method.contains("prefix");
        assert!(prefix_is_last && !card.contains("\"prefix\").merge_and_unload()"), "{card}");
    }
}

#[test]
fn what_norms_cannot_do_is_refused() {
    let sandbox = Sandbox::new();
    let run = |more: &str| sandbox.engraft(&format!("{RUN} --output run {more}"));
    run("--method ln_tuning --rank 3").refused(&["--rank: means nothing with --method ln_tuning"]);
    run("--norms ln_1").refused(&["--norms: means nothing with --method lora"]);
    run("--method ln_tuning --norms ln_3")
        .refused(&["--norms: `ln_3` matches no layer norm; choose among ln_1, ln_2"]);
    train(&sandbox, "run", "--method ln_tuning");
    let generate = "generate --prompt row --max-new-tokens 2";
    sandbox.infer(&format!("{generate} --adapter run=0.5")).refused(&["a layer norm cannot be scaled"]);
    let twice = sandbox.infer(&format!("{generate} --adapter run --adapter run/adapter"));
    twice.refused(&["two of the adapters bring the same layer norm"]);
}
