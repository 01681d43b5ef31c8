//! Tests of initial values: what each kind promises, what is frozen beside it, its files, and what is refused.

use engraft_util::rng;
use serde_json::{Value, json};

use crate::{
    AdapterSet, AdapterSpec, BaseWeights, DoraSpec, Error, FoldPart, Folding, InitialFactors, LoraSpec,
    NormWeights, Result, peft,
    svd::{Matrix, Svd, product},
    testing,
};

/// Weights that are drawn.
struct Drawn;

impl BaseWeights for Drawn {
    fn matrix(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        let site_ = testing::base().sites.get(site)?.clone();
        let key = rng::key(&[17, site as u64, layer as u64]);
        Some((0..(site_.inputs * site_.outputs) as u64).map(|at| rng::normal(key, at)).collect())
    }

    fn column_norms(&self, site: usize, layer: usize) -> Option<Vec<f32>> {
        Some(testing::column_norms(&self.matrix(site, layer)?, testing::base().sites.get(site)?.outputs))
    }

    fn bias(&self, _: usize, _: usize) -> Option<Vec<f32>> {
        None
    }

    fn norm(&self, _: Option<usize>, _: usize) -> Option<NormWeights> {
        None
    }

    fn token_embeddings(&self, _: &[u32]) -> Option<Vec<f32>> {
        None
    }
}

fn spec(init: InitialFactors, rank: usize, targets: &str) -> LoraSpec {
    let targets = targets.parse().unwrap();
    LoraSpec { rank, alpha: 7.0, targets, init_lora_weights: init, ..LoraSpec::default() }
}

fn resolve(spec: impl Into<AdapterSpec>) -> Result<AdapterSet> {
    AdapterSet::new(&spec.into(), &testing::base())
}

fn started(spec: &LoraSpec) -> (AdapterSet, Vec<f32>) {
    let set = resolve(spec.clone()).unwrap();
    let values = set.init_from(1, Some(&Drawn)).unwrap();
    (set, values)
}

fn of<'a>(set: &AdapterSet, values: &'a [f32], slot: usize) -> &'a [f32] {
    &values[set.layout.tensors[slot].range()]
}

fn wide(rows: usize, cols: usize, values: &[f32]) -> Matrix {
    Matrix::new(rows, cols, values.iter().map(|&x| f64::from(x)).collect())
}

fn transposed(matrix: &Matrix) -> Matrix {
    let at = |at: usize| matrix.values[at % matrix.rows * matrix.cols + at / matrix.rows];
    Matrix::new(matrix.cols, matrix.rows, (0..matrix.values.len()).map(at).collect())
}

/// Delta `number` of the set, `s (B A)^T` [inputs, columns].
fn delta(set: &AdapterSet, values: &[f32], number: usize) -> Matrix {
    let lora = &set.loras[number];
    let a = wide(lora.rank, set.layout.tensors[lora.a].shape[1], of(set, values, lora.a));
    let b = wide(lora.columns.len(), lora.rank, of(set, values, lora.b));
    let mut delta = transposed(&product(&b, &a));
    delta.values.iter_mut().for_each(|x| *x *= f64::from(lora.scale));
    delta
}

/// The part of the base's weight that delta `number` adds to.
fn weight(set: &AdapterSet, number: usize) -> Matrix {
    let lora = &set.loras[number];
    let site = &testing::base().sites[lora.site];
    let whole = Drawn.matrix(lora.site, lora.layer).unwrap();
    let rows = whole.chunks(site.outputs).flat_map(|row| row[lora.columns.clone()].to_vec());
    wide(site.inputs, lora.columns.len(), &rows.collect::<Vec<_>>())
}

fn distance(a: &Matrix, b: &Matrix) -> f64 {
    let largest = b.values.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let apart = a.values.iter().zip(&b.values).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    apart / largest
}

#[test]
fn pissa_begins_as_the_leading_singular_vectors_and_shares_them_out() {
    for (rank, targets) in [(2, "all-linear"), (3, "q,v,mlp.c_proj"), (6, "mlp.c_fc")] {
        for rslora in [false, true] {
            let spec = LoraSpec { rslora, ..spec(InitialFactors::Pissa, rank, targets) };
            let (set, values) = started(&spec);
            for number in (0..set.loras.len()).step_by(2) {
                let svd = Svd::of(&weight(&set, number));
                let (left, right) = svd.factors(rank);
                let (inputs, columns) = (left.len() / rank, right.len() / rank);
                let best = product(&wide(inputs, rank, &left), &wide(rank, columns, &right));
                assert!(distance(&delta(&set, &values, number), &best) < 1e-6, "{targets}");
                // Both factors have the root of the singular values, over the scale.
                let lora = &set.loras[number];
                for (k, s) in svd.values.iter().take(rank).enumerate() {
                    let a = &of(&set, &values, lora.a)[k * inputs..][..inputs];
                    let b = of(&set, &values, lora.b).iter().skip(k).step_by(rank);
                    let square = |values: &mut dyn Iterator<Item = &f32>| {
                        values.map(|x| f64::from(x * x)).sum::<f64>()
                    };
                    let expected = s / f64::from(lora.scale);
                    for found in [square(&mut a.iter()), square(&mut b.into_iter())] {
                        assert!((found - expected).abs() < 1e-5 * expected, "{found} {expected}");
                    }
                }
            }
        }
    }
}

