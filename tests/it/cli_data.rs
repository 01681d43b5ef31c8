//! Data as users bring it: record forms, formats, compression, patterns, weights, the standard input.

use std::{fs, io::Write, path::Path, process::Stdio};

use serde_json::json;

use crate::{
    cli_support::{Finished, Sandbox, names},
    hub_server::{Hub, Server},
};

/// `engraft eval` of the base alone, as JSON, on files that are given as they would be typed.
fn eval(sandbox: &Sandbox, line: &str) -> Finished {
    sandbox.engraft(&format!("eval --json --threads 1 --no-pack --data {line}"))
}

/// Loss, tokens and rows, which tell two sets of rows apart.
#[track_caller]
fn result(finished: Finished) -> (f64, u64, u64) {
    let event = finished.succeeds().events().remove(0);
    (event["loss"].as_f64().unwrap(), event["tokens"].as_u64().unwrap(), event["rows"].as_u64().unwrap())
}

const PAIRS: &str = "{\"prompt\":\"name: a, \\\"b\\\"\",\"completion\":\" kind\"}\n\
                     {\"prompt\":\"two\\nlines\",\"completion\":\" of it\"}\n";

/// The text of a record that fills several rows.
fn long_text() -> String {
    (0..60).map(|index| format!("the {index} quiet places ")).collect()
}

#[test]
fn issue_19_2_a_long_text_record_loses_nothing() {
    let sandbox = Sandbox::new();
    sandbox.write("long.jsonl", format!("{}\n", json!({ "text": long_text() })));
    sandbox.write("long.txt", long_text());
    for pack in ["", "--pack"] {
        let of = |name: &str| eval(&sandbox, &format!("{name} --seq-len 24 {pack}"));
        let record = of("long.jsonl").succeeds();
        assert_eq!(record.stderr(), "");
        assert_eq!(record.events()[0]["cut_share"], 0.0);
        assert_eq!(result(record), result(of("long.txt")));
        assert_eq!(
            of("long.jsonl").events()[0]["tokens"],
            eval(&sandbox, "long.txt --seq-len 128").events()[0]["tokens"]
        );
    }
}

#[test]
fn issue_19_2_what_is_cut_is_said_as_a_share_of_tokens() {
    let sandbox = Sandbox::new();
    let long = json!({ "prompt": "say", "completion": long_text() });
    sandbox.write("cut.jsonl", format!("{PAIRS}{long}\n"));
    let found = eval(&sandbox, "cut.jsonl --seq-len 24").succeeds();
    let said = found.stderr();
    assert!(said.starts_with("hint: cut.jsonl: "), "{said}");
    assert!(
        said.contains("% of the tokens are lost (") && said.contains("1 record is longer than --seq-len 24"),
        "{said}"
    );
    let longest: usize =
        said.rsplit("--seq-len ").next().unwrap().split(' ').next().unwrap().parse().unwrap();
    let share = found.events()[0]["cut_share"].as_f64().unwrap();
    assert!(share > 0.5 && share < 1.0, "{share}");
    // What the hint advises is right, and enough.
    let whole = eval(&sandbox, &format!("cut.jsonl --seq-len {longest}"));
    let less = eval(&sandbox, &format!("cut.jsonl --seq-len {}", longest - 1));
    if longest <= 128 {
        assert_eq!(whole.succeeds().stderr(), "");
        assert!(less.succeeds().events()[0]["cut_share"].as_f64().unwrap() > 0.0);
    }
    let human = sandbox.engraft("eval --threads 1 --no-pack --data cut.jsonl --seq-len 24").succeeds();
    assert!(human.stdout().contains("not read where records were cut"), "{}", human.stdout());
    // In training the same hint, and a count in the line of the data.
    let trained =
        sandbox.engraft("train --data cut.jsonl --seq-len 24 --steps 1 --batch 2 --threads 1 --output run");
    let said = trained.succeeds().stderr();
    assert!(said.contains("1 cut to the row length (") && said.contains("hint: "), "{said}");
    assert!(said.contains("longer than --seq-len 24"), "{said}");
    // Below one percent there is no hint.
    let many = PAIRS.repeat(400);
    let slightly = json!({ "prompt": "say", "completion": " quiet".repeat(25) });
    sandbox.write("many.jsonl", format!("{many}{slightly}\n"));
    let found = eval(&sandbox, "many.jsonl --seq-len 24").succeeds();
    assert_eq!(found.stderr(), "");
    assert!(found.events()[0]["cut_share"].as_f64().unwrap() > 0.0);
}

