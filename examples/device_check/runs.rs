//! Trainings on the device: as on the CPU within rounding, the same bits with and without recompute and streaming,
//! and as much memory as was planned.

use std::{collections::BTreeMap, sync::Arc};

use engraft::{
    device::{DType, Device, arena::Placement},
    error::Result,
    model::{AdapterBindings, Base, BaseDType, Decoder, Policy, Recompute},
    observe::machine::Machine,
    optim::OptimizerKind,
    train::save::{self, FORMAT, SaveInfo},
};
use engraft_util::rng;

use crate::{
    Line, Report, decoding,
    setup::{Kind, Outcome, Prepared, Recipe, Size, base, start, streamed},
};

/// Losses relative to the CPU's: what rounding of activations may change.
pub fn loss_bound(activations: DType) -> f64 {
    match activations {
        DType::F16 => 5e-3,
        DType::BF16 => 3e-2,
        _ => 1e-5,
    }
}

/// Gradients, and logits, relative to the largest of a tensor.
pub fn element_bound(activations: DType) -> f64 {
    match activations {
        DType::F16 => 1e-2,
        DType::BF16 => 8e-2,
        _ => 2e-5,
    }
}

pub fn check(device: Device, types: &[DType], size: Size, report: &mut Report) -> Result<()> {
    let cpu = base(size, Device::Cpu, DType::F32)?;
    for &activations in types {
        let base = base(size, device, activations)?;
        for kind in Kind::ALL {
            report.add(kind.name(), against_cpu(&cpu, &base, kind.name(), Recipe::of(kind, size)));
        }
        let name = "lora without dropout";
        report.add(name, against_cpu(&cpu, &base, name, without_dropout(size)));
        report.add("ops fused and apart", fused_and_apart(&base, without_dropout(size), size.steps));
        report.add("policies", same_bits(&base, size));
        for kind in [Kind::Dora, Kind::Several] {
            report.add("policies", same_bits_of(&base, Recipe::of(kind, size)));
        }
        if activations != DType::F32 {
            report.add("heads of 64", wide_heads(device, activations, size.with_wide_heads()));
        }
        report.add("micro-batches", micro_batches(&base, size).map(|line| vec![line]));
        report.add("resume", resumed(&base, size));
        report.add("generation", generation(&cpu, &base, size));
        report.add("launches", decoding::launches(&base, size));
    }
    Ok(())
}

/// Trainings and generation on bases of codes, against those of the CPU on the same codes.
pub fn check_codes(device: Device, types: &[DType], size: Size, report: &mut Report) -> Result<()> {
    for &activations in types {
        for kept in [BaseDType::Nf4, BaseDType::Q8] {
            coded(device, activations, size.kept_as(kept), report)?;
        }
    }
    Ok(())
}

/// Those on one kind of codes.
fn coded(device: Device, activations: DType, size: Size, report: &mut Report) -> Result<()> {
    let kept = format!("{} base", size.kept.name());
    let mut add = |what: &str, found: Result<Vec<Line>>| {
        let lines = found.map(|lines| lines.into_iter().map(|line| line.of(&kept)).collect());
        report.add(&format!("{kept}, {what}"), lines);
    };
    let (cpu, base) = (base(size, Device::Cpu, DType::F32)?, base(size, device, activations)?);
    let recipes = [
        ("lora without dropout", without_dropout(size)),
        (Kind::Both.name(), Recipe::of(Kind::Both, size)),
        (Kind::Dora.name(), Recipe::of(Kind::Dora, size)),
        (Kind::Several.name(), Recipe::of(Kind::Several, size)),
    ];
    for (name, recipe) in recipes {
        add(name, against_cpu(&cpu, &base, name, recipe));
    }
    add("ops fused and apart", fused_and_apart(&base, without_dropout(size), size.steps));
    add("policies", same_bits(&base, size));
    add("policies", same_bits_of(&base, Recipe::of(Kind::Dora, size)));
    add("resume", resumed(&base, size));
    add("generation", generation(&cpu, &base, size));
    add("launches", decoding::launches(&base, size));
    Ok(())
}

