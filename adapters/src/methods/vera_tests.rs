//! Tests of VeRA: shared frozen factors and their slices, what PEFT's config may say, and what is refused.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::{
    AdapterSet, AdapterSpec, Error, Group, Ia3Spec, Lora, LoraSpec, Result, VeraSpec, peft, peft::TensorFile,
    testing,
};

fn spec(targets: &str) -> VeraSpec {
    VeraSpec { rank: 5, targets: targets.parse().unwrap(), ..VeraSpec::default() }
}

fn resolve(spec: VeraSpec) -> Result<AdapterSet> {
    AdapterSet::new(&spec.into(), &testing::base())
}

/// Initial values, with lambda_b and lambda_d that are none.
fn values(set: &AdapterSet) -> Vec<f32> {
    let mut values = set.init(1).unwrap();
    for slot in set.layout.tensors.iter().filter(|slot| slot.name.contains("vera_lambda")) {
        for (index, value) in values[slot.range()].iter_mut().enumerate() {
            *value = 0.5 + (slot.offset + index) as f32;
        }
    }
    values
}

fn save(set: &AdapterSet, dir: &Path) -> Vec<f32> {
    let values = values(set);
    peft::save(dir, set, &values, None, &testing::base()).unwrap();
    values
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join(peft::CONFIG_FILE)).unwrap()).unwrap()
}

/// Shapes in the file, by name.
fn stored(dir: &Path) -> Vec<(String, Vec<usize>)> {
    let file = TensorFile::open(&dir.join(peft::TENSOR_FILE)).unwrap();
    file.tensors().into_iter().map(|(name, info)| (name, info.shape.clone())).collect()
}

#[test]
fn modules_share_frozen_factors_and_learn_two_vectors_each() {
    let base = testing::base();
    let set = resolve(spec("c_attn,mlp.c_proj")).unwrap();
    let names: Vec<(&str, &[usize])> =
        set.layout.tensors[..6].iter().map(|slot| (slot.name.as_str(), &slot.shape[..])).collect();
    let path = "base_model.model.transformer.h.0.";
    assert_eq!(
        names,
        [
            ("base_model.vera_A", &[5, 24][..]),
            ("base_model.vera_B", &[18, 5]),
            ("base_model.vera_A[:, :6]", &[5, 6]),
            (&format!("{path}attn.c_attn.vera_lambda_b"), &[18]),
            (&format!("{path}attn.c_attn.vera_lambda_d"), &[5]),
            (&format!("{path}mlp.c_proj.vera_lambda_b"), &[6]),
        ]
    );
    let factors: Vec<_> = set.loras.iter().map(|lora| (lora.a, lora.b, lora.columns.clone())).collect();
    assert_eq!(factors[..3], [(2, 1, 0..18), (0, 1, 0..6), (2, 1, 0..18)]);
    assert!(set.loras.iter().all(|lora| (lora.scale, lora.rank) == (1.0, 5) && lora.part.is_none()));
    assert_eq!(set.trainables(), 3 * (18 + 5 + 6 + 5));
    let group = |index: usize| set.layout.segments()[index].group;
    assert_eq!([0, 1, 2].map(group), [Group::FROZEN; 3]);
    assert_eq!([3, 4].map(group), [Group::DEFAULT; 2]);
    assert_eq!(set.matched(&base), ["attn.c_attn: layers 0-2", "mlp.c_proj: layers 0-2"]);
    // Modules of one width need no slice.
    let layers = Some(vec![1]);
    let set = resolve(VeraSpec { layers, ..spec("c_attn,attn.c_proj") }).unwrap();
    assert_eq!((set.layout.tensors.len(), set.matched(&base).len()), (2 + 2 * 2, 2));
    assert_eq!(
        (&set.layout.tensors[0].shape[..], &set.layout.tensors[1].shape[..]),
        (&[5, 6][..], &[18, 5][..])
    );
}

