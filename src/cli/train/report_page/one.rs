//! The report of one run, section by section.

use super::{
    chart::{Chart, Curve, Stroke},
    history::{History, Point, State, span},
    html::{self, Column, card, code, date, escaped, figure, whole},
};
use crate::{cli::common::output::quoted, error::Result, model::BaseDType, plan::size};

/// The page of a run.
///
/// # Errors
/// When a picture cannot be drawn.
pub fn page(history: &History) -> Result<String> {
    let name = history.name();
    let mut body = format!("<h1>{}</h1>\n{}", escaped(&name), heading(history));
    body += &cards(history);
    body += &charts(history)?;
    body += &evaluation(history);
    body += &samples(history);
    body += &usage(history);
    body += &data(history);
    body += &configuration(history);
    body += &notes(history);
    Ok(html::page(&format!("{name}: engraft run"), &body))
}

fn heading(history: &History) -> String {
    let class = match &history.state {
        State::Done(_) => "good",
        State::Failed(_) => "bad",
        State::Going(_) | State::Interrupted(_) => "",
    };
    let state = escaped(&history.state_text());
    let mut parts = vec![format!("<b class=\"{class}\">{state}</b>")];
    if let Some(start) = &history.start {
        parts.push(escaped(&format!("{} on {}", start.method, start.base)));
        parts.push(escaped(&format!("begun {}", date(history.began))));
        parts.push(escaped(&format!("engraft {}", start.engraft)));
    }
    let mut text = format!("<p class=\"muted\">{}</p>\n", parts.join(" &middot; "));
    let output = history.start.as_ref().map_or_else(String::new, |start| start.output.clone());
    match &history.state {
        State::Failed(error) => {
            text += &format!("<p class=\"bad\">{}</p>\n", escaped(&error.message));
            text += &error
                .hints
                .iter()
                .map(|hint| format!("<p>hint: {}</p>\n", escaped(hint)))
                .collect::<String>();
        }
        State::Interrupted(_) => text += &format!("<p>It goes on with</p>\n{}", code(&resume(&output))),
        State::Going(_) => {
            text += &format!(
                "<p>Written after {} of {} steps; <code>engraft report {}</code> writes it again.</p>\n",
                history.done(),
                history.planned_steps(),
                escaped(&quoted(&history.folder.display().to_string()))
            );
        }
        State::Done(_) => {}
    }
    text
}

fn resume(output: &str) -> String {
    format!("engraft train --resume --output {}", quoted(output))
}

fn cards(history: &History) -> String {
    let mut cards = String::from("<div class=\"cards\">\n");
    if let (Some(first), Some(last)) = (history.evals.first(), history.last_eval()) {
        let arrow = |a: String, b: String| if first.step == last.step { b } else { format!("{a} → {b}") };
        let loss = |value: f64| format!("{value:.4}");
        cards += &card(&arrow(loss(first.loss), loss(last.loss)), "evaluation loss");
        let perplexity = |value: Option<f64>| value.map_or("∞".to_owned(), |value| format!("{value:.2}"));
        cards += &card(&arrow(perplexity(first.perplexity), perplexity(last.perplexity)), "perplexity");
    } else if let Some(last) = history.steps.last() {
        cards += &card(&format!("{:.4}", last.smoothed), "training loss, smoothed");
    }
    let steps = format!("{} of {}", whole(history.done() as f64), whole(history.planned_steps() as f64));
    cards += &card(&steps, &format!("steps, {:.2} epochs", history.epoch));
    cards += &card(&span(history.elapsed), "training and evaluation");
    if let Some(rate) = history.tokens_per_s() {
        cards += &card(&whole(rate), "tokens per second");
    }
    if let Some(peak) = history.peak() {
        let planned = history.plan.as_ref();
        let planned = planned.map_or(String::new(), |plan| format!(", {} planned", size(plan.peak_bytes)));
        cards += &card(&size(peak), &format!("peak memory{planned}"));
    }
    if let Some(start) = &history.start {
        cards += &card(&whole(start.trainables as f64), "trainable values");
    }
    cards + "</div>\n"
}

/// Digits that tell the marks of an axis apart, whatever their size.
pub fn number(value: &f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v < 1e-3 => format!("{value:.1e}"),
        v if v >= 1e4 => whole(*value),
        _ => format!("{}", (value * 1e4).round() / 1e4),
    }
}

