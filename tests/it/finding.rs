//! Finding one's way: run folders as adapters, the base of an adapter, names from other programs, help.

use std::{fs, path::Path};

use crate::cli_support::{SMALL, Sandbox};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/bases/tiny");

/// A sandbox with the run `run` on the embedded base and the run `tiny` on another base.
fn two_runs() -> Sandbox {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 2").succeeds();
    sandbox.write("ids.jsonl", "{\"input_ids\":[1,2,3,4],\"labels\":[1,2,3,4]}\n".repeat(8));
    let line =
        format!("train --base {TINY} --data ids.jsonl --steps 2 --batch 2 --output tiny --json --threads 1");
    sandbox.engraft(&line).succeeds();
    sandbox
}

#[test]
fn a_run_folder_is_its_adapter_and_an_adapter_names_its_base() {
    let sandbox = two_runs();
    let of = |adapter: &str| {
        let line = format!("generate {adapter} --input-ids 1,2,3 --max-new-tokens 5 --temperature 0 --json");
        sandbox.infer(&line).succeeds().events()[0]["token_ids"].clone()
    };
    let tiny = of(&format!("--base {TINY} --adapter tiny/adapter"));
    assert_eq!(of("--adapter tiny"), tiny);
    assert_eq!(of("--adapter tiny/adapter"), tiny);
    assert_eq!(of("--adapter run"), of("--base embedded --adapter run/adapter"));
    let eval = |words: &str| sandbox.engraft(&format!("eval --json {words}")).succeeds().events();
    assert_eq!(
        eval("--data ids.jsonl --adapter tiny"),
        eval(&format!("--data ids.jsonl --base {TINY} --adapter tiny/adapter"))
    );
    // A new run takes both from an adapter to start from.
    let line = "train --init-adapter tiny --data ids.jsonl --steps 1 --batch 2 --output next --json";
    sandbox.engraft(line).succeeds();
    let config = fs::read_to_string(sandbox.path("next/config.toml")).unwrap();
    assert!(config.contains("tests/golden/bases/tiny") && config.contains("tiny/adapter"), "{config}");
}

#[test]
fn adapters_of_two_bases_and_of_one_that_is_not_here_are_refused() {
    let sandbox = two_runs();
    sandbox.infer("generate --adapter run --adapter tiny --input-ids 1").refused(&[
        "--adapter run, --adapter tiny",
        "different bases, embedded and",
        "adapters of one base",
    ]);
    let config = sandbox.path("tiny/adapter/adapter_config.json");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace(TINY, "/nowhere/at/all")).unwrap();
    sandbox.engraft("eval --adapter tiny --data ids.jsonl").refused(&[
        "--adapter tiny",
        "/nowhere/at/all, which is not here",
        "--base",
    ]);
    fs::write(&config, text.replace(&format!("\"{TINY}\""), "null")).unwrap();
    sandbox.infer("generate --adapter tiny --input-ids 1").refused(&[
        "--adapter tiny",
        "names no base",
        "--base",
    ]);
    fs::remove_dir_all(sandbox.path("run/adapter")).unwrap();
    sandbox
        .infer("generate --adapter run --prompt x")
        .refused(&["run: is a run that has written no adapter yet", "engraft train --resume --output run"]);
}

#[test]
fn names_of_other_programs_lead_to_the_name_here() {
    let sandbox = Sandbox::new();
    for (option, here) in [
        ("--max-steps 3", "--steps"),
        ("--num_train_epochs 3", "--epochs"),
        ("--learning_rate 0.1", "--lr"),
        ("--per_device_train_batch_size 4", "--batch"),
        ("--gradient-accumulation-steps 4", "--micro-batch"),
        ("--block-size 128", "--seq-len"),
        ("--max-length 128", "--seq-len"),
        ("--lora-r 8", "--rank"),
        ("--lora_alpha 16", "--alpha"),
        ("--model gpt2", "--base"),
        ("--model-name-or-path gpt2", "--base"),
        ("--warmup-steps 10", "--warmup"),
        ("--fp16", "--precision"),
        ("--bf16", "--precision"),
        ("--output_dir x", "--output"),
    ] {
        let name = option.split(' ').next().unwrap().replace('_', "-");
        let parts = [&format!("error: {name}: there is no such option; it is called {here} here")[..]];
        sandbox.engraft(&format!("train {option}")).refused(&parts);
    }
    sandbox
        .engraft("train --report-to tensorboard")
        .refused(&["every run has metrics.jsonl, TensorBoard's files and report.html"]);
    sandbox.infer("generate --prompt x --max-length 5").refused(&["it is called --max-new-tokens here"]);
    sandbox
        .infer("generate --prompt x --num_return_sequences 5")
        .refused(&["it is called --num-samples here"]);
    sandbox
        .engraft("generate")
        .refused(&["generate: there is no such command; it is engraft-infer generate"]);
    sandbox.infer("train").refused(&["train: there is no such command; it is engraft train"]);
}

#[test]
fn underscores_are_understood() {
    let sandbox = Sandbox::new();
    sandbox.write("my.toml", "save_every = 1\nlora_dropout = 0.25\n");
    sandbox.train("--steps 1 --config my.toml --weight_decay=0.125 --log_every 7").succeeds();
    let config = fs::read_to_string(sandbox.path("run/config.toml")).unwrap();
    for line in ["save-every = 1", "lora-dropout = 0.25", "weight-decay = 0.125", "log-every = 7"] {
        assert!(config.contains(line), "{config}");
    }
}

