//! What happens along a run: samples, the best evaluation, early stopping, going back to a save, divergence.

use std::{fs, path::PathBuf, process::Command};

use crate::cli_support::{Finished, Sandbox, counts_what_was_planned, files_below, names, planned_for};

/// The files of an adapter but its card, which tells the run that it is from.
fn adapter(folder: PathBuf) -> Vec<(PathBuf, Vec<u8>)> {
    let files = files_below(&folder).into_iter();
    let files: Vec<_> = files.filter(|(path, _)| !path.ends_with("README.md")).collect();
    assert_eq!(files.len(), 2, "{}", folder.display());
    files
}

/// The events of a kind without what two runs cannot have in common.
fn without_time(run: &Finished, kind: &str) -> Vec<Vec<serde_json::Value>> {
    let keys = ["step", "loss", "best", "prompt", "text"];
    run.events_of(kind).iter().map(|event| keys.map(|key| event[key].clone()).to_vec()).collect()
}

/// Steps at which events of a kind happened.
fn steps_of(run: &Finished, kind: &str) -> Vec<u64> {
    run.events_of(kind).iter().map(|event| event["step"].as_u64().unwrap()).collect()
}

const TRACKED: &str = "--steps 30 --save-every 4 --keep 9 --eval-every 3 --eval-fraction 0.3 --save-best";

#[test]
fn samples_are_made_before_along_and_after_training() {
    let sandbox = Sandbox::new();
    let line = |output: &str, more: &str| {
        let small = crate::cli_support::SMALL;
        let mut command =
            sandbox.command(&format!("{small} --output {output} --steps 5 --sample-every 2 {more}"));
        command.args(["--sample-prompt", "row 3:", "--sample-prompt", "name: Quiet Meadow"]);
        Finished(command.output().unwrap()).succeeds()
    };
    let run = line("run", "");
    assert_eq!(steps_of(&run, "sample"), [0, 0, 2, 2, 4, 4, 5, 5]);
    let samples = run.events_of("sample");
    assert_eq!(
        (&samples[0]["prompt"], &samples[1]["prompt"]),
        (&"row 3:".into(), &"name: Quiet Meadow".into())
    );
    // The last ones are what the programs make of the adapter, the first what the base says alone.
    let text = |adapter: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_engraft-infer"));
        command
            .args(["generate", "--prompt", "row 3:", "--temperature", "0", "--max-new-tokens", "48"])
            .args(adapter);
        let done = command.current_dir(sandbox.path(".")).env("HOME", sandbox.path("home")).output().unwrap();
        String::from_utf8(done.stdout).unwrap().trim_end_matches('\n').to_owned()
    };
    assert_eq!(samples[0]["text"].as_str().unwrap(), text(&[]));
    assert_eq!(samples[6]["text"].as_str().unwrap(), text(&["--adapter", "run/adapter"]));
    assert_ne!(samples[0]["text"], samples[6]["text"]);
    // Samples change nothing, and a streamed base makes the same ones.
    sandbox.train("--output plain --steps 5").succeeds();
    assert!(adapter(sandbox.path("run/adapter")) == adapter(sandbox.path("plain/adapter")));
    assert_eq!(without_time(&line("streamed", "--stream-base on"), "sample"), without_time(&run, "sample"));
    for more in
        ["--method lora+prefix --prefix-len 3", "--method prefix --prefix-len 3 --prefix-projection 8"]
    {
        let line = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --steps 1 --threads 1 --json";
        let run = sandbox.engraft(&format!("{line} {more} --sample-every 9")).succeeds();
        assert_eq!(steps_of(&run, "sample"), [0, 1]);
    }
}

#[test]
fn without_a_prompt_samples_continue_a_held_out_row() {
    let sandbox = Sandbox::new();
    let run = sandbox.train("--steps 2 --sample-every 9 --eval-data data.jsonl").succeeds();
    assert_eq!(run.events_of("sample")[0]["prompt"], "row 0:");
    sandbox.train("--output x --sample-prompt hello").refused(&["--sample-prompt", "--sample-every"]);
    let long = "hello".repeat(200);
    sandbox.train(&format!("--output x --sample-every 2 --sample-prompt {long}")).refused(&[
        "--sample-prompt",
        "leave no position",
        "shorter",
    ]);
    assert!(!sandbox.path("x").exists());
}

