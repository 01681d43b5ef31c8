//! Plans of trainings against what they must add up to, and choices under budgets.

use std::path::Path;

use engraft_adapters::{AdapterSpec, Group, LoraSpec, PrefixSpec};

use super::*;
use crate::{
    data::{Kind, load_text, testing},
    device::{DeviceKind, OwnMemory},
    error::Result,
    kernels::matmul::Arithmetic,
    plan::{BaseBytes, Cores, Plan, Selection, budget, plan, size},
};

/// The choice under `constraints`.
fn choose(
    job: &TrainingJob,
    constraints: Constraints,
    budget: Option<u64>,
    rates: &Rates,
) -> Result<Selection<PlanConfig>> {
    crate::plan::choose(&TrainingJob { constraints, ..*job }, budget, rates)
}

fn device() -> PlannedDevice {
    PlannedDevice::of_kind(DeviceKind::CUDA, Arithmetic::F32)
}

fn host() -> PlannedDevice {
    PlannedDevice { kind: DeviceKind::CPU, cores: Some(Cores { threads: 2, arithmetic: Arithmetic::F32 }) }
}

fn cuda_memory() -> &'static OwnMemory {
    DeviceKind::CUDA.own_memory.as_ref().unwrap()
}

fn xl() -> Config {
    let text = r#"{"model_type":"gpt2","n_layer":48,"n_embd":1600,"n_head":25,"n_positions":1024,"vocab_size":50257}"#;
    Config::from_json(text, Path::new("xl")).unwrap()
}

fn set(config: &Config, targets: &str) -> AdapterSet {
    let lora = LoraSpec { targets: targets.parse().unwrap(), ..LoraSpec::default() };
    let spec = AdapterSpec::from(lora);
    AdapterSet::new(&spec, &config.describe("xl", None)).unwrap()
}

fn job<'a>(config: &'a Config, set: &'a AdapterSet, batch: usize) -> TrainingJob<'a> {
    TrainingJob {
        config,
        base_dtype: BaseDType::F16,
        set,
        batch,
        seq_len: 1024,
        device: host(),
        program: 50 << 20,
        rows_on_heap: 0,
        rows: None,
        streamable: true,
        constraints: Constraints::default(),
        sample_tokens: 0,
    }
}

fn config_of(policy: Policy) -> PlanConfig {
    PlanConfig { micro_batch: 1, policy, optimizer: OptimizerKind::AdamW }
}

#[test]
fn the_base_counts_every_parameter() {
    // 1,557,611,200 parameters in GPT-2 XL.
    let (config, policy) = (xl(), Policy::default());
    let set = set(&config, "c_attn");
    let plan = plan(&job(&config, &set, 1), config_of(policy)).unwrap();
    let base: u64 = plan.rows.iter().filter(|row| row.role == "base").map(|row| row.bytes).sum();
    assert_eq!(base, 2 * 1_557_611_200);
}

#[test]
fn every_saving_saves_what_it_says() {
    let config = xl();
    let set = set(&config, "all-linear");
    let job = job(&config, &set, 1);
    let peak = |policy| plan(&job, config_of(policy)).unwrap().peak().1;
    let base = Policy::default();
    let steps = [Recompute::None, Recompute::Mlp, Recompute::Linear, Recompute::All]
        .map(|recompute| peak(Policy { recompute, ..base }));
    assert!(steps.is_sorted_by(|a, b| a > b), "{steps:?}");
    // 4c floats a token of the MLP's inside in all blocks but the shared one.
    assert_eq!(steps[0] - steps[1], 47 * 1024 * 6400 * 4);
    let least = Policy { recompute: Recompute::All, stream: true, head_rows: 32, ..base };
    assert!(peak(least) < 1_200 << 20, "{}", peak(least));
    assert!(peak(least) < peak(Policy { stream: false, ..least }) - (2 << 30));
    assert!(peak(Policy { inputs: Placement::Disk, ..least }) < peak(least) - (250 << 20));
    assert!(peak(Policy { moments: Placement::Disk, ..least }) < peak(least) - (40 << 20));
}

