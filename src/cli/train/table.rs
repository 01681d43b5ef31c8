//! A memory plan as a table for people, and as JSON.

use serde_json::{Value, json};

use crate::{
    device::DType,
    observe::phase::Phase,
    plan::{Alternative, Plan, Predicted, Row, Selection, size},
    train::{PlanConfig, record},
};

/// The whole table: every buffer or group of like buffers, the phases, the choice and its alternatives.
pub fn whole(selection: &Selection<PlanConfig>) -> String {
    let plan = &selection.chosen.plan;
    let mut lines =
        vec![["role", "what", "shape", "type", "count", "bytes", "place", "needed for"].map(str::to_owned)];
    lines.extend(roles(plan).into_iter().flat_map(|role| of_role(plan, role)).map(|row| {
        [
            row.role.to_owned(),
            row.name.clone(),
            shape(row),
            row.dtype.map_or("", type_name).to_owned(),
            row.count.to_string(),
            size(row.bytes),
            row.place.name().to_owned(),
            row.lifetime.to_owned(),
        ]
    }));
    let phases = plan.by_phase().map(|(phase, bytes)| format!("{phase} {}", size(bytes))).join(", ");
    format!("{}\n\nphases: {phases}\n{}\n", aligned(&lines, &[4, 5]), summary(selection))
}

/// The roles of the rows in the order of the plan, each once: rows of a role need not be neighbours.
fn roles(plan: &Plan<PlanConfig>) -> Vec<&'static str> {
    let mut roles = Vec::new();
    for row in &plan.rows {
        if !roles.contains(&row.role) {
            roles.push(row.role);
        }
    }
    roles
}

fn of_role<'a>(plan: &'a Plan<PlanConfig>, role: &'a str) -> impl Iterator<Item = &'a Row> {
    plan.rows.iter().filter(move |row| row.role == role)
}

/// The choice, its memory and time, and its alternatives.
fn summary(selection: &Selection<PlanConfig>) -> String {
    let plan = &selection.chosen.plan;
    let (phase, peak) = plan.peak();
    let of = selection.budget.map_or(String::new(), |budget| format!(" of {}", size(budget)));
    let mut lines = vec![
        format!("peak     {}{of} ({phase}){}", size(peak), time(&selection.chosen)),
        format!("chosen   {}", plan.config),
    ];
    lines.extend(selection.alternatives.iter().map(|other| format!("         {}", sentence(other))));
    lines.join("\n")
}

/// `recompute none: +1.90GiB, 1.24x faster`.
fn sentence(other: &Alternative) -> String {
    let sign = if other.bytes < 0 { '-' } else { '+' };
    let time = match other.time {
        time if time > 1.005 => format!("{time:.2}x slower"),
        time if time < 0.995 => format!("{:.2}x faster", 1.0 / time),
        _ => "as fast".to_owned(),
    };
    let fits = if other.fits { "" } else { ", does not fit" };
    format!("{}: {sign}{}, {time}{fits}", other.option, size(other.bytes.unsigned_abs()))
}

/// The time of a step, if the speeds are those of this machine.
fn time(chosen: &Predicted<PlanConfig>) -> String {
    if chosen.measured { format!("; about {} a step", duration(chosen.seconds)) } else { String::new() }
}

/// Seconds with a suitable unit.
fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 0.1 => format!("{:.0} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.1} s"),
        s => format!("{:.0} s", s),
    }
}

fn shape(row: &Row) -> String {
    let sizes: Vec<String> = row.shape.iter().map(ToString::to_string).collect();
    if sizes.is_empty() { String::new() } else { format!("({})", sizes.join(", ")) }
}

/// The name of an element type, as in safetensors but in lower case.
pub fn type_name(dtype: DType) -> &'static str {
    dtype.name()
}

/// Columns side by side; those of `right` flush right.
pub(super) fn aligned<const N: usize>(lines: &[[String; N]], right: &[usize]) -> String {
    let width: [usize; N] = std::array::from_fn(|column| {
        lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0)
    });
    let cell = |line: &[String; N], column: usize| match right.contains(&column) {
        true => format!("{:>width$}", line[column], width = width[column]),
        false => format!("{:<width$}", line[column], width = width[column]),
    };
    let text = |line: &[String; N]| {
        let cells: Vec<String> = (0..N).map(|column| cell(line, column)).collect();
        cells.join("  ").trim_end().to_owned()
    };
    lines.iter().map(text).collect::<Vec<_>>().join("\n")
}

/// The JSON event `plan`.
pub fn event(selection: &Selection<PlanConfig>) -> Value {
    let plan = &selection.chosen.plan;
    let (phase, peak) = plan.peak();
    json!({
        "event": "plan",
        "time": record::now(),
        "peak_bytes": peak,
        "peak_moment": phase.name(),
        "budget_bytes": selection.budget,
        "seconds_per_step": selection.chosen.measured.then_some(selection.chosen.seconds),
        "policy": policy(plan),
        "moments": plan.by_phase().map(|(phase, bytes)| (phase.name(), bytes)).into_iter()
            .collect::<std::collections::BTreeMap<_, _>>(),
        "rows": plan.rows.iter().map(row).collect::<Vec<_>>(),
        "alternatives": selection.alternatives.iter().map(|other| json!({
            "option": other.option, "bytes": other.bytes, "time": other.time, "fits": other.fits,
        })).collect::<Vec<_>>(),
    })
}

fn policy(plan: &Plan<PlanConfig>) -> Value {
    let config = plan.config;
    let policy = config.policy;
    json!({
        "micro_batch": config.micro_batch,
        "recompute": policy.recompute.to_string(),
        "head_rows": policy.head_rows,
        "stream_base": policy.stream,
        "offload_inputs": policy.inputs.is_away(),
        "offload_optimizer": policy.moments.is_away(),
        "optimizer": config.optimizer.name(),
        "activations": type_name(policy.activations),
    })
}

fn row(row: &Row) -> Value {
    let resident = |phase: &Phase| (phase.name(), row.resident(*phase));
    json!({
        "role": row.role,
        "name": row.name,
        "dtype": row.dtype.map(type_name),
        "shape": row.shape,
        "count": row.count,
        "bytes": row.bytes,
        "place": row.place.name(),
        "lifetime": row.lifetime,
        "resident": Phase::ALL.iter().map(resident).collect::<std::collections::BTreeMap<_, _>>(),
    })
}
