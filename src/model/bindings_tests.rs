//! Bindings of sets that are made by hand, and where their values lie in the flat store.

use engraft_adapters::{AdapterSpec, Group, Layout, Lora, NormVectors, Prompt, TensorSlot};

use super::*;

/// A set by hand: deltas on two layers that share a frozen A and d; one has a frozen e.
fn set() -> AdapterSet {
    let sizes = [("A", 6, 1), ("B0", 8, 0), ("B1", 8, 0), ("d", 2, 0), ("e", 4, 1)];
    let mut layout = Layout { groups: vec![Group::DEFAULT, Group::FROZEN], ..Layout::default() };
    for (name, len, group) in sizes {
        let (name, shape, offset) = (name.to_owned(), vec![len], layout.len);
        layout.tensors.push(TensorSlot { name, shape, offset, group, method: "by hand" });
        layout.len += len;
    }
    let lora = |layer: usize, b: usize| Lora {
        layer,
        site: 2,
        part: None,
        columns: 0..4,
        rank: 2,
        alpha: 1.0,
        scale: 0.5,
        a: 0,
        b,
        d: Some(3),
        e: (layer == 0).then_some(4),
    };
    AdapterSet {
        spec: AdapterSpec::default(),
        layout,
        loras: vec![lora(0, 1), lora(1, 2)],
        vectors: Vec::new(),
        norms: Vec::new(),
        embedding: None,
        prefix: None,
        prompt: None,
        allocation: None,
    }
}

#[test]
fn every_part_of_a_delta_is_bound_to_its_place_in_the_store() {
    let set = set();
    let bindings = AdapterBindings::new(&[(&set, 1.0), (&set, 0.5)], 3).unwrap();
    assert_eq!((bindings.len, bindings.lowest()), (2 * 28, 0));
    let [first, second] = [0, 1].map(|layer| &bindings.layers[layer][2].deltas);
    let expected = Delta {
        a: 0,
        b: 6,
        rank: 2,
        columns: 0..4,
        scale: 0.5,
        d: Some(Vector::trained(22)),
        e: Some(Vector::frozen(24)),
        a_frozen: true,
        mask: Some(28),
        ..Delta::default()
    };
    assert_eq!(first[0], expected);
    assert_eq!((second[0].a, second[0].b, second[0].e), (0, 14, None), "A is shared");
    assert_ne!(second[0].mask, first[0].mask, "one mask each");
    assert_eq!((second[1].a, second[1].b, second[1].scale), (28, 42, 0.25));
    assert_eq!(second[1].d, Some(Vector::trained(28 + 22)));
}

fn vectors(u: Option<usize>, g: Option<OutputScale>, bias: Option<usize>) -> engraft_adapters::SiteVectors {
    engraft_adapters::SiteVectors { layer: 1, site: 2, u, g, bias }
}

#[test]
fn vectors_of_a_site_are_bound_once() {
    let g = OutputScale { vector: 4, over_norms: false, with_bias: true };
    let scales = AdapterSet { loras: vec![], vectors: vec![vectors(Some(3), Some(g), None)], ..set() };
    let bias = AdapterSet { loras: vec![], vectors: vec![vectors(None, None, Some(4))], ..set() };
    let bindings = AdapterBindings::new(&[(&scales, 1.0), (&bias, 1.0)], 3).unwrap();
    let site = &bindings.layers[1][2];
    let scaling = |vector, len| Some(Scaling { vector, columns: 0..len, tokens: None });
    assert_eq!(site.u, scaling(Vector::trained(22), 2));
    assert_eq!(site.g, scaling(Vector::frozen(24), 4));
    assert_eq!((site.bias, site.bias_place), (Some(Vector::frozen(28 + 24)), BiasPlace::Inside));
    assert_eq!(bindings.lowest(), 1);
    for twice in [&scales, &bias] {
        let error = AdapterBindings::new(&[(twice, 1.0), (twice, 1.0)], 3).unwrap_err().to_string();
        assert!(error.contains("same module"), "{error}");
    }
}

#[test]
fn output_scales_over_norms_come_after_the_values_of_all_sets() {
    let g = |vector| OutputScale { vector, over_norms: true, with_bias: false };
    let both = vec![
        engraft_adapters::SiteVectors { layer: 0, ..vectors(None, Some(g(4)), None) },
        vectors(None, Some(g(1)), None),
    ];
    let (own, other) = (AdapterSet { vectors: both, ..set() }, AdapterSet { loras: vec![], ..set() });
    let bindings = AdapterBindings::new(&[(&other, 1.0), (&own, 1.0)], 3).unwrap();
    assert_eq!((bindings.len, bindings.store_len()), (2 * 28, 2 * 28 + 4 + 8));
    let found = bindings.derived.iter().map(|one| (one.layer, one.magnitude, one.at, one.columns));
    let (frozen, trained) = (Vector::frozen(28 + 24), Vector::trained(28 + 6));
    assert_eq!(found.collect::<Vec<_>>(), [(0, frozen, 56, 4), (1, trained, 60, 8)]);
    let g = |layer: usize| bindings.layers[layer][2].g.clone().unwrap();
    assert_eq!((g(0).vector, g(0).columns), (Vector::frozen(56), 0..4));
    assert_eq!((g(1).vector, g(1).columns), (Vector::trained(60), 0..8));
    // Deltas of another set would be a part of the norms.
    for sets in [[(&own, 1.0), (&set(), 1.0)], [(&set(), 1.0), (&own, 1.0)]] {
        let error = AdapterBindings::new(&sets, 3).unwrap_err().to_string();
        assert!(error.contains("norms of its columns"), "{error}");
    }
}

