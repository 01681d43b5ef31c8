//! Books against their definition, search against a scan, the fused update against its twin, and
//! 8-bit training against FP32 training on small problems.

use super::{
    codebook::{Codebook, SIGNED, UNSIGNED},
    *,
};
use crate::{kernels::adamw, testing::*};

const OPTIONS: Update =
    Update { step: 1, lr: 1e-2, betas: (0.9, 0.999), epsilon: 1e-8, weight_decay: 0.1, factor: 1.0 };

/// Both moments of one tensor.
#[derive(Clone, Default, Debug, PartialEq)]
struct State {
    wide: [Vec<f32>; 2],
    codes: [Vec<u8>; 2],
    scales: [Vec<f32>; 2],
}

impl State {
    fn zeros(len: usize, coded: bool) -> Self {
        let (wide, codes) = if coded { (0, len) } else { (len, 0) };
        Self {
            wide: [vec![0.0; wide], vec![0.0; wide]],
            codes: [vec![0; codes], vec![0; codes]],
            scales: [vec![0.0; codes.div_ceil(BLOCK)], vec![0.0; codes.div_ceil(BLOCK)]],
        }
    }

    fn moments(&mut self) -> Moments<'_> {
        let [first, second] = &mut self.wide;
        let [first_codes, second_codes] = &mut self.codes;
        let [first_scales, second_scales] = &mut self.scales;
        Moments {
            first: first.as_mut_slice().into(),
            second: second.as_mut_slice().into(),
            first_codes: first_codes.as_mut_slice().into(),
            first_scales: first_scales.as_mut_slice().into(),
            second_codes: second_codes.as_mut_slice().into(),
            second_scales: second_scales.as_mut_slice().into(),
        }
    }

    fn decoded(&self) -> [Vec<f32>; 2] {
        let of = |signed, at: usize| {
            reference::decode(&reference::book(signed), &self.codes[at], &self.scales[at])
        };
        [of(true, 0), of(false, 1)]
    }

    fn step(&mut self, values: &mut [f32], gradient: &[f32], u: Update) {
        let pieces: Vec<Piece> = pieces(values.len(), !self.codes[0].is_empty()).collect();
        update(values.into(), gradient.into(), self.moments(), &pieces, u);
    }
}

