//! A base in 8 bits: its codes, its cache, and a model that computes with the values they stand for.

use std::{fs, path::Path, sync::Arc};

use engraft::{
    device::{Frozen, arena::Arenas},
    engine::{Trainer, TrainerOptions},
    kernels::{
        matmul::FrozenMatrix,
        q8::{BLOCK, blocks},
    },
    model::{AdapterBindings, Base, BaseDType, BaseSource, Decoder, Policy},
    optim::{AdamWOptions, OptimizerKind},
    plan::BaseBytes,
};
use half::f16;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    base_files::{files, folder, golden, values, write_config},
    cli_support::{Sandbox, files_below, planned_for},
    setup::{Case, RandomBase, Sizes, TrainerState, batch, bits, cases, random_base, row, state, within},
};

/// Bound of docs/NUMERICS.md: what 8 bits cost the embedded base on its held-out data, relative.
const EMBEDDED_LOSS: f64 = 5e-3;

/// Rows of less than a block, of blocks and of a bit more.
pub const ODD: Sizes = Sizes { layers: 2, heads: 5, width: 35, inner: 70, positions: 40, vocab: 97 };

fn load(source: &BaseSource, cache: &Path) -> Base {
    Base::load_as(source, "coded", cache, BaseDType::Q8).unwrap()
}

/// Every matrix of a base that products are made with.
fn matrices(base: &Base) -> Vec<&FrozenMatrix> {
    let weights = &base.weights;
    let mut all = vec![&weights.wte];
    all.extend(&weights.head);
    for block in &weights.blocks {
        let sites = [&block.c_attn, &block.attn_proj, &block.c_fc, &block.mlp_proj];
        all.extend(sites.map(|linear| &linear.weight));
    }
    all
}

/// All other matrices.
fn vectors(base: &Base) -> Vec<&Frozen> {
    let weights = &base.weights;
    let mut all = vec![&weights.wpe, &weights.ln_f.gain, &weights.ln_f.bias];
    for block in &weights.blocks {
        all.extend([&block.ln_1, &block.ln_2].into_iter().flat_map(|norm| [&norm.gain, &norm.bias]));
        all.extend(
            [&block.c_attn, &block.attn_proj, &block.c_fc, &block.mlp_proj].map(|linear| &linear.bias),
        );
    }
    all
}

/// The scales of a matrix in codes.
fn scales(matrix: &FrozenMatrix) -> &Frozen {
    matrix.tensors().nth(1).expect("codes have scales")
}

/// Codes and scales of all matrices.
fn codes(base: &Base) -> Vec<(Vec<i8>, Vec<f16>)> {
    let of = |matrix: &FrozenMatrix| (matrix.data.view().to_vec(), scales(matrix).view().to_vec());
    matrices(base).into_iter().map(of).collect()
}

#[test]
fn every_value_is_at_most_half_a_step_from_its_own() {
    let random = random_base(ODD, "gelu_new");
    let cache = tempfile::tempdir().unwrap();
    let coded = load(&random.base.source, cache.path());
    assert_eq!(coded.weights.fingerprint, random.base.weights.fingerprint);
    for (coded, halves) in vectors(&coded).into_iter().zip(vectors(&random.base)) {
        assert_eq!(coded.view().host::<f16>(), halves.view().host::<f16>());
    }
    let mut bytes: usize = vectors(&coded).into_iter().map(Frozen::bytes).sum();
    for (coded, halves) in matrices(&coded).into_iter().zip(matrices(&random.base)) {
        assert!(halves.scales.is_none() && (coded.rows, coded.cols) == (halves.rows, halves.cols));
        let of_blocks: Vec<f16> = scales(coded).view().to_vec();
        assert_eq!(of_blocks.len(), coded.rows * blocks(coded.cols));
        let (found, wanted) = (coded.view().to_floats(), halves.view().to_floats());
        for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            let (row, column) = (at / coded.cols, at % coded.cols);
            let step = of_blocks[row * blocks(coded.cols) + column / BLOCK].to_f32();
            assert!((found - wanted).abs() <= 0.500_01 * step, "{found} for {wanted}, a step is {step}");
        }
        assert!(found != wanted, "something is rounded");
        bytes += coded.data.bytes() + scales(coded).bytes();
    }
    assert_eq!(bytes as u64, BaseBytes::of(&coded.config, BaseDType::Q8).total());
}

