//! A run that was stopped, however it was stopped, ends in the adapter of one that never was.

use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Child, Command},
    thread,
    time::Duration,
};

use crate::cli_support::{Sandbox, files_below, names};

/// Steps of the runs here, and options under which much can go wrong on the way.
const RUN: &str = "--steps 30 --save-every 3 --keep 2 --eval-fraction 0.3 --lora-dropout 0.1 --warmup 4";

/// The adapter of an undisturbed run.
fn expected() -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let sandbox = Sandbox::new();
    sandbox.train(RUN).succeeds();
    files_below(&sandbox.path("run/adapter"))
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Waits until `child` has printed `lines` lines, and keeps reading so that it never blocks.
fn wait_for_lines(child: &mut Child, lines: usize) -> thread::JoinHandle<Vec<String>> {
    let mut reader = BufReader::new(child.stdout.take().unwrap()).lines();
    let seen: Vec<String> = reader.by_ref().take(lines).map_while(Result::ok).collect();
    thread::spawn(move || seen.into_iter().chain(reader.map_while(Result::ok)).collect())
}

#[test]
fn killed_at_any_moment_it_ends_in_the_same_bytes() {
    let expected = expected();
    let sandbox = Sandbox::new();
    // Moments spread over start, loop and end, from a small generator of their own.
    let mut moment: u64 = 12345;
    let mut kills = 0;
    // A run that was killed before it began is no run: then it starts as the first one did.
    let line = |sandbox: &Sandbox| match sandbox.path("run/config.toml").exists() {
        true => format!("{RUN} --resume"),
        false => RUN.to_owned(),
    };
    for _ in 0..8 {
        let mut child = sandbox.start(&line(&sandbox));
        moment = moment.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        thread::sleep(Duration::from_millis(20 + (moment >> 33) % 300));
        child.kill().unwrap();
        kills += usize::from(child.wait().unwrap().code().is_none());
    }
    assert!(kills > 0, "no run was ever killed");
    sandbox.train(&line(&sandbox)).succeeds();
    let found = files_below(&sandbox.path("run/adapter"));
    let paths = |files: &[(std::path::PathBuf, Vec<u8>)]| {
        files.iter().map(|(path, _)| path.clone()).collect::<Vec<_>>()
    };
    assert_eq!(paths(&found), paths(&expected));
    assert!(found == expected);
    assert_eq!(
        names(&sandbox.path("run")),
        ["adapter", "config.toml", "events", "lock", "metrics.jsonl", "report.html", "saves"]
    );
    assert_eq!(names(&sandbox.path("run/saves")), ["step-00000027.safetensors", "step-00000030.safetensors"]);
}

#[cfg(unix)]
#[test]
fn interrupted_it_saves_and_goes_on() {
    let expected = expected();
    for name in ["-INT", "-TERM"] {
        let sandbox = Sandbox::new();
        let mut child = sandbox.start(&format!("{RUN} --save-every 0"));
        // start, data, plan, evaluation and four steps
        let rest = wait_for_lines(&mut child, 8);
        signal(&child, name);
        assert_eq!(child.wait().unwrap().code(), Some(130));
        let steps = rest.join().unwrap().iter().filter(|line| line.contains("\"event\":\"step\"")).count();
        assert!((4..30).contains(&steps), "{steps}");
        assert_eq!(names(&sandbox.path("run/saves")), [format!("step-{steps:08}.safetensors")]);
        // Options not given come from the run folder.
        let rest = sandbox.engraft("train --resume --output run --json").succeeds();
        assert_eq!(rest.events_of("step")[0]["step"].as_u64().unwrap() as usize, steps + 1);
        assert!(files_below(&sandbox.path("run/adapter")) == expected);
    }
}

#[test]
fn without_a_save_it_starts_and_finished_it_ends() {
    let expected = expected();
    let sandbox = Sandbox::new();
    // Killed before its first save.
    let mut child = sandbox.start("--steps 30 --save-every 0");
    let rest = wait_for_lines(&mut child, 1);
    child.kill().unwrap();
    child.wait().unwrap();
    rest.join().unwrap();
    assert!(names(&sandbox.path("run/saves")).is_empty());
    let first = sandbox.train(&format!("{RUN} --resume")).succeeds();
    assert_eq!(first.events_of("step").len(), 30);
    fs::remove_dir_all(sandbox.path("run/adapter")).unwrap();
    let again = sandbox.engraft("train --resume --output run --json").succeeds();
    assert_eq!((again.events_of("step").len(), again.events_of("done").len()), (0, 1));
    assert!(again.stderr().contains("finished"), "{}", again.stderr());
    assert!(files_below(&sandbox.path("run/adapter")) == expected);
}

