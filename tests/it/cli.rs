//! Output and files of the programs when all goes well.

use std::{
    io::{BufRead, BufReader},
    process::Stdio,
};

use crate::cli_support::{Sandbox, names};

#[test]
fn help_and_version_are_no_errors() {
    let sandbox = Sandbox::new();
    for line in ["--help", "--version", "train --help", "eval --help", "inspect --help"] {
        assert!(!sandbox.engraft(line).succeeds().stdout().is_empty(), "{line}");
    }
    assert!(sandbox.infer("generate --help").succeeds().stdout().contains("--repetition-penalty"));
    let nothing = sandbox.engraft("");
    assert_eq!(nothing.code(), Some(2));
    assert!(nothing.stderr().contains("train"), "{}", nothing.stderr());
}

#[test]
fn training_tells_its_steps_as_json() {
    let sandbox = Sandbox::new();
    let run = sandbox.train("--steps 4 --eval-fraction 0.3 --eval-every 2").succeeds();
    assert_eq!(run.stderr(), "", "a note for scripts only when something is strange");
    let steps = run.events_of("step");
    assert_eq!(steps.iter().map(|step| step["step"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4]);
    for step in &steps {
        for name in ["loss", "lr", "grad_norm", "tokens", "tokens_per_s"] {
            assert!(step[name].as_f64().is_some(), "{name} in {step}");
        }
    }
    let evals = run.events_of("eval");
    assert_eq!(evals.iter().map(|eval| eval["step"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 2, 4]);
    for eval in &evals {
        let loss = eval["loss"].as_f64().unwrap();
        assert!((eval["perplexity"].as_f64().unwrap() / loss.exp() - 1.0).abs() < 1e-9, "{eval}");
        assert_eq!(eval["tokens"], evals[0]["tokens"]);
    }
    let events = run.events();
    let done = events.last().unwrap();
    assert_eq!((done["event"].as_str(), done["step"].as_u64()), (Some("done"), Some(4)));
    assert!(done["peak_bytes"].as_u64().unwrap() > 0 && done["tokens_per_s"].as_f64().unwrap() > 0.0);
    assert!(sandbox.path(done["adapter"].as_str().unwrap()).join("adapter_config.json").is_file());
    assert_eq!(
        names(&sandbox.path("run")),
        ["adapter", "config.toml", "events", "lock", "metrics.jsonl", "report.html", "saves"]
    );
    assert_eq!(names(&sandbox.path("run/saves")), ["step-00000004.safetensors"]);
}

#[test]
fn training_tells_people_what_to_do_next() {
    let sandbox = Sandbox::new();
    let run = sandbox.train("--json=false --steps 2 --log-every 1 --eval-data data.jsonl").succeeds();
    let (stdout, stderr) = (run.stdout(), run.stderr());
    assert!(
        stdout.contains("step 0: evaluation loss") && stdout.contains("step 2: evaluation loss"),
        "{stdout}"
    );
    assert!(stdout.contains("perplexity"), "{stdout}");
    assert!(stdout.contains("engraft-infer generate --adapter run/adapter"), "{stdout}");
    assert!(stderr.contains("step 1/2") && stderr.contains("step 2/2"), "{stderr}");
    assert!(stderr.contains("attn.c_attn"), "{stderr}");
}

#[test]
fn an_evaluation_agrees_with_the_run() {
    let sandbox = Sandbox::new();
    let run = sandbox.train("--steps 3 --eval-data data.jsonl").succeeds();
    let eval = "eval --data data.jsonl --no-pack --seq-len 24 --batch 2 --json";
    let close = |found: &serde_json::Value, event: &serde_json::Value| {
        let (found_loss, loss) = (found["loss"].as_f64().unwrap(), event["loss"].as_f64().unwrap());
        assert!((found_loss - loss).abs() < 1e-5, "{found} {event}");
        assert_eq!(found["tokens"], event["tokens"]);
        assert_eq!(found["rows"], 12);
    };
    let evals = run.events_of("eval");
    let alone = sandbox.engraft(eval).succeeds();
    close(&alone.events()[0], &evals[0]);
    let adapted = sandbox.engraft(&format!("{eval} --adapter run/adapter")).succeeds();
    close(&adapted.events()[0], &evals[1]);
}

#[test]
fn inspecting_says_what_a_folder_is() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 2").succeeds();
    let adapter = sandbox.engraft("inspect run/adapter --json").succeeds().events();
    assert_eq!(
        (adapter[0]["kind"].as_str(), adapter[0]["adapters"][0]["kind"].as_str()),
        (Some("adapter"), Some("lora"))
    );
    assert_eq!(adapter[0]["adapters"][0]["lora"]["rank"], 3);
    let run = sandbox.engraft("inspect run --json").succeeds().events();
    assert_eq!((run[0]["kind"].as_str(), run[0]["save"]["step"].as_u64()), (Some("run"), Some(2)));
    let people = sandbox.engraft("inspect run/adapter").succeeds().stdout();
    assert!(people.contains("kind: adapter") && people.contains("lora_A"), "{people}");
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start("--steps 100000");
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with('{'), "{line}");
    // The reader is gone: the next line cannot be written.
    assert_eq!(child.wait().unwrap().code(), Some(0));

    let mut command = sandbox.command("train --help");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn the_number_of_threads_changes_no_byte() {
    let sandbox = Sandbox::new();
    let bytes = |output: &str, threads: &str| {
        let line = format!("{} --output {output} --steps 3 --threads {threads}", crate::cli_support::SMALL);
        sandbox.engraft(&line).succeeds();
        std::fs::read(sandbox.path(output).join("adapter/adapter_model.safetensors")).unwrap()
    };
    assert!(bytes("one", "1") == bytes("three", "3"));
}

#[test]
fn runs_get_names_of_their_own() {
    let sandbox = Sandbox::new();
    for expected in ["runs/embedded-lora", "runs/embedded-lora-2"] {
        let run = sandbox.engraft(&format!("{} --steps 1", crate::cli_support::SMALL)).succeeds();
        assert_eq!(run.events_of("done")[0]["adapter"], format!("{expected}/adapter"));
    }
}
