//! Runs on a machine that has less memory than it said.

use std::{cell::Cell, sync::atomic::AtomicBool};

use super::*;
use crate::{
    embedded,
    model::BaseSource,
    observe::machine::Machine,
    optim::{
        AdamWOptions,
        schedule::{Decay, Schedule},
    },
    plan::budget::Limit,
    train::{AdapterOptions, Constraints, DataSource, Length, PrefixStart, PromptStart, Warmup},
};

thread_local! {
    /// Free bytes, as the system says from the next question on.
    static FREE: Cell<Option<u64>> = const { Cell::new(None) };
    /// The answer to one question before that.
    static ONCE: Cell<Option<u64>> = const { Cell::new(None) };
    /// Questions until nothing is free.
    static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
    /// Memory that the process gives back while it asks.
    static BALLAST: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

fn free() -> Option<u64> {
    drop(BALLAST.take());
    if let Some(once) = ONCE.take() {
        return Some(once);
    }
    match LEFT.get() {
        0 => Some(0),
        left => {
            LEFT.set(left - 1);
            FREE.get()
        }
    }
}

struct Events(Vec<String>);

impl Reporter for Events {
    fn event(&mut self, event: &Event<'_>) -> Result<()> {
        match event {
            Event::Note(note) => self.0.push((*note).to_owned()),
            Event::Plan(selection) => self.0.push(selection.chosen.plan.config.to_string()),
            Event::Step(step) => self.0.push(format!("{} {:?}", step.step, step.loss)),
            _ => {}
        }
        Ok(())
    }
}

fn options() -> RunOptions {
    RunOptions {
        adapter: AdapterOptions { kinds: Some(AdapterOptions::default_kinds()), ..Default::default() },
        init_adapter: None,
        allow_base_mismatch: false,
        prefix_start: PrefixStart::Random,
        prompt_start: PromptStart::Random,
        data: DataSource::Embedded,
        eval_data: Vec::new(),
        eval_fraction: None,
        read: Default::default(),
        seq_len: Some(64),
        pack: Some(true),
        line_by_line: false,
        train_on_prompt: false,
        shuffle: true,
        batch: 4,
        length: Length::Steps(4),
        schedule: Schedule { lr: 1e-3, min_lr: 0.0, decay: Decay::Linear },
        warmup: Warmup::Steps(0),
        adamw: AdamWOptions::default(),
        clip: 1.0,
        label_smoothing: 0.0,
        neftune: 0.0,
        constraints: Constraints::default(),
        memory: Limit::Bytes(1 << 40),
        memory_trace: None,
        free_memory: free,
        cache: None,
        seed: 0,
        save_every: 0,
        keep: 1,
        eval_every: 0,
        eval_max_rows: None,
        save_best: false,
        patience: None,
        sampling: None,
        resume: false,
        resume_from: None,
        identity: Default::default(),
        config_text: String::new(),
        machine: Machine { device: "cpu".into(), precision: "f32".into(), dispatch: "x".into() },
    }
}

fn train(options: &RunOptions, output: &Path) -> (Result<Finished>, Vec<String>) {
    let base = Arc::new(Base::load(&BaseSource::Embedded, "embedded", Path::new("")).unwrap());
    let tokenizer = Tokenizer::from_bytes(embedded::TOKENIZER).unwrap();
    let folder = RunFolder::look(output, options.resume).unwrap();
    let mut events = Events(Vec::new());
    let done = run(options, &base, Some(&tokenizer), folder, &mut events, &AtomicBool::new(false));
    (done, events.0)
}

fn adapter(output: &Path) -> Vec<u8> {
    std::fs::read(output.join("adapter/adapter_model.safetensors")).unwrap()
}

#[test]
fn before_the_first_step_the_next_smaller_plan_is_tried_once() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("run");
    FREE.set(Some(1 << 40));
    LEFT.set(usize::MAX);
    let (done, plenty) = train(&options(), &folder.path().join("plenty"));
    done.unwrap();
    // Less than the first plan, enough for the second.
    ONCE.set(Some(3 << 20));
    // What another part of the process gives back meanwhile makes no plan smaller.
    BALLAST.set(vec![1; 256 << 20]);
    let (done, smaller) = train(&options(), &folder.path().join("smaller"));
    done.unwrap();
    assert!(smaller[0] != plenty[0], "{smaller:?}");
    assert!(
        smaller.iter().any(|line| line.contains("3.00MiB are free") && line.contains("next smaller plan"))
    );

    FREE.set(Some(3 << 20));
    let (done, _) = train(&options(), &output);
    let error = done.unwrap_err();
    assert_eq!(error.exit_code(), 1, "{error}");
    assert!(matches!(error, Error::Memory(_)) && error.to_string().contains("3.00MiB are free"), "{error}");
    assert!(!output.exists(), "nothing is left half-written");
    assert!(!plenty.iter().any(|line| line.contains("smaller plan")), "{plenty:?}");
}

#[test]
fn when_memory_runs_short_the_run_is_saved_and_goes_on_later() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, cut) = (folder.path().join("whole"), folder.path().join("cut"));
    FREE.set(Some(1 << 40));
    LEFT.set(usize::MAX);
    let (done, steps) = train(&options(), &whole);
    done.unwrap();
    // One question for the plan, one before each step.
    LEFT.set(3);
    let (done, first) = train(&options(), &cut);
    let error = done.unwrap_err();
    assert!(matches!(error, Error::Memory(_)) && error.exit_code() == 1);
    let text = error.to_string();
    assert!(text.contains("saved after step 2") && text.contains("--resume --output"), "{text}");
    LEFT.set(usize::MAX);
    let (done, second) = train(&RunOptions { resume: true, ..options() }, &cut);
    done.unwrap();
    let losses = |events: &[String]| -> Vec<String> {
        events.iter().filter(|event| event.starts_with(char::is_numeric)).cloned().collect()
    };
    assert_eq!([losses(&first), losses(&second)].concat(), losses(&steps));
    assert_eq!(adapter(&cut), adapter(&whole));
}
