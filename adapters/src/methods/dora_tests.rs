//! Tests of DoRA: its tensors and initial values, its files beside a LoRA's, and what is refused.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::{
    AdapterSet, AdapterSpec, BaseWeights, DoraSpec, Error, LnTuningSpec, LoraSpec, NormWeights, PrefixSpec,
    Result, peft, testing,
};

/// Weights whose element i is i + site + layer.
struct Counted;

impl BaseWeights for Counted {
    fn matrix(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        let site_ = testing::base().sites.get(site)?.clone();
        Some((0..site_.inputs * site_.outputs).map(|i| (i + site + layer) as f32).collect())
    }

    fn column_norms(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        Some(testing::column_norms(&self.matrix(site, layer)?, testing::base().sites.get(site)?.outputs))
    }

    fn bias(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        Some(vec![0.25 + (site + 10 * layer) as f32; testing::base().sites.get(site)?.outputs])
    }

    fn norm(&self, _: Option<usize>, _: usize) -> Option<NormWeights> {
        Some(NormWeights { gain: vec![2.0; testing::D], bias: vec![0.5; testing::D] })
    }

    fn token_embeddings(&self, _: &[u32]) -> Option<Vec<f32>> {
        None
    }
}

fn spec(targets: &str) -> DoraSpec {
    DoraSpec { lora: LoraSpec { rank: 3, targets: targets.parse().unwrap(), ..LoraSpec::default() } }
}