#[test]
fn rows_add_up_in_every_phase() {
    let config = xl();
    let set = set(&config, "c_attn");
    for stream in [false, true] {
        let plan = plan(&job(&config, &set, 4), config_of(Policy { stream, ..Policy::default() })).unwrap();
        let (phase, peak) = plan.peak();
        assert_eq!(plan.at(phase), peak);
        for phase in crate::observe::phase::Phase::ALL {
            assert!(plan.at(phase) <= peak);
            assert_eq!(plan.at(phase), plan.rows.iter().map(|row| row.resident(phase)).sum::<u64>());
        }
        assert!(plan.rows.iter().all(|row| row.bytes > 0 && row.count > 0));
    }
}

#[test]
fn less_memory_is_slower_and_always_fits() {
    let config = xl();
    let set = set(&config, "c_attn");
    let job = job(&config, &set, 8);
    let rates = Rates::NOMINAL_CPU;
    let mut last = 0.0;
    for gib in [64u64, 32, 16, 8, 6, 4, 3, 2] {
        let budget = gib << 30;
        let selection = choose(&job, Constraints::default(), Some(budget), &rates).unwrap();
        assert!(selection.chosen.peak() <= budget, "{gib} GiB");
        assert!(selection.chosen.seconds >= 0.97 * last, "{gib} GiB is faster than more memory");
        assert_eq!(selection.chosen.plan.config.optimizer, OptimizerKind::AdamW, "8 bits only where needed");
        assert!(job.batch.is_multiple_of(selection.chosen.plan.config.micro_batch));
        last = selection.chosen.seconds;
    }
    let plenty = choose(&job, Constraints::default(), None, &rates).unwrap().chosen.plan.config.policy;
    assert_eq!((plenty.recompute, plenty.stream), (Recompute::None, false));
    assert_eq!((plenty.inputs, plenty.moments), (Placement::Memory, Placement::Memory));
}

#[test]
fn what_is_fixed_is_kept() {
    let config = xl();
    let set = set(&config, "c_attn");
    let job = job(&config, &set, 8);
    let constraints = Constraints {
        micro_batch: Some(2),
        recompute: Some(Recompute::Every(5)),
        stream: Some(true),
        optimizer: Some(OptimizerKind::AdamW8bit),
        ..Constraints::default()
    };
    let selection = choose(&job, constraints, None, &Rates::NOMINAL_CPU).unwrap();
    let PlanConfig { micro_batch, policy, optimizer } = selection.chosen.plan.config;
    assert_eq!((micro_batch, policy.recompute, policy.stream), (2, Recompute::Every(5), true));
    assert_eq!(optimizer, OptimizerKind::AdamW8bit);
    let options: Vec<&str> =
        selection.alternatives.iter().filter_map(|other| other.option.split(' ').next()).collect();
    assert!(options.contains(&"head-rows") && !options.contains(&"recompute"), "{options:?}");
}

