//! Plans against what they must add up to, and choices under budgets.

use std::path::Path;

use engraft_adapters::{AdapterSpec, LoraSpec, PrefixSpec};

use super::{calibrate::Rates, choose::*, table::*, *};
use crate::{
    device::{DType, arena::Place},
    kernels::matmul::Arithmetic,
    model::{BaseDType, Config, Policy, Recompute},
    optim::OptimizerKind,
};

fn xl() -> Config {
    let text = r#"{"model_type":"gpt2","n_layer":48,"n_embd":1600,"n_head":25,"n_positions":1024,"vocab_size":50257}"#;
    Config::from_json(text, Path::new("xl")).unwrap()
}

fn set(config: &Config, targets: &str) -> AdapterSet {
    let lora = LoraSpec { targets: targets.parse().unwrap(), ..LoraSpec::default() };
    let spec = AdapterSpec { lora: Some(lora), prefix: None };
    AdapterSet::new(&spec, &config.describe("xl", None)).unwrap()
}

use engraft_adapters::AdapterSet;

fn job<'a>(config: &'a Config, set: &'a AdapterSet, batch: usize) -> Job<'a> {
    Job {
        config,
        base_dtype: BaseDType::F16,
        set,
        batch,
        seq_len: 1024,
        target: Target::Cpu { threads: 2, arithmetic: Arithmetic::F32 },
        program: 50 << 20,
        rows_on_heap: 0,
        streamable: true,
    }
}

fn setting(policy: Policy) -> Setting {
    Setting { micro_batch: 1, policy, optimizer: OptimizerKind::AdamW }
}

#[test]
fn the_base_counts_every_parameter() {
    // 1,557,611,200 parameters in GPT-2 XL.
    assert_eq!(BaseBytes::of(&xl(), BaseDType::F16).total(), 2 * 1_557_611_200);
    let (config, policy) = (xl(), Policy::default());
    let set = set(&config, "c_attn");
    let plan = plan(&job(&config, &set, 1), setting(policy)).unwrap();
    let base: u64 = plan.rows.iter().filter(|row| row.role == "base").map(|row| row.bytes).sum();
    assert_eq!(base, 2 * 1_557_611_200);
}

#[test]
fn every_saving_saves_what_it_says() {
    let config = xl();
    let set = set(&config, "all-linear");
    let job = job(&config, &set, 1);
    let peak = |policy| plan(&job, setting(policy)).unwrap().peak().1;
    let base = Policy::default();
    let steps = [Recompute::None, Recompute::Mlp, Recompute::Linear, Recompute::All]
        .map(|recompute| peak(Policy { recompute, ..base }));
    assert!(steps.is_sorted_by(|a, b| a > b), "{steps:?}");
    // 4c floats a token of the MLP's inside in all blocks but the shared one.
    assert_eq!(steps[0] - steps[1], 47 * 1024 * 6400 * 4);
    let least = Policy { recompute: Recompute::All, stream: true, head_rows: 32, ..base };
    assert!(peak(least) < 1_200 << 20, "{}", peak(least));
    assert!(peak(least) < peak(Policy { stream: false, ..least }) - (2 << 30));
    assert!(peak(Policy { inputs: Place::Disk, ..least }) < peak(least) - (250 << 20));
    assert!(peak(Policy { moments: Place::Disk, ..least }) < peak(least) - (40 << 20));
}

#[test]
fn rows_add_up_in_every_moment() {
    let config = xl();
    let set = set(&config, "c_attn");
    for stream in [false, true] {
        let plan = plan(&job(&config, &set, 4), setting(Policy { stream, ..Policy::default() })).unwrap();
        let (moment, peak) = plan.peak();
        assert_eq!(plan.at(moment), peak);
        for moment in crate::observe::phase::Moment::ALL {
            assert!(plan.at(moment) <= peak);
            assert_eq!(plan.at(moment), plan.rows.iter().map(|row| row.resident(moment)).sum::<u64>());
        }
        assert!(plan.rows.iter().all(|row| row.bytes > 0 && row.count > 0));
    }
}

#[test]
fn less_memory_is_slower_and_always_fits() {
    let config = xl();
    let set = set(&config, "c_attn");
    let job = job(&config, &set, 8);
    let rates = Rates::NOMINAL;
    let mut last = 0.0;
    for gib in [64u64, 32, 16, 8, 6, 4, 3, 2] {
        let budget = gib << 30;
        let choice = choose(&job, Wish::default(), Some(budget), &rates).unwrap();
        assert!(choice.chosen.peak() <= budget, "{gib} GiB");
        assert!(choice.chosen.seconds >= 0.97 * last, "{gib} GiB is faster than more memory");
        assert_eq!(choice.chosen.plan.setting.optimizer, OptimizerKind::AdamW, "8 bits only where needed");
        assert!(job.batch.is_multiple_of(choice.chosen.plan.setting.micro_batch));
        last = choice.chosen.seconds;
    }
    let plenty = choose(&job, Wish::default(), None, &rates).unwrap().chosen.plan.setting.policy;
    assert_eq!((plenty.recompute, plenty.stream), (Recompute::None, false));
    assert_eq!((plenty.inputs, plenty.moments), (Place::Memory, Place::Memory));
}

