//! Memory plans through the programs: plans without weights, refusals, planned against counted bytes,
//! and every saving together against none.

use engraft::device::cpu::bf16 as fast_bf16;
use serde_json::Value;

use crate::cli_support::{Finished, SMALL, Sandbox, counts_what_was_planned, names, planned_for};

fn only(finished: &Finished, kind: &str) -> Value {
    finished.events_of(kind).remove(0)
}

#[test]
fn a_plan_needs_neither_weights_nor_network_nor_device() {
    let sandbox = Sandbox::new();
    let line = "plan --base gpt2-xl --memory 12GiB --device cuda --json";
    let plan = only(&sandbox.engraft(line).succeeds(), "plan");
    let peak = plan["peak_bytes"].as_u64().unwrap();
    assert!(peak > 3 << 30 && peak <= 12 << 30, "{peak}");
    let rows = plan["rows"].as_array().unwrap();
    let base = planned_for(&plan, "base");
    // On a device a tensor begins at a multiple of 256 bytes: 128 more for each vector of 1600 or 4800 elements (seven a
    // block and the last norm's two). The embedding of 50257 x 1600 has 47 rows of zeros more, and c_attn and c_fc have
    // 16 rows more for a delta.
    let delta_rows = 48 * 16 * (4800 + 6400);
    assert_eq!(base, 2 * (1_557_611_200 + 47 * 1600 + delta_rows) + 128 * (7 * 48 + 2));
    for role in ["saved activations", "workspace", "trainables", "moments", "data", "program"] {
        assert!(rows.iter().any(|row| row["role"] == role), "no {role}");
    }
    let text = sandbox.engraft("plan --base openai-community/gpt2-medium --memory 2GiB").succeeds().stdout();
    assert!(text.contains("peak ") && text.contains("of 2.00GiB") && text.contains("--recompute"), "{text}");
    assert!(!names(sandbox.path("").as_path()).contains(&"runs".to_owned()), "planning leaves no run");
}

/// Times of a device that is not here: counted, and told only of runs that are covered.
#[test]
fn a_plan_for_a_device_predicts_its_time_where_every_launch_is_known() {
    let sandbox = Sandbox::new();
    let time = |more: &str| {
        let line = format!("plan --base gpt2 --device cuda --memory 60GiB --batch 8 --json {more}");
        only(&sandbox.engraft(&line).succeeds(), "plan")["device_time"].clone()
    };
    let lora = time("--seq-len 1024 --recompute none");
    let step = &lora["step"];
    let launches = |kernel: &str| {
        let order = step["order"].as_array().unwrap();
        order.iter().filter(|launch| launch.as_str().unwrap().starts_with(kernel)).count()
    };
    assert_eq!((launches("attention_forward"), launches("embed")), (12, 1));
    let names: Vec<_> = step["gpus"].as_array().unwrap().iter().map(|gpu| gpu["gpu"].clone()).collect();
    assert_eq!(names, ["A100", "H100", "H200"]);
    let sum = |at: usize| -> f64 {
        step["ops"].as_array().unwrap().iter().map(|op| op["us"][at].as_f64().unwrap()).sum()
    };
    for (at, gpu) in step["gpus"].as_array().unwrap().iter().enumerate() {
        let us = gpu["us"].as_f64().unwrap();
        assert!((sum(at) / us - 1.0).abs() < 1e-9 && us > 1e3, "{gpu}");
    }
    assert!(time("--recompute all").is_null() && time("--method prefix").is_null());
}

#[test]
fn a_plan_is_for_the_threads_and_the_precision_that_were_asked_for() {
    let sandbox = Sandbox::new();
    let scratch = |more: &str| -> u64 {
        let line =
            format!("plan --base gpt2 --seq-len 128 --batch 4 --micro-batch 4 --device cpu --json {more}");
        planned_for(&only(&sandbox.engraft(&line).succeeds(), "plan"), "scratch")
    };
    let one = scratch("--threads 1");
    assert!(one > 0);
    assert_eq!(scratch("--threads 3"), 3 * one);
    // For each token two bytes for each step of a panel.
    let rounded = if fast_bf16() { 4 * 128 * 768 * 2 } else { 0 };
    assert_eq!(scratch("--threads 1 --precision bf16"), one + rounded);
}