#[test]
fn a_base_is_coded_once_from_whatever_it_was() {
    let values = values("transformer.");
    let half = folder(&values, Dtype::F16);
    let cache = tempfile::tempdir().unwrap();
    let source = BaseSource::Folder(half.path().to_owned());
    // Nobody may hold a mapping of the copy when it is damaged below.
    let (wanted, fingerprint) = {
        let first = load(&source, cache.path());
        (codes(&first), first.weights.fingerprint.clone())
    };
    assert_eq!(files(cache.path()), [".lock", "fingerprint-q8", "model-q8.safetensors", "source"]);
    let entry = fs::read_dir(cache.path()).unwrap().next().unwrap().unwrap().path();
    let model = entry.join("model-q8.safetensors");
    let written = || fs::metadata(&model).unwrap().modified().unwrap();
    let before = written();
    assert_eq!(codes(&load(&source, cache.path())), wanted);
    assert_eq!(written(), before);
    let file = fs::read(&model).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let name = "transformer.h.1.mlp.c_fc.weight";
    assert_eq!(
        (tensors.tensor(name).unwrap().dtype(), tensors.tensor(name).unwrap().shape()),
        (Dtype::I8, &[6, 10][..])
    );
    assert_eq!(tensors.tensor(&format!("{name}.scales")).unwrap().shape(), [6, 1]);

    // The FP16 copy stays as it is, and a damaged copy is made again.
    assert!(crate::base_files::load(half.path(), cache.path()).unwrap().weights.wte.scales.is_none());
    fs::write(&model, b"short").unwrap();
    assert_eq!(codes(&load(&source, cache.path())), wanted);

    for dtype in [Dtype::F32, Dtype::F64] {
        let other = folder(&values, dtype);
        let coded = load(&BaseSource::Folder(other.path().to_owned()), cache.path());
        assert_eq!(codes(&coded), wanted, "{dtype:?}");
        assert_eq!(coded.weights.fingerprint, fingerprint);
    }
    let fresh = tempfile::tempdir().unwrap();
    for name in ["torch_bin", "untied", "odd_heads"] {
        let source = BaseSource::Folder(golden(name));
        let (coded, halves) = (load(&source, fresh.path()), Base::load(&source, name, fresh.path()).unwrap());
        assert_eq!(coded.weights.fingerprint, halves.weights.fingerprint, "{name}");
        assert_eq!(coded.weights.head.is_some(), halves.weights.head.is_some(), "{name}");
    }
}

#[test]
fn what_fp16_refuses_is_refused() {
    let mut wrong = values("transformer.");
    wrong.get_mut("transformer.wte.weight").unwrap().1[3] = f32::INFINITY;
    let dir = folder(&wrong, Dtype::F32);
    write_config(dir.path(), json!({}));
    let cache = tempfile::tempdir().unwrap();
    let source = BaseSource::Folder(dir.path().to_owned());
    let error = Base::load_as(&source, "wrong", cache.path(), BaseDType::Q8).unwrap_err();
    assert!(error.to_string().contains("transformer.wte.weight"), "{error}");
    assert!(!files(cache.path()).iter().any(|file| file.contains("q8")));
}