#[test]
fn every_format_gives_the_same_rows() {
    let sandbox = Sandbox::new();
    sandbox.write("a.jsonl", PAIRS);
    let records: Vec<serde_json::Value> =
        PAIRS.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    sandbox.write("a.json", serde_json::to_string_pretty(&records).unwrap());
    sandbox.write("b.json", PAIRS);
    sandbox.write("a.csv", "prompt,completion\r\n\"name: a, \"\"b\"\"\", kind\r\n\"two\nlines\", of it\r\n");
    sandbox.write("a.tsv", "prompt\tcompletion\n\"name: a, \"\"b\"\"\"\t kind\n\"two\nlines\"\t of it\n");
    sandbox.write("a.dat", PAIRS);
    fs::create_dir(sandbox.path("folder")).unwrap();
    let (first, second) = PAIRS.split_at(PAIRS.find('\n').unwrap() + 1);
    sandbox.write("folder/train-00000-of-00002.jsonl", first);
    sandbox.write("folder/train-00001-of-00002.jsonl", second);
    let expected = result(eval(&sandbox, "a.jsonl"));
    for line in [
        "a.json",
        "b.json",
        "a.csv",
        "a.tsv",
        "a.dat --data-format jsonl",
        "folder --split train",
        "folder/*.jsonl",
        "folder/train-00000-of-00002.jsonl folder/train-00001-of-00002.jsonl",
        "folder/train-00000-of-00002.jsonl --data folder/train-00001-of-00002.jsonl",
    ] {
        assert_eq!(result(eval(&sandbox, line)), expected, "{line}");
    }
    let twice = result(eval(&sandbox, "a.jsonl:2"));
    assert_eq!((twice.1, twice.2), (2 * expected.1, 2 * expected.2));
    assert!((twice.0 - expected.0).abs() < 1e-6);
    assert_eq!(result(eval(&sandbox, "folder/*.jsonl:0.5 a.jsonl")), expected, "half of one row is none");
    let one_of_two = result(eval(&sandbox, "a.jsonl:0.5"));
    assert_eq!(one_of_two.2, 1);
}

#[test]
fn compressed_files_are_read_as_their_content() {
    let Some(_) = which("gzip").and(which("zstd")) else {
        eprintln!("skipped: this machine has no gzip or no zstd");
        return;
    };
    let sandbox = Sandbox::new();
    let many: String = (0..3000).map(|index| format!("{{\"text\":\"quiet place {index}\"}}\n")).collect();
    let plain = sandbox.write("a.jsonl", &many);
    for program in ["gzip", "zstd"] {
        let mut command = std::process::Command::new(program);
        assert!(command.args(["-q", "-k"]).arg(&plain).status().unwrap().success());
    }
    let expected = result(eval(&sandbox, "a.jsonl --seq-len 24 --pack"));
    for name in ["a.jsonl.gz", "a.jsonl.zst"] {
        assert_eq!(result(eval(&sandbox, &format!("{name} --seq-len 24 --pack"))), expected, "{name}");
        let bytes = fs::read(sandbox.path(name)).unwrap();
        let cut = sandbox.write(&format!("cut-{name}"), &bytes[..bytes.len() / 2]);
        eval(&sandbox, cut.to_str().unwrap()).refused(&[&format!("cut-{name}"), "cannot be read"]);
    }
}

fn which(program: &str) -> Option<()> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file()).then_some(())
}

/// Runs `engraft` with `input` on its standard input.
fn piped(sandbox: &Sandbox, line: &str, input: &[u8]) -> Finished {
    let mut command = sandbox.command(line);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A program that refuses its options reads nothing.
    let _ = child.stdin.take().unwrap().write_all(input);
    Finished(child.wait_with_output().unwrap())
}

#[test]
fn data_come_from_the_standard_input() {
    let sandbox = Sandbox::new();
    sandbox.write("a.jsonl", PAIRS);
    sandbox.write("a.txt", PAIRS);
    let line = "eval --json --threads 1 --no-pack --data -";
    assert_eq!(result(piped(&sandbox, line, PAIRS.as_bytes())), result(eval(&sandbox, "a.jsonl")));
    let as_text = result(piped(&sandbox, &format!("{line} --data-format txt"), PAIRS.as_bytes()));
    assert_eq!(as_text, result(eval(&sandbox, "a.txt")));
    let csv = piped(&sandbox, &format!("{line} --data-format csv"), b"text\nquiet places\n");
    assert_eq!(result(csv).2, 1);
    piped(&sandbox, line, b"").refused(&["standard input: is empty"]);
    piped(&sandbox, line, b"{\"text\":\"a\"}\n{\"txet\":\"a\"}\n")
        .refused(&["standard input:2: ", "\"txet\""]);
    // A run keeps the name `-`, and goes on when it gets the same data again.
    let train = "train --data - --steps 2 --batch 2 --threads 1 --json --output run --save-every 1";
    piped(&sandbox, train, PAIRS.as_bytes()).succeeds();
    let config = fs::read_to_string(sandbox.path("run/config.toml")).unwrap();
    assert!(config.contains("data = [\"-\"]"), "{config}");
    let again = "train --resume --output run --steps 3 --threads 1 --json";
    piped(&sandbox, again, PAIRS.as_bytes()).succeeds();
    piped(&sandbox, again, b"{\"text\":\"other data\"}").refused(&["the fingerprint of --data"]);
}