#[test]
fn remedies_are_the_single_changes_that_save_most() {
    let config = xl();
    let set = set(&config, "c_attn");
    for device in [device(), host()] {
        let job = TrainingJob { device, ..job(&config, &set, 8) };
        // All is fixed: there are no alternatives, but there are remedies.
        let constraints = Constraints {
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
        let selection = choose(&job, constraints, None, &Rates::NOMINAL_CPU).unwrap();
        assert!(selection.alternatives.is_empty());
        let names: Vec<&str> =
            selection.remedies.iter().map(|remedy| remedy.split(" (-").next().unwrap()).collect();
        assert_eq!(
            names,
            ["--micro-batch 1", "--recompute all", "--stream-base on"],
            "{:?}",
            selection.remedies
        );
        let config = selection.chosen.plan.config;
        let less = plan(&job, PlanConfig { micro_batch: 1, ..config }).unwrap().peak().1;
        let saved = size(selection.chosen.peak() - less);
        assert_eq!(selection.remedies[0], format!("--micro-batch 1 (-{saved})"));
        // The micro-batch is that of the save.
        let resumed =
            choose(&job, Constraints { resumed: true, ..constraints }, None, &Rates::NOMINAL_CPU).unwrap();
        assert_eq!(resumed.remedies[..2], selection.remedies[1..], "{:?}", resumed.remedies);
    }
}

#[test]
fn nothing_fits_names_the_smallest() {
    let config = xl();
    let set = set(&config, "all-linear");
    let job = job(&config, &set, 8);
    let error = choose(&job, Constraints::default(), Some(100 << 20), &Rates::NOMINAL_CPU).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let text = error.to_string();
    let named = text.split("--memory ").nth(2).and_then(|rest| rest.split("MiB").next()).unwrap();
    let bytes = named.parse::<u64>().unwrap() << 20;
    let fits = choose(&job, Constraints::default(), Some(bytes), &Rates::NOMINAL_CPU).unwrap();
    assert!(text.contains(&fits.chosen.plan.config.to_string()), "{text}\n{}", fits.chosen.plan.config);
    assert!(choose(&job, Constraints::default(), Some(bytes - (1 << 20)), &Rates::NOMINAL_CPU).is_err());
}

/// The number of MiB in the first part of `text` after `before`.
fn mib_after(text: &str, before: &str) -> u64 {
    let number = text.split(before).nth(1).and_then(|rest| rest.split("MiB").next());
    number.unwrap_or_else(|| panic!("no {before:?} in {text}")).parse().unwrap()
}

#[test]
fn eight_bit_moments_are_proposed_and_chosen_only_where_asked_for() {
    let config = xl();
    let lora = LoraSpec { rank: 64, targets: "all-linear".parse().unwrap(), ..LoraSpec::default() };
    let spec = AdapterSpec::from(lora);
    let set = AdapterSet::new(&spec, &config.describe("xl", None)).unwrap();
    let fixed = Constraints { moments: Some(false), ..Constraints::default() };
    for device in [device(), host()] {
        let job = TrainingJob { device, ..job(&config, &set, 2) };
        let select = |constraints, mib: u64| choose(&job, constraints, Some(mib << 20), &Rates::NOMINAL_CPU);
        let text = select(fixed, 1).unwrap_err().to_string();
        let wide = mib_after(&text, "the smallest plan takes ");
        let coded = mib_after(&text, "with --optimizer adamw8bit the smallest plan takes ");
        // All tensors are large: 8 bytes a trainable against 2 and a scale for 256 elements.
        let saved = set.layout.len as u64 * (8 * 128 - 2 * 128 - 4) / 128;
        assert!((wide - coded).abs_diff(saved >> 20) <= 1, "{text}");
        assert!(text.contains(&format!("(-{})", size(saved))), "{} in {text}", size(saved));
        // Neither is it chosen where only it fits, nor is it proposed to a run that has begun.
        assert!(select(fixed, wide - 1).is_err());
        let resumed = select(Constraints { resumed: true, ..fixed }, 1).unwrap_err().to_string();
        assert!(!resumed.contains("adamw8bit"), "{resumed}");
        let optimizer = |optimizer, mib| {
            select(Constraints { optimizer, ..fixed }, mib).unwrap().chosen.plan.config.optimizer
        };
        let eight_bit = OptimizerKind::AdamW8bit;
        assert_eq!(optimizer(Some(eight_bit), coded), eight_bit);
        assert_eq!(optimizer(None, coded), eight_bit);
        assert_eq!(optimizer(None, wide), OptimizerKind::AdamW);
        assert_eq!(optimizer(fixed.optimizer, wide), OptimizerKind::AdamW);
    }
}

#[test]
fn a_device_is_planned_without_one() {
    let config = xl();
    let set = set(&config, "c_attn");
    let job = TrainingJob { device: device(), ..job(&config, &set, 8) };
    let selection = choose(&job, Constraints::default(), Some(12 << 30), &Rates::NOMINAL_CPU).unwrap();
    assert!(selection.chosen.peak() <= 12 << 30);
    assert_eq!(selection.chosen.plan.config.policy.activations, DType::F16);
    let device: u64 =
        selection.chosen.plan.rows.iter().filter(|row| row.place == Placement::Memory).map(|r| r.bytes).sum();
    assert!(device >= 3 << 30, "{device}");
}

/// The choice for rows of 1024 tokens of a base, as a run on a device makes it.
fn chosen_on_a_device(name: &str, batch: usize, bytes: u64) -> (PlanConfig, Vec<usize>) {
    let config = crate::model::builtin::builtin(name).unwrap().unwrap();
    let set = set(&config, "c_attn");
    let job = TrainingJob { device: device(), ..job(&config, &set, batch) };
    let rates = &job.device.kind.nominal_rates;
    let constraints = Constraints { activations: Some(DType::F16), ..Constraints::default() };
    let chosen = choose(&job, constraints, Some(bytes), rates).unwrap().chosen.plan.config;
    let fits = |micro_batch: &usize| {
        plan(&job, PlanConfig { micro_batch: *micro_batch, ..chosen }).unwrap().peak().1 <= bytes
    };
    (chosen, divisors(batch).into_iter().filter(fits).collect())
}

#[test]
fn a_device_keeps_the_largest_micro_batch_that_fits() {
    for gigabytes in [80_000_000_000, 141_000_000_000] {
        for name in ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] {
            let (chosen, fitting) = chosen_on_a_device(name, 8, gigabytes);
            assert_eq!(chosen.policy.recompute, Recompute::None, "{name}");
            assert_eq!(chosen.micro_batch, fitting[0], "{name}: of {fitting:?}");
            // The larger the base, the less time is in its head; the smallest chunk within 1% of the fastest is taken.
            let chunk = chosen.policy.head_rows;
            assert!(chunk == 4096 || (name != "gpt2" && chunk >= 1024), "{name}: {chunk} rows of logits");
            assert!(name == "gpt2-xl" || chosen.micro_batch == 8, "{name}: {}", chosen.micro_batch);
        }
    }
    // Of 64 rows not all fit, and beyond 8 at a time a larger micro-batch gains less and less.
    let (chosen, fitting) = chosen_on_a_device("gpt2-xl", 64, 80_000_000_000);
    assert!(fitting[0] < 64 && chosen.micro_batch >= 8, "{} of {fitting:?}", chosen.micro_batch);
}

