//! Ctrl-C and kills: answered at once, nothing lost, nothing left behind.
#![cfg(unix)]

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use engraft_util::safetensors::{Entry, Order, header};
use safetensors::Dtype;
use serde_json::Value;

use crate::cli_support::{SMALL, Sandbox, files_below, names};

/// Longer than anything here takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Waits until `is_there`.
#[track_caller]
fn wait_for(what: &str, is_there: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_there() {
        assert!(begun.elapsed() < LONG, "no {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Starts `engraft` with both outputs kept.
fn start(sandbox: &Sandbox, line: &str) -> Child {
    sandbox.command(line).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The lines of an output as they come; the last one is followed by the end.
fn lines(output: impl std::io::Read + Send + 'static) -> std::sync::mpsc::Receiver<(Instant, String)> {
    let (send, lines) = std::sync::mpsc::channel();
    thread::spawn(move || {
        BufReader::new(output)
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| send.send((Instant::now(), line)))
    });
    lines
}

/// Reads on until the event before the first step.
fn wait_for_plan(stdout: &std::sync::mpsc::Receiver<(Instant, String)>) {
    while !stdout.recv_timeout(LONG).unwrap().1.contains("\"event\":\"plan\"") {}
}

fn end(child: &mut Child) -> ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        assert!(begun.elapsed() < LONG, "it does not end");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A step of this takes seconds: 250 micro-batches.
const SLOW: &str = "train --data data.jsonl --no-pack --seq-len 24 --batch 3000 --micro-batch 12 --steps 3 --threads 1 \
                    --output run --json";

/// Standard output and standard error of a run, line by line.
type Outputs = [std::sync::mpsc::Receiver<(Instant, String)>; 2];

/// Starts [`SLOW`], and sends a signal in the middle of its first step.
fn interrupted(sandbox: &Sandbox) -> (Child, Outputs) {
    let mut child = start(sandbox, SLOW);
    let (stdout, stderr) = (lines(child.stdout.take().unwrap()), lines(child.stderr.take().unwrap()));
    wait_for_plan(&stdout);
    thread::sleep(Duration::from_millis(200));
    signal(&child, "-INT");
    (child, [stdout, stderr])
}

#[test]
fn the_first_signal_is_answered_at_once_and_saves_an_adapter_too() {
    let sandbox = Sandbox::new();
    let (mut child, [stdout, stderr]) = interrupted(&sandbox);
    let (answered, answer) = stderr.recv_timeout(LONG).unwrap();
    assert_eq!(answer, "finishing this step, then saving; Ctrl-C again stops without saving");
    assert_eq!(end(&mut child).code(), Some(130));
    let (times, events): (Vec<Instant>, Vec<Value>) =
        stdout.iter().map(|(time, line)| (time, serde_json::from_str(&line).unwrap())).unzip();
    let first_step = events.iter().position(|event| event["event"] == "step").unwrap();
    assert!(answered < times[first_step], "the answer waited for the step");
    let last = events.last().unwrap();
    let steps = events.iter().filter(|event| event["event"] == "step").count();
    assert!(steps < 3, "it was interrupted");
    assert_eq!((last["event"].as_str(), last["step"].as_u64()), (Some("interrupted"), Some(steps as u64)));
    let at = |key: &str| sandbox.path(last[key].as_str().unwrap());
    assert!(at("save").is_file() && at("adapter").join("adapter_model.safetensors").is_file(), "{last}");
    let rest: Vec<String> = stderr.iter().map(|(_, line)| line).collect();
    let command = "hint: engraft train --resume --output run";
    assert!(rest[0].contains(&format!("interrupted after step {steps} of 3; saved")), "{rest:?}");
    assert_eq!(rest[1..], [command]);
    // The adapter is that of the save: the finished run of so many steps has the same.
    sandbox.engraft("inspect run/adapter").succeeds();
    let line = command.strip_prefix("hint: engraft ").unwrap();
    let gone_on = sandbox.engraft(&format!("{line} --json")).succeeds();
    assert_eq!(gone_on.events_of("step")[0]["step"], steps as u64 + 1);
}

#[test]
fn the_adapter_of_an_interrupted_run_is_that_of_its_last_step() {
    let sandbox = Sandbox::new();
    let mut child = start(&sandbox, &format!("{SMALL} --schedule constant --steps 100000 --output run"));
    let stdout = lines(child.stdout.take().unwrap());
    wait_for("step", || stdout.try_recv().is_ok_and(|(_, line)| line.contains("\"event\":\"step\"")));
    signal(&child, "-TERM");
    assert_eq!(end(&mut child).code(), Some(130));
    let events: Vec<Value> = stdout.iter().map(|(_, line)| serde_json::from_str(&line).unwrap()).collect();
    let steps = events.last().unwrap()["step"].as_u64().unwrap();
    let whole = Sandbox::new();
    whole.train(&format!("--schedule constant --steps {steps}")).succeeds();
    assert!(files_below(&sandbox.path("run/adapter")) == files_below(&whole.path("run/adapter")));
}

#[test]
fn the_second_signal_stops_without_saving() {
    let sandbox = Sandbox::new();
    let (mut child, [stdout, stderr]) = interrupted(&sandbox);
    stderr.recv_timeout(LONG).unwrap();
    signal(&child, "-INT");
    assert_eq!(end(&mut child).code(), Some(130));
    assert!(stdout.iter().all(|(_, line)| !line.contains("\"event\":\"step\"")), "it finished the step");
    assert!(names(&sandbox.path("run/saves")).is_empty(), "nothing was saved");
    assert!(!sandbox.path("run/adapter").exists());
    // It began, so that it can be resumed, from the start.
    sandbox.engraft("train --resume --output run --steps 1 --json").succeeds();
}

/// Opening a named pipe waits for a writer, who never comes.
#[test]
fn before_the_first_step_a_signal_ends_the_run_and_leaves_nothing() {
    for name in ["-INT", "-TERM"] {
        let sandbox = Sandbox::new();
        assert!(Command::new("mkfifo").arg(sandbox.path("data.txt")).status().unwrap().success());
        let mut child = start(&sandbox, "train --data data.txt --json");
        wait_for("run folder", || sandbox.path("runs/embedded-lora/lock").exists());
        thread::sleep(Duration::from_millis(100));
        signal(&child, name);
        assert_eq!(end(&mut child).code(), Some(130));
        let said: Vec<String> = lines(child.stderr.take().unwrap()).iter().map(|(_, line)| line).collect();
        assert_eq!(said, ["interrupted before the first step; run the command again"]);
        assert!(!sandbox.path("runs").exists(), "{:?}", names(&sandbox.path("runs")));
    }
}

/// Writes a base of zeros in F32 that takes a second to convert, and no room on the disk.
fn slow_base(folder: &Path) {
    const VOCAB: usize = 150_000;
    const WIDTH: usize = 768;
    fs::create_dir(folder).unwrap();
    let config = format!(
        "{{\"model_type\":\"gpt2\",\"n_layer\":1,\"n_embd\":{WIDTH},\"n_head\":12,\"n_positions\":64,\
         \"vocab_size\":{VOCAB},\"eos_token_id\":0}}"
    );
    fs::write(folder.join("config.json"), config).unwrap();
    let linear = |name: &str, inputs: usize, outputs: usize| {
        [(format!("{name}.weight"), vec![inputs, outputs]), (format!("{name}.bias"), vec![outputs])]
    };
    let norm = |name: &str| ["weight", "bias"].map(|part| (format!("{name}.{part}"), vec![WIDTH]));
    let mut tensors = vec![
        ("transformer.wte.weight".to_owned(), vec![VOCAB, WIDTH]),
        ("transformer.wpe.weight".to_owned(), vec![64, WIDTH]),
    ];
    tensors.extend(
        ["h.0.ln_1", "h.0.ln_2", "ln_f"].iter().flat_map(|name| norm(&format!("transformer.{name}"))),
    );
    for (name, inputs, outputs) in
        [("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)]
    {
        tensors.extend(linear(&format!("transformer.h.0.{name}"), inputs * WIDTH, outputs * WIDTH));
    }
    let entry = |(name, shape): (String, Vec<usize>)| {
        let bytes = 4 * shape.iter().product::<usize>();
        Entry { name, dtype: Dtype::F32, shape, bytes }
    };
    let entries: Vec<Entry> = tensors.into_iter().map(entry).collect();
    let head = header(&Default::default(), &entries, Order::Given, 8).unwrap();
    let bytes = head.len() + entries.iter().map(|entry| entry.bytes).sum::<usize>();
    fs::write(folder.join("model.safetensors"), head).unwrap();
    // The rest is a hole, which is read as zeros.
    let file = fs::OpenOptions::new().write(true).open(folder.join("model.safetensors")).unwrap();
    file.set_len(bytes as u64).unwrap();
}

fn partial_files(sandbox: &Sandbox) -> usize {
    if !sandbox.path("cache").exists() {
        return 0;
    }
    let files = files_below_names(&sandbox.path("cache"));
    files.iter().filter(|name| name.starts_with(".partial-")).count()
}

/// Names of the files in the folders of `folder`.
fn files_below_names(folder: &Path) -> Vec<String> {
    let folders = names(folder).into_iter().map(|name| folder.join(name)).filter(|path| path.is_dir());
    folders.flat_map(|path| names(&path)).collect()
}

#[test]
fn a_conversion_that_is_interrupted_or_killed_leaves_nothing() {
    let sandbox = Sandbox::new();
    slow_base(&sandbox.path("base"));
    sandbox.write("ids.jsonl", "{\"input_ids\": [1, 2, 3], \"labels\": [1, 2, 3]}\n");
    let line = "train --base base --data ids.jsonl --json";
    for name in ["-INT", "-TERM"] {
        let mut child = start(&sandbox, line);
        wait_for("unfinished copy", || partial_files(&sandbox) == 1);
        signal(&child, name);
        assert_eq!(end(&mut child).code(), Some(130));
        assert_eq!((partial_files(&sandbox), sandbox.path("runs").exists()), (0, false), "{name}");
    }
    // A killed one cannot clean up: the next start of any program does, if nobody writes there.
    let mut child = start(&sandbox, line);
    wait_for("unfinished copy", || partial_files(&sandbox) == 1);
    sandbox.infer("generate --prompt x --max-new-tokens 1").succeeds();
    assert!(partial_files(&sandbox) == 1 || child.try_wait().unwrap().is_some(), "it is still written");
    signal(&child, "-KILL");
    end(&mut child);
    if partial_files(&sandbox) == 1 {
        sandbox.infer("generate --prompt x --max-new-tokens 1").succeeds();
    }
    assert_eq!(partial_files(&sandbox), 0);
}

#[test]
fn what_a_killed_run_left_in_its_folder_goes_with_the_next_start() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 2").succeeds();
    let leftovers = ["run/.engraft-a.tmp", "run/saves/.engraft-b.tmp", "run/adapter/.engraft-c.tmp"];
    leftovers.iter().for_each(|name| drop(sandbox.write(name, "x")));
    let mine = sandbox.write("run/adapter/mine.tmp", "mine");
    sandbox.engraft("train --resume --output run --json").succeeds();
    assert!(leftovers.iter().all(|name| !sandbox.path(name).exists()) && mine.exists());
}
