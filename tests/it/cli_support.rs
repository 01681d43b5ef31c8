//! Runs the real programs in a fresh directory, far from the user's caches.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;

/// A directory with a small data set, and the programs started in it.
pub struct Sandbox {
    directory: tempfile::TempDir,
}

impl Sandbox {
    /// A fresh directory that holds `data.jsonl`, twelve short records.
    pub fn new() -> Self {
        let sandbox = Self { directory: tempfile::tempdir().unwrap() };
        let records: String = (0..12)
            .map(|index| {
                format!(
                    "{{\"prompt\": \"row {index}:\", \"completion\": \" {}\"}}\n",
                    "ab ".repeat(index % 5 + 1)
                )
            })
            .collect();
        sandbox.write("data.jsonl", records);
        sandbox
    }

    /// The path of `name` in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Puts a file into the directory.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), contents).unwrap();
        self.path(name)
    }

    /// A program with `arguments`, to be started in the directory.
    fn program(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.directory.path()).stdin(Stdio::null());
        for name in ["HF_ENDPOINT", "HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH", "XDG_CACHE_HOME"] {
            command.env_remove(name);
        }
        command.env("HOME", self.path("home")).env("HF_HOME", self.path("hf"));
        command.env("ENGRAFT_CACHE", self.path("cache")).env("HF_HUB_OFFLINE", "1");
        command
    }

    /// `engraft` with the words of `line`.
    pub fn command(&self, line: &str) -> Command {
        self.program(env!("CARGO_BIN_EXE_engraft"), &words(line))
    }

    /// Runs `engraft` with the words of `line`.
    pub fn engraft(&self, line: &str) -> Finished {
        Finished(self.command(line).output().unwrap())
    }

    /// Runs `engraft-infer` with the words of `line`.
    pub fn infer(&self, line: &str) -> Finished {
        Finished(self.program(env!("CARGO_BIN_EXE_engraft-infer"), &words(line)).output().unwrap())
    }

    /// Runs `engraft-infer` with the words of `line`, and `input` as its standard input.
    pub fn infer_with(&self, line: &str, input: &str) -> Finished {
        let mut command = self.program(env!("CARGO_BIN_EXE_engraft-infer"), &words(line));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        Finished(child.wait_with_output().unwrap())
    }

    /// A training run of few, small steps in the folder `run`; `line` adds options.
    pub fn train(&self, line: &str) -> Finished {
        self.engraft(&format!("{SMALL} --output run {line}"))
    }

    /// Starts such a run without waiting for it.
    pub fn start(&self, line: &str) -> Child {
        let mut command = self.command(&format!("{SMALL} --output run {line}"));
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    }
}

/// A run that takes no time: embedded base, tiny rows, one thread.
pub const SMALL: &str = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --micro-batch 2 --rank 3 --alpha 5 \
                         --threads 1 --lr 0.01 --json";

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// A program that has ended.
pub struct Finished(pub Output);

impl Finished {
    /// The exit code; `None` if a signal ended the program.
    pub fn code(&self) -> Option<i32> {
        self.0.status.code()
    }

    /// Standard output as text.
    pub fn stdout(&self) -> String {
        String::from_utf8(self.0.stdout.clone()).unwrap()
    }

    /// Standard error as text.
    pub fn stderr(&self) -> String {
        String::from_utf8(self.0.stderr.clone()).unwrap()
    }

