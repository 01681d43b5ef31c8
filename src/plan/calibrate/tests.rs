//! Tests of the rates: the cache and its key, the line through two points, tiny measurements.

use super::*;

const TINY: Sizes = Sizes {
    rows: (8, 32),
    layer: (24, 40),
    head: (8, 64),
    attention: (9, 2, 8),
    elements: 1000,
    file: 5 << 12,
};

fn key() -> Key {
    Key { cpu: "X".into(), threads: 2, level: "x86-v4".into(), program: "1".into() }
}

/// Rates that no measurement gives: read back, they came from the file.
fn known() -> Rates {
    let both = RatePair { forward: 1.5, backward: 2.5 };
    let point = |rows, flops| RatePoint { rows, flops };
    let product = ProductRate { few: point(128, 1e9), many: point(1024, 4e9) };
    Rates {
        product_forward: product,
        product_backward: ProductRate { few: point(1, 0.1 + 0.2), ..product },
        thin: 2e9,
        attention: both,
        head: 3.0,
        layernorm: both,
        activation: both,
        adamw: 7e8,
        reading: 1e10 / 3.0,
    }
}

#[test]
fn measured_rates_are_positive_and_finite() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    for place in [None, Some(folder.path()), Some(&*missing)] {
        let rates = measure::all(&TINY, place, Arithmetic::Bf16);
        assert!(rates.are_usable(), "{rates:?}");
        assert_eq!((rates.product_forward.few.rows, rates.product_forward.many.rows), (8, 32));
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    assert!(!Rates { adamw: f64::NAN, ..known() }.are_usable());
    assert!(!Rates { head: 0.0, ..known() }.are_usable());
    assert!(!Rates { thin: -1.0, ..known() }.are_usable());
}

#[test]
fn rates_come_back_from_the_cache_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("deep/cache/rates");
    assert_eq!(Rates::load_or(Some(&cache), &key(), known), known());
    let never = || -> Rates { panic!("measured although cached") };
    assert_eq!(Rates::load_or(Some(&cache), &key(), never), known());
}

#[test]
fn a_foreign_or_damaged_cache_is_measured_anew_and_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rates");
    let other = || Rates { head: 99.0, ..known() };
    let foreign = [
        Key { cpu: "Y".into(), ..key() },
        Key { threads: 3, ..key() },
        Key { level: "x86-v3".into(), ..key() },
        Key { program: "2".into(), ..key() },
    ];
    for foreign in foreign {
        Rates::load_or(Some(&path), &foreign, known);
        assert_eq!(Rates::load_or(Some(&path), &key(), other), other(), "{foreign:?}");
        assert_eq!(load(&path, &key()), Some(other()));
    }
    let stored = fs::read_to_string(&path).unwrap();
    for damaged in ["", "{}", &stored[..stored.len() / 2], &stored.replace("99.0", "-1.0")] {
        fs::write(&path, damaged).unwrap();
        assert_eq!(Rates::load_or(Some(&path), &key(), known), known(), "{damaged}");
    }
}

#[test]
fn a_cache_that_cannot_be_written_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(Rates::load_or(Some(folder.path()), &key(), known), known());
    let file = tempfile::NamedTempFile::new().unwrap();
    assert_eq!(Rates::load_or(Some(&file.path().join("below")), &key(), known), known());
    assert_eq!(Rates::load_or(None, &key(), known), known());
}

#[test]
fn a_product_takes_a_fixed_part_and_one_for_each_row() {
    // 3 s a weight, and 0.5 s a weight and row.
    let point = |rows: usize| RatePoint { rows, flops: 2.0 * rows as f64 / (3.0 + 0.5 * rows as f64) };
    let product = ProductRate { few: point(100), many: point(1000) };
    for rows in [10, 100, 1000, 4000] {
        let expected = (3.0 + 0.5 * rows as f64) * 7.0;
        assert!((product.seconds(rows, 7) - expected).abs() < 1e-6, "{rows}");
    }
    // Noise: more rows in less time, and a line that starts below zero.
    for (few, many) in [(1.0, 1e6), (1.0, 0.01)] {
        let product = ProductRate {
            few: RatePoint { rows: 10, flops: few },
            many: RatePoint { rows: 20, flops: many },
        };
        let (less, more) = (product.seconds(5, 1), product.seconds(500, 1));
        assert!(less >= 0.0 && more >= less && more > 0.0, "{less} {more}");
    }
}

#[test]
fn attention_counts_its_products() {
    assert_eq!(attention_flops(2, 8, 10), (2.0 * 2.0 * 160.0, 5.0 * 2.0 * 160.0));
}

#[test]
fn cpus_have_names() {
    assert_eq!(cpu_model("processor\t: 0\nmodel name\t: Fast CPU @ 3GHz: v2\n"), "Fast CPU @ 3GHz: v2");
    assert_eq!(cpu_model("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n"), "0x41 0xd40");
    assert_eq!(cpu_model(""), "unknown");
    let here = Key::here();
    assert!(here.threads > 0 && !here.level.is_empty() && !here.program.is_empty());
}

#[test]
fn forgotten_rates_are_measured_again() {
    let folder = tempfile::tempdir().unwrap();
    let in_f32 = folder.path().join(file(Arithmetic::F32));
    let in_bf16 = folder.path().join(file(Arithmetic::Bf16));
    assert_eq!(in_f32 != in_bf16, Arithmetic::Bf16.in_pairs(), "each arithmetic has its own");
    for path in [&in_f32, &in_bf16] {
        store(path, CachedRates { key: Key::here(), rates: known() });
    }
    assert_eq!(Rates::cached(Some(folder.path()), Arithmetic::Bf16), Some(known()));
    Rates::forget(Some(folder.path()), Arithmetic::Bf16);
    Rates::forget(None, Arithmetic::F32);
    assert_eq!(Rates::cached(Some(folder.path()), Arithmetic::Bf16), None);
    assert_eq!(Rates::cached(Some(folder.path()), Arithmetic::F32), Arithmetic::Bf16.in_pairs().then(known));
}