#[test]
fn forms_and_keys_of_other_tools_are_read() {
    let sandbox = Sandbox::new();
    let pair = |prompt: &str, completion: &str| {
        format!("{}\n", json!({ "prompt": prompt, "completion": completion }))
    };
    let expected = |name: &str, text: &str| {
        sandbox.write(name, text);
        result(eval(&sandbox, name))
    };
    let plain = expected("plain.jsonl", &pair("2 + 2 =", " 4"));
    for (name, text) in [
        ("response.jsonl", "{\"prompt\":\"2 + 2 =\",\"response\":\" 4\"}"),
        ("answer.jsonl", "{\"question\":\"2 + 2 =\",\"answer\":\" 4\"}"),
    ] {
        assert_eq!(expected(name, text), plain, "{name}");
    }
    let chat =
        expected("chat.jsonl", &pair("system:\nBrief.\n\nuser:\nHi\n\ntool:\n3\n\nassistant:\n", "Hello"));
    for (name, text) in [
        (
            "messages.jsonl",
            "{\"messages\":[{\"role\":\"system\",\"content\":\"Brief.\"},{\"role\":\"user\",\"content\":\
             [{\"type\":\"text\",\"text\":\"Hi\"}]},{\"role\":\"tool\",\"content\":\"3\"},\
             {\"role\":\"assistant\",\"content\":\"Hello\"}]}",
        ),
        (
            "sharegpt.json",
            "[{\"conversations\":[{\"from\":\"system\",\"value\":\"Brief.\"},{\"from\":\"human\",\"value\":\"Hi\"},\
             {\"from\":\"observation\",\"value\":\"3\"},{\"from\":\"gpt\",\"value\":\"Hello\"}]}]",
        ),
    ] {
        assert_eq!(expected(name, text), chat, "{name}");
    }
    sandbox.write(
        "alpaca.json",
        "[{\"instruction\":\"Add.\",\"input\":\"2 3\",\"output\":\"5\",\"text\":\"x\",\"id\":1}]",
    );
    let alpaca = eval(&sandbox, "alpaca.json").succeeds();
    assert_eq!(
        alpaca.stderr(),
        "hint: alpaca.json: keys that are not read: \"id\" in 1 record, \"text\" in 1 record\n"
    );
    let template = "Below is an instruction that describes a task, paired with an input that provides further context. \
                    Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### \
                    Input:\n2 3\n\n### Response:\n";
    assert_eq!(result(alpaca), expected("template.jsonl", &pair(template, "5")));
    sandbox.write("own.csv", "Frage,Antwort,Nr\n2 + 2 =, 4,1\n");
    eval(&sandbox, "own.csv")
        .refused(&["own.csv:2: has the columns \"Antwort\", \"Frage\", \"Nr\"", "--prompt-key"]);
    assert_eq!(result(eval(&sandbox, "own.csv --prompt-key Frage --completion-key Antwort")), plain);
    eval(&sandbox, "own.csv --prompt-key frage --completion-key Antwort")
        .refused(&["\"frage\"", "--prompt-key"]);
    assert_eq!(
        result(eval(&sandbox, "own.csv --text-key Frage")),
        expected("text.jsonl", "{\"text\":\"2 + 2 =\"}")
    );
}

#[test]
fn issue_19_6_a_key_that_comes_twice_is_refused() {
    let sandbox = Sandbox::new();
    sandbox.write("twice.jsonl", format!("{PAIRS}{{\"text\":\"a\",\"text\":\"b\"}}\n"));
    sandbox
        .engraft("train --data twice.jsonl --output run --steps 1")
        .refused(&["twice.jsonl:3: has the key \"text\" twice"]);
    assert!(!sandbox.path("run").exists());
}

