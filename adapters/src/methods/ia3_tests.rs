//! Tests of IA3: which modules are scaled and on which side, what PEFT's config may say, and what is refused.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::{
    AdapterSet, AdapterSpec, Error, Group, Ia3Spec, LnTuningSpec, LoraSpec, OutputScale, PrefixSpec, Result,
    Targets, methods::kinds, peft, testing,
};

/// A spec as the options give it; `-` for feed-forward modules that are not named, and nothing for none.
fn spec(targets: &str, feedforward: &str) -> Ia3Spec {
    let feedforward = (feedforward != "-").then(|| feedforward.parse().unwrap());
    Ia3Spec { targets: targets.parse().unwrap(), feedforward }
}

fn resolve(targets: &str, feedforward: &str) -> Result<AdapterSet> {
    AdapterSet::new(&spec(targets, feedforward).into(), &testing::base())
}

/// Layer, site and whether the input is scaled, of each vector.
fn places(set: &AdapterSet) -> Vec<(usize, usize, bool)> {
    set.vectors.iter().map(|vectors| (vectors.layer, vectors.site, vectors.u.is_some())).collect()
}

/// Values that are none of the initial ones.
fn values(set: &AdapterSet) -> Vec<f32> {
    (0..set.layout.len).map(|index| 0.5 + index as f32).collect()
}

fn save(set: &AdapterSet, dir: &Path) -> Vec<f32> {
    let values = values(set);
    peft::save(dir, set, &values, None, &testing::base()).unwrap();
    values
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join(peft::CONFIG_FILE)).unwrap()).unwrap()
}

#[test]
fn outputs_are_scaled_and_inputs_of_feedforward_modules() {
    let base = testing::base();
    let set = AdapterSet::new(&Ia3Spec::default().into(), &base).unwrap();
    assert_eq!(
        places(&set),
        [(0, 0, false), (0, 3, true), (1, 0, false), (1, 3, true), (2, 0, false), (2, 3, true)]
    );
    assert_eq!(set.matched(&base), ["attn.c_attn (output): layers 0-2", "mlp.c_proj (input): layers 0-2"]);
    assert_eq!(set.trainables(), 3 * (18 + 24));
    let [first, second, ..] = &set.layout.tensors[..] else { panic!() };
    assert_eq!(
        (first.name.as_str(), &first.shape[..]),
        ("base_model.model.transformer.h.0.attn.c_attn.ia3_l", &[18, 1][..])
    );
    assert_eq!((second.name.ends_with("0.mlp.c_proj.ia3_l"), &second.shape[..]), (true, &[1, 24][..]));
    // The bias is scaled too.
    let g = OutputScale { vector: 0, over_norms: false, with_bias: true };
    assert_eq!((set.vectors[0].g, set.vectors[0].u, set.vectors[0].bias), (Some(g), None, None));
    assert_eq!((set.vectors[1].g, set.vectors[1].u), (None, Some(1)));
    // It starts as the base alone, and decays as the optimizer's own.
    assert_eq!(set.init(3).unwrap(), vec![1.0; set.layout.len]);
    assert!(set.layout.segments().iter().all(|segment| segment.group == Group::DEFAULT));
}

#[test]
fn feedforward_modules_are_chosen_as_peft_does() {
    let base = testing::base();
    for (targets, feedforward, matched) in [
        ("c_attn", "-", &["attn.c_attn (output): layers 0-2"][..]),
        ("c_proj", "-", &["attn.c_proj (output): layers 0-2", "mlp.c_proj (input): layers 0-2"]),
        ("c_proj", "", &["attn.c_proj (output): layers 0-2", "mlp.c_proj (output): layers 0-2"]),
        // The end of the text counts, not that of a name.
        ("c_proj", "proj", &["attn.c_proj (input): layers 0-2", "mlp.c_proj (input): layers 0-2"]),
        ("c_fc", "1.mlp.c_fc", &["mlp.c_fc (output): layers 0, 2", "mlp.c_fc (input): layer 1"]),
        (
            r"/.*h\.[12]\.mlp\.c_.*/",
            "/.*c_fc/",
            &["mlp.c_fc (input): layers 1-2", "mlp.c_proj (output): layers 1-2"],
        ),
        (
            "all-linear",
            "all-linear",
            &[
                "attn.c_attn (input): layers 0-2",
                "attn.c_proj (input): layers 0-2",
                "mlp.c_fc (input): layers 0-2",
                "mlp.c_proj (input): layers 0-2",
            ],
        ),
    ] {
        assert_eq!(resolve(targets, feedforward).unwrap().matched(&base), matched, "{targets} {feedforward}");
    }
}