fn books() -> [(&'static Codebook, bool); 2] {
    [(&SIGNED, true), (&UNSIGNED, false)]
}

fn code(book: &Codebook, signed: bool, x: f32) -> u8 {
    let code = if signed { book.signed_code(x) } else { book.unsigned_code(x) };
    u8::try_from(code).unwrap()
}

#[test]
fn books_are_their_definition() {
    for (book, signed) in books() {
        let expected: Vec<f64> = reference::book(signed);
        assert_close(&book.values, &expected, 1e-7, "book");
        assert!(book.values.windows(2).all(|pair| pair[0] < pair[1]));
        for (&value, expected) in book.values.iter().zip(expected) {
            assert!((f64::from(value) - expected).abs() <= 1e-7 * expected.abs(), "{value} {expected}");
        }
        assert_eq!(book.values[255], 1.0);
    }
    let signed = &SIGNED.values;
    assert_eq!((signed[127], UNSIGNED.values[0]), (0.0, 0.0));
    assert!((1..=127).all(|step| signed[127 - step] == -signed[127 + step]));
    // Known members: the ends of the maps as published.
    assert_eq!((signed[0], signed[128]), (-0.992_968_74, 5.5e-7));
    assert_eq!((UNSIGNED.values[1], UNSIGNED.values[254]), (3.25e-7, 0.996_484_4));
}

/// Every border and its neighbours, and many floats between.
#[test]
fn the_search_finds_what_a_scan_finds() {
    for (book, signed) in books() {
        let scan: Vec<f64> = book.values.iter().map(|&value| f64::from(value)).collect();
        let mut points = vec![0.0f32, 1.0, f32::MIN_POSITIVE, 1e-45, 2f32.powi(-23), 2f32.powi(-24)];
        for pair in book.values.windows(2) {
            let middle = ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32;
            points.extend([middle, middle.next_up(), middle.next_down(), pair[0], pair[1]]);
        }
        points.extend((0..200_000).map(|at| f32::from_bits((at * 5431) % 0x3f80_0001)));
        points.extend(numbers(5, 50_000));
        if signed {
            points.extend(points.clone().iter().map(|x| -x));
        }
        for x in points.into_iter().filter(|&x| signed || x >= 0.0) {
            let (found, expected) = (code(book, signed, x), reference::nearest(&scan, f64::from(x)));
            assert_eq!(found, expected, "{x:e} in the book with signs {signed}");
        }
        // Beyond the ends, where rounding may lead.
        assert_eq!(code(book, signed, 1.0f32.next_up()), 255);
    }
    assert_eq!(SIGNED.signed_code(-1.0), 0);
}

#[test]
fn what_is_encoded_stays_within_half_a_gap() {
    for (book, signed) in books() {
        for x in numbers(9, 20_000).into_iter().map(|x| x.powi(7)) {
            let x = if signed { x } else { x.abs() };
            let error = (book.values[code(book, signed, x) as usize] - x).abs();
            // Cells are 0.9 / parts of their decade wide, wider by half where decades meet.
            let decade = 10f32.powf(x.abs().max(1e-7).log10().ceil()).max(1e-6);
            let parts = 2f32.powf(decade.log10().round() + if signed { 6.0 } else { 7.0 });
            assert!(error <= 0.75 * 0.9 * decade / parts, "{x:e} errs by {error:e}");
        }
    }
}

/// Each step begins with the state of the fused side, so that a code that differs does not spread.
#[test]
fn cpu_matches_its_twin() {
    for len in [1, 255, 256, 257, 5000, 40_001] {
        let mut values = numbers(1, len);
        let mut state = State::zeros(len, true);
        for step in 1..=6 {
            let gradient: Vec<f32> = numbers(1 + step, len).iter().map(|x| x.powi(5)).collect();
            let u = Update { step, factor: 0.25, ..OPTIONS };
            let (mut wide, mut twin) = (widened(&values), state.clone());
            let mut scales = twin.scales.clone().map(|scales| widened(&scales));
            {
                let ([m, v], [m_scales, v_scales]) = (&mut twin.codes, &mut scales);
                let m = reference::Coded { codes: m, scales: m_scales };
                let v = reference::Coded { codes: v, scales: v_scales };
                reference::update(&mut wide, &widened(&gradient), m, v, u);
            }
            state.step(&mut values, &gradient, u);
            assert_close(&values, &wide, 1e-6, "values");
            for (at, scales) in scales.iter().enumerate() {
                assert_close(&state.scales[at], scales, 1e-6, "scales");
                let pairs = || state.codes[at].iter().zip(&twin.codes[at]);
                assert!(pairs().all(|(a, b)| a.abs_diff(*b) <= 1), "codes differ by more than a step");
                let differing = pairs().filter(|(a, b)| a != b).count();
                assert!(differing * 1000 <= len, "{differing} of {len} codes differ");
            }
        }
    }
}

/// From a fresh state the new values are those of the FP32 update, because moments are rounded after it.
#[test]
fn the_first_update_and_fp32_pieces_are_the_update_of_adamw() {
    let len = 70_001;
    let (start, gradient) = (numbers(1, len), numbers(2, len));
    let mut wide = [start.clone(), vec![0.0; len], vec![0.0; len]];
    for coded in [true, false] {
        wide[0].copy_from_slice(&start);
        let [w, m, v] = &mut wide;
        m.fill(0.0);
        v.fill(0.0);
        let (mut values, mut state) = (start.clone(), State::zeros(len, coded));
        for step in 1..=if coded { 1 } else { 4 } {
            let u = Update { step, ..OPTIONS };
            adamw::update(
                w.as_mut_slice().into(),
                gradient[..].into(),
                m.as_mut_slice().into(),
                v.as_mut_slice().into(),
                u,
            );
            state.step(&mut values, &gradient, u);
        }
        assert_eq!(values, *w);
        assert!(coded || state.wide == [m.clone(), v.clone()]);
    }
}

#[test]
fn results_do_not_depend_on_threads() {
    let len = 200_003;
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let (mut values, mut state) = (numbers(1, len), State::zeros(len, true));
        for step in 1..=3 {
            let gradient = numbers(10 + step, len);
            pool.install(|| state.step(&mut values, &gradient, Update { step, ..OPTIONS }));
        }
        (values, state)
    };
    assert!(run(1) == run(3));
}