#[test]
fn weights_repeat_training_rows_and_never_held_out_ones() {
    let sandbox = Sandbox::new();
    let numbers: String = (0..10).map(|index| format!("{{\"text\":\"number {index} of ten\"}}\n")).collect();
    sandbox.write("a.jsonl", &numbers);
    let rows = |line: &str| {
        let run = format!("run-{}", line.len());
        let said = sandbox
            .engraft(&format!("train --no-pack --steps 1 --batch 2 --threads 1 --output {run} --data {line}"))
            .succeeds()
            .stderr();
        let data = said.lines().find(|line| line.starts_with("data ")).unwrap().to_owned();
        let count = |what: &str| -> usize {
            let before = data.split(what).next().unwrap();
            before.rsplit([' ', ',']).find(|word| !word.is_empty()).unwrap().parse().unwrap()
        };
        (count(" rows,"), count(" held-out row"))
    };
    assert_eq!(rows("a.jsonl"), (10, 0));
    assert_eq!(rows("a.jsonl:3"), (30, 0));
    assert_eq!(rows("a.jsonl:3 --eval-fraction 0.2"), (24, 2));
    sandbox.write("b.jsonl:3", "");
    eval(&sandbox, "b.jsonl:3").refused(&[".jsonl:3 files are not read"]);
    eval(&sandbox, "a.jsonl:0").refused(&["a.jsonl:0", "give a weight above 0"]);
    assert!(Path::new(&sandbox.path("a.jsonl")).exists());
}

#[test]
fn files_of_a_data_set_on_the_hub_are_fetched_once() {
    let files = [("data/a.jsonl".to_owned(), PAIRS.as_bytes().to_vec())];
    let server = Server::start(Hub::new("datasets/owner/set", files));
    let sandbox = Sandbox::new();
    sandbox.write("a.jsonl", PAIRS);
    let eval_of = |data: &str| {
        let mut command = sandbox.command(&format!("eval --json --threads 1 --no-pack --data {data}"));
        command.env("HF_ENDPOINT", &server.endpoint).env_remove("HF_HUB_OFFLINE");
        Finished(command.output().unwrap())
    };
    let expected = result(eval(&sandbox, "a.jsonl"));
    assert_eq!(result(eval_of("hub:owner/set/data/a.jsonl")), expected);
    assert!(sandbox.path("hf/hub/datasets--owner--set/snapshots").is_dir());
    let twice = result(eval_of("hub:owner/set/data/a.jsonl:2"));
    assert_eq!(twice.2, 2 * expected.2);
    // Offline the cache is enough.
    assert_eq!(result(eval(&sandbox, "hub:owner/set/data/a.jsonl --offline")), expected);
    eval_of("hub:owner/set/b.jsonl").refused(&["owner/set: holds no b.jsonl", "name one of its files"]);
    eval_of("hub:owner/other/a.jsonl").refused(&["owner/other: the hub knows no data set of this name"]);
    eval_of("hub:owner/set").refused(&["hub:owner/set: names no file", "hub:owner/name/file"]);
    eval_of("hub:owner/set/../x.jsonl").refused(&["is no file"]);
    eval(&sandbox, "hub:owner/set/b.jsonl").refused(&["b.jsonl", "run once without --offline"]);
}

#[test]
fn a_second_run_reads_rows_from_the_cache() {
    let sandbox = Sandbox::new();
    let text: String = (0..9000).map(|index| format!("the {index} quiet places\n")).collect();
    sandbox.write("long.txt", &text);
    let tokens = sandbox.path("cache/tokens");
    let entries = || {
        if tokens.is_dir() { names(&tokens).iter().filter(|name| name.ends_with(".rows")).count() } else { 0 }
    };
    let plan = |extra: &str| {
        sandbox.engraft(&format!("plan --data {extra} --seq-len 128 --json --threads 1")).succeeds()
    };
    plan("long.txt --no-token-cache");
    assert_eq!(entries(), 0);
    plan("long.txt");
    assert_eq!(entries(), 1);
    plan("long.txt");
    assert_eq!(entries(), 1, "the same entry");
    // Changed files, of the same length too, get rows of their own.
    sandbox.write("long.txt", text.replace("quiet", "queit"));
    plan("long.txt");
    assert_eq!(entries(), 2);
}