#[test]
fn what_has_no_vector_is_refused() {
    for (targets, feedforward, says) in [
        (
            "q,v",
            "-",
            "targets: `q` is a part of attn.c_attn, and ia3 attaches to whole modules; choose attn.c_attn",
        ),
        ("c_fk", "-", "targets: `c_fk` matches no module"),
        ("c_attn", "mlp.c_proj", "feedforward: `mlp.c_proj` matches no module among the targets c_attn"),
        ("c_attn", "/.*c_fc/", "feedforward: `/.*c_fc/` matches no module among"),
        ("c_attn", "/(/", "feedforward: `(` is no regular expression"),
    ] {
        let error = resolve(targets, feedforward).unwrap_err();
        assert!(error.is_input() && error.to_string().starts_with(says), "{error}");
    }
}

#[test]
fn a_folder_is_read_as_it_was_written() {
    let base = testing::base();
    let path = |layer: usize, site: &str| format!("transformer.h.{layer}.{site}");
    for (targets, feedforward, written) in [
        ("c_attn,mlp.c_proj", "-", json!([["c_attn", "mlp.c_proj"], ["mlp.c_proj"]])),
        ("c_attn", "-", json!([["c_attn"], []])),
        ("c_fc", "c_fc", json!([["c_fc"], ["c_fc"]])),
        // PEFT wants feed-forward modules to be targets word by word.
        ("c_proj", "-", json!([["attn.c_proj", "mlp.c_proj"], ["mlp.c_proj"]])),
        ("c_proj", "", json!([["c_proj"], []])),
        ("/.*(attn|mlp).c_proj/", "/.*mlp.*/", json!([["attn.c_proj", "mlp.c_proj"], ["mlp.c_proj"]])),
        (
            "c_fc",
            "1.mlp.c_fc",
            json!([[path(0, "mlp.c_fc"), path(1, "mlp.c_fc"), path(2, "mlp.c_fc")], [path(1, "mlp.c_fc")]]),
        ),
        (r"/.*h\.[02]\.mlp.c_fc/", "", json!([[path(0, "mlp.c_fc"), path(2, "mlp.c_fc")], []])),
    ] {
        let (set, folder) = (resolve(targets, feedforward).unwrap(), tempfile::tempdir().unwrap());
        let dir = folder.path().join("adapter");
        let values = save(&set, &dir);
        let config = config(&dir);
        assert_eq!(json!([config["target_modules"], config["feedforward_modules"]]), written, "{targets}");
        let loaded = peft::load(&dir, &base, false).unwrap();
        assert_eq!((loaded.values, loaded.set.vectors, loaded.hints), (values, set.vectors, vec![]));
        assert_eq!(loaded.set.layout, set.layout);
        let text = peft::describe(&dir).unwrap().to_string();
        assert!(text.contains("kind         ia3\ntargets ") && text.contains(".ia3_l F32 ["), "{text}");
    }
}

