//! Prompt tuning through the programs: what it starts from, what it predicts, training under every policy, resuming,
//! generating, folders beside other methods, refusals; and what P-tuning made.

use std::path::Path;

use candle_core::{DType, Device};
use engraft::data::Tokenizer;

use crate::cli_support::{Finished, Sandbox, files_below, learned_and_resumed, losses, names};

/// A run that takes no time, of 20 steps.
const RUN: &str = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --threads 1 --lr 0.1 --steps 20 \
                   --save-every 10 --prompt-len 5 --json";

fn train(sandbox: &Sandbox, output: &str, more: &str) -> Finished {
    let micro = if more.contains("--micro-batch") { "" } else { "--micro-batch 2" };
    sandbox.engraft(&format!("{RUN} {micro} --output {output} {more}")).succeeds()
}

/// [`train`] with prompt tuning alone.
fn tune(sandbox: &Sandbox, output: &str, more: &str) -> Finished {
    train(sandbox, output, &format!("--method prompt_tuning {more}"))
}

/// Loss of the embedded base on a file and number of tokens that it is the mean of, with adapter and options.
fn evaluated(sandbox: &Sandbox, data: &str, more: &str) -> (f64, u64) {
    let line = format!("eval --base embedded --data {data} --seq-len 24 --json {more}");
    let found = sandbox.engraft(&line).succeeds().events().remove(0);
    (found["loss"].as_f64().unwrap(), found["tokens"].as_u64().unwrap())
}

fn generated(sandbox: &Sandbox, adapters: &str) -> String {
    let line = format!("generate --base embedded --prompt row --max-new-tokens 8 --temperature 0 {adapters}");
    sandbox.infer(&line).succeeds().stdout()
}

