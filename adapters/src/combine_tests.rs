//! Combinations against those of PEFT, whose random masks are handed in.

use std::{collections::HashMap, path::PathBuf};

use super::*;
use crate::{
    Kinds, PrefixSpec,
    peft::{self, Loaded, TensorFile},
    testing,
};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/combined").join(name)
}

/// The base that the fixtures are for: 3 layers, width 24.
fn base() -> BaseDescription {
    let mut base = BaseDescription { heads: 3, width: 24, ..testing::base() };
    for site in &mut base.sites {
        (site.inputs, site.outputs) = (4 * site.inputs, 4 * site.outputs);
        for part in &mut site.parts {
            part.columns = 4 * part.columns.start..4 * part.columns.end;
        }
    }
    base
}

fn options(method: &str) -> CombineOptions {
    let method = CombineMethod::named(method).unwrap();
    CombineOptions { method, density: 0.6, rank: None, majority_sign: MajoritySign::Total, seed: 1 }
}

fn tensors() -> HashMap<String, Vec<f64>> {
    let path = fixture("expected.safetensors");
    candle_core::safetensors::load(&path, &candle_core::Device::Cpu)
        .unwrap()
        .into_iter()
        .map(|(name, tensor)| {
            let wide = tensor.to_dtype(candle_core::DType::F64).unwrap();
            (name, wide.flatten_all().unwrap().to_vec1().unwrap())
        })
        .collect()
}

fn near(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let error = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    // PEFT computes in F32, its singular vectors too.
    assert!(largest > 0.0 && error < 3e-6 * largest, "{what}: {:.1e} of {largest}", error / largest);
}

/// Case of make_combined.py, method, adapters, how it elects signs, rank.
type Case = (&'static str, &'static str, usize, MajoritySign, Option<usize>);

const CASES: [Case; 14] = [
    ("linear", "linear", 2, MajoritySign::Total, None),
    ("cat", "cat", 3, MajoritySign::Total, None),
    ("svd", "svd", 3, MajoritySign::Total, None),
    ("svd_rank_5", "svd", 3, MajoritySign::Total, Some(5)),
    ("ties", "ties", 2, MajoritySign::Total, None),
    ("ties_frequency", "ties", 2, MajoritySign::Frequency, None),
    ("ties_svd", "ties_svd", 3, MajoritySign::Total, None),
    ("ties_svd_frequency", "ties_svd", 3, MajoritySign::Frequency, None),
    ("dare_linear", "dare_linear", 2, MajoritySign::Total, None),
    ("dare_ties", "dare_ties", 2, MajoritySign::Total, None),
    ("dare_linear_svd", "dare_linear_svd", 3, MajoritySign::Total, None),
    ("dare_ties_svd", "dare_ties_svd", 3, MajoritySign::Frequency, None),
    ("magnitude_prune", "magnitude_prune", 2, MajoritySign::Total, None),
    ("magnitude_prune_svd", "magnitude_prune_svd", 3, MajoritySign::Total, None),
];

fn loaded() -> Vec<Loaded> {
    ["first", "second", "third"]
        .iter()
        .map(|name| peft::load(&fixture(name), &base(), false).unwrap())
        .collect()
}

fn parts(loaded: &[Loaded]) -> Vec<CombinePart<'_>> {
    let weights = [0.7, -1.3, 0.4];
    loaded
        .iter()
        .zip(weights)
        .map(|(loaded, weight)| CombinePart { set: &loaded.set, values: &loaded.values, weight })
        .collect()
}

#[test]
fn every_method_gives_what_peft_gives() {
    let (base, loaded, expected) = (base(), loaded(), tensors());
    for (case, method, count, majority_sign, rank) in CASES {
        let keep = |path: &str, which: Masked, number: usize, at: usize| {
            let which = ["A", "B", "BA"][which as usize];
            expected[&format!("{case}/{path}.mask.{which}.{number}")][at] == 1.0
        };
        let options = CombineOptions { majority_sign, rank, ..options(method) };
        let found = combine_keeping(&parts(&loaded)[..count], &options, &base, &keep).unwrap();
        assert_eq!(found.set.loras.len(), 9, "{case}: c_attn, attn.c_proj and mlp.c_proj of three layers");
        for lora in &found.set.loras {
            assert_eq!(lora.scale, 1.0);
            let site = &base.sites[lora.site];
            let name = |what: &str| format!("{case}/{}.{what}", site.module(lora.layer));
            let tensor = |slot: usize| -> Vec<f64> {
                found.values[found.set.layout.tensors[slot].range()].iter().map(|&x| x.into()).collect()
            };
            let (a, b) = (tensor(lora.a), tensor(lora.b));
            if method.ends_with("svd") {
                let left = Matrix::new(site.outputs, lora.rank, b);
                let found = product(&left, &Matrix::new(lora.rank, site.inputs, a));
                near(&found.values, &expected[&name("BA")], &name("BA"));
            } else {
                near(&a, &expected[&name("A")], &name("A"));
                near(&b, &expected[&name("B")], &name("B"));
            }
        }
        assert_eq!(found.lost.is_some(), method.ends_with("svd"));
    }
}

