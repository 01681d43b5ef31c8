//! What a folded module computes is what the formula of a site says, for every kind of part.

use engraft_util::rng;

use super::*;
use crate::{AdapterSpec, EmbeddingDelta, Layout, LoraSpec, PrefixSpec, TensorSlot, reference, testing};

const INPUTS: usize = 5;
const OUTPUTS: usize = 7;

fn drawn(name: &str, len: usize) -> Vec<f32> {
    let key = rng::key(&[3, rng::name(name)]);
    (0..len as u64).map(|index| rng::normal(key, index)).collect()
}

/// A set of tensors without a method; none of their values is 0.
struct Made {
    set: AdapterSet,
    values: Vec<f32>,
}

impl Made {
    fn new() -> Self {
        let (spec, layout) = (AdapterSpec::default(), Layout::default());
        let (loras, vectors, norms) = (Vec::new(), Vec::new(), Vec::new());
        let set = AdapterSet {
            spec,
            layout,
            loras,
            vectors,
            norms,
            embedding: None,
            prefix: None,
            prompt: None,
            allocation: None,
        };
        Self { set, values: Vec::new() }
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> usize {
        let slot = TensorSlot {
            name: name.to_owned(),
            shape: shape.to_vec(),
            offset: self.values.len(),
            group: 0,
            method: "made",
        };
        self.values.extend(drawn(name, slot.len()));
        self.set.layout.len = self.values.len();
        self.set.layout.tensors.push(slot);
        self.set.layout.tensors.len() - 1
    }

    fn delta(mut self, name: &str, columns: std::ops::Range<usize>, d: bool, e: bool) -> Self {
        let rank = 3;
        let a = self.tensor(&format!("{name}.A"), &[rank, INPUTS]);
        let b = self.tensor(&format!("{name}.B"), &[columns.len(), rank]);
        let d = d.then(|| self.tensor(&format!("{name}.d"), &[rank]));
        let e = e.then(|| self.tensor(&format!("{name}.e"), &[columns.len()]));
        let (layer, site, part, alpha, scale) = (1, 0, None, 1.0, 0.7);
        self.set.loras.push(Lora { layer, site, part, columns, rank, alpha, scale, a, b, d, e });
        self
    }

    fn vectors(mut self, u: bool, g: Option<(bool, bool)>, bias: bool) -> Self {
        let u = u.then(|| self.tensor("u", &[INPUTS]));
        let g = g.map(|(over_norms, with_bias)| OutputScale {
            vector: self.tensor("g", &[OUTPUTS]),
            over_norms,
            with_bias,
        });
        let bias = bias.then(|| self.tensor("bias", &[OUTPUTS]));
        self.set.vectors.push(SiteVectors { layer: 1, site: 0, u, g, bias });
        self
    }

    fn part(&self, factor: f32) -> FoldPart<'_> {
        FoldPart { set: &self.set, values: &self.values, factor }
    }

    fn wide(&self, index: usize) -> Vec<f64> {
        self.values[self.set.layout.tensors[index].range()].iter().map(|&value| value.into()).collect()
    }
}