/// The largest difference over the largest expected element; infinite where something is not finite.
pub fn largest_error(expected: &[f32], found: &[f32]) -> f64 {
    if expected.len() != found.len() {
        return f64::INFINITY;
    }
    let largest = expected.iter().fold(1e-30f64, |most, value| most.max(f64::from(value.abs())));
    let errors = expected.iter().zip(found).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs() / largest);
    errors.fold(0.0, |most, error| if error.is_finite() { most.max(error) } else { f64::INFINITY })
}

fn relative(expected: f64, found: f64) -> f64 {
    let error = (found - expected).abs() / expected.abs();
    if error.is_finite() { error } else { f64::INFINITY }
}

/// How many numbers have other bits.
pub fn different(a: &Outcome, b: &Outcome) -> f64 {
    let values = a.values.iter().zip(&b.values).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    let losses = a.losses.iter().zip(&b.losses).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
    (values + losses + a.values.len().abs_diff(b.values.len()) + a.losses.len().abs_diff(b.losses.len()))
        as f64
}

/// Gradients of the first step, losses of all, with either kind of moments, and the loss of an evaluation.
fn against_cpu(cpu: &Arc<Base>, base: &Arc<Base>, name: &str, recipe: Recipe) -> Result<Vec<Line>> {
    let activations = base.activations;
    let (mut expected, mut found) = (recipe.prepare(cpu)?, recipe.prepare(base)?);
    let mut lines = Vec::new();
    let evaluated = |prepared: &mut Prepared| {
        let batches = prepared.batches.clone();
        prepared.trainer.evaluate(&mut batches.into_iter()).map(|evaluation| evaluation.loss)
    };
    let error = relative(evaluated(&mut expected)?, evaluated(&mut found)?);
    lines.push(Line::new(
        format!("{name}: loss of an evaluation"),
        activations,
        error,
        loss_bound(activations),
    ));
    for prepared in [&mut expected, &mut found] {
        prepared.trainer.accumulate(&prepared.batches)?;
    }
    let (wanted, gradient) = (expected.trainer.gradient(), found.trainer.gradient());
    let ranges = expected.trainer.set().layout.tensors.iter().map(|slot| slot.range());
    let error =
        ranges.map(|range| largest_error(&wanted[range.clone()], &gradient[range])).fold(0.0, f64::max);
    lines.push(Line::new(format!("{name}: gradients"), activations, error, element_bound(activations)));
    lines.push(losses(
        name,
        activations,
        &expected.steps(recipe.size.steps)?,
        &found.steps(recipe.size.steps)?,
    ));
    drop((expected, found));
    if recipe.kind == Kind::Prefix {
        let coded = Recipe { optimizer: OptimizerKind::AdamW8bit, ..recipe };
        lines.push(losses("prefix, 8-bit moments", activations, &coded.run(cpu)?, &coded.run(base)?));
    }
    Ok(lines)
}

/// The largest relative difference between losses, which must also fall.
fn losses(name: &str, activations: DType, expected: &Outcome, found: &Outcome) -> Line {
    let errors =
        expected.losses.iter().zip(&found.losses).map(|(expected, found)| relative(*expected, *found));
    let falls = found.losses.last() < found.losses.first();
    let error = if falls { errors.fold(0.0, f64::max) } else { f64::INFINITY };
    Line::new(format!("{name}: falling losses"), activations, error, 2.0 * loss_bound(activations))
}

/// LoRA whose deltas are fused into the products of a device.
fn without_dropout(size: Size) -> Recipe {
    Recipe { dropout: 0.0, ..Recipe::of(Kind::Lora, size) }
}

/// Many steps with fused ops beside as many with each step a launch of its own: rounding must not add up.
pub fn apart(device: Device, types: &[DType], size: Size, report: &mut Report) -> Result<()> {
    for &activations in types.iter().filter(|dtype| dtype.size() == 2) {
        let base = base(size, device, activations)?;
        report.add("ops fused and apart", fused_and_apart(&base, without_dropout(size), 200));
    }
    Ok(())
}

/// Gradients of the first step and losses of `steps` steps, with fused ops and with each step apart.
fn fused_and_apart(base: &Arc<Base>, recipe: Recipe, steps: usize) -> Result<Vec<Line>> {
    let of = |fuses: bool| -> Result<(Vec<f32>, Outcome)> {
        base.device.fuse_ops(fuses);
        let mut prepared = recipe.prepare(base)?;
        prepared.trainer.accumulate(&prepared.batches)?;
        Ok((prepared.trainer.gradient(), prepared.steps(steps)?))
    };
    let apart = of(false);
    let fused = of(true);
    let ((apart_gradient, apart), (gradient, fused)) = (apart?, fused?);
    let name = format!("ops fused and apart, {steps} steps");
    let activations = base.activations;
    Ok(vec![
        Line::new(
            "ops fused and apart: gradients",
            activations,
            largest_error(&apart_gradient, &gradient),
            element_bound(activations),
        ),
        losses(&name, activations, &apart, &fused),
    ])
}