#[test]
fn a_streamed_base_takes_two_blocks_of_a_device() {
    let config = xl();
    let set = set(&config, "c_attn");
    let job = TrainingJob { device: device(), ..job(&config, &set, 8) };
    let of_base = |row: &&Row| matches!(row.role, "base" | "stages");
    let planned = |stream| plan(&job, config_of(Policy { stream, ..Policy::default() })).unwrap();
    let device = |plan: &Plan<PlanConfig>| -> u64 {
        let rows = plan.rows.iter().filter(of_base).filter(|row| row.place == Placement::Memory);
        rows.map(Row::most_resident).sum()
    };
    let (resident, streamed) = (planned(false), planned(true));
    let parts = BaseBytes::on_device(&config, BaseDType::F16, cuda_memory());
    assert_eq!(device(&resident), parts.total());
    assert_eq!(device(&resident) - device(&streamed), parts.blocks - 2 * parts.block);
    assert_eq!(resident.peak().1 - streamed.peak().1, parts.blocks - 2 * parts.block);
    let pinned =
        streamed.rows.iter().find(|row| row.role == "stages" && row.place == Placement::Host).unwrap();
    assert_eq!((pinned.bytes, pinned.most_resident()), (2 * parts.block, 0));
    // The parts of the base that are there before a trainer is, and no slots for blocks.
    let held = |plan: &Plan<PlanConfig>| plan.peak().1 - budget::wanted(plan);
    assert_eq!(held(&resident) - held(&streamed), parts.blocks);
    assert_eq!(held(&resident), parts.total() + cuda_memory().runtime);
}

