//! Tests of PEFT folders: round trips, what the config says, every refusal, replacement.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{CONFIG_FILE, TENSOR_FILE, describe, load, save};
use engraft_util::rng;

use crate::{
    AdapterSet, AdapterSpec, BaseDescription, Error, LoraSpec, PrefixSpec, Problem, Result,
    methods::lora::files::META_SPEC, testing,
};

/// An adapter whose every value is drawn, B included, in a fresh folder.
struct Saved {
    folder: TempDir,
    set: AdapterSet,
    values: Vec<f32>,
}

fn lora(targets: &str) -> LoraSpec {
    LoraSpec { rank: 2, alpha: 3.0, targets: targets.parse().unwrap(), ..LoraSpec::default() }
}

fn spec(lora: Option<LoraSpec>, prefix: Option<usize>) -> AdapterSpec {
    let prefix = prefix.map(|length| PrefixSpec { length, projection: None });
    AdapterSpec { lora, prefix, ..AdapterSpec::default() }
}

fn drawn(set: &AdapterSet, seed: u64) -> Vec<f32> {
    (0..set.layout.len as u64).map(|i| rng::normal(rng::key(&[seed]), i)).collect()
}

impl Saved {
    fn new(spec: &AdapterSpec) -> Self {
        let set = AdapterSet::new(spec, &testing::base()).unwrap();
        let saved = Self { folder: tempfile::tempdir().unwrap(), values: drawn(&set, 1), set };
        save(&saved.dir(), &saved.set, &saved.values, None, &testing::base()).unwrap();
        saved
    }

    fn lora(targets: &str) -> Self {
        Self::new(&spec(Some(lora(targets)), None))
    }

    fn dir(&self) -> std::path::PathBuf {
        self.folder.path().join("adapter")
    }

    fn config(&self) -> Value {
        serde_json::from_slice(&fs::read(self.dir().join(CONFIG_FILE)).unwrap()).unwrap()
    }

    /// Changes fields of the config and reads the folder again.
    fn with(&self, fields: Value) -> Result<super::Loaded> {
        let mut config = self.config();
        config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        fs::write(self.dir().join(CONFIG_FILE), config.to_string()).unwrap();
        load(&self.dir(), &testing::base(), false)
    }

    /// Changes the tensor file's bytes (header text may change, its length must not) and reads again.
    fn patched(&self, from: &str, to: &str) -> Result<super::Loaded> {
        assert_eq!(from.len(), to.len());
        let path = self.dir().join(TENSOR_FILE);
        let mut bytes = fs::read(&path).unwrap();
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        fs::write(&path, bytes).unwrap();
        load(&self.dir(), &testing::base(), false)
    }
}

fn problems(result: Result<super::Loaded>) -> Vec<Problem> {
    let error = result.unwrap_err();
    assert!(error.is_input());
    assert!(!error.problems().is_empty(), "{error}");
    error.problems().to_vec()
}

fn field(result: Result<super::Loaded>, expected: &str) {
    let problems = problems(result);
    let named = |problem: &Problem| matches!(problem, Problem::Field { name, .. } if name == expected);
    assert!(problems.iter().any(named), "{expected}: {problems:?}");
}

