//! Central differences of the REFERENCE twin, then the CPU side against it: with and without dropout, vectors and ranges.

use std::ops::Range;

use super::{
    reference::{Delta as Twin, Gradients, Site},
    *,
};
use crate::{device::cpu::vectors, kernels::matmul::Matrix, testing::*};

/// Vectors beside the weight `(5, 11)` for 7 tokens: whole ones, ones for some tokens, and deltas that share A.
struct Case {
    x: Vec<f64>,
    w: Vec<f64>,
    bias: Vec<f64>,
    /// A of both deltas, then d of the first.
    a: Vec<f64>,
    d: Vec<f64>,
    b: [Vec<f64>; 2],
    e: Vec<f64>,
    u: Vec<f64>,
    g: Vec<f64>,
    dropped: Vec<f64>,
}

impl Case {
    fn new() -> Self {
        let mut g = doubles(10, 77);
        g.iter_mut().for_each(|g| *g += 1.5);
        Self {
            x: doubles(1, 35),
            w: doubles(2, 55),
            bias: doubles(3, 11),
            a: doubles(4, 15),
            d: doubles(5, 3),
            b: [doubles(6, 18), doubles(7, 33)],
            e: doubles(8, 6),
            u: doubles(9, 35),
            g,
            dropped: (0..35).map(|i| if i % 3 == 0 { 0.0 } else { 1.25 }).collect(),
        }
    }

    fn site(&self, bias_inside: bool) -> Site<'_, f64> {
        let first = Twin {
            a: &self.a,
            b: &self.b[0],
            rank: 3,
            columns: 4..10,
            tokens: 0..7,
            scale: 1.7,
            d: Some(&self.d),
            e: Some(&self.e),
            dropped: Some(&self.dropped),
        };
        // The same A, for some tokens.
        let second = Twin {
            b: &self.b[1],
            columns: 0..11,
            tokens: 2..5,
            scale: -0.6,
            d: None,
            e: None,
            ..first.clone()
        };
        Site {
            n: 7,
            inputs: 5,
            outputs: 11,
            w: &self.w,
            bias: &self.bias,
            u: Some(&self.u),
            g: Some(&self.g),
            bias_inside,
            deltas: vec![first, second],
        }
    }
}

#[test]
fn reference_backward_is_central_differences() {
    let dy = doubles(11, 77);
    for bias_inside in [false, true] {
        let case = Case::new();
        let found = reference::backward(&case.site(bias_inside), &case.x, &dy);
        let [first, second] = &found.deltas[..] else { panic!("two deltas") };
        let shared: Vec<f64> = first.a.iter().zip(&second.a).map(|(a, b)| a + b).collect();
        let check = |what: &str, gradient: &[f64], part: fn(&mut Case) -> &mut Vec<f64>| {
            let point = part(&mut Case::new()).clone();
            assert_gradient(&point, gradient, what, |point| {
                let mut case = Case::new();
                *part(&mut case) = point.to_vec();
                weighted(&reference::forward(&case.site(bias_inside), &case.x), &dy)
            });
        };
        check("x", &found.x, |case| &mut case.x);
        check("u", &found.u, |case| &mut case.u);
        check("g", &found.g, |case| &mut case.g);
        check("bias", &found.bias, |case| &mut case.bias);
        check("A of both", &shared, |case| &mut case.a);
        check("B", &first.b, |case| &mut case.b[0]);
        check("B of some tokens", &second.b, |case| &mut case.b[1]);
        check("d", &first.d, |case| &mut case.d);
        check("e", &first.e, |case| &mut case.e);
    }
}

/// Which optional parts an op has, with their places in flat buffers of [`LEN`] values.
#[derive(Default, Clone)]
struct Parts {
    u: Vec<Scaling>,
    g: Vec<Scaling>,
    bias: Option<Vector>,
    bias_place: BiasPlace,
}

impl Parts {
    fn vectors(&self) -> SiteVectors<'_> {
        SiteVectors { u: &self.u, g: &self.g, bias: self.bias, bias_place: self.bias_place }
    }
}

const INPUTS: usize = 37;
const OUTPUTS: usize = 261;
const LEN: usize = 8000;

/// Results of the op: y, dx, all gradients.
type Results = [Vec<f32>; 3];

