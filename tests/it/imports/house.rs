//! The rooms of the house, what each may import, and the rules that the imports keep.

use std::collections::BTreeSet;

use super::{
    graph::{Graph, Steps, cycles, ways},
    modules::Module,
};

/// A room and the other rooms that it may import, lowest first: a row only names rooms above it.
///
/// A room is a top-level module of `engraft`, a part of `cli`, the programs (`bin`), or another crate. `lib`
/// and `cli` are the files `lib.rs` and `cli/mod.rs`, which declare modules and do nothing.
pub const HOUSE: &[(&str, &str)] = &[
    ("lib", ""),
    ("engraft_util", ""),
    ("engraft_adapters", "engraft_util"),
    ("error", "engraft_util"),
    ("device", "engraft_util error"),
    ("kernels", "engraft_util error device"),
    ("embedded", "engraft_util engraft_adapters error"),
    ("hub", "engraft_util engraft_adapters error"),
    ("saved", "engraft_util engraft_adapters error"),
    ("observe", "engraft_util engraft_adapters error device"),
    ("data", "engraft_util engraft_adapters error device kernels embedded observe"),
    ("optim", "engraft_util engraft_adapters error device kernels observe"),
    ("model", "engraft_util engraft_adapters error device kernels embedded observe data"),
    ("plan", "engraft_util engraft_adapters error device kernels observe data model"),
    ("generate", "engraft_util engraft_adapters error device kernels observe data model plan"),
    ("serve", "engraft_util engraft_adapters error device kernels observe data model plan"),
    ("convert", "engraft_util engraft_adapters error device kernels observe data model plan"),
    ("engine", "engraft_util engraft_adapters error device kernels observe data optim model plan"),
    (
        "train",
        "engraft_util engraft_adapters error device kernels embedded saved observe data optim model plan convert \
         engine",
    ),
    (
        "cli/common",
        "engraft_util engraft_adapters error device kernels embedded hub saved observe data model plan generate \
         serve convert",
    ),
    (
        "cli/infer",
        "engraft_util engraft_adapters error device kernels embedded hub saved observe data model plan generate \
         serve convert cli/common",
    ),
    (
        "cli/train",
        "engraft_util engraft_adapters error device kernels embedded hub saved observe data optim model plan \
         generate serve convert engine train cli/common",
    ),
    ("cli", "cli/common cli/infer cli/train"),
    // A program names its allocator, which counts: that is `observe`.
    ("bin", "engraft_util engraft_adapters observe cli/common cli/infer cli/train cli"),
];

/// Rooms and files that infer, and rooms of which they reach no file.
pub const INFERENCE: [&str; 6] = [
    "src/cli/infer/",
    "src/cli/common/",
    "src/generate/",
    "src/serve/",
    "src/convert/",
    "src/bin/engraft-infer.rs",
];
pub const TRAINING: [&str; 4] = ["train", "engine", "optim", "cli/train"];

/// The file that parses `--device`: the only one above `kernels/` that may name a vendor.
pub const PARSES_DEVICES: &str = "src/cli/common/values/device.rs";

/// Every arrow between rooms is one that the table allows.
pub fn rooms_import_what_they_may(graph: &Graph) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let mut broken = Vec::new();
    for arrow in graph.arrows() {
        let (from, to) = (arrow.from.room(), arrow.to.room());
        if from == to || !seen.insert((&arrow.from.file, &arrow.to.file, arrow.through)) {
            continue;
        }
        // A room without a row fails the rule below.
        if allows(&from).is_some_and(|allowed| !allowed.split_whitespace().any(|one| one == to)) {
            broken.push(arrow.text());
        }
    }
    broken
}

/// Every file is in a room that the table has.
pub fn rooms_are_known(graph: &Graph) -> Vec<String> {
    let modules = graph.modules.all.iter().filter(|module| allows(&module.room()).is_none());
    let lost =
        modules.map(|module| format!("{}:1: no row of HOUSE is the room {}", module.file, module.room()));
    lost.collect::<BTreeSet<_>>().into_iter().collect()
}

fn allows(room: &str) -> Option<&'static str> {
    HOUSE.iter().find(|(name, _)| *name == room).map(|(_, allowed)| *allowed)
}

/// Rows that name a room that has no row above them.
pub fn rows_out_of_order(house: &[(&str, &str)]) -> Vec<String> {
    let mut above = BTreeSet::new();
    let mut broken = Vec::new();
    for (room, allowed) in house {
        let later = allowed.split_whitespace().filter(|one| !above.contains(one));
        broken.extend(later.map(|one| format!("{room} may import {one}, which has no row above it")));
        above.insert(*room);
    }
    broken
}

/// No room reaches itself through others, by what is imported or by what the table allows.
pub fn rooms_form_no_cycle(graph: &Graph) -> Vec<String> {
    let mut steps = graph.steps(|module| Some(module.room()), true);
    for (room, allowed) in HOUSE {
        for one in allowed.split_whitespace() {
            let arrow = || format!("HOUSE: {room} -> {one}");
            steps.entry((*room).into()).or_default().entry(one.into()).or_insert_with(arrow);
        }
    }
    described(&steps)
}

