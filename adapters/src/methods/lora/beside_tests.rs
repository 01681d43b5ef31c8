//! Tests of biases and norms beside deltas, of the groups of LoRA+ and LoRA-FA, and of what their files may say.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::*;
use crate::{BaseWeights, Result, peft, testing};

/// Biases of 1 + site + 10 layer; gains of 2 + layer and biases of 0.5, of the last norm 9 and 0.5.
struct Counted;

impl BaseWeights for Counted {
    fn matrix(&self, _: usize, _: usize) -> Option<Vec<f32>> {
        None
    }

    fn column_norms(&self, _: usize, _: usize) -> Option<Vec<f32>> {
        None
    }

    fn bias(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        Some(vec![(1 + site + 10 * layer) as f32; testing::base().sites.get(site)?.outputs])
    }

    fn norm(&self, layer: Option<usize>, _: usize) -> Option<NormWeights> {
        let gain = layer.map_or(9.0, |layer| 2.0 + layer as f32);
        Some(NormWeights { gain: vec![gain; testing::D], bias: vec![0.5; testing::D] })
    }

    fn token_embeddings(&self, _: &[u32]) -> Option<Vec<f32>> {
        None
    }
}

fn spec(bias: TrainedBiases, norms: Option<&str>) -> LoraSpec {
    let saved_norms = norms.map(|norms| norms.parse().unwrap());
    LoraSpec { rank: 2, bias, saved_norms, layers: Some(vec![0, 2]), ..LoraSpec::default() }
}

fn resolve(spec: &LoraSpec) -> Result<AdapterSet> {
    AdapterSet::new(&spec.clone().into(), &testing::base())
}

fn save(set: &AdapterSet, dir: &Path) -> Vec<f32> {
    let values = set.init_from(1, Some(&Counted)).unwrap();
    peft::save(dir, set, &values, None, &testing::base()).unwrap();
    values
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join(peft::CONFIG_FILE)).unwrap()).unwrap()
}

/// Names of the tensors that are no factors, without what all begin with.
fn beside(set: &AdapterSet) -> Vec<&str> {
    let names = set.layout.tensors.iter().map(|slot| slot.name.as_str());
    let short = names.filter(|name| !name.contains("lora_"));
    short.map(|name| name.strip_prefix("base_model.model.transformer.").unwrap()).collect()
}

#[test]
fn biases_are_those_of_adapted_modules_or_all() {
    let only = resolve(&spec(TrainedBiases::LoraOnly, None)).unwrap();
    assert_eq!(beside(&only), ["h.0.attn.c_attn.base_layer.bias", "h.2.attn.c_attn.base_layer.bias"]);
    assert!(only.vectors.iter().all(|own| own.u.is_none() && own.g.is_none()) && only.norms.is_empty());
    let all = resolve(&spec(TrainedBiases::All, None)).unwrap();
    let names = beside(&all);
    assert_eq!(names.len(), 3 * 4 + 3 * 2 + 1);
    assert_eq!(names[..3], ["h.0.attn.c_attn.base_layer.bias", "h.0.attn.c_proj.bias", "h.0.mlp.c_fc.bias"]);
    assert_eq!(names[4], "h.1.attn.c_attn.bias");
    assert_eq!(
        names[12..],
        [
            "h.0.ln_1.bias",
            "h.0.ln_2.bias",
            "h.1.ln_1.bias",
            "h.1.ln_2.bias",
            "h.2.ln_1.bias",
            "h.2.ln_2.bias",
            "ln_f.bias"
        ]
    );
    assert!(all.norms.iter().all(|norm| norm.gain.is_none() && norm.bias.is_some()));
    assert!(matches!(all.init(1), Err(Error::WeightsNeeded { method: "lora" })));
    let values = all.init_from(1, Some(&Counted)).unwrap();
    let of = |name: &str| {
        values[all.layout.slot(&format!("base_model.model.transformer.{name}")).unwrap().range()][5]
    };
    assert_eq!(
        (of("h.1.mlp.c_fc.bias"), of("h.2.attn.c_attn.base_layer.bias"), of("ln_f.bias")),
        (13.0, 21.0, 0.5)
    );
}

#[test]
fn norms_start_from_the_base_and_nothing_beside_decays() {
    let set = resolve(&spec(TrainedBiases::LoraOnly, Some("ln_2,ln_f"))).unwrap();
    assert_eq!(beside(&set)[2..5], ["h.0.ln_2.weight", "h.0.ln_2.bias", "h.1.ln_2.weight"]);
    let values = set.init_from(1, Some(&Counted)).unwrap();
    for slot in &set.layout.tensors {
        let group = set.layout.groups[slot.group];
        let is_factor = slot.name.contains("lora_");
        assert_eq!(group.weight_decay, if is_factor { None } else { Some(0.0) }, "{}", slot.name);
        if slot.name.ends_with("ln_f.weight") {
            assert_eq!(values[slot.range()], [9.0; testing::D]);
        }
    }
    let lines = set.matched(&testing::base());
    assert_eq!(lines[1..], ["biases of these modules", "ln_2: layers 0-2", "ln_f"]);
    assert!(matches!(resolve(&spec(TrainedBiases::All, Some("ln_f"))), Err(Error::NormsTwice)));
    let error = resolve(&spec(TrainedBiases::None, Some("ln_3"))).unwrap_err().to_string();
    assert!(error.starts_with("saved_norms: `ln_3` matches no layer norm"), "{error}");
}