/// Values of the one tensor of a folder, flattened.
fn embeddings(folder: &Path, tensor: &str) -> Vec<f32> {
    let file = candle_core::safetensors::load(folder, &Device::Cpu).unwrap();
    file[tensor].to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn virtual_tokens_are_trained_resumed_and_used() {
    let sandbox = Sandbox::new();
    let run = tune(&sandbox, "run", "");
    learned_and_resumed(&sandbox, &run);

    let alone = evaluated(&sandbox, "data.jsonl", "");
    let with = evaluated(&sandbox, "data.jsonl", "--adapter run");
    assert!(with.0 < 0.8 * alone.0 && with.1 == alone.1, "{with:?} {alone:?}");
    assert_ne!(generated(&sandbox, "--adapter run"), generated(&sandbox, ""));
    let look = sandbox.engraft("inspect run/adapter --json").succeeds().events().remove(0);
    assert_eq!(look["adapters"][0]["kind"], "prompt_tuning");
    assert_eq!(look["adapters"][0]["prompt_tuning"]["length"], 5);
    let card = std::fs::read_to_string(sandbox.path("run/adapter/README.md")).unwrap();
    assert!(card.contains("| method | prompt_tuning, 5 virtual tokens |"), "{card}");
}

/// A rate at which nothing moves, so that the adapter holds what it started from.
#[test]
fn it_starts_from_text_the_vocabulary_or_random_numbers() {
    let sandbox = Sandbox::new();
    let started = |output: &str, more: &str| {
        tune(&sandbox, output, &format!("--steps 1 --lr 1e-30 {more}"));
        embeddings(&sandbox.path(output).join("adapter/adapter_model.safetensors"), "prompt_embeddings")
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/base");
    let wte = embeddings(&root.join("model.safetensors"), "wte.weight");
    let tokenizer = Tokenizer::from_bytes(&std::fs::read(root.join("tokenizer.json")).unwrap()).unwrap();
    let width = started("zero", "").len() / 5;
    let rows = |ids: &[u32]| -> Vec<f32> {
        ids.iter().flat_map(|&id| wte[id as usize * width..][..width].to_vec()).collect()
    };
    let repeated =
        |text: &str| -> Vec<u32> { tokenizer.encode(text).unwrap().into_iter().cycle().take(5).collect() };
    // Shorter and longer than five tokens, and without a text the first row.
    assert!(tokenizer.encode("noodle").unwrap().len() < 5);
    assert!(started("short", "--prompt-text noodle") == rows(&repeated("noodle")), "not the text");
    let long = "a_longer_text_without_a_space";
    let found = started("long", &format!("--prompt-init text --prompt-text {long}"));
    assert!(found == rows(&repeated(long)), "not the beginning of the text");
    let pieces = ["row 0:", " ab "].map(|text| tokenizer.encode(text).unwrap()).concat();
    let first: Vec<u32> = pieces.into_iter().cycle().take(5).collect();
    assert!(started("row", "--no-shuffle") == rows(&first), "not the first row");
    // Rows of the table, which differ, and other ones with another seed.
    let vocab = started("vocab", "--prompt-init vocab --seed 3");
    for row in vocab.chunks(width) {
        assert!(wte.chunks(width).any(|token| token == row), "no row of the embedding");
    }
    assert!(vocab[..width] != vocab[width..2 * width]);
    assert!(started("other", "--prompt-init vocab --seed 4") != vocab, "not other tokens");
    let random = started("random", "--prompt-init random");
    let variance = random.iter().map(|x| x * x).sum::<f32>() / random.len() as f32;
    assert!((variance - 1.0).abs() < 0.2, "{variance}");
}

/// The last virtual token predicts the first token where that is supervised, as in PEFT, packed or not, in training
/// and evaluation; a token is never a target twice.
#[test]
fn the_first_token_of_a_text_is_a_target() {
    let sandbox = Sandbox::new();
    tune(&sandbox, "run", "--steps 1");
    let ids = |first: i32| format!("{{\"input_ids\": [7, 8, 9], \"labels\": [{first}, 8, -100]}}\n");
    sandbox.write("texts.jsonl", "{\"text\": \"hello\"}\n{\"text\": \"row 7: ab ab\"}\n");
    sandbox.write("ids.jsonl", ids(7) + &ids(-100));
    sandbox.write(
        "long.txt",
        "row 0: ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab ab",
    );
    for (data, more) in [("texts.jsonl", 2), ("ids.jsonl", 1), ("long.txt", 1), ("data.jsonl", 0)] {
        let alone = evaluated(&sandbox, data, "--no-pack").1;
        let whole = evaluated(&sandbox, data, "--no-pack --adapter run");
        assert_eq!(whole.1, alone + more, "{data}");
        let packed = evaluated(&sandbox, data, "--pack --adapter run");
        assert!(
            packed.1 == whole.1 && (packed.0 / whole.0 - 1.0).abs() < 1e-6,
            "{data}: {packed:?} {whole:?}"
        );
        let line = RUN.replace("data.jsonl", data);
        let run = sandbox.engraft(&format!("{line} --method prompt_tuning --output run-{data}")).succeeds();
        assert_eq!(run.events_of("data")[0]["supervised"], alone + more, "{data}");
    }
}

#[test]
fn policies_change_no_bit_and_other_numbers_little() {
    let sandbox = Sandbox::new();
    let plain = losses(&tune(&sandbox, "plain", "--recompute none"));
    let expected = files_below(&sandbox.path("plain/adapter"));
    for (index, more) in [
        "--recompute all",
        "--stream-base on",
        "--offload-inputs on --recompute every:2",
        "--offload-optimizer on",
        "--threads 2",
    ]
    .into_iter()
    .enumerate()
    {
        let output = format!("run{index}");
        assert_eq!(losses(&tune(&sandbox, &output, more)), plain, "{more}");
        assert!(files_below(&sandbox.path(&output).join("adapter")) == expected, "{more}");
    }
    // The largest distance of two curves, in parts of the first loss.
    let distance = |found: &[f64], plain: &[f64]| {
        assert!(found != plain);
        found.iter().zip(plain).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / plain[0]
    };
    for (output, more, bound) in [
        ("four", "--micro-batch 4", 1e-5),
        ("one", "--micro-batch 1 --head-rows 3", 1e-5),
        ("q8", "--base-dtype q8", 2e-2),
    ] {
        let worst = distance(&losses(&tune(&sandbox, output, more)), &plain);
        assert!(worst < bound, "{more}: {worst}");
    }
    // Fewer values keep moments of 32 bits.
    let [plain, coded] = ["adamw", "adamw8bit"].map(|optimizer| {
        let line = RUN.replace("--prompt-len 5", "--prompt-len 40 --method prompt_tuning --micro-batch 2");
        losses(&sandbox.engraft(&format!("{line} --optimizer {optimizer} --output {optimizer}")).succeeds())
    });
    let worst = distance(&coded, &plain);
    assert!(worst < 2e-2, "8-bit moments: {worst}");
}

#[test]
fn a_prompt_is_trained_further() {
    let sandbox = Sandbox::new();
    let first = tune(&sandbox, "run", "");
    let start = |output: &str, more: &str| {
        let line = RUN.replace("--prompt-len 5", more);
        sandbox.engraft(&format!("{line} --micro-batch 2 --output {output} --init-adapter run/adapter"))
    };
    assert!(losses(&start("again", "").succeeds())[0] < 0.8 * losses(&first)[0]);
    let config = |run: &str| std::fs::read(sandbox.path(run).join("adapter/adapter_config.json")).unwrap();
    assert_eq!(config("again"), config("run"));
    start("six", "--prompt-len 6").refused(&["--prompt-len 6 (the adapter has 5); leave these options out"]);
    start("vocab", "--prompt-init vocab").refused(&["--prompt-text: the prompt starts from --init-adapter"]);
}

#[test]
fn beside_other_methods_it_has_a_folder_of_its_own() {
    let sandbox = Sandbox::new();
    for method in ["lora", "ln_tuning", "lora+ln_tuning"] {
        let kinds = format!("{method}+prompt_tuning");
        let both = losses(&train(&sandbox, method, &format!("--method {kinds} --lr 0.02")));
        assert!(both[19] < 0.8 * both[0], "{method}: {both:?}");
        let mut folders = vec!["README.md", "prompt_tuning"];
        folders.extend(method.split('+'));
        folders.sort_unstable();
        assert_eq!(names(&sandbox.path(method).join("adapter")), folders);
        let line = format!("{} --init-adapter {method}", RUN.replace("--prompt-len 5", "--lr 0.02"));
        let again = sandbox.engraft(&format!("{line} --micro-batch 2 --output again-{method}")).succeeds();
        assert!(losses(&again)[0] < 0.8 * both[0], "{method}");
        let with = evaluated(&sandbox, "data.jsonl", &format!("--adapter {method}"));
        assert!(with.0 < 0.8 * evaluated(&sandbox, "data.jsonl", "").0);
        generated(&sandbox, &format!("--adapter {method}"));
        let card = std::fs::read_to_string(sandbox.path(method).join("adapter/README.md")).unwrap();
        assert!(card.contains("\"prompt_tuning\").eval()"), "{card}");
    }
}

#[test]
fn what_it_cannot_do_is_refused() {
    let sandbox = Sandbox::new();
    let run = |more: &str| sandbox.engraft(&format!("{RUN} --output run {more}"));
    run("--method lora").refused(&["--prompt-len: means nothing with --method lora"]);
    run("--method prefix+prompt_tuning")
        .refused(&["--method: a prefix and a prompt", "leave one of them out"]);
    run("--method prompt_tuning --prompt-len 256").refused(&["--prompt-len: 256 is not between 1 and 255"]);
    run("--method prompt_tuning --prompt-text=").refused(&["--prompt-text: there is no token in the text"]);
    run("--method prompt_tuning --prompt-init vocab --prompt-text x").refused(&["needs --prompt-init text"]);
    run("--method prompt_tuning --num-virtual-tokens 3").refused(&["--num-virtual-tokens", "--prompt-len"]);
    tune(&sandbox, "run", "");
    let lora = "--data data.jsonl --no-pack --seq-len 24 --batch 4 --steps 2 --rank 3";
    sandbox.engraft(&format!("train {lora} --output lora")).succeeds();
    let generate = |adapters: &str| {
        sandbox.infer(&format!("generate --prompt row --temperature 0 --max-new-tokens 2 {adapters}"))
    };
    generate("--adapter run=0.5").refused(&["a prompt of virtual tokens cannot be scaled"]);
    generate("--adapter run --adapter run/adapter")
        .refused(&["is the second one with a prompt of virtual tokens"]);
    sandbox
        .engraft(&format!("train {} --method prefix --output prefix", lora.replace("--rank 3", "")))
        .succeeds();
    generate("--adapter run --adapter prefix")
        .refused(&["--adapter prefix: a prefix and a prompt of virtual tokens are never trained together"]);
    // A prompt with LoRAs is allowed.
    generate("--adapter run --adapter lora=0.5").succeeds();
}

#[test]
fn what_p_tuning_made_is_used_and_trained_as_a_prompt() {
    let sandbox = Sandbox::new();
    let golden = |path: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(path);
    let (base, adapter) = (golden("bases/tiny"), golden("cases/p_tuning/adapter"));
    let (base, adapter) = (base.display(), adapter.display());
    let ids = "{\"input_ids\": [3, 1, 4, 1, 5, 9], \"labels\": [3, 1, 4, 1, 5, 9]}\n";
    sandbox.write("ids.jsonl", ids.repeat(4));
    let hint = "made by the encoder of P-tuning, which the files do not hold";
    let look = sandbox.engraft(&format!("inspect {adapter}")).succeeds().stdout();
    assert!(look.contains("prompt_tuning") && look.contains("length: 3") && look.contains(hint), "{look}");
    let eval = |with: &str| {
        sandbox.engraft(&format!("eval --base {base} --data ids.jsonl --no-pack --json {with}")).succeeds()
    };
    let (alone, with) = (eval(""), eval(&format!("--adapter {adapter}")));
    assert!(with.stderr().contains(hint), "{}", with.stderr());
    assert_eq!((&alone.events()[0]["tokens"], &with.events()[0]["tokens"]), (&20.into(), &24.into()));
    sandbox.write("prompts.jsonl", "{\"input_ids\": [3, 1, 4]}\n");
    let line =
        format!("generate --base {base} --adapter {adapter} --prompt-file prompts.jsonl --temperature 0");
    let text = sandbox.infer(&format!("{line} --max-new-tokens 4")).succeeds();
    assert_eq!(text.stdout().split(',').count(), 4, "{}", text.stdout());
    let line =
        format!("train --base {base} --init-adapter {adapter} --data ids.jsonl --no-pack --batch 4 --json");
    let run = sandbox.engraft(&format!("{line} --steps 5 --lr 0.1 --output run")).succeeds();
    let losses = losses(&run);
    assert!((losses[0] / with.events()[0]["loss"].as_f64().unwrap() - 1.0).abs() < 1e-5, "{losses:?}");
    assert!(losses[4] < losses[0], "{losses:?}");
    let config = std::fs::read_to_string(sandbox.path("run/adapter/adapter_config.json")).unwrap();
    assert!(config.contains("\"PROMPT_TUNING\""), "{config}");
}