/// The cycles of a graph, each as lines.
fn described(steps: &Steps) -> Vec<String> {
    cycles(steps).into_iter().map(|cycle| format!("a cycle:\n  {}", cycle.join("\n  "))).collect()
}

/// No file of training is reached from a file that infers.
pub fn inference_reaches_no_training(graph: &Graph) -> Vec<String> {
    let files = graph.modules.all.iter().map(|module| &module.file);
    let starts =
        files.filter(|file| INFERENCE.iter().any(|start| file.starts_with(start))).cloned().collect();
    let training = graph.modules.all.iter().filter(|module| TRAINING.contains(&module.room().as_str()));
    let training: BTreeSet<&str> = training.map(|module| &module.file[..]).collect();
    // A re-export links only the item that it exports.
    let steps = graph.steps(|module| Some(module.file.clone()), false);
    let ways = ways(&steps, &starts, |file| training.contains(file));
    ways.into_iter().map(|way| format!("training is reached:\n  {}", way.join("\n  "))).collect()
}

/// The op that a module of `kernels/` is part of.
fn op(module: &Module) -> Option<String> {
    match &module.path[..] {
        [_, room, op, ..] if room == "kernels" => Some(op.clone()),
        [_, room] if room == "kernels" => Some("mod.rs".into()),
        _ => None,
    }
}

/// No op reaches itself through others.
pub fn ops_form_no_cycle(graph: &Graph) -> Vec<String> {
    described(&graph.steps(op, false))
}

/// `kernels/` holds `mod.rs` and folders with a `mod.rs`; `files` are the names of all its files.
pub fn kernels_hold_ops<'a>(graph: &Graph, files: impl Iterator<Item = &'a String>) -> Vec<String> {
    let files: BTreeSet<&str> = files.filter_map(|file| file.strip_prefix("src/kernels/")).collect();
    let tests = |file: &str| graph.modules.test_files.contains(&format!("src/kernels/{file}"));
    let is_op = |file: &str| {
        file.split_once('/').is_some_and(|(folder, _)| files.contains(&format!("{folder}/mod.rs")[..]))
    };
    let others = files.iter().filter(|file| **file != "mod.rs" && !is_op(file) && !tests(file));
    others.map(|file| format!("src/kernels/{file}:1: is no part of an op's folder")).collect()
}

/// Only `device/`, `kernels/` and the file that parses `--device` name a vendor.
pub fn only_kernels_name_a_vendor(graph: &Graph) -> Vec<String> {
    let is_below = |module: &Module| ["device", "kernels"].contains(&module.room().as_str());
    let may = |module: &Module| is_below(module) || module.file == PARSES_DEVICES;
    let mentions = graph.mentions.paths.iter().filter(|mention| {
        !may(graph.module(mention.from))
            && graph.meanings(mention).any(|(names, ours)| names_a_vendor(&names, ours.is_some_and(is_below)))
    });
    let paths = mentions.map(|mention| (mention.from, mention.line, mention.text()));
    let features = graph
        .mentions
        .features
        .iter()
        .filter(|(module, _, feature)| feature == "cuda" && !may(graph.module(*module)));
    let features =
        features.map(|(module, line, feature)| (*module, *line, format!("feature = \"{feature}\"")));
    let broken = paths.chain(features);
    let broken = broken.map(|(module, line, text)| (&graph.module(module).file, line, text));
    let broken: BTreeSet<_> = broken.collect();
    broken.into_iter().map(|(file, line, text)| format!("{file}:{line}: {text}")).collect()
}

fn names_a_vendor(names: &[String], is_below: bool) -> bool {
    let cuda = |name: &String| name.to_lowercase().contains("cuda") || name == "Gpu";
    // The CPU as a device of candle's is no choice: sampling and the adapters' reference compute there.
    let matches_ours = |pair: &[String]| pair[0] == "Device" && (pair[1] == "Cpu" || pair[1] == "*");
    names.iter().any(cuda) || is_below && names.windows(2).any(matches_ours)
}

/// No variable of candle's autograd is named: a missing backward is then a missing function, no silent zero.
pub fn no_variable_is_named(graph: &Graph) -> Vec<String> {
    let in_src = graph.mentions.paths.iter().filter(|it| graph.module(it.from).file.starts_with("src/"));
    let broken = in_src.filter(|mention| {
        graph.meanings(mention).any(|(names, ours)| ours.is_none() && names_a_variable(&names))
    });
    let broken = broken.map(|it| (&graph.module(it.from).file, it.line, it.text()));
    broken.map(|(file, line, path)| format!("{file}:{line}: {path}")).collect()
}

fn names_a_variable(names: &[String]) -> bool {
    let candle = ["candle_core", "candle_nn"].contains(&names[0].as_str());
    let has = |wanted: &[&str]| names.iter().any(|name| wanted.contains(&name.as_str()));
    has(&["VarMap", "VarBuilder"]) || candle && has(&["Var", "backprop"])
}
