//! Options that make no sense are refused by name, with a remedy.

use super::*;
use crate::cli::train::layers::{join, with_defaults};
use crate::{cli::common::args::BaseArgs, model::Recompute, plan::budget::Limit};

fn machine() -> Machine {
    Machine { device: "cpu".into(), precision: "f32".into(), dispatch: "test".into() }
}

fn resolve(text: &str) -> Result<RunOptions> {
    let args = join(&[config_file::parse(text, "test.toml")?])?;
    run_options(&with_defaults(args), machine(), None)
}

#[test]
fn defaults_make_a_run() {
    let options = resolve("").unwrap();
    assert_eq!(options.data, DataSource::Embedded);
    assert_eq!((options.batch, options.constraints, options.shuffle), (8, Constraints::default(), true));
    assert_eq!(options.length, Length::FromData);
    assert_eq!(options.adapter.kinds, Some(AdapterOptions::default_kinds()));
    assert_eq!(options.adapter.spec(), AdapterOptions::default().spec());
}

#[test]
fn values_without_sense_are_refused_with_a_remedy() {
    for (text, start) in [
        ("lr = nan", "--lr NaN:"),
        ("lr = inf", "--lr inf:"),
        ("lr = 0.0", "--lr 0:"),
        ("lr = -1", "--lr -1:"),
        ("alpha = nan", "--alpha NaN:"),
        ("clip = -0.5", "--clip -0.5:"),
        ("weight-decay = nan", "--weight-decay NaN:"),
        ("label-smoothing = 1.0", "--label-smoothing 1:"),
        ("lora-dropout = 1.0", "--lora-dropout 1:"),
        ("warmup = 1.5", "--warmup 1.5:"),
        ("warmup = nan", "--warmup NaN:"),
        ("epochs = 0.0", "--epochs 0:"),
        ("epochs = 1e30", "--epochs 1000000000000000000000000000000: is out of range"),
        ("steps = 0", "--steps 0:"),
        ("batch = 0", "--batch 0:"),
        ("batch = 10000000", "--batch 10000000:"),
        (
            "batch = 6\nmicro-batch = 4",
            "--micro-batch 4: does not divide --batch 6; give a divisor such as 3",
        ),
        ("micro-batch = 0", "--micro-batch 0:"),
        ("rank = 0", "--rank 0:"),
        ("rank-pattern = ['h.0=1.5']", "--rank-pattern h.0=1.5:"),
        ("seq-len = 0", "--seq-len 0:"),
        ("keep = 0", "--keep 0:"),
        ("head-rows = 0", "--head-rows 0:"),
        ("eval-fraction = 1.0", "--eval-fraction 1:"),
        ("method = 'prefix'\nprefix-len = 0", "--prefix-len 0:"),
        ("revision = 'main'", "--revision:"),
    ] {
        let error = resolve(text).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{text}");
        let said = error.to_string();
        // A value of a file is named with its line: `test.toml, line 1: lr = NaN: ..`.
        let in_file = said.strip_prefix("test.toml, line ").and_then(|rest| rest.split_once(": "));
        let said = in_file.map_or(said.clone(), |(_, rest)| format!("--{}", rest.replacen(" = ", " ", 1)));
        assert!(said.starts_with(start), "{text}: {error}");
        assert!(error.to_string().contains("; give "), "{text}: {error}");
    }
}

#[test]
fn what_excludes_each_other_is_refused() {
    for (text, part) in [
        ("steps = 3\nepochs = 1.0", "--steps 3 and --epochs 1.0 exclude each other"),
        ("pack = true\nno-pack = true", "exclude each other"),
        ("eval-data = ['x']\neval-fraction = 0.1", "exclude each other"),
        (
            "prefix-len = 3",
            "--prefix-len: means nothing with --method lora; leave it out or give --method prefix or lora+prefix",
        ),
        (
            "method = 'prefix'\nrank = 3",
            "--rank: means nothing with --method prefix; leave it out or give --method lora",
        ),
        (
            "norms = 'ln_f'",
            "--norms: means nothing with --method lora; leave it out or give --method ln_tuning",
        ),
        ("method = 'prefix'\nprefix-init = 'zero'\nprefix-text = 'x'", "needs --prefix-init text"),
        ("method = 'prefix'\nprefix-projection = 8\nprefix-init = 'text'", "--prefix-projection:"),
        ("init-adapter = 'x'\nprefix-init = 'zero'", "starts from --init-adapter"),
        (
            "prompt-len = 3",
            "--prompt-len: means nothing with --method lora; leave it out or give --method prompt_tuning",
        ),
        (
            "method = 'prompt_tuning'\nprompt-init = 'vocab'\nprompt-text = 'x'",
            "--prompt-text: needs --prompt-init text",
        ),
        ("init-adapter = 'x'\nprompt-text = 'x'", "the prompt starts from --init-adapter"),
    ] {
        let error = resolve(text).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains(part), "{text}: {error}");
    }
}

