//! AdaLoRA: gradients, choices of memory, a schedule that goes on exactly, and the programs: training, resuming, using,
//! merging, refusals.

use engraft::{engine::Trainer, model::Policy};
use engraft_adapters::{AdaLoraSpec, AdapterSpec, Ia3Spec, LoraSpec};
use serde_json::{Value, json};

use crate::{
    cli_support::{Finished, Sandbox, evaluated, files_below, losses, names, planned_for},
    method_policies,
    policies::{cut, options, rows, trainer},
    setup::{Case, bits, golden, restore, state, within},
};

/// A run that takes no time, of 20 steps.
const RUN: &str = "train --data data.jsonl --no-pack --seq-len 24 --batch 4 --threads 1 --lr 0.02 --steps 20 \
                   --save-every 10 --json";

/// Every module: two widths of inputs, and three of outputs. In three steps all phases of the schedule.
fn everywhere(dropout: f64) -> AdapterSpec {
    let targets = "all-linear".parse().unwrap();
    AdaLoraSpec {
        init_r: 5,
        target_r: 2,
        alpha: 7.5,
        targets,
        dropout,
        tfinal: 1,
        total_step: 3,
        ..AdaLoraSpec::default()
    }
    .into()
}

/// The deltas of two methods on one module, whose output is scaled.
fn with_others(dropout: f64) -> AdapterSpec {
    let lora =
        LoraSpec { rank: 3, alpha: 7.5, targets: "q,v".parse().unwrap(), dropout, ..LoraSpec::default() };
    let (targets, betas) = ("c_attn,c_fc".parse().unwrap(), (0.7, 0.6));
    let adalora = AdaLoraSpec {
        init_r: 4,
        target_r: 1,
        targets,
        dropout,
        beta1: betas.0,
        beta2: betas.1,
        orth_reg_weight: 0.2,
        total_step: 3,
        ..AdaLoraSpec::default()
    };
    let ia3 = Some(Ia3Spec::default());
    AdapterSpec { lora: Some(lora), adalora: Some(adalora), ia3, ..AdapterSpec::default() }
}

#[test]
fn gradients_are_those_of_autograd() {
    for dropout in [0.0, 0.2] {
        method_policies::gradients("adalora", &everywhere(dropout));
    }
    method_policies::gradients("lora, adalora and ia3", &with_others(0.2));
}

#[test]
fn choices_of_memory_change_no_bit_or_rounding_alone() {
    method_policies::memory_choices("adalora", &everywhere(0.2));
    method_policies::memory_choices("lora, adalora and ia3", &with_others(0.0));
}

#[test]
fn generation_computes_what_training_does() {
    method_policies::generation("adalora", &everywhere(0.0));
    // One shape alone: factors are read transposed.
    method_policies::generation("adalora on c_attn", &AdaLoraSpec::default().into());
    method_policies::generation("lora, adalora and ia3", &with_others(0.0));
}

#[test]
fn options_of_memory_give_what_they_must() {
    // At a rate at which a base of fewer bits does not lead elsewhere.
    let run = RUN.replace("--lr 0.02", "--lr 0.002");
    method_policies::program(&format!(
        "{run} --method adalora --init-r 6 --target-r 3 --targets all-linear --lora-dropout 0.1 --tinit 2 --tfinal 4"
    ));
}

/// Elements of E that are not 0.
fn left(trainer: &Trainer) -> usize {
    let (set, values) = (trainer.set(), trainer.values());
    let d = set.loras.iter().filter_map(|lora| lora.d);
    d.map(|d| values[set.layout.tensors[d].range()].iter().filter(|&&e| e != 0.0).count()).sum()
}

