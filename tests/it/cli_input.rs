//! Bad input ends with exit code 2, a sentence that names it, and nothing on the disk.

use std::fs;

use crate::cli_support::{SMALL, Sandbox, names};

/// Refused before the run begins, with `parts` in the message and without a run folder.
#[track_caller]
fn refused(line: &str, parts: &[&str]) {
    let sandbox = Sandbox::new();
    sandbox.train(line).refused(parts);
    assert!(!sandbox.path("run").exists(), "{line}: {:?}", names(&sandbox.path("run")));
}

#[test]
fn values_without_sense() {
    for (line, parts) in [
        ("--lr nan", ["--lr", "NaN"]),
        ("--lr -1", ["--lr", "-1"]),
        ("--lr inf", ["--lr", "inf"]),
        ("--alpha nan", ["--alpha", "NaN"]),
        ("--clip -1", ["--clip", "-1"]),
        ("--weight-decay nan", ["--weight-decay", "NaN"]),
        ("--label-smoothing 2", ["--label-smoothing", "2"]),
        ("--lora-dropout 1", ["--lora-dropout", "1"]),
        ("--warmup 1.5", ["--warmup", "1.5"]),
        ("--epochs nan", ["--epochs", "NaN"]),
        ("--epochs 1e30", ["--epochs 1000000000000000000000000000000", "1000000"]),
        ("--eval-fraction -0.1", ["--eval-fraction", "-0.1"]),
        ("--rank 0", ["--rank", "0"]),
        ("--rank -3", ["--rank", "-3"]),
        ("--batch 0", ["--batch", "0"]),
        ("--steps 0", ["--steps", "0"]),
        ("--threads 0", ["--threads", "0"]),
        ("--micro-batch 3", ["--micro-batch 3", "--batch 4"]),
        ("--recompute every:0", ["--recompute", "every:0"]),
        ("--seed -1", ["--seed", "-1"]),
        ("--seed 18446744073709551615", ["--seed 18446744073709551615", "or less"]),
    ] {
        refused(line, &parts);
    }
}

#[test]
fn options_that_exclude_each_other() {
    refused("--steps 3 --epochs 1", &["--steps 3", "--epochs"]);
    refused("--eval-data data.jsonl --eval-fraction 0.5", &["--eval-data", "--eval-fraction"]);
    refused("--prefix-len 3", &["--prefix-len", "--method lora"]);
    refused("--method lora+prefix --prefix-init zero --prefix-text x", &["--prefix-text", "--prefix-init"]);
    refused("--revision main", &["--revision", "--base"]);
    refused("--revision main --base .", &["--revision main", "--base", "is a folder"]);
}

#[test]
fn unknown_options_and_values() {
    for option in ["--rnak 3", "--sample-evry 3"] {
        refused(option, &["there is no such option", option.split(' ').next().unwrap()]);
    }
    for option in [
        "--optimizer lion",
        "--precision f8",
        "--device tpu",
        "--recompute some",
        "--micro-batch few",
        "--memory 4potatoes",
        "--memory 0",
        "--stream-base maybe",
    ] {
        let (name, value) = option.split_once(' ').unwrap();
        refused(option, &["invalid value", name, value]);
    }
    refused("--offload-optimizer=perhaps", &["invalid value", "--offload-optimizer", "perhaps"]);
    refused("--precision f16 --device cpu", &["--precision f16", "bf16", "--device cuda"]);
    refused("--device cuda", &["--device cuda", "--device cpu"]);
    let sandbox = Sandbox::new();
    for option in ["--num-beams 2", "--length-penalty 1", "--no-repeat-ngram-size 2"] {
        sandbox.infer(&format!("generate --prompt x {option}")).refused(&["there is no such option"]);
    }
    sandbox.engraft("quantize").refused(&["quantize: there is no such command"]);
}

#[test]
fn files_that_are_missing_empty_or_something_else() {
    let sandbox = Sandbox::new();
    sandbox.write("empty.txt", "");
    sandbox.write("empty.jsonl", "");
    sandbox.write("binary.txt", [b'a', 0xff, 0xfe]);
    sandbox.write("data.xlsx", "a,b\n");
    sandbox.write("broken.jsonl", "{\"text\": \"a\"}\n{\"text\": \n");
    sandbox.write("wrong.jsonl", "{\"txet\": \"a\"}\n");
    fs::create_dir(sandbox.path("folder")).unwrap();
    let train = |data: &str| sandbox.engraft(&format!("train --json --output run --steps 1 --data {data}"));
    train("missing.txt").refused(&["missing.txt", "check the path"]);
    train("empty.txt").refused(&["empty.txt"]);
    train("empty.jsonl").refused(&["empty.jsonl"]);
    train("binary.txt").refused(&["binary.txt", "UTF-8"]);
    train("data.xlsx").refused(&["data.xlsx", ".xlsx files are not read"]);
    train("broken.jsonl").refused(&["broken.jsonl", "2"]);
    train("wrong.jsonl").refused(&["wrong.jsonl", "1"]);
    train("folder").refused(&["folder", "train.txt"]);
    assert!(!sandbox.path("run").exists());
}

