//! Central differences of the REFERENCE twin, then the CPU side against it: heads, batch, packed
//! documents, prefix, a cache, odd sizes and more than one tile.

use half::bf16;

use super::*;
use crate::{device::cpu, testing::*};

#[test]
fn reference_backward_is_central_differences() {
    let s = reference::Shape { queries: 7, past: 0, prefix: 5, width: 3 };
    let starts = [0, 0, 0, 3, 3, 3, 6];
    let (q, k, v, dout) = (doubles(1, 21), doubles(2, 36), doubles(3, 36), doubles(4, 21));
    let (dq, dk, dv) = reference::backward(&dout, &q, &k, &v, &starts, 0.7, s);
    let loss =
        |q: &[f64], k: &[f64], v: &[f64]| weighted(&reference::forward(q, k, v, &starts, 0.7, s).0, &dout);
    assert_gradient(&q, &dq, "q", |q| loss(q, &k, &v));
    assert_gradient(&k, &dk, "k", |k| loss(&q, k, &v));
    assert_gradient(&v, &dv, "v", |v| loss(&q, &k, v));
}

/// Rows of `width` floats at column `at` of rows that stand `row` apart, in f64.
fn columns(data: &[f32], row: usize, at: usize, width: usize) -> Vec<f64> {
    data.chunks(row).flat_map(|row| widened(&row[at..at + width])).collect()
}

fn check(batch: usize, t: usize, heads: usize, width: usize, p: usize, starts: &[u32]) {
    check_in(shape(Arithmetic::F32, batch, t, heads, width, p), starts);
}

/// A call without a cache.
fn shape(arithmetic: Arithmetic, batch: usize, t: usize, heads: usize, width: usize, p: usize) -> Shape {
    Shape { batch, queries: t, past: 0, heads, width, prefix: p, arithmetic }
}

fn check_in(shape: Shape, starts: &[u32]) {
    let Shape { batch, queries: t, heads, width, prefix: p, arithmetic, .. } = shape;
    let c = heads * width;
    // In BF16 these are exact, and probabilities and gradients of scores are off by 2^-9 of themselves at most.
    let (numbers, off): (fn(u64, usize) -> Vec<f32>, _) = match arithmetic {
        Arithmetic::F32 => (numbers, [3e-6, 1e-5, 2e-5]),
        Arithmetic::Bf16 => (rounded, [4e-3; 3]),
    };
    let qkv = numbers(1, batch * t * 3 * c);
    let (pk, pv, dout) = (numbers(2, p * c), numbers(3, p * c), numbers(4, batch * t * c));
    let rows = |data| Heads { data, row: c, batch: 0 };
    let prefix = (p > 0).then(|| Prefix { k: rows(View::from(&pk[..])), v: rows(View::from(&pv[..])) });
    let (mut out, mut lse) = (vec![0f32; batch * t * c], vec![0f32; batch * heads * t]);
    let parts = packed(qkv[..].into(), t, c);
    forward(parts, prefix, starts.into(), 0.3, shape, out.as_mut_slice().into(), lse.as_mut_slice().into());
    let seen =
        Seen { qkv: qkv[..].into(), prefix, starts: starts.into(), out: out[..].into(), lse: lse[..].into() };
    let (mut d_qkv, mut d_prefix) = (vec![f32::NAN; qkv.len()], vec![f32::NAN; batch * 2 * p * c]);
    backward(dout[..].into(), seen, 0.3, shape, d_qkv.as_mut_slice().into(), d_prefix.as_mut_slice().into());
    let mut summed = vec![0f32; 2 * p * c];
    if p > 0 {
        sum_prefix(d_prefix[..].into(), shape, summed.as_mut_slice().into(), (c, 0, p * c));
    }

    let mut expected_sum = vec![0f64; 2 * p * c];
    for b in 0..batch {
        let tokens = &qkv[b * t * 3 * c..][..t * 3 * c];
        for h in 0..heads {
            let at = h * width;
            let part = |index: usize| columns(tokens, 3 * c, index * c + at, width);
            let q = part(0);
            let k = [columns(&pk, c, at, width), part(1)].concat();
            let v = [columns(&pv, c, at, width), part(2)].concat();
            let d = columns(&dout[b * t * c..][..t * c], c, at, width);
            let s = reference::Shape { queries: t, past: 0, prefix: p, width };
            let starts = &starts[b * t..][..t];
            let scale = f64::from(0.3f32);
            let (expected, probabilities) = reference::forward(&q, &k, &v, starts, scale, s);
            let found: Vec<f32> =
                (0..t).flat_map(|i| out[(b * t + i) * c + at..][..width].to_vec()).collect();
            assert_close(&found, &expected, off[0], "out");
            // ln sum exp(s) = s_j - ln p_j for every visible j: the likeliest.
            let sums: Vec<f64> = probabilities
                .chunks(p + t)
                .enumerate()
                .map(|(i, p)| {
                    let (j, &most) = p.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
                    let score: f64 = (0..width).map(|e| q[i * width + e] * k[j * width + e]).sum();
                    scale * score - most.ln()
                })
                .collect();
            assert_close(&lse[(b * heads + h) * t..][..t], &sums, 3e-6, "lse");
            let (dq, dk, dv) = reference::backward(&d, &q, &k, &v, starts, scale, s);
            for (part, gradient) in [(0, &dq[..]), (1, &dk[p * width..]), (2, &dv[p * width..])] {
                let found: Vec<f32> = (0..t)
                    .flat_map(|i| d_qkv[(b * t + i) * 3 * c + part * c + at..][..width].to_vec())
                    .collect();
                assert_close(&found, gradient, off[1], ["dq", "dk", "dv"][part]);
            }
            for (part, gradient) in [(0, &dk), (1, &dv)] {
                for i in 0..p {
                    for e in 0..width {
                        expected_sum[(part * p + i) * c + at + e] += gradient[i * width + e];
                    }
                }
            }
        }
    }
    assert_close(&summed, &expected_sum, off[2], "prefix gradient");
}