    /// The JSON objects on standard output; fails on a line that is none.
    pub fn events(&self) -> Vec<Value> {
        self.stdout().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The events of one kind.
    pub fn events_of(&self, kind: &str) -> Vec<Value> {
        self.events().into_iter().filter(|event| event["event"] == kind).collect()
    }

    /// Fails unless the program ended well.
    #[track_caller]
    pub fn succeeds(self) -> Self {
        assert_eq!(self.code(), Some(0), "{}", self.stderr());
        self
    }

    /// Fails unless the program was refused with one sentence that holds every one of `parts`.
    #[track_caller]
    pub fn refused(self, parts: &[&str]) -> Self {
        let text = self.stderr();
        assert_eq!(self.code(), Some(2), "{text}");
        assert!(text.starts_with("error: "), "{text}");
        for part in parts {
            assert!(text.contains(part), "no {part:?} in: {text}");
        }
        let rest = text.lines().skip(1).find(|line| !line.starts_with("hint: ") && !line.is_empty());
        assert_eq!(rest, None, "more than a sentence and hints: {text}");
        assert!(!text.contains("panicked") && !text.contains("RUST_BACKTRACE"), "{text}");
        // Under --json the sentence is an event, too.
        assert!(self.stdout().is_empty() || self.events_of("error").len() == 1, "{}", self.stdout());
        assert!(self.stdout().lines().count() <= 1, "{}", self.stdout());
        self
    }
}

/// All files below `folder` with their bytes, by relative path; without model cards: one of a run that was killed before its
/// last evaluation lacks that loss.
pub fn files_below(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else if !path.ends_with("README.md") {
                found.push((path.strip_prefix(folder).unwrap().to_owned(), fs::read(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}

/// Bytes of all rows of a role in a plan.
pub fn planned_for(plan: &Value, role: &str) -> u64 {
    let rows = plan["rows"].as_array().unwrap().iter().filter(|row| row["role"] == role);
    rows.map(|row| row["bytes"].as_u64().unwrap()).sum()
}

/// The names in `folder`, sorted; TensorBoard's event files are `events`, however many there are.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    for name in names.iter_mut().filter(|name| name.starts_with("events.out.tfevents.")) {
        *name = "events".to_owned();
    }
    names.sort();
    names.dedup();
    names
}

/// Losses of a run's steps.
pub fn losses(run: &Finished) -> Vec<f64> {
    run.events_of("step").iter().map(|step| step["loss"].as_f64().unwrap()).collect()
}

/// Holds that a run counted no more bytes than were planned.
#[track_caller]
pub fn counts_what_was_planned(run: &Finished) {
    let done = run.events_of("done").remove(0);
    let [counted, planned] =
        ["counted_bytes", "planned_counted_bytes"].map(|key| done[key].as_u64().unwrap());
    assert!(counted <= planned, "{counted} bytes counted, {planned} planned");
}

/// Holds of a run of 20 steps in the folder `run`, which saved after 10, that its loss falls, that it counted no more bytes
/// than were planned, that its adapter is three files, and that resumed from step 10 it ends in the same bytes. Returns
/// the losses of its steps.
#[track_caller]
pub fn learned_and_resumed(sandbox: &Sandbox, run: &Finished) -> Vec<f64> {
    let losses = losses(run);
    assert!(losses.len() == 20 && losses[19] < 0.8 * losses[0], "{losses:?}");
    counts_what_was_planned(run);

    let folder = sandbox.path("run/adapter");
    let expected = files_below(&folder);
    assert_eq!(names(&folder), ["README.md", "adapter_config.json", "adapter_model.safetensors"]);
    let resumed = sandbox.engraft("train --resume --output run --resume-from 10 --json").succeeds();
    assert_eq!(resumed.events_of("step")[0]["step"], 11);
    assert!(files_below(&folder) == expected, "a resumed run has other bytes");
    losses
}

/// Loss of the embedded base on the data, with the adapter of that folder if there is one; it generates, too.
pub fn evaluated(sandbox: &Sandbox, adapter: Option<&str>) -> f64 {
    let with = adapter.map(|folder| format!("--adapter {folder}")).unwrap_or_default();
    let line = format!("generate --base embedded --prompt row --max-new-tokens 8 --temperature 0 {with}");
    assert!(!sandbox.infer(&line).succeeds().stdout().is_empty());
    let line = format!("eval --base embedded --data data.jsonl --no-pack --seq-len 24 --json {with}");
    sandbox.engraft(&line).succeeds().events()[0]["loss"].as_f64().unwrap()
}
