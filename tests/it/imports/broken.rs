//! Each rule on small trees in memory: it finds violations, and passes code that only looks like one.

use super::{
    graph::Graph,
    house::*,
    modules::{CRATES, Files},
};

/// A tree of the files given, with the `lib.rs` and `mod.rs` that they need to be modules of the crates.
fn files(given: &[(&str, &str)]) -> Files {
    let own = |(path, text): &(&str, &str)| ((*path).to_owned(), (*text).to_owned());
    let mut files: Files = given.iter().map(own).collect();
    for (_, root) in CRATES {
        files.entry(root.into()).or_default();
    }
    for (path, _) in given.iter().filter(|(path, _)| path.ends_with(".rs") && !path.starts_with("src/bin/")) {
        let mut path = path.trim_end_matches(".rs").trim_end_matches("/mod");
        while let Some((folder, name)) = path.rsplit_once('/')
            && name != "lib"
        {
            let is_root = folder.ends_with("src");
            let (flat, inside) = (format!("{folder}.rs"), if is_root { "lib.rs" } else { "mod.rs" });
            let file = if files.contains_key(&flat) { flat } else { format!("{folder}/{inside}") };
            let text = files.entry(file).or_default();
            let declaration = format!("mod {name}");
            if !text.contains(&declaration) && !text.contains(&format!("{name}.rs")) {
                text.push_str(&format!("\npub {declaration};"));
            }
            path = if is_root { "" } else { folder };
        }
    }
    files
}

pub fn graph(given: &[(&str, &str)]) -> Graph {
    Graph::read(&files(given))
}

pub const TRAIN: (&str, &str) = (
    "src/train/mod.rs",
    "pub mod run; pub trait Hook {} pub struct Trainer; pub enum Kind { A } pub fn fit() {} \
     impl Trainer { pub fn new() {} } macro_rules! step { () => {} } pub(crate) use step;",
);
pub const RUN: (&str, &str) = (
    "src/train/run.rs",
    "pub fn run() {} pub mod format {} #[macro_export] macro_rules! exported { () => {} }",
);

pub type Rule = fn(&Graph) -> Vec<String>;

/// The rule finds something that contains `says` in a tree of `given`, or nothing if `says` is `None`.
#[track_caller]
pub fn check(rule: Rule, given: &[(&str, &str)], says: Option<&str>) {
    let graph = graph(given);
    let found = rule(&graph);
    assert!(graph.modules.faults.is_empty(), "{given:?}: {:?}", graph.modules.faults);
    match says {
        Some(says) => assert!(found.iter().any(|line| line.contains(says)), "{given:?}: {found:#?}"),
        None => assert!(found.is_empty(), "{given:?}: {found:#?}"),
    }
}

#[test]
fn the_table_holds_for_crates_and_programs() {
    let spec = ("adapters/src/lib.rs", "pub struct Spec;");
    let atomic = ("util/src/lib.rs", "pub fn write() {}");
    let broken = [
        ("src/kernels/mod.rs", "use engraft_adapters::Spec;", "kernels -> engraft_adapters"),
        ("src/device/mod.rs", "fn f(x: ::engraft_adapters::Spec) {}", "device -> engraft_adapters"),
        ("src/error.rs", "impl From<engraft_adapters::Spec> for u8 {}", "error -> engraft_adapters"),
        ("adapters/src/a.rs", "use engraft::error;", "engraft_adapters -> error"),
        ("util/src/a.rs", "use engraft_adapters::Spec;", "engraft_util -> engraft_adapters"),
        ("src/bin/engraft.rs", "fn main() { engraft::train::fit() }", "bin -> train"),
        ("src/cli/common/mod.rs", "use crate::train::Trainer;", "cli/common -> train"),
        ("src/cli/infer/mod.rs", "use crate::cli::train::x;", "cli/infer -> cli/train"),
        ("src/cli/common/mod.rs", "use super::train::x;", "cli/common -> cli/train"),
        ("src/cli/mod.rs", "pub mod train; fn f() { crate::train::fit() }", "cli -> train"),
        ("src/plan/mod.rs", "use crate::optim::X;", "plan -> optim"),
        ("src/lib.rs", "pub mod train; pub use train::Trainer;", "lib -> train"),
    ];
    let passes = [
        ("src/kernels/mod.rs", "use engraft_util::write;"),
        ("src/plan/mod.rs", "use engraft_adapters::Spec; use engraft_util::write;"),
        ("adapters/src/a.rs", "use engraft_util::write; use crate::Spec;"),
        ("src/cli/train/x.rs", "use crate::{optim::X, train::Trainer};"),
        ("src/engine/mod.rs", "use crate::optim::X;"),
        ("src/cli/common/mod.rs", "pub(in crate::cli) fn f() {} pub(super) fn g() {}"),
        ("src/bin/engraft.rs", "fn main() { engraft::cli::train::x() }"),
    ];
    let rest = [TRAIN, RUN, spec, atomic, ("src/optim/mod.rs", "pub struct X;")];
    let cli = ("src/cli/train/mod.rs", "pub fn x() {}");
    for (file, text, says) in broken {
        let others = rest.into_iter().chain([cli, ("src/error.rs", "")]).filter(|(other, _)| *other != file);
        let given: Vec<_> = others.chain([(file, text)]).collect();
        check(rooms_import_what_they_may, &given, Some(says));
    }
    for (file, text) in passes {
        let given: Vec<_> = rest.into_iter().chain([cli, (file, text)]).collect();
        check(rooms_import_what_they_may, &given, None);
    }
}