#[test]
fn cpu_matches_reference() {
    check(2, 7, 3, 5, 0, &[0; 14]);
    check(2, 7, 2, 8, 5, &[0, 0, 0, 3, 3, 5, 5, 0, 1, 1, 1, 1, 6, 6]);
    let packed: Vec<u32> = (0..150).map(|i| if i < 70 { 0 } else { 70 }).collect();
    check(1, 150, 1, 64, 3, &packed);
    // Heads of whole vectors: groups of queries that are not full, documents within and across them.
    let starts: Vec<u32> = (0..42).map(|i| [0, 0, 0, 3, 3, 9, 9, 11][i % 21 / 3]).collect();
    check(2, 21, 2, 16, 5, &starts);
    check(1, 75, 2, 48, 0, &[0; 75]);
}

/// As [`numbers`], rounded to BF16.
fn rounded(seed: u64, len: usize) -> Vec<f32> {
    numbers(seed, len).into_iter().map(|x| bf16::from_f32(x).to_f32()).collect()
}

/// Whether BF16 changes the output of a small call.
fn differs() -> bool {
    let (t, c) = (8, 32);
    let qkv = numbers(1, t * 3 * c);
    let run = |arithmetic: Arithmetic| {
        let shape = Shape { batch: 1, queries: t, past: 0, heads: 1, width: c, prefix: 0, arithmetic };
        let (mut out, mut lse) = (vec![0f32; t * c], vec![0f32; t]);
        let to = (out.as_mut_slice().into(), lse.as_mut_slice().into());
        forward(packed(qkv[..].into(), t, c), None, [0u32; 8][..].into(), 0.3, shape, to.0, to.1);
        out
    };
    run(Arithmetic::F32) != run(Arithmetic::Bf16)
}

/// Groups and blocks that are not full, odd numbers of queries and keys; pairs of both prefix and tokens, and of
/// hidden and visible ones.
#[test]
fn products_of_bf16_match_reference() {
    let all = |t: usize| vec![0; t];
    check_in(shape(Arithmetic::Bf16, 1, 6, 1, 32, 0), &all(6));
    check_in(shape(Arithmetic::Bf16, 2, 21, 3, 32, 5), &all(42));
    check_in(shape(Arithmetic::Bf16, 1, 75, 2, 96, 4), &all(75));
    check_in(shape(Arithmetic::Bf16, 1, 13, 1, 256, 2), &all(13));
    assert!(differs() == cpu::bf16(), "BF16 was used");
    let documents: Vec<u32> = (0..151).map(|i| [0, 0, 0, 45, 46, 75, 75, 120][i / 20]).collect();
    for p in [0, 1, 4, 21] {
        check_in(shape(Arithmetic::Bf16, 1, 151, 1, 64, p), &documents);
    }
    let short: Vec<u32> = (0..60)
        .map(|i| [0, 1, 2, 2, 2, 5, 6, 6, 6, 6, 6, 6, 6, 12, 12, 12, 12, 17, 17, 17][i % 20])
        .collect();
    check_in(shape(Arithmetic::Bf16, 3, 20, 2, 64, 3), &short);
}

#[test]
fn a_cache_gives_the_same_rows() {
    cached(shape(Arithmetic::F32, 1, 9, 2, 4, 3), 5);
    cached(shape(Arithmetic::F32, 1, 25, 2, 16, 3), 13);
}

