//! Rules for source files that a test can check: what no file may contain.
//!
//! Each rule reads the tree and names file and line of each violation; `every_rule_can_fail` breaks
//! each of them once, in memory. Unless a rule says otherwise it sees code alone: comments, the contents
//! of strings and items after `#[cfg(test)]` are blanked out first. Rules about imports are in
//! `imports`, which parses the files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::source::{Source, is_test_file, parts_of, without_comments_and_strings, without_tests, words};

fn has_word(line: &str, wanted: &[&str]) -> bool {
    words(line).any(|word| wanted.contains(&word))
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file under `folder`, less what is built, fetched or hidden.
fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let skipped = matches!(name.as_str(), "target" | "runs" | "__pycache__" | "shared");
        if skipped || (name.starts_with('.') && name != ".github") || path.is_symlink() {
            continue;
        }
        if path.is_dir() { walk(&path, found) } else { found.push(path) }
    }
}

fn files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    walk(root(), &mut found);
    found.sort();
    found
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().to_string_lossy().replace('\\', "/")
}

/// The Rust files of the tree.
fn tree() -> Vec<Source> {
    let rust = files().into_iter().filter(|path| path.extension().is_some_and(|end| end == "rs"));
    let sources: Vec<_> =
        rust.map(|path| Source::new(&relative(&path), &fs::read_to_string(&path).unwrap())).collect();
    assert!(sources.len() > 80, "only {} Rust files found", sources.len());
    sources
}

#[track_caller]
fn hold(rule: fn(&[Source]) -> Vec<String>, says: &str) {
    let broken = rule(&tree());
    assert!(broken.is_empty(), "{says}:\n{}", broken.join("\n"));
}

// ---- the rules ----

/// Words are whole parts of names: `train`, `TrainStep` and `gpt2` are, `trainables` (a count that any
/// adapter has) and `constrain` are not. Strings count too: a message or a key of GPT-2 is knowledge of it.
fn adapters_know_no_model(sources: &[Source]) -> Vec<String> {
    const NEVER: [&str; 8] = ["gpt", "gpt2", "cuda", "cudarc", "cublas", "train", "trainer", "training"];
    let says = |line: &str| words(line).flat_map(parts_of).any(|part| NEVER.contains(&part.as_str()));
    let sources = sources.iter().filter(|source| source.is_in(&["adapters/src/"]));
    sources
        .flat_map(|source| {
            // Lines that hold code at all, read with their strings and without their comments.
            let texts: Vec<&str> = source.text.lines().collect();
            let lines = source.lines().filter(|(_, code)| !code.trim().is_empty());
            let full = lines.map(|(number, _)| (number, without_line_comment(texts[number - 1])));
            full.filter(|(_, line)| says(line))
                .map(|(number, line)| format!("{}:{number}: {}", source.path, line.trim()))
                .collect::<Vec<_>>()
        })
        .collect()
}

/// A line up to its `//`, unless that stands in a string or an address.
fn without_line_comment(line: &str) -> &str {
    let comment = line.match_indices("//").map(|(at, _)| at).find(|&at| {
        let before = &line[..at];
        before.matches('"').count().is_multiple_of(2) && !before.ends_with(':')
    });
    &line[..comment.unwrap_or(line.len())]
}

fn stops(line: &str) -> bool {
    const CALLS: [&str; 4] = [".unwrap()", ".expect(", ".unwrap_err()", ".expect_err("];
    const MACROS: [&str; 4] = ["panic!", "unreachable!", "todo!", "unimplemented!"];
    CALLS.iter().chain(&MACROS).any(|call| line.contains(call))
}

fn nothing_stops_on_input(sources: &[Source]) -> Vec<String> {
    let checked = sources.iter().filter(|source| source.is_in(&["src/", "adapters/src/", "util/src/"]));
    checked.flat_map(|source| source.broken(stops)).collect()
}

fn files_say_what_they_are(sources: &[Source]) -> Vec<String> {
    let silent = sources.iter().filter(|source| !source.text.starts_with("//! "));
    silent.map(|source| format!("{}:1: opens without //!", source.path)).collect()
}

