//! Tests of target matching: PEFT's rules, parts, patterns, and every refusal.

use std::collections::BTreeMap;

use crate::{AdapterSet, AdapterSpec, Error, LoraSpec, PrefixSpec, Targets, targets, testing};

fn list(names: &[&str]) -> Targets {
    Targets::List(names.iter().map(|&name| name.to_owned()).collect())
}

fn paths(targets: &Targets, layers: Option<&[usize]>) -> Result<Vec<String>, Error> {
    let base = testing::base();
    Ok(super::select(targets, layers, &base)?.into_iter().map(|one| one.path(&base)).collect())
}

fn resolve(lora: LoraSpec) -> Result<AdapterSet, Error> {
    AdapterSet::new(&lora.into(), &testing::base())
}

#[test]
fn a_name_matches_whole_paths_and_ends_after_a_dot() {
    assert_eq!(paths(&list(&["c_attn"]), Some(&[1])).unwrap(), ["transformer.h.1.attn.c_attn"]);
    let both = ["transformer.h.0.attn.c_proj", "transformer.h.0.mlp.c_proj"];
    assert_eq!(paths(&list(&["c_proj"]), Some(&[0])).unwrap(), both);
    assert_eq!(paths(&list(&["mlp.c_proj"]), Some(&[0])).unwrap(), both[1..]);
    assert_eq!(paths(&list(&["transformer.h.2.mlp.c_fc"]), None).unwrap(), ["transformer.h.2.mlp.c_fc"]);
    assert!(!targets::names("attn", "transformer.h.0.attn.c_attn"));
    assert!(!targets::names("proj", "transformer.h.0.attn.c_proj"));
}

#[test]
fn parts_are_addressed_below_their_module_and_come_in_order() {
    let q_v = ["transformer.h.0.attn.c_attn.q", "transformer.h.0.attn.c_attn.v"];
    assert_eq!(paths(&list(&["v", "q"]), Some(&[0])).unwrap(), q_v);
    assert_eq!(paths(&list(&["c_attn.v", "q"]), Some(&[0])).unwrap(), q_v);
}

#[test]
fn all_linear_and_regexes_choose_whole_modules() {
    assert_eq!(paths(&Targets::AllLinear, None).unwrap().len(), 12);
    let regex = Targets::Regex(r".*\.[02]\.attn\..*".to_owned());
    let found = paths(&regex, None).unwrap();
    assert_eq!(found.len(), 4);
    assert_eq!(found[0], "transformer.h.0.attn.c_attn");
    // A regex must match the whole path.
    assert!(matches!(paths(&Targets::Regex("attn".to_owned()), None), Err(Error::NothingMatched { .. })));
    assert!(matches!(paths(&Targets::Regex("a)|(b".to_owned()), None), Err(Error::BadRegex { .. })));
}

#[test]
fn a_target_without_a_match_names_what_exists() {
    let error = paths(&list(&["c_attn", "q_proj"]), None).unwrap_err();
    let text = error.to_string();
    assert!(error.is_input());
    assert!(text.contains("`q_proj`") && text.contains("attn.c_attn (parts q, k, v)"), "{text}");
    assert!(matches!(paths(&list(&[]), None), Err(Error::NothingMatched { .. })));
}

#[test]
fn layers_are_sorted_and_must_exist() {
    assert_eq!(paths(&list(&["c_fc"]), Some(&[2, 0, 2])).unwrap().len(), 2);
    assert!(matches!(
        paths(&list(&["c_fc"]), Some(&[3])),
        Err(Error::LayerOutOfRange { layer: 3, layers: 3 })
    ));
    assert!(matches!(paths(&list(&["c_fc"]), Some(&[])), Err(Error::NoLayers)));
}

#[test]
fn a_module_and_its_part_exclude_each_other_in_one_layer() {
    let error = paths(&list(&["c_attn", "k"]), None).unwrap_err();
    assert!(matches!(&error, Error::PartAndWhole { part, .. } if part == "k"), "{error}");
    assert!(paths(&list(&["transformer.h.0.attn.c_attn", "h.1.attn.c_attn.k"]), None).is_ok());
}