#[test]
fn the_decoder_of_the_samples_is_planned() {
    let sandbox = Sandbox::new();
    let plan = |more: &str| {
        let line =
            format!("plan --base gpt2 --batch 4 --seq-len 64 --micro-batch 4 --device cpu --json {more}");
        sandbox.engraft(&line).succeeds().events_of("plan").remove(0)
    };
    assert_eq!(planned_for(&plan(""), "sampling"), 0);
    let with = plan("--sample-every 10 --sample-prompt hello");
    // Keys and values of 5 + 48 tokens in 12 layers, at least.
    assert!(planned_for(&with, "sampling") >= 2 * 12 * 768 * 4 * 53, "{}", planned_for(&with, "sampling"));
    let at = |phase: &str| with["moments"][phase].as_u64().unwrap();
    assert!(at("sampling") > at("loading"));
    counts_what_was_planned(&sandbox.train("--steps 3 --sample-every 1").succeeds());
}

#[test]
fn the_best_evaluation_is_kept() {
    let sandbox = Sandbox::new();
    let run = sandbox.train(&format!("{TRACKED} --lr 0.05 --schedule constant")).succeeds();
    let evals = run.events_of("eval");
    assert_eq!(steps_of(&run, "eval"), [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30]);
    let loss = |event: &serde_json::Value| event["loss"].as_f64().unwrap();
    let best = evals[1..].iter().min_by(|a, b| loss(a).total_cmp(&loss(b))).unwrap();
    let last_best = evals.iter().rfind(|event| event["best"] == true).unwrap();
    assert_eq!((evals[0]["best"].clone(), last_best), (false.into(), best));
    assert_ne!(best["step"], 30, "the last step is the best, this test shows nothing");
    // It is the adapter of that step.
    let until = best["step"].as_u64().unwrap();
    let short = format!("--output short --lr 0.05 --schedule constant --eval-fraction 0.3 --steps {until}");
    sandbox.train(&short).succeeds();
    assert!(adapter(sandbox.path("run/best")) == adapter(sandbox.path("short/adapter")));
    assert!(adapter(sandbox.path("run/best")) != adapter(sandbox.path("run/adapter")));
    assert!(
        run.stderr().contains(&format!("after step {until}")) && run.stderr().contains("run/best"),
        "{}",
        run.stderr()
    );
}

#[test]
fn without_patience_left_the_run_ends() {
    let sandbox = Sandbox::new();
    let line = format!("{TRACKED} --lr 0.05 --schedule constant --patience 2");
    let run = sandbox.train(&line).succeeds();
    let evals = run.events_of("eval");
    let done = run.events_of("done")[0]["step"].as_u64().unwrap();
    assert!(done < 30 && evals.len() >= 4, "{done}");
    let best: Vec<bool> = evals.iter().map(|event| event["best"] == true).collect();
    assert_eq!(best[best.len() - 3..], [true, false, false]);
    assert!(
        run.stderr().contains(&format!("stopped after step {done} of 30: 2 evaluations")),
        "{}",
        run.stderr()
    );
    assert!(names(&sandbox.path("run/saves")).contains(&format!("step-{done:08}.safetensors")));
    let state = sandbox.engraft("inspect run").succeeds().stdout();
    assert!(state.starts_with(&format!("step {done} of 30, stopped early, loss ")), "{state}");
    // It has ended; more patience goes on.
    let again = sandbox.engraft("train --resume --output run --json").succeeds();
    assert_eq!((again.events_of("step").len(), again.events_of("eval").len()), (0, 0));
    assert!(again.stderr().contains("--patience"), "{}", again.stderr());
    let more = sandbox.engraft("train --resume --output run --json --patience 100").succeeds();
    assert_eq!(more.events_of("done")[0]["step"], 30);
}

