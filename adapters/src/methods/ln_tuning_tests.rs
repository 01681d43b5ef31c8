//! Tests of LN tuning: which norms are chosen, what PEFT's config may say, and what is refused.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::{
    AdapterSet, AdapterSpec, BaseWeights, Error, LnTuningSpec, LoraSpec, NormWeights, PrefixSpec, Result,
    Targets, peft, testing,
};

/// Gains of 1 + layer and biases of 0.5; of the last norm 9 and 0.25.
struct Counted;

impl BaseWeights for Counted {
    fn matrix(&self, _: usize, _: usize) -> Option<Vec<f32>> {
        None
    }

    fn column_norms(&self, _: usize, _: usize) -> Option<Vec<f32>> {
        None
    }

    fn bias(&self, _: usize, _: usize) -> Option<Vec<f32>> {
        None
    }

    fn norm(&self, layer: Option<usize>, norm: usize) -> Option<NormWeights> {
        let (gain, bias) = layer.map_or((9.0, 0.25), |layer| (1.0 + layer as f32, 0.5 + norm as f32));
        Some(NormWeights { gain: vec![gain; testing::D], bias: vec![bias; testing::D] })
    }

    fn token_embeddings(&self, _: &[u32]) -> Option<Vec<f32>> {
        None
    }
}

fn spec(norms: &str) -> LnTuningSpec {
    LnTuningSpec { norms: norms.parse().unwrap() }
}

fn resolve(norms: &str) -> Result<AdapterSet> {
    AdapterSet::new(&spec(norms).into(), &testing::base())
}

/// Layer and number of each norm of the set.
fn places(set: &AdapterSet) -> Vec<(Option<usize>, usize)> {
    set.norms.iter().map(|norm| (norm.layer, norm.norm)).collect()
}

fn save(set: &AdapterSet, dir: &Path) -> Vec<f32> {
    let values = set.init_from(1, Some(&Counted)).unwrap();
    peft::save(dir, set, &values, None, &testing::base()).unwrap();
    values
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join(peft::CONFIG_FILE)).unwrap()).unwrap()
}

#[test]
fn every_norm_is_trained_unless_some_are_named() {
    let base = testing::base();
    let set = AdapterSet::new(&LnTuningSpec::default().into(), &base).unwrap();
    let all = [(Some(0), 0), (Some(0), 1), (Some(1), 0), (Some(1), 1), (Some(2), 0), (Some(2), 1), (None, 0)];
    assert_eq!(places(&set), all);
    assert_eq!(set.matched(&base), ["ln_1: layers 0-2", "ln_2: layers 0-2", "ln_f"]);
    assert_eq!(set.trainables(), 7 * 2 * testing::D);
    for (norms, chosen, matched) in [
        ("ln_f", &[(None, 0)][..], "ln_f"),
        ("ln_2", &[(Some(0), 1), (Some(1), 1), (Some(2), 1)], "ln_2: layers 0-2"),
        ("h.1.ln_1", &[(Some(1), 0)], "ln_1: layer 1"),
        (r"/.*h\.[02]\.ln_1/", &[(Some(0), 0), (Some(2), 0)], "ln_1: layers 0, 2"),
    ] {
        let set = resolve(norms).unwrap();
        assert_eq!((places(&set).as_slice(), set.matched(&base)), (chosen, vec![matched.to_owned()]));
    }
}

#[test]
fn what_matches_no_norm_is_refused() {
    for norms in ["ln_3", "ln_1,c_attn", "all-linear", "/ln_1/", "n_1"] {
        let error = resolve(norms).unwrap_err();
        assert!(matches!(error, Error::NoNormMatched { .. }) && error.is_input(), "{norms}: {error}");
        assert!(error.to_string().ends_with("choose among ln_1, ln_2, ln_f"), "{error}");
    }
    assert!(matches!(resolve("/(/"), Err(Error::BadRegex { option: "norms", .. })));
}

#[test]
fn it_starts_from_the_base_and_does_not_decay() {
    let set = resolve("ln_1,ln_f").unwrap();
    assert!(matches!(set.init(1), Err(Error::WeightsNeeded { method: "ln_tuning" })));
    let values = set.init_from(1, Some(&Counted)).unwrap();
    let expected = [1.0, 0.5, 2.0, 0.5, 3.0, 0.5, 9.0, 0.25];
    assert_eq!(values, expected.iter().flat_map(|&value| [value; testing::D]).collect::<Vec<f32>>());
    assert!(set.layout.segments().iter().all(|segment| segment.group.weight_decay == Some(0.0)));
}

