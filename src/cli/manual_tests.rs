//! Checks that docs/MANUAL.md has every option, with its default.

use super::common::options::Facts;

const MANUAL: &str = include_str!("../../docs/MANUAL.md");

/// The fields of the tables' rows.
fn rows() -> impl Iterator<Item = Vec<String>> {
    // A bar inside a field is written with a backslash.
    let fields =
        |line: &str| line.replace("\\|", "/").split('|').map(|field| field.trim().to_owned()).collect();
    MANUAL.lines().filter(|line| line.starts_with("| `--")).map(fields)
}

/// Whether the first field names the option.
fn names(field: &str, option: &str) -> bool {
    let quoted = format!("`--{option}");
    field.split(&quoted).skip(1).any(|rest| rest.starts_with(['`', ' ', '[']))
}

#[test]
fn every_option_is_in_the_manual_with_its_default() {
    let mut wrong = Vec::new();
    for command in ["train", "eval", "data", "merge", "combine", "extract", "export", "generate", "chat"] {
        let options: Vec<Facts> = match command {
            "generate" | "chat" => super::infer::options(command),
            _ => super::train::options(command),
        };
        assert!(options.len() > 8, "{command}");
        for option in options {
            // Commands may have an option of the same name with different defaults: a row for each.
            let mut rows = rows().filter(|row| names(&row[1], &option.name)).peekable();
            if rows.peek().is_none() {
                wrong.push(format!("{command} --{}: has no row", option.name));
                continue;
            }
            let default = option.default.unwrap_or_default();
            let has = |field: &str| {
                let field = field.replace('`', "");
                if default.is_empty() { ["", "off"].contains(&field.as_str()) } else { field == default }
            };
            if !rows.any(|row| row.get(3).is_some_and(|field| has(field))) {
                wrong.push(format!("{command} --{}: its default is not {default:?}", option.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The facts of every command that has a table of options.
fn tables() -> Vec<Vec<Facts>> {
    let train = ["train", "eval"].map(super::train::options);
    train.into_iter().chain([super::infer::options("generate")]).collect()
}

#[test]
fn every_name_from_elsewhere_leads_to_an_option_that_exists() {
    let tables = tables();
    let exists = |name: &str| tables.iter().any(|table| table.iter().any(|facts| facts.name == name));
    for row in super::common::elsewhere::ELSEWHERE {
        assert!(!row.here.is_empty() || !row.note.is_empty(), "{:?} lead nowhere", row.names);
        for here in row.here {
            assert!(exists(here), "{:?} lead to --{here}, which does not exist", row.names);
        }
        for name in row.names {
            let is_ours = |table: &Vec<Facts>| table.iter().any(|facts| facts.name == *name);
            let reachable = tables.iter().any(|table| {
                !is_ours(table)
                    && (row.here.is_empty()
                        || row.here.iter().any(|here| table.iter().any(|facts| facts.name == *here)))
            });
            assert!(reachable, "--{name} is an option wherever its advice would be given");
        }
        // A note names options too.
        for word in row.note.split([' ', ',']).filter_map(|word| word.strip_prefix("--")) {
            assert!(exists(word), "the note {:?} names --{word}, which does not exist", row.note);
        }
    }
}