/// Wherever a run is cut, in every phase of the schedule, it ends with the same bits; and the ranks become those of the
/// budget, and stay.
#[test]
fn a_schedule_goes_on_exactly_from_any_step() {
    let base = golden("tiny");
    let spec = AdaLoraSpec {
        init_r: 5,
        target_r: 2,
        targets: "c_attn,mlp.c_proj".parse().unwrap(),
        tinit: 2,
        tfinal: 3,
        delta_t: 2,
        total_step: 10,
        ..AdaLoraSpec::default()
    };
    let case = method_policies::case("adalora", &base, &spec.into());
    let batches = cut(&rows(), 2);
    let fresh = |values: Vec<f32>| {
        let case = Case { name: case.name, set: case.set.clone(), values };
        trainer(&base, &case, options(Policy::default()))
    };
    let (mut whole, mut states, mut ranks) = (fresh(case.values.clone()), Vec::new(), Vec::new());
    for _ in 0..10 {
        whole.step(&batches, 1e-2).unwrap();
        states.push(state(&whole));
        ranks.push(left(&whole));
    }
    // 30 of 6 modules; after update 4: 18 (3/5)^3 + 12 = 15.9; 6: 12.1; 7, the last: 12. Between them masked ones grow again.
    assert_eq!([&ranks[..5], &ranks[6..]].concat(), [30, 30, 30, 30, 15, 12, 12, 12, 12]);
    assert!(ranks[5] == 30, "{ranks:?}");
    for (done, saved) in (1..10).zip(&states) {
        let mut second = fresh(vec![0.5; case.values.len()]);
        restore(&mut second, saved).unwrap();
        for _ in done..10 {
            second.step(&batches, 1e-2).unwrap();
        }
        let (found, expected) = (state(&second), &states[9]);
        assert!(found == *expected && bits(&found.values) == bits(&expected.values), "from step {done}");
    }
    // A save without importance, or with that of another adapter, is refused, and changes nothing.
    let before = bits(&whole.values());
    for wrong in [&states[3].moments[..2], &states[3].moments[..4]] {
        let mut other = state(&whole);
        other.moments = wrong.to_vec();
        assert!(restore(&mut whole, &other).is_err());
        assert_eq!(bits(&whole.values()), before);
    }
}

fn train(sandbox: &Sandbox, output: &str, more: &str) -> Finished {
    sandbox.engraft(&format!("{RUN} --output {output} {more}")).succeeds()
}