/// The op on the CPU. `grads` begin at [`start_of_grads`] and are as long as trainables need.
fn run(n: usize, deltas: &[Delta], parts: &Parts, dropout: Dropout, trainables: usize) -> Results {
    let values = numbers(1, LEN);
    let (x, dy, residual) = (numbers(2, n * INPUTS), numbers(3, n * OUTPUTS), numbers(4, n * OUTPUTS));
    let (weight, bias) = (f16_numbers(5, INPUTS * OUTPUTS), f16_numbers(6, OUTPUTS));
    let layer = Layer { weight: Matrix::f16(weight[..].into(), INPUTS, OUTPUTS), bias: bias[..].into() };
    let vectors = parts.vectors();
    let linear = AdaptedLinear { vectors, ..AdaptedLinear::new(layer, deltas, values[..].into(), dropout) };
    let room = |needed: bool, len: usize| needed.then(|| vec![f32::NAN; len]);
    let (mut xa, mut y) = (vec![f32::NAN; xa_len(deltas, n)], vec![f32::NAN; n * OUTPUTS]);
    let mut scaled_x = room(vectors.needs_scaled_x(), n * INPUTS);
    let mut product = room(vectors.keeps_product(), n * OUTPUTS);
    let to = ForwardBuffers {
        scaled_x: scaled_x.as_deref_mut().map(ViewMut::from),
        product: product.as_deref_mut().map(ViewMut::from),
        ..ForwardBuffers::new(xa.as_mut_slice().into(), y.as_mut_slice().into())
    };
    forward(linear, x[..].into(), Some(residual[..].into()), n, to);

    let mut grads = start_of_grads(trainables);
    let (mut d_xa, mut dx) = (vec![f32::NAN; xa.len()], vec![f32::NAN; n * INPUTS]);
    let mut d_product = room(vectors.needs_d_product(), n * OUTPUTS);
    let saved =
        SavedProducts { product: product.as_deref().map(View::from), ..SavedProducts::new(xa[..].into()) };
    let dx_view = Some(dx.as_mut_slice().into());
    let to = BackwardBuffers {
        d_product: d_product.as_deref_mut().map(ViewMut::from),
        ..BackwardBuffers::new(grads.as_mut_slice().into(), d_xa.as_mut_slice().into(), dx_view)
    };
    backward(linear, dy[..].into(), x[..].into(), saved, n, to);
    [y, dx, grads]
}

fn start_of_grads(len: usize) -> Vec<f32> {
    numbers(7, len)
}

/// A matrix `(n, width)` that holds each scaling's factors on its tokens and columns.
fn spread(scalings: &[Scaling], values: &[f64], n: usize, width: usize) -> Vec<f64> {
    let mut all = vec![1.0; n * width];
    for scaling in scalings {
        for token in scaling.tokens.clone().unwrap_or(0..n) {
            for (at, column) in scaling.columns.clone().enumerate() {
                all[token * width + column] *= values[scaling.vector.at + at];
            }
        }
    }
    all
}

/// The same by the twin, in f64.
fn expected(n: usize, deltas: &[Delta], parts: &Parts, dropout: Dropout, trainables: usize) -> [Vec<f64>; 3] {
    let values = widened(&numbers(1, LEN));
    let (x, dy, residual) = (doubles(2, n * INPUTS), doubles(3, n * OUTPUTS), doubles(4, n * OUTPUTS));
    let wide = |seed, len| f16_numbers(seed, len).iter().map(|v| v.to_f64()).collect::<Vec<_>>();
    let (w, frozen_bias) = (wide(5, INPUTS * OUTPUTS), wide(6, OUTPUTS));
    let of = |at: usize, len: usize| &values[at..][..len];
    let masks: Vec<Option<Vec<f64>>> = deltas
        .iter()
        .map(|delta| {
            let factor = |at| dropout.factor(delta.mask_id(), INPUTS, at / INPUTS, at % INPUTS);
            (dropout.p > 0.0).then(|| (0..n * INPUTS).map(|at| f64::from(factor(at))).collect())
        })
        .collect();
    let (u, g) = (spread(&parts.u, &values, n, INPUTS), spread(&parts.g, &values, n, OUTPUTS));
    let site = Site {
        n,
        inputs: INPUTS,
        outputs: OUTPUTS,
        w: &w,
        bias: parts.bias.map_or(&frozen_bias[..], |bias| of(bias.at, OUTPUTS)),
        u: Some(&u),
        g: Some(&g),
        bias_inside: parts.bias_place == BiasPlace::Inside,
        deltas: deltas
            .iter()
            .zip(&masks)
            .map(|(delta, mask)| Twin {
                a: of(delta.a, delta.rank * INPUTS),
                b: of(delta.b, delta.rank * delta.columns.len()),
                rank: delta.rank,
                columns: delta.columns.clone(),
                tokens: delta.tokens_of(n),
                scale: f64::from(delta.scale),
                d: delta.d.map(|d| of(d.at, delta.rank)),
                e: delta.e.map(|e| of(e.at, delta.columns.len())),
                dropped: mask.as_deref(),
            })
            .collect(),
    };
    let mut y = reference::forward(&site, &x);
    y.iter_mut().zip(residual).for_each(|(y, residual)| *y += residual);
    let found = reference::backward(&site, &x, &dy);
    let mut grads = widened(&start_of_grads(trainables));
    add_gradients(&mut grads, &found, deltas, parts, n);
    [y, found.x, grads]
}

