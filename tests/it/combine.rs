//! `engraft combine`, `diff` and `extract` through the program: adapters in, adapters that say the same out, refusals.

use std::{fs, path::Path};

use engraft_adapters::peft;
use serde_json::Value;

use crate::{
    cli_support::{Sandbox, names},
    setup::{Case, case, golden, lora, prefix},
};

/// Two LoRAs of the embedded base, in the folders `one` and `two`.
fn two_loras() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 20 --output one").succeeds();
    sandbox.train("--steps 20 --output two --seed 5 --targets c_attn,c_fc").succeeds();
    sandbox
}

/// Loss of the embedded base with adapters.
fn loss(sandbox: &Sandbox, adapter: &str) -> f64 {
    let line =
        format!("eval --data data.jsonl --no-pack --seq-len 24 --threads 1 --json --adapter {adapter}");
    sandbox.engraft(&line).succeeds().events()[0]["loss"].as_f64().unwrap()
}

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("adapter_config.json")).unwrap()).unwrap()
}

#[test]
fn adapters_are_combined_into_one() {
    let sandbox = two_loras();
    let combined = |method: &str, output: &str| {
        let line = format!("combine --adapter one=0.6 --adapter two=0.5 --method {method} --output {output}");
        sandbox.engraft(&line).succeeds()
    };
    let text = combined("cat", "cat").stdout();
    assert!(text.contains("combined one x 0.6, two x 0.5 by cat\nadapter  lora of rank 6: "), "{text}");
    assert_eq!(
        names(&sandbox.path("cat")),
        ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    );
    let found = config(&sandbox.path("cat"));
    assert_eq!(
        (&found["r"], &found["lora_alpha"], &found["base_model_name_or_path"]),
        (&6.into(), &6.into(), &"embedded".into())
    );
    let card = fs::read_to_string(sandbox.path("cat/README.md")).unwrap();
    assert!(card.contains("| combined of | one x 0.6, two x 0.5 |"), "{card}");
    // What `generate` sums, `cat` is; so is `svd` with all ranks.
    let generate = "generate --prompt row --max-new-tokens 12 --temperature 0 --threads 1";
    let summed =
        sandbox.infer(&format!("{generate} --adapter one=0.6 --adapter two=0.5")).succeeds().stdout();
    assert_eq!(sandbox.infer(&format!("{generate} --adapter cat")).succeeds().stdout(), summed);
    let text = combined("svd --rank 6", "svd").stdout();
    assert!(text.contains("rank     6 loses 0.00% of the norm"), "{text}");
    let (cat, svd) = (loss(&sandbox, "cat"), loss(&sandbox, "svd"));
    assert!(
        (cat - svd).abs() < 1e-4 * cat && (cat - loss(&sandbox, "one")).abs() > 1e-3 * cat,
        "{cat} {svd}"
    );
    // Every other method gives an adapter that can be used.
    for method in
        ["linear", "ties --density 0.5", "ties_svd --density 0.5", "dare_linear --density 0.7 --seed 3"]
    {
        let output = method.split(' ').next().unwrap();
        let line = format!("combine --adapter one --adapter two --method {method} --output {output} --json");
        let event = sandbox.engraft(&line).succeeds().events().remove(0);
        assert_eq!(
            (&event["rank"], event["lost"].is_null()),
            (&3.into(), !method.contains("svd")),
            "{method}"
        );
        assert!(loss(&sandbox, output).is_finite());
    }
    // A single one is scaled; the default is svd.
    sandbox.engraft("combine --adapter one=0.5 --output half").succeeds();
    let both = sandbox.engraft("combine --adapter half --adapter half --output both --json").succeeds();
    assert_eq!(both.events()[0]["method"], "svd");
    let (one, both) = (loss(&sandbox, "one"), loss(&sandbox, "both"));
    assert!((one - both).abs() < 1e-4 * one, "{one} {both}");
}