#[test]
fn it_starts_as_the_base_with_the_projections_of_its_key() {
    let set = resolve(VeraSpec { d_initial: 0.25, ..spec("c_attn,mlp.c_proj") }).unwrap();
    let values = set.init(1).unwrap();
    let of = |values: &[f32], name: &str| values[set.layout.slot(name).unwrap().range()].to_vec();
    for lora in &set.loras {
        let Lora { d: Some(d), e: Some(e), .. } = *lora else { panic!("{lora:?}") };
        assert_eq!(values[set.layout.tensors[d].range()], [0.25; 5]);
        assert!(values[set.layout.tensors[e].range()].iter().all(|&e| e == 0.0));
    }
    let (a, b, slice) = (
        of(&values, "base_model.vera_A"),
        of(&values, "base_model.vera_B"),
        of(&values, "base_model.vera_A[:, :6]"),
    );
    for row in 0..5 {
        assert_eq!(slice[6 * row..][..6], a[24 * row..][..6]);
    }
    for (factor, fan) in [(&a, 24.0f32), (&b, 5.0)] {
        let (bound, largest) =
            ((6.0 / fan).sqrt(), factor.iter().fold(0.0, |most: f32, x| most.max(x.abs())));
        assert!(largest < bound && largest > 0.8 * bound, "{largest} of {bound}");
    }
    // They follow from their key, and not from the seed of a run.
    assert_eq!(set.init(2).unwrap(), values);
    let other = resolve(VeraSpec { projection_prng_key: 1, ..spec("c_attn,mlp.c_proj") }).unwrap();
    assert_ne!(of(&other.init(1).unwrap(), "base_model.vera_A"), a);
}

#[test]
fn a_folder_is_read_as_it_was_written() {
    let base = testing::base();
    for (targets, layers, written) in [
        ("c_attn,mlp.c_proj", None, json!([["c_attn", "mlp.c_proj"], null])),
        ("c_proj", Some(vec![2, 0]), json!([["c_proj"], [2, 0]])),
        (r"/.*h\.1\..*c_fc/", None, json!([["mlp.c_fc"], [1]])),
        ("all-linear", None, json!([["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"], null])),
    ] {
        let (key, dropout) = (u64::from(u32::MAX), 0.25);
        let spec = VeraSpec { layers, dropout, projection_prng_key: key, ..spec(targets) };
        let (set, folder) = (resolve(spec).unwrap(), tempfile::tempdir().unwrap());
        let dir = folder.path().join("adapter");
        let values = save(&set, &dir);
        let config = config(&dir);
        assert_eq!(json!([config["target_modules"], config["layers_to_transform"]]), written, "{targets}");
        assert_eq!(
            json!([config["r"], config["projection_prng_key"], config["save_projection"]]),
            json!([5, key, true])
        );
        let loaded = peft::load(&dir, &base, false).unwrap();
        assert_eq!((loaded.values, loaded.set.loras, loaded.hints), (values, set.loras, vec![]));
        assert_eq!((loaded.set.layout, loaded.set.spec.vera.unwrap().dropout), (set.layout, 0.25));
        // The file has A and B once, and no slice.
        let stored = stored(&dir);
        let projections: Vec<&str> =
            stored.iter().map(|(name, _)| name.as_str()).filter(|name| !name.contains("lambda")).collect();
        assert_eq!(projections, ["base_model.vera_A", "base_model.vera_B"]);
        let text = peft::describe(&dir).unwrap().to_string();
        assert!(
            text.contains("kind         vera, rank 5, projections of key 4294967295\ntargets "),
            "{text}"
        );
    }
}