/// `cat` is exact: its delta is the weighted sum of the deltas, and so is that of `svd` with enough ranks.
#[test]
fn exact_methods_lose_nothing() {
    let (base, loaded) = (base(), loaded());
    let exact = combine(&parts(&loaded), &options("cat"), &base).unwrap();
    let svd = CombineOptions { rank: Some(10), ..options("svd") };
    let cut = combine(&parts(&loaded), &svd, &base).unwrap();
    assert!(cut.lost.unwrap() < 1e-12);
    let fold = |set: &AdapterSet, values: &[f32], factor: f32, weight: &mut Vec<f32>| {
        let folding = crate::Folding::new(vec![crate::FoldPart { set, values, factor }]).unwrap();
        folding.linear(1, 0, weight, &mut [0.0; 72]);
    };
    let mut sum = vec![0.0; 24 * 72];
    parts(&loaded).iter().for_each(|part| fold(part.set, part.values, part.weight as f32, &mut sum));
    let wide = |values: &[f32]| values.iter().map(|&x| x.into()).collect::<Vec<f64>>();
    for found in [exact, cut] {
        let mut weight = vec![0.0; 24 * 72];
        fold(&found.set, &found.values, 1.0, &mut weight);
        near(&wide(&weight), &wide(&sum), "delta");
    }
    let lossy = combine(&parts(&loaded), &CombineOptions { rank: Some(2), ..svd }, &base).unwrap();
    assert!((0.05..0.9).contains(&lossy.lost.unwrap()), "{:?}", lossy.lost);
}

#[test]
fn what_is_kept_at_random_follows_from_the_seed() {
    let (base, loaded) = (base(), loaded());
    let of = |seed, density| {
        let options = CombineOptions { seed, density, ..options("dare_linear") };
        combine(&parts(&loaded)[..2], &options, &base).unwrap().values
    };
    assert!(of(1, 0.6) == of(1, 0.6) && of(1, 0.6) != of(2, 0.6));
    // Nothing is left out with a density of 1.
    let linear = combine(&parts(&loaded)[..2], &options("linear"), &base).unwrap();
    assert_eq!(of(1, 1.0), linear.values);
    let site = linear.set.loras.iter().find(|lora| lora.site == 1).unwrap();
    let range = linear.set.layout.tensors[site.b].range();
    let zeros = of(3, 0.6)[range.clone()].iter().filter(|&&value| value == 0.0).count();
    assert!((0.2..0.6).contains(&(zeros as f64 / range.len() as f64)), "{zeros} of {}", range.len());
}

#[test]
fn a_combination_is_written_and_read_as_a_lora() {
    let (base, loaded) = (base(), loaded());
    let found = combine(&parts(&loaded), &options("cat"), &base).unwrap();
    assert_eq!(Kinds::of(&found.set.spec).unwrap().to_string(), "lora");
    let folder = tempfile::tempdir().unwrap();
    peft::save(folder.path(), &found.set, &found.values, None, &base).unwrap();
    let again = peft::load(folder.path(), &base, false).unwrap();
    assert_eq!((again.set, again.values), (found.set, found.values));
    let config = std::fs::read_to_string(folder.path().join(peft::CONFIG_FILE)).unwrap();
    assert!(config.contains("\"r\": 10") && config.contains("\"lora_alpha\": 10"), "{config}");
    let file = TensorFile::open(&folder.path().join(peft::TENSOR_FILE)).unwrap();
    assert_eq!(file.tensors().len(), 18);
}

#[test]
fn modules_that_sites_cannot_name_are_named_by_their_paths() {
    let base = base();
    let sites = spec_of(&[(0, 1), (0, 3), (2, 1), (2, 3)], 4, 0.1, &base);
    assert_eq!(sites.targets.to_string(), "attn.c_proj,mlp.c_proj");
    assert_eq!((sites.layers, sites.alpha, sites.dropout), (Some(vec![0, 2]), 4.0, 0.1));
    let paths = spec_of(&[(0, 1), (2, 3)], 4, 0.0, &base);
    assert_eq!(paths.targets.to_string(), "transformer.h.0.attn.c_proj,transformer.h.2.mlp.c_proj");
    let set = AdapterSet::new(&paths.into(), &base).unwrap();
    let found: Vec<_> = set.loras.iter().map(|lora| (lora.layer, lora.site)).collect();
    assert_eq!(found, [(0, 1), (2, 3)]);
}

#[test]
fn what_cannot_be_combined_is_refused() {
    let (base, loaded) = (base(), loaded());
    let refused = |parts: &[CombinePart], method: &str| {
        combine(parts, &options(method), &base).unwrap_err().to_string()
    };
    let three = parts(&loaded);
    let text = refused(&three, "ties");
    assert_eq!(
        text,
        "the ranks of the adapters are 3 and 3 and 4, and ties needs equal ones; take cat, or a method with svd"
    );
    let set = AdapterSet::new(&PrefixSpec { length: 3, projection: None }.into(), &base).unwrap();
    let values = vec![0.0; set.layout.len];
    let prefix = CombinePart { set: &set, values: &values, weight: 1.0 };
    assert!(refused(&[three[0], prefix], "cat").starts_with("an adapter that is no plain LoRA"));
    // One alone is scaled, whatever the method.
    let one = [CombinePart { weight: 0.5, ..three[0] }];
    let scaled = combine(&one, &options("ties_svd"), &base).unwrap();
    assert_eq!(scaled.values, combine(&one, &options("linear"), &base).unwrap().values);
}