#[test]
fn only_what_changes_results_is_part_of_the_identity() {
    let plain = resolve("").unwrap().identity;
    let free = "threads = 3\nlog-every = 1\nsave-every = 1\nkeep = 1\neval-every = 1\nrecompute = 'all'\n\
                memory = '4GiB'\nstream-base = 'on'\noffload-inputs = 'on'\noffload-optimizer = 'on'\n\
                memory-trace = 'x.json'\n\
                json = true\nsteps = 9\nmicro-batch = 8\noffline = true\nline-by-line = false\ndevice = 'cpu'";
    assert_eq!(resolve(free).unwrap().identity, plain);
    for changed in ["lr = 0.1", "seed = 1", "rank = 2", "no-shuffle = true", "pack = true", "clip = 0.0"] {
        assert_ne!(resolve(changed).unwrap().identity, plain, "{changed}");
    }
}

#[test]
fn a_projection_starts_from_random_numbers() {
    let options = resolve("method = 'prefix'\nprefix-projection = 8").unwrap();
    assert_eq!(options.prefix_start, PrefixStart::Random);
    let options = resolve("method = 'prompt_tuning'\nprompt-len = 3\nprompt-init = 'vocab'").unwrap();
    assert_eq!((options.prompt_start, options.adapter.prompt_length), (PromptStart::Vocab, Some(3)));
    let options = resolve("method = 'prompt_tuning'\nprompt-text = 'x'").unwrap();
    assert_eq!(options.prompt_start, PromptStart::Text(Some("x".into())));
    let options = resolve("method = 'prefix'\nprefix-text = 'x'").unwrap();
    assert_eq!(options.prefix_start, PrefixStart::Text(Some("x".into())));
}

#[test]
fn the_output_is_named_after_base_and_method() {
    let name = |base: &str| {
        let args = TrainArgs {
            base: BaseArgs { base: Some(base.to_owned()), ..BaseArgs::default() },
            method: Some("lora+prefix".parse().unwrap()),
            ..TrainArgs::default()
        };
        default_name(&args)
    };
    assert_eq!(name("openai-community/gpt2-xl"), "gpt2-xl-lora-prefix");
    assert_eq!(name("/some/my base/"), "my_base-lora-prefix");
    assert_eq!(name(".."), "base-lora-prefix");
}

#[test]
fn what_is_fixed_reaches_the_plan() {
    let options = resolve(
        "batch = 6\nmicro-batch = 3\nrecompute = 'linear'\nhead-rows = 7\nstream-base = 'on'\n\
         offload-optimizer = 'on'\noffload-inputs = 'off'\noptimizer = 'adamw8bit'\nmemory = '1.5GiB'",
    )
    .unwrap();
    let constraints = Constraints {
        micro_batch: Some(3),
        recompute: Some(Recompute::Linear),
        head_rows: Some(7),
        stream: Some(true),
        inputs: Some(false),
        moments: Some(true),
        optimizer: Some(OptimizerKind::AdamW8bit),
        activations: None,
        resumed: false,
    };
    assert_eq!((options.constraints, options.memory), (constraints, Limit::Bytes(1536 << 20)));
    let auto =
        "micro-batch = 'auto'\nrecompute = 'auto'\nhead-rows = 'auto'\nmemory = 'auto'\noptimizer = 'auto'";
    let options = resolve(auto).unwrap();
    assert_eq!((options.constraints, options.memory), (Constraints::NONE, Limit::Auto));
    // Without options only the optimizer is fixed.
    assert_eq!(resolve("").unwrap().constraints, Constraints::default());
    assert_eq!(Constraints::default().optimizer, Some(OptimizerKind::AdamW));
    for wrong in ["memory = '4 bananas'", "memory = '0'", "memory = '-1GiB'", "stream-base = 'maybe'"] {
        assert_eq!(resolve(wrong).unwrap_err().exit_code(), 2, "{wrong}");
    }
}