#[test]
fn beside_other_methods_it_has_a_folder_and_changes_nothing_of_theirs() {
    let base = testing::base();
    let lora = LoraSpec::default();
    let all = AdapterSpec {
        lora: Some(lora.clone()),
        ia3: Some(Ia3Spec::default()),
        prefix: Some(PrefixSpec { length: 3, projection: None }),
        ..AdapterSpec::default()
    };
    let (set, folder) = (AdapterSet::new(&all, &base).unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    let values = save(&set, &dir);
    for name in ["lora", "ia3", "prefix"] {
        assert!(dir.join(name).join(peft::CONFIG_FILE).is_file(), "{name}");
    }
    let loaded = peft::load(&dir, &base, false).unwrap();
    assert_eq!((loaded.values, loaded.set.layout, loaded.set.vectors), (values, set.layout, set.vectors));
    assert_eq!(loaded.set.loras, AdapterSet::new(&lora.into(), &base).unwrap().loras);
}

/// PEFT folds or wraps methods one after another. What scales an output comes last and scales the sum; of what scales an
/// input, the deltas of the other would see it scaled.
#[test]
fn a_delta_on_a_module_with_a_scaled_input_is_refused() {
    let names: Vec<&str> = kinds().into_iter().map(|kind| kind.name).collect();
    let at = |name: &str| names.iter().position(|known| *known == name).unwrap();
    assert!(at("lora") < at("ia3") && at("ia3") < at("prefix"));
    let with = |targets: &str, feedforward: &str| {
        let lora = Some(LoraSpec { targets: "q,mlp.c_proj".parse().unwrap(), ..LoraSpec::default() });
        let spec = AdapterSpec { lora, ia3: Some(spec(targets, feedforward)), ..AdapterSpec::default() };
        AdapterSet::new(&spec, &testing::base())
    };
    let error = with("c_attn,mlp.c_proj", "-").unwrap_err();
    assert!(
        matches!(error, Error::ScaledInputAndDelta { scales: "ia3", adds: "lora", .. }) && error.is_input()
    );
    assert!(error.to_string().contains("ia3 scales the input of `transformer.h.0.mlp.c_proj` and lora adds"));
    for (targets, feedforward) in [("c_attn,mlp.c_proj", ""), ("c_attn,c_fc", "c_fc")] {
        assert_eq!(with(targets, feedforward).unwrap().vectors.len(), 6);
    }
    let ln_tuning = Some(LnTuningSpec::default());
    let both = AdapterSpec { ia3: Some(Ia3Spec::default()), ln_tuning, ..AdapterSpec::default() };
    assert_eq!(AdapterSet::new(&both, &testing::base()).unwrap().norms.len(), 7);
}

#[test]
fn the_config_chooses_as_peft_does() {
    let (set, folder) = (resolve("c_attn,mlp.c_proj", "-").unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    save(&set, &dir);
    let original = config(&dir);
    let with = |changes: &[(&str, Value)]| {
        let mut changed = original.clone();
        changes.iter().for_each(|(name, value)| changed[*name] = value.clone());
        fs::write(dir.join(peft::CONFIG_FILE), changed.to_string()).unwrap();
        peft::load(&dir, &testing::base(), false)
    };
    let (targets, feedforward) = ("target_modules", "feedforward_modules");
    for same in [
        &[(targets, Value::Null)][..],
        &[(feedforward, Value::Null)],
        &[(targets, json!(r".*(c_attn|mlp\.c_proj)"))],
        &[(feedforward, json!(r".*\.mlp\.c_proj"))],
        &[(feedforward, json!(["p.c_proj"]))],
        &[(targets, json!(["c_proj", "c_attn"])), ("exclude_modules", json!(["attn.c_proj"]))],
        &[
            ("init_ia3_weights", json!(false)),
            ("fan_in_fan_out", json!(false)),
            ("peft_version", json!("0.21.2")),
        ],
    ] {
        let loaded = with(same).unwrap();
        assert_eq!((loaded.set.vectors, loaded.hints), (set.vectors.clone(), vec![]), "{same:?}");
    }
    let loaded =
        with(&[(targets, json!(["c_attn", "mlp.c_proj", "wo"])), (feedforward, json!(["wo", "mlp.c_proj"]))]);
    let loaded = loaded.unwrap();
    assert_eq!((loaded.set.vectors, loaded.hints.len()), (set.vectors.clone(), 1));
    assert!(loaded.hints[0].contains("the config's wo, wo applies to no module"), "{:?}", loaded.hints);

    // No feed-forward module at all: the file has other shapes.
    for none in [json!([]), json!("mlp.c_proj")] {
        let error = with(&[(feedforward, none)]).unwrap_err().to_string();
        assert!(error.contains("shape [1, 24] where [6, 1] is expected"), "{error}");
    }
    for (name, value) in [
        ("modules_to_save", json!(["wte"])),
        ("layers_to_transform", json!([1])),
        ("task_type", json!("SEQ_CLS")),
        ("l_dropout", json!(0.5)),
    ] {
        let error = with(&[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    let error = with(&[(targets, json!(["c_attn", "q"]))]).unwrap_err().to_string();
    assert!(error.contains("mlp.c_proj.ia3_l is not expected"), "{error}");
}

#[test]
fn a_file_for_another_number_of_layers_is_refused_in_one_sentence() {
    let (set, folder) = (resolve("c_attn,mlp.c_proj", "-").unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    save(&set, &dir);
    for layers in [2, 4] {
        let other = crate::BaseDescription { layers, ..testing::base() };
        let error = peft::load(&dir, &other, false).unwrap_err().to_string();
        assert!(error.contains(&format!("for a base of 3 layers, this one has {layers}")), "{error}");
    }
}

#[test]
fn the_spec_is_read_and_written_as_json() {
    let spec: Ia3Spec = serde_json::from_str(r#"{"targets": "c_fc", "feedforward": []}"#).unwrap();
    assert_eq!(spec.feedforward, Some(Targets::List(vec![])));
    assert_eq!(serde_json::from_str::<Ia3Spec>("{}").unwrap(), Ia3Spec::default());
    for spec in [spec, Ia3Spec::default()] {
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<Ia3Spec>(&json).unwrap(), spec, "{json}");
    }
    assert!(serde_json::from_str::<Ia3Spec>(r#"{"layers": [1]}"#).is_err());
}