#[test]
fn every_kind_comes_back_bit_for_bit() {
    let mut patterns = LoraSpec { layers: Some(vec![0, 2]), rslora: true, ..lora("c_attn,c_proj") };
    patterns.rank_pattern = BTreeMap::from([("mlp.c_proj".to_owned(), 5)]);
    patterns.alpha_pattern = BTreeMap::from([(r"h\.2\..*".to_owned(), 0.5)]);
    let mut parts = LoraSpec { rslora: true, alpha: 16.0, ..lora("q,v") };
    parts.rank_pattern = BTreeMap::from([("h.1.attn.c_attn".to_owned(), 3)]);
    for spec in [
        spec(Some(lora("c_attn")), None),
        spec(Some(patterns), None),
        spec(Some(parts), None),
        spec(Some(lora("k")), Some(4)),
        spec(Some(lora("q,h.1.attn.c_attn.k,mlp.c_fc")), None),
        spec(Some(lora("/.*c_fc/")), None),
        spec(Some(lora("wte")), None),
        spec(Some(lora("c_fc,wte")), Some(3)),
        spec(Some(lora("q,mlp.c_proj,transformer.wte")), None),
        spec(Some(LoraSpec { layers: Some(vec![1]), ..lora("c_fc,wte") }), None),
        spec(Some(lora("/.*(wte|mlp.c_proj)/")), None),
        spec(None, Some(7)),
        spec(Some(lora("c_fc")), Some(7)),
    ] {
        let saved = Saved::new(&spec);
        let loaded = load(&saved.dir(), &testing::base(), false).unwrap();
        assert_eq!(loaded.values, saved.values, "{spec:?}");
        assert_eq!(loaded.set.loras, saved.set.loras, "{spec:?}");
        assert_eq!(loaded.set.layout, saved.set.layout);
        assert_eq!((loaded.set.prefix, loaded.hints.len()), (saved.set.prefix.clone(), 0));
    }
}

