//! Config files: the command line wins, and what a run used can be used again.

use std::fs;

use crate::cli_support::{SMALL, Sandbox};

#[test]
fn the_command_line_wins_over_the_file() {
    let sandbox = Sandbox::new();
    sandbox.write("my.toml", "steps = 5\nlr = 0.002\nschedule = 'constant'\ndata = ['data.jsonl']\n");
    let run = sandbox.engraft("train --config my.toml --steps 2 --output run --json --threads 1").succeeds();
    let steps = run.events_of("step");
    assert_eq!(steps.len(), 2);
    assert_eq!(steps[1]["lr"], 0.002);
}

#[test]
fn the_last_of_two_counts() {
    let sandbox = Sandbox::new();
    let run = sandbox.train("--steps 5 --steps 1 --lr 0.5 --lr 0.25 --no-pack --pack").succeeds();
    assert_eq!(run.events_of("step").len(), 1);
    assert_eq!(run.events_of("step")[0]["lr"], 0.25);
    assert!(fs::read_to_string(sandbox.path("run/config.toml")).unwrap().contains("pack = true"));
}

#[test]
fn a_written_config_makes_the_same_adapter() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 3 --targets c_attn,mlp.c_fc --rank-pattern h\\.0\\.attn\\.c_attn=2 --warmup 0.5 --seed 9").succeeds();
    sandbox.engraft("train --config run/config.toml --output again --json").succeeds();
    let bytes =
        |folder: &str| fs::read(sandbox.path(folder).join("adapter/adapter_model.safetensors")).unwrap();
    assert!(bytes("run") == bytes("again"));
    let written = |folder: &str| fs::read_to_string(sandbox.path(folder).join("config.toml")).unwrap();
    assert_eq!(written("run"), written("again"));
}

#[test]
fn mistakes_in_a_file_are_named() {
    let sandbox = Sandbox::new();
    sandbox.write("unknown.toml", "stpes = 3\n");
    sandbox.engraft("train --config unknown.toml").refused(&["unknown.toml", "\"stpes\""]);
    sandbox.write("value.toml", "steps = 3\nlr = 'fast'\n");
    sandbox.engraft("train --config value.toml").refused(&["value.toml, line 2", "fast"]);
    sandbox.write("syntax.toml", "steps = \n");
    sandbox.engraft("train --config syntax.toml").refused(&["syntax.toml, line 1"]);
    sandbox.write("binary.toml", [0xff, 0xfe, 0x00]);
    sandbox.engraft("train --config binary.toml").refused(&["binary.toml", "UTF-8"]);
    sandbox.engraft("train --config missing.toml").refused(&["missing.toml", "check the path"]);
    sandbox.write("both.toml", "steps = 3\nepochs = 1.0\n");
    sandbox.engraft("train --config both.toml").refused(&["--steps", "--epochs"]);
    assert!(!sandbox.path("runs").exists());
}

#[test]
fn a_choice_above_hides_its_alternative_below() {
    let sandbox = Sandbox::new();
    sandbox.write("my.toml", "epochs = 50.0\nmethod = 'lora'\nrank = 4\n");
    let line = "train --config my.toml --data data.jsonl --steps 1 --method prefix --prefix-len 3 --output run --json";
    sandbox.engraft(line).succeeds();
    sandbox
        .engraft(&format!("{SMALL} --method prefix --output other"))
        .refused(&["--rank", "--method prefix"]);
}