/// Adds the gradients of what is trainable to the places it has.
fn add_gradients(grads: &mut [f64], found: &Gradients<f64>, deltas: &[Delta], parts: &Parts, n: usize) {
    let mut add = |trained: bool, at: usize, part: &[f64]| {
        if trained {
            grads[at..][..part.len()].iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
    };
    for (scalings, gradient, width) in [(&parts.u, &found.u, INPUTS), (&parts.g, &found.g, OUTPUTS)] {
        for scaling in scalings {
            for token in scaling.tokens.clone().unwrap_or(0..n) {
                let row = &gradient[token * width..][scaling.columns.clone()];
                add(!scaling.vector.frozen, scaling.vector.at, row);
            }
        }
    }
    if let Some(bias) = parts.bias {
        add(!bias.frozen, bias.at, &found.bias);
    }
    for (delta, found) in deltas.iter().zip(&found.deltas) {
        add(!delta.a_frozen, delta.a, &found.a);
        add(!delta.b_frozen, delta.b, &found.b);
        for (vector, gradient) in [(delta.d, &found.d), (delta.e, &found.e)] {
            if let Some(vector) = vector {
                add(!vector.frozen, vector.at, gradient);
            }
        }
    }
}

fn check(n: usize, deltas: &[Delta], parts: &Parts, dropout: Dropout, trainables: usize, what: &str) {
    let [y, dx, grads] = run(n, deltas, parts, dropout, trainables);
    let [expected_y, expected_dx, expected_grads] = expected(n, deltas, parts, dropout, trainables);
    assert_close(&y, &expected_y, 2e-5, &format!("{what}: y of {n}"));
    assert_close(&dx, &expected_dx, 2e-5, &format!("{what}: dx of {n}"));
    assert_close(&grads, &expected_grads, 5e-5, &format!("{what}: gradients of {n}"));
}

fn dropout(p: f32) -> Dropout {
    Dropout { key: 99, p, first_row: 2, seq_len: 15, stride: 16 }
}

/// Two plain deltas on different columns.
fn plain() -> [Delta; 2] {
    [
        Delta { a: 5, b: 5 + 3 * 37, rank: 3, columns: 0..150, scale: 1.7, ..Delta::default() },
        Delta { a: 600, b: 600 + 5 * 37, rank: 5, columns: 241..261, scale: -0.4, ..Delta::default() },
    ]
}

const CASES: [(usize, f32); 5] = [(150, 0.0), (150, 0.3), (1, 0.0), (7, 0.0), (7, 0.3)];

/// One and seven tokens as well, which are cut along the columns.
#[test]
fn cpu_matches_reference() {
    for (n, p) in CASES {
        check(n, &plain(), &Parts::default(), dropout(p), 1000, "plain");
    }
}

#[test]
fn d_and_e_scale_a_delta() {
    let (d, e) = (Some(Vector::trained(1000)), Some(Vector::trained(1010)));
    let frozen = Some(Vector::frozen(1000));
    // More columns than a panel holds.
    let wide = Delta { a: 5, b: 2000, rank: 3, columns: 2..261, scale: 1.7, ..Delta::default() };
    for (n, p) in CASES {
        for (d, e) in [(d, None), (None, e), (d, e), (frozen, e)] {
            let delta = Delta { d, e, ..wide.clone() };
            check(n, std::slice::from_ref(&delta), &Parts::default(), dropout(p), 4000, "d and e");
            // Frozen and shared factors, as in VeRA.
            let frozen = Delta { a_frozen: true, b_frozen: true, ..delta };
            let other = Delta { mask: Some(1), d: Some(Vector::trained(1500)), ..frozen.clone() };
            check(n, &[frozen, other], &Parts::default(), dropout(p), 2000, "frozen factors");
        }
    }
}

fn scaling(vector: Vector, columns: Range<usize>, tokens: Option<Range<usize>>) -> Scaling {
    Scaling { vector, columns, tokens }
}

#[test]
fn u_g_and_bias_scale_a_layer() {
    let whole = |at, width| vec![scaling(Vector::trained(at), 0..width, None)];
    for (n, p) in CASES {
        let some = (n > 1).then_some(1..n - 1);
        // Two requests of their own, and tokens with neither.
        let ranges = vec![
            scaling(Vector::trained(3000), 3..200, some.clone()),
            scaling(Vector::frozen(7000), 220..261, None),
            scaling(Vector::trained(3300), 3..200, Some(0..0)),
        ];
        let part = |u: &[Scaling], g: &[Scaling]| Parts { u: u.to_vec(), g: g.to_vec(), ..Parts::default() };
        let u = whole(4000, INPUTS);
        let some_u = vec![scaling(Vector::trained(4000), 5..20, some)];
        for parts in [
            part(&u, &[]),
            part(&[], &whole(3000, OUTPUTS)),
            part(&some_u, &whole(3000, OUTPUTS)),
            part(&u, &ranges),
            part(&[], &[scaling(Vector::frozen(7000), 0..OUTPUTS, None)]),
        ] {
            for bias in [None, Some(Vector::trained(5000)), Some(Vector::frozen(6500))] {
                for bias_place in [BiasPlace::Inside, BiasPlace::Outside] {
                    let parts = Parts { bias, bias_place, ..parts.clone() };
                    check(n, &plain(), &parts, dropout(p), 6000, "u and g");
                    check(n, &[], &parts, dropout(p), 6000, "u and g alone");
                }
            }
        }
        let bias = Some(Vector::trained(5000));
        check(n, &plain(), &Parts { bias, ..Parts::default() }, dropout(p), 6000, "a bias");
    }
}

/// Requests of different adapters in one batch, of which two share A; tokens without any, and an adapter without tokens.
#[test]
fn deltas_are_for_ranges_of_tokens() {
    let [first, second] = plain();
    for (n, p, unit) in [(150, 0.0, 1), (150, 0.3, 15), (7, 0.0, 1), (90, 0.3, 15)] {
        let cut = |share: usize| n * share / 6 / unit * unit;
        let deltas = [
            Delta { tokens: Some(0..cut(2)), ..first.clone() },
            Delta { tokens: Some(cut(2)..cut(5)), b: 1000, mask: Some(77), ..first.clone() },
            Delta { tokens: Some(cut(3)..cut(3)), ..second.clone() },
            Delta { tokens: Some(cut(1)..n), d: Some(Vector::trained(1900)), ..second.clone() },
        ];
        check(n, &deltas, &Parts::default(), dropout(p), 2000, "ranges of tokens");
    }
}

#[test]
#[should_panic(expected = "begins at a row")]
fn masks_of_tokens_inside_a_row_are_refused() {
    let deltas = plain().map(|delta| Delta { tokens: Some(7..20), ..delta });
    run(30, &deltas, &Parts::default(), dropout(0.3), 1000);
}

#[test]
#[should_panic(expected = "overlap")]
fn trained_vectors_that_overlap_are_refused() {
    let vector = |at| scaling(Vector::trained(at), 0..9, None);
    run(3, &[], &Parts { g: vec![vector(0), vector(20)], ..Parts::default() }, dropout(0.0), 100);
}

/// A gradient that nobody wants is not written, and a store that ends before frozen values is enough.
#[test]
fn frozen_parts_need_no_gradient() {
    let vector = Vector::frozen(500);
    let delta = Delta {
        a: 0,
        b: 200,
        rank: 2,
        columns: 0..40,
        d: Some(vector),
        e: Some(vector),
        a_frozen: true,
        b_frozen: true,
        ..Delta::default()
    };
    let all = scaling(vector, 0..30, None);
    let parts = Parts { u: vec![all.clone()], g: vec![all], bias: Some(vector), ..Parts::default() };
    check(9, &[delta], &parts, dropout(0.3), 0, "frozen");
}

/// Transposed factors give what the others give, within the bound of both: cut along columns and along tokens.
#[test]
fn transposed_factors_give_the_same() {
    let (inputs, outputs, rank, columns) = (37, 261, 5, 200);
    for (n, scaled) in [1, 4, 7, 30, 150].into_iter().flat_map(|n| [(n, false), (n, true)]) {
        let vectors = 5 + rank * (inputs + columns);
        let values = numbers(1, vectors + rank + columns);
        let mut delta = Delta {
            a: 5,
            b: 5 + rank * inputs,
            rank,
            columns: 40..40 + columns,
            scale: 1.7,
            d: scaled.then_some(Vector::trained(vectors)),
            e: scaled.then_some(Vector::trained(vectors + rank)),
            ..Delta::default()
        };
        let (x, bias) = (numbers(2, n * inputs), f16_numbers(6, outputs));
        let weight = f16_numbers(5, inputs * outputs);
        let layer = Layer { weight: Matrix::f16(weight[..].into(), inputs, outputs), bias: bias[..].into() };
        let of = |values: &[f32], delta: &Delta| {
            let (mut xa, mut y) = (vec![0f32; n * rank], vec![0f32; n * outputs]);
            let linear = AdaptedLinear::new(layer, std::slice::from_ref(delta), values.into(), Dropout::NONE);
            let to = ForwardBuffers::new(xa.as_mut_slice().into(), y.as_mut_slice().into());
            forward(linear, x[..].into(), None, n, to);
            (xa, y)
        };
        let (xa, y) = of(&values, &delta);
        let mut transposed = values.clone();
        for (start, rows, columns) in [(delta.a, rank, inputs), (delta.b, columns, rank)] {
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                transposed[start + column * rows + row] = values[start + row * columns + column];
            }
        }
        delta.transposed = true;
        let (transposed_xa, transposed_y) = of(&transposed, &delta);
        assert_close(&transposed_xa, &widened(&xa), 2e-5, "xa");
        assert_close(&transposed_y, &widened(&y), 2e-5, "y");
    }
}

