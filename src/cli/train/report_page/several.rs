//! Several runs side by side: as a page, and as lines for a terminal.

use super::{
    chart::{Chart, Curve, Stroke},
    history::{History, span},
    html::{self, Column, escaped, figure, whole},
    one::{HALF, WIDE, number, numbers},
};
use crate::{cli::train::table::aligned, error::Result, plan::size};

/// Names that tell the runs apart: those of their folders, or their paths where two folders have one name.
fn names(runs: &[History]) -> Vec<String> {
    let short: Vec<String> = runs.iter().map(History::name).collect();
    let is_twice = |name: &String| short.iter().filter(|other| *other == name).count() > 1;
    let name = |(run, short): (&History, &String)| {
        if is_twice(short) { run.folder.display().to_string() } else { short.clone() }
    };
    runs.iter().zip(&short).map(name).collect()
}

/// Columns of the table in which runs are compared; its cells are text, a dash where a value is unknown.
pub const TITLES: [&str; 9] =
    ["run", "state", "step", "loss", "eval loss", "perplexity", "tokens/s", "memory", "time"];

/// The cells of a run called `name` under [`TITLES`].
fn cells(name: String, history: &History) -> [String; 9] {
    let dash = || "-".to_owned();
    let eval = history.last_eval();
    [
        name,
        history.state_text(),
        format!("{} of {}", history.done(), history.planned_steps()),
        history.steps.last().map_or_else(dash, |point| format!("{:.4}", point.smoothed)),
        eval.map_or_else(dash, |eval| format!("{:.4}", eval.loss)),
        eval.and_then(|eval| eval.perplexity).map_or_else(dash, |value| format!("{value:.2}")),
        history.tokens_per_s().map_or_else(dash, whole),
        history.peak().map_or_else(dash, size),
        span(history.elapsed),
    ]
}

/// Columns of numbers.
const NUMBERS: [usize; 7] = [2, 3, 4, 5, 6, 7, 8];

/// An option by which runs differ: its name, and each run's value.
fn differences(runs: &[History]) -> Vec<(&str, Vec<&str>)> {
    let options: Vec<_> = runs.iter().map(History::options).collect();
    let mut names: Vec<&str> = options.iter().flatten().map(|(name, _)| *name).collect();
    names.sort_unstable();
    names.dedup();
    let row = |name| (name, options.iter().map(|options| value(options, name)).collect::<Vec<_>>());
    names.into_iter().map(row).filter(|(_, values)| values.iter().any(|value| *value != values[0])).collect()
}

fn value<'a>(options: &[(&'a str, &'a str)], name: &str) -> &'a str {
    options.iter().find(|(own, _)| *own == name).map_or("-", |(_, value)| *value)
}

/// A table of the runs, and of the options by which they differ.
pub fn lines(runs: &[History]) -> String {
    let mut rows = vec![TITLES.map(str::to_owned)];
    rows.extend(names(runs).into_iter().zip(runs).map(|(name, run)| cells(name, run)));
    let mut text = aligned(&rows, &NUMBERS) + "\n";
    for (name, values) in differences(runs) {
        text += &format!("{name}: {}\n", values.join(" | "));
    }
    text
}

/// The page of several runs.
///
/// # Errors
/// When a picture cannot be drawn.
pub fn page(runs: &[History]) -> Result<String> {
    let title = format!("{} runs", runs.len());
    let columns: Vec<Column> = (0..TITLES.len())
        .map(|at| Column { title: TITLES[at], class: if NUMBERS.contains(&at) { "number" } else { "" } })
        .collect();
    let rows: Vec<Vec<String>> =
        names(runs).into_iter().zip(runs).map(|(name, run)| cells(name, run).to_vec()).collect();
    let mut body = format!("<h1>{}</h1>\n{}", escaped(&title), html::table(&columns, &rows));
    body += &charts(runs)?;
    body += &options(runs);
    body += &samples(runs);
    Ok(html::page(&format!("{title}: engraft"), &body))
}

fn charts(runs: &[History]) -> Result<String> {
    let names = names(runs);
    let keys: Vec<(usize, &str)> = names.iter().enumerate().map(|(at, name)| (at, name.as_str())).collect();
    let mut out = String::from("<h2>Course of the runs</h2>\n<div class=\"charts\">\n");
    let chart = |curves, from_zero, label, size| Chart { curves, from_zero, label, size };
    let smoothed =
        |(at, run): (usize, &History)| Curve::of(&run.steps, Stroke::Line, at, |point| point.smoothed);
    let curves = runs.iter().enumerate().map(smoothed).collect();
    out += &figure("Training loss, smoothed", &keys, &chart(curves, false, number, WIDE), true)?;
    if runs.iter().any(|run| !run.evals.is_empty()) {
        let evals = |(at, run): (usize, &History)| Curve {
            points: run.evals.iter().map(|eval| (eval.step as f64, eval.loss)).collect(),
            stroke: Stroke::Dots,
            colour: at,
        };
        let curves = runs.iter().enumerate().map(evals).collect();
        out += &figure("Evaluation loss", &keys, &chart(curves, false, number, WIDE), true)?;
    }
    for (title, label, value) in numbers() {
        let curve = |(at, run): (usize, &History)| Curve::of(&run.steps, Stroke::Line, at, value);
        let curves = runs.iter().enumerate().map(curve).collect();
        out += &figure(title, &[], &chart(curves, true, label, HALF), false)?;
    }
    Ok(out + "</div>\n")
}

fn options(runs: &[History]) -> String {
    let differences = differences(runs);
    if differences.is_empty() {
        return String::from("<h2>Options</h2>\n<p>All options are the same.</p>\n");
    }
    let names = names(runs);
    let first = Column { title: "option", class: "" };
    let rest = names.iter().map(|name| Column { title: name, class: "value" });
    let columns: Vec<Column> = [first].into_iter().chain(rest).collect();
    let row = |(name, values): (&str, Vec<&str>)| {
        [name].into_iter().chain(values).map(str::to_owned).collect::<Vec<_>>()
    };
    let rows: Vec<_> = differences.into_iter().map(row).collect();
    format!("<h2>Options that differ</h2>\n{}", html::table(&columns, &rows))
}

/// The last sample of each run.
fn samples(runs: &[History]) -> String {
    let row = |(name, run): (String, &History)| {
        let sample = run.samples.last()?;
        Some(vec![name, sample.prompt.trim().to_owned(), sample.text.trim().to_owned()])
    };
    let rows: Vec<_> = names(runs).into_iter().zip(runs).filter_map(row).collect();
    if rows.is_empty() {
        return String::new();
    }
    let columns = [("run", ""), ("prompt", "text"), ("continuation", "text")];
    let columns = columns.map(|(title, class)| Column { title, class });
    format!("<h2>Last samples</h2>\n{}", html::table(&columns, &rows))
}
