//! A base in 4 bits: the values of bitsandbytes, its cache, and a model that computes with the values that codes stand
//! for.

use std::{fs, path::Path, sync::Arc};

use engraft::{
    device::arena::Placement,
    kernels::{
        matmul::FrozenMatrix,
        nf4::{self, BLOCK, Nf4, Sizes, VALUES},
    },
    model::{Base, BaseDType, BaseSource, Policy, Recompute},
    plan::BaseBytes,
};
use half::f16;
use safetensors::SafeTensors;
use tempfile::TempDir;

use crate::{
    base_files::{files, golden},
    cli_support::{Sandbox, files_below, planned_for},
    q8::{ODD, base_with, has_the_bits_of, trained},
    setup::{cases, random_base, within},
};

/// Bound of docs/NUMERICS.md: what 4 bits cost the embedded base on its held-out data, relative.
const EMBEDDED_LOSS: f64 = 3e-2;

fn load(source: &BaseSource, cache: &Path) -> Base {
    Base::load_as(source, "coded", cache, BaseDType::Nf4).unwrap()
}

/// Matrices of the linear layers.
fn matrices(base: &Base) -> Vec<&FrozenMatrix> {
    base.weights.blocks.iter().flat_map(|block| block.linears().map(|linear| &linear.weight)).collect()
}

/// The tensors that bitsandbytes made (`tests/golden/make_nf4.py`).
fn made() -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/nf4.safetensors")).unwrap()
}

fn floats(file: &SafeTensors, name: &str) -> Vec<f32> {
    file.tensor(name).unwrap().data().as_chunks().0.iter().map(|&four| f32::from_le_bytes(four)).collect()
}

fn to_bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn both_tables_are_those_of_bitsandbytes() {
    let bytes = made();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(to_bits(nf4::book()), to_bits(&floats(&file, "book")));
    assert_eq!(to_bits(&VALUES), to_bits(&floats(&file, "values")));
}

/// Codes, offset, factors and dequantised values bit for bit. bitsandbytes' CPU kernel finds the code of a scale in a
/// table of steps of 3e-5, so near a border between two codes it may take the farther one.
#[test]
fn codes_scales_and_values_are_those_of_bitsandbytes() {
    let bytes = made();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (mut scales, mut other) = (0, 0);
    for name in ["small", "tall", "wide"] {
        let of = |part: &str| format!("{name}.{part}");
        let weight = file.tensor(&of("weight")).unwrap();
        let &[rows, cols] = weight.shape() else { panic!("a matrix") };
        let values: Vec<f32> =
            weight.data().as_chunks().0.iter().map(|&two| f16::from_le_bytes(two).to_f32()).collect();
        let sizes = Sizes { rows, cols };
        let coded = nf4::quantise(&values, sizes);
        // Theirs go down the columns, two a byte, the first in the high bits.
        let packed = file.tensor(&of("codes")).unwrap();
        for at in 0..rows * cols {
            let (row, column) = (at % rows, at / rows);
            let theirs = (packed.data()[at / 2] >> (4 * (1 - at % 2))) & 15;
            let word = &coded.codes[Nf4::word_at(sizes, row, column)..];
            let ours = (word[row % 4] >> (4 * (row / 4 % 2))) & 15;
            assert_eq!(ours, theirs, "{name}: row {row}, column {column}");
        }
        let mut nested = floats(&file, &of("offset"));
        nested.extend(floats(&file, &of("factors")));
        assert_eq!(to_bits(&coded.nested), to_bits(&nested), "{name}");
        let of_scales = file.tensor(&of("scales")).unwrap().data();
        let book = nf4::book();
        for (at, (&ours, &theirs)) in coded.scales.iter().zip(of_scales).enumerate() {
            let (row, column) = (at % sizes.blocks() * BLOCK, at / sizes.blocks());
            let block = (row..row + BLOCK).map(|row| values[row * cols + column].abs());
            let x = (block.fold(0f32, f32::max) - nested[0]) / nested[1 + at / nf4::NESTED];
            let distance = |code: u8| (f64::from(x) - f64::from(book[usize::from(code)])).abs();
            assert!(distance(ours) <= distance(theirs) + 1e-7, "{name}: scale {at} has code {ours}");
            assert!(
                distance(theirs) <= distance(ours) + 3.1e-5,
                "{name}: scale {at} has code {ours}, not {theirs}"
            );
            scales += 1;
            other += usize::from(ours != theirs);
        }
        // With the same codes of scales every value is the same.
        let theirs = Nf4 { scales: of_scales, ..coded.view() };
        let mut found = vec![f32::NAN; rows * cols];
        theirs.widen(0..rows, 0..cols, &mut found);
        assert_eq!(to_bits(&found), to_bits(&floats(&file, &of("dequantised"))), "{name}");
    }
    println!("{other} of {scales} scales have another code");
    assert!(other * 100 <= scales, "{other} of {scales} scales have another code");
}

