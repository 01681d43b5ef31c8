//! Memory of the device: never more than planned, and a training that does not fit is refused in one sentence.

use std::sync::Arc;

use engraft::{
    device::{DType, Device, DeviceKind, OwnMemory, arena::Placement},
    engine::Trainer,
    error::{Error, Result},
    model::{Base, BaseDType, Policy},
    optim::OptimizerKind,
    plan::{BaseBytes, PlannedDevice, plan, size as shown},
    train::{Constraints, PlanConfig, TrainingJob},
};

use crate::{
    Line, Report,
    runs::different,
    setup::{Kind, Recipe, Size, base, held, scratch, streamed},
};

pub fn check(device: Device, types: &[DType], size: Size, report: &mut Report) -> Result<()> {
    if device.kind().shares_host_memory() {
        return Ok(());
    }
    report.add("memory", kept_for_good(device, types[0], size).map(|line| vec![line]));
    for &activations in types {
        for kept in [BaseDType::F16, BaseDType::Q8, BaseDType::Nf4] {
            report.add("memory", of_type(device, activations, size.kept_as(kept)));
        }
    }
    report.add("out of memory", too_little(device, types, size));
    Ok(())
}

/// A base and trainings on it, then trainings on a streamed one.
fn of_type(device: Device, activations: DType, size: Size) -> Result<Vec<Line>> {
    let mut lines = Vec::new();
    let before = held(device) - scratch(device);
    let base = base(size, device, activations)?;
    let taken = held(device) - scratch(device) - before;
    let planned = BaseBytes::on_device(&base.config, base.dtype, memory()).total() as usize;
    lines.push(beyond(&format!("memory: {} base", base.dtype.name()), activations, taken, planned));
    for (kind, optimizer) in [
        (Kind::Both, OptimizerKind::AdamW),
        (Kind::Prefix, OptimizerKind::AdamW8bit),
        (Kind::Dora, OptimizerKind::AdamW),
        (Kind::Several, OptimizerKind::AdamW),
    ] {
        lines.extend(training(&base, before, Recipe { optimizer, ..Recipe::of(kind, size) })?);
    }
    drop(base);
    let before = held(device) - scratch(device);
    let base = streamed(size, device, activations)?;
    let recipe = Recipe::of(Kind::Both, size);
    let policy = Policy { stream: true, ..recipe.policy };
    lines.extend(training(&base, before, Recipe { policy, ..recipe })?);
    let policy = Policy { inputs: Placement::Host, moments: Placement::Host, ..policy };
    lines.extend(training(&base, before, Recipe { policy, ..recipe })?);
    Ok(lines)
}

/// Memory of a CUDA device.
fn memory() -> &'static OwnMemory {
    DeviceKind::CUDA.own_memory.as_ref().expect("CUDA devices have memory of their own")
}

/// Memory that a device uses from its first training on; later trainings are counted without it.
fn kept_for_good(device: Device, activations: DType, size: Size) -> Result<Line> {
    let first = base(size, device, activations)?;
    Recipe { optimizer: OptimizerKind::AdamW8bit, ..Recipe::of(Kind::Prefix, size) }.run(&first)?;
    drop(first);
    let fixed = device.kind().own_memory.map_or(0, |own| own.fixed);
    Ok(beyond("memory: kept for good", activations, held(device) - scratch(device), fixed))
}

/// Bytes beyond the plan, as a part of it: none are allowed.
fn beyond(what: &str, activations: DType, held: usize, planned: usize) -> Line {
    let over = held.saturating_sub(planned) as f64 / planned.max(1) as f64;
    Line::new(format!("{what}: {held} B held of {planned} B"), activations, over, 0.0)
}