/// Number of lines without the items after `#[cfg(test)]`; a file of tests is counted as a whole.
fn files_are_short(sources: &[Source]) -> Vec<String> {
    let length = |source: &Source| {
        let bare = without_comments_and_strings(&source.text);
        let kept = without_tests(&bare);
        let blanked = bare.lines().zip(kept.lines()).filter(|(a, b)| a != b).count();
        source.text.lines().count() - blanked
    };
    let long = sources.iter().map(|source| (source, length(source))).filter(|(_, lines)| *lines > 500);
    long.map(|(source, lines)| format!("{}:501: {lines} lines without tests", source.path)).collect()
}

fn only_the_command_line_speaks(sources: &[Source]) -> Vec<String> {
    const MACROS: [&str; 5] = ["println!", "eprintln!", "print!", "eprint!", "dbg!"];
    let speaks = |line: &str| {
        let says = MACROS.iter().any(|name| line.contains(name));
        let env =
            line.match_indices("env::").any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric()));
        let streams = has_word(line, &["stdout", "stderr", "stdin"]);
        says || env || streams || line.contains("std::{env") || line.contains("std::env")
    };
    let silent = |source: &&Source| {
        source.is_in(&["src/", "adapters/src/", "util/src/"]) && !source.is_in(&["src/cli/", "src/bin/"])
    };
    sources.iter().filter(silent).flat_map(|source| source.broken(speaks)).collect()
}

fn models_open_no_file(sources: &[Source]) -> Vec<String> {
    // An arena may be backed by a file without a name; the page cache is that of mapped files.
    let allowed =
        ["src/model/weights/", "src/device/arena.rs", "src/device/frozen.rs", "src/device/page_cache.rs"];
    let folders = ["src/model/", "src/device/", "src/kernels/", "src/optim/", "src/engine/"];
    let model = |source: &&Source| source.is_in(&folders) && !source.is_in(&allowed);
    let opens = |line: &str| has_word(line, &["fs", "File", "OpenOptions", "Mmap"]);
    sources.iter().filter(model).flat_map(|source| source.broken(opens)).collect()
}

/// A file named as tests are must be declared as tests are, or its code would escape the rules.
fn test_files_are_declared_after_cfg_test(sources: &[Source]) -> Vec<String> {
    let named =
        sources.iter().filter(|source| is_test_file(&source.path) && !source.path.starts_with("tests/"));
    let declared = |source: &&Source| {
        let (folder, file) = source.path.rsplit_once('/').unwrap_or(("", &source.path));
        let by_name = format!("mod {};", file.trim_end_matches(".rs"));
        let by_path = format!("\"{file}\"");
        let siblings = sources.iter().filter(|other| {
            let (other_folder, _) = other.path.rsplit_once('/').unwrap_or_default();
            other_folder == folder || other.path == format!("{folder}.rs")
        });
        let behind = |text: &str| {
            text.split("#[cfg(test)]").skip(1).any(|item| {
                let declaration = item.split(';').next().unwrap_or_default();
                format!("{declaration};").contains(&by_name) || declaration.contains(&by_path)
            })
        };
        siblings.into_iter().any(|sibling| behind(&sibling.text))
    };
    named
        .filter(|source| !declared(source))
        .map(|source| {
            format!("{}:1: is named as tests are, but no neighbour declares it after cfg(test)", source.path)
        })
        .collect()
}

/// Folders of one person's machine. Put together here, so that this file does not name them itself.
fn somebodys_folders() -> Vec<String> {
    ["work", "home", "root", "Users", "mnt"].map(|folder| format!("/{folder}/")).to_vec()
}

/// Bytes of `text` at which such a path begins: not in the middle of a longer path or address.
fn names_a_place(text: &str) -> bool {
    somebodys_folders().iter().any(|folder| {
        text.match_indices(folder.as_str()).any(|(at, _)| {
            let before = text[..at].chars().next_back();
            before.is_none_or(|c| !(c.is_alphanumeric() || "._-}~/)>".contains(c)))
        })
    })
}

// ---- the rules hold ----

#[test]
fn adapters_say_nothing_of_models_or_devices() {
    hold(adapters_know_no_model, "adapters/ serves any candle user; move this to the root package");
    let manifest = fs::read_to_string(root().join("adapters/Cargo.toml")).unwrap();
    let ours = manifest.lines().filter(|line| line.contains("engraft") && !line.starts_with("name"));
    let allowed = ["description", "engraft-util"];
    let ours: Vec<_> = ours.filter(|line| !allowed.iter().any(|start| line.starts_with(start))).collect();
    assert!(ours.is_empty(), "adapters/Cargo.toml depends on a crate of ours besides util: {ours:?}");
}