#[test]
fn a_folder_is_read_as_it_was_written() {
    let base = testing::base();
    for (norms, written) in [
        ("ln_1,ln_2,ln_f", json!(["ln_1", "ln_2", "ln_f"])),
        ("h.1.ln_1", json!(["h.1.ln_1"])),
        ("/.*ln_(f|2)/", json!(["ln_2", "ln_f"])),
        (r"/.*[02]\.ln_1/", json!(["transformer.h.0.ln_1", "transformer.h.2.ln_1"])),
    ] {
        let (set, folder) = (resolve(norms).unwrap(), tempfile::tempdir().unwrap());
        let dir = folder.path().join("adapter");
        let values = save(&set, &dir);
        assert_eq!(config(&dir)["target_modules"], written);
        let loaded = peft::load(&dir, &base, false).unwrap();
        assert_eq!((loaded.values, loaded.set.norms, loaded.hints), (values, set.norms, vec![]));
        assert_eq!(loaded.set.layout, set.layout);
        let text = peft::describe(&dir).unwrap().to_string();
        assert!(text.contains("kind         ln_tuning") && text.contains("ln_tuning_layers.bias F32 [6]"));
    }
}

#[test]
fn beside_other_methods_it_has_a_folder_and_changes_nothing_of_theirs() {
    let base = testing::base();
    let ln_tuning = Some(LnTuningSpec::default());
    let (lora, prefix) = (Some(LoraSpec::default()), Some(PrefixSpec { length: 3, projection: None }));
    let all = AdapterSpec { lora: lora.clone(), ln_tuning, prefix, ..AdapterSpec::default() };
    let (set, folder) = (AdapterSet::new(&all, &base).unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    let values = save(&set, &dir);
    for name in ["lora", "ln_tuning", "prefix"] {
        assert!(dir.join(name).join(peft::CONFIG_FILE).is_file(), "{name}");
    }
    let loaded = peft::load(&dir, &base, false).unwrap();
    assert_eq!(
        (loaded.values, &loaded.set.layout, &loaded.set.norms),
        (values.clone(), &set.layout, &set.norms)
    );
    let alone = AdapterSet::new(&lora.unwrap().into(), &base).unwrap();
    assert_eq!(values[..alone.layout.len], alone.init(1).unwrap());
}

#[test]
fn the_config_chooses_as_peft_does() {
    let (set, folder) = (resolve("ln_1,ln_f").unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    save(&set, &dir);
    let with = |name: &str, value: Value| {
        let mut changed = config(&dir);
        changed[name] = value;
        fs::write(dir.join(peft::CONFIG_FILE), changed.to_string()).unwrap();
        peft::load(&dir, &testing::base(), false)
    };
    for same in
        [json!(r".*\.(ln_1|ln_f)"), json!(["ln_f", "ln_1", "c_attn"]), json!(["ln_1", "transformer.ln_f"])]
    {
        let loaded = with("target_modules", same.clone()).unwrap();
        assert_eq!(loaded.set.norms, set.norms, "{same}");
        assert_eq!(
            loaded.hints.len(),
            usize::from(same.to_string().contains("c_attn")),
            "{:?}",
            loaded.hints
        );
    }
    // All of them where none is named: ln_2 is not in the file.
    let error = with("target_modules", Value::Null).unwrap_err().to_string();
    assert!(error.contains("h.0.ln_2.ln_tuning_layers.weight is missing"), "{error}");
    with("target_modules", json!(["ln_1", "ln_2", "ln_f"])).unwrap_err();
    let loaded = with("exclude_modules", json!(["ln_2"])).unwrap();
    assert_eq!((loaded.set.norms, loaded.hints), (set.norms, vec![]));
    let error = with("modules_to_save", json!(["wte"])).unwrap_err().to_string();
    assert!(error.contains("modules_to_save"), "{error}");
}

#[test]
fn a_file_for_another_number_of_layers_is_refused_in_one_sentence() {
    let (set, folder) = (resolve("ln_1").unwrap(), tempfile::tempdir().unwrap());
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
    let spec: LnTuningSpec = serde_json::from_str(r#"{"norms": "ln_1"}"#).unwrap();
    assert_eq!(spec.norms, Targets::List(vec!["ln_1".to_owned()]));
    assert_eq!(serde_json::from_str::<LnTuningSpec>("{}").unwrap(), LnTuningSpec::default());
    assert!(serde_json::from_str::<LnTuningSpec>(r#"{"targets": "ln_1"}"#).is_err());
}