/// Compares memory with the plan of a run: that of the new trainer without the base, and all of it after the steps.
fn training(base: &Arc<Base>, before: usize, recipe: Recipe) -> Result<Vec<Line>> {
    let (device, activations) = (base.device, base.activations);
    let streamed = if recipe.policy.stream { ", streamed" } else { "" };
    let away = if recipe.policy.inputs.is_away() { ", offloaded" } else { "" };
    let (kind, optimizer, kept) = (recipe.kind.name(), recipe.optimizer.name(), base.dtype.name());
    let name = format!("memory, {kind}, {optimizer}, {kept} base{streamed}{away}");
    let without_scratch = held(device) - scratch(device);
    let scratch_before = scratch(device);
    let mut prepared = recipe.prepare(base)?;
    let buffers = held(device) - scratch(device) - without_scratch;
    prepared.steps(1)?;
    let after = held(device) - scratch(device) - before;
    let set = recipe.set(base)?;
    let job = TrainingJob {
        base_dtype: base.dtype,
        config: &base.config,
        set: &set,
        batch: recipe.size.rows,
        seq_len: recipe.size.tokens,
        device: PlannedDevice::of(device, base.weights.wte.arithmetic),
        program: 0,
        rows_on_heap: 0,
        rows: None,
        sample_tokens: 0,
        streamable: true,
        constraints: Constraints::default(),
    };
    let policy = Policy { activations, ..recipe.policy };
    let config = PlanConfig { micro_batch: recipe.micro_batch, policy, optimizer: recipe.optimizer };
    let rows = plan(&job, config)?.rows;
    let on_device = rows.iter().filter(|row| row.place == Placement::Memory);
    let total = on_device.map(|row| row.most_resident()).sum::<u64>() - memory().runtime;
    let all = total as usize - prepared.scratch;
    let stages = rows.iter().filter(|row| row.role == "stages" && row.place == Placement::Memory);
    let table = prepared.table + stages.map(|row| row.bytes as usize).sum::<usize>();
    // Scratch that an earlier, larger training left does not count.
    let most_scratch = prepared.scratch.max(scratch_before);
    Ok(vec![
        beyond(&format!("{name}: buffers"), activations, buffers, table),
        beyond(&format!("{name}: all"), activations, after, all),
        beyond(&format!("{name}: scratch"), activations, scratch(device), most_scratch),
    ])
}

/// A training that is larger than the device is refused with both sizes and leaves nothing allocated: the next one
/// has the bits of the one before.
fn too_little(device: Device, types: &[DType], size: Size) -> Result<Vec<Line>> {
    let activations = types.first().copied().unwrap_or(DType::F32);
    let base = base(size, device, activations)?;
    let recipe = Recipe::of(Kind::Both, size);
    let first = recipe.run(&base)?;
    let before = held(device) - scratch(device);
    let free = device.free().unwrap_or(u64::MAX);
    let mut large = recipe;
    loop {
        large.micro_batch *= 2;
        let table = Trainer::plan(&base.config, &large.set(&base)?, large.options(activations))?;
        let planned: u64 = table.iter().map(|row| row.bytes() as u64).sum();
        if planned > free.saturating_mul(2) {
            break;
        }
    }
    let message = match large.prepare(&base) {
        Err(Error::Memory(report)) => report.message,
        Err(other) => format!("another error: {other}"),
        Ok(_) => "no error".to_owned(),
    };
    eprintln!("out of memory, with {} free: {message}", shown(free));
    let clear = ["bytes for ", "CUDA device", "free: ", "use fewer or shorter rows"];
    let told = clear.iter().all(|part| message.contains(part));
    // Scratch may have grown before buffers were cut, and stays.
    let left = (held(device) - scratch(device)).abs_diff(before);
    let again = recipe.run(&base)?;
    Ok(vec![
        Line::new("out of memory: told in one sentence", activations, f64::from(u8::from(!told)), 0.0),
        Line::new("out of memory: bytes still allocated", activations, left as f64, 0.0),
        Line::new("out of memory: other bits afterwards", activations, different(&first, &again), 0.0),
    ])
}