#[test]
fn a_new_room_needs_a_row() {
    check(
        rooms_are_known,
        &[("src/memory/mod.rs", "")],
        Some("src/memory/mod.rs:1: no row of HOUSE is the room memory"),
    );
    check(rooms_are_known, &[("src/cli/open.rs", "")], Some("the room cli/open"));
    check(rooms_are_known, &[("src/plan/memory/mod.rs", ""), ("src/cli/infer/open.rs", "")], None);
    check(rooms_are_known, &[("src/lib.rs", "#[cfg(test)] mod testing;"), ("src/testing.rs", "")], None);
}

#[test]
fn cycles_of_rooms_are_found() {
    assert_eq!(rows_out_of_order(&[("a", "b"), ("b", "")]), ["a may import b, which has no row above it"]);
    assert_eq!(rows_out_of_order(&[("a", ""), ("b", "a b")]).len(), 1);
    assert!(rows_out_of_order(&[("a", ""), ("b", "a")]).is_empty());
    let model = ("src/model/mod.rs", "pub mod a;");
    // The table has kernels below the model.
    let kernels = ("src/kernels/mod.rs", "use crate::model::a;");
    check(rooms_form_no_cycle, &[model, ("src/model/a.rs", ""), kernels], Some("HOUSE: model -> data"));
    let one = ("src/x/mod.rs", "pub mod a; use crate::y::a::B;");
    let two = ("src/y/mod.rs", "pub mod a; use crate::z::C;");
    let three = ("src/z/mod.rs", "use crate::x::a; pub struct C;");
    let ends = [("src/x/a.rs", ""), ("src/y/a.rs", "pub struct B;")];
    check(
        rooms_form_no_cycle,
        &[one, two, three, ends[0], ends[1]],
        Some("src/z/mod.rs:1: z -> x: crate::x::a"),
    );
    let three = ("src/z/mod.rs", "pub struct C; #[cfg(test)] use crate::x::a;");
    check(rooms_form_no_cycle, &[one, two, three, ends[0], ends[1]], None);
    let kernels = ("src/kernels/mod.rs", "");
    let model = ("src/model/mod.rs", "use crate::kernels;");
    check(rooms_form_no_cycle, &[model, kernels], None);
}

