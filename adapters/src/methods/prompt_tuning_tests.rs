//! Tests of prompt tuning: its tensor, its initial values, PEFT's config of it and of P-tuning, and what is refused.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::{
    AdapterSet, AdapterSpec, BaseDescription, Error, LnTuningSpec, LoraSpec, PrefixSpec, PromptTuningSpec,
    peft, testing,
};

/// A prompt of 5 virtual tokens.
fn spec() -> AdapterSpec {
    PromptTuningSpec { length: 5 }.into()
}

/// A set, and the folder of its files.
fn saved() -> (AdapterSet, Vec<f32>, tempfile::TempDir) {
    let set = AdapterSet::new(&spec(), &testing::base()).unwrap();
    let (values, folder) = (set.init(3).unwrap(), tempfile::tempdir().unwrap());
    peft::save(&folder.path().join("adapter"), &set, &values, None, &testing::base()).unwrap();
    (set, values, folder)
}

fn config(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join(peft::CONFIG_FILE)).unwrap()).unwrap()
}

#[test]
fn it_has_a_row_for_each_virtual_token() {
    let base = testing::base();
    let set = AdapterSet::new(&spec(), &base).unwrap();
    let [slot] = &set.layout.tensors[..] else { panic!("{:?}", set.layout) };
    assert_eq!((slot.name.as_str(), &slot.shape[..]), ("prompt_embeddings", &[5, testing::D][..]));
    assert_eq!((set.prompt_len(), set.prefix_len(), set.trainables()), (5, 0, 5 * testing::D));
    assert_eq!(set.matched(&base), ["5 virtual tokens in front of the text"]);
    assert_eq!(PromptTuningSpec::default().length, 20);
}

#[test]
fn it_starts_standard_normal() {
    let base = BaseDescription { width: 120, ..testing::base() };
    let values = AdapterSet::new(&PromptTuningSpec::default().into(), &base).unwrap().init(1).unwrap();
    let variance = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
    assert!(values.len() == 2400 && (variance - 1.0).abs() < 0.1, "{variance}");
}

#[test]
fn a_length_that_leaves_no_text_is_refused() {
    for length in [0, 32, 40] {
        let error = AdapterSet::new(&PromptTuningSpec { length }.into(), &testing::base()).unwrap_err();
        assert!(matches!(error, Error::PromptLength { .. }) && error.is_input());
        let says = format!("prompt length: {length} is not between 1 and 31; the base has 32 positions");
        assert_eq!(error.to_string(), says);
    }
    assert!(AdapterSet::new(&PromptTuningSpec { length: 31 }.into(), &testing::base()).is_ok());
}

#[test]
fn a_prefix_beside_it_is_refused() {
    let prefix = Some(PrefixSpec { length: 3, projection: None });
    let error = AdapterSet::new(&AdapterSpec { prefix, ..spec() }, &testing::base()).unwrap_err();
    assert!(error.is_input() && error.to_string().contains("PEFT has no model with both"), "{error}");
}

#[test]
fn a_folder_is_read_as_it_was_written() {
    let (set, values, folder) = saved();
    let dir = folder.path().join("adapter");
    let written = json!({
        "auto_mapping": null, "base_model_name_or_path": "tiny/base", "inference_mode": true,
        "modules_to_save": null, "num_attention_heads": 2, "num_layers": 3, "num_transformer_submodules": 1,
        "num_virtual_tokens": 5, "peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM",
        "prompt_tuning_init_text": null, "revision": "v1", "task_type": "CAUSAL_LM", "token_dim": 6,
        "tokenizer_kwargs": null, "tokenizer_name_or_path": null,
    });
    assert_eq!(config(&dir), written);
    let loaded = peft::load(&dir, &testing::base(), false).unwrap();
    assert_eq!((loaded.set, loaded.values, loaded.hints), (set, values, vec![]));
    let text = peft::describe(&dir).unwrap().to_string();
    assert!(text.contains("kind         prompt_tuning, 5 virtual tokens\n"), "{text}");
    assert!(text.contains("prompt_embeddings F32 [5, 6]") && !text.contains("hint"), "{text}");
}

