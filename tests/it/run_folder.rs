//! Run folders: `--resume` takes no folder that engraft did not write, and every output is checked at the start.

use std::{fs, path::Path, process::Stdio};

use crate::cli_support::{Finished, SMALL, Sandbox, files_below, names};

/// Everything below a folder: files with their bytes, and the names of all folders.
fn everything(folder: &Path) -> (Vec<(std::path::PathBuf, Vec<u8>)>, Vec<String>) {
    let mut folders = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path.display().to_string());
                open.push(path);
            }
        }
    }
    folders.sort();
    (files_below(folder), folders)
}

#[test]
fn resume_takes_over_no_folder_of_somebody_else() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 2").succeeds();
    let folder = |name: &str| {
        fs::create_dir(sandbox.path(name)).unwrap();
        sandbox.path(name)
    };
    // An adapter in a folder of that name, as PEFT users have.
    let peft = folder("peft").join("adapter");
    fs::create_dir(&peft).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(sandbox.path("run/adapter").join(file), peft.join(file)).unwrap();
    }
    fs::copy(sandbox.path("data.jsonl"), folder("data").join("train.jsonl")).unwrap();
    fs::write(folder("foreign").join("config.toml"), "name = 'of another program'\nrank = 8\n").unwrap();
    fs::create_dir(folder("saves").join("saves")).unwrap();
    fs::write(sandbox.path("saves/saves/step-00000001.safetensors"), "no save").unwrap();
    folder("empty");
    let before = everything(&sandbox.path("."));
    for name in ["peft", "data", "foreign", "saves", "empty", "data.jsonl", "rnu"] {
        let parts = [&format!("--output {name}:")[..], "no run to resume"];
        sandbox.engraft(&format!("{SMALL} --steps 1 --resume --output {name}")).refused(&parts);
        assert!(everything(&sandbox.path(".")) == before, "--resume --output {name} left something");
    }
    sandbox.engraft("plan --resume --output foreign").refused(&["--output foreign", "no run to resume"]);
}

#[test]
fn resume_is_recommended_where_there_is_a_run() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 1").succeeds();
    sandbox.train("--steps 1").refused(&["--output run", "not empty", "add --resume"]);
    fs::create_dir(sandbox.path("mine")).unwrap();
    sandbox.write("mine/notes.md", "mine");
    let refused = sandbox.engraft(&format!("{SMALL} --steps 1 --output mine")).refused(&[
        "--output mine",
        "notes.md",
        "choose another folder",
    ]);
    assert!(!refused.stderr().contains("--resume"), "{}", refused.stderr());
    assert_eq!(names(&sandbox.path("mine")), ["notes.md"]);
}

#[test]
fn a_run_says_who_wrote_it_and_its_config_is_read_again() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 2").succeeds();
    let config = fs::read_to_string(sandbox.path("run/config.toml")).unwrap();
    let marker = format!("engraft = \"{}\"", env!("CARGO_PKG_VERSION"));
    assert!(config.lines().any(|line| line == marker), "{config}");
    sandbox.engraft("train --config run/config.toml --output again --json").succeeds();
    assert!(files_below(&sandbox.path("run/adapter")) == files_below(&sandbox.path("again/adapter")));
}