#[test]
fn what_a_device_offloads_is_listed_and_not_counted() {
    let config = xl();
    let set = set(&config, "c_attn");
    let job = TrainingJob { device: device(), ..job(&config, &set, 8) };
    let policy = Policy { recompute: Recompute::All, activations: DType::F16, ..Policy::default() };
    let planned = |policy| plan(&job, config_of(policy)).unwrap();
    let kept = planned(policy);
    let inputs = planned(Policy { inputs: Placement::Host, ..policy });
    // 49 inputs and outputs of 1024 tokens where three take turns; the last three need no copy.
    let one = 1024 * 1600 * 2;
    assert_eq!(kept.peak().1 - inputs.peak().1, 46 * one);
    let copies = inputs.rows.iter().find(|row| row.role == "offloaded inputs").unwrap();
    assert_eq!((copies.count, copies.bytes, copies.place), (46, 46 * one, Placement::Host));
    assert_eq!(copies.most_resident(), 0);
    let moments = planned(Policy { moments: Placement::Host, ..policy });
    assert_eq!(kept.peak().1 - moments.peak().1, 8 * set.layout.len as u64);
    let constraints = Constraints { stream: Some(true), ..Constraints::default() };
    let least = |constraints| {
        let error = choose(&job, constraints, Some(400 << 20), &Rates::NOMINAL_GPU).unwrap_err().to_string();
        error
            .split("--memory ")
            .nth(2)
            .and_then(|rest| rest.split("MiB").next())
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    let without = least(Constraints { inputs: Some(false), moments: Some(false), ..constraints });
    // 46 inputs of 3.1 MiB, and moments of 2.3 M trainables.
    assert!(least(constraints) + 143 + 4 < without, "{} and {without} MiB", least(constraints));
}

#[test]
fn frozen_values_take_no_time_in_the_update() {
    let config = xl();
    let all = set(&config, "all-linear");
    let mut half = all.clone();
    let frozen = Group { trainable: false, ..Group::DEFAULT };
    half.layout.groups.push(frozen);
    for slot in half.layout.tensors.iter_mut().step_by(2) {
        slot.group = 1;
    }
    assert!(half.trainables() > 0 && half.trainables() < all.trainables());
    let rates = Rates::NOMINAL_CPU;
    let seconds = |set| job(&config, set, 1).seconds(config_of(Policy::default()), &rates);
    let saved = seconds(&all) - seconds(&half);
    let frozen = (all.trainables() - half.trainables()) as f64;
    let expected = frozen / rates.adamw;
    assert!((saved - expected).abs() < 1e-3 * expected, "{saved} s, not {expected}");
}

#[test]
fn a_prefix_is_planned_too() {
    let config = xl();
    let spec = AdapterSpec::from(PrefixSpec { length: 20, projection: Some(64) });
    let set = AdapterSet::new(&spec, &config.describe("xl", None)).unwrap();
    let plan = plan(&job(&config, &set, 2), config_of(Policy::default())).unwrap();
    let names: Vec<&str> = plan.rows.iter().map(|row| row.name.as_str()).collect();
    assert!(names.contains(&"projected") && names.contains(&"d hidden"), "{names:?}");
}

/// `count` rows of `length` tokens, the first `masked` of each without loss.
fn statistics(count: usize, length: usize, masked: usize) -> RowStatistics {
    let ids = vec![5; length];
    // The first label is never a target.
    let labels: Vec<i32> = (0..length).map(|at| if at > masked { 5 } else { -100 }).collect();
    let line = format!("{{\"input_ids\":{ids:?},\"labels\":{labels:?}}}\n");
    let options = testing::options(length);
    let data = load_text("rows.jsonl", line.repeat(count).as_bytes(), Kind::Jsonl, None, &options).unwrap();
    RowStatistics::of(&data)
}

#[test]
fn the_order_of_the_rows_is_planned() {
    let config = xl();
    let set = set(&config, "c_attn");
    let peak = |rows: &RowStatistics| {
        let job = TrainingJob { rows: Some(rows), ..job(&config, &set, 1) };
        plan(&job, config_of(Policy::default())).unwrap().peak().1
    };
    let (few, many) = (statistics(3, 8, 0), statistics(1003, 8, 0));
    assert_eq!((few.rows(), many.rows()), (3, 1003));
    assert_eq!(peak(&many) - peak(&few), 4 * 1000);
}

#[test]
fn rows_change_the_time_that_is_shown_and_no_choice() {
    let (config, rates) = (xl(), Rates::NOMINAL_CPU);
    let set = set(&config, "c_attn");
    let job = job(&config, &set, 4);
    let whole = crate::plan::choose(&job, None, &rates).unwrap().chosen;
    let seconds = |rows: &RowStatistics| {
        let job = TrainingJob { rows: Some(rows), ..job };
        let chosen = crate::plan::choose(&job, None, &rates).unwrap().chosen;
        assert_eq!(chosen.plan.config, whole.plan.config);
        job.expected_seconds(chosen.plan.config, &rates)
    };
    let full = seconds(&statistics(4, 1024, 0));
    // The last of 1024 positions has no target.
    assert!((0.999..1.0).contains(&(full / whole.seconds)), "{full} {}", whole.seconds);
    // Half the loss: half the head, and most of half the last block.
    let masked = seconds(&statistics(4, 1024, 512));
    assert!(masked < full && masked > 0.8 * full, "{masked} {full}");
    // Half as long rows: less than half the time, because attention is quadratic.
    let short = seconds(&statistics(4, 512, 0));
    assert!((0.4 * full..0.5 * full).contains(&short), "{short} {full}");
}