#[test]
fn b_and_vectors_learn_faster_and_a_may_be_frozen() {
    let plain = spec(TrainedBiases::LoraOnly, Some("ln_f"));
    let set = resolve(&LoraSpec { lora_plus_ratio: 4.0, freeze_a: true, ..plain.clone() }).unwrap();
    for slot in &set.layout.tensors {
        let group = set.layout.groups[slot.group];
        let (factor, trainable) = if slot.name.contains("lora_A") { (1.0, false) } else { (4.0, true) };
        assert_eq!((group.lr_factor, group.trainable), (factor, trainable), "{}", slot.name);
    }
    // Neither changes the tensors or the files.
    let without = resolve(&plain).unwrap();
    assert_eq!(set.layout.len, without.layout.len);
    let folder = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
    save(&set, &one);
    save(&without, &two);
    for name in [peft::CONFIG_FILE, peft::TENSOR_FILE] {
        assert_eq!(fs::read(one.join(name)).unwrap(), fs::read(two.join(name)).unwrap(), "{name}");
    }
    let parts = LoraSpec { targets: "q,v".parse().unwrap(), ..plain };
    save(&resolve(&LoraSpec { lora_plus_ratio: 4.0, freeze_a: true, ..parts.clone() }).unwrap(), &one);
    save(&resolve(&parts).unwrap(), &two);
    assert_eq!(
        fs::read(one.join(peft::TENSOR_FILE)).unwrap(),
        fs::read(two.join(peft::TENSOR_FILE)).unwrap()
    );
    for ratio in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let wrong = LoraSpec { lora_plus_ratio: ratio, ..LoraSpec::default() };
        assert!(matches!(resolve(&wrong), Err(Error::LoraPlusRatio { .. })), "{ratio}");
    }
    // A LoRA without these options is described as it always was.
    let text = serde_json::to_string(&LoraSpec::default()).unwrap();
    assert!(!["bias", "norms", "plus", "freeze"].iter().any(|name| text.contains(name)), "{text}");
}

#[test]
fn a_folder_is_read_as_it_was_written() {
    let base = testing::base();
    for (bias, norms, saved) in [
        (TrainedBiases::LoraOnly, None, Value::Null),
        (TrainedBiases::All, None, Value::Null),
        (TrainedBiases::None, Some("ln_f,ln_1"), json!(["ln_f", "ln_1"])),
        (TrainedBiases::LoraOnly, Some("/.*h.1.ln_2/"), json!(["transformer.h.1.ln_2"])),
        (TrainedBiases::None, Some("h.1.ln_2"), json!(["h.1.ln_2"])),
    ] {
        for targets in ["c_attn", "q,v"] {
            let spec = LoraSpec { targets: targets.parse().unwrap(), ..spec(bias, norms) };
            let (set, folder) = (resolve(&spec).unwrap(), tempfile::tempdir().unwrap());
            let dir = folder.path().join("adapter");
            let values = save(&set, &dir);
            assert_eq!((&config(&dir)["modules_to_save"], &config(&dir)["bias"]), (&saved, &json!(bias)));
            let loaded = peft::load(&dir, &base, false).unwrap();
            assert_eq!((loaded.values, loaded.hints), (values, vec![]), "{bias} {norms:?}");
            assert_eq!((loaded.set.layout, loaded.set.norms), (set.layout, set.norms));
            assert_eq!((loaded.set.loras, loaded.set.vectors), (set.loras, set.vectors));
        }
    }
}

#[test]
fn modules_to_save_are_found_as_peft_finds_them() {
    let set = resolve(&spec(TrainedBiases::None, Some("ln_1,ln_f"))).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("adapter");
    save(&set, &dir);
    let with = |name: &str, value: Value| {
        let mut changed = config(&dir);
        changed[name] = value;
        fs::write(dir.join(peft::CONFIG_FILE), changed.to_string()).unwrap();
        peft::load(&dir, &testing::base(), false)
    };
    // Any end of a path, also within a name.
    for same in [json!(["n_1", "ln_f"]), json!(["ln_1", "transformer.ln_f"]), json!(["ln_f", "ln_1", "ln_1"])]
    {
        assert_eq!(with("modules_to_save", same.clone()).unwrap().set.norms, set.norms, "{same}");
    }
    for (wrong, named) in [
        (json!(["ln_1", "ln_f", "wte"]), r#"modules_to_save is "wte" where layer norms alone are supported"#),
        (json!(["lm_head"]), r#"modules_to_save is "lm_head""#),
        (json!(["c_fc", "ln_1"]), r#"modules_to_save is "c_fc""#),
        (json!(["ln_1"]), "ln_f.weight is not expected"),
        (json!(["ln_1", "ln_2", "ln_f"]), "h.0.ln_2.weight is missing"),
        (json!(null), "h.0.ln_1.weight is not expected"),
        (json!(7), "modules_to_save is 7"),
    ] {
        let error = with("modules_to_save", wrong).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
    with("modules_to_save", json!(["ln_1", "ln_f"])).unwrap();
    let error = with("bias", json!("all")).unwrap_err().to_string();
    assert!(error.contains("biases of norms are trained by bias all already"), "{error}");
    let error = with("bias", json!("lora_only")).unwrap_err().to_string();
    assert!(error.contains("h.0.attn.c_attn.base_layer.bias is missing"), "{error}");
}

#[test]
fn names_of_biases_are_read_and_shown() {
    for (bias, name) in
        [(TrainedBiases::None, "none"), (TrainedBiases::LoraOnly, "lora_only"), (TrainedBiases::All, "all")]
    {
        assert_eq!((name.parse(), bias.to_string()), (Ok(bias), name.to_owned()));
        assert_eq!(json!(bias), json!(name));
    }
    assert_eq!("some".parse::<TrainedBiases>().unwrap_err(), "give none, lora_only or all");
}