/// One query after a cache, in FP64: fewer and more tokens than are taken side by side, hidden ones, a prefix, more heads
/// than a task has.
#[test]
fn one_query_matches_reference() {
    for (t, heads, width, p, start) in [
        (1, 1, 16, 0, 0),
        (3, 2, 32, 1, 1),
        (8, 35, 16, 0, 0),
        (23, 3, 48, 6, 2),
        (70, 12, 64, 5, 64),
        (131, 25, 64, 0, 0),
    ] {
        let (c, scale) = (heads * width, 0.3);
        let (qkv, pk, pv) = (numbers(1, t * 3 * c), numbers(2, p * c), numbers(3, p * c));
        let dense = |data| Heads { data, row: c, batch: 0 };
        let prefix = (p > 0).then(|| Prefix { k: dense(View::from(&pk[..])), v: dense(View::from(&pv[..])) });
        let (q, k, v) = packed(qkv[..].into(), t, c);
        let q = Heads { data: View::from(&qkv[(t - 1) * 3 * c..]), ..q };
        let shape = Shape { queries: 1, past: t - 1, ..shape(Arithmetic::F32, 1, 1, heads, width, p) };
        let (mut out, mut lse) = (vec![f32::NAN; c], vec![f32::NAN; heads]);
        let to = (out.as_mut_slice().into(), lse.as_mut_slice().into());
        forward((q, k, v), prefix, [start][..].into(), scale, shape, to.0, to.1);
        for h in 0..heads {
            let part = |index: usize| columns(&qkv, 3 * c, index * c + h * width, width);
            let k = [columns(&pk, c, h * width, width), part(1)].concat();
            let v = [columns(&pv, c, h * width, width), part(2)].concat();
            let q = &part(0)[(t - 1) * width..];
            let s = reference::Shape { queries: 1, past: t - 1, prefix: p, width };
            let scale = f64::from(scale);
            let (expected, probabilities) = reference::forward(q, &k, &v, &[start], scale, s);
            assert_close(&out[h * width..][..width], &expected, 3e-6, "out");
            let (j, most) = probabilities.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
            let score: f64 = (0..width).map(|e| q[e] * k[j * width + e]).sum();
            assert_close(&lse[h..][..1], &[scale * score - most.ln()], 3e-6, "lse");
        }
    }
}

/// The same values are rounded, and so the same pairs added.
#[test]
fn a_cache_gives_the_same_rows_of_bf16() {
    cached(shape(Arithmetic::Bf16, 1, 25, 2, 32, 3), 13);
    cached(shape(Arithmetic::Bf16, 1, 100, 1, 64, 4), 80);
}

/// The queries from `first` after a cache of those before, against all queries at once.
fn cached(whole: Shape, first: usize) {
    let Shape { queries: t, heads, width, prefix: p, .. } = whole;
    let c = heads * width;
    let qkv = numbers(1, t * 3 * c);
    let prefix_rows = numbers(2, p * 2 * c);
    let rows = |start: usize| Heads { data: View::from(&prefix_rows[start..]), row: 2 * c, batch: 0 };
    let prefix = Some(Prefix { k: rows(0), v: rows(c) });
    let parts = packed(qkv[..].into(), t, c);
    let run = |first: usize| {
        let queries = t - first;
        let shape = Shape { queries, past: first, ..whole };
        let (mut out, mut lse) = (vec![0f32; queries * c], vec![0f32; heads * queries]);
        let q = Heads { data: View::from(&qkv[first * 3 * c..]), ..parts.0 };
        let starts = vec![0u32; queries];
        let (out_view, lse_view) = (out.as_mut_slice().into(), lse.as_mut_slice().into());
        forward((q, parts.1, parts.2), prefix, starts[..].into(), 0.5, shape, out_view, lse_view);
        out
    };
    let whole = widened(&run(0)[first * c..]);
    assert_close(&run(first), &whole, 1e-6, "cached rows");
}