#[test]
fn olora_begins_as_the_first_part_of_a_qr_decomposition() {
    let (set, values) = started(&spec(InitialFactors::Olora, 4, "all-linear,q".replace(",q", "").as_str()));
    for number in (0..set.loras.len()).step_by(2) {
        let lora = &set.loras[number];
        let (w, rank) = (transposed(&weight(&set, number)), lora.rank); // [outputs, inputs]
        let b = wide(lora.columns.len(), rank, of(&set, &values, lora.b));
        let eye = product(&transposed(&b), &b);
        for (at, x) in eye.values.iter().enumerate() {
            let expected = if at % rank == at / rank { 1.0 } else { 0.0 };
            assert!((x - expected).abs() < 1e-6, "{at}: {x}");
        }
        // B A = Q Q^T W^T, and the first columns of W^T are all in B's span.
        let projected = product(&product(&b, &transposed(&b)), &w);
        let a = wide(rank, w.cols, of(&set, &values, lora.a));
        let found = product(&b, &a);
        assert!(distance(&found, &projected) < 1e-6);
        for row in 0..w.rows {
            for column in 0..rank {
                let at = row * w.cols + column;
                assert!((found.values[at] - w.values[at]).abs() < 1e-5, "{row} {column}");
            }
        }
    }
}

#[test]
fn copies_are_frozen_and_leave_the_base_as_it_is_at_first() {
    for init in [InitialFactors::Pissa, InitialFactors::Olora] {
        let (set, values) = started(&spec(init, 3, "q,v,c_fc"));
        assert_eq!(set.loras.len(), 2 * 9);
        assert_eq!(2 * set.trainables(), set.layout.len);
        for pair in set.loras.chunks(2) {
            let [trained, copy] = pair else { panic!() };
            assert_eq!(
                (copy.scale, &copy.columns, copy.rank),
                (trained.scale, &trained.columns, trained.rank)
            );
            let name = |slot: usize| set.layout.tensors[slot].name.as_str();
            assert!(name(trained.b).ends_with("lora_B.weight") && name(copy.b).ends_with("lora_B0.weight"));
            assert_eq!(of(&set, &values, trained.a), of(&set, &values, copy.a));
            let negative: Vec<f32> = of(&set, &values, copy.b).iter().map(|b| -b).collect();
            assert_eq!(of(&set, &values, trained.b), negative);
        }
        let part = FoldPart { set: &set, values: &values, factor: 1.0 };
        let before = Drawn.matrix(0, 1).unwrap();
        let mut after = before.clone();
        Folding::new(vec![part]).unwrap().linear(1, 0, &mut after, &mut [0.0; 18]);
        assert!(before.iter().zip(&after).all(|(a, b)| (a - b).abs() < 1e-5));
        let lines = set.matched(&testing::base());
        assert_eq!(lines, ["attn.c_attn.q: layers 0-2", "attn.c_attn.v: layers 0-2", "mlp.c_fc: layers 0-2"]);
        // Nothing follows from the seed.
        assert_eq!(set.init_from(2, Some(&Drawn)).unwrap(), values);
        assert!(matches!(set.init(1), Err(Error::WeightsNeeded { method: "lora" })));
    }
}

#[test]
fn gaussian_and_orthogonal_begin_as_the_base() {
    let (set, values) = started(&spec(InitialFactors::Gaussian, 4, "all-linear"));
    let a: Vec<f32> = set.loras.iter().flat_map(|lora| of(&set, &values, lora.a).to_vec()).collect();
    let variance = a.iter().map(|a| a * a).sum::<f32>() / a.len() as f32;
    assert!((variance * 16.0 - 1.0).abs() < 0.2, "{variance}");
    assert!(set.loras.iter().all(|lora| of(&set, &values, lora.b).iter().all(|&b| b == 0.0)));

    let (set, values) = started(&spec(InitialFactors::Orthogonal, 6, "all-linear"));
    for number in 0..set.loras.len() {
        let lora = &set.loras[number];
        for slot in [lora.a, lora.b] {
            let size = of(&set, &values, slot).iter().map(|x| x * x).sum::<f32>() / 36.0;
            assert!(size > 1e-4, "{size}");
        }
        let largest = delta(&set, &values, number).values.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        assert!(largest < 1e-7, "{largest}");
        // X Q_1 has half of the directions: A is of rank 3.
        let a = Svd::of(&wide(6, set.layout.tensors[lora.a].shape[1], of(&set, &values, lora.a)));
        assert!(a.values[2] > 1e-2 && a.values[3] < 1e-7, "{:?}", a.values);
    }
    assert_ne!(set.init_from(2, Some(&Drawn)).unwrap(), values);
}