/// The size of a chart over the whole width, and of half of it.
pub const WIDE: (u32, u32) = (1010, 300);
pub const HALF: (u32, u32) = (490, 200);

fn charts(history: &History) -> Result<String> {
    if history.steps.is_empty() && history.evals.is_empty() {
        return Ok(String::from("<p>No step is on record yet.</p>\n"));
    }
    let steps = &history.steps;
    let mut loss = vec![
        Curve::of(steps, Stroke::Faint, 0, |point| point.loss),
        Curve::of(steps, Stroke::Line, 0, |point| point.smoothed),
    ];
    let mut keys = vec![(0, "training: smoothed, and each step in the background")];
    if !history.evals.is_empty() {
        let points = history.evals.iter().map(|eval| (eval.step as f64, eval.loss)).collect();
        loss.push(Curve { points, stroke: Stroke::Dots, colour: 1 });
        keys.push((1, "evaluation"));
    }
    let loss = Chart { curves: loss, from_zero: false, label: number, size: WIDE };
    let mut out = String::from("<h2>Course of the run</h2>\n<div class=\"charts\">\n");
    out += &figure("Loss by step", &keys, &loss, true)?;
    for (title, label, value) in numbers() {
        let mut curves = vec![Curve::of(steps, Stroke::Line, 0, value)];
        let mut keys = Vec::new();
        if let (true, Some(plan)) = (title == MEMORY, &history.plan) {
            let ends = [steps.first(), steps.last()];
            let points =
                ends.into_iter().flatten().map(|point| (point.step, plan.peak_bytes as f64 / MIB)).collect();
            curves.push(Curve { points, stroke: Stroke::Dashes, colour: 1 });
            keys = vec![(0, "resident after a step"), (1, "planned peak")];
        }
        let chart = Chart { curves, from_zero: true, label, size: HALF };
        out += &figure(title, &keys, &chart, false)?;
    }
    Ok(out + "</div>\n")
}

const MEMORY: &str = "Memory, MiB";
const MIB: f64 = (1 << 20) as f64;

