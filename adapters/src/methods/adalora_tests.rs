//! Tests of AdaLoRA: its tensors and initial values, its files with and without ranks, and what is refused.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Value, json};

use crate::{
    AdaLoraSpec, AdapterSet, AdapterSpec, Error, Lora, LoraSpec, PrefixSpec, Result, Triplets, peft,
    peft::TensorFile, testing,
};

fn spec(targets: &str) -> AdaLoraSpec {
    AdaLoraSpec { init_r: 5, target_r: 2, targets: targets.parse().unwrap(), ..AdaLoraSpec::default() }
}

fn resolve(spec: AdaLoraSpec) -> Result<AdapterSet> {
    AdapterSet::new(&spec.into(), &testing::base())
}

/// Values that are all different, and none of them 0.
fn values(set: &AdapterSet) -> Vec<f32> {
    (0..set.layout.len).map(|index| 0.5 + index as f32).collect()
}

fn tensor<'a>(set: &AdapterSet, values: &'a [f32], index: usize) -> &'a [f32] {
    &values[set.layout.tensors[index].range()]
}

/// `s B diag(E) A` of a delta, [outputs, inputs], in f64.
fn delta(set: &AdapterSet, values: &[f32], lora: &Lora) -> Vec<f64> {
    let of = |index: usize| tensor(set, values, index);
    let (a, b, e) = (of(lora.a), of(lora.b), of(lora.d.unwrap()));
    let inputs = a.len() / lora.rank;
    let rows = b.chunks(lora.rank);
    let element = |row: &[f32], column: usize| -> f64 {
        let terms = (0..lora.rank)
            .map(|rank| f64::from(row[rank]) * f64::from(e[rank]) * f64::from(a[rank * inputs + column]));
        f64::from(lora.scale) * terms.sum::<f64>()
    };
    rows.flat_map(|row| (0..inputs).map(move |column| element(row, column))).collect()
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join(peft::CONFIG_FILE)).unwrap()).unwrap()
}

#[test]
fn a_delta_has_three_tensors_and_the_scale_of_peft() {
    let set = resolve(AdaLoraSpec { alpha: 7.0, ..spec("c_attn,mlp.c_proj") }).unwrap();
    let path = "base_model.model.transformer.h.0.attn.c_attn.";
    let first: Vec<(&str, &[usize])> =
        set.layout.tensors[..3].iter().map(|slot| (slot.name.as_str(), &slot.shape[..])).collect();
    assert_eq!(
        first,
        [
            (&format!("{path}lora_A")[..], &[5, 6][..]),
            (&format!("{path}lora_B"), &[18, 5]),
            (&format!("{path}lora_E"), &[5, 1]),
        ]
    );
    // In PEFT: ranknum is 5.0 in F32, to which 1e-5 is added.
    assert!(set.loras.iter().all(|lora| lora.scale == 7.0 / (5.0 + 1e-5f32) && lora.d.is_some()));
    assert_eq!((set.loras.len(), set.loras[1].site), (6, 3));
    let allocation = set.allocation.unwrap();
    assert_eq!(allocation.triplets[1], Triplets { a: 3, b: 4, d: 5 });
    assert_eq!((allocation.triplets.len(), allocation.modules, allocation.budget), (6, 6, 12));
    let without = resolve(AdaLoraSpec { alpha: 0.0, ..spec("c_fc") }).unwrap();
    assert_eq!(without.loras[0].scale, 5.0 / (5.0 + 1e-5f32));
}

#[test]
fn it_starts_as_the_base_with_small_normal_factors() {
    let set = resolve(AdaLoraSpec { init_r: 40, ..spec("all-linear") }).unwrap();
    let values = set.init(3).unwrap();
    assert_eq!(values, set.init(3).unwrap());
    let mut drawn: Vec<f32> = Vec::new();
    for lora in &set.loras {
        assert!(tensor(&set, &values, lora.d.unwrap()).iter().all(|&e| e == 0.0));
        drawn.extend([tensor(&set, &values, lora.a), tensor(&set, &values, lora.b)].concat());
    }
    let variance = drawn.iter().map(|x| x * x).sum::<f32>() / drawn.len() as f32;
    assert!((variance / 4e-4 - 1.0).abs() < 0.05, "{variance}");
}

