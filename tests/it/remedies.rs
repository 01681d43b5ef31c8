//! What an error proposes has to help: each remedy here is tried, and none is offered where it cannot.

use std::{fs, path::PathBuf};

use serde_json::{Value, json};

use crate::cli_support::{Finished, Sandbox, files_below};

/// A folder of the repository, as an option takes it.
fn repository(path: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path).display().to_string()
}

/// A run of two steps with its adapter.
fn trained() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 2").succeeds();
    sandbox
}

/// Changes a field of the run's adapter config.
fn configure(sandbox: &Sandbox, field: &str, value: Value) {
    let path = sandbox.path("run/adapter/adapter_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config[field] = value;
    fs::write(path, config.to_string()).unwrap();
}

/// Replaces bytes of the run's tensor file by as many others.
fn patch(sandbox: &Sandbox, old: &str, new: &str) {
    assert_eq!(old.len(), new.len());
    let path = sandbox.path("run/adapter/adapter_model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(old.len()).position(|window| window == old.as_bytes()).unwrap();
    bytes[at..at + new.len()].copy_from_slice(new.as_bytes());
    fs::write(path, bytes).unwrap();
}

/// Fails unless the program failed while running, with these parts in its message and not `wrong`.
#[track_caller]
fn failed(run: &Finished, parts: &[&str], wrong: &str) {
    let text = run.stderr();
    assert_eq!(run.code(), Some(1), "{text}");
    parts.iter().for_each(|part| assert!(text.contains(part), "no {part:?} in: {text}"));
    assert!(!text.contains(wrong), "{wrong:?} does not help: {text}");
}

/// Fails unless the program was refused, perhaps after hints, with a message that holds every one of `parts`.
#[track_caller]
fn refused_after_hints(run: Finished, parts: &[&str]) -> String {
    let text = run.stderr();
    assert_eq!(run.code(), Some(2), "{text}");
    parts.iter().for_each(|part| assert!(text.contains(part), "no {part:?} in: {text}"));
    text
}

#[test]
fn a_mismatch_is_allowed_only_where_that_is_all_it_takes() {
    let sandbox = trained();
    let eval = "eval --data data.jsonl --adapter run/adapter";
    // Another base of other shapes.
    let other = format!(
        "eval --data ids.jsonl --adapter run/adapter --base {}",
        repository("tests/golden/bases/tiny")
    );
    sandbox.write("ids.jsonl", "{\"input_ids\": [1, 2, 3], \"labels\": [1, 2, 3]}\n");
    let refused = sandbox.engraft(&other).refused(&["does not fit"]);
    assert!(!refused.stderr().contains("--allow-base-mismatch"), "{}", refused.stderr());
    sandbox.engraft(&format!("{other} --allow-base-mismatch")).refused(&["does not fit"]);
    // Other weights of the same shapes.
    patch(&sandbox, "engraft1:blake3:", "engraft1:blake4:");
    let refused =
        sandbox.engraft(eval).refused(&["made for a base with fingerprint", "--allow-base-mismatch"]);
    assert!(!refused.stderr().contains("allow the mismatch"), "{}", refused.stderr());
    let allowed = sandbox.engraft(&format!("{eval} --allow-base-mismatch")).succeeds();
    assert!(allowed.stderr().contains("made for other weights of embedded"), "{}", allowed.stderr());
    assert_eq!(allowed.stderr().matches("embedded").count(), 1, "{}", allowed.stderr());
}

#[test]
fn a_base_is_named_once() {
    let sandbox = trained();
    patch(&sandbox, "engraft.base_fingerprint", "another.base_fingerprint");
    let eval = sandbox.engraft("eval --data data.jsonl --adapter run/adapter").succeeds();
    assert!(eval.stderr().contains("(both name embedded)"), "{}", eval.stderr());
    configure(&sandbox, "base_model_name_or_path", json!("gpt2"));
    let eval = sandbox.engraft("eval --data data.jsonl --adapter run/adapter --base-dtype f16");
    assert!(!eval.stderr().contains("both name"), "{}", eval.stderr());
}

#[test]
fn of_many_tensors_three_are_named() {
    let sandbox = trained();
    configure(&sandbox, "r", json!(7));
    let refused = sandbox.engraft("eval --data data.jsonl --adapter run/adapter").refused(&["; and 9 more"]);
    assert_eq!(refused.stderr().matches("tensor ").count(), 3, "{}", refused.stderr());
    let folder = sandbox.path("base");
    fs::create_dir(&folder).unwrap();
    fs::copy(repository("examples/base/model.safetensors"), folder.join("model.safetensors")).unwrap();
    let config = fs::read_to_string(repository("examples/base/config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["n_layer"] = json!(config["n_layer"].as_u64().unwrap() + 3);
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let refused = sandbox.engraft("eval --data data.jsonl --base base").refused(&["; and 33 more"]);
    assert_eq!(refused.stderr().matches(" is missing").count(), 3, "{}", refused.stderr());
}

#[test]
fn a_plan_that_does_not_fit_names_what_is_fixed() {
    let sandbox = Sandbox::new();
    let plan = |line: &str| sandbox.engraft(&format!("plan --base gpt2 --batch 8 --head-rows auto {line}"));
    let pins = "--micro-batch 8 --recompute none";
    let small = plan(&format!("--memory 300MiB {pins}"));
    let text = refused_after_hints(
        small,
        &["with --micro-batch 8 and --recompute none fixed the smallest plan takes "],
    );
    let after = |start: &str| {
        let rest = text.split(start).nth(1).unwrap_or_else(|| panic!("no {start:?} in {text}"));
        rest.split_whitespace().next().unwrap().to_owned()
    };
    let fixed = after("fixed the smallest plan takes ");
    let released = after("without --micro-batch 8 and --recompute none the smallest plan takes ");
    // Both are what they say.
    plan(&format!("--memory {fixed} {pins}")).succeeds();
    plan(&format!("--memory {released}")).succeeds();
    let mib = |size: &str| size.trim_end_matches("MiB").parse::<u64>().unwrap();
    assert!(mib(&released) + 100 < mib(&fixed), "{released} {fixed}");
    let less = plan(&format!("--memory {}MiB {pins}", mib(&fixed) - 1));
    refused_after_hints(less, &["fixed the smallest plan takes"]);
    let least = plan(&format!("--memory {}MiB", mib(&released) - 1));
    assert!(!refused_after_hints(least, &["; the smallest plan takes"]).contains("fixed"));
    // What would not help is not named.
    let one = plan("--memory 200MiB --micro-batch 1 --recompute none");
    assert!(!refused_after_hints(one, &["with --recompute none fixed"]).contains("with --micro-batch 1"));
}

#[test]
fn numbers_that_are_not_finite_are_blamed_on_what_made_them() {
    let sandbox = Sandbox::new();
    for line in ["--lr 1e20 --steps 40", "--lr 1e30 --steps 1 --eval-data data.jsonl"] {
        let run = sandbox.engraft(&format!("{} --output lr {line}", crate::cli_support::SMALL));
        failed(&run, &["NaN", "; lower --lr"], "damaged");
        fs::remove_dir_all(sandbox.path("lr")).unwrap();
    }
    // An adapter that came of such a rate.
    sandbox.engraft(&format!("{} --output lr --lr 1e30 --steps 1", crate::cli_support::SMALL)).succeeds();
    let eval = sandbox.engraft("eval --data data.jsonl --adapter lr/adapter");
    failed(&eval, &["NaN", "train it again with a lower --lr"], "damaged");
    let alpha = sandbox.train("--steps 40 --alpha 1e30 --eval-data data.jsonl");
    failed(&alpha, &["the scale of the LoRA is 3.333e29; lower --alpha"], "--lr");
}

#[test]
fn a_scale_that_is_too_large_is_named() {
    let sandbox = trained();
    let generate = sandbox.infer("generate --prompt x --adapter run/adapter=1e30");
    failed(&generate, &["the scale of the adapter is", "smaller SCALE"], "damaged");
    sandbox.infer("generate --prompt x --adapter run/adapter=1 --max-new-tokens 2").succeeds();
    configure(&sandbox, "lora_alpha", json!(1e30));
    let eval = sandbox.engraft("eval --data data.jsonl --adapter run/adapter");
    failed(&eval, &["the scale of the adapter is", "lower lora_alpha"], "damaged");
    let further = sandbox.train("--steps 1 --eval-data data.jsonl --init-adapter run/adapter --output next");
    assert_ne!(further.code(), Some(0));
}

#[test]
fn what_nobody_means_is_refused() {
    let sandbox = trained();
    let base = repository("examples/base");
    for line in
        ["plan --base gpt2 --data nope.jsonl", "plan --base gpt2 --data data.jsonl --eval-data nope.jsonl"]
    {
        sandbox.engraft(line).refused(&["nope.jsonl", "check the path"]);
    }
    // Before a base is fetched or converted for it.
    sandbox.engraft("train --base no/such-base --data nope.jsonl").refused(&["nope.jsonl", "check the path"]);
    sandbox.engraft(&format!("train --base {base} --steps 1")).refused(&[
        "--base",
        "no --data",
        "name a file",
    ]);
    assert!(!sandbox.path("runs").exists());
    let eval = sandbox.engraft(&format!("eval --base {base} --json")).succeeds();
    assert!(eval.stderr().contains("hint: ") && eval.stderr().contains("--data"), "{}", eval.stderr());
    for line in [
        format!("eval --data data.jsonl --base {base} --revision main"),
        "eval --data data.jsonl --revision main".to_owned(),
        format!("plan --base {base} --revision main"),
    ] {
        sandbox.engraft(&line).refused(&["--revision"]);
    }
    sandbox
        .infer(&format!("generate --prompt x --base {base} --revision main"))
        .refused(&["--revision main"]);
}

#[test]
fn a_run_of_a_base_on_the_embedded_data_still_resumes() {
    let sandbox = Sandbox::new();
    let base = repository("examples/base");
    let line = "--no-pack --seq-len 24 --batch 4 --micro-batch 2 --steps 2 --threads 1 --json";
    // As a version that allowed it wrote it.
    sandbox
        .engraft(&format!("train --output run --base-dtype f16 --lr 0.01 --method lora {line}"))
        .succeeds();
    let config = sandbox.path("run/config.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("{text}base = {base:?}\n")).unwrap();
    sandbox.engraft("train --resume --output run --steps 3 --json --threads 1").succeeds();
}

#[test]
fn a_fraction_of_zero_holds_out_nothing() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("folder")).unwrap();
    for split in ["train", "valid"] {
        fs::copy(sandbox.path("data.jsonl"), sandbox.path("folder").join(format!("{split}.jsonl"))).unwrap();
    }
    let evals = |line: &str, output: &str| {
        let small = "train --data folder --no-pack --seq-len 24 --batch 4 --steps 1 --threads 1 --json";
        let run = sandbox.engraft(&format!("{small} --output {output} {line}")).succeeds();
        run.events_of("eval").len()
    };
    assert_eq!((evals("", "one"), evals("--eval-fraction 0", "two")), (2, 0));
    assert!(files_below(&sandbox.path("one/adapter")) == files_below(&sandbox.path("two/adapter")));
}
