//! Checks the real imports of every file against the order of the rooms.
//!
//! Files are parsed, not searched for words: `modules` finds which module each file is, `visit` and `tokens`
//! the paths that it names, `resolve` what they mean, through re-exports too, and `graph` who is reached that
//! way. `house` has the table of rooms and the rules; `understood` shows that paths are read as the compiler
//! reads them, and `broken` that each rule can fail. A method called on a value is no path: the rules see the
//! types that code names, not those that values have.

mod broken;
mod graph;
mod house;
mod modules;
mod resolve;
mod tokens;
mod understood;
mod visit;

use std::{collections::BTreeSet, fs, path::Path, sync::LazyLock};

use graph::Graph;
use modules::Files;

/// Folders whose files are read; `.rs` with their text, others by name.
const FOLDERS: [&str; 3] = ["src", "adapters/src", "util/src"];

static FILES: LazyLock<Files> = LazyLock::new(|| {
    let mut files = Files::new();
    FOLDERS.iter().for_each(|folder| read(folder, &mut files));
    files
});

static GRAPH: LazyLock<Graph> = LazyLock::new(|| Graph::read(&FILES));

fn read(folder: &str, files: &mut Files) {
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{folder}/{}", path.file_name().unwrap().to_string_lossy());
        if path.is_dir() {
            read(&name, files);
        } else {
            let text = if name.ends_with(".rs") { fs::read_to_string(&path).unwrap() } else { String::new() };
            files.insert(name, text);
        }
    }
}

#[track_caller]
fn hold(broken: &[String], says: &str) {
    assert!(broken.is_empty(), "{says}:\n{}", broken.join("\n"));
}

#[test]
fn all_paths_of_the_tree_are_understood() {
    hold(&GRAPH.modules.faults, "the rules do not see this; write it another way, or teach tests/it/imports");
    assert!(GRAPH.modules.all.len() > 150, "only {} modules found", GRAPH.modules.all.len());
    let arrows = GRAPH.arrows();
    assert!(arrows.len() > 2000, "only {} arrows found", arrows.len());
    let imported: BTreeSet<String> = arrows.iter().map(|arrow| arrow.to.room()).collect();
    let rooms: BTreeSet<String> = GRAPH.modules.all.iter().map(|module| module.room()).collect();
    let apart: Vec<_> =
        rooms.difference(&imported).filter(|room| !["bin", "cli", "lib"].contains(&&room[..])).collect();
    assert!(apart.is_empty(), "nobody imports {apart:?}");
}

#[test]
fn every_crate_is_read() {
    let manifest = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml")).unwrap();
    let members = manifest.lines().find(|line| line.starts_with("members")).unwrap();
    let members = members.split('"').skip(1).step_by(2);
    // The stand-in for a CUDA driver is no part of the programs.
    for member in members.filter(|member| *member != "cuda-shim") {
        let root = format!("{member}/src/lib.rs");
        let listed = modules::CRATES.iter().any(|(_, file)| *file == root);
        assert!(listed && FILES.contains_key(&root), "add {root} to CRATES and FOLDERS in tests/it/imports");
    }
}

#[test]
fn every_room_has_a_row() {
    hold(&house::rooms_are_known(&GRAPH), "add the room to HOUSE in tests/it/imports/house.rs");
}

#[test]
fn imports_go_one_way() {
    hold(
        &house::rooms_import_what_they_may(&GRAPH),
        "not in the order of the house; move what is imported down",
    );
}

#[test]
fn rooms_form_no_cycle() {
    hold(&house::rows_out_of_order(house::HOUSE), "HOUSE is written from the ground up");
    hold(&house::rooms_form_no_cycle(&GRAPH), "rooms import each other");
}

#[test]
fn inference_links_no_trainer() {
    hold(&house::inference_reaches_no_training(&GRAPH), "inference reaches training");
    for start in house::INFERENCE.iter().filter(|start| !["src/serve/", "src/convert/"].contains(start)) {
        assert!(FILES.keys().any(|file| file.starts_with(start)), "there is no {start}");
    }
}

#[test]
fn kernels_are_folders_of_ops() {
    hold(
        &house::kernels_hold_ops(&GRAPH, FILES.keys()),
        "only op folders belong here; move the rest to device/",
    );
    hold(&house::ops_form_no_cycle(&GRAPH), "ops import each other; move what they share to device/");
}

#[test]
fn only_device_and_kernels_name_a_vendor() {
    let says = "only device/ and kernels/ name a vendor; ask them for what you need (a copy, a place)";
    hold(&house::only_kernels_name_a_vendor(&GRAPH), says);
    let parses = FILES.contains_key(house::PARSES_DEVICES);
    assert!(parses, "{} is not there; name the file that parses --device", house::PARSES_DEVICES);
}

#[test]
fn no_variable_is_ever_made() {
    let says = "src/ has explicit backwards and no tape; write a backward function";
    hold(&house::no_variable_is_named(&GRAPH), says);
}