#[test]
fn the_config_has_peft_s_fields_in_order_and_its_formula_gives_our_scale() {
    let saved = Saved::lora("c_attn");
    let text = fs::read_to_string(saved.dir().join(CONFIG_FILE)).unwrap();
    let keys: Vec<&str> =
        text.lines().filter_map(|line| line.strip_prefix("  \"")?.split('"').next()).collect();
    assert!(keys.is_sorted() && keys.len() == 19, "{keys:?}");
    let config = saved.config();
    for (name, value) in [
        ("base_model_name_or_path", json!("tiny/base")),
        ("revision", json!("v1")),
        ("fan_in_fan_out", json!(true)),
        ("inference_mode", json!(true)),
        ("r", json!(2)),
        ("lora_alpha", json!(3)),
        ("target_modules", json!(["c_attn"])),
    ] {
        assert_eq!(config[name], value, "{name}");
    }
    let all = Saved::lora("all-linear").config();
    assert_eq!(all["target_modules"], json!(["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]));
    // A regular expression can match modules that are no sites, on which PEFT stops; and PEFT takes
    // layers only together with a list.
    let config = Saved::lora(r"/.*\.[12]\.mlp\..*/").config();
    assert_eq!(config["target_modules"], json!(["mlp.c_fc", "mlp.c_proj"]));
    assert_eq!(config["layers_to_transform"], json!([1, 2]));
    let regex = LoraSpec { layers: Some(vec![1]), ..lora("/.*c_(fc|attn)/") };
    let config = Saved::new(&spec(Some(regex), None)).config();
    assert_eq!(config["target_modules"], json!(["attn.c_attn", "mlp.c_fc"]));
    assert_eq!(config["layers_to_transform"], json!([1]));
}

#[test]
fn parts_are_written_as_one_lora_on_the_whole_module() {
    let saved = Saved::lora("q,v");
    let config = saved.config();
    assert_eq!((&config["r"], &config["lora_alpha"]), (&json!(4), &json!(6)));
    assert_eq!(config["target_modules"], json!(["attn.c_attn"]));
    let mut file = super::tensors::TensorFile::open(&saved.dir().join(TENSOR_FILE)).unwrap();
    let name = "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight";
    let b = file.read(name).unwrap().unwrap();
    assert_eq!(file.info(name).unwrap().shape, [18, 4]);
    let own = |lora: usize| &saved.values[saved.set.layout.tensors[saved.set.loras[lora].b].range()];
    // q: rows 0..6, columns 0..2; k: nothing; v: rows 12..18, columns 2..4.
    assert_eq!(b[..4], [own(0)[0], own(0)[1], 0.0, 0.0]);
    assert!(b[6 * 4..12 * 4].iter().all(|&x| x == 0.0));
    assert_eq!(b[17 * 4..], [0.0, 0.0, own(1)[10], own(1)[11]]);
    // A part that only one layer has: its rank is told by a pattern with the full path.
    let config = Saved::lora("q,h.1.attn.c_attn.k").config();
    assert_eq!(config["rank_pattern"], json!({"transformer.h.1.attn.c_attn": 4}));
    assert_eq!(config["alpha_pattern"], json!({"transformer.h.1.attn.c_attn": 6}));
}

/// The fused file means the same: base + s (B A)^T with the parts' deltas in their columns.
#[test]
fn a_fused_delta_is_the_sum_of_the_parts() {
    use candle_core::{Device, Tensor};
    let saved = Saved::new(&spec(Some(LoraSpec { rslora: true, ..lora("q,v") }), None));
    let module = &super::modules::modules(&saved.set, &LoraSpec::KIND, true, &testing::base())[0];
    let tensor = |values: &[f32], rows: usize| {
        Tensor::from_slice(values, (rows, values.len() / rows), &Device::Cpu).unwrap()
    };
    let a = tensor(&module.fuse_a(&saved.set, &saved.values), module.rank);
    let b = tensor(&module.fuse_b(&saved.set, &saved.values), module.outputs);
    let scale = module.alpha / (module.rank as f64).sqrt();
    let fused = crate::reference::merge_delta(&a, &b, scale).unwrap().to_vec2::<f32>().unwrap();
    for lora in &saved.set.loras[module.loras.clone()] {
        let slot =
            |slot: usize, rows: usize| tensor(&saved.values[saved.set.layout.tensors[slot].range()], rows);
        let (a, b) = (slot(lora.a, 2), slot(lora.b, 6));
        let part =
            crate::reference::merge_delta(&a, &b, lora.scale.into()).unwrap().to_vec2::<f32>().unwrap();
        for (whole, part) in fused.iter().zip(&part) {
            for (x, y) in whole[lora.columns.clone()].iter().zip(part) {
                assert!((x - y).abs() < 1e-5, "{x} {y}"); // F32 sums of 4 products of order 10
            }
        }
    }
    assert!(fused.iter().all(|row| row[6..12].iter().all(|&x| x == 0.0)));
}

#[test]
fn unsupported_features_are_refused_by_name() {
    for (name, value) in [
        ("use_qalora", json!(true)),
        ("lora_bias", json!(true)),
        ("modules_to_save", json!(["wte"])),
        ("bias", json!("some")),
        ("modules_to_save", json!(["c_fc"])),
        ("modules_to_save", json!(["ln_f", "lm_head"])),
        ("task_type", json!("SEQ_CLS")),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("exclude_modules", json!(3)),
        ("layer_replication", json!([[0, 1]])),
        ("a_field_of_the_future", json!({"on": true})),
        ("layers_pattern", json!("blocks")),
        ("r", json!(-1)),
        ("r", Value::Null),
        ("lora_alpha", json!("many")),
        ("target_modules", json!(3)),
    ] {
        field(Saved::lora("c_attn").with(json!({name: value})), name);
    }
    let found = problems(Saved::lora("c_attn").with(json!({"peft_type": "POLY", "use_dora": true})));
    assert!(found.contains(&Problem::UnsupportedType("POLY".to_owned())), "{found:?}");
}

#[test]
fn excluded_modules_are_left_out_as_peft_does() {
    let only = Saved::lora("c_attn");
    let all_but =
        |exclude: Value| only.with(json!({"target_modules": "all-linear", "exclude_modules": exclude}));
    let names: Vec<&str> =
        testing::base().sites.iter().map(|site| site.name.clone().leak() as &str).collect();
    let others: Vec<&&str> = names.iter().filter(|name| !name.ends_with("c_attn")).collect();
    let loaded = all_but(json!(others)).unwrap();
    assert_eq!((loaded.set.layout, loaded.values), (only.set.layout.clone(), only.values.clone()));
    let loaded = all_but(json!(r".*\.(mlp|c_proj|attn\.c_proj).*")).unwrap();
    assert_eq!(loaded.values, only.values);
    assert!(all_but(json!(["c_attn"])).is_err());
    assert!(all_but(json!("(")).is_err());
}

#[test]
fn what_peft_itself_writes_beside_is_accepted() {
    let saved = Saved::lora("c_attn");
    saved.with(json!({
        "alora_invocation_tokens": null, "eva_config": null, "loftq_config": {}, "lora_bias": false,
        "megatron_core": "megatron.core", "peft_version": "0.21.2", "qalora_group_size": 16, "use_dora": false,
        "layers_pattern": "h", "layers_to_transform": [], "init_lora_weights": "gaussian", "runtime_config": {},
    })).unwrap();
    // The smallest config, and a name that matches nothing next to one that does.
    fs::write(
        saved.dir().join(CONFIG_FILE),
        r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["c_attn", "q_proj", "q"]}"#,
    )
    .unwrap();
    let loaded = load(&saved.dir(), &testing::base(), false).unwrap();
    assert_eq!(loaded.set.loras, saved.set.loras);
    assert!(loaded.hints[0].contains("q, q_proj"), "{:?}", loaded.hints);
}

#[test]
fn every_mismatch_is_in_one_error() {
    let saved = Saved::lora("c_attn");
    let found =
        problems(saved.with(json!({"target_modules": ["c_attn", "c_fc"], "r": 3, "use_qalora": true})));
    let count = |is: fn(&Problem) -> bool| found.iter().filter(|problem| is(problem)).count();
    assert_eq!(count(|problem| matches!(problem, Problem::Missing(_))), 6);
    assert_eq!(count(|problem| matches!(problem, Problem::Shape { .. })), 6);
    assert_eq!(count(|problem| matches!(problem, Problem::Field { .. })), 1);
    let found = problems(Saved::lora("c_attn,c_fc").with(json!({"target_modules": ["c_attn"]})));
    assert_eq!(found.len(), 6);
    assert!(found.iter().all(|problem| matches!(problem, Problem::Extra(name) if name.contains("c_fc"))));
}

#[test]
fn a_spec_that_cannot_be_is_refused() {
    for fields in [
        json!({"target_modules": ["nothing"]}),
        json!({"target_modules": "("}),
        json!({"layers_to_transform": [7]}),
        json!({"r": 0}),
        json!({"lora_dropout": 1.5}),
        json!({"rank_pattern": {"c_attn": 0}}),
    ] {
        let found = problems(Saved::lora("c_attn").with(fields.clone()));
        assert!(found.iter().any(|problem| matches!(problem, Problem::Spec(_))), "{fields}: {found:?}");
    }
}

#[test]
fn values_and_types_are_checked() {
    let saved = Saved::lora("c_attn");
    let path = saved.dir().join(TENSOR_FILE);
    let mut bytes = fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let found = problems(load(&saved.dir(), &testing::base(), false));
    assert!(
        matches!(&found[..], [Problem::NotFinite { index: 35, tensor }] if tensor.contains("h.2")),
        "{found:?}"
    );
    let found = problems(Saved::lora("c_attn").patched(r#""F32""#, r#""I32""#));
    assert!(matches!(&found[..], [Problem::Dtype { found, .. }] if found == "I32"), "{found:?}");
}

#[test]
fn fused_blocks_must_stay_zero_and_agree_with_the_config() {
    let saved = Saved::lora("q,v");
    let path = saved.dir().join(TENSOR_FILE);
    let mut bytes = fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end - 16..end - 12].copy_from_slice(&1f32.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let found = problems(load(&saved.dir(), &testing::base(), false));
    assert!(matches!(&found[..], [Problem::OutsideBlock { index: 68, .. }]), "{found:?}");
    field(Saved::lora("q,v").with(json!({"lora_alpha": 5})), CONFIG_FILE);
    field(Saved::lora("q,v").patched(r#"{\"rank\""#, r#"{\"rnak\""#), META_SPEC);
}

#[test]
fn another_base_is_refused_unless_allowed() {
    let saved = Saved::lora("c_attn");
    let other = BaseDescription { fingerprint: Some("beef".to_owned()), ..testing::base() };
    let found = problems(load(&saved.dir(), &other, false));
    assert_eq!(found, [Problem::Base { found: "f00d".to_owned(), expected: "beef".to_owned() }]);
    let loaded = load(&saved.dir(), &other, true).unwrap();
    assert!(loaded.hints[0].contains("f00d") && loaded.hints[0].contains("beef"));
    let unknown = BaseDescription { fingerprint: None, ..testing::base() };
    assert!(load(&saved.dir(), &unknown, false).unwrap().hints[0].contains("base carries no"));
}

#[test]
fn another_depth_is_said_in_one_sentence() {
    let saved = Saved::lora("c_attn");
    for layers in [2, 4] {
        let found = problems(load(&saved.dir(), &BaseDescription { layers, ..testing::base() }, false));
        assert!(found.contains(&Problem::Layers { found: 3, expected: layers }), "{found:?}");
    }
    let saved = Saved::new(&spec(None, Some(4)));
    let found = problems(saved.with(json!({"num_layers": 5, "num_attention_heads": 7, "token_dim": 9})));
    assert_eq!(found.len(), 3);
    field(
        Saved::new(&spec(None, Some(4))).with(json!({"num_transformer_submodules": 2})),
        "num_transformer_submodules",
    );
    let found = problems(Saved::new(&spec(None, Some(4))).with(json!({"num_virtual_tokens": 32})));
    assert!(found.iter().any(|problem| matches!(problem, Problem::Spec(text) if text.contains("32"))));
}

#[test]
fn a_projected_prefix_is_stored_as_what_it_made() {
    let spec = AdapterSpec::from(PrefixSpec { length: 3, projection: Some(5) });
    let set = AdapterSet::new(&spec, &testing::base()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (values, projected) = (set.init(1).unwrap(), vec![0.25; 3 * 36]);
    let missing = save(folder.path(), &set, &values, None, &testing::base()).unwrap_err();
    assert!(matches!(missing, Error::ValueCount { found: 0, expected: 108, .. }));
    save(folder.path(), &set, &values, Some(&projected), &testing::base()).unwrap();
    let loaded = load(folder.path(), &testing::base(), false).unwrap();
    assert_eq!(loaded.values, projected);
    assert_eq!(loaded.set.spec.prefix, Some(PrefixSpec { length: 3, projection: None }));
    assert!(loaded.hints[0].contains("projection"));
}

#[test]
fn a_save_replaces_whatever_adapter_was_there() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("run/adapter");
    let specs = [
        spec(Some(lora("c_attn")), None),
        spec(Some(lora("c_attn")), None),
        spec(Some(lora("q")), Some(4)),
        spec(None, Some(4)),
    ];
    for (seed, spec) in specs.iter().enumerate() {
        let set = AdapterSet::new(spec, &testing::base()).unwrap();
        let values = drawn(&set, seed as u64);
        save(&dir, &set, &values, None, &testing::base()).unwrap();
        assert_eq!(load(&dir, &testing::base(), false).unwrap().values, values);
        fs::write(dir.join("README.md"), "kept").unwrap();
    }
    assert_eq!(entries(&dir), ["README.md", CONFIG_FILE, TENSOR_FILE]);
    assert_eq!(entries(&folder.path().join("run")), ["adapter"]);
}

fn entries(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn values_that_are_not_finite_never_reach_a_file() {
    let saved = Saved::lora("c_attn");
    let mut values = saved.values.clone();
    values[13] = f32::INFINITY;
    let error = save(&saved.dir(), &saved.set, &values, None, &testing::base()).unwrap_err();
    assert!(matches!(error, Error::NotFinite { index: 1, .. }) && !error.is_input(), "{error}");
    let short = save(&saved.dir(), &saved.set, &values[1..], None, &testing::base()).unwrap_err();
    assert!(matches!(short, Error::ValueCount { .. }) && !short.is_input());
    assert_eq!(load(&saved.dir(), &testing::base(), false).unwrap().values, saved.values);
}

#[test]
fn folders_without_a_readable_adapter_say_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let read = || load(folder.path(), &testing::base(), false).unwrap_err();
    assert!(matches!(load(&folder.path().join("none"), &testing::base(), false), Err(Error::Read { .. })));
    assert!(matches!(read(), Error::NotAnAdapter { .. }));
    let config = folder.path().join(CONFIG_FILE);
    fs::write(&config, "{} junk").unwrap();
    assert!(matches!(read(), Error::Json { .. }));
    for text in ["[]", "{\"r\": NaN}", ""] {
        fs::write(&config, text).unwrap();
        assert!(matches!(read(), Error::Json { .. }), "{text}");
    }
    fs::write(&config, "{}").unwrap();
    assert!(matches!(read(), Error::Read { .. }));
    fs::write(folder.path().join("adapter_model.bin"), "pickle").unwrap();
    assert!(read().to_string().contains("adapter_model.bin: cannot be read as a PyTorch"), "{}", read());
    fs::remove_file(folder.path().join("adapter_model.bin")).unwrap();
    fs::create_dir(folder.path().join("lora")).unwrap();
    fs::copy(&config, folder.path().join("lora").join(CONFIG_FILE)).unwrap();
    assert!(read().to_string().contains("and also lora/"));
}

#[test]
fn a_lora_and_a_prefix_in_each_other_s_folder_are_refused() {
    let saved = Saved::new(&spec(Some(lora("c_attn")), Some(3)));
    let at = |name: &str| saved.dir().join(name);
    fs::rename(at("lora"), at("x")).unwrap();
    fs::rename(at("prefix"), at("lora")).unwrap();
    fs::rename(at("x"), at("prefix")).unwrap();
    field(load(&saved.dir(), &testing::base(), false), "lora/ peft_type");
}

#[test]
fn a_description_tells_parts_and_what_is_not_supported() {
    let saved = Saved::lora("q,v");
    assert!(saved.with(json!({"use_qalora": true})).is_err());
    let described = &describe(&saved.dir()).unwrap().adapters[0];
    assert_eq!(described.spec.lora.as_ref().unwrap().targets.to_string(), "q,v");
    assert_eq!((described.ranks.as_slice(), described.fingerprint.as_deref()), (&[4][..], Some("f00d")));
    assert!(described.unsupported[0].contains("use_qalora"));
}

/// Of a module that is in no layer PEFT wants the whole path where the config names layers.
#[test]
fn the_embedding_of_tokens_is_chosen_as_peft_does() {
    let saved = Saved::new(&spec(Some(LoraSpec { layers: Some(vec![1]), ..lora("c_fc,wte") }), None));
    let config = saved.config();
    assert_eq!(config["target_modules"], json!(["c_fc", "transformer.wte"]));
    let problems = problems(saved.with(json!({ "target_modules": ["c_fc", "wte"] })));
    let extra = "base_model.model.transformer.wte.lora_embedding_A";
    assert!(problems.contains(&Problem::Extra(extra.to_owned())), "{problems:?}");

    let saved = Saved::lora("q,wte");
    let config = saved.config();
    assert_eq!((&config["r"], &config["rank_pattern"]), (&json!(2), &json!({})));
    let saved = Saved::lora("q,v,wte");
    let config = saved.config();
    assert_eq!((&config["r"], &config["rank_pattern"]), (&json!(4), &json!({ "transformer.wte": 2 })));
    assert_eq!(config["alpha_pattern"], json!({ "transformer.wte": 3 }));
    assert_eq!(config["target_modules"], json!(["attn.c_attn", "transformer.wte"]));
    assert_eq!(describe(&saved.dir()).unwrap().adapters[0].ranks, [2, 4]);
    let changed = saved.with(json!({ "rank_pattern": { "transformer.wte": 3 } }));
    field(changed, CONFIG_FILE);
    // One that PEFT excludes is not there.
    let saved = Saved::lora("c_fc,wte");
    let loaded = saved.with(json!({ "exclude_modules": ["mlp.c_fc"] }));
    assert!(loaded.is_err());
    let excluded = saved.with(json!({ "exclude_modules": ["wte"] }));
    assert!(excluded.is_err());
}