fn config(sandbox: &Sandbox, run: &str) -> Value {
    let file = sandbox.path(run).join("adapter/adapter_config.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

#[test]
fn ranks_are_allocated_resumed_and_used() {
    let sandbox = Sandbox::new();
    let options =
        "--method adalora --init-r 6 --target-r 2 --targets c_attn,c_fc --tinit 4 --tfinal 6 --delta-t 2";
    let run = train(&sandbox, "run", options);
    let losses = losses(&run);
    assert!(losses.len() == 20 && losses[19] < 0.9 * losses[0], "{losses:?}");
    let written = config(&sandbox, "run");
    assert_eq!(
        json!([
            written["init_r"],
            written["target_r"],
            written["tinit"],
            written["tfinal"],
            written["deltaT"]
        ]),
        json!([6, 2, 4, 6, 2])
    );
    assert_eq!(written["total_step"], 20);
    let pattern = written["rank_pattern"].as_object().unwrap();
    let kept = pattern.values().flat_map(|flags| flags.as_array().unwrap()).filter(|it| **it == json!(true));
    assert_eq!((pattern.len(), kept.count()), (12, 24));

    let expected = files_below(&sandbox.path("run/adapter"));
    let resumed = sandbox.engraft("train --resume --output run --resume-from 10 --json").succeeds();
    assert_eq!(resumed.events_of("step")[0]["step"], 11);
    assert!(files_below(&sandbox.path("run/adapter")) == expected, "a resumed run has other bytes");
    sandbox.engraft("train --resume --output run --steps 30").refused(&[
        "--steps 30: the ranks of an AdaLoRA are allocated over the 20 steps that the run has; give 20",
    ]);

    let alone = evaluated(&sandbox, None);
    let beside = evaluated(&sandbox, Some("run"));
    assert!(beside < 0.9 * alone, "{beside} {alone}");
    let look = sandbox.engraft("inspect run/adapter --json").succeeds().events().remove(0);
    assert_eq!(
        (&look["adapters"][0]["kind"], &look["adapters"][0]["adalora"]["target_r"]),
        (&json!("adalora"), &json!(2))
    );
    let card = std::fs::read_to_string(sandbox.path("run/adapter/README.md")).unwrap();
    for part in ["# adalora adapter", "| method | adalora, initial rank 6, target rank 2, alpha 16 |"] {
        assert!(card.contains(part), "{card}");
    }
    // E is folded into weights, and multiplied into A.
    sandbox.engraft("merge --base embedded --adapter run --output merged --dtype f32").succeeds();
    let line = "eval --base merged --data data.jsonl --no-pack --seq-len 24 --json";
    let merged = sandbox.engraft(line).succeeds().events()[0]["loss"].as_f64().unwrap();
    // The folder's weights are rounded to FP16 again when they are loaded.
    within((merged / beside - 1.0).abs(), 1e-3, "loss of the merged model");
    sandbox.engraft("export --adapter run --to gguf --output run.gguf").succeeds();
}

/// Two numbers for every value beside the moments.
#[test]
fn importance_is_planned() {
    let sandbox = Sandbox::new();
    let line = RUN.replace("train ", "plan ").replace("--save-every 10", "");
    let plan = sandbox
        .engraft(&format!("{line} --method adalora --init-r 4 --target-r 2"))
        .succeeds()
        .events()
        .remove(0);
    // Width 128, 6 layers.
    let (values, ranks) = (6 * 4 * (128 + 3 * 128 + 1), 6 * 4);
    let allocation = 4 * (2 * values + 2 * ranks + 6 * 4 * 4 * 4);
    for (role, exact) in [("moments", 2 * 4 * values), ("allocation of ranks", allocation)] {
        let planned = planned_for(&plan, role);
        assert!((exact..exact + 1024).contains(&planned), "{planned} for {exact}");
    }
}

#[test]
fn an_adapter_with_allocated_ranks_is_trained_further() {
    let sandbox = Sandbox::new();
    let first = train(&sandbox, "run", "--method adalora --init-r 6 --target-r 2 --tfinal 5");
    let options = "--init-adapter run/adapter --init-r 6 --lora-dropout 0.1 --orth-reg-weight 0 --tfinal 3";
    let second = train(&sandbox, "again", options);
    assert!(losses(&second)[0] < 0.9 * losses(&first)[0]);
    let (before, after) = (config(&sandbox, "run"), config(&sandbox, "again"));
    assert_eq!(after["lora_dropout"], json!(0.1));
    assert_eq!(json!([after["tfinal"], after["orth_reg_weight"], after["total_step"]]), json!([3, 0, 20]));
    let count = |config: &Value| {
        let flags =
            config["rank_pattern"].as_object().unwrap().values().flat_map(|it| it.as_array().unwrap());
        flags.filter(|it| **it == json!(true)).count()
    };
    assert_eq!((count(&before), count(&after)), (12, 12));
    // Half of them again.
    train(&sandbox, "less", "--init-adapter run/adapter --target-r 1 --tfinal 5");
    assert_eq!(count(&config(&sandbox, "less")), 6);
    sandbox
        .engraft(&format!("{RUN} --output third --init-adapter run/adapter --init-r 8 --alpha 3 --rank 4"))
        .refused(&["--alpha 3 (the adapter has 16), --init-r 8 (the adapter has 6)"]);
}

#[test]
fn beside_other_methods_an_adalora_has_a_folder_of_its_own() {
    let sandbox = Sandbox::new();
    for (method, more, folders) in [
        ("lora+adalora", "", &["README.md", "adalora", "lora"][..]),
        ("adalora+prefix", "--prefix-len 3", &["README.md", "adalora", "prefix"]),
    ] {
        let both = losses(&train(&sandbox, method, &format!("--method {method} {more}")));
        assert_eq!(names(&sandbox.path(method).join("adapter")), folders);
        assert!(both[19] < 0.9 * both[0], "{method}: {both:?}");
        assert!(evaluated(&sandbox, Some(method)) < 0.9 * evaluated(&sandbox, None));
    }
}

#[test]
fn what_an_adalora_cannot_do_is_refused() {
    let sandbox = Sandbox::new();
    let run = |more: &str| sandbox.engraft(&format!("{RUN} --output run {more}"));
    run("--method adalora --rank 3").refused(&["--rank: means nothing with --method adalora"]);
    run("--target-r 3").refused(&["--target-r: means nothing with --method lora"]);
    run("--method adalora --target-r 13")
        .refused(&["--target-r: 13 is no rank from 1 to init_r; give one such as 8"]);
    run("--method adalora --targets q")
        .refused(&["--targets: `q` is a part of attn.c_attn, and adalora attaches"]);
    run("--method adalora --tinit 12 --tfinal 8")
        .refused(&["--tinit: 12 and tfinal 8 of 20 steps leave no step"]);
    run("--method adalora --delta-t 0").refused(&["--delta-t 0: is no distance; give a whole number from 1"]);
    run("--method adalora --importance-beta1 1").refused(&["--importance-beta1 1: is not between 0 and 1"]);
    run("--method adalora --orth-reg-weight -1")
        .refused(&["--orth-reg-weight -1: is no finite number from 0"]);
}
