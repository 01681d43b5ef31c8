//! Paths on small trees in memory are read as the compiler reads them.

use super::{
    broken::{RUN, TRAIN, check, graph},
    graph::Graph,
    house::{inference_reaches_no_training, rooms_import_what_they_may},
    modules::Files,
};

#[test]
fn every_way_to_import_is_seen() {
    let seen = [
        "use crate::train::Trainer;",
        "use crate::{error, train::{self as t, Trainer as T}};",
        "use super::train;",
        "use self::super::train::Trainer;",
        "use crate::train::*;",
        "use crate::train as t; fn f() { t::fit() }",
        "use crate::*; fn f() { train::fit() }",
        "fn f() { crate::train::fit() }",
        "fn f(x: &super::train::Trainer) {}",
        "fn f() { use super::train; train::run::run() }",
        "fn f() { let x = crate::train::Kind::A; }",
        "fn f(x: u8) { if let crate::train::Kind::A = x {} }",
        "fn f(x: u8) -> u8 { match x { crate::train::Kind::A => 1 } }",
        "fn f() { <crate::train::Trainer>::new() }",
        "fn f() -> <crate::train::Trainer as Iterator>::Item { x }",
        "fn f<T: crate::train::Hook>() {}",
        "fn f() -> impl Fn(Vec<crate::train::Trainer>) { x }",
        "struct S { x: Option<crate::train::Trainer> }",
        "impl crate::train::Hook for u8 {}",
        "fn f() { println!(\"{}\", crate::train::fit()) }",
        "fn f() { vec![Vec::<crate::train::Trainer>::new()]; }",
        "fn f() { let x = m!(0..crate::train::fit()); }",
        "fn f() { m!(::other::x, crate::train::fit) }",
        "macro_rules! m { ($x:ident) => { $x::$x(); $crate::train::fit() } }",
        "macro_rules! m { () => { use crate::{error, train::{self, Trainer as T}}; } }",
        "macro_rules! m { () => { use ::engraft::train::Trainer; } }",
        "macro_rules! m { ($x:ident) => { fn f() -> ::engraft::train::Trainer { $x::fit() } } }",
        "fn f() { m!(x as crate::train::Trainer) }",
        "thread_local! { static X: crate::train::Trainer = x; }",
        "fn f() { step!() }",
        "use crate::train::step;",
        "use crate::exported;",
        "fn f() { crate::exported!() }",
        "#[serde(with = \"crate::train::run::format\")] struct S;",
        "#[derive(crate::train::Hook)] struct S;",
        "#[cfg(feature = \"cuda\")] use crate::train::Trainer;",
        "#[cfg(not(test))] use crate::train::Trainer;",
        "#[cfg(any(test, feature = \"cuda\"))] use crate::train::Trainer;",
        "struct S; impl S { fn f() { crate::train::fit() } }",
        "use crate::train::Kind; trait T { fn f(self); } impl T for Kind { fn f(self) { Self::A; } }",
        "mod a { mod b { use super::super::super::train::Trainer; } }",
        "mod train {} use crate::train::Trainer;",
        "#[cfg(test)] mod tests {} use crate::train::Trainer;",
        "extern crate self as me; use me::train::Trainer;",
    ];
    for text in seen {
        let given = [TRAIN, RUN, ("src/error.rs", ""), ("src/generate/mod.rs", text)];
        check(rooms_import_what_they_may, &given, Some("src/generate/mod.rs:1: generate -> train: "));
    }
}