/// A number of a step, with its title and how an axis writes it.
type Number = (&'static str, fn(&f64) -> String, fn(&Point) -> f64);

/// The numbers beside the loss that are drawn.
pub fn numbers() -> [Number; 4] {
    [
        ("Learning rate", number, |point| point.lr),
        ("Gradient norm, before clipping", number, |point| point.grad_norm),
        ("Throughput, tokens per second", number, |point| point.tokens_per_s),
        (MEMORY, number, |point| point.memory / MIB),
    ]
}

fn evaluation(history: &History) -> String {
    if history.evals.is_empty() {
        return String::from(
            "<h2>Evaluation</h2>\n<p>There was no held-out data: --eval-data or --eval-fraction gives an evaluation.</p>\n",
        );
    }
    let number = |title| Column { title, class: "number" };
    let columns = [
        number("step"),
        number("epoch"),
        number("loss"),
        number("perplexity"),
        number("tokens"),
        number("time"),
    ];
    let row = |eval: &crate::train::record::EvalLine| {
        vec![
            eval.step.to_string(),
            format!("{:.2}", eval.epoch),
            format!("{:.4}", eval.loss),
            eval.perplexity.map_or("∞".to_owned(), |value| format!("{value:.2}")),
            whole(eval.tokens as f64),
            span(eval.seconds),
        ]
    };
    let rows: Vec<_> = history.evals.iter().map(row).collect();
    format!("<h2>Evaluation</h2>\n{}", html::table(&columns, &rows))
}

fn samples(history: &History) -> String {
    if history.samples.is_empty() {
        return String::new();
    }
    let columns = [
        Column { title: "step", class: "" },
        Column { title: "prompt", class: "text" },
        Column { title: "continuation", class: "text" },
    ];
    let row = |sample: &crate::train::record::SampleLine| {
        let step = if sample.base_alone { "base alone".to_owned() } else { sample.step.to_string() };
        vec![step, sample.prompt.trim().to_owned(), sample.text.trim().to_owned()]
    };
    let rows: Vec<_> = history.samples.iter().map(row).collect();
    format!("<h2>Samples</h2>\n{}", html::table(&columns, &rows))
}

/// Commands and code that use the adapter.
fn usage(history: &History) -> String {
    let Some(start) = &history.start else { return String::new() };
    let adapter = format!("{}/adapter", start.output.trim_end_matches('/'));
    let is_embedded = start.base == crate::cli::common::open::EMBEDDED;
    let mut base = if is_embedded { String::new() } else { format!(" --base {}", quoted(&start.base)) };
    let dtype = history.options().into_iter().find(|(name, _)| *name == "base-dtype");
    let dtype = dtype.map(|(_, value)| value.trim_matches('"').to_owned());
    if let Some(dtype) = dtype.filter(|dtype| dtype != BaseDType::default().name()) {
        base += &format!(" --base-dtype {dtype}");
    }
    let prompt = history.samples.last().map_or("Once", |sample| sample.prompt.trim_end());
    let mut text = String::from(
        "<h2>How to use the adapter</h2>\n<p>Generate, from the folder that the run was started in:</p>\n",
    );
    text += &code(&format!(
        "engraft-infer generate{base} --adapter {} --temperature 0 --prompt {}",
        quoted(&adapter),
        quoted(prompt)
    ));
    text += "<p>Load it with PEFT:</p>\n";
    text += &code(&python(&start.base, &adapter, &start.method, is_embedded));
    text += "<p>Train it further on other data, and look at the curves in TensorBoard:</p>\n";
    text + &code(&format!(
        "engraft train{base} --init-adapter {} --data more.jsonl\ntensorboard --logdir {}",
        quoted(&adapter),
        quoted(&start.output)
    ))
}

fn python(base: &str, adapter: &str, method: &str, is_embedded: bool) -> String {
    let (base, remark) = match is_embedded {
        true => ("examples/base", "  # in the sources of engraft"),
        false => (base, ""),
    };
    let folders: Vec<String> = match method.contains('+') {
        false => vec![adapter.to_owned()],
        true => method.split('+').map(|kind| format!("{adapter}/{kind}")).collect(),
    };
    let mut load = String::new();
    for (index, folder) in folders.iter().enumerate() {
        let model = if index == 0 { "base" } else { "model" };
        let then = if index + 1 < folders.len() { "merge_and_unload()" } else { "eval()" };
        load += &format!("model = PeftModel.from_pretrained({model}, {folder:?}).{then}\n");
    }
    format!(
        "import torch\nfrom peft import PeftModel\nfrom transformers import GPT2LMHeadModel\n\n\
         base = GPT2LMHeadModel.from_pretrained({base:?}, dtype=torch.float32){remark}\n{load}"
    )
}

fn data(history: &History) -> String {
    let Some(data) = &history.data else { return String::new() };
    let report = &data.report;
    let share = 100.0 * report.supervised as f64 / report.tokens.max(1) as f64;
    let mut rows = vec![
        ("training data", report.to_string()),
        ("supervised", format!("{share:.1}% of the tokens have a loss")),
        ("held-out rows", whole(data.eval_rows as f64)),
    ];
    if let Some(start) = &history.start {
        let sizes =
            format!("{} ({} at a time), up to {} tokens each", start.batch, start.micro_batch, start.seq_len);
        rows.push(("rows per step", sizes));
    }
    format!("<h2>Data</h2>\n{}", html::pairs(&rows))
}

fn configuration(history: &History) -> String {
    let Some(start) = &history.start else { return String::new() };
    let machine = &start.machine;
    let mut rows = vec![
        ("adapter", start.matched.join("; ")),
        ("machine", format!("{}, {}, {}", machine.device, machine.precision, machine.dispatch)),
    ];
    if let Some(plan) = &history.plan {
        rows.push(("memory plan", plan.choice.clone()));
    }
    if !history.resumed.is_empty() {
        let steps: Vec<_> = history.resumed.iter().map(u64::to_string).collect();
        rows.push(("resumed after step", steps.join(", ")));
    }
    let options: Vec<_> =
        history.options().into_iter().map(|(name, value)| (name, value.to_owned())).collect();
    format!("<h2>Configuration</h2>\n{}<h2>Options</h2>\n{}", html::pairs(&rows), html::pairs(&options))
}

fn notes(history: &History) -> String {
    if history.notes.is_empty() {
        return String::new();
    }
    let notes = history.notes.iter().map(|note| format!("<p>{}</p>\n", escaped(note)));
    format!("<h2>Hints of the run</h2>\n{}", notes.collect::<String>())
}