/// A plan is made for the rows that the run would have: `--eval-max-rows` may leave the longest one out.
#[test]
fn a_plan_reads_the_rows_of_the_run() {
    let sandbox = Sandbox::new();
    sandbox.write("short.jsonl", "{\"text\":\"a row\"}\n".repeat(12));
    let long =
        format!("{}{{\"text\":\"{}\"}}\n", "{\"text\":\"a row\"}\n".repeat(5), "the quiet place ".repeat(20));
    sandbox.write("long.jsonl", &long);
    let peak = |command: &str, extra: &str| {
        let line = format!("{command} --data short.jsonl --no-pack --seq-len 96 --json --threads 1 {extra}");
        let plan = sandbox.engraft(&line).succeeds().events_of("plan").remove(0);
        plan["planned_counted_bytes"].as_u64().unwrap_or_else(|| plan["peak_bytes"].as_u64().unwrap())
    };
    let all = peak("plan", "--eval-data long.jsonl");
    let some = peak("plan", "--eval-data long.jsonl --eval-max-rows 2");
    assert!(some < all, "{some} {all}");
    assert_eq!(some, peak("plan", "--eval-fraction 0.2"));
    assert_eq!(all, peak("plan", "--data long.jsonl --eval-fraction 0"));
}

#[test]
fn data_are_looked_at() {
    let sandbox = Sandbox::new();
    let lines = "{\"prompt\":\"name:\",\"completion\":\" a\\u001b[2J\"}\n{\"prompt\":\"x\",\"completion\":\"\"}\n\
                 {\"prompt\":\"name:\",\"completion\":\" a\\u001b[2J\"}\n{\"text\":\"held out\",\"id\":4}\n";
    sandbox.write("train.jsonl", lines);
    sandbox.write("valid.jsonl", "{\"text\":\"held out\"}\n{\"text\":\"of nobody\"}\n");
    let found = sandbox.engraft("data train.jsonl --eval-data valid.jsonl --first 2").succeeds();
    let (out, hints) = (found.stdout(), found.stderr());
    for part in [
        "records  4 (3 of prompt, completion; 1 of text)",
        "train.jsonl:1\n  name:« a\\u{1b}[2J<|endoftext|>»\n",
        "train.jsonl:2\n  x«<|endoftext|>»\n",
        "  1 record the same as a record before; remove the copies (train.jsonl:3)",
        "  1 record with an empty completion or answer, which teaches to say nothing (train.jsonl:2)",
        "held-out data\nrecords  2 (2 of text)",
        "  1 record in the training data too, so the evaluation is too good; remove them from one of the two (valid.jsonl:1)",
    ] {
        assert!(out.contains(part), "no {part:?} in {out}");
    }
    assert_eq!(hints, "hint: train.jsonl: keys that are not read: \"id\" in 1 record\n");
    assert!(!out.contains('\u{1b}'), "nothing in data may reach the terminal as a command");
    let json = sandbox.engraft("data --json train.jsonl").succeeds().events().remove(0);
    assert_eq!(json["report"]["records"], 4);
    assert_eq!(json["forms"]["prompt, completion"], 3);
    assert_eq!(json["first"][0]["parts"][1]["supervised"], true);
    assert_eq!(json["findings"][0]["kind"], "duplicate");
    assert_eq!(
        json["lengths"]
            .as_array()
            .unwrap()
            .iter()
            .map(|range| range["records"].as_u64().unwrap())
            .sum::<u64>(),
        4
    );
    // Without a path, the embedded data; its held-out part has nothing of the training part.
    let embedded = sandbox.engraft("data --first 1").succeeds().stdout();
    assert!(embedded.contains("records  2000 (2000 of prompt, completion)"), "{embedded}");
    assert!(embedded.contains("held-out data\n") && !embedded.contains("too good"), "{embedded}");
    sandbox.engraft("data nowhere.jsonl").refused(&["nowhere.jsonl", "check the path"]);
}

/// A build without the feature names the one that reads it.
#[test]
fn parquet_is_a_feature_of_the_build() {
    let sandbox = Sandbox::new();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/parquet");
    for name in ["pairs_snappy.parquet", "pairs.jsonl"] {
        fs::copy(golden.join(name), sandbox.path(name)).unwrap();
    }
    let found = eval(&sandbox, "pairs_snappy.parquet");
    if cfg!(feature = "parquet") {
        assert_eq!(result(found), result(eval(&sandbox, "pairs.jsonl")));
    } else {
        found.refused(&["pairs_snappy.parquet: ", "cargo build --release --features parquet", ".jsonl"]);
    }
    sandbox.write("a.parquet.gz", "");
    eval(&sandbox, "a.parquet.gz")
        .refused(&["a.parquet.gz: a Parquet file is compressed inside", "unpack it"]);
    piped(&sandbox, "eval --data - --data-format parquet", b"").refused(&["--data -: ", "name the file"]);
}