#[test]
fn runs_of_earlier_versions_resume_by_their_saves() {
    let sandbox = Sandbox::new();
    let whole = Sandbox::new();
    whole.train("--steps 4 --schedule constant").succeeds();
    sandbox.train("--steps 2 --schedule constant").succeeds();
    let config = sandbox.path("run/config.toml");
    let text = fs::read_to_string(&config).unwrap();
    let unmarked: String =
        text.lines().filter(|line| !line.starts_with("engraft")).map(|line| format!("{line}\n")).collect();
    assert!(unmarked.len() < text.len());
    fs::write(&config, &unmarked).unwrap();
    let steps = |run: Finished| run.succeeds().events_of("step").len();
    assert_eq!(steps(sandbox.engraft("train --resume --output run --steps 3 --json")), 1);
    assert!(fs::read_to_string(&config).unwrap().contains("engraft ="), "the marker comes with the next run");
    // Without its config the options come from the save; only what a save cannot tell has to be given.
    fs::remove_file(&config).unwrap();
    let line = "train --resume --output run --steps 4 --json --threads 1";
    let without = sandbox.engraft(line);
    assert_eq!(without.code(), Some(2), "{}", without.stderr());
    assert!(without.stderr().contains("the fingerprint of --data is"), "{}", without.stderr());
    assert_eq!(without.stderr().matches("(the run has").count(), 1, "{}", without.stderr());
    let rest = sandbox.engraft(&format!("{line} --data data.jsonl"));
    assert!(rest.stderr().contains("config.toml is missing"), "{}", rest.stderr());
    assert_eq!(steps(rest), 1);
    assert!(files_below(&sandbox.path("run/adapter")) == files_below(&whole.path("run/adapter")));
}

#[test]
fn runs_that_start_at_once_get_folders_of_their_own() {
    let sandbox = Sandbox::new();
    let line = format!("{SMALL} --steps 2");
    let start = || sandbox.command(&line).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let mut runs: Vec<_> = (0..3).map(|_| start()).collect();
    for run in &mut runs {
        assert_eq!(run.wait().unwrap().code(), Some(0));
    }
    let expected = ["embedded-lora", "embedded-lora-2", "embedded-lora-3"];
    assert_eq!(names(&sandbox.path("runs")), expected);
    for name in expected {
        let run = sandbox.path("runs").join(name);
        assert_eq!(names(&run.join("saves")), ["step-00000002.safetensors"]);
        assert!(run.join("adapter/adapter_model.safetensors").is_file());
    }
}

/// The data are broken: a sentence about an output shows that it was looked at first.
#[test]
fn outputs_are_checked_before_the_data_are_read() {
    let sandbox = Sandbox::new();
    sandbox.write("broken.jsonl", "{\"text\": \n");
    fs::create_dir(sandbox.path("folder.json")).unwrap();
    let before = everything(&sandbox.path("."));
    let train = |line: &str| sandbox.engraft(&format!("train --json --steps 1 --data broken.jsonl {line}"));
    train("").refused(&["broken.jsonl:1"]);
    train("--output data.jsonl/run").refused(&["--output data.jsonl/run"]);
    train("--memory-trace nowhere/trace.json")
        .refused(&["--memory-trace nowhere/trace.json", "cannot be written"]);
    train("--memory-trace folder.json").refused(&["--memory-trace folder.json", "cannot be written"]);
    train("--memory-trace trace.svg").refused(&["--memory-trace", "trace.svg"]);
    train("--output a/b/c").refused(&["broken.jsonl:1"]);
    let mut cached = everything(&sandbox.path("."));
    // Data that were read leave notes in the cache.
    cached.0.retain(|(path, _)| !path.components().any(|part| part.as_os_str() == "cache"));
    cached.1.retain(|folder| !Path::new(folder).components().any(|part| part.as_os_str() == "cache"));
    assert!(cached == before, "a refused run leaves nothing: {:?}", names(&sandbox.path(".")));
    sandbox.train("--steps 1 --memory-trace trace.json").succeeds();
    assert!(sandbox.path("trace.json").is_file() && sandbox.path("trace.svg").is_file());
}

#[cfg(unix)]
#[test]
fn an_output_without_the_right_to_write_is_refused_at_once() {
    use std::os::unix::fs::PermissionsExt;
    let sandbox = Sandbox::new();
    sandbox.write("broken.jsonl", "{\"text\": \n");
    fs::create_dir(sandbox.path("sealed")).unwrap();
    fs::set_permissions(sandbox.path("sealed"), fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(sandbox.path("sealed/probe"), "x").is_ok() {
        return crate::skip::skip("rights do not bind this user", false);
    }
    let line = "train --json --steps 1 --data broken.jsonl --output sealed/run";
    sandbox.engraft(line).refused(&["--output sealed/run", "you may write to"]);
}