/// `y (outputs)` of one x by the formula of [`crate::contribution`], in F64, term by term.
fn by_formula(sets: &[(&Made, f64)], w: &[f32], b: &[f32], x: &[f64]) -> Vec<f64> {
    let weight = |i: usize, j: usize| f64::from(w[i * OUTPUTS + j]);
    let delta = |i: usize, j: usize| -> f64 {
        let mut sum = 0.0;
        for (made, factor) in sets {
            for lora in made.set.loras.iter().filter(|lora| lora.columns.contains(&j)) {
                let (a, b, column) = (made.wide(lora.a), made.wide(lora.b), j - lora.columns.start);
                let one = |vector: Option<usize>, at: usize| vector.map_or(1.0, |index| made.wide(index)[at]);
                for r in 0..lora.rank {
                    sum += factor
                        * f64::from(lora.scale)
                        * one(lora.e, column)
                        * a[r * INPUTS + i]
                        * one(lora.d, r)
                        * b[column * lora.rank + r];
                }
            }
        }
        sum
    };
    let vectors: Vec<(&Made, &SiteVectors)> =
        sets.iter().flat_map(|(made, _)| made.set.vectors.iter().map(move |one| (*made, one))).collect();
    let get = |which: fn(&SiteVectors) -> Option<usize>| {
        vectors.iter().find_map(|(made, vectors)| Some(made.wide(which(vectors)?)))
    };
    let u = get(|vectors| vectors.u).unwrap_or(vec![1.0; INPUTS]);
    let b = get(|vectors| vectors.bias).unwrap_or(b.iter().map(|&b| b.into()).collect());
    let scale = vectors.iter().find_map(|(_, vectors)| vectors.g);
    let g = get(|vectors| vectors.g.map(|g| g.vector)).unwrap_or(vec![1.0; OUTPUTS]);
    let column = |j: usize| {
        let norm = (0..INPUTS).map(|i| (weight(i, j) + delta(i, j)).powi(2)).sum::<f64>().sqrt();
        let g = if scale.is_some_and(|scale| scale.over_norms) { g[j] / norm } else { g[j] };
        let inside: f64 = (0..INPUTS).map(|i| x[i] * (u[i] * weight(i, j) + delta(i, j))).sum();
        if scale.is_some_and(|scale| scale.with_bias) { g * (inside + b[j]) } else { g * inside + b[j] }
    };
    (0..OUTPUTS).map(column).collect()
}

#[track_caller]
fn agrees(what: &str, sets: &[(&Made, f64)]) {
    let (w, b, x) = (drawn("w", INPUTS * OUTPUTS), drawn("b", OUTPUTS), drawn("x", INPUTS));
    let x: Vec<f64> = x.into_iter().map(f64::from).collect();
    let folding =
        Folding::new(sets.iter().map(|(made, factor)| made.part(*factor as f32)).collect()).unwrap();
    assert!(folding.changes_linear(1, 0) && !folding.changes_linear(0, 0) && !folding.changes_linear(1, 1));
    let (mut weight, mut bias) = (w.clone(), b.clone());
    folding.linear(1, 0, &mut weight, &mut bias);
    let folded = (0..OUTPUTS).map(|j| {
        let product: f64 = (0..INPUTS).map(|i| x[i] * f64::from(weight[i * OUTPUTS + j])).sum();
        product + f64::from(bias[j])
    });
    let expected = by_formula(sets, &w, &b, &x);
    let size = expected.iter().fold(0.0, |most: f64, y| most.max(y.abs()));
    for (folded, expected) in folded.zip(&expected) {
        // F32 sums of a dozen products.
        assert!((folded - expected).abs() < 3e-6 * size, "{what}: {folded} where {expected} is expected");
    }
}

#[test]
fn a_folded_module_computes_what_the_site_did() {
    let made = Made::new;
    agrees("a delta", &[(&made().delta("one", 0..OUTPUTS, false, false), 1.0)]);
    agrees("a part with d and e", &[(&made().delta("one", 2..6, true, true), 1.0)]);
    let two = made().delta("one", 0..3, true, false).delta("two", 1..OUTPUTS, false, true);
    agrees("two deltas, scaled", &[(&two, -0.4)]);
    for (over_norms, with_bias) in [(false, false), (false, true), (true, false), (true, true)] {
        for (u, bias) in [(false, false), (true, true)] {
            let g = Some((over_norms, with_bias));
            agrees("vectors", &[(&made().delta("one", 0..OUTPUTS, false, false).vectors(u, g, bias), 1.0)]);
            agrees("vectors alone", &[(&made().vectors(u, g, bias), 1.0)]);
        }
    }
    agrees("u alone", &[(&made().vectors(true, None, false), 1.0)]);
    agrees("a bias alone", &[(&made().vectors(false, None, true), 1.0)]);
    let (delta, scales) =
        (made().delta("other", 0..4, false, false), made().vectors(true, Some((false, true)), true));
    agrees("two adapters", &[(&scales, 1.0), (&delta, 0.5)]);
}