#[test]
fn linear_layers_are_coded_and_nothing_else() {
    let random = random_base(ODD, "gelu_new");
    let cache = tempfile::tempdir().unwrap();
    let coded = load(&random.base.source, cache.path());
    let (four, halves) = (&coded.weights, &random.base.weights);
    assert_eq!(four.fingerprint, halves.fingerprint);
    assert!(four.wte.scales.is_none() && four.head().scales.is_none());
    assert_eq!(four.wte.view().to_floats(), halves.wte.view().to_floats());
    let mut bytes =
        four.wte.data.bytes() + four.wpe.bytes() + four.ln_f.gain.bytes() + four.ln_f.bias.bytes();
    bytes += four.blocks.iter().flat_map(|block| block.tensors()).map(|tensor| tensor.bytes()).sum::<usize>();
    assert_eq!(bytes as u64, BaseBytes::of(&coded.config, BaseDType::Nf4).total());
    for (coded, halves) in matrices(&coded).into_iter().zip(matrices(&random.base)) {
        let (sizes, values) = (Sizes { rows: coded.rows, cols: coded.cols }, halves.view().to_floats());
        let expected = nf4::quantise(&values, sizes);
        let mut floats = vec![0f32; values.len()];
        expected.view().widen(0..sizes.rows, 0..sizes.cols, &mut floats);
        assert_eq!(coded.view().to_floats(), floats);
        // Half of the widest gap is 0.152 of a scale.
        let largest = values.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert!(floats.iter().zip(&values).all(|(found, value)| (found - value).abs() < 0.17 * largest));
        assert!(floats != values);
    }
    let written = files(cache.path());
    for name in ["fingerprint-nf4", "model-nf4.safetensors"] {
        assert!(written.iter().any(|file| file == name), "{written:?}");
    }
    // A second load finds the copy.
    let entry = fs::read_dir(cache.path()).unwrap().map(|entry| entry.unwrap().path());
    let model = entry.map(|folder| folder.join("model-nf4.safetensors")).find(|file| file.exists()).unwrap();
    let when = || fs::metadata(&model).unwrap().modified().unwrap();
    let before = when();
    let again = load(&random.base.source, cache.path());
    assert_eq!(when(), before);
    for (again, first) in matrices(&again).into_iter().zip(matrices(&coded)) {
        assert_eq!(again.data.view().bytes(), first.data.view().bytes());
    }
    let untied = BaseSource::Folder(golden("untied"));
    assert!(load(&untied, cache.path()).weights.head().scales.is_none());
}

/// A base whose matrices 4 bits can say exactly: -1, 0 and 1 times one power of two, in every block.
fn exact_base() -> (Arc<Base>, TempDir) {
    base_with(|name, cols, values| {
        if !name.contains(".h.") {
            return;
        }
        let size = values.iter().map(|x| x.abs()).sum::<f32>() / values.len() as f32;
        for (at, value) in values.iter_mut().enumerate() {
            // The first of each block is not 0.
            let kept = (at / cols).is_multiple_of(BLOCK) || value.abs() > size;
            *value = if kept { 0.0625f32.copysign(*value) } else { 0.0 };
        }
    })
}

/// Other values of the table have 24 bits, which FP16 has not; `matmul/tests.rs` compares their products with sums in
/// f64.
#[test]
fn a_model_of_the_same_values_is_the_same_model() {
    let (halves, folder) = exact_base();
    let coded = Arc::new(load(&halves.source, &folder.path().join("cache")));
    for (coded, halves) in matrices(&coded).into_iter().zip(matrices(&halves)) {
        assert_eq!(coded.view().to_floats(), halves.view().to_floats());
    }
    has_the_bits_of(&coded, &halves);
}