#[test]
fn training_is_found_through_other_files() {
    let bin = ("src/bin/engraft-infer.rs", "fn main() { engraft::cli::infer::run() }");
    let infer = ("src/cli/infer/mod.rs", "use crate::plan::rows; pub fn run() {}");
    let plan = ("src/plan/mod.rs", "pub mod rows; pub mod job;");
    let job = ("src/plan/job.rs", "use crate::train::Trainer; pub struct Job;");
    let rule: Rule = inference_reaches_no_training;
    let reaches = ("src/plan/rows.rs", "use super::job::Job;");
    let given = [TRAIN, RUN, bin, infer, plan, job, reaches];
    check(
        rule,
        &given,
        Some("crate::plan::rows (in src/plan/rows.rs)\n  src/plan/rows.rs:1: plan -> plan: super::job"),
    );
    // A function does not hold what a path has inside a module of that name.
    let inside = ("src/cli/infer/mod.rs", "use crate::plan::rows::x; pub fn run() {}");
    let both = ("src/plan/mod.rs", "pub mod rows; pub mod job; pub use job::rows;");
    let rows = ("src/plan/rows.rs", "pub fn x() {}");
    let job_rows = ("src/plan/job.rs", "use crate::train::Trainer; pub fn rows() {}");
    check(rule, &[TRAIN, RUN, bin, inside, both, rows, job_rows], None);
    // Files of one room are apart: `rows` does not need `job`.
    check(rule, &[TRAIN, RUN, bin, infer, plan, job, ("src/plan/rows.rs", "")], None);
    for (start, room) in
        [("generate", "engine"), ("cli/common", "optim"), ("convert", "train"), ("serve", "cli/train")]
    {
        let start = format!("src/{start}/mod.rs");
        let text = format!("use crate::{}::x;", room.replace('/', "::"));
        let end = format!("src/{room}/mod.rs");
        check(rule, &[(&start, &text), (&end, "pub fn x() {}")], Some(&format!("{start}:1: ")));
        check(rule, &[(&start, "mod train {} use train as x;"), (&end, "pub fn x() {}")], None);
        let back = format!(
            "use {}; pub fn x() {{}}",
            start.replace("src/", "crate::").replace('/', "::").replace("::mod.rs", "")
        );
        check(rule, &[(&end, &back), (&start, "")], None);
    }
    // `cli/mod.rs` may hand on both programs, and may not run both.
    let train = ("src/cli/train/mod.rs", "pub fn train() { crate::train::fit() }");
    let bin = ("src/bin/engraft-infer.rs", "fn main() { engraft::cli::run() }");
    let both = "pub mod infer; pub mod train; pub use infer::run; pub use train::train;";
    let infer = ("src/cli/infer/mod.rs", "pub fn run() {}");
    check(rule, &[TRAIN, RUN, train, infer, bin, ("src/cli/mod.rs", both)], None);
    let both = "pub mod infer; pub mod train; pub fn run() { train::train(); }";
    check(
        rule,
        &[TRAIN, RUN, train, infer, bin, ("src/cli/mod.rs", both)],
        Some("src/cli/mod.rs:1: cli -> cli/train"),
    );
}

#[test]
fn kernels_keep_to_their_folders() {
    let declares = "pub mod a; pub mod b; #[cfg(test)] pub mod testing;";
    let ops = [("src/kernels/mod.rs", declares), ("src/kernels/testing.rs", "")];
    let lone = |path: &str, text: &str| {
        let given =
            [ops[0], ops[1], ("src/kernels/a/mod.rs", ""), ("src/kernels/b/mod.rs", ""), (path, text)];
        let files = files(&given);
        kernels_hold_ops(&Graph::read(&files), files.keys())
    };
    assert!(lone("src/kernels/a/kernel.cu", "").is_empty() && lone("src/device/cpu.rs", "").is_empty());
    assert_eq!(lone("src/kernels/arena.rs", ""), ["src/kernels/arena.rs:1: is no part of an op's folder"]);
    assert_eq!(lone("src/kernels/few.cuh", "").len(), 1);
    assert_eq!(lone("src/kernels/c/kernel.cu", "").len(), 1);

    // An item that `mod.rs` re-exports counts as imported from the op, not from `mod.rs`.
    let check = |a: &str, b: &str, c: &str, says: Option<&str>| {
        let files = [("src/kernels/mod.rs", "pub mod a; pub mod b; pub mod c; pub use b::*; pub use c::*;")];
        let ops = [("src/kernels/a/mod.rs", a), ("src/kernels/b/mod.rs", b), ("src/kernels/c/mod.rs", c)];
        check(ops_form_no_cycle, &[files[0], ops[0], ops[1], ops[2]], says);
    };
    check("use super::b;", "use crate::kernels::c;", "", None);
    check("use super::b;", "use super::c;", "#[cfg(test)] use super::a;", None);
    check(
        "use super::b; pub struct X;",
        "use crate::kernels::c;",
        "fn f(x: super::a::X) {} use super::a;",
        Some("src/kernels/c/mod.rs:1: "),
    );
    check(
        "use super::b; pub struct X;",
        "fn f() { m!(crate::kernels::a) }",
        "",
        Some("src/kernels/b/mod.rs:1: "),
    );
    check("use super::help;", "pub fn help() {}", "", None);
    check("", "mod a { pub fn help() {} } pub use a::help; // use super::a\n", "use super::help;", None);
    check(
        "use super::c;",
        "use crate::kernels::a; pub fn help() {}",
        "use super::help;",
        Some("(in src/kernels/b/mod.rs)"),
    );
}