/// Settings that change memory but no bit.
fn same_bits(base: &Arc<Base>, size: Size) -> Result<Vec<Line>> {
    let recipe = Recipe { micro_batch: size.rows / 2, ..Recipe::of(Kind::Both, size) };
    let kept = recipe.run(base)?;
    let again = |recompute| Policy { recompute, ..recipe.policy };
    let policies = [Recompute::Mlp, Recompute::Linear, Recompute::Every(2), Recompute::All].map(again);
    let mut lines = Vec::new();
    for policy in policies {
        let found = Recipe { policy, ..recipe }.run(base)?;
        let name = format!("recompute {}: other bits", policy.recompute);
        lines.push(Line::new(name, base.activations, different(&kept, &found), 0.0));
    }
    let streamed = streamed(size, base.device, base.activations)?;
    let away = Policy { inputs: Placement::Host, moments: Placement::Host, ..recipe.policy };
    for (what, policy) in [
        ("inputs", Policy { moments: Placement::Memory, ..away }),
        ("optimizer", Policy { inputs: Placement::Memory, ..away }),
        ("inputs, recompute all", Policy { moments: Placement::Memory, recompute: Recompute::All, ..away }),
    ] {
        for optimizer in [OptimizerKind::AdamW, OptimizerKind::AdamW8bit] {
            let recipe = Recipe { optimizer, ..recipe };
            let kept = recipe.run(base)?;
            let found = Recipe { policy, ..recipe }.run(base)?;
            let name = format!("offloaded {what}, {}: other bits", optimizer.name());
            lines.push(Line::new(name, base.activations, different(&kept, &found), 0.0));
        }
    }
    let policy = Policy { stream: true, recompute: Recompute::All, ..away };
    let found = Recipe { policy, ..recipe }.run(&streamed)?;
    let name = "streamed base, all offloaded, recompute all: other bits";
    lines.push(Line::new(name, base.activations, different(&kept, &found), 0.0));
    let policy = Policy { stream: true, ..recipe.policy };
    let found = Recipe { policy, ..recipe }.run(&streamed)?;
    lines.push(Line::new("streamed base: other bits", base.activations, different(&kept, &found), 0.0));
    let evaluated = |base: &Arc<Base>, policy| -> Result<f64> {
        let mut prepared = Recipe { policy, ..recipe }.prepare(base)?;
        let batches = prepared.batches.clone();
        Ok(prepared.trainer.evaluate(&mut batches.into_iter())?.loss)
    };
    let (resident, moving) = (evaluated(base, recipe.policy)?, evaluated(&streamed, policy)?);
    let other = f64::from(u8::from(resident.to_bits() != moving.to_bits()));
    lines.push(Line::new("streamed base: other loss of an evaluation", base.activations, other, 0.0));
    // Deltas that are fused into their products.
    let recipe = Recipe { micro_batch: size.rows / 2, ..without_dropout(size) };
    let kept = recipe.run(base)?;
    for recompute in [Recompute::Mlp, Recompute::Linear, Recompute::All] {
        let found = Recipe { policy: again(recompute), ..recipe }.run(base)?;
        let name = format!("without dropout, recompute {recompute}: other bits");
        lines.push(Line::new(name, base.activations, different(&kept, &found), 0.0));
    }
    let policy = Policy { stream: true, recompute: Recompute::All, ..away };
    let found = Recipe { policy, ..recipe }.run(&streamed)?;
    let name = "without dropout, streamed base, all offloaded, recompute all: other bits";
    lines.push(Line::new(name, base.activations, different(&kept, &found), 0.0));
    let (resident, moving) = (decode(base, Kind::Both, size)?, decode(&streamed, Kind::Both, size)?);
    lines.push(Line::new("streamed base: other logits", base.activations, bits(&resident, &moving), 0.0));
    Ok(lines)
}