fn resolve(spec: &DoraSpec) -> Result<AdapterSet> {
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

#[test]
fn a_module_has_one_magnitude_also_where_parts_of_it_are_adapted() {
    let whole = resolve(&spec("c_attn,mlp.c_proj")).unwrap();
    let places: Vec<_> = whole.vectors.iter().map(|own| (own.layer, own.site)).collect();
    assert_eq!(places, [(0, 0), (0, 3), (1, 0), (1, 3), (2, 0), (2, 3)]);
    let parts = resolve(&spec("q,v")).unwrap();
    assert_eq!((parts.loras.len(), parts.vectors.len()), (6, 3));
    for own in &parts.vectors {
        let g = own.g.unwrap();
        let slot = &parts.layout.tensors[g.vector];
        assert!(g.over_norms && !g.with_bias && own.u.is_none() && own.bias.is_none());
        assert_eq!(slot.shape, [18]);
        let name = format!("base_model.model.transformer.h.{}.attn.c_attn.lora_magnitude_vector", own.layer);
        assert_eq!(slot.name, name);
    }
}

#[test]
fn it_starts_as_a_lora_with_the_norms_of_the_base() {
    let set = resolve(&spec("c_attn,c_fc")).unwrap();
    assert!(matches!(set.init(1), Err(Error::WeightsNeeded { method: "dora" })));
    let values = set.init_from(1, Some(&Counted)).unwrap();
    let lora = AdapterSet::new(&spec("c_attn,c_fc").lora.into(), &testing::base()).unwrap();
    let plain = lora.init(1).unwrap();
    for slot in &lora.layout.tensors {
        assert_eq!(values[set.layout.slot(&slot.name).unwrap().range()], plain[slot.range()]);
    }
    // Column 5 of c_fc of layer 2: elements 5 + 2 + 2 + 24 row.
    let slot = set.layout.slot("base_model.model.transformer.h.2.mlp.c_fc.lora_magnitude_vector").unwrap();
    let norm = (0..6).map(|row| ((9 + 24 * row) as f64).powi(2)).sum::<f64>().sqrt();
    assert!((f64::from(values[slot.range()][5]) / norm - 1.0).abs() < 1e-6);
}

#[test]
fn a_folder_is_read_as_it_was_written() {
    let base = testing::base();
    for targets in ["c_attn", "all-linear", "q,v", "k,mlp.c_proj"] {
        let (set, folder) = (resolve(&spec(targets)).unwrap(), tempfile::tempdir().unwrap());
        let dir = folder.path().join("adapter");
        let values = save(&set, &dir);
        assert_eq!((&config(&dir)["use_dora"], &config(&dir)["peft_type"]), (&json!(true), &json!("LORA")));
        let loaded = peft::load(&dir, &base, false).unwrap();
        assert_eq!((loaded.values, loaded.hints), (values, vec![]), "{targets}");
        assert_eq!((loaded.set.loras, loaded.set.vectors), (set.loras, set.vectors));
        assert_eq!((loaded.set.layout, loaded.set.spec.lora), (set.layout, None));
        let text = peft::describe(&dir).unwrap().to_string();
        assert!(
            text.contains("kind         dora, rank 3, alpha 16")
                && text.contains("lora_magnitude_vector F32")
        );
    }
}

#[test]
fn the_config_tells_a_dora_from_a_lora() {
    let (set, folder) = (resolve(&spec("c_attn")).unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    save(&set, &dir);
    let with = |name: &str, value: Value| {
        let mut changed = config(&dir);
        changed[name] = value;
        fs::write(dir.join(peft::CONFIG_FILE), changed.to_string()).unwrap();
        peft::load(&dir, &testing::base(), false)
    };
    // PEFT passes over the magnitudes of a LoRA without DoRA; this is no other adapter that happens to fit.
    let error = with("use_dora", json!(false)).unwrap_err().to_string();
    assert!(error.contains("lora_magnitude_vector is not expected"), "{error}");
    let error = with("use_dora", json!("yes")).unwrap_err().to_string();
    assert!(error.contains("use_dora is \"yes\""), "{error}");
    let error = with("lora_bias", json!(true)).unwrap_err().to_string();
    assert!(error.contains("lora_bias is true"), "{error}");
    with("use_dora", json!(true)).unwrap_err();
    with("lora_bias", json!(false)).unwrap();
    // What PEFT drops in training does not change a finished adapter.
    let loaded = with("lora_dropout", json!(0.05)).unwrap();
    assert_eq!(loaded.set.spec.dora.unwrap().lora.dropout, 0.0);
    assert_eq!(loaded.hints, ["the config's lora_dropout 0.05 is left out: dora is trained without dropout"]);
    with("lora_dropout", json!(0.0)).unwrap();
    // And a LoRA without magnitudes is no DoRA.
    let plain = folder.path().join("lora");
    let lora = AdapterSet::new(&LoraSpec::default().into(), &testing::base()).unwrap();
    peft::save(&plain, &lora, &lora.init(1).unwrap(), None, &testing::base()).unwrap();
    let text = fs::read_to_string(plain.join(peft::CONFIG_FILE)).unwrap();
    assert!(!text.contains("dora"), "a LoRA's config is as it was");
    fs::write(plain.join(peft::CONFIG_FILE), text.replacen('{', "{\"use_dora\": true,", 1)).unwrap();
    let error = peft::load(&plain, &testing::base(), false).unwrap_err().to_string();
    assert!(error.contains("h.0.attn.c_attn.lora_magnitude_vector is missing"), "{error}");
}

#[test]
fn beside_others_it_has_a_folder_but_not_beside_a_lora() {
    let base = testing::base();
    let (dora, prefix) = (Some(spec("c_attn")), Some(PrefixSpec { length: 3, projection: None }));
    let all = AdapterSpec {
        dora: dora.clone(),
        ln_tuning: Some(LnTuningSpec::default()),
        prefix,
        ..AdapterSpec::default()
    };
    let (set, folder) = (AdapterSet::new(&all, &base).unwrap(), tempfile::tempdir().unwrap());
    let dir = folder.path().join("adapter");
    let values = save(&set, &dir);
    let loaded = peft::load(&dir, &base, false).unwrap();
    assert_eq!((loaded.values, loaded.set.layout), (values, set.layout));
    // The folder of a LoRA holds no DoRA.
    fs::rename(dir.join("dora"), dir.join("lora")).unwrap();
    let error = peft::load(&dir, &base, false).unwrap_err().to_string();
    assert!(error.contains("the kind in lora/ is dora where lora is expected"), "{error}");

    let both = AdapterSpec { lora: Some(LoraSpec::default()), dora, ..AdapterSpec::default() };
    let error = AdapterSet::new(&both, &base).unwrap_err();
    assert_eq!(
        error.to_string(),
        "method: lora and dora are both LORA in PEFT, which names their tensors alike; choose one of them"
    );
    assert!(error.is_input());
}

#[test]
fn what_it_cannot_do_is_refused() {
    let dropping = DoraSpec { lora: LoraSpec { dropout: 0.1, ..LoraSpec::default() } };
    let error = resolve(&dropping).unwrap_err();
    assert!(error.is_input() && error.to_string().starts_with("dropout: 0.1 is not supported with dora"));
    // The rules of a LoRA are its own.
    let nowhere = spec("c_nothing");
    assert!(matches!(resolve(&nowhere), Err(Error::NothingMatched { .. })));
    let spec: DoraSpec = serde_json::from_str(r#"{"rank": 4}"#).unwrap();
    assert_eq!(spec.lora, LoraSpec { rank: 4, ..LoraSpec::default() });
    assert!(serde_json::from_str::<DoraSpec>(r#"{"norms": "ln_1"}"#).is_err());
}