/// Scores of many thousands, whose exponentials no float holds: probabilities are 1 for the largest, or shared by two
/// equal keys. Within a tile, across tiles, and with widths that are no whole vectors.
#[test]
fn large_scores_do_not_overflow() {
    for (t, c) in [(3, 4), (40, 5), (150, 16), (75, 48)] {
        // Whole numbers, small enough that FP32 holds every score exactly: equal keys have equal scores.
        let mut qkv: Vec<f32> = numbers(1, t * 3 * c).iter().map(|x| (x * 100.0).round()).collect();
        // The first and the last key, and the last query, are one long vector: that query finds these two keys
        // largest, and averages their values.
        let (first, last) = qkv.split_at_mut((t - 1) * 3 * c);
        first[c..2 * c].iter_mut().for_each(|x| *x *= 4.0);
        last[c..2 * c].copy_from_slice(&first[c..2 * c]);
        last[..c].copy_from_slice(&first[c..2 * c]);
        let arithmetic = Arithmetic::F32;
        let shape = Shape { batch: 1, queries: t, past: 0, heads: 1, width: c, prefix: 0, arithmetic };
        let (mut out, mut lse) = (vec![0f32; t * c], vec![0f32; t]);
        let (out_view, lse_view) = (out.as_mut_slice().into(), lse.as_mut_slice().into());
        let starts = vec![0u32; t];
        forward(packed(qkv[..].into(), t, c), None, starts[..].into(), 1.0, shape, out_view, lse_view);

        let part = |index: usize| columns(&qkv, 3 * c, index * c, c);
        let (q, k, v) = (part(0), part(1), part(2));
        let s = reference::Shape { queries: t, past: 0, prefix: 0, width: c };
        let (expected, probabilities) = reference::forward(&q, &k, &v, &starts, 1.0, s);
        assert_eq!(probabilities[(t - 1) * t..][..1], [0.5], "two equal keys");
        assert_close(&out, &expected, 1e-5, "out");
        let score = |i: usize, j: usize| (0..c).map(|e| q[i * c + e] * k[j * c + e]).sum::<f64>();
        // ln sum exp(s) = s_j - ln p_j for the likeliest j.
        let likeliest = |i: usize| {
            let row = &probabilities[i * t..][..t];
            let (j, most) = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap();
            score(i, j) - most.ln()
        };
        assert_close(&lse, &(0..t).map(likeliest).collect::<Vec<_>>(), 1e-6, "lse");
    }
}

/// Each row of a batch goes on from its own row of a cache and its own count, as it would alone.
#[test]
fn rows_of_a_cache_have_counts_and_places_of_their_own() {
    let (capacity, heads, width, p) = (90, 3, 8, 4);
    let (c, counts, slots) = (heads * width, [70u32, 0, 13], [2u32, 3, 0]);
    let row = capacity * c;
    let mut caches = [numbers(1, 4 * row), numbers(2, 4 * row)];
    let (qkv, pk, pv) = (numbers(3, 3 * 3 * c), numbers(4, p * c), numbers(5, p * c));
    let dense = |data| Heads { data, row: c, batch: 0 };
    let prefix = Some(Prefix { k: dense(View::from(&pk[..])), v: dense(View::from(&pv[..])) });
    let (q, k, v) = packed(qkv[..].into(), 1, c);
    let rows = CacheRows { counts: counts[..].into(), slots: slots[..].into() };
    let before = caches.clone();
    let [to_k, to_v] = &mut caches;
    let to = (to_k.as_mut_slice().into(), to_v.as_mut_slice().into());
    append_rows((k, v), to, (3, 1, c), row, rows);
    for (cache, (before, part)) in caches.iter().zip(before.iter().zip([c, 2 * c])) {
        let mut expected = before.clone();
        for b in 0..3 {
            let at = slots[b] as usize * row + counts[b] as usize * c;
            expected[at..][..c].copy_from_slice(&qkv[b * 3 * c + part..][..c]);
        }
        assert!(*cache == expected, "one token a row was written, in its place");
    }
    let shape =
        |batch, past| Shape { batch, queries: 1, past, heads, width, prefix: p, arithmetic: Arithmetic::F32 };
    let whole = |index: usize| Heads { data: View::from(&caches[index][..]), row: c, batch: row };
    let (mut out, mut lse) = (vec![0f32; 3 * c], vec![0f32; 3 * heads]);
    let starts = [0u32; 3];
    decode(
        (q, whole(0), whole(1)),
        prefix,
        starts[..].into(),
        0.3,
        (shape(3, capacity - 1), rows),
        out.as_mut_slice().into(),
        lse.as_mut_slice().into(),
    );
    for b in 0..3 {
        let (mut own, mut own_lse) = (vec![0f32; c], vec![0f32; heads]);
        let place = slots[b] as usize * row;
        let cache = |index: usize| dense(View::from(&caches[index][place..place + row]));
        let q = Heads { data: View::from(&qkv[b * 3 * c..]), ..q };
        let to = (own.as_mut_slice().into(), own_lse.as_mut_slice().into());
        let shape = shape(1, counts[b] as usize);
        forward((q, cache(0), cache(1)), prefix, starts[..1].into(), 0.3, shape, to.0, to.1);
        assert!(out[b * c..][..c] == own && lse[b * heads..][..heads] == own_lse, "row {b}");
    }
}