#[test]
fn a_wish_is_kept() {
    let config = xl();
    let set = set(&config, "c_attn");
    let job = job(&config, &set, 8);
    let wish = Wish {
        micro_batch: Some(2),
        recompute: Some(Recompute::Every(5)),
        stream: Some(true),
        optimizer: Some(OptimizerKind::AdamW8bit),
        ..Wish::default()
    };
    let choice = choose(&job, wish, None, &Rates::NOMINAL).unwrap();
    let Setting { micro_batch, policy, optimizer } = choice.chosen.plan.setting;
    assert_eq!((micro_batch, policy.recompute, policy.stream), (2, Recompute::Every(5), true));
    assert_eq!(optimizer, OptimizerKind::AdamW8bit);
    let options: Vec<&str> =
        choice.alternatives.iter().filter_map(|other| other.option.split(' ').next()).collect();
    assert!(options.contains(&"head-rows") && !options.contains(&"recompute"), "{options:?}");
}

#[test]
fn remedies_are_the_single_changes_that_save_most() {
    let config = xl();
    let set = set(&config, "c_attn");
    for target in [Target::Cuda, Target::Cpu { threads: 2, arithmetic: Arithmetic::F32 }] {
        let job = Job { target, ..job(&config, &set, 8) };
        // All is fixed: there are no alternatives, but there are remedies.
        let wish = Wish {
            micro_batch: Some(8),
            recompute: Some(Recompute::Mlp),
            head_rows: Some(512),
            stream: Some(false),
            inputs: Some(false),
            moments: Some(false),
            optimizer: Some(OptimizerKind::AdamW),
            activations: None,
            resumed: false,
        };
        let choice = choose(&job, wish, None, &Rates::NOMINAL).unwrap();
        assert!(choice.alternatives.is_empty());
        let names: Vec<&str> =
            choice.remedies.iter().map(|remedy| remedy.split(" (-").next().unwrap()).collect();
        assert_eq!(
            names,
            ["--micro-batch 1", "--recompute all", "--stream-base on"],
            "{:?}",
            choice.remedies
        );
        let setting = choice.chosen.plan.setting;
        let less = plan(&job, Setting { micro_batch: 1, ..setting }).unwrap().peak().1;
        let saved = size(choice.chosen.peak() - less);
        assert_eq!(choice.remedies[0], format!("--micro-batch 1 (-{saved})"));
        // Rows at a time are those of the save.
        let resumed = choose(&job, Wish { resumed: true, ..wish }, None, &Rates::NOMINAL).unwrap();
        assert_eq!(resumed.remedies[..2], choice.remedies[1..], "{:?}", resumed.remedies);
    }
}

#[test]
fn nothing_fits_names_the_smallest() {
    let config = xl();
    let set = set(&config, "all-linear");
    let job = job(&config, &set, 8);
    let error = choose(&job, Wish::default(), Some(100 << 20), &Rates::NOMINAL).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let text = error.to_string();
    let named = text.split("--memory ").nth(2).and_then(|rest| rest.split("MiB").next()).unwrap();
    let bytes = named.parse::<u64>().unwrap() << 20;
    let fits = choose(&job, Wish::default(), Some(bytes), &Rates::NOMINAL).unwrap();
    assert!(text.contains(&fits.chosen.plan.setting.to_string()), "{text}\n{}", fits.chosen.plan.setting);
    assert!(choose(&job, Wish::default(), Some(bytes - (1 << 20)), &Rates::NOMINAL).is_err());
}

#[test]
fn a_device_is_planned_without_one() {
    let config = xl();
    let set = set(&config, "c_attn");
    let job = Job { target: Target::Cuda, ..job(&config, &set, 8) };
    let choice = choose(&job, Wish::default(), Some(12 << 30), &Rates::NOMINAL).unwrap();
    assert!(choice.chosen.peak() <= 12 << 30);
    assert_eq!(choice.chosen.plan.setting.policy.activations, DType::F16);
    let device: u64 =
        choice.chosen.plan.rows.iter().filter(|row| row.home == Home::Device).map(|r| r.bytes).sum();
    assert!(device >= 3 << 30, "{device}");
}

