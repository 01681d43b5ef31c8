//! Tests of plain LoRAs: what they fold to is what the set folds to, and a set made of them is the one they came from.

use engraft_util::rng;

use super::*;
use crate::{Folding, VeraSpec, methods::AdapterSpec, testing};

fn resolved(spec: impl Into<AdapterSpec>) -> (AdapterSet, Vec<f32>) {
    let set = AdapterSet::new(&spec.into(), &testing::base()).unwrap();
    let values = (0..set.layout.len as u64).map(|at| rng::normal(rng::key(&[5]), at)).collect();
    (set, values)
}

/// What a set adds to each module, as weights `[inputs, outputs]`.
fn folded(set: &AdapterSet, values: &[f32], factor: f32) -> Vec<Vec<f32>> {
    let base = testing::base();
    let folding = Folding::new(vec![FoldPart { set, values, factor }]).unwrap();
    let module = |(layer, site): (usize, usize)| {
        let site_of = &base.sites[site];
        let mut weight = vec![0.0; site_of.inputs * site_of.outputs];
        folding.linear(layer, site, &mut weight, &mut vec![0.0; site_of.outputs]);
        weight
    };
    (0..base.layers)
        .flat_map(|layer| (0..base.sites.len()).map(move |site| (layer, site)))
        .map(module)
        .collect()
}

/// `s (B A)^T` of each delta, added up in F64, for the same modules.
fn written_out(deltas: &[PlainLora]) -> Vec<Vec<f32>> {
    let base = testing::base();
    let sites = (0..base.layers).flat_map(|_| &base.sites);
    let mut all: Vec<Vec<f32>> = sites.map(|site| vec![0.0; site.inputs * site.outputs]).collect();
    for delta in deltas {
        let site = &base.sites[delta.site];
        let weight = &mut all[delta.layer * base.sites.len() + delta.site];
        let part = delta.part.as_ref().map(|name| site.parts.iter().find(|part| part.name == *name).unwrap());
        let start = part.map_or(0, |part| part.columns.start);
        for (column, b) in delta.b.chunks_exact(delta.rank).enumerate() {
            for input in 0..site.inputs {
                let product =
                    |(r, b): (usize, &f32)| f64::from(*b) * f64::from(delta.a[r * site.inputs + input]);
                let sum: f64 = b.iter().enumerate().map(product).sum();
                weight[input * site.outputs + start + column] += (delta.scale() * sum) as f32;
            }
        }
    }
    all
}

#[track_caller]
fn close(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().flatten().fold(0.0, |most: f32, x| most.max(x.abs()));
    assert!(largest > 0.1, "nothing is added");
    for (found, expected) in found.iter().zip(expected) {
        let error = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // Sums of a few products in another order.
        assert!(error < 2e-6 * largest, "{error} of {largest}");
    }
}

fn cases() -> Vec<AdapterSpec> {
    let odd = LoraSpec { rank: 3, alpha: 5.0, targets: Targets::AllLinear, ..LoraSpec::default() };
    let patterns = LoraSpec {
        rank_pattern: [("h.1.mlp.c_fc".to_owned(), 5)].into(),
        alpha_pattern: [("c_proj".to_owned(), -2.5)].into(),
        rslora: true,
        ..odd.clone()
    };
    let parts = LoraSpec { targets: "q,v".parse().unwrap(), layers: Some(vec![0, 2]), ..odd.clone() };
    let mixed = "h.0.attn.c_attn,h.1.attn.c_attn.k,h.2.mlp.c_proj".parse().unwrap();
    let mixed = LoraSpec { targets: mixed, ..odd.clone() };
    vec![
        odd.into(),
        patterns.into(),
        parts.into(),
        mixed.into(),
        VeraSpec { rank: 4, ..VeraSpec::default() }.into(),
        VeraSpec { rank: 4, targets: Targets::AllLinear, ..VeraSpec::default() }.into(),
    ]
}

