//! The record of a run: `metrics.jsonl`, JSON events, TensorBoard's event files, the report.

use std::{fs, os::unix::fs::symlink, path::Path};

use serde_json::Value;

use crate::{
    cli_support::{Finished, Sandbox},
    tfevents::{self, Event},
};

/// The lines of the run's `metrics.jsonl`; fails on one that is no JSON.
fn metrics(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert!(text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn of_kind(lines: &[Value], kind: &str) -> Vec<Value> {
    lines.iter().filter(|line| line["event"] == kind).cloned().collect()
}

fn numbers(lines: &[Value], key: &str) -> Vec<f64> {
    lines.iter().map(|line| line[key].as_f64().unwrap_or_else(|| panic!("no {key} in {line}"))).collect()
}

/// The run's event files in the order of their names.
fn event_files(run: &Path) -> Vec<Vec<Event>> {
    let entries = fs::read_dir(run).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.filter(|path| path.file_name().unwrap().to_string_lossy().contains("tfevents")).collect();
    files.sort();
    files.iter().map(|path| tfevents::read(&fs::read(path).unwrap())).collect()
}

/// (step, value) of a tag.
fn scalars(events: &[Event], tag: &str) -> Vec<(u64, f64)> {
    let values = |event: &Event| {
        let found = event.scalars.iter().find(|(own, _)| own == tag).map(|(_, value)| f64::from(*value));
        found.map(|value| (event.step, value))
    };
    events.iter().filter_map(values).collect()
}

const RUN: &str = "--steps 6 --eval-fraction 0.3 --eval-every 3 --save-every 2 --keep 9";

#[test]
fn every_step_and_evaluation_is_on_record() {
    let sandbox = Sandbox::new();
    let run = sandbox.train(RUN).succeeds();
    let lines = metrics(&sandbox.path("run"));
    let steps = of_kind(&lines, "step");
    assert_eq!(numbers(&steps, "step"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    for key in
        ["lr", "grad_norm", "tokens", "tokens_per_s", "seconds", "epoch", "elapsed", "remaining", "time"]
    {
        assert_eq!(numbers(&steps, key).len(), 6);
    }
    // What is printed is what is written down.
    for key in ["loss", "smoothed_loss", "lr", "grad_norm", "tokens", "tokens_per_s", "seconds", "epoch"] {
        assert_eq!(numbers(&steps, key), numbers(&run.events_of("step"), key), "{key}");
        let losses = ["loss", "tokens", "seconds", "epoch"].contains(&key);
        if losses {
            let (written, printed) = (of_kind(&lines, "eval"), run.events_of("eval"));
            assert_eq!(numbers(&written, key), numbers(&printed, key), "{key}");
        }
    }
    let (mut sum, mut weight) = (0.0, 0.0);
    for step in &steps {
        sum = 0.9 * sum + 0.1 * step["loss"].as_f64().unwrap();
        weight = 0.9 * weight + 0.1;
        assert!((step["smoothed_loss"].as_f64().unwrap() - sum / weight).abs() < 1e-12, "{step}");
    }
    // 8 or 9 of 12 rows are trained on, 4 a step.
    let epoch = steps[5]["epoch"].as_f64().unwrap();
    assert!((epoch - 24.0 / 8.0).abs() < 1e-6 || (epoch - 24.0 / 9.0).abs() < 1e-6, "{epoch}");
    assert!(numbers(&steps, "elapsed").is_sorted_by(|a, b| a < b));
    assert!(numbers(&lines, "time").is_sorted());
    if cfg!(target_os = "linux") {
        assert!(numbers(&steps, "memory_bytes").iter().all(|&bytes| bytes > 1e6));
    }
    let kinds: Vec<_> = lines.iter().map(|line| line["event"].as_str().unwrap()).collect();
    assert_eq!(kinds[..3], ["start", "data", "plan"]);
    assert_eq!(numbers(&of_kind(&lines, "save"), "step"), [2.0, 4.0, 6.0]);
    assert_eq!(kinds[kinds.len() - 1], "done");
}

#[test]
fn every_json_event_has_a_time() {
    let sandbox = Sandbox::new();
    let run = sandbox.train("--steps 2 --save-every 1 --eval-fraction 0.3").succeeds();
    let events = run.events();
    assert!(numbers(&events, "time").is_sorted() && events[0]["time"].as_f64().unwrap() > 1.7e9);
    let data = run.events_of("data").remove(0);
    assert_eq!((data["records"].as_u64(), data["eval_rows"].as_u64()), (Some(12), Some(4)), "{data}");
    let saves = run.events_of("save");
    assert_eq!(numbers(&saves, "step"), [1.0, 2.0]);
    assert!(sandbox.path(saves[1]["path"].as_str().unwrap()).is_file());
    // An error is an event and, as ever, a sentence.
    let wrong = sandbox.train("--steps 2 --lr -1");
    let text = wrong.stderr();
    let error = wrong.events().remove(0);
    assert_eq!((error["event"].as_str(), error["exit_code"].as_u64()), (Some("error"), Some(2)), "{error}");
    assert!(text.contains(error["message"].as_str().unwrap()) && text.starts_with("error: "), "{text}");
}

#[test]
fn samples_of_the_end_are_on_record() {
    let sandbox = Sandbox::new();
    sandbox.engraft("train --batch 4 --steps 2 --threads 1 --eval-max-rows 4 --output run").succeeds();
    let run = sandbox.path("run");
    let samples = of_kind(&metrics(&run), "sample");
    assert_eq!(numbers(&samples, "step"), [0.0, 2.0]);
    // Evaluations before and after, two steps, and the samples at the end of the same file.
    let files = event_files(&run);
    assert_eq!(
        (files.len(), files[0].iter().map(|event| event.step).collect::<Vec<_>>()),
        (1, vec![0, 0, 1, 2, 2, 0, 2])
    );
    let mut entries = fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().path());
    let file = entries.find(|path| path.to_string_lossy().contains("events.out.tfevents")).unwrap();
    let bytes = fs::read(file).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    for sample in samples {
        let said = format!("{}{}", sample["prompt"].as_str().unwrap(), sample["text"].as_str().unwrap());
        let first = said.lines().next().unwrap();
        assert!(!first.is_empty() && text.contains(&format!("    {first}")), "{first:?}");
    }
    // The last step has a sample already, which the report shows once.
    sandbox.engraft("train --batch 4 --steps 2 --threads 1 --sample-every 1 --output again").succeeds();
    let samples = of_kind(&metrics(&sandbox.path("again")), "sample");
    assert_eq!(numbers(&samples, "step"), [0.0, 1.0, 2.0, 0.0, 2.0]);
    let report = fs::read_to_string(sandbox.path("again/report.html")).unwrap();
    let samples = report.split("<h2>Samples</h2>").nth(1).unwrap().split("</table>").next().unwrap();
    assert_eq!(samples.matches("<td class=\"\">2</td>").count(), 1, "{samples}");
}

#[test]
fn a_resumed_run_goes_on_in_the_same_record() {
    let whole = Sandbox::new();
    whole.train(RUN).succeeds();
    let expected = of_kind(&metrics(&whole.path("run")), "step");
    // As if it had been killed after step 6, in the middle of a line, and its newest saves were lost.
    let sandbox = Sandbox::new();
    sandbox.train(RUN).succeeds();
    let run = sandbox.path("run");
    for step in [4, 6] {
        fs::remove_file(run.join(format!("saves/step-{step:08}.safetensors"))).unwrap();
    }
    let mut text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.push_str("{\"event\":\"step\",\"st");
    fs::write(run.join("metrics.jsonl"), text).unwrap();
    let before = metrics_until(&run, 2);
    sandbox.engraft("train --resume --output run --json").succeeds();
    let lines = metrics(&run);
    assert_eq!(lines[..before.len()], before);
    let steps = of_kind(&lines, "step");
    for key in ["step", "loss", "smoothed_loss", "lr", "grad_norm", "tokens", "epoch"] {
        assert_eq!(numbers(&steps, key), numbers(&expected, key), "{key}");
    }
    assert!(numbers(&steps, "elapsed").is_sorted_by(|a, b| a < b), "the clock goes on");
    assert_eq!(numbers(&of_kind(&lines, "start"), "step"), [0.0, 2.0]);

    let files = event_files(&run);
    assert_eq!(files.len(), 2);
    assert!(files[0].iter().all(|event| !event.session_start));
    assert_eq!(files[1][0].version, "brain.Event:2");
    assert_eq!((files[1][1].session_start, files[1][1].step), (true, 3));
    let steps = |events: &[Event]| scalars(events, "train/loss").iter().map(|it| it.0).collect::<Vec<_>>();
    assert_eq!((steps(&files[0]), steps(&files[1])), ((1..=6).collect(), (3..=6).collect()));
}

/// The lines up to the last one that says `step` or less.
fn metrics_until(run: &Path, step: u64) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map_while(|line| serde_json::from_str::<Value>(line).ok());
    lines.take_while(|line| line["step"].as_u64().is_none_or(|at| at <= step)).collect()
}

#[test]
fn tensorboards_files_hold_the_numbers_of_the_record() {
    let sandbox = Sandbox::new();
    sandbox.train(RUN).succeeds();
    let run = sandbox.path("run");
    let lines = metrics(&run);
    let files = event_files(&run);
    assert_eq!((files.len(), files[0][0].version.as_str()), (1, "brain.Event:2"));
    for (tag, kind, key) in [
        ("train/loss", "step", "loss"),
        ("train/learning_rate", "step", "lr"),
        ("train/grad_norm", "step", "grad_norm"),
        ("train/tokens_per_second", "step", "tokens_per_s"),
        ("eval/loss", "eval", "loss"),
        ("eval/perplexity", "eval", "perplexity"),
    ] {
        let of_tag = scalars(&files[0], tag);
        let expected = of_kind(&lines, kind);
        let expected: Vec<(u64, f64)> = expected
            .iter()
            .map(|line| (line["step"].as_u64().unwrap(), line[key].as_f64().unwrap()))
            .collect();
        assert_eq!(of_tag.len(), expected.len(), "{tag}");
        for (found, expected) in of_tag.iter().zip(&expected) {
            assert_eq!(found.0, expected.0, "{tag}");
            assert_eq!(found.1 as f32, expected.1 as f32, "{tag}");
        }
    }
}

/// `run` with its record replaced by something that cannot be written.
fn resumed_with(make: impl Fn(&Path)) -> (Sandbox, Finished) {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 2").succeeds();
    let path = sandbox.path("run/metrics.jsonl");
    fs::remove_file(&path).unwrap();
    make(&path);
    let again = sandbox.engraft("train --resume --output run --steps 4 --json").succeeds();
    (sandbox, again)
}

#[test]
fn a_record_that_cannot_be_written_loses_no_training() {
    let makes: [fn(&Path); 2] =
        [|path| fs::create_dir(path).unwrap(), |path| symlink("/dev/full", path).unwrap()];
    for make in makes {
        let (sandbox, again) = resumed_with(make);
        assert_eq!(again.events_of("step").len(), 2);
        let notes = again.stderr();
        assert_eq!(notes.matches("metrics.jsonl: cannot be written").count(), 1, "{notes}");
        assert!(sandbox.path("run/saves/step-00000004.safetensors").is_file());
    }
}

#[test]
fn a_run_without_a_record_gets_one_when_it_goes_on() {
    let (sandbox, _) = resumed_with(|_| ());
    let steps = of_kind(&metrics(&sandbox.path("run")), "step");
    assert_eq!(numbers(&steps, "step"), [3.0, 4.0]);
}

#[test]
fn the_report_is_one_page_that_loads_nothing() {
    let sandbox = Sandbox::new();
    let run = sandbox.train("--json=false --steps 4 --eval-data data.jsonl").succeeds();
    assert!(run.stderr().contains("report: run/report.html"), "{}", run.stderr());
    let page = fs::read_to_string(sandbox.path("run/report.html")).unwrap();
    for part in [
        "Course of the run",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Memory",
        "Evaluation",
        "Samples",
        "How to use the adapter",
        "engraft-infer generate --adapter run/adapter",
        "PeftModel",
        "Data",
        "12 records",
        "Configuration",
        "attn.c_attn",
        "Options",
        "<th>seed</th>",
        "base alone",
        "prefers-color-scheme: dark",
    ] {
        assert!(page.contains(part), "no {part:?}");
    }
    assert_eq!(page.matches("<svg").count(), 5);
    // A name space is no address that is loaded.
    let addresses = page.replace("http://www.w3.org/2000/svg", "");
    for loads in ["<script", "http:", "https:", " src=", "@import", "url(", "<link"] {
        assert!(!addresses.contains(loads), "{loads}");
    }
    // Under --json it is written, too.
    sandbox.engraft(&format!("{} --output other --steps 2", crate::cli_support::SMALL)).succeeds();
    assert!(sandbox.path("other/report.html").is_file());
}

#[test]
fn runs_are_laid_side_by_side() {
    let sandbox = Sandbox::new();
    for (name, lr) in [("a", "0.01"), ("b", "0.02")] {
        let line =
            format!("{} --output {name} --steps 3 --lr {lr} --eval-fraction 0.3", crate::cli_support::SMALL);
        sandbox.engraft(&line).succeeds();
    }
    let table = sandbox.engraft("report a b").succeeds().stdout();
    for part in ["run", "eval loss", "finished", "3 of 3", "lr: 0.01 | 0.02", "page: report.html"] {
        assert!(table.contains(part), "no {part:?} in {table}");
    }
    let page = fs::read_to_string(sandbox.path("report.html")).unwrap();
    assert!(page.contains("2 runs") && page.contains("Options that differ") && page.contains("<svg"));
    let runs = sandbox.engraft("report a b --json").succeeds().events();
    let last = of_kind(&metrics(&sandbox.path("b")), "eval").pop().unwrap();
    assert_eq!((&runs[1]["run"], &runs[1]["eval_loss"]), (&Value::from("b"), &last["loss"]));
    assert_eq!((runs[0]["state"].as_str(), runs[0]["step"].as_u64()), (Some("finished"), Some(3)));
    // A single run is written where its own report is, and again without harm.
    sandbox.engraft("report a").succeeds();
    // Half a line of a run that is writing, and one that ended without a word.
    let path = sandbox.path("a/metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let done = text.find("{\"time\":").unwrap();
    assert_eq!(done, 0, "the time comes first");
    let until = text.rfind("\n{").unwrap();
    fs::write(&path, &text[..until + 20]).unwrap();
    assert!(sandbox.engraft("report a").succeeds().stdout().contains("running"));

    sandbox.engraft("report nowhere").refused(&["nowhere", "metrics.jsonl"]);
    sandbox.write("mine.html", "my own page");
    sandbox.engraft("report a b --output mine.html").refused(&["mine.html", "--output"]);
    assert_eq!(fs::read_to_string(sandbox.path("mine.html")).unwrap(), "my own page");
}

#[test]
fn tensorboards_own_file_is_read_by_the_same_reader() {
    let recorded = include_bytes!("../golden/tensorboard/events");
    let events = tfevents::read(recorded);
    assert_eq!(events.len(), 4);
    assert_eq!((events[0].version.as_str(), events[0].time), ("brain.Event:2", 1_763_881_920.25));
    assert_eq!((events[1].session_start, events[1].step), (true, 3));
    assert_eq!(scalars(&events, "train/loss"), [(3, 2.5)]);
    assert_eq!(events[3].step, 300);
    // A bit that is wrong anywhere is found.
    for at in 0..recorded.len() {
        let mut damaged = recorded.to_vec();
        damaged[at] ^= 1;
        assert!(std::panic::catch_unwind(|| tfevents::read(&damaged)).is_err(), "byte {at}");
    }
}