#[test]
fn patterns_match_the_end_after_a_dot_and_the_first_key_wins() {
    let set = resolve(LoraSpec {
        targets: Targets::AllLinear,
        rank_pattern: BTreeMap::from([
            ("c_proj".to_owned(), 3),
            ("h.1.mlp.c_proj".to_owned(), 5),
            (r"h\.[01]\.attn\.c_attn".to_owned(), 2),
        ]),
        alpha_pattern: BTreeMap::from([("c_fc".to_owned(), 1.0)]),
        ..LoraSpec::default()
    });
    // `h.1.mlp.c_proj` loses everywhere to `c_proj`, which sorts first.
    assert!(matches!(set, Err(Error::PatternUnmatched { ref key, .. }) if key == "h.1.mlp.c_proj"));
    let set = resolve(LoraSpec {
        targets: Targets::AllLinear,
        rank_pattern: BTreeMap::from([("c_proj".to_owned(), 3), (r"h\.[01]\.attn\.c_attn".to_owned(), 2)]),
        alpha_pattern: BTreeMap::from([("c_fc".to_owned(), 1.0)]),
        ..LoraSpec::default()
    })
    .unwrap();
    let ranks: Vec<usize> = set.loras.iter().map(|lora| lora.rank).collect();
    assert_eq!(ranks, [2, 3, 8, 3, 2, 3, 8, 3, 8, 3, 8, 3]);
    assert_eq!(set.loras[2].scale, 0.125);
    assert_eq!(set.loras[0].scale, 8.0);
}

#[test]
fn a_pattern_for_one_part_only_is_refused() {
    let spec = |key: &str| LoraSpec {
        targets: list(&["q", "v"]),
        rank_pattern: BTreeMap::from([(key.to_owned(), 2)]),
        ..LoraSpec::default()
    };
    assert!(matches!(resolve(spec("q")), Err(Error::PartsDiffer { .. })));
    assert_eq!(resolve(spec("c_attn")).unwrap().loras[0].rank, 2);
    assert_eq!(resolve(spec("q|v")).unwrap().loras[1].rank, 2);
}

#[test]
fn values_out_of_range_are_refused() {
    let with = |change: fn(&mut LoraSpec)| {
        let mut lora = LoraSpec::default();
        change(&mut lora);
        resolve(lora).unwrap_err()
    };
    assert!(matches!(with(|lora| lora.rank = 0), Error::ZeroRank { .. }));
    let error = with(|lora| lora.rank_pattern = BTreeMap::from([("c_attn".to_owned(), 0)]));
    assert!(matches!(&error, Error::ZeroRank { option } if option.contains("c_attn")));
    for alpha in [f64::NAN, f64::INFINITY, 1e300] {
        let lora = LoraSpec { alpha, ..LoraSpec::default() };
        assert!(matches!(resolve(lora), Err(Error::Alpha { .. })));
    }
    assert!(matches!(
        with(|lora| lora.alpha_pattern = BTreeMap::from([("c_attn".to_owned(), f64::NAN)])),
        Error::Alpha { .. }
    ));
    for dropout in [-0.1, 1.0, f64::NAN] {
        let lora = LoraSpec { dropout, ..LoraSpec::default() };
        assert!(matches!(resolve(lora), Err(Error::Dropout { .. })));
    }
    assert!(matches!(with(|lora| lora.rank = usize::MAX), Error::TooLarge { .. }));
    let error = with(|lora| lora.rank_pattern = BTreeMap::from([("c_fc".to_owned(), 4)]));
    assert!(matches!(error, Error::PatternUnmatched { option: "rank_pattern", .. }));
    assert!(matches!(
        with(|lora| lora.rank_pattern = BTreeMap::from([("(".to_owned(), 4)])),
        Error::BadRegex { .. }
    ));
}

#[test]
fn a_prefix_leaves_room_for_text() {
    let prefix = |length, projection| {
        let spec = AdapterSpec::from(PrefixSpec { length, projection });
        AdapterSet::new(&spec, &testing::base())
    };
    assert!(matches!(prefix(0, None), Err(Error::PrefixLength { .. })));
    assert!(matches!(prefix(32, None), Err(Error::PrefixLength { positions: 32, .. })));
    assert!(prefix(31, None).is_ok());
    assert!(matches!(prefix(3, Some(0)), Err(Error::ZeroProjection)));
    assert!(matches!(AdapterSet::new(&AdapterSpec::default(), &testing::base()), Err(Error::Empty)));
}

