//! Tests of foreign adapters: files made by hand, and what is refused.

use std::fs;

use super::*;
use crate::{
    convert::{
        gguf::{GgufAdapter, GgufType},
        write_loralib, write_mlx,
    },
    model::builtin::builtin,
};

fn base() -> BaseDescription {
    let mut config = builtin("gpt2").unwrap().unwrap();
    (config.layers, config.width, config.heads, config.inner) = (3, 6, 2, 10);
    config.describe("tiny", Some("f00d"))
}

/// A delta of counted values on a site, or on a part of it.
fn delta(layer: usize, site: usize, part: Option<&str>, rank: usize, alpha: f64) -> PlainLora {
    let base = base();
    let of = &base.sites[site];
    let columns = part.map_or(of.outputs, |name| {
        of.parts.iter().find(|part| part.name == name).map(|part| part.columns.len()).unwrap()
    });
    let count = |len: usize, from: f32| (0..len).map(|at| at as f32 * 0.25 + from).collect();
    let (a, b) = (count(rank * of.inputs, layer as f32), count(columns * rank, -3.0));
    PlainLora { layer, site, part: part.map(str::to_owned), rank, alpha, a, b }
}

fn plain(loaded: &Loaded) -> Vec<PlainLora> {
    let part = engraft_adapters::FoldPart { set: &loaded.set, values: &loaded.values, factor: 1.0 };
    engraft_adapters::plain_loras(&part, &base()).unwrap()
}

fn load(path: &Path, untold: &Untold) -> Result<Loaded> {
    Foreign::open(path)?.unwrap().load(untold, &base(), false)
}

#[test]
fn what_is_written_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (base, whole) =
        (base(), vec![delta(0, 0, None, 2, 8.0), delta(0, 2, None, 2, 8.0), delta(2, 3, None, 2, 8.0)]);
    let gguf = |dtype| GgufAdapter { deltas: whole.clone(), dropout: 0.25, base: &base, dtype };
    gguf(GgufType::F32).write(&path("a.gguf")).unwrap();
    let loaded = load(&path("a.gguf"), &Untold::default()).unwrap();
    assert_eq!((plain(&loaded), loaded.set.dropout()), (whole.clone(), 0.25));
    assert!(loaded.hints.is_empty(), "it carries the fingerprint: {:?}", loaded.hints);
    // Quarters below 8 are exact in FP16.
    gguf(GgufType::F16).write(&path("b.gguf")).unwrap();
    assert_eq!(plain(&load(&path("b.gguf"), &Untold::default()).unwrap()), whole);
    assert!(fs::metadata(path("b.gguf")).unwrap().len() < fs::metadata(path("a.gguf")).unwrap().len());

    write_mlx(&path("mlx"), whole.clone(), 0.125, &base).unwrap();
    let loaded = load(&path("mlx"), &Untold::default()).unwrap();
    assert_eq!((plain(&loaded), loaded.set.dropout()), (whole.clone(), 0.125));
    assert!(loaded.hints[0].contains("no base fingerprint"), "{:?}", loaded.hints);

    let parts = vec![
        delta(1, 0, Some("q"), 2, 8.0),
        delta(1, 0, Some("v"), 2, 8.0),
        delta(2, 0, Some("q"), 2, 8.0),
        delta(2, 0, Some("v"), 2, 8.0),
        delta(2, 3, None, 2, 8.0),
    ];
    let layers = write_loralib(&path("a.pt"), &parts, &base).unwrap().layers;
    assert_eq!((layers[0].enable_lora.clone(), layers[0].alpha), (vec![true, false, true], 8.0));
    assert!(layers[1].enable_lora.is_empty() && layers.len() == 2);
    let alpha = Untold { alpha: Some(8.0), parts: None };
    assert_eq!(plain(&load(&path("a.pt"), &alpha).unwrap()), parts);
    let error = load(&path("a.pt"), &Untold::default()).unwrap_err().to_string();
    assert!(error.contains("does not tell the alpha") && error.contains("--to peft --adapter"), "{error}");
    let other = Untold { parts: Some(vec!["k".into(), "v".into()]), ..alpha };
    let read = plain(&load(&path("a.pt"), &other).unwrap());
    assert_eq!(read[0].part.as_deref(), Some("k"));
    for wrong in [vec!["v", "q"], vec!["q"], vec!["q", "x"]] {
        let parts = Some(wrong.into_iter().map(str::to_owned).collect());
        let error = load(&path("a.pt"), &Untold { parts, ..other.clone() }).unwrap_err().to_string();
        assert!(error.contains("2 parts; name so many of q,k,v in this order"), "{error}");
    }
}

