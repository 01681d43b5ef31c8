//! PiSSA against PEFT: what it starts from, how it trains, and the plain LoRA that is made of it.

use std::path::PathBuf;

use candle_core::{Device, Tensor};
use engraft_adapters::{AdapterSet, InitialFactors, LoraSpec, TensorSlot, peft};

use super::{Case, base, check_all, difference, golden, load};

/// PEFT trains A and B on a base without their initial values, and converts them to a LoRA of twice the rank on saving:
/// `[A; A0]`, `[B, -B0]`. Here A0 and -B0 are frozen beside them.
#[test]
fn pissa_matches_peft() {
    let base = base("tiny");
    let converted = load("lora_pissa", &base, str::to_owned);
    let lora = LoraSpec {
        rank: 3,
        alpha: 7.0,
        targets: "c_attn,mlp.c_proj".parse().unwrap(),
        init_lora_weights: InitialFactors::Pissa,
        ..LoraSpec::default()
    };
    let set = AdapterSet::new(&lora.into(), &base.description()).unwrap();
    let initial = set.init_from(1, Some(base.as_ref())).unwrap();
    let mut values = initial.clone();
    let mut worst = 0f64;
    for pair in set.loras.chunks(2) {
        let [trained, copy] = pair else { panic!("a delta and its copy") };
        let (a, b) = (&set.layout.tensors[trained.a], &set.layout.tensors[trained.b]);
        let whole = |slot: &TensorSlot| {
            let found = converted.set.layout.slot(&slot.name).unwrap();
            &converted.values[found.range()]
        };
        let (own, rest) = whole(a).split_at(a.len());
        values[a.range()].copy_from_slice(own);
        values[set.layout.tensors[copy.a].range()].copy_from_slice(rest);
        for (row, both) in whole(b).chunks(6).enumerate() {
            values[b.offset + 3 * row..][..3].copy_from_slice(&both[..3]);
            values[set.layout.tensors[copy.b].offset + 3 * row..][..3].copy_from_slice(&both[3..]);
        }
        // What PEFT began with is what begins here, but for signs that A and B share: B0 A0 is compared.
        let product = |values: &[f32]| -> Vec<f64> {
            let (a, b) =
                (&values[set.layout.tensors[copy.a].range()], &values[set.layout.tensors[copy.b].range()]);
            let inputs = a.len() / 3;
            let at = |row: &[f32], i: usize| {
                (0..3).map(|k| f64::from(row[k]) * f64::from(a[k * inputs + i])).sum()
            };
            b.chunks(3).flat_map(|row| (0..inputs).map(move |i| at(row, i))).collect()
        };
        let found: Vec<f32> = product(&initial).into_iter().map(|x| x as f32).collect();
        worst = worst.max(difference(&found, &product(&values)));
    }
    assert!(worst < 1e-5, "the singular vectors that PEFT starts from: {worst:.1e}");
    let case = Case { name: "lora_pissa", set, values, golden_name: str::to_owned };
    check_all(&case, &base);
    // Written out, it is PEFT's conversion bit for bit.
    let folder = tempfile::tempdir().unwrap();
    peft::save(&folder.path().join("a"), &case.set, &case.values, None, &base.description()).unwrap();
    let written = peft::load(&folder.path().join("a"), &base.description(), false).unwrap();
    assert_eq!((&written.set, &written.values), (&case.set, &case.values));
    let read = |path: PathBuf| candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let theirs = read(golden("cases/lora_pissa/adapter/adapter_model.safetensors"));
    let ours = read(folder.path().join("a/adapter_model.safetensors"));
    assert_eq!(ours.len(), theirs.len());
    for (name, tensor) in ours {
        let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!((tensor.dims(), flat(&tensor)), (theirs[&name].dims(), flat(&theirs[&name])), "{name}");
    }
}
