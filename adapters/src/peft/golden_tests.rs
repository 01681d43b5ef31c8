//! Folders that PEFT 0.21.2 wrote: read, and written again with the same tensors and an equal meaning.

use std::path::{Path, PathBuf};

use super::{TENSOR_FILE, describe, load, save, tensors::TensorFile};
use crate::{BaseDescription, Error, testing};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The base the fixtures are for: 3 layers, 3 heads, width 24.
fn base() -> BaseDescription {
    let mut base = BaseDescription { name: "bases/tiny".to_owned(), heads: 3, width: 24, ..testing::base() };
    base.positions = 40;
    for site in &mut base.sites {
        (site.inputs, site.outputs) = (4 * site.inputs, 4 * site.outputs);
        for part in &mut site.parts {
            part.columns = 4 * part.columns.start..4 * part.columns.end;
        }
    }
    base
}

fn same_tensors(a: &Path, b: &Path) {
    let mut a = TensorFile::open(&a.join(TENSOR_FILE)).unwrap();
    let mut b = TensorFile::open(&b.join(TENSOR_FILE)).unwrap();
    let names = |file: &TensorFile| file.tensors().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(&a), names(&b));
    for name in names(&a) {
        assert_eq!(a.info(&name).unwrap().shape, b.info(&name).unwrap().shape);
        assert_eq!(a.read(&name).unwrap(), b.read(&name).unwrap(), "{name}");
    }
}

#[test]
fn what_peft_wrote_is_read_and_written_again() {
    for (name, folders) in [
        ("lora_all_rslora_patterns", &[""][..]),
        ("lora_layers", &[""]),
        ("lora_and_prefix", &["lora", "prefix"]),
        ("ln_tuning", &[""]),
        ("dora_all_rslora_patterns", &[""]),
        ("dora_beside", &[""]),
        ("lora_bias_all", &[""]),
        ("lora_train_norms", &[""]),
        ("lora_ln_tuning_and_prefix", &["lora", "ln_tuning", "prefix"]),
        ("prompt_tuning", &[""]),
        ("p_tuning", &[""]),
        ("lora_and_prompt_tuning", &["lora", "prompt_tuning"]),
        ("ia3", &[""]),
        ("lora_ia3_and_prefix", &["lora", "ia3", "prefix"]),
        ("vera", &[""]),
        ("adalora", &[""]),
        ("adalora_allocated", &[""]),
    ] {
        let loaded = load(&fixture(name), &base(), false).unwrap();
        assert!(loaded.hints[0].contains("no base fingerprint"), "{:?}", loaded.hints);
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("again");
        save(&dir, &loaded.set, &loaded.values, None, &base()).unwrap();
        folders.iter().for_each(|below| same_tensors(&fixture(name).join(below), &dir.join(below)));
        let again = load(&dir, &base(), false).unwrap();
        assert_eq!((again.set, again.values), (loaded.set, loaded.values));
        assert!(again.hints.is_empty());
    }
}

#[test]
fn ranks_and_scales_are_those_of_peft_s_formulas() {
    let loaded = load(&fixture("lora_all_rslora_patterns"), &base(), false).unwrap();
    let of = |layer: usize, site: &str| {
        let at = |lora: &&crate::Lora| lora.layer == layer && base().sites[lora.site].name == site;
        let lora = loaded.set.loras.iter().find(at).unwrap();
        (lora.rank, f64::from(lora.scale))
    };
    // r 3, alpha 5, rsLoRA; patterns for rank and alpha as in the config.
    for (layer, site, rank, alpha) in [
        (0, "attn.c_attn", 2, 5.0),
        (1, "mlp.c_fc", 5, 5.0),
        (2, "attn.c_proj", 3, 3.0),
        (0, "mlp.c_proj", 4, 11.0),
        (1, "mlp.c_proj", 3, 11.0),
    ] {
        let (found, scale) = of(layer, site);
        assert_eq!(found, rank);
        assert!((scale - alpha / (rank as f64).sqrt()).abs() < 1e-6, "{layer} {site} {scale}");
    }
}

#[test]
fn an_adapter_of_peft_on_another_base_is_refused_for_every_reason() {
    let mut other = base();
    other.layers = 2;
    other.heads = 4;
    let error = load(&fixture("lora_and_prefix"), &other, false).unwrap_err();
    let text = error.to_string();
    for reason in ["for a base of 3 layers, this one has 2", "h.2.attn.c_attn.lora_A.weight is not expected"]
    {
        assert!(text.contains(reason), "{text}");
    }
    assert!(text.contains("num_attention_heads is 3 where the base has 4"), "{text}");
    assert!(text.contains("; and 2 more; give the base that it was trained on"), "{text}");
    // Those that the sentence leaves out are known.
    let Error::Mismatch { problems, .. } = error else { panic!("{error:?}") };
    assert!(problems.iter().any(|problem| problem.to_string().contains("shape [5, 144] where [5, 96]")));
}

#[test]
fn it_is_described_without_a_base() {
    let description = describe(&fixture("lora_and_prefix")).unwrap();
    let [lora, prefix] = &description.adapters[..] else { panic!("{description:?}") };
    assert_eq!((lora.ranks.as_slice(), prefix.spec.prefix.as_ref().unwrap().length), (&[2][..], 5));
    assert_eq!(prefix.parameters, 720);
    assert!(lora.unsupported.is_empty() && lora.fingerprint.is_none());
    let text = description.to_string();
    assert!(text.contains("prompt_embeddings F32 [5, 144]") && text.contains("bases/tiny"), "{text}");
}