#[test]
fn several_ranks_and_scales_are_written_where_a_format_has_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (base, deltas) =
        (base(), vec![delta(0, 0, None, 2, 8.0), delta(1, 0, None, 4, 8.0), delta(2, 1, None, 2, 2.0)]);
    let products = |deltas: &[PlainLora]| -> Vec<f32> {
        let of = |delta: &PlainLora| -> Vec<f32> {
            let inputs = delta.a.len() / delta.rank;
            let each = |at: usize| -> f32 {
                let b = &delta.b[at / inputs * delta.rank..][..delta.rank];
                let sum: f32 = b.iter().enumerate().map(|(r, b)| b * delta.a[r * inputs + at % inputs]).sum();
                delta.scale() as f32 * sum
            };
            (0..delta.b.len() / delta.rank * inputs).map(each).collect()
        };
        deltas.iter().flat_map(of).collect()
    };
    GgufAdapter { deltas: deltas.clone(), dropout: 0.0, base: &base, dtype: GgufType::F32 }
        .write(&path("a.gguf"))
        .unwrap();
    write_mlx(&path("mlx"), deltas.clone(), 0.0, &base).unwrap();
    for name in ["a.gguf", "mlx"] {
        let read = plain(&load(&path(name), &Untold::default()).unwrap());
        // All factors are powers of two.
        assert_eq!(products(&read), products(&deltas), "{name}");
        assert_eq!(read.iter().map(|delta| delta.rank).max(), Some(4));
    }
    let mlx = plain(&load(&path("mlx"), &Untold::default()).unwrap());
    assert!(mlx.iter().all(|delta| delta.rank == 4 && delta.scale() == mlx[0].scale()));
    let error = write_loralib(&path("a.pt"), &deltas, &base).unwrap_err().to_string();
    assert!(error.contains("several ranks, alphas") && !path("a.pt").exists(), "{error}");
}

/// llama.cpp's converter transposes the weight of a Conv1D, and with it A and B: it writes B^T as A and A^T as B.
#[test]
fn a_file_of_llama_cpp_s_converter_is_turned_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("turned.gguf");
    let right = delta(1, 0, None, 2, 8.0);
    let matrix =
        |rows: usize, values: &[f32]| Matrix { rows, columns: values.len() / rows, values: values.to_vec() };
    // The same names and alpha, on a base whose c_attn has its inputs and outputs swapped.
    let mut turned = base();
    (turned.sites[0].inputs, turned.sites[0].outputs) = (18, 6);
    let swapped = PlainLora {
        a: matrix(18, &right.b).transposed().values,
        b: matrix(2, &right.a).transposed().values,
        ..right.clone()
    };
    GgufAdapter { deltas: vec![swapped], dropout: 0.0, base: &turned, dtype: GgufType::F32 }
        .write(&path)
        .unwrap();
    let loaded = load(&path, &Untold::default()).unwrap();
    assert_eq!(plain(&loaded), [right]);
    assert!(loaded.hints[0].contains("transposed"), "{:?}", loaded.hints);
}

#[test]
fn what_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.gguf");
    let write = |layer: usize, base: &BaseDescription| {
        let deltas = vec![PlainLora { layer, ..delta(0, 1, None, 2, 8.0) }];
        GgufAdapter { deltas, dropout: 0.0, base, dtype: GgufType::F32 }.write(&path).unwrap();
        load(&path, &Untold::default()).unwrap_err().to_string()
    };
    let mut other = base();
    assert!(write(7, &other).contains("8 layers"));
    other.fingerprint = Some("beef".to_owned());
    assert!(write(0, &other).contains("beef"));
    other.fingerprint = None;
    (other.sites[1].inputs, other.sites[1].outputs) = (3, 12);
    assert!(write(0, &other).contains("the base has 6 inputs and 6 outputs"));
    let good = fs::read(&path).unwrap();
    for cut in [5, 20, 60, good.len() - 8] {
        fs::write(&path, &good[..cut]).unwrap();
        let error = Foreign::open(&path).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains("a.gguf"), "{error}");
    }
    for byte in (4..good.len()).step_by(7) {
        let mut broken = good.clone();
        broken[byte] ^= 0x55;
        fs::write(&path, &broken).unwrap();
        // Any answer but a panic.
        let _ = Foreign::open(&path)
            .map(|found| found.map(|found| found.load(&Untold::default(), &base(), true)));
    }
    assert_eq!(Format::of(folder.path()), None);
    fs::write(&path, "PK\x03\x04 and no archive").unwrap();
    assert!(Foreign::open(&path).unwrap_err().to_string().contains("cannot be read as a PyTorch file"));
}
