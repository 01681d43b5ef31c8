//! Tests of the resolved set: order, offsets, names, lines for the user.

use crate::{AdapterSet, AdapterSpec, LoraSpec, PrefixSpec, PrefixValues, testing};

fn set(targets: &str, prefix: Option<PrefixSpec>) -> AdapterSet {
    let lora = LoraSpec { rank: 4, targets: targets.parse().unwrap(), ..LoraSpec::default() };
    AdapterSet::new(&AdapterSpec { lora: Some(lora), prefix, ..AdapterSpec::default() }, &testing::base())
        .unwrap()
}

#[test]
fn the_layout_is_packed_in_layer_site_part_order() {
    let set = set("q,v,c_fc", Some(PrefixSpec { length: 5, projection: None }));
    let names: Vec<_> = set.layout.tensors.iter().map(|slot| slot.name.as_str()).collect();
    assert_eq!(
        names[..6],
        [
            "base_model.model.transformer.h.0.attn.c_attn.q.lora_A.weight",
            "base_model.model.transformer.h.0.attn.c_attn.q.lora_B.weight",
            "base_model.model.transformer.h.0.attn.c_attn.v.lora_A.weight",
            "base_model.model.transformer.h.0.attn.c_attn.v.lora_B.weight",
            "base_model.model.transformer.h.0.mlp.c_fc.lora_A.weight",
            "base_model.model.transformer.h.0.mlp.c_fc.lora_B.weight",
        ]
    );
    assert_eq!(*names.last().unwrap(), "prompt_embeddings");
    let mut end = 0;
    for slot in &set.layout.tensors {
        assert_eq!(slot.offset, end);
        end += slot.len();
    }
    assert_eq!((end, set.trainables()), (set.layout.len, set.layout.len));
    // Per layer: q and v (4*6 + 6*4 each), c_fc (4*6 + 24*4); prefix 5 * 2*3*6.
    assert_eq!(end, 3 * (2 * 48 + 120) + 180);
}

#[test]
fn a_part_adds_to_its_own_columns() {
    let set = set("q,v", None);
    assert_eq!(set.loras[1].columns, 12..18);
    assert_eq!(set.loras[1].part.as_deref(), Some("v"));
    assert_eq!(set.layout.tensors[set.loras[1].a].shape, [4, 6]);
    assert_eq!(set.layout.tensors[set.loras[1].b].shape, [6, 4]);
    assert_eq!(set.loras[1].scale, 4.0);
}

#[test]
fn a_projection_has_five_tensors() {
    let spec = PrefixSpec { length: 5, projection: Some(7) };
    let set = AdapterSet::new(&spec.into(), &testing::base()).unwrap();
    let shapes: Vec<_> = set.layout.tensors.iter().map(|slot| slot.shape.clone()).collect();
    assert_eq!(shapes, [vec![5, 6], vec![7, 6], vec![7], vec![36, 7], vec![36]]);
    let prefix = set.prefix.unwrap();
    assert!(matches!(prefix.values, PrefixValues::Projected { hidden: 7, out_bias: 4, .. }));
}

#[test]
fn matched_lines_name_layers_parts_and_other_ranks() {
    let base = testing::base();
    let lines = set("q,c_fc", Some(PrefixSpec { length: 5, projection: None })).matched(&base);
    assert_eq!(
        lines,
        ["attn.c_attn.q: layers 0-2", "mlp.c_fc: layers 0-2", "prefix of 5 virtual tokens: layers 0-2"]
    );
    let mut lora = LoraSpec { layers: Some(vec![0, 2]), ..LoraSpec::default() };
    lora.rank_pattern.insert("h.2.attn.c_attn".to_owned(), 3);
    let set = AdapterSet::new(&lora.into(), &base).unwrap();
    assert_eq!(set.matched(&base), ["attn.c_attn: layer 0", "attn.c_attn: layer 2 (rank 3)"]);
    assert_eq!(super::layer_ranges(&[0, 2, 3, 4, 7]), "layers 0, 2-4, 7");
}