#[test]
fn streaming_recompute_and_offloading_change_no_bit_of_a_4_bit_base() {
    let random = random_base(ODD, "gelu_new");
    let cache = tempfile::tempdir().unwrap();
    let coded = Arc::new(load(&random.base.source, cache.path()));
    let case = &cases(&coded, 0.0)[3];
    let plain = trained(&coded, case, Policy::default());
    let (memory, disk) = (Placement::Memory, Placement::Disk);
    for (recompute, stream, inputs, moments) in [
        (Recompute::None, true, memory, memory),
        (Recompute::All, false, memory, memory),
        (Recompute::None, false, memory, disk),
        (Recompute::All, false, disk, memory),
        (Recompute::All, true, disk, disk),
    ] {
        let policy = Policy { recompute, stream, inputs, moments, ..Policy::default() };
        assert_eq!(trained(&coded, case, policy), plain, "{policy:?}");
    }
    assert!(trained(&random.base, case, Policy::default()) != plain);
}

#[test]
fn four_bits_cost_the_embedded_base_little() {
    let sandbox = Sandbox::new();
    let loss = |line: &str| {
        let found = sandbox.engraft(&format!("eval --json {line}")).succeeds().events();
        found[0]["loss"].as_f64().unwrap()
    };
    let (halves, coded) = (loss("--base-dtype f16"), loss("--base-dtype nf4"));
    println!("loss of the embedded base: {halves} in FP16, {coded} in 4 bits");
    assert!(coded != halves);
    within((coded / halves - 1.0).abs(), EMBEDDED_LOSS, "loss of the embedded base in 4 bits");
}

#[test]
fn a_run_on_4_bits_resumes_exactly_and_its_adapter_fits_every_base() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 4 --base-dtype nf4").succeeds();
    sandbox
        .engraft("train --resume --output run --steps 6 --base-dtype q8 --json")
        .refused(&["--resume run", "--base-dtype is \"q8\" (the run has \"nf4\")"]);
    let rest = sandbox.engraft("train --resume --output run --steps 6 --json").succeeds();
    assert_eq!(rest.events_of("step").len(), 2);
    let whole = Sandbox::new();
    whole.train("--steps 6 --base-dtype nf4").succeeds();
    let again = Sandbox::new();
    again.train("--steps 6 --base-dtype nf4 --recompute all").succeeds();
    assert!(files_below(&whole.path("run/adapter")) == files_below(&again.path("run/adapter")));
    let mut losses = ["f16", "q8", "nf4"].map(|dtype| {
        let line =
            format!("eval --data data.jsonl --split train --adapter run/adapter --base-dtype {dtype} --json");
        whole.engraft(&line).succeeds().events()[0]["loss"].as_f64().unwrap()
    });
    losses.sort_by(f64::total_cmp);
    assert!(losses[2] > losses[0] && losses[2] < 1.05 * losses[0], "{losses:?}");
    let line =
        "generate --adapter run/adapter --prompt row --max-new-tokens 5 --base-dtype nf4 --temperature 0";
    whole.infer(line).succeeds();
    whole
        .engraft("merge --adapter run/adapter --output merged --base-dtype nf4")
        .refused(&["--base-dtype nf4"]);
}

#[test]
fn plans_know_that_it_is_at_most_a_third_of_the_base() {
    let sandbox = Sandbox::new();
    let base_on = |device: &str, dtype: &str| -> u64 {
        let line = format!(
            "plan --base gpt2-xl --seq-len 128 --memory 16GiB --json --device {device} --base-dtype {dtype}"
        );
        planned_for(&sandbox.engraft(&line).succeeds().events()[0], "base")
    };
    let base = |dtype: &str| base_on("cpu", dtype);
    let (halves, four) = (base("f16"), base("nf4"));
    assert_eq!(halves, 2 * 1_557_611_200);
    // Of 48 blocks with 12 c^2 weights half a byte each, a byte for 64, and 4 bytes for 64 x 256 and for an offset.
    let weights: u64 = 48 * 12 * 1600 * 1600;
    let factors: u64 = [3, 1, 4, 4].map(|wide: u64| (wide * 1600 * 1600 / 64).div_ceil(256)).iter().sum();
    let rest = 2 * (1_557_611_200 - weights);
    assert_eq!(four, weights / 2 + weights / 64 + 48 * 4 * (factors + 4) + rest);
    assert!(four as f64 <= 0.32 * halves as f64, "{four} of {halves}");
    // On a device rows of zeros follow the head, and every tensor begins at a multiple of 256 bytes.
    let (halves, on_device) = (base_on("cuda", "f16"), base_on("cuda", "nf4"));
    let (more, tensors) = (on_device - four, 48 * 16 + 5);
    assert!((150_400..150_400 + 256 * tensors).contains(&more), "{more} bytes more");
    assert!(on_device as f64 <= 0.32 * halves as f64, "{on_device} of {halves}");
}