#[test]
fn what_only_looks_like_an_import_passes() {
    let passes = [
        "// use crate::train::Trainer;",
        "/// [`Trainer`](crate::train::Trainer)\nfn f() { \"crate::train::fit()\"; }",
        "mod train { pub fn fit() {} } use self::train::fit; fn f() { train::fit() }",
        "pub fn train() {} fn f() { train(); self::train(); let train = 1; train + x.train + x.train() }",
        "fn f(train: u8) { println!(\"{train} {}\", train); m!(x.train, 'train, $train, $x::train::fit()) }",
        "fn f() { m!(<X>::train::fit(), y::train, ::train::fit()); m!(use ::other::{train::X}) }",
        "use other::train::Trainer; use ::train::Trainer as T;",
        "fn f() { mine::train::fit() } mod mine { pub mod train { pub fn fit() {} } }",
        "fn f() { use self::train; } mod train {}",
        "pub fn train() {} trait T { type X; fn f() -> Self::X { Self::train::fit() } }",
        "enum E { Train } use E::*; fn f() { Train; }",
        "#[cfg(test)] use crate::train::Trainer;",
        "#[cfg(test)] mod tests { use crate::train::Trainer; }",
        "#[cfg(all(test, unix))] fn f() { crate::train::fit() }",
        "#[cfg(not(not(test)))] fn f() { crate::train::fit() }",
        "#[test] fn f() { crate::train::fit() }",
        "fn f() { #[cfg(test)] let x = crate::train::fit(); #[cfg(test)] crate::train::fit(); }",
        "fn f() { #[cfg(test)] { crate::train::fit() } #[cfg(test)] m!(crate::train::fit); }",
        "fn f(x: u8) { match x { #[cfg(test)] crate::train::Kind::A => 1, _ => 2 } }",
        "struct S { #[cfg(test)] x: crate::train::Trainer }",
        "impl S { #[cfg(test)] fn f() { crate::train::fit() } } struct S;",
        "struct S { x: u8 } fn f() { S { #[cfg(test)] x: crate::train::N, x: 1 }; }",
        "enum E { #[cfg(test)] A(crate::train::Trainer), B }",
        "trait T { #[cfg(test)] fn f() { crate::train::fit() } }",
        "extern \"C\" { #[cfg(test)] fn f(x: crate::train::Trainer); }",
        "#[path = \"odd.rs\"] #[cfg(test)] mod tests;",
        "use crate::error; use engraft_adapters as a; use engraft_util::*;",
    ];
    for text in passes {
        let odd = ("src/generate/odd.rs", "use crate::train::Trainer;");
        let given = [TRAIN, RUN, ("src/error.rs", ""), ("src/generate/mod.rs", text), odd];
        let given = if text.contains("odd.rs") { &given[..] } else { &given[..4] };
        check(rooms_import_what_they_may, given, None);
    }
}

#[test]
fn no_arrow_hides_in_a_re_export() {
    let hides = [
        ("pub use crate::train::Trainer;", "use crate::plan::Trainer;"),
        ("pub use crate::train::Trainer as T;", "use crate::plan; fn f() { plan::T::new() }"),
        ("pub use crate::train;", "fn f() { crate::plan::train::fit() }"),
        ("pub use crate::train::*;", "use crate::plan::*; fn f(x: Trainer) {}"),
        (
            "pub use inner::T; mod inner { pub use crate::train::{Trainer as T}; }",
            "use crate::plan::{T as U};",
        ),
        (
            "pub use crate::generate::again as T;",
            "pub use crate::train::Trainer as again; use crate::plan::T;",
        ),
        (
            "pub mod a { pub use super::b::*; } mod b { pub use crate::train::*; }",
            "use crate::plan::a::Trainer;",
        ),
        ("pub extern crate self as me;", "use crate::plan::me::train::Trainer;"),
    ];
    for (plan, generate) in hides {
        let given = [TRAIN, RUN, ("src/plan/mod.rs", plan), ("src/generate/mod.rs", generate)];
        check(rooms_import_what_they_may, &given, Some("src/generate/mod.rs:1: generate -> train: "));
        check(inference_reaches_no_training, &given, Some("src/generate/mod.rs:1: generate -> train: "));
    }
    // The room that hands on is imported as well.
    let model = ("src/model/mod.rs", "pub struct Base;");
    let serve = ("src/serve/mod.rs", "pub use crate::model::Base;");
    let given = [model, serve, ("src/generate/mod.rs", "use crate::serve::Base;")];
    check(rooms_import_what_they_may, &given, Some("src/generate/mod.rs:1: generate -> serve: "));
}