#[test]
fn a_lora_is_folded_as_its_reference_says() {
    let base = testing::base();
    let lora = LoraSpec { rank: 2, targets: "q,v,mlp.c_proj".parse().unwrap(), ..LoraSpec::default() };
    let set = AdapterSet::new(&lora.into(), &base).unwrap();
    let values = drawn("values", set.layout.len);
    let folding = Folding::new(vec![FoldPart { set: &set, values: &values, factor: 1.0 }]).unwrap();
    let lora = set.loras.iter().find(|lora| lora.layer == 2 && lora.site == 3).unwrap();
    let tensor = |index: usize| {
        let slot = &set.layout.tensors[index];
        let values: Vec<f64> = values[slot.range()].iter().map(|&value| value.into()).collect();
        candle_core::Tensor::from_vec(values, slot.shape.as_slice(), &candle_core::Device::Cpu).unwrap()
    };
    let delta = reference::merge_delta(&tensor(lora.a), &tensor(lora.b), lora.scale.into()).unwrap();
    let (inputs, outputs) = (base.sites[3].inputs, base.sites[3].outputs);
    let (mut weight, mut bias) = (vec![0.0; inputs * outputs], vec![0.5; outputs]);
    folding.linear(2, 3, &mut weight, &mut bias);
    for (found, expected) in weight.iter().zip(delta.flatten_all().unwrap().to_vec1::<f64>().unwrap()) {
        assert!((f64::from(*found) - expected).abs() < 1e-4, "{found} where {expected} is expected");
    }
    assert_eq!(bias, vec![0.5; outputs]);
}

/// Sites of other widths read the first columns of the shared A and the first rows of the shared B.
#[test]
fn a_vera_on_modules_of_different_widths_is_folded_as_its_formula_says() {
    let base = testing::base();
    let spec = crate::VeraSpec { rank: 5, targets: crate::Targets::AllLinear, ..Default::default() };
    let set = AdapterSet::new(&spec.into(), &base).unwrap();
    let mut values = set.init(1).unwrap();
    for slot in set.layout.tensors.iter().filter(|slot| slot.name.contains("vera_lambda")) {
        values[slot.range()].copy_from_slice(&drawn(&slot.name, slot.len()));
    }
    let factor = -0.4;
    let folding = Folding::new(vec![FoldPart { set: &set, values: &values, factor }]).unwrap();
    let shared = |name: &str| {
        let slot = set.layout.slot(name).unwrap();
        (&values[slot.range()], slot.shape[1])
    };
    let ((a, widest), (b, rank)) = (shared("base_model.vera_A"), shared("base_model.vera_B"));
    assert_eq!((widest, rank, b.len() / rank), (4 * testing::D, 5, 4 * testing::D));
    for (layer, site) in
        (0..base.layers).flat_map(|layer| (0..base.sites.len()).map(move |site| (layer, site)))
    {
        let (inputs, outputs) = (base.sites[site].inputs, base.sites[site].outputs);
        let lambda = |letter: &str| {
            let name = format!("base_model.model.{}.vera_lambda_{letter}", base.sites[site].module(layer));
            &values[set.layout.slot(&name).unwrap().range()]
        };
        let (lambda_b, lambda_d) = (lambda("b"), lambda("d"));
        let before = drawn("w", inputs * outputs);
        let (mut weight, mut bias) = (before.clone(), vec![0.5; outputs]);
        folding.linear(layer, site, &mut weight, &mut bias);
        for (i, j) in (0..inputs).flat_map(|i| (0..outputs).map(move |j| (i, j))) {
            let of = |r: usize| [a[r * widest + i], lambda_d[r], b[j * rank + r], lambda_b[j]];
            let delta: f64 = (0..rank).map(|r| of(r).into_iter().map(f64::from).product::<f64>()).sum();
            let expected = f64::from(before[i * outputs + j]) + f64::from(factor) * delta;
            let found = f64::from(weight[i * outputs + j]);
            assert!((found - expected).abs() < 1e-6, "{layer} {site}: {found} where {expected} is expected");
        }
        assert_eq!(bias, vec![0.5; outputs]);
    }
}