#[test]
fn norms_are_bound_once_and_count_for_the_lowest_layer() {
    let norm = |layer, gain, bias| NormVectors { layer, norm: 0, gain, bias };
    let of = |norms| AdapterSet { loras: vec![], norms, ..set() };
    let all = of(vec![norm(Some(1), Some(4), None), norm(Some(2), None, Some(3)), norm(None, Some(3), None)]);
    let bias = of(vec![norm(Some(1), None, Some(3)), norm(None, None, Some(3))]);
    let bindings = AdapterBindings::new(&[(&all, 1.0), (&bias, 1.0)], 3).unwrap();
    let [gain, first] = [Vector::frozen(24), Vector::trained(28 + 22)].map(Some);
    assert_eq!(bindings.norms.layers[1][0], NormBinding { gain, bias: first });
    assert_eq!(bindings.norms.last, NormBinding { gain: Some(Vector::trained(22)), bias: first });
    assert_eq!(bindings.norms.layers[1][1], NormBinding::default());
    assert_eq!(bindings.lowest(), 1);
    let lowest = |norms| AdapterBindings::new(&[(&of(norms), 1.0)], 3).unwrap().lowest();
    assert_eq!(lowest(all.norms.clone()), 2, "a frozen gain trains nothing");
    assert_eq!(lowest(vec![norm(None, Some(3), None)]), 3, "the last norm is in no layer");
    for twice in [&of(vec![norm(None, Some(3), None)]), &bias] {
        let error = AdapterBindings::new(&[(twice, 1.0), (twice, 1.0)], 3).unwrap_err().to_string();
        assert!(error.contains("same layer norm"), "{error}");
    }
}

#[test]
fn deltas_that_share_nothing_have_the_masks_of_their_factors() {
    let mut set = set();
    set.loras.pop();
    let bindings = AdapterBindings::new(&[(&set, 1.0)], 3).unwrap();
    assert_eq!(bindings.layers[0][2].deltas[0].mask, None);
}

#[test]
fn the_lowest_layer_is_the_first_with_anything_trainable() {
    let mut set = set();
    set.loras[0].d = None;
    set.layout.tensors[1].group = 1;
    assert_eq!(AdapterBindings::new(&[(&set, 1.0)], 3).unwrap().lowest(), 1);
    set.layout.groups[1] = Group::DEFAULT;
    assert_eq!(AdapterBindings::new(&[(&set, 1.0)], 3).unwrap().lowest(), 0);
}

#[test]
fn shared_factors_are_transposed_once() {
    let config = Config { width: 3, inner: 4, ..crate::model::builtin::builtin("gpt2").unwrap().unwrap() };
    let mut bindings = AdapterBindings::new(&[(&set(), 1.0)], 3).unwrap();
    let mut values: Vec<f32> = (0..28u8).map(f32::from).collect();
    let before = values.clone();
    bindings.transpose_factors(&mut values, &config);
    assert_eq!(values[..6], [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    assert_eq!(values[6..14], [6.0, 8.0, 10.0, 12.0, 7.0, 9.0, 11.0, 13.0]);
    assert_eq!(values[22..], before[22..], "vectors have no other layout");
    assert!(bindings.layers.iter().flatten().flat_map(|site| &site.deltas).all(|delta| delta.transposed));
    let mut other = AdapterBindings::new(&[(&set(), 1.0)], 3).unwrap();
    other.layers[1][2].deltas[0].a = 6;
    let mut values = before.clone();
    other.transpose_factors(&mut values, &config);
    assert_eq!(values, before, "B of one delta is A of the other, in another shape");
}

#[test]
fn the_embedding_is_bound_to_its_places_in_the_store() {
    let delta = engraft_adapters::EmbeddingDelta { rank: 2, scale: 1.5, a: 0, b: 1 };
    let prompt = Some(Prompt { length: 3, embeddings: 2 });
    let empty = AdapterSet { loras: vec![], ..set() };
    let deltas = AdapterSet { embedding: Some(delta), ..empty.clone() };
    let bindings = AdapterBindings::new(&[(&deltas, 1.0), (&deltas, 0.5)], 3).unwrap();
    let expected = EmbeddingDelta { a: Vector::frozen(0), b: Vector::trained(6), rank: 2, scale: 1.5 };
    let second = EmbeddingDelta { a: Vector::frozen(28), b: Vector::trained(34), scale: 0.75, ..expected };
    assert_eq!(bindings.embedding.deltas, [expected, second]);
    assert_eq!((bindings.lowest(), bindings.prompt_len()), (0, 0));
    let prompts = AdapterSet { prompt: prompt.clone(), ..empty.clone() };
    let bindings = AdapterBindings::new(&[(&deltas, 1.0), (&prompts, 0.5)], 3).unwrap();
    let rows = Vector::trained(28 + 14);
    assert_eq!(bindings.embedding.prompt, Some(PromptBinding { length: 3, rows }));
    assert_eq!((bindings.lowest(), bindings.prompt_len()), (0, 3));
    let error = AdapterBindings::new(&[(&prompts, 1.0), (&prompts, 1.0)], 3).unwrap_err().to_string();
    assert!(error.contains("bring a prompt"), "{error}");
    // Nothing in front of the layers is trained.
    let mut frozen = AdapterSet { prompt, ..empty };
    frozen.layout.tensors[2].group = 1;
    assert_eq!(AdapterBindings::new(&[(&frozen, 1.0)], 3).unwrap().lowest(), 3);
}