#[test]
fn what_is_in_reach_is_not_yet_imported() {
    let plan =
        "pub use crate::train; pub use crate::train::fit; pub fn kinds() {} use crate::train::Kind as kinds;";
    let passes = [
        "use crate::plan::*;",
        "use crate::plan::*; fn f(train: u8) { train; x.fit; x.fit() }",
        "use crate::plan::*; fn f<'fit>(x: u8) { m!(train, x.train, x.fit(), 'fit, $fit, $train::x) }",
        "use crate::plan::*; fn f() { <X>::train::fit(); m!(<X>::train::fit(), $x::train::fit()) }",
        "fn f() { crate::plan::kinds() }",
        "mod a { pub use super::b::*; } mod b { pub use super::a::*; pub fn f() {} } fn f() { a::f(); a::g }",
    ];
    for text in passes {
        let graph = graph(&[TRAIN, RUN, ("src/plan/mod.rs", plan), ("src/generate/mod.rs", text)]);
        let found = rooms_import_what_they_may(&graph);
        assert!(!found.iter().any(|line| line.starts_with("src/generate")), "{text}: {found:#?}");
    }
}

#[test]
fn modules_are_found_where_the_compiler_finds_them() {
    let import = "use crate::train::Trainer;";
    let places = [
        ("src/generate/mod.rs", "mod a;", "src/generate/a.rs"),
        ("src/generate/mod.rs", "mod a;", "src/generate/a/mod.rs"),
        ("src/generate.rs", "mod a;", "src/generate/a.rs"),
        ("src/generate/mod.rs", "mod a { mod b; }", "src/generate/a/b.rs"),
        ("src/generate.rs", "mod a { mod b; }", "src/generate/a/b.rs"),
        ("src/generate.rs", "#[path = \"odd/x.rs\"] mod a;", "src/odd/x.rs"),
        ("src/generate/mod.rs", "#[path = \"../odd/x.rs\"] mod a;", "src/odd/x.rs"),
        ("src/generate.rs", "mod a { #[path = \"x.rs\"] mod b; }", "src/generate/a/x.rs"),
        ("src/generate/mod.rs", "#[path = \"odd\"] mod a { mod b; }", "src/generate/odd/b.rs"),
    ];
    for (file, declares, found) in places {
        let lib = ("src/lib.rs", "pub mod generate; pub mod train;");
        let mut tree: Files =
            [lib, TRAIN, RUN, (file, declares), (found, import)].map(|(a, b)| (a.into(), b.into())).into();
        let graph = Graph::read(&tree);
        assert!(graph.modules.faults.is_empty(), "{declares}: {:?}", graph.modules.faults);
        let broken = rooms_import_what_they_may(&graph);
        assert!(broken[0].starts_with(&format!("{found}:1: generate -> train")), "{declares}: {broken:?}");
        // Without the file, with a file that nobody declares.
        let text = tree.remove(found).unwrap();
        assert!(Graph::read(&tree).modules.faults[0].starts_with(&format!("{file}:1: mod ")));
        tree.insert(found.into(), text);
        tree.insert(file.into(), "#[cfg(test)]".to_owned() + declares);
        assert!(rooms_import_what_they_may(&Graph::read(&tree)).is_empty());
        tree.insert(file.into(), String::new());
        assert_eq!(Graph::read(&tree).modules.faults, [format!("{found}:1: no module is this file")]);
    }
}

#[test]
fn what_cannot_be_followed_is_a_fault() {
    let faults = [
        ("use crate::lost::X;", Some("crate::lost::X is not found: src/lib.rs has no lost")),
        ("fn f() { super::train::lost() }", Some("super::train::lost is not found")),
        ("use engraft_util::lost;", Some("util/src/lib.rs has no lost")),
        ("fn f() { mod inner { pub fn g() {} } }", Some("mod inner is inside a function")),
        ("include!(\"x.rs\");", Some("include! takes in code")),
        ("fn f( {", Some("src/generate/mod.rs:1: ")),
        ("m! { struct Made; } fn f() { self::Made::new() }", None),
        ("fn f() { lost::X; lost(); Vec::new() }", None),
    ];
    for (text, says) in faults {
        let faults = graph(&[TRAIN, RUN, ("src/generate/mod.rs", text)]).modules.faults;
        match says {
            Some(says) => assert!(faults.len() == 1 && faults[0].contains(says), "{text}: {faults:?}"),
            None => assert!(faults.is_empty(), "{text}: {faults:?}"),
        }
    }
}