#[test]
fn a_gradient_of_zero_moves_nothing_but_decay() {
    let len = 600;
    let (mut values, mut state) = (vec![2.0f32; len], State::zeros(len, true));
    state.step(&mut values, &vec![0.0; len], OPTIONS);
    assert!(values.iter().all(|&w| w == 2.0 * 0.999));
    assert_eq!(state.scales, [vec![0.0; 3], vec![0.0; 3]]);
    assert!(state.decoded().concat().iter().all(|&x| x == 0.0));
    // From there it continues as from a fresh state.
    let mut fresh = (values.clone(), State::zeros(len, true));
    let (gradient, u) = (numbers(4, len), Update { step: 2, ..OPTIONS });
    state.step(&mut values, &gradient, u);
    fresh.1.step(&mut fresh.0, &gradient, u);
    assert_eq!((values, state), fresh);
}

#[test]
fn ranges_from_tiny_to_huge_stay_finite() {
    for size in [1e-42f32, 1e-30, 1e-15, 1.0, 1e15, 1e30, 3e38] {
        let (mut values, mut state) = (vec![0.5f32; 300], State::zeros(300, true));
        for step in 1..=20 {
            let gradient: Vec<f32> = numbers(step, 300).iter().map(|x| x * size).collect();
            state.step(&mut values, &gradient, Update { step, weight_decay: 0.0, ..OPTIONS });
            let all = [values.clone(), state.decoded().concat(), state.scales.concat()].concat();
            assert!(all.iter().all(|x| x.is_finite()), "gradients of {size:e} in step {step}");
        }
        // 20 steps of at most the rate, up to the growth of a second moment that is rounded.
        assert!(values.iter().all(|w| (w - 0.5).abs() < 0.5), "gradients of {size:e} leap");
    }
}

/// One element of 1 among gradients of 1e-4: their second moments, 1e-8 of the scale, are below the
/// smallest value of the book.
#[test]
fn a_small_gradient_beside_a_large_one_makes_no_leap() {
    let (mut values, mut state) = (vec![0f32; BLOCK], State::zeros(BLOCK, true));
    let mut gradient = vec![1e-4f32; BLOCK];
    gradient[7] = 1.0;
    for step in 1..=50 {
        let before = values.clone();
        state.step(&mut values, &gradient, Update { step, weight_decay: 0.0, ..OPTIONS });
        let moved = values.iter().zip(&before).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(moved <= 1.05 * OPTIONS.lr as f32, "step {step} moves by {moved}");
    }
    assert!(state.codes[1].iter().all(|&code| code > 0));
}

/// Final loss and largest distance of the curves of `loss` over `steps` updates, FP32 and 8-bit.
fn race(
    len: usize,
    steps: u64,
    lr: impl Fn(u64) -> f64,
    mut problem: impl FnMut(&[f32], u64, &mut [f32]) -> f64,
) -> [Vec<f64>; 2] {
    [false, true].map(|coded| {
        let (mut values, mut state) = (vec![0f32; len], State::zeros(len, coded));
        let mut gradient = vec![0f32; len];
        (1..=steps)
            .map(|step| {
                let loss = problem(&values, step, &mut gradient);
                let u = Update { step, lr: lr(step), weight_decay: 0.0, ..OPTIONS };
                state.step(&mut values, &gradient, u);
                loss
            })
            .collect()
    })
}