#[test]
fn plain_loras_add_what_the_set_adds() {
    let base = testing::base();
    for spec in cases() {
        let (set, values) = resolved(spec);
        for factor in [1.0, -0.75] {
            let part = FoldPart { set: &set, values: &values, factor };
            let expected = folded(&set, &values, factor);
            close(&written_out(&plain_loras(&part, &base).unwrap()), &expected);
            let whole = whole_loras(&part, &base).unwrap();
            assert!(whole.iter().all(|delta| delta.part.is_none()));
            close(&written_out(&whole), &expected);
            // One scale and one rank for all, as some formats have them.
            let rank = whole.iter().map(|delta| delta.rank).max().unwrap() + 1;
            let same = whole.into_iter().map(|delta| delta.with_scale(0.375).with_rank(rank));
            let same: Vec<PlainLora> = same.collect();
            assert!(same.iter().all(|delta| delta.scale() == 0.375 && delta.rank == rank));
            close(&written_out(&same), &expected);
        }
    }
}

#[test]
fn a_set_made_of_plain_loras_is_the_one_they_came_from() {
    let base = testing::base();
    for spec in cases() {
        let (set, values) = resolved(spec);
        let part = FoldPart { set: &set, values: &values, factor: 1.0 };
        let loaded = from_plain(plain_loras(&part, &base).unwrap(), 0.0, Path::new("x"), &base).unwrap();
        let places = |set: &AdapterSet| -> Vec<_> {
            set.loras.iter().map(|lora| (lora.layer, lora.site, lora.part.clone(), lora.rank)).collect()
        };
        assert_eq!(places(&loaded.set), places(&set));
        close(&folded(&loaded.set, &loaded.values, 1.0), &folded(&set, &values, 1.0));
    }
}

#[test]
fn what_is_no_delta_is_named() {
    let base = testing::base();
    let refused = |spec: AdapterSpec| {
        let (set, values) = resolved(spec);
        plain_loras(&FoldPart { set: &set, values: &values, factor: 1.0 }, &base).unwrap_err().to_string()
    };
    let lora = || LoraSpec { rank: 2, ..LoraSpec::default() };
    for (spec, what) in [
        (crate::PrefixSpec::default().into(), "a prefix"),
        (crate::PromptTuningSpec { length: 2 }.into(), "a prompt"),
        (crate::DoraSpec { lora: lora() }.into(), "magnitudes of columns (DoRA)"),
        (crate::Ia3Spec::default().into(), "vectors that scale modules (IA3)"),
        (LoraSpec { bias: crate::TrainedBiases::LoraOnly, ..lora() }.into(), "trained biases"),
        (crate::LnTuningSpec::default().into(), "trained layer norms"),
    ] {
        assert_eq!(refused(spec), format!("an adapter with {what} is no plain LoRA"));
    }
}

#[test]
fn every_delta_that_does_not_fit_is_named() {
    let base = testing::base();
    let (set, values) = resolved(LoraSpec { rank: 2, targets: Targets::AllLinear, ..LoraSpec::default() });
    let deltas = plain_loras(&FoldPart { set: &set, values: &values, factor: 1.0 }, &base).unwrap();
    let with = |change: &dyn Fn(&mut Vec<PlainLora>)| {
        let mut deltas = deltas.clone();
        change(&mut deltas);
        from_plain(deltas, 0.0, Path::new("file"), &base).unwrap_err()
    };
    let error = with(&|all| {
        all[0].a.pop();
        all[1].b.extend([0.0; 4]);
        all[2].a[5] = f32::NAN;
    });
    assert_eq!(error.problems().len(), 3, "{error}");
    assert!(error.to_string().contains("B of transformer.h.0.attn.c_proj has shape [8, 2]"), "{error}");
    let error = with(&|all| all[3].layer = 3).to_string();
    assert!(error.contains("4 layers"), "{error}");
    assert!(matches!(with(&Vec::clear), Error::Empty));
    let error = with(&|all| all[1] = all[0].clone()).to_string();
    assert!(error.contains("two deltas are for transformer.h.0.attn.c_attn"), "{error}");
}