#[test]
fn norms_are_replaced_and_the_embedding_gets_its_delta() {
    let mut made = Made::new();
    let (gain, bias) = (made.tensor("gain", &[4]), made.tensor("norm bias", &[4]));
    made.set.norms = vec![
        NormVectors { layer: Some(0), norm: 1, gain: Some(gain), bias: None },
        NormVectors { layer: None, norm: 0, gain: None, bias: Some(bias) },
    ];
    let (a, b) = (made.tensor("A", &[2, 3]), made.tensor("B", &[4, 2]));
    made.set.embedding = Some(EmbeddingDelta { rank: 2, scale: 1.5, a, b });
    let folding = Folding::new(vec![made.part(2.0)]).unwrap();
    let own = |index: usize| &made.values[made.set.layout.tensors[index].range()];
    assert_eq!(folding.norm(Some(0), 1), (Some(own(gain)), None));
    assert_eq!(folding.norm(None, 0), (None, Some(own(bias))));
    assert_eq!((folding.norm(Some(1), 1), folding.norm(Some(0), 0)), ((None, None), (None, None)));
    let before = drawn("table", 12);
    let mut table = before.clone();
    folding.embedding(&mut table);
    let (a, b) = (own(a), own(b));
    for token in 0..3 {
        for column in 0..4 {
            let delta = b[column * 2] * a[token] + b[column * 2 + 1] * a[3 + token];
            let (found, at) = (table[token * 4 + column], before[token * 4 + column]);
            assert!((found - (at + 2.0 * 1.5 * delta)).abs() < 1e-5);
        }
    }
    assert!(folding.changes_embedding() && !Folding::new(vec![]).unwrap().changes_embedding());
}

/// The toy method has every part; but for its prompt it is folded without a line of code for it.
#[test]
fn a_new_method_is_folded_by_its_contribution() {
    let base = testing::base();
    let spec = AdapterSpec { toy: Some(Default::default()), ..AdapterSpec::default() };
    let mut set = AdapterSet::new(&spec, &base).unwrap();
    let values = drawn("toy", set.layout.len);
    let refused = Folding::new(vec![FoldPart { set: &set, values: &values, factor: 1.0 }]).unwrap_err();
    assert!(refused.to_string().starts_with("a prompt ("), "{refused}");
    set.prompt = None;
    let folding = Folding::new(vec![FoldPart { set: &set, values: &values, factor: 1.0 }]).unwrap();
    assert!(
        (0..base.layers).all(|layer| folding.changes_linear(layer, 2) && !folding.changes_linear(layer, 1))
    );
    assert!(folding.changes_embedding() && folding.norm(None, 0).0.is_some());
}

#[test]
fn what_cannot_be_folded_is_refused() {
    let base = testing::base();
    let set = AdapterSet::new(&PrefixSpec { length: 3, projection: None }.into(), &base).unwrap();
    let values = vec![0.0; set.layout.len];
    let refused = Folding::new(vec![FoldPart { set: &set, values: &values, factor: 1.0 }]).unwrap_err();
    assert!(refused.is_input() && refused.to_string().starts_with("a prefix ("), "{refused}");
    let scales = || Made::new().vectors(false, Some((true, false)), false);
    let delta = Made::new().delta("other", 0..4, false, false);
    for (other, what) in [(&scales(), "the scales or the bias"), (&delta, "scales by their norms")] {
        for swapped in [false, true] {
            let scales = scales();
            let mut parts = vec![scales.part(1.0), other.part(1.0)];
            if swapped {
                parts.reverse();
            }
            let refused = Folding::new(parts).unwrap_err().to_string();
            assert!(refused.contains(what), "{refused}");
        }
    }
    let norm = NormVectors { layer: None, norm: 0, gain: Some(0), bias: None };
    let with_norm = || {
        let mut made = Made::new();
        made.tensor("gain", &[4]);
        made.set.norms = vec![norm.clone()];
        made
    };
    let (one, two) = (with_norm(), with_norm());
    assert!(Folding::new(vec![one.part(1.0), two.part(1.0)]).is_err());
}