#[test]
fn what_does_not_fit_the_base() {
    refused("--seq-len 100000", &["--seq-len 100000", "positions"]);
    refused("--method lora+prefix --prefix-len 100000", &["prefix", "100000"]);
    refused("--targets c_attn,c_nothing", &["c_nothing", "attn.c_attn"]);
    refused("--targets /nothing/", &["nothing"]);
    refused("--layers 999", &["layers", "999"]);
    refused("--rank-pattern nowhere=2", &["nowhere"]);
}

#[test]
fn bases_and_adapters_that_are_none() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("folder")).unwrap();
    sandbox.engraft("train --base folder --data data.jsonl --output run").refused(&["folder", "config.json"]);
    sandbox.engraft("train --base no/such-base --data data.jsonl --output run").refused(&["no/such-base"]);
    sandbox.engraft("train --init-adapter folder --output run").refused(&["folder", "adapter_config.json"]);
    sandbox.engraft("eval --adapter folder").refused(&["folder", "adapter_config.json"]);
    sandbox.engraft("inspect folder").refused(&["folder", "no adapter, base or run"]);
    sandbox.engraft("inspect missing").refused(&["missing", "check the path"]);
    assert!(!sandbox.path("run").exists());
}

#[test]
fn an_adapter_to_start_from_rules() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 2").succeeds();
    let further =
        "train --data data.jsonl --no-pack --seq-len 24 --steps 1 --json --init-adapter run/adapter";
    sandbox
        .engraft(&format!("{further} --output next --rank 4 --method prefix"))
        .refused(&["--method prefix", "--rank"]);
    sandbox.engraft(&format!("{further} --output next --rank 4")).refused(&["--rank 4", "the adapter has 3"]);
    sandbox.engraft(&format!("{further} --output next --rank 3")).succeeds();
}

#[test]
fn output_folders_that_are_taken() {
    let sandbox = Sandbox::new();
    fs::create_dir(sandbox.path("run")).unwrap();
    sandbox.write("run/notes.md", "mine");
    sandbox.train("--steps 1").refused(&["--output run", "not empty", "notes.md", "choose another folder"]);
    assert_eq!(names(&sandbox.path("run")), ["notes.md"]);
    sandbox.engraft(&format!("{SMALL} --steps 1 --output data.jsonl")).refused(&["data.jsonl", "is a file"]);
    sandbox.engraft(&format!("{SMALL} --steps 1 --resume")).refused(&["--resume", "--output"]);
}

#[test]
fn prompts_without_sense() {
    let sandbox = Sandbox::new();
    sandbox.write("empty.txt", "");
    sandbox.write("binary.txt", [0xff]);
    for (line, parts) in [
        ("--prompt x --temperature nan", ["--temperature", "NaN"]),
        ("--prompt x --temperature -1", ["--temperature", "-1"]),
        ("--prompt x --top-p 0", ["--top-p", "0"]),
        ("--prompt x --repetition-penalty 0", ["--repetition-penalty", "0"]),
        ("--prompt x --max-new-tokens 0", ["--max-new-tokens", "0"]),
        ("--prompt x --num-samples 0", ["--num-samples", "0"]),
        ("--prompt x --min-new-tokens 99", ["--min-new-tokens", "99"]),
        ("--prompt x --input-ids 1", ["--prompt", "--input-ids"]),
        ("--input-ids 1,x", ["--input-ids", "1,x"]),
        ("--input-ids 99999999", ["--input-ids", "99999999"]),
        ("--prompt-file empty.txt", ["empty.txt", "no prompt"]),
        ("--prompt-file binary.txt", ["binary.txt", "UTF-8"]),
        ("--prompt-file missing.txt", ["missing.txt", "check the path"]),
        ("", ["standard input", "no prompt"]),
        ("--prompt x --adapter missing", ["missing", "error"]),
    ] {
        sandbox.infer(&format!("generate {line}")).refused(&parts);
    }
}