#[test]
fn what_cannot_be_combined_is_refused() {
    let sandbox = Sandbox::new();
    let tiny = golden("tiny");
    let put = |name: &str, Case { set, values, .. }: Case| {
        peft::save(&sandbox.path(name), &set, &values, None, &tiny.description()).unwrap();
    };
    put("lora", case("lora", &tiny, Some(lora("c_attn", 0.0)), None));
    put("prefix", case("prefix", &tiny, None, Some(prefix(3, None))));
    let mut wide = lora("c_attn", 0.0);
    wide.rank = 5;
    put("wide", case("wide", &tiny, Some(wide), None));
    sandbox.train("--steps 2").succeeds();
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bases/tiny");
    let refused = |adapters: &str, more: &str, parts: &[&str]| {
        let line = format!("combine --base {} {adapters} --output sum {more}", base.display());
        sandbox.engraft(&line).refused(parts);
        assert!(!sandbox.path("sum").exists());
    };
    let both = "--adapter lora --adapter wide";
    refused(
        both,
        "--method linear",
        &["the ranks of the adapters are 3 and 5, and linear needs equal ones; take cat"],
    );
    refused(
        "--adapter lora --adapter prefix",
        "",
        &["--adapter prefix: is prefix, and only LoRAs can be combined"],
    );
    refused("--adapter lora --adapter run", "", &["fingerprint"]);
    refused(both, "--method ties", &["--density: is missing; --method ties keeps this share"]);
    refused(both, "--method ties --density 1.5", &["--density 1.5: is no share above 0"]);
    refused(both, "--density 0.5", &["--density: means nothing with --method svd; leave it out"]);
    refused(both, "--method cat --rank 3", &["--rank: means nothing with --method cat"]);
    refused(both, "--method cat --seed 3", &["--seed: means nothing with --method cat"]);
    refused(both, "--majority-sign-method total", &["--majority-sign-method: means nothing"]);
    refused(
        both,
        "--method average",
        &["--method average: ", "give one of linear, cat, svd, ties, ties_svd"],
    );
    refused("--adapter lora", "--rank 2", &["--rank: a single adapter is scaled and keeps its rank"]);
    sandbox.engraft("combine --adapter run --output run").refused(&["--output run: is not empty"]);
}

#[test]
fn adapters_are_laid_side_by_side() {
    let sandbox = two_loras();
    let same = sandbox.engraft("diff one one/adapter --json").succeeds().events().remove(0);
    assert!(
        (same["cosine"].as_f64().unwrap() - 1.0).abs() < 1e-9 && same["sites"].as_array().unwrap().len() == 6
    );
    let two = sandbox.engraft("diff one two --json").succeeds().events().remove(0);
    let sites = two["sites"].as_array().unwrap();
    assert_eq!((sites.len(), &sites[1]["module"]), (12, &"transformer.h.0.mlp.c_fc".into()));
    assert!(
        sites[1]["cosine"].is_null()
            && sites[1]["a"].is_null()
            && sites[1]["b"]["norm"].as_f64().unwrap() > 0.0
    );
    let cosine = sites[0]["cosine"].as_f64().unwrap();
    assert!(cosine.abs() < 0.999 && sites[0]["a"]["rank"] == 3, "{sites:?}");
    let table = sandbox.engraft("diff one two").succeeds().stdout();
    let first: Vec<&str> = table.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(first, ["module", "cosine", "norm", "A", "norm", "B", "ranks", "A", "ranks", "B"]);
    assert!(table.lines().count() == 15 && table.lines().nth(13).unwrap().starts_with("all "), "{table}");
    sandbox.train("--steps 2 --output norms --method ln_tuning").refused(&["--rank"]);
    sandbox.engraft("diff one none").refused(&["none"]);
}

#[test]
fn a_lora_comes_back_out_of_the_model_that_it_was_merged_into() {
    let sandbox = two_loras();
    sandbox.engraft("merge --adapter one --output merged --dtype f32 --threads 1").succeeds();
    let found =
        sandbox.engraft("extract --tuned merged --rank 3 --targets c_attn --output again --json").succeeds();
    let event = found.events().remove(0);
    assert!(
        event["lost"].as_f64().unwrap() < 1e-3 && event["modules"].as_array().unwrap().len() == 6,
        "{event}"
    );
    let alike = sandbox.engraft("diff one again --json").succeeds().events()[0]["cosine"].as_f64().unwrap();
    assert!(alike > 0.99999, "{alike}");
    let (one, again) = (loss(&sandbox, "one"), loss(&sandbox, "again"));
    assert!((one - again).abs() < 1e-4 * one, "{one} {again}");
    // Fewer ranks lose more, and modules that changed beside the chosen ones are named.
    let text = sandbox.engraft("extract --tuned merged --rank 1 --targets c_fc --output none").succeeds();
    assert!(
        text.stderr().contains("changed more than these modules")
            && text.stderr().contains("h.0.attn.c_attn.weight")
    );
    let text =
        sandbox.engraft("extract --base embedded --tuned merged --rank 1 --output less").succeeds().stdout();
    assert!(text.contains("all modules: rank 1 loses ") && !text.contains("loses 0.00%"), "{text}");
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bases/tiny");
    let other = sandbox.engraft(&format!("extract --tuned {} --output other", tiny.display()));
    other.refused(&["is of another size than the base embedded"]);
    assert!(!sandbox.path("other").exists());
}
