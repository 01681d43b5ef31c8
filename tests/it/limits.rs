//! Limits of the system (`ulimit`): each ends the program with a sentence that names it.
#![cfg(target_os = "linux")]

use std::{fs, process::Command};

use crate::cli_support::{Finished, Sandbox};

/// Runs `engraft` with the words of `line` under a limit.
fn limited(sandbox: &Sandbox, limit: &str, line: &str) -> Finished {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit {limit}; exec \"$0\" {line}"), env!("CARGO_BIN_EXE_engraft")]);
    command.current_dir(sandbox.path(".")).env("HOME", sandbox.path("home"));
    Finished(command.env("ENGRAFT_CACHE", sandbox.path("cache")).env("HF_HUB_OFFLINE", "1").output().unwrap())
}

/// Fails unless the program ended well or with a sentence.
#[track_caller]
fn ends_with_a_sentence(run: &Finished) {
    let text = run.stderr();
    for wrong in ["panicked", "memory allocation of", "backtrace"] {
        assert!(!text.contains(wrong), "{text}");
    }
    let is_sentence = text.lines().any(|line| line.starts_with("error: "));
    assert!(
        run.code() == Some(0) || matches!(run.code(), Some(1 | 2)) && is_sentence,
        "{:?} {text}",
        run.code()
    );
}

#[test]
fn an_allocation_that_fails_ends_with_a_sentence() {
    let sandbox = Sandbox::new();
    // A text without a line break is held as a whole: two gigabytes of a hole in the disk.
    let file = fs::File::create(sandbox.path("hole.txt")).unwrap();
    file.set_len(2 << 30).unwrap();
    let run = limited(&sandbox, "-v 600000", "train --data hole.txt --output run --threads 1 --json");
    assert_eq!(run.code(), Some(1), "{}", run.stderr());
    ends_with_a_sentence(&run);
    assert!(run.stderr().contains("has no more memory for this program"), "{}", run.stderr());
    assert!(run.stderr().contains("`ulimit -v`"), "{}", run.stderr());
}

#[test]
fn little_memory_ends_with_a_sentence() {
    let sandbox = Sandbox::new();
    let line = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --steps 1 --json";
    let mut sentences = 0;
    for (number, kib) in (20_000..80_000).step_by(4000).enumerate() {
        let run = limited(&sandbox, &format!("-v {kib}"), &format!("{line} --output run-{number}"));
        // The system's loader may fail before the program is there.
        if matches!(run.code(), None | Some(127)) && !run.stderr().contains("memory allocation of") {
            continue;
        }
        ends_with_a_sentence(&run);
        sentences += usize::from(run.code() != Some(0));
    }
    assert!(sentences > 0, "no limit was too low");
}

#[test]
fn few_file_descriptors_are_named_as_such() {
    let sandbox = Sandbox::new();
    let mut ended = 0;
    for limit in 4..12 {
        // As a run that never began leaves it: it must not look as if it held something.
        let folder = sandbox.path(&format!("run-{limit}"));
        fs::create_dir_all(folder.join("saves")).unwrap();
        fs::write(folder.join("lock"), "").unwrap();
        let line = format!(
            "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --steps 1 --json --output run-{limit}"
        );
        let run = limited(&sandbox, &format!("-n {limit}"), &line);
        if run.code() == Some(127) {
            continue;
        }
        ends_with_a_sentence(&run);
        let named = run.code() == Some(0) || run.stderr().contains("ulimit -n");
        assert!(named, "{limit}: {}", run.stderr());
        ended += usize::from(run.code() == Some(0));
    }
    assert!(ended > 0);
}