/// A plain LoRA of twice the rank for PEFT, and both halves again for us.
#[test]
fn files_are_a_plain_lora_and_our_own_split_comes_back() {
    let base = testing::base();
    let patterned = |init, rslora| {
        let mut spec = LoraSpec { rslora, ..spec(init, 2, "q,v,mlp.c_proj,wte") };
        spec.rank_pattern.insert("h.1.mlp.c_proj".to_owned(), 4);
        spec.alpha_pattern.insert("wte".to_owned(), 3.0);
        spec
    };
    let whole = spec(InitialFactors::Pissa, 3, "c_attn");
    for spec in [patterned(InitialFactors::Pissa, true), patterned(InitialFactors::Olora, false), whole] {
        let (set, mut values) = started(&spec);
        // As after some steps.
        values.iter_mut().enumerate().for_each(|(at, x)| *x += 0.1 * rng::normal(5, at as u64));
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("adapter");
        peft::save(&dir, &set, &values, None, &base).unwrap();
        let text = std::fs::read_to_string(dir.join(peft::CONFIG_FILE)).unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(config["init_lora_weights"], json!(true));
        let loaded = peft::load(&dir, &base, false).unwrap();
        assert_eq!((&loaded.set, &loaded.values), (&set, &values));
        assert!(loaded.hints.is_empty(), "{:?}", loaded.hints);

        // Without our note, as PEFT reads it: the same weights.
        let file = dir.join(peft::TENSOR_FILE);
        let mut bytes = std::fs::read(&file).unwrap();
        let at = bytes.windows(13).position(|window| window == b"\"engraft.lora").unwrap();
        bytes[at + 1] = b'x';
        std::fs::write(&file, bytes).unwrap();
        let plain = peft::load(&dir, &base, false).unwrap();
        assert!(plain.set.spec.lora.as_ref().unwrap().init_lora_weights.is_default());
        assert_eq!(plain.set.embedding.is_some(), set.embedding.is_some());
        assert_eq!(plain.set.embedding.as_ref().map(|e| e.scale), set.embedding.as_ref().map(|e| e.scale));
        for (layer, site) in [(0, 0), (1, 3), (2, 3)] {
            let folded = |set: &AdapterSet, values: &[f32]| {
                let shape = &base.sites[site];
                let mut weight = vec![0.0; shape.inputs * shape.outputs];
                let part = FoldPart { set, values, factor: 1.0 };
                Folding::new(vec![part]).unwrap().linear(
                    layer,
                    site,
                    &mut weight,
                    &mut vec![0.0; shape.outputs],
                );
                wide(shape.inputs, shape.outputs, &weight)
            };
            let (ours, theirs) = (folded(&set, &values), folded(&plain.set, &plain.values));
            let is_adapted = set.loras.iter().any(|lora| (lora.layer, lora.site) == (layer, site));
            assert!(!is_adapted || distance(&theirs, &ours) < 1e-6);
        }
        let shown = peft::describe(&dir).unwrap();
        assert!(shown.adapters[0].unsupported.is_empty());
    }
}

#[test]
fn names_are_peft_s() {
    for (text, expected) in [
        ("pissa", InitialFactors::Pissa),
        ("PiSSA", InitialFactors::Pissa),
        ("pissa_niter_16", InitialFactors::Pissa),
        ("true", InitialFactors::Default),
        ("olora", InitialFactors::Olora),
    ] {
        assert_eq!(text.parse::<InitialFactors>().unwrap(), expected);
    }
    assert!("pissa_niter_".parse::<InitialFactors>().is_err());
    assert!("eva".parse::<InitialFactors>().unwrap_err().contains("olora"));
    let spec: LoraSpec = serde_json::from_str(r#"{"init_lora_weights": "pissa"}"#).unwrap();
    assert_eq!(spec.init_lora_weights, InitialFactors::Pissa);
    assert!(!serde_json::to_string(&LoraSpec::default()).unwrap().contains("init"));
}

#[test]
fn what_cannot_begin_so_is_refused() {
    let refused = |spec: LoraSpec, words: &str| {
        let error = resolve(spec).unwrap_err();
        let text = error.to_string();
        assert!(error.is_input() && text.contains(words), "{text}");
    };
    refused(spec(InitialFactors::Pissa, 7, "c_fc"), "init_lora_weights: pissa takes as many directions");
    refused(spec(InitialFactors::Olora, 7, "q"), "it has 6; lower the rank");
    refused(spec(InitialFactors::Orthogonal, 3, "q"), "needs even ranks");
    let dropping = LoraSpec { dropout: 0.1, ..spec(InitialFactors::Olora, 2, "q") };
    refused(dropping, "leave the dropout out");
    let negative = LoraSpec { alpha: -1.0, ..spec(InitialFactors::Pissa, 2, "q") };
    refused(negative, "needs an alpha above 0");
    // With norms of columns, all of the same set, they are what PEFT computes, too.
    let dora = DoraSpec { lora: spec(InitialFactors::Pissa, 2, "c_fc") };
    let set = resolve(dora).unwrap();
    assert_eq!((set.loras.len(), set.vectors.len()), (6, 3));
}