#[test]
fn beside_other_methods_it_has_a_folder_and_changes_nothing_of_theirs() {
    let base = testing::base();
    let lora = LoraSpec::default();
    let all = AdapterSpec { lora: Some(lora.clone()), ..spec() };
    let (set, folder) = (AdapterSet::new(&all, &base).unwrap(), tempfile::tempdir().unwrap());
    let (values, dir) = (set.init(1).unwrap(), folder.path().join("adapter"));
    peft::save(&dir, &set, &values, None, &base).unwrap();
    for name in ["lora", "prompt_tuning"] {
        assert!(dir.join(name).join(peft::CONFIG_FILE).is_file(), "{name}");
    }
    let alone = AdapterSet::new(&lora.into(), &base).unwrap();
    assert_eq!(values[..alone.layout.len], alone.init(1).unwrap());
    let loaded = peft::load(&dir, &base, false).unwrap();
    assert_eq!((loaded.set, loaded.values), (set, values));
    // A method in the folder of another.
    fs::rename(dir.join("prompt_tuning"), dir.join("ln_tuning")).unwrap();
    let error = peft::load(&dir, &base, false).unwrap_err().to_string();
    assert!(error.contains("ln_tuning/ peft_type is PROMPT_TUNING where LN_TUNING is expected"), "{error}");
    let norms = AdapterSpec { ln_tuning: Some(LnTuningSpec::default()), ..spec() };
    assert!(AdapterSet::new(&norms, &base).is_ok());
}

#[test]
fn the_config_is_read_strictly() {
    let (set, values, folder) = saved();
    let dir = folder.path().join("adapter");
    let good = config(&dir);
    let with = |changes: &[(&str, Value)]| {
        let mut changed = good.clone();
        changes.iter().for_each(|(name, value)| changed[*name] = value.clone());
        fs::write(dir.join(peft::CONFIG_FILE), changed.to_string()).unwrap();
        peft::load(&dir, &testing::base(), false)
    };
    // How it started does not matter any more.
    let start = [
        ("prompt_tuning_init", json!("TEXT")),
        ("prompt_tuning_init_text", json!("Classify:")),
        ("tokenizer_name_or_path", json!("gpt2")),
        ("tokenizer_kwargs", json!({"use_fast": true})),
    ];
    let loaded = with(&start).unwrap();
    assert_eq!((&loaded.set, &loaded.values, loaded.hints.len()), (&set, &values, 0));
    for (name, value, says) in [
        ("token_dim", json!(8), "token_dim is 8 where the base has 6"),
        ("num_attention_heads", json!(3), "num_attention_heads is 3 where the base has 2"),
        ("num_layers", json!(2), "for a base of 2 layers, this one has 3"),
        ("num_transformer_submodules", json!(2), "num_transformer_submodules is 2 where 1 is supported"),
        ("num_virtual_tokens", json!(4), "prompt_embeddings has shape [5, 6] where [4, 6]"),
        ("num_virtual_tokens", Value::Null, "num_virtual_tokens"),
        ("num_virtual_tokens", json!("five"), "a whole number is expected"),
        ("modules_to_save", json!(["wte"]), "modules_to_save"),
        ("prefix_projection", json!(true), "prefix_projection"),
        ("task_type", json!("SEQ_2_SEQ_LM"), "CAUSAL_LM is supported"),
        ("peft_type", json!("PREFIX_TUNING"), "shape [5, 6] where [5, 36]"),
        ("peft_type", json!("CPT"), "PREFIX_TUNING, PROMPT_TUNING, TOY and P_TUNING are"),
    ] {
        let error = with(&[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(says), "{name}: {error}");
    }
    // The base must have room for it and for text.
    let short = BaseDescription { positions: 5, ..testing::base() };
    with(&[]).unwrap();
    let error = peft::load(&dir, &short, false).unwrap_err().to_string();
    assert!(error.contains("5 is not between 1 and 4"), "{error}");
}

#[test]
fn what_p_tuning_made_is_a_prompt() {
    let (set, values, folder) = saved();
    let dir = folder.path().join("adapter");
    let mut encoded = config(&dir);
    for name in
        ["prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_kwargs", "tokenizer_name_or_path"]
    {
        encoded.as_object_mut().unwrap().remove(name);
    }
    for (name, value) in [
        ("peft_type", json!("P_TUNING")),
        ("encoder_reparameterization_type", json!("LSTM")),
        ("encoder_hidden_size", json!(7)),
        ("encoder_num_layers", json!(3)),
        ("encoder_dropout", json!(0.1)),
    ] {
        encoded[name] = value;
    }
    fs::write(dir.join(peft::CONFIG_FILE), encoded.to_string()).unwrap();
    let loaded = peft::load(&dir, &testing::base(), false).unwrap();
    assert_eq!((loaded.set, loaded.values), (set, values));
    let [hint] = &loaded.hints[..] else { panic!("{:?}", loaded.hints) };
    assert!(hint.contains("the encoder of P-tuning, which the files do not hold"), "{hint}");
    let described = peft::describe(&dir).unwrap();
    assert_eq!(described.adapters[0].hint, Some(hint.as_str()));
    assert!(described.to_string().contains("prompt_tuning, 5 virtual tokens"), "{described}");
    // It is no kind of its own to train.
    assert!("p_tuning".parse::<crate::Kinds>().is_err());
}