/// However often a run is interrupted, it has the same best adapter and ends at the same step.
#[test]
fn an_interrupted_run_has_the_best_of_one_that_never_was() {
    let line = format!("{TRACKED} --lr 0.05 --schedule constant --patience 2");
    let whole = Sandbox::new();
    let evals = without_time(&whole.train(&line).succeeds(), "eval");
    let sandbox = Sandbox::new();
    let mut kills = 0;
    let saves = || std::fs::read_dir(sandbox.path("run/saves")).map_or(0, Iterator::count);
    for attempt in 0..4 {
        let before = saves();
        let mut child =
            sandbox.start(&line.replace("--keep 9", if attempt > 0 { "--resume" } else { "--keep 9" }));
        // Until it has saved once more, or has ended.
        while saves() == before && child.try_wait().unwrap().is_none() {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        child.kill().unwrap();
        kills += usize::from(child.wait().unwrap().code().is_none());
    }
    assert!(kills > 0, "no run was ever killed");
    let last = sandbox.train(&format!("{line} --resume")).succeeds();
    for folder in ["adapter", "best"] {
        let files = |sandbox: &Sandbox| adapter(sandbox.path("run").join(folder));
        assert!(files(&sandbox) == files(&whole), "{folder}");
    }
    let found = without_time(&last, "eval");
    assert!(evals.ends_with(&found), "{evals:?} {found:?}");
}

#[test]
fn what_compares_evaluations_needs_some() {
    let sandbox = Sandbox::new();
    for option in ["--save-best", "--patience 3"] {
        let name = option.split(' ').next().unwrap();
        sandbox.train(&format!("{option} --eval-fraction 0.3")).refused(&[name, "--eval-every"]);
        sandbox.train(&format!("{option} --eval-every 2")).refused(&[name, "held-out", "--eval-fraction"]);
    }
    sandbox.train("--patience 0").refused(&["--patience 0", "from 1"]);
    assert!(!sandbox.path("run").exists());
}

#[test]
fn a_run_goes_on_from_a_chosen_save() {
    let sandbox = Sandbox::new();
    let line = "--steps 12 --save-every 3 --keep 9 --eval-fraction 0.3 --lora-dropout 0.1";
    sandbox.train(line).succeeds();
    let expected = adapter(sandbox.path("run/adapter"));
    sandbox
        .engraft("train --output run --resume-from 7")
        .refused(&["--resume-from 7", "steps 3, 6, 9 and 12"]);
    assert!(adapter(sandbox.path("run/adapter")) == expected);
    // Killed before its first save, the run must not go on from a save of the steps that were given up.
    let mut child =
        sandbox.command("train --output run --resume-from 6 --save-every 0 --steps 100000 --json");
    let mut child = child.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    let mut reader = std::io::BufReader::new(child.stdout.take().unwrap());
    while !line.contains("\"step\"") || !line.contains("\"event\":\"step\"") {
        line.clear();
        std::io::BufRead::read_line(&mut reader, &mut line).unwrap();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(names(&sandbox.path("run/saves")), ["step-00000003.safetensors", "step-00000006.safetensors"]);
    let rest = sandbox.engraft("train --resume --output run --steps 12 --save-every 3 --json").succeeds();
    assert_eq!(steps_of(&rest, "step"), [7, 8, 9, 10, 11, 12]);
    assert!(adapter(sandbox.path("run/adapter")) == expected);
}

#[test]
fn any_save_of_a_run_is_an_adapter() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 6 --save-every 3 --keep 9 --eval-fraction 0.3 --schedule constant").succeeds();
    sandbox.train("--output short --steps 3 --eval-fraction 0.3 --schedule constant").succeeds();
    let eval = |adapter: &str| {
        let line =
            format!("eval --data data.jsonl --no-pack --seq-len 24 --threads 1 --json --adapter {adapter}");
        sandbox.engraft(&line).succeeds().stdout()
    };
    assert_eq!(eval("run@3"), eval("short/adapter"));
    assert_eq!(eval("run@6"), eval("run/adapter"));
    assert_ne!(eval("run@3"), eval("run@6"));
    let text = |adapter: &str| {
        let line = format!("generate --input-ids 1,2,3 --temperature 0 --json --adapter {adapter}");
        sandbox.infer(&line).succeeds().events()[0]["text"].clone()
    };
    assert_eq!(text("run@3=0.5"), text("short/adapter=0.5"));
    sandbox.engraft("eval --data data.jsonl --adapter run@4").refused(&["run@4", "steps 3 and 6"]);
    let path = sandbox.path("run/saves/step-00000003.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(path, bytes).unwrap();
    sandbox.engraft("eval --data data.jsonl --adapter run@3").refused(&["run@3", "checksum"]);
}

#[test]
fn a_projected_prefix_is_read_from_its_save() {
    let sandbox = Sandbox::new();
    let line = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --steps 2 --threads 1 --json --output run \
                --method prefix --prefix-len 3 --prefix-projection 8";
    sandbox.engraft(line).succeeds();
    let eval = |adapter: &str| {
        let line = format!("eval --data data.jsonl --threads 1 --json --adapter {adapter}");
        sandbox.engraft(&line).succeeds().events()[0]["loss"].as_f64().unwrap()
    };
    assert!((eval("run@2") - eval("run/adapter")).abs() < 1e-6);
}

#[test]
fn evaluations_read_as_many_rows_as_asked_for() {
    let sandbox = Sandbox::new();
    let tokens = |more: &str| {
        let line = format!("--output {} --steps 1 --eval-data data.jsonl {more}", more.len());
        sandbox.train(&line).succeeds().events_of("eval")[0]["tokens"].as_u64().unwrap()
    };
    let all = tokens("");
    let few = tokens("--eval-max-rows 4");
    assert!(few < all && few >= 4, "{few} of {all}");
    assert_eq!(tokens("--eval-max-rows 12"), all);
    sandbox.train("--output x --eval-max-rows 0").refused(&["--eval-max-rows 0"]);
}

#[test]
fn a_run_that_diverges_ends_with_a_sentence_and_keeps_what_was_good() {
    let sandbox = Sandbox::new();
    let first = "--steps 4 --save-every 2 --eval-fraction 0.3 --schedule constant --clip 0 --weight-decay 0";
    sandbox.train(first).succeeds();
    let good = adapter(sandbox.path("run/adapter"));
    let line = "--output bad --steps 200 --eval-fraction 0.3 --schedule constant --lr 30 --save-every 0";
    let bad = sandbox.train(line);
    let text = bad.stderr();
    assert_eq!(bad.code(), Some(1), "{text}");
    assert!(text.starts_with("error: the run diverges") && text.contains("--lr below 30"), "{text}");
    assert!(text.contains("nothing was saved"), "{text}");
    assert!(!sandbox.path("bad/adapter").exists());
    assert!(bad.events_of("step").len() < 60, "{}", bad.events_of("step").len());
    // One that is saved before it diverges keeps that.
    let line =
        "--output late --steps 200 --eval-fraction 0.3 --schedule constant --lr 30 --save-every 1 --keep 50";
    let late = sandbox.train(line);
    assert_eq!(late.code(), Some(1));
    assert!(late.stderr().contains("late/adapter are kept"), "{}", late.stderr());
    assert!(sandbox.path("late/adapter/adapter_config.json").is_file());
    assert!(adapter(sandbox.path("run/adapter")) == good);
}

#[test]
fn inspecting_a_run_says_where_it_stands() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 4 --save-every 2 --eval-fraction 0.3").succeeds();
    let state = |what: &str| sandbox.engraft(&format!("inspect {what}")).succeeds().stdout();
    assert!(state("run").starts_with("step 4 of 4, finished, loss "), "{}", state("run"));
    fs::remove_file(sandbox.path("run/saves/step-00000004.safetensors")).unwrap();
    let text = state("run");
    assert!(text.starts_with("step 2 of 4, interrupted, loss "), "{text}");
    assert!(
        text.lines().nth(1).unwrap().starts_with("go on with: engraft train --resume --output run"),
        "{text}"
    );
    let found = sandbox.engraft("inspect run --json").succeeds().events().remove(0);
    assert_eq!((&found["state"]["name"], &found["state"]["step"]), (&"interrupted".into(), &2.into()));
}

#[test]
fn noise_on_embeddings_depends_on_nothing_but_seed_step_and_place() {
    let sandbox = Sandbox::new();
    let run = |output: &str, more: &str| {
        let line = format!("--output {output} --steps 6 --eval-data data.jsonl {more}");
        let run = sandbox.train(&line).succeeds();
        let losses = |kind: &str| -> Vec<f64> {
            run.events_of(kind).iter().map(|event| event["loss"].as_f64().unwrap()).collect()
        };
        (losses("step"), losses("eval"))
    };
    let noise = "--neftune-alpha 30";
    let (plain, noisy) = (run("plain", ""), run("noisy", noise));
    assert_eq!(noisy.1[0], plain.1[0], "an evaluation has no noise");
    assert!(noisy.0[0] != plain.0[0] && (noisy.0[0] - plain.0[0]).abs() < 2.0, "{noisy:?} {plain:?}");
    for more in ["--recompute all", "--threads 3", "--recompute linear --stream-base on --offload-inputs"] {
        assert_eq!(run(&more.len().to_string(), &format!("{noise} {more}")), noisy, "{more}");
    }
    assert_ne!(
        run("seed", &format!("{noise} --seed 1 --no-shuffle")).0[0],
        run("other", &format!("{noise} --no-shuffle")).0[0]
    );
    // One micro-batch instead of two: the same noise, sums in another order.
    let whole = run("whole", &format!("{noise} --micro-batch 4"));
    assert!(whole.0.iter().zip(&noisy.0).all(|(one, two)| (one - two).abs() < 1e-4), "{whole:?} {noisy:?}");
    sandbox.train(&format!("--output parts --steps 3 --schedule constant {noise}")).succeeds();
    sandbox.engraft("train --resume --output parts --steps 6 --json").succeeds();
    sandbox.train(&format!("--output once --steps 6 --schedule constant {noise}")).succeeds();
    assert!(adapter(sandbox.path("parts/adapter")) == adapter(sandbox.path("once/adapter")));
    sandbox
        .engraft("train --resume --output parts --steps 9 --neftune-alpha 3")
        .refused(&["--neftune-alpha"]);
}

#[test]
fn schedules_are_checked_with_their_options() {
    let sandbox = Sandbox::new();
    let rates = |line: &str| -> Vec<f64> {
        let run = sandbox.train(&format!("--output {} --steps 4 --lr 1e-4 {line}", line.len())).succeeds();
        run.events_of("step").iter().map(|step| step["lr"].as_f64().unwrap()).collect()
    };
    let close = |found: Vec<f64>, expected: [f64; 4]| {
        let near = found.iter().zip(expected).all(|(found, expected)| (found * 1e4 - expected).abs() < 1e-9);
        assert!(near, "{found:?} {expected:?}");
    };
    close(rates("--schedule cosine-with-restarts --num-cycles 2"), [1.0, 0.5, 1.0, 0.5]);
    close(rates("--schedule linear --min-lr 2e-5"), [1.0, 0.8, 0.6, 0.4]);
    close(rates("--schedule inverse_sqrt --warmup 1"), [0.0, 1.0, 0.5f64.sqrt(), (1.0f64 / 3.0).sqrt()]);
    let refused =
        |line: &str, parts: &[&str]| drop(sandbox.train(&format!("--output x {line}")).refused(parts));
    refused("--schedule cosine-with-restarts", &["--num-cycles"]);
    refused("--num-cycles 3", &["--num-cycles 3", "cosine-with-restarts"]);
    refused("--min-lr 1 --lr 0.1", &["--min-lr 1", "--lr 0.1"]);
    refused("--min-lr 0.001 --schedule constant", &["--min-lr 0.001", "constant"]);
}

/// The first `records` records of the embedded training data, and 40 held-out ones.
fn few(records: usize) -> Sandbox {
    let sandbox = Sandbox::new();
    let lines = |name: &str, count: usize| -> String {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/places").join(name);
        let text = fs::read_to_string(path).unwrap();
        text.lines().take(count).flat_map(|line| [line, "\n"]).collect()
    };
    sandbox.write("few.jsonl", lines("train.jsonl", records));
    sandbox.write("valid.jsonl", lines("valid.jsonl", 40));
    sandbox
}

/// By which part the evaluation loss falls with nothing but data given.
fn fall(sandbox: &Sandbox, seed: u64) -> (f64, usize) {
    let line =
        format!("train --data few.jsonl --eval-data valid.jsonl --seed {seed} --output run{seed} --json");
    let run = sandbox.engraft(&line).succeeds();
    let evals = run.events_of("eval");
    let loss = |event: &serde_json::Value| event["loss"].as_f64().unwrap();
    (1.0 - loss(evals.last().unwrap()) / loss(&evals[0]), run.events_of("step").len())
}

/// 20 short records were packed into one row and one step.
#[test]
fn few_records_train_something() {
    let sandbox = few(20);
    let (fall, steps) = fall(&sandbox, 0);
    assert!(fall > 1.0 / 3.0, "the loss falls by {fall}");
    assert_eq!(steps, 200);
    let config = fs::read_to_string(sandbox.path("run0/config.toml")).unwrap();
    assert!(!config.contains("epochs") && !config.contains("pack ="), "{config}");
    let said =
        sandbox.engraft("train --data few.jsonl --epochs 1 --no-pack --output short").succeeds().stderr();
    assert!(said.contains("hint: --epochs 1 makes 3 steps") && said.contains("--steps 200"), "{said}");
}

/// Nine runs; seconds in a release build, minutes in a debug one.
#[test]
fn few_records_train_at_every_size() {
    for records in [20, 100, 500] {
        let sandbox = few(records);
        for seed in [0, 1, 2] {
            let (fall, steps) = fall(&sandbox, seed);
            println!("{records} records, seed {seed}: {steps} steps, the loss falls by {:.1}%", 100.0 * fall);
            assert!(fall > 1.0 / 3.0, "{records} records, seed {seed}: the loss falls by {fall}");
        }
    }
}