#[test]
fn a_streamed_base_takes_two_blocks_of_a_device() {
    let config = xl();
    let set = set(&config, "c_attn");
    let job = Job { target: Target::Cuda, ..job(&config, &set, 8) };
    let of_base = |row: &&Row| matches!(row.role, "base" | "stages");
    let planned = |stream| plan(&job, setting(Policy { stream, ..Policy::default() })).unwrap();
    let device = |plan: &Plan| -> u64 {
        let rows = plan.rows.iter().filter(of_base).filter(|row| row.home == Home::Device);
        rows.map(Row::most_resident).sum()
    };
    let (resident, streamed) = (planned(false), planned(true));
    let parts = BaseBytes::on_device(&config);
    assert_eq!(device(&resident), parts.total());
    assert_eq!(device(&resident) - device(&streamed), parts.blocks - 2 * parts.block);
    assert_eq!(resident.peak().1 - streamed.peak().1, parts.blocks - 2 * parts.block);
    let pinned = streamed.rows.iter().find(|row| row.role == "stages" && row.home == Home::Host).unwrap();
    assert_eq!((pinned.bytes, pinned.most_resident()), (2 * parts.block, 0));
    // Of the base what is there before a trainer is, and nothing of the places for blocks.
    let held = |plan: &Plan| plan.peak().1 - budget::wanted(plan);
    assert_eq!(held(&resident) - held(&streamed), parts.blocks);
    assert_eq!(held(&resident), parts.total() + CUDA_RUNTIME);
}

#[test]
fn what_a_device_offloads_is_listed_and_not_counted() {
    let config = xl();
    let set = set(&config, "c_attn");
    let job = Job { target: Target::Cuda, ..job(&config, &set, 8) };
    let policy = Policy { recompute: Recompute::All, activations: DType::F16, ..Policy::default() };
    let planned = |policy| plan(&job, setting(policy)).unwrap();
    let kept = planned(policy);
    let inputs = planned(Policy { inputs: Place::Host, ..policy });
    // 49 inputs and outputs of 1024 tokens where three take turns; the last three need no copy.
    let one = 1024 * 1600 * 2;
    assert_eq!(kept.peak().1 - inputs.peak().1, 46 * one);
    let copies = inputs.rows.iter().find(|row| row.role == "offloaded inputs").unwrap();
    assert_eq!((copies.count, copies.bytes, copies.home), (46, 46 * one, Home::Host));
    assert_eq!(copies.most_resident(), 0);
    let moments = planned(Policy { moments: Place::Host, ..policy });
    assert_eq!(kept.peak().1 - moments.peak().1, 8 * set.layout.len as u64);
    let wish = Wish { stream: Some(true), ..Wish::default() };
    let least = |wish| {
        let error = choose(&job, wish, Some(400 << 20), &Rates::NOMINAL_GPU).unwrap_err().to_string();
        error
            .split("--memory ")
            .nth(2)
            .and_then(|rest| rest.split("MiB").next())
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    let without = least(Wish { inputs: Some(false), moments: Some(false), ..wish });
    // 46 inputs of 3.1 MiB, and moments of 2.3 M trainables.
    assert!(least(wish) + 143 + 4 < without, "{} and {without} MiB", least(wish));
}

#[test]
fn a_tensor_of_a_device_begins_at_a_multiple_of_256_bytes() {
    let text = r#"{"model_type":"gpt2","n_layer":2,"n_embd":24,"n_head":3,"n_positions":40,"vocab_size":61}"#;
    let config = Config::from_json(text, Path::new("odd")).unwrap();
    let tensor = |elements: usize| (2 * elements).div_ceil(256) as u64 * 256;
    let norm = 2 * tensor(24);
    let linears = [(24, 72), (24, 24), (24, 96), (96, 24)];
    let linears: u64 = linears.into_iter().map(|(a, b)| tensor(a * b) + tensor(b)).sum();
    let total = tensor(61 * 24) + tensor(40 * 24) + norm + 2 * (2 * norm + linears);
    assert_eq!(BaseBytes::on_device(&config).total(), total);
    assert!(total > BaseBytes::of(&config, BaseDType::F16).total());
}

#[test]
fn a_prefix_is_planned_too() {
    let config = xl();
    let spec = AdapterSpec { lora: None, prefix: Some(PrefixSpec { length: 20, projection: Some(64) }) };
    let set = AdapterSet::new(&spec, &config.describe("xl", None)).unwrap();
    let plan = plan(&job(&config, &set, 2), setting(Policy::default())).unwrap();
    let names: Vec<&str> = plan.rows.iter().map(|row| row.name.as_str()).collect();
    assert!(names.contains(&"projected") && names.contains(&"d hidden"), "{names:?}");
}