#[test]
fn no_input_stops_the_program() {
    hold(nothing_stops_on_input, "return an Error");
}

#[test]
fn every_file_opens_with_what_it_is() {
    hold(files_say_what_they_are, "open the file with a //! line that says what it is");
}

#[test]
fn no_file_is_longer_than_500_lines() {
    hold(files_are_short, "cut the file, or move its tests after #[cfg(test)]");
}

#[test]
fn only_cli_and_bin_print_or_read_the_environment() {
    hold(only_the_command_line_speaks, "return the text or take the value as a parameter");
}

#[test]
fn the_model_opens_no_file() {
    hold(models_open_no_file, "files of a base are opened in src/model/weights/ alone");
}

#[test]
fn test_files_are_tests() {
    hold(test_files_are_declared_after_cfg_test, "declare the file after #[cfg(test)] or rename it");
}

#[test]
fn no_file_names_a_place_on_somebodys_machine() {
    let mut broken = Vec::new();
    for path in files() {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let lines = (1..).zip(text.lines()).filter(|(_, line)| names_a_place(line));
        broken.extend(lines.map(|(number, line)| format!("{}:{number}: {}", relative(&path), line.trim())));
    }
    assert!(broken.is_empty(), "paths of one machine; make them relative:\n{}", broken.join("\n"));
}

// ---- the rules can fail ----

#[test]
fn every_rule_can_fail() {
    type Rule = fn(&[Source]) -> Vec<String>;
    let long = format!("//! x\n{}", "\n".repeat(500));
    let cases: &[(Rule, &str, &str, bool)] = &[
        (adapters_know_no_model, "adapters/src/a.rs", "fn gpt2_keys() {}", true),
        (adapters_know_no_model, "adapters/src/a.rs", "struct TrainStep;", true),
        (adapters_know_no_model, "adapters/src/a.rs", "let x = \"on cuda\";", true),
        (adapters_know_no_model, "adapters/src/a.rs", "fn trainables() {} // train", false),
        (adapters_know_no_model, "src/a.rs", "fn train() {}", false),
        (nothing_stops_on_input, "src/a.rs", "let x = y.unwrap();", true),
        (nothing_stops_on_input, "src/a.rs", "let x = y.expect(\"z\");", true),
        (nothing_stops_on_input, "adapters/src/a.rs", "panic!(\"x\")", true),
        (nothing_stops_on_input, "util/src/a.rs", "todo!()", true),
        (nothing_stops_on_input, "src/a.rs", "let x = \".unwrap()\"; // .unwrap()", false),
        (nothing_stops_on_input, "src/tests.rs", "x.unwrap()", false),
        (files_say_what_they_are, "src/a.rs", "use x;\n//! late", true),
        (files_are_short, "src/a.rs", &long, true),
        (only_the_command_line_speaks, "src/a.rs", "println!(\"x\");", true),
        (only_the_command_line_speaks, "src/a.rs", "let x = std::env::var(y);", true),
        (only_the_command_line_speaks, "src/a.rs", "let x = env!(\"A\"); let y = r#\"println!\"#;", false),
        (only_the_command_line_speaks, "src/cli/a.rs", "println!(\"x\");", false),
        (models_open_no_file, "src/model/a.rs", "use std::{fs::File, io};", true),
        (models_open_no_file, "src/model/weights/a.rs", "use std::fs;", false),
        (models_open_no_file, "src/device/cuda/a.rs", "use std::fs;", true),
        (test_files_are_declared_after_cfg_test, "src/x_tests.rs", "fn x() {}", true),
    ];
    for (rule, path, text, breaks) in cases {
        let found = rule(&[Source::new(path, text)]);
        assert_eq!(!found.is_empty(), *breaks, "{path}: {text}: {found:?}");
        assert!(found.iter().all(|line| line.starts_with(&format!("{path}:"))), "{found:?}");
    }
    let declared = [
        Source::new("src/x.rs", "#[cfg(test)]\n#[path = \"x_tests.rs\"]\nmod tests;"),
        Source::new("src/x_tests.rs", "fn x() {}"),
    ];
    assert!(test_files_are_declared_after_cfg_test(&declared).is_empty());
    for folder in somebodys_folders() {
        assert!(names_a_place(&format!("see {folder}x")) && !names_a_place(&format!("https://a.b{folder}x")));
    }
}