#[test]
fn vendors_are_found_above_the_kernels() {
    let device = "\
        pub enum Device { Cpu, Cuda(u8) } pub struct Gpu; impl Device { pub fn best() {} \
        pub fn cuda() {} } \
                  #[cfg(feature = \"cuda\")] use cudarc::driver; fn f() { Device::Cpu; } pub mod cuda; \
                  pub use Device as Target;";
    let parses = (
        "src/cli/common/values/device.rs",
        "use crate::device::Device; fn f() { Device::Cpu; Device::cuda(); }",
    );
    let tree =
        |text| [("src/device/mod.rs", device), ("src/device/cuda.rs", ""), parses, ("src/model/a.rs", text)];
    let names = [
        "use crate::device::Device; fn f(x: u8) { match x { Device::Cpu => 1 } }",
        "use crate::device; fn f(x: u8) { if let device::Device::Cuda(y) = x {} }",
        "use crate::device::Device as D; fn f() { x == D::Cpu }",
        "use crate::device::Target; fn f() { Target::Cpu; }",
        "use crate::device::Device::{self, Cpu};",
        "use crate::device::Device::*;",
        "use crate::device::Device; fn f() { assert!(matches!(x, Device::Cpu)) }",
        "use crate::device::Device; fn f() { Device::cuda() }",
        "use crate::device::Device as D; trait T { fn f(self); } impl T for D { fn f(self) { Self::Cpu; } }",
        "enum Target { Cuda } impl Target { fn f(self) { match self { Self::Cuda => {} } } }",
        "use crate::device::Gpu;",
        "fn f(x: &crate::device::Gpu) {}",
        "use crate::device::cuda;",
        "fn f() { cudarc::driver::x() }",
        "use candle_core::Device; fn f() { Device::new_cuda(0) }",
        "#[cfg(feature = \"cuda\")] fn f() {}",
        "#[cfg(all(unix, not(feature = \"cuda\")))] mod x {}",
        "#![cfg(feature = \"cuda\")]",
        "fn f() { if cfg!(feature = \"cuda\") {} }",
        "#[cfg_attr(feature = \"cuda\", allow(x))] fn f() {}",
    ];
    for text in names {
        check(only_kernels_name_a_vendor, &tree(text), Some("src/model/a.rs:1: "));
    }
    let passes = [
        "use crate::device::Device; fn f() { Device::best() }",
        "// Device::Cuda\nfn f() { \"feature = cuda, Device::Cpu\"; }",
        "use candle_core::Device; fn f() { Device::Cpu; }",
        "enum Device { Cpu } fn f() { Device::Cpu; } #[cfg(feature = \"avx512\")] fn g() {}",
        "#[cfg(test)] mod tests { use crate::device::Device; fn f() { Device::Cpu; } }",
        "#[cfg(all(test, feature = \"cuda\"))] fn f() { crate::device::Device::Cpu; }",
    ];
    for text in passes {
        check(only_kernels_name_a_vendor, &tree(text), None);
    }
}

#[test]
fn variables_are_found() {
    let names = [
        "use candle_core::{Tensor, Var};",
        "use candle_core::Var as Tensor;",
        "use candle_core as c; fn f() { c::Var::new() }",
        "use candle_core::*; fn f(x: Var) {}",
        "fn f() { candle_core::Var::new() }",
        "fn f() { println!(\"{}\", candle_core::Var::new()) }",
        "use candle_nn::{VarMap};",
        "use candle_transformers::quantized_var_builder::VarBuilder;",
        "use candle_core::backprop::GradStore;",
        "use super::Hidden; fn f(x: Hidden) {}",
        "#[cfg(test)] mod tests; use candle_core::Var;",
    ];
    for text in names {
        let model = ("src/model/mod.rs", "pub use candle_core::Var as Hidden; pub mod a;");
        let given = [model, ("src/model/a.rs", text), ("src/model/a/tests.rs", "")];
        let given = if text.contains("Hidden") {
            given
        } else {
            [("src/model/mod.rs", "pub mod a;"), given[1], given[2]]
        };
        let given = if text.contains("mod tests") { &given[..] } else { &given[..2] };
        check(no_variable_is_named, given, Some("src/model/a.rs:1: "));
    }
    let passes = [
        "use candle_core::Tensor; // Var",
        "struct Var; fn f(x: Var) { \"candle_core::Var\"; } struct VarMap; fn g(x: VarMap) {}",
        "use other::Var;",
        "use std::env::{self, VarError}; fn f() { env::var(x) }",
        "#[cfg(test)] mod tests { use candle_core::Var; }",
    ];
    for text in passes {
        check(no_variable_is_named, &[("src/model/a.rs", text)], None);
    }
    // Any test may differentiate the reference of an adapter.
    check(no_variable_is_named, &[("adapters/src/a.rs", "use candle_core::Var;")], None);
}