/// Bounds of docs/NUMERICS.md: largest distance of two loss curves, as a part of the first loss, and of
/// the means over the last tenth, as a part of what the FP32 run has gained.
const CURVE: f64 = 0.02;
const FINAL: f64 = 0.01;

#[track_caller]
fn assert_alike([wide, coded]: [Vec<f64>; 2], what: &str) {
    let apart = wide.iter().zip(&coded).map(|(a, b)| (a - b).abs() / wide[0]).fold(0.0, f64::max);
    let end = |curve: &[f64]| {
        let last = &curve[curve.len() - curve.len() / 10..];
        last.iter().sum::<f64>() / last.len() as f64
    };
    let ends = (end(&coded) - end(&wide)).abs() / (wide[0] - end(&wide));
    println!("measured {what}: curve {apart:.2e} of {CURVE}, final {ends:.2e} of {FINAL}");
    assert!(end(&wide) < 0.7 * wide[0], "{what}: FP32 has not learnt");
    assert!(apart <= CURVE, "{what}: the curves are {apart} apart");
    assert!(ends <= FINAL, "{what}: final losses {} and {}", end(&wide), end(&coded));
}

/// `sum c_i (w_i - t_i)^2 / 2` with curvatures from 1e-3 to 1, gradients with noise, a falling rate.
#[test]
fn a_noisy_quadratic_ends_as_with_fp32_moments() {
    let (len, steps) = (1000, 2000);
    let target = numbers(1, len);
    let curvature: Vec<f32> = numbers(2, len).iter().map(|x| 10f32.powf(-1.5 + 1.5 * x)).collect();
    let curves = race(
        len,
        steps,
        |step| 1e-2 * (1.0 - step as f64 / steps as f64),
        |values, step, gradient| {
            let noise = numbers(100 + step, len);
            let mut loss = 0.0;
            for i in 0..len {
                let off = values[i] - target[i];
                loss += f64::from(curvature[i] * off * off) / 2.0;
                gradient[i] = curvature[i] * (off + 0.5 * noise[i]);
            }
            loss
        },
    );
    assert_alike(curves, "noisy quadratic");
}

/// Logistic regression on linearly labelled points, a fresh batch of 16 a step; the loss is that of the batch.
#[test]
fn logistic_regression_ends_as_with_fp32_moments() {
    let (len, steps, rows) = (300, 1000, 16);
    let truth = numbers(1, len);
    let curves = race(
        len,
        steps,
        |_| 3e-3,
        |values, step, gradient| {
            gradient.fill(0.0);
            let mut loss = 0.0;
            for row in 0..rows {
                let x = numbers(1000 + step * rows + row, len);
                let dot = |w: &[f32]| w.iter().zip(&x).map(|(a, b)| a * b).sum::<f32>();
                let label = if dot(&truth) > 0.0 { 1.0 } else { -1.0 };
                let margin = label * dot(values);
                loss += f64::from((-margin).exp().ln_1p()) / rows as f64;
                let slope = -label / (1.0 + margin.exp()) / rows as f32;
                gradient.iter_mut().zip(&x).for_each(|(g, x)| *g += slope * x);
            }
            loss
        },
    );
    assert_alike(curves, "logistic regression");
}

#[test]
fn pieces_cover_a_tensor() {
    for len in [1, 4096, PIECE, PIECE + 1, 3 * PIECE - 5] {
        let pieces: Vec<Piece> = pieces(len, true).collect();
        assert_eq!(pieces.iter().map(|piece| piece.len).sum::<usize>(), len);
        assert_eq!(pieces.iter().map(|piece| piece.blocks()).sum::<usize>(), len.div_ceil(BLOCK));
    }
}