#[test]
fn the_file_s_projections_count_and_else_those_of_the_key() {
    let (set, folder) = (resolve(spec("c_attn,mlp.c_proj")).unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    // Projections that no key gives.
    let mut values = values(&set);
    for name in ["base_model.vera_A", "base_model.vera_B"] {
        values[set.layout.slot(name).unwrap().range()].fill(0.125);
    }
    peft::save(&dir, &set, &values, None, &testing::base()).unwrap();
    let loaded = peft::load(&dir, &testing::base(), false).unwrap();
    let of = |name: &str| &loaded.values[loaded.set.layout.slot(name).unwrap().range()];
    assert_eq!(of("base_model.vera_A[:, :6]"), [0.125; 30]);
    assert_eq!(of("base_model.vera_B"), [0.125; 90]);
    // As PEFT, projections in the file are not expected where the config says that there are none.
    let mut changed = config(&dir);
    changed["save_projection"] = json!(false);
    fs::write(dir.join(peft::CONFIG_FILE), changed.to_string()).unwrap();
    let error = peft::load(&dir, &testing::base(), false).unwrap_err().to_string();
    assert!(error.contains("base_model.vera_A is not expected"), "{error}");
}

#[test]
fn what_cannot_be_is_refused() {
    for (wrong, says) in [
        (spec("q"), "targets: `q` is a part of attn.c_attn, and vera attaches to whole modules"),
        (spec("c_fk"), "targets: `c_fk` matches no module"),
        (VeraSpec { rank: 0, ..spec("c_fc") }, "rank: the rank is 0"),
        (VeraSpec { dropout: 1.0, ..spec("c_fc") }, "dropout: 1 is not in [0, 1)"),
        (VeraSpec { d_initial: 1e300, ..spec("c_fc") }, "d_initial: "),
        (VeraSpec { layers: Some(vec![3]), ..spec("c_fc") }, "layers: 3 does not exist"),
        (VeraSpec { rank: 1 << 32, ..spec("c_fc") }, "base_model.vera_A: a tensor of shape"),
    ] {
        let error = resolve(wrong).unwrap_err();
        assert!(error.is_input() && error.to_string().starts_with(says), "{error}");
    }
}

#[test]
fn beside_other_methods_deltas_are_summed_with_one_dropout() {
    let both = |lora: f64, vera: f64| {
        let lora = Some(LoraSpec { dropout: lora, ..LoraSpec::default() });
        let vera = Some(VeraSpec { dropout: vera, ..spec("c_attn,c_fc") });
        let spec = AdapterSpec { lora, vera, ia3: Some(Ia3Spec::default()), ..AdapterSpec::default() };
        AdapterSet::new(&spec, &testing::base())
    };
    let set = both(0.1, 0.1).unwrap();
    assert_eq!((set.loras.len(), set.dropout()), (3 + 6, 0.1));
    let methods: Vec<&str> = set.loras.iter().map(|lora| set.layout.tensors[lora.b].method).collect();
    assert_eq!((methods[..3].concat(), methods[3..].concat()), ("lora".repeat(3), "vera".repeat(6)));
    let error = both(0.1, 0.0).unwrap_err();
    assert!(matches!(error, Error::DropoutsDiffer { .. }) && error.is_input(), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("adapter");
    let values = save(&set, &dir);
    let loaded = peft::load(&dir, &testing::base(), false).unwrap();
    assert_eq!((loaded.values, loaded.set.loras), (values, set.loras));
}

#[test]
fn the_config_chooses_as_peft_does() {
    let (set, folder) = (resolve(spec("c_attn,mlp.c_proj")).unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    save(&set, &dir);
    let original = config(&dir);
    let with = |changes: Value| {
        let mut changed = original.clone();
        changes.as_object().unwrap().iter().for_each(|(name, value)| changed[name.as_str()] = value.clone());
        fs::write(dir.join(peft::CONFIG_FILE), changed.to_string()).unwrap();
        peft::load(&dir, &testing::base(), false)
    };
    for same in [
        json!({"target_modules": r".*(c_attn|mlp\.c_proj)"}),
        json!({"layers_to_transform": [0, 1, 2], "layers_pattern": "h"}),
        json!({"vera_dropout": 0.5, "d_initial": 1, "projection_prng_key": null, "init_weights": false}),
    ] {
        let loaded = with(same.clone()).unwrap();
        assert_eq!((loaded.set.loras, loaded.hints), (set.loras.clone(), vec![]), "{same}");
    }
    assert_eq!(with(json!({"target_modules": ["wo", "c_attn", "mlp.c_proj"]})).unwrap().hints.len(), 1);
    for (changes, says) in [
        (json!({"r": 4}), "vera_A has shape [5, 24] where [4, 24] is expected"),
        (json!({"target_modules": ["c_attn"]}), "mlp.c_proj.vera_lambda_b is not expected"),
        (json!({"bias": "vera_only"}), "bias is \"vera_only\" where none is supported"),
        (json!({"modules_to_save": ["wte"]}), "modules_to_save"),
        (json!({"projection_prng_key": -1}), "projection_prng_key is -1 where a whole number is expected"),
        (json!({"save_projection": "no"}), "save_projection"),
        (json!({"monteclora": true}), "monteclora"),
        (json!({"target_modules": null}), "target_modules is null"),
    ] {
        let error = with(changes).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn the_spec_is_read_and_written_as_json() {
    let spec: VeraSpec = serde_json::from_str(r#"{"rank": 3, "projection_prng_key": 4}"#).unwrap();
    assert_eq!(spec, VeraSpec { rank: 3, projection_prng_key: 4, ..VeraSpec::default() });
    assert_eq!(serde_json::from_str::<VeraSpec>(&serde_json::to_string(&spec).unwrap()).unwrap(), spec);
    assert!(serde_json::from_str::<VeraSpec>(r#"{"alpha": 1}"#).is_err());
}