#[test]
fn a_new_adapter_is_written_whole() {
    let (set, folder) = (resolve(spec("c_attn,c_fc")).unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    let values = set.init(1).unwrap();
    peft::save(&dir, &set, &values, None, &testing::base()).unwrap();
    let written = config(&dir);
    assert_eq!(written["rank_pattern"], Value::Null);
    // PEFT refuses a schedule without a step in which ranks are taken away.
    assert_eq!((&written["peft_type"], &written["total_step"]), (&json!("ADALORA"), &json!(1)));
    let loaded = peft::load(&dir, &testing::base(), false).unwrap();
    assert_eq!((loaded.values, loaded.set.loras, loaded.hints), (values, set.loras, vec![]));
    let text = peft::describe(&dir).unwrap().to_string();
    assert!(text.contains("kind         adalora, initial rank 5, target rank 2, alpha 16\n"), "{text}");
}

#[test]
fn triplets_whose_e_is_0_are_left_out_of_the_files_and_change_nothing() {
    let set = resolve(spec("all-linear")).unwrap();
    let mut values = values(&set);
    // Of the deltas 0, 5, 10 none is left, of the others not the second and fourth.
    for (number, lora) in set.loras.iter().enumerate() {
        let e = &mut values[set.layout.tensors[lora.d.unwrap()].range()];
        match number % 5 {
            0 => e.fill(0.0),
            _ => [e[1], e[3]] = [0.0; 2],
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let (dir, again) = (folder.path().join("adapter"), folder.path().join("again"));
    peft::save(&dir, &set, &values, None, &testing::base()).unwrap();
    let pattern = &config(&dir)["rank_pattern"];
    assert_eq!(pattern.as_object().unwrap().len(), 12);
    let name = "transformer.h.0.attn.c_proj.lora_E";
    assert_eq!(pattern[name], json!([true, false, true, false, true]));
    let file = TensorFile::open(&dir.join(peft::TENSOR_FILE)).unwrap();
    let shape =
        |name: &str| file.info(&format!("base_model.model.transformer.h.0.{name}")).unwrap().shape.clone();
    assert_eq!((shape("attn.c_attn.lora_A"), shape("attn.c_attn.lora_B")), (vec![0, 6], vec![18, 0]));
    assert_eq!((shape("attn.c_proj.lora_A"), shape("attn.c_proj.lora_E")), (vec![3, 6], vec![3, 1]));

    let loaded = peft::load(&dir, &testing::base(), false).unwrap();
    let left: Vec<&Lora> =
        set.loras.iter().enumerate().filter(|(number, _)| number % 5 > 0).map(|(_, lora)| lora).collect();
    assert_eq!(loaded.set.loras.len(), left.len());
    for (found, whole) in loaded.set.loras.iter().zip(left) {
        assert_eq!((found.layer, found.site, found.rank), (whole.layer, whole.site, 3));
        assert_eq!(delta(&loaded.set, &loaded.values, found), delta(&set, &values, whole));
    }
    // Trained further, the penalty is a mean over all modules, and the budget that of all.
    let allocation = loaded.set.allocation.as_ref().unwrap();
    assert_eq!((allocation.modules, allocation.budget, allocation.triplets.len()), (12, 24, 9));
    // Ranks that are taken away later stay in line with the first ones.
    peft::save(&again, &loaded.set, &loaded.values, None, &testing::base()).unwrap();
    let third = peft::load(&again, &testing::base(), false).unwrap();
    assert_eq!((third.values, &third.set.layout), (loaded.values, &loaded.set.layout));
    let lines = loaded.set.matched(&testing::base());
    assert!(lines[0].starts_with("attn.c_attn: layers 1-2 (rank 3)"), "{lines:?}");
    let text = peft::describe(&dir).unwrap().to_string();
    assert!(text.contains("ranks        0 to 3 of 5 are left"), "{text}");
}

#[test]
fn the_config_chooses_as_peft_does() {
    let (set, folder) = (resolve(spec("c_attn,c_fc")).unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    peft::save(&dir, &set, &values(&set), None, &testing::base()).unwrap();
    let original = config(&dir);
    let with = |changes: Value| {
        let mut changed = original.clone();
        changes.as_object().unwrap().iter().for_each(|(name, value)| changed[name.as_str()] = value.clone());
        fs::write(dir.join(peft::CONFIG_FILE), changed.to_string()).unwrap();
        peft::load(&dir, &testing::base(), false)
    };
    let all = json!([true, true, true, true, true]);
    for same in [
        json!({"target_modules": r".*(c_attn|c_fc)", "r": 8}),
        json!({"lora_dropout": 0.25, "tinit": 3, "tfinal": 4, "total_step": 20, "init_lora_weights": false}),
        json!({"rank_pattern": {"transformer.h.0.attn.c_attn.lora_E.default": all}}),
    ] {
        let loaded = with(same.clone()).unwrap();
        assert_eq!((loaded.set.loras, loaded.hints), (set.loras.clone(), vec![]), "{same}");
    }
    for (changes, says) in [
        (json!({"init_r": 4, "target_r": 2}), "lora_A has shape [5, 6] where [4, 6] is expected"),
        (json!({"init_r": null}), "init_r is null"),
        (json!({"target_modules": ["c_attn"]}), "c_fc.lora_A is not expected"),
        (json!({"target_r": 6}), "target_r: 6 is no rank from 1 to init_r"),
        (json!({"bias": "all"}), "bias is \"all\" where none is supported"),
        (json!({"use_rslora": true}), "use_rslora is true"),
        (json!({"alpha_pattern": {"c_fc": 3}}), "alpha_pattern"),
        (json!({"tinit": -1}), "tinit is -1 where a number of steps is expected"),
        (json!({"rank_pattern": {"transformer.h.0.attn.c_attn.lora_E": [true]}}), "5 times true or false"),
        (
            json!({"rank_pattern": {"transformer.h.9.attn.c_attn.lora_E": all}}),
            "path of a module that is adapted",
        ),
        (
            json!({"rank_pattern": {"transformer.h.0.attn.c_attn.lora_E": [true, false, false, true, true]}}),
            "c_attn.lora_A has shape [5, 6] where [3, 6] is expected",
        ),
    ] {
        let error = with(changes).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn what_cannot_be_is_refused() {
    for (wrong, says) in [
        (spec("q"), "targets: `q` is a part of attn.c_attn, and adalora attaches to whole modules"),
        (spec("c_fk"), "targets: `c_fk` matches no module"),
        (AdaLoraSpec { init_r: 0, ..spec("c_fc") }, "init_r: the rank is 0"),
        (AdaLoraSpec { target_r: 0, ..spec("c_fc") }, "target_r: 0 is no rank"),
        (AdaLoraSpec { target_r: 6, ..spec("c_fc") }, "target_r: 6 is no rank from 1 to init_r"),
        (AdaLoraSpec { alpha: f64::NAN, ..spec("c_fc") }, "alpha: NaN is not finite"),
        (AdaLoraSpec { dropout: 1.0, ..spec("c_fc") }, "dropout: 1 is not in [0, 1)"),
        (AdaLoraSpec { delta_t: 0, ..spec("c_fc") }, "delta_t: 0 is no number of steps"),
        (AdaLoraSpec { beta1: 1.0, ..spec("c_fc") }, "beta1: 1 is not between 0 and 1"),
        (AdaLoraSpec { beta2: 0.0, ..spec("c_fc") }, "beta2: 0 is not between 0 and 1"),
        (AdaLoraSpec { orth_reg_weight: -1.0, ..spec("c_fc") }, "orth_reg_weight: -1 is no number from 0"),
        (
            AdaLoraSpec { tinit: 6, tfinal: 4, total_step: 10, ..spec("c_fc") },
            "tinit: 6 and tfinal 4 of 10 steps leave no step",
        ),
        (AdaLoraSpec { layers: Some(vec![3]), ..spec("c_fc") }, "layers: 3 does not exist"),
    ] {
        let error = resolve(wrong).unwrap_err();
        assert!(error.is_input() && error.to_string().starts_with(says), "{error}");
    }
    // The number of steps is known late.
    let mut late = AdapterSpec::from(AdaLoraSpec { tinit: 6, tfinal: 4, ..spec("c_fc") });
    AdapterSet::new(&late, &testing::base()).unwrap();
    late.set_steps(10);
    assert!(matches!(
        AdapterSet::new(&late, &testing::base()),
        Err(Error::Allocation { option: "tinit", .. })
    ));
    late.set_steps(11);
    assert_eq!(AdapterSet::new(&late, &testing::base()).unwrap().allocation.unwrap().steps, 11);
}

#[test]
fn beside_other_methods_it_has_a_folder() {
    let base = testing::base();
    let (lora, prefix) = (Some(LoraSpec::default()), Some(PrefixSpec { length: 3, projection: None }));
    let all = AdapterSpec { lora, adalora: Some(spec("c_attn,c_fc")), prefix, ..AdapterSpec::default() };
    let (set, folder) = (AdapterSet::new(&all, &base).unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    let values = values(&set);
    peft::save(&dir, &set, &values, None, &base).unwrap();
    assert!(dir.join("adalora").is_dir() && dir.join("lora").is_dir());
    let loaded = peft::load(&dir, &base, false).unwrap();
    assert_eq!((loaded.values, loaded.set.layout), (values, set.layout));
    assert_eq!(loaded.set.allocation.map(|it| it.triplets), set.allocation.map(|it| it.triplets));
}

#[test]
fn the_spec_is_read_and_written_as_json() {
    let spec: AdaLoraSpec = serde_json::from_str(r#"{"init_r": 9, "deltaT": 4}"#).unwrap();
    assert_eq!(spec, AdaLoraSpec { init_r: 9, delta_t: 4, ..AdaLoraSpec::default() });
    let spec = AdaLoraSpec { ranks: BTreeMap::from([("h.0.c_fc".to_owned(), 2)]), ..spec };
    assert_eq!(serde_json::from_str::<AdaLoraSpec>(&serde_json::to_string(&spec).unwrap()).unwrap(), spec);
    assert!(serde_json::from_str::<AdaLoraSpec>(r#"{"rank": 1}"#).is_err());
}