/// Two settings that change all about memory and no bit, for other kinds of parts than [`same_bits`] has.
fn same_bits_of(base: &Arc<Base>, recipe: Recipe) -> Result<Vec<Line>> {
    let recipe = Recipe { micro_batch: recipe.size.rows / 2, ..recipe };
    let (name, kept) = (recipe.kind.name(), recipe.run(base)?);
    let policy = Policy { recompute: Recompute::All, ..recipe.policy };
    let recomputed = Recipe { policy, ..recipe }.run(base)?;
    let policy = Policy { stream: true, inputs: Placement::Host, moments: Placement::Host, ..policy };
    let streamed = streamed(recipe.size, base.device, base.activations)?;
    let moved = Recipe { policy, ..recipe }.run(&streamed)?;
    let line = |what: &str, found: &Outcome| {
        Line::new(format!("{name}, {what}: other bits"), base.activations, different(&kept, found), 0.0)
    };
    Ok(vec![line("recompute all", &recomputed), line("streamed base, all offloaded, recompute all", &moved)])
}

/// Tensor cores in attention: as the CPU, and the same bits again.
fn wide_heads(device: Device, activations: DType, size: Size) -> Result<Vec<Line>> {
    let recipe = Recipe::of(Kind::Both, size);
    let (cpu, base) = (base(size, Device::Cpu, DType::F32)?, base(size, device, activations)?);
    let (expected, kept) = (recipe.run(&cpu)?, recipe.run(&base)?);
    let policy = Policy { recompute: Recompute::All, ..recipe.policy };
    let again = Recipe { policy, ..recipe }.run(&base)?;
    Ok(vec![
        losses("heads of 64", activations, &expected, &kept),
        Line::new("heads of 64, recompute all: other bits", activations, different(&kept, &again), 0.0),
    ])
}

/// The gradient of all rows at once against that of one row at a time, with dropout.
fn micro_batches(base: &Arc<Base>, size: Size) -> Result<Line> {
    let gradient = |micro_batch| -> Result<Vec<f32>> {
        let mut prepared = Recipe { micro_batch, ..Recipe::of(Kind::Both, size) }.prepare(base)?;
        prepared.trainer.accumulate(&prepared.batches)?;
        Ok(prepared.trainer.gradient())
    };
    let error = largest_error(&gradient(size.rows)?, &gradient(1)?);
    Ok(Line::new("micro-batches: gradients", base.activations, error, element_bound(base.activations)))
}

/// A training that is cut by a save goes on with the bits it would have had, with either kind of moments.
fn resumed(base: &Arc<Base>, size: Size) -> Result<Vec<Line>> {
    let recipe = Recipe::of(Kind::Prefix, size);
    let both = [(Kind::Both, OptimizerKind::AdamW), (Kind::Prefix, OptimizerKind::AdamW8bit)];
    let mut lines = Vec::new();
    for (kind, optimizer) in both {
        let recipe = Recipe { kind, optimizer, ..recipe };
        let whole = recipe.run(base)?;
        let mut first = recipe.prepare(base)?;
        let mut losses = first.steps(1)?.losses;
        let folder = std::env::temp_dir().join(format!("device-check-save-{}", std::process::id()));
        let path = std::fs::create_dir_all(&folder)
            .map_err(|cause| engraft::error::Error::failed(format!("{}: {cause}", folder.display())))
            .and_then(|()| save::write(&folder, &info(base, &first, optimizer), &first.trainer.tensors()));
        drop(first);
        let mut second = recipe.prepare(base)?;
        let save = path.and_then(|path| save::read(&path));
        let _ = std::fs::remove_dir_all(&folder);
        let save = save?;
        second.trainer.restore(save.info.step, &save.tensors())?;
        second.trainer.restore_loss_scale(save.info.loss_scale);
        let rest = second.steps(size.steps - 1)?;
        losses.extend(rest.losses);
        let found = Outcome { losses, values: rest.values };
        let name = format!("resume, {}: other bits", optimizer.name());
        lines.push(Line::new(name, base.activations, different(&whole, &found), 0.0));
    }
    Ok(lines)
}