#[test]
fn targets_are_read_and_written_as_text() {
    for (text, targets) in [
        ("all-linear", Targets::AllLinear),
        ("/.*c_attn/", Targets::Regex(".*c_attn".into())),
        ("q,v", Targets::List(vec!["q".into(), "v".into()])),
    ] {
        assert_eq!(text.parse::<Targets>().unwrap(), targets);
        assert_eq!(targets.to_string(), text);
        let json = serde_json::to_string(&targets).unwrap();
        assert_eq!(serde_json::from_str::<Targets>(&json).unwrap(), targets);
    }
    assert_eq!(" q , v,".parse::<Targets>().unwrap(), Targets::List(vec!["q".into(), "v".into()]));
}

#[test]
fn the_embedding_of_tokens_is_chosen_by_name_path_or_expression_alone() {
    let base = testing::base();
    let found = |targets: &Targets, layers: Option<&[usize]>| {
        let chosen = targets::select_with_embedding(targets, layers, &base)?;
        Ok::<_, Error>((chosen.modules.len(), chosen.embedding))
    };
    assert_eq!(found(&Targets::AllLinear, None).unwrap(), (12, false));
    assert_eq!(found(&list(&["c_fc", "wte"]), None).unwrap(), (3, true));
    assert_eq!(found(&list(&["wte"]), None).unwrap(), (0, true));
    // It is in no layer.
    assert_eq!(found(&list(&["c_fc", "transformer.wte"]), Some(&[1])).unwrap(), (1, true));
    assert_eq!(found(&Targets::Regex(".*(wte|h.0.mlp.c_fc)".to_owned()), None).unwrap(), (1, true));
    assert_eq!(found(&list(&["c_fc"]), None).unwrap(), (3, false));
    let text = found(&list(&["wpe"]), None).unwrap_err().to_string();
    assert!(text.contains("`wpe`") && text.ends_with("mlp.c_proj, wte"), "{text}");
    let other = crate::BaseDescription { token_embedding: None, ..testing::base() };
    assert!(targets::select_with_embedding(&list(&["wte"]), None, &other).is_err());
    // Methods that have nothing for it do not know its name.
    let text = paths(&list(&["wte"]), None).unwrap_err().to_string();
    assert!(text.ends_with("mlp.c_proj"), "{text}");
}

#[test]
fn a_lora_on_the_embedding_has_its_rank_and_scale() {
    let mut spec = LoraSpec { rank: 2, alpha: 3.0, targets: list(&["c_fc", "wte"]), ..LoraSpec::default() };
    spec.rank_pattern.insert("wte".to_owned(), 5);
    spec.alpha_pattern.insert("transformer.wte".to_owned(), 4.0);
    let set = resolve(spec.clone()).unwrap();
    let delta = set.embedding.as_ref().unwrap();
    assert_eq!((delta.rank, delta.scale), (5, 0.8));
    let shape =
        |slot: usize| (set.layout.tensors[slot].name.as_str(), set.layout.tensors[slot].shape.clone());
    assert_eq!(shape(delta.a), ("base_model.model.transformer.wte.lora_embedding_A", vec![5, 11]));
    assert_eq!(shape(delta.b), ("base_model.model.transformer.wte.lora_embedding_B", vec![testing::D, 5]));
    let values = set.init(1).unwrap();
    let of = |slot: usize| &values[set.layout.tensors[slot].range()];
    assert!(of(delta.a).iter().all(|&a| a == 0.0) && of(delta.b).iter().all(|&b| b != 0.0));
    let variance = of(delta.b).iter().map(|b| b * b).sum::<f32>() / 30.0;
    assert!((0.5..2.0).contains(&variance), "{variance}");
    assert_eq!(set.matched(&testing::base()), ["mlp.c_fc: layers 0-2", "wte: embedding of tokens (rank 5)"]);
    // The learning rate of B in LoRA+ is for those that start at 0.
    let plus = resolve(LoraSpec { lora_plus_ratio: 4.0, ..spec.clone() }).unwrap();
    assert_eq!(plus.layout.tensors[delta.b].group, 0);
    let text = resolve(LoraSpec { freeze_a: true, ..spec.clone() }).unwrap_err().to_string();
    assert!(text.starts_with("freeze_a: A of transformer.wte starts at 0"), "{text}");
    let dora = AdapterSet::new(&crate::DoraSpec { lora: spec }.into(), &testing::base()).unwrap_err();
    assert!(dora.to_string().contains("to which dora does not attach"), "{dora}");
}