/// A task of few tokens has its own xa, rows of B times vectors and a panel at one time.
#[test]
fn large_ranks_and_few_tokens_are_planned() {
    for more in ["--targets all-linear --rank 256", "--targets mlp.c_proj --rank 200 --lora-dropout 0.3"] {
        let line = SMALL.replace("--rank 3", "").replace("--micro-batch 2", "--micro-batch 4");
        let run = Sandbox::new().engraft(&format!("{line} --output run --steps 2 {more}")).succeeds();
        counts_what_was_planned(&run);
    }
}

#[test]
fn what_cannot_fit_is_refused_with_what_would() {
    let sandbox = Sandbox::new();
    let refused = sandbox.engraft(&format!("{SMALL} --output run --memory 2MiB"));
    let text = refused.refused(&["--memory 2.00MiB", "smallest plan", "would fit"]).stderr();
    let named = text.split("hint: --memory ").nth(1).and_then(|rest| rest.split("MiB").next()).unwrap();
    assert!(!sandbox.path("run").exists(), "nothing is left half-written");
    let mib: u64 = named.parse().unwrap();
    // A little more: the process itself is not as large to the page each time.
    sandbox.engraft(&format!("{SMALL} --output run --memory {}MiB", mib + 4)).succeeds();
}

#[test]
fn everything_together_is_bit_for_bit_nothing_at_all() {
    let sandbox = Sandbox::new();
    for method in ["lora", "lora+prefix"] {
        let rank = if method == "lora" { "" } else { "--prefix-len 3" };
        let line = |name: &str, more: &str| {
            let run = format!("{SMALL} --method {method} {rank} --optimizer adamw8bit --head-rows 16 {more}");
            let run = sandbox.engraft(&format!("{run} --output {name}")).succeeds();
            let losses: Vec<String> =
                run.events_of("step").iter().map(|step| step["loss"].to_string()).collect();
            assert!(losses.len() > 1);
            losses
        };
        let plain = line(&format!("plain-{method}"), "--recompute none --stream-base off");
        for recompute in ["all", "linear", "mlp"] {
            let more =
                format!("--recompute {recompute} --stream-base on --offload-inputs --offload-optimizer");
            assert_eq!(line(&format!("{recompute}-{method}"), &more), plain, "{method}, {recompute}");
        }
    }
}

#[test]
fn a_streamed_base_evaluates_and_generates_the_same() {
    let sandbox = Sandbox::new();
    let base = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bases/tiny");
    let base = base.display();
    std::fs::write(
        sandbox.path("rows.jsonl"),
        r#"{"input_ids": [1, 5, 9, 2, 7], "labels": [1, 5, 9, 2, 7]}"#,
    )
    .unwrap();
    let eval = format!("eval --base {base} --data rows.jsonl --json");
    let generate = format!("generate --base {base} --input-ids 1,2,3 --max-new-tokens 9 --seed 4");
    let evaluated = |more: &str| sandbox.engraft(&format!("{eval} {more}")).succeeds().stdout();
    let generated = |more: &str| sandbox.infer(&format!("{generate} {more}")).succeeds().stdout();
    assert_eq!(evaluated("--stream-base on"), evaluated(""));
    assert_eq!(generated("--stream-base on"), generated(""));
    assert_eq!(generated("").split(',').count(), 9);
}

/// The options that a plan prints as chosen are a command that chooses the same.
#[test]
fn a_chosen_setting_can_be_typed() {
    let sandbox = Sandbox::new();
    let chosen = |options: &str| {
        let done = sandbox.engraft(&format!("plan --base gpt2 --batch 4 {options}")).succeeds();
        let line = done.stdout().lines().find(|line| line.starts_with("chosen")).unwrap().to_owned();
        line.trim_start_matches("chosen").trim().to_owned()
    };
    let small = chosen("--memory 330MiB");
    assert!(small.contains("--stream-base on") && small.contains("--offload-inputs "), "{small}");
    assert_eq!(chosen(&small), small);
}

#[test]
fn a_trace_is_a_timeline_and_a_picture() {
    let sandbox = Sandbox::new();
    sandbox.engraft(&format!("{SMALL} --output run --memory-trace trace.json")).succeeds();
    let text = std::fs::read_to_string(sandbox.path("trace.json")).unwrap();
    let trace: Value = serde_json::from_str(&text).unwrap();
    assert!(trace["samples"]["seconds"].as_array().is_some_and(|samples| !samples.is_empty()), "{text}");
    let picture = std::fs::read_to_string(sandbox.path("trace.svg")).unwrap();
    assert!(picture.contains("<svg") && picture.contains("planned"), "{picture}");
}