fn info(base: &Base, prepared: &Prepared, optimizer: OptimizerKind) -> SaveInfo {
    let set = prepared.trainer.set();
    SaveInfo {
        format: FORMAT,
        step: prepared.trainer.steps_done(),
        steps: 0,
        options: BTreeMap::new(),
        base: base.weights.fingerprint.clone(),
        data: String::new(),
        machine: Machine {
            device: base.device.kind().name.to_owned(),
            precision: format!("{:?}", base.activations),
            dispatch: base.device.dispatch(base.activations),
        },
        spec: set.spec.clone(),
        tensors: set.layout.tensors.iter().map(|slot| slot.name.clone()).collect(),
        optimizer: optimizer.name().to_owned(),
        loss_scale: prepared.trainer.loss_scale(),
        progress: Default::default(),
    }
}

fn text(base: &Base, size: Size) -> Vec<u32> {
    (0..size.tokens as u64).map(|at| (rng::bits(9, at) % base.config.vocab as u64) as u32).collect()
}

/// A decoder of two rows with an adapter.
pub fn decoder(base: &Arc<Base>, kind: Kind, size: Size) -> Result<Decoder> {
    let set = Recipe::of(kind, size).set(base)?;
    let bindings = AdapterBindings::new(&[(&set, 1.0)], base.config.layers)?;
    let values = start(&set, self::base(size, Device::Cpu, DType::F32)?.as_ref())?;
    Decoder::new(Arc::clone(base), bindings, values, 2, size.tokens)
}

/// Logits after a text that is read in one pass.
fn decode(base: &Arc<Base>, kind: Kind, size: Size) -> Result<Vec<f32>> {
    Ok(decoder(base, kind, size)?.feed(&text(base, size))?.to_vec())
}

/// Logits after the same text, a token at a time, the last four by two rows that began alike; then once more from the
/// middle, with work that was recorded for one row, for two and for one again; and whether it was.
fn stepwise(base: &Arc<Base>, size: Size) -> Result<([Vec<f32>; 2], bool)> {
    let ids = text(base, size);
    let mut decoder = decoder(base, Kind::Both, size)?;
    let (begin, end) = ids.split_at(ids.len() - 4);
    let mut passes = [0, begin.len() / 2].into_iter().map(|from| -> Result<Vec<f32>> {
        decoder.rewind(from);
        for id in &begin[from..] {
            decoder.feed(&[*id])?;
        }
        decoder.fork(2);
        let mut logits = Vec::new();
        for id in end {
            logits = decoder.feed_each(&[*id, *id])?.to_vec();
        }
        Ok(logits)
    });
    let mut next = || passes.next().unwrap_or_else(|| Ok(Vec::new()));
    let both = [next()?, next()?];
    drop(passes);
    Ok((both, decoder.is_recorded()))
}

/// Logits after a text, with an adapter: fed whole against the CPU's, and token by token against whole; recorded work against
/// that of a streamed base, which is never recorded.
fn generation(cpu: &Arc<Base>, base: &Arc<Base>, size: Size) -> Result<Vec<Line>> {
    let (expected, whole) = (decode(cpu, Kind::Both, size)?, decode(base, Kind::Both, size)?);
    let ([rows, again], recorded) = stepwise(base, size)?;
    let streamed = streamed(size, base.device, base.activations)?;
    let ([launched, _], streams) = stepwise(&streamed, size)?;
    let as_meant = recorded == base.device.kind().records_graphs && !streams;
    let (first, second) = rows.split_at(base.config.vocab);
    let line = |what: &str, error| {
        Line::new(format!("generation: {what}"), base.activations, error, element_bound(base.activations))
    };
    let mut lines = vec![
        line("logits", largest_error(&expected, &whole)),
        line("token by token", largest_error(&whole, first)),
        Line::new("generation: two rows alike, other bits", base.activations, bits(first, second), 0.0),
        Line::new("generation: recorded, other bits", base.activations, bits(&launched, &rows), 0.0),
        Line::new(
            "generation: recorded where it should be",
            base.activations,
            f64::from(u8::from(!as_meant)),
            0.0,
        ),
        Line::new("generation: rewound, other bits", base.activations, bits(&rows, &again), 0.0),
    ];
    for kind in [Kind::Dora, Kind::Several] {
        let error = largest_error(&decode(cpu, kind, size)?, &decode(base, kind, size)?);
        lines.push(line(&format!("logits, {}", kind.name()), error));
    }
    Ok(lines)
}

fn bits(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count() as f64
}