#[test]
fn a_config_file_is_corrected_by_line() {
    let sandbox = Sandbox::new();
    for (text, sentence) in [
        ("seed = 1\nmax_steps = 3", "x.toml, line 2: unknown key \"max_steps\"; it is called \"steps\" here"),
        ("rank = \"8\"", "x.toml, line 1: `rank = \"8\"`: give a whole number from 1"),
        ("\nlr = -1", "x.toml, line 2: lr = -1: is no finite number above 0"),
        (
            "[train]\nlr = 1",
            "x.toml, line 1: begins the section \"train\"; write all options without sections",
        ),
    ] {
        sandbox.write("x.toml", text);
        sandbox.engraft("train --config x.toml").refused(&[sentence]);
    }
}

#[test]
fn quiet_says_nothing_and_verbose_says_more() {
    let sandbox = Sandbox::new();
    let line = SMALL.replace(" --json", "");
    let run = |words: &str| sandbox.engraft(&format!("{line} --steps 1 {words}")).succeeds();
    assert_ne!(run("--output normal").stderr(), "");
    let quiet = run("-q --output quiet");
    assert_eq!(quiet.stderr(), "");
    assert!(quiet.stdout().contains("adapter: quiet/adapter"), "{}", quiet.stdout());
    // Errors are said in any case.
    sandbox.engraft("train -q --rank 0").refused(&["--rank 0"]);
    let generate = "generate --adapter normal --prompt x --max-new-tokens 1";
    assert_eq!(sandbox.infer(generate).succeeds().stderr(), "");
    let verbose = sandbox.infer(&format!("-v {generate}")).succeeds().stderr();
    assert!(verbose.contains("normal/adapter"), "{verbose}");
}

#[test]
fn short_help_is_short_and_switches_list_no_values() {
    let sandbox = Sandbox::new();
    let (short, long) = (
        sandbox.engraft("train -h").succeeds().stdout(),
        sandbox.engraft("train --help").succeeds().stdout(),
    );
    for basic in ["--data", "--base", "--rank", "--steps", "--lr", "--output", "--resume"] {
        assert!(
            short.contains(&format!("{basic} ")) || short.contains(&format!("{basic}[")),
            "{basic}: {short}"
        );
    }
    assert!(!short.contains("--label-smoothing") && long.contains("--label-smoothing"), "{short}");
    assert!(
        short.lines().count() * 3 < long.lines().count(),
        "{} {}",
        short.lines().count(),
        long.lines().count()
    );
    for program in
        [sandbox.infer("generate --help"), sandbox.infer("generate -h"), sandbox.engraft("eval --help")]
    {
        let text = program.succeeds().stdout();
        assert!(!text.contains("possible values: true") && !text.contains("- true"), "{text}");
    }
    assert!(!short.contains("true, false") && !long.contains("true, false"));
}

#[test]
fn shells_complete_and_man_pages_are_written() {
    let sandbox = Sandbox::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = sandbox.engraft(&format!("completions {shell}")).succeeds().stdout();
        assert!(script.contains("lora-dropout") && script.contains("inspect"), "{shell}");
        let script = sandbox.infer(&format!("completions {shell}")).succeeds().stdout();
        assert!(script.contains("max-new-tokens"), "{shell}");
    }
    sandbox.engraft("completions ksh").refused(&["ksh", "give bash"]);
    assert!(sandbox.engraft("man").succeeds().stdout().contains(".TH engraft 1"));
    sandbox.engraft("man pages").succeeds();
    sandbox.infer("man pages").succeeds();
    for page in ["engraft.1", "engraft-train.1", "engraft-infer.1", "engraft-infer-generate.1"] {
        assert!(sandbox.path("pages").join(page).is_file(), "{page}");
    }
    let train = fs::read_to_string(sandbox.path("pages/engraft-train.1")).unwrap();
    assert!(train.contains("lora\\-dropout") && train.contains("default: 0.0005"), "{train}");
}

#[test]
fn a_card_tells_the_run_and_no_path() {
    let sandbox = two_runs();
    let card = |run: &str| fs::read_to_string(sandbox.path(run).join("adapter/README.md")).unwrap();
    let text = card("run");
    for part in [
        "---\nlibrary_name: peft\npipeline_tag: text-generation\ntags:\n- engraft\n- lora\n- transformers\n---\n",
        "# lora adapter for the embedded base of engraft",
        "| fingerprint of the base | engraft1:blake3:",
        "| method | lora, rank 3, alpha 5, scale alpha / rank |",
        "| data | data.jsonl: 12 records",
        "| steps | 2 of 2, 4 rows each",
        "| loss of the last step | ",
        "engraft-infer generate --adapter . --prompt",
        "PeftModel.from_pretrained(model, \".\")",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let private = [sandbox.path(""), Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()];
    for text in [&text, &card("tiny")] {
        for path in &private {
            assert!(!text.contains(path.to_str().unwrap().trim_end_matches('/')), "{text}");
        }
    }
    assert!(card("tiny").contains("tiny (a folder)") && card("tiny").contains("--base BASE"));
    sandbox.engraft(&format!("{SMALL} --steps 2 --output evaluated --eval-fraction 0.3")).succeeds();
    let evaluated = card("evaluated");
    assert!(
        evaluated.contains("| evaluation loss before | ") && evaluated.contains("| evaluation loss | "),
        "{evaluated}"
    );
    // A card that its user has made their own is kept.
    fs::write(sandbox.path("run/adapter/README.md"), "mine").unwrap();
    sandbox.train("--steps 4 --resume").succeeds();
    assert_eq!(card("run"), "mine");
}