#[test]
fn a_larger_number_of_steps_goes_on() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 4").succeeds();
    let longer = sandbox.engraft("train --resume --output run --steps 6 --json").succeeds();
    let steps: Vec<_> = longer.events_of("step").iter().map(|step| step["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [5, 6]);
    assert!(
        longer.stderr().contains("from 4 to 6") && longer.stderr().contains("schedule"),
        "{}",
        longer.stderr()
    );
    sandbox.engraft("train --resume --output run --steps 5 --json").refused(&["--steps 5", "6"]);
}

#[test]
fn what_would_not_be_exact_is_refused_and_named_at_once() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 4").succeeds();
    let before = files_below(&sandbox.path("run"));
    sandbox.write("other.jsonl", "{\"text\": \"something else\"}\n");
    sandbox
        .engraft("train --resume --output run --steps 8 --lr 0.5 --seed 3 --batch 2 --data other.jsonl")
        .refused(&["--lr is 0.5 (the run has 0.01)", "--seed", "--batch", "--data"]);
    assert!(files_below(&sandbox.path("run")) == before, "a refused run leaves the folder as it was");
    let free = "--threads 2 --log-every 1 --save-every 1 --keep 9 --eval-every 1 --recompute all";
    sandbox.engraft(&format!("train --resume --output run --steps 6 {free}")).succeeds();
}

#[test]
fn a_damaged_save_falls_back_to_the_one_before() {
    let expected = expected();
    let sandbox = Sandbox::new();
    sandbox.train(RUN).succeeds();
    let newest = sandbox.path("run/saves/step-00000030.safetensors");
    let mut bytes = fs::read(&newest).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&newest, bytes).unwrap();
    let again = sandbox.engraft("train --resume --output run --json").succeeds();
    assert!(
        again.stderr().contains("hint: ") && again.stderr().contains("step-00000030"),
        "{}",
        again.stderr()
    );
    assert_eq!(again.events_of("step").len(), 3);
    assert!(files_below(&sandbox.path("run/adapter")) == expected);
}

#[test]
fn a_folder_in_use_is_refused() {
    let sandbox = Sandbox::new();
    let mut child = sandbox.start("--steps 100000");
    let rest = wait_for_lines(&mut child, 1);
    sandbox.train("--steps 3 --resume").refused(&["--output run", "another process"]);
    child.kill().unwrap();
    child.wait().unwrap();
    rest.join().unwrap();
    sandbox.train("--steps 1").refused(&["not empty"]);
}

/// A limit on file sizes fails a write as a full disk does.
#[cfg(unix)]
#[test]
fn a_full_disk_leaves_the_last_good_save_and_nothing_else() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 2").succeeds();
    let before = files_below(&sandbox.path("run"));
    let script = "trap '' XFSZ; ulimit -f 4; exec \"$0\" train --resume --output run --steps 4 --json";
    let mut command = Command::new("sh");
    command.args(["-c", script, env!("CARGO_BIN_EXE_engraft")]).current_dir(sandbox.path("."));
    let full = command
        .env("HOME", sandbox.path("home"))
        .env("ENGRAFT_CACHE", sandbox.path("cache"))
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&full.stderr);
    assert_eq!(full.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("cannot be written") && stderr.contains("hint: "), "{stderr}");
    let after = files_below(&sandbox.path("run"));
    let differing: Vec<_> =
        after.iter().filter(|file| !before.contains(file)).map(|(path, _)| path).collect();
    // The record has a gap, which is said; it is no reason to stop.
    assert!(stderr.contains("metrics.jsonl: cannot be written"), "{stderr}");
    let records = ["config.toml", "metrics.jsonl", "tfevents"];
    let is_record =
        |path: &&std::path::PathBuf| records.iter().any(|name| path.to_string_lossy().contains(name));
    assert!(differing.iter().all(is_record), "{differing:?}");
    assert!(after.len() <= before.len() + 1);
    sandbox.engraft("train --resume --output run --json").succeeds();
}

#[test]
fn every_method_resumes() {
    for method in [
        "--method lora --targets q,v",
        "--method prefix --prefix-len 3",
        "--method lora+prefix --prefix-len 3",
    ] {
        let sandbox = Sandbox::new();
        let base =
            "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --threads 1 --json --schedule constant";
        sandbox.engraft(&format!("{base} {method} --output whole --steps 4")).succeeds();
        sandbox.engraft(&format!("{base} {method} --output parts --steps 2")).succeeds();
        sandbox.engraft("train --resume --output parts --steps 4 --json").succeeds();
        let adapter = |run: &str| files_below(&sandbox.path(run).join("adapter"));
        assert!(adapter("whole") == adapter("parts"), "{method}");
    }
}