/// A random base with other matrices: `change(name, columns, values)` replaces the values of each.
pub fn base_with(change: impl Fn(&str, usize, &mut [f32])) -> (Arc<Base>, TempDir) {
    let RandomBase { base, .. } = &random_base(ODD, "gelu_new");
    let BaseSource::Folder(from) = &base.source else { panic!("a folder") };
    let to = tempfile::tempdir().unwrap();
    fs::copy(from.join("config.json"), to.path().join("config.json")).unwrap();
    let file = fs::read(from.join("model.safetensors")).unwrap();
    let tensors: Vec<_> = SafeTensors::deserialize(&file)
        .unwrap()
        .iter()
        .map(|(name, tensor)| {
            let mut values: Vec<f32> =
                tensor.data().as_chunks().0.iter().map(|&two| f16::from_le_bytes(two).to_f32()).collect();
            if let &[_, cols] = tensor.shape() {
                change(name, cols, &mut values);
            }
            let bytes: Vec<u8> =
                values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()).collect();
            (name.to_owned(), tensor.shape().to_vec(), bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.clone(), TensorView::new(Dtype::F16, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize_to_file(views, None, &to.path().join("model.safetensors")).unwrap();
    let source = BaseSource::Folder(to.path().to_owned());
    (Arc::new(Base::load(&source, "exact", &to.path().join("cache")).unwrap()), to)
}

/// A base whose matrices 8 bits can say exactly: in each block whole multiples of a power of two, the first 127 of it.
fn exact_base() -> (Arc<Base>, TempDir) {
    base_with(|name, cols, values| {
        if !name.contains("wpe") {
            values.chunks_mut(cols).flat_map(|row| row.chunks_mut(BLOCK)).for_each(snap);
        }
    })
}

fn snap(block: &mut [f32]) {
    let largest = block.iter().fold(1e-3f32, |most, x| most.max(x.abs()));
    let step = (largest / 127.0).log2().ceil().exp2();
    block.iter_mut().for_each(|x| *x = (*x / step).round() * step);
    block[0] = 127.0 * step;
}

pub fn trained(base: &Arc<Base>, case: &Case, policy: Policy) -> (f64, Vec<f32>, TrainerState) {
    let options = TrainerOptions {
        rows: 2,
        seq_len: 12,
        policy,
        optimizer: OptimizerKind::AdamW,
        adamw: AdamWOptions::default(),
        clip: 1.0,
        label_smoothing: 0.1,
        neftune: 0.0,
        seed: 7,
    };
    let arenas = Arenas::real(Some(std::env::temp_dir()));
    let mut trainer =
        Trainer::new(Arc::clone(base), case.set.clone(), &case.values, options, arenas).unwrap();
    let batches = [batch(&[row(1, 12, 2, ODD.vocab), row(2, 9, 0, ODD.vocab)])];
    let loss = trainer.accumulate(&batches).unwrap().sum;
    let gradient = trainer.gradient();
    for _ in 0..2 {
        trainer.step(&batches, 1e-2).unwrap();
    }
    (loss, gradient, state(&trainer))
}

fn logits(base: &Arc<Base>, case: &Case) -> Vec<Vec<f32>> {
    let bindings = AdapterBindings::new(&[(&case.set, 1.0)], base.config.layers).unwrap();
    let mut decoder = Decoder::new(Arc::clone(base), bindings, case.values.clone(), 1, 32).unwrap();
    let ids = row(5, 31, 0, ODD.vocab).ids;
    // Many rows, few, one.
    [&ids[..25], &ids[25..30], &ids[30..]].map(|ids| decoder.feed(ids).unwrap().to_vec()).into()
}

/// Products, losses, gradients, steps and logits of a base in codes have the bits of one with the same values in FP16.
pub fn has_the_bits_of(coded: &Arc<Base>, halves: &Arc<Base>) {
    for case in cases(halves, 0.1) {
        let [expected, found] = [halves, coded].map(|base| trained(base, &case, Policy::default()));
        assert_eq!(found.0.to_bits(), expected.0.to_bits(), "loss of {}", case.name);
        assert_eq!(bits(&found.1), bits(&expected.1), "gradient of {}", case.name);
        assert_eq!(found.2, expected.2, "state of {}", case.name);
        assert!(found.1.iter().any(|&x| x != 0.0));
        for (found, expected) in logits(coded, &case).iter().zip(logits(halves, &case)) {
            assert_eq!(bits(found), bits(&expected), "logits of {}", case.name);
        }
    }
}

/// Codes give their values exactly, and both forms are summed alike: where FP16 has the same values, losses, gradients,
/// steps and logits have the same bits.
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
fn streaming_changes_no_bit_of_a_coded_base() {
    let random = random_base(ODD, "gelu_new");
    let cache = tempfile::tempdir().unwrap();
    let coded = Arc::new(load(&random.base.source, cache.path()));
    let case = &cases(&coded, 0.0)[3];
    let with = |stream| trained(&coded, case, Policy { stream, ..Policy::default() });
    assert_eq!(with(true), with(false));
}

#[test]
fn eight_bits_cost_the_embedded_base_little() {
    let sandbox = Sandbox::new();
    let loss = |line: &str| {
        let found = sandbox.engraft(&format!("eval --json {line}")).succeeds().events();
        found[0]["loss"].as_f64().unwrap()
    };
    let (halves, coded) = (loss("--base-dtype f16"), loss("--base-dtype q8"));
    assert_eq!(loss(""), halves);
    assert!(coded != halves);
    within((coded / halves - 1.0).abs(), EMBEDDED_LOSS, "loss of the embedded base in 8 bits");
}

#[test]
fn adapters_go_from_one_form_to_the_other_and_a_run_stays_with_its_own() {
    let sandbox = Sandbox::new();
    sandbox.train("--steps 4 --base-dtype q8").succeeds();
    sandbox
        .engraft("train --resume --output run --steps 6 --base-dtype f16 --json")
        .refused(&["--resume run", "--base-dtype is \"f16\" (the run has \"q8\")"]);
    // Not given, it is that of the run.
    let rest = sandbox.engraft("train --resume --output run --steps 6 --json").succeeds();
    assert_eq!(rest.events_of("step").len(), 2);
    let whole = Sandbox::new();
    whole.train("--steps 6 --base-dtype q8").succeeds();
    // Four steps of six have another schedule; a whole run is the same to the byte as another one.
    let again = Sandbox::new();
    again.train("--steps 6 --base-dtype q8").succeeds();
    assert!(files_below(&whole.path("run/adapter")) == files_below(&again.path("run/adapter")));
    let halves = Sandbox::new();
    halves.train("--steps 6").succeeds();
    assert!(files_below(&whole.path("run/adapter")) != files_below(&halves.path("run/adapter")));

    for sandbox in [&whole, &halves] {
        let mut losses = ["f16", "q8"].map(|dtype| {
            let line = format!(
                "eval --data data.jsonl --split train --adapter run/adapter --base-dtype {dtype} --json"
            );
            sandbox.engraft(&line).succeeds().events()[0]["loss"].as_f64().unwrap()
        });
        losses.sort_by(f64::total_cmp);
        assert!(losses[1] > losses[0] && losses[1] < 1.02 * losses[0], "{losses:?}");
        let said = sandbox.infer(
            "generate --adapter run/adapter --prompt row --max-new-tokens 5 --base-dtype q8 --temperature 0",
        );
        said.succeeds();
    }
    halves
        .engraft("train --resume --output run --steps 8 --base-dtype q8 --json")
        .refused(&["--base-dtype is \"q8\" (the run has \"f16\")"]);
}

#[test]
fn plans_know_the_smaller_base() {
    let sandbox = Sandbox::new();
    let base = |dtype: &str| -> u64 {
        let line =
            format!("plan --base gpt2 --seq-len 128 --memory 8GiB --json --device cpu --base-dtype {dtype}");
        planned_for(&sandbox.engraft(&line).succeeds().events()[0], "base")
    };
    // 124,439,808 parameters; 8.5 bits each but for the positions, norms and biases.
    let small = 124_439_808 - 1024 * 768;
    let vectors = 768 * 2 + 12 * (9 * 768 + 3072);
    let (halves, coded) = (base("f16"), base("q8"));
    assert_eq!(halves, 2 * 124_439_808);
    assert_eq!(coded, (small - vectors) * 17 / 16 + 2 * (1024 * 768 + vectors));
    // A device has tensors at multiples of 256 bytes, rows of zeros after the head, and without codes 16 rows more after
    // c_attn and c_fc.
    let on_device = |dtype: &str| -> u64 {
        let line = format!("plan --base gpt2 --seq-len 128 --json --device cuda:0 --base-dtype {dtype}");
        planned_for(&sandbox.engraft(&line).succeeds().events()[0], "base")
    };
    let (halves, coded) = (on_device("f16"), on_device("q8"));
    let more = (50304 - 50257) * 768;
    assert_eq!(halves, 2 * (124_439_808 + more + 12 * 16 * (2304 + 3072)));
    assert_eq!(coded, (small - vectors + more) * 17 / 16 + 2 * (1024 * 768 + vectors));
    sandbox.engraft("train --base-dtype q4").refused(&["invalid value", "--base-dtype", "q4"]);
}