/// More threads than stretches of a gradient cut these finer.
#[test]
fn the_number_of_threads_changes_no_bit() {
    let plain = Delta { a: 5, b: 2000, rank: 5, columns: 2..261, scale: 1.7, ..Delta::default() };
    let scaled = Delta { d: Some(Vector::trained(1000)), e: Some(Vector::trained(1010)), ..plain.clone() };
    let parts = Parts {
        u: vec![scaling(Vector::trained(4000), 0..INPUTS, None)],
        g: vec![scaling(Vector::trained(4100), 0..OUTPUTS, None)],
        bias: Some(Vector::trained(4400)),
        bias_place: BiasPlace::Inside,
    };
    // The crate `gemm`, at the plain level, sums a cut of a few columns in another order, and 16 threads cut these odd
    // sizes so. Widths that are multiples of 16, as all of GPT-2's are, have no such cut.
    let threads: &[usize] = if vectors() { &[2, 3, 16] } else { &[2, 3] };
    for (delta, parts) in [(plain, Parts::default()), (scaled, parts)] {
        for p in [0.0, 0.3] {
            let deltas = std::slice::from_ref(&delta);
            let one = with_threads(1, || run(150, deltas, &parts, dropout(p), 5000));
            for &threads in threads {
                let found = with_threads(threads, || run(150, deltas, &parts, dropout(p), 5000));
                assert!(found == one, "{threads} threads, dropout {p}");
            }
        }
    }
}

#[test]
fn dropout_keeps_the_expected_share_and_counts_rows_of_the_whole_step() {
    let whole = Dropout { key: 7, p: 0.3, first_row: 0, seq_len: 8, stride: 8 };
    let second_row = Dropout { first_row: 1, ..whole };
    let factors: Vec<f32> = (0..16 * 100).map(|at| whole.factor(0, 100, at / 100, at % 100)).collect();
    let kept = factors.iter().filter(|&&f| f != 0.0).count() as f64 / factors.len() as f64;
    assert!((kept - 0.7).abs() < 0.04, "{kept}");
    let again: Vec<f32> = (0..8 * 100).map(|at| second_row.factor(0, 100, at / 100, at % 100)).collect();
    assert_eq!(factors[800..], again);
    // A shorter padded length numbers the same tokens alike.
    let short = Dropout { seq_len: 5, first_row: 1, ..whole };
    assert_eq!(short.factor(0, 100, 3, 42), whole.factor(0, 100, 8 + 3, 42));
}
