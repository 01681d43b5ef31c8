//! The REFERENCE twin against the op of adapted layers and central differences, then the CPU side against it.

use half::f16;

use super::{
    reference::{forward as norms_of, output_scale as scale_of, output_scale_backward as scale_gradient},
    *,
};
use crate::{
    kernels::{
        adapted_linear::{
            Vector,
            reference::{self as linear, Delta as Twin, Site},
        },
        nf4, q8,
    },
    testing::*,
};

/// Two deltas of ranks 3 and 2 that overlap on a matrix (7, 11), one with d and e.
struct Factors {
    a: [Vec<f64>; 2],
    b: [Vec<f64>; 2],
    d: Vec<f64>,
    e: Vec<f64>,
}

impl Factors {
    fn new() -> Self {
        Self {
            a: [doubles(1, 3 * 7), doubles(2, 2 * 7)],
            b: [doubles(3, 6 * 3), doubles(4, 11 * 2)],
            d: doubles(5, 3),
            e: doubles(6, 6),
        }
    }

    fn deltas(&self) -> Vec<Twin<'_, f64>> {
        let whole = Twin {
            a: &self.a[1],
            b: &self.b[1],
            rank: 2,
            columns: 0..11,
            tokens: 0..7,
            scale: -0.6,
            d: None,
            e: None,
            dropped: None,
        };
        let part = Twin {
            a: &self.a[0],
            b: &self.b[0],
            rank: 3,
            columns: 4..10,
            scale: 1.7,
            d: Some(&self.d),
            e: Some(&self.e),
            ..whole.clone()
        };
        vec![part, whole]
    }
}

/// A layer that is given the unit vectors returns the rows of V.
#[test]
fn reference_norms_are_those_of_what_an_adapted_layer_multiplies_with() {
    let (w, bias, factors) = (doubles(7, 77), vec![0.0; 11], Factors::new());
    let unit: Vec<f64> = (0..49).map(|at| f64::from(u8::from(at % 8 == 0))).collect();
    let deltas = factors.deltas();
    let site = Site {
        n: 7,
        inputs: 7,
        outputs: 11,
        w: &w,
        bias: &bias,
        u: None,
        g: None,
        bias_inside: false,
        deltas: deltas.clone(),
    };
    let v = linear::forward(&site, &unit);
    for (j, found) in norms_of(&w, (7, 11), &deltas).into_iter().enumerate() {
        let expected = v.iter().skip(j).step_by(11).map(|v| v * v).sum::<f64>().sqrt();
        assert!((found - expected).abs() < 1e-12, "{found} against {expected}");
    }
}

#[test]
fn reference_backward_is_central_differences_with_norms_held() {
    let (m, dg) = (doubles(8, 11), doubles(9, 11));
    let norms = norms_of(&doubles(7, 77), (7, 11), &Factors::new().deltas());
    let found = scale_gradient(&dg, &norms);
    assert_gradient(&m, &found, "m", |m| weighted(&scale_of(m, &norms), &dg));
}

const LEN: usize = 9000;

/// Deltas of `matrix` in flat values of [`LEN`], and the twin's: one of all columns, one of some with d and e.
fn deltas((inputs, outputs): (usize, usize)) -> Vec<Delta> {
    let whole =
        Delta { a: 3, b: 3 + 5 * inputs, rank: 5, columns: 0..outputs, scale: 1.7, ..Delta::default() };
    let at = whole.b + 5 * outputs;
    let some = outputs / 3..outputs - 1;
    let part = Delta {
        a: at,
        b: at + 3 * inputs,
        rank: 3,
        d: Some(Vector::trained(1)),
        e: Some(Vector::frozen(2)),
        columns: some,
        scale: -0.4,
        ..Delta::default()
    };
    vec![whole, part]
}

fn twin(deltas: &[Delta], values: &[f64], inputs: usize, weights: &[f64], outputs: usize) -> Vec<f64> {
    let of = |at: usize, len: usize| &values[at..][..len];
    let twins: Vec<Twin<f64>> = deltas
        .iter()
        .map(|delta| Twin {
            a: of(delta.a, delta.rank * inputs),
            b: of(delta.b, delta.rank * delta.columns.len()),
            rank: delta.rank,
            columns: delta.columns.clone(),
            tokens: 0..0,
            scale: f64::from(delta.scale),
            d: delta.d.map(|d| of(d.at, delta.rank)),
            e: delta.e.map(|e| of(e.at, delta.columns.len())),
            dropped: None,
        })
        .collect();
    norms_of(weights, (inputs, outputs), &twins)
}

fn cpu_norms(weight: Matrix, deltas: &[Delta], values: &[f32]) -> Vec<f32> {
    let mut norms = vec![f32::NAN; weight.cols];
    forward(AdaptedMatrix { weight, deltas, values: values.into() }, norms.as_mut_slice().into());
    norms
}

/// Shapes that are no multiple of a tile, and some that are.
const SHAPES: [(usize, usize); 4] = [(5, 7), (64, 64), (130, 192), (150, 333)];

#[test]
fn cpu_matches_reference_with_any_number_of_threads() {
    let values = numbers(1, LEN);
    for (inputs, outputs) in SHAPES {
        let weight = f16_numbers(2, inputs * outputs);
        let wide: Vec<f64> = weight.iter().map(|w| w.to_f64()).collect();
        let matrix = Matrix::f16(weight[..].into(), inputs, outputs);
        let all = deltas((inputs, outputs));
        for deltas in [&all[..0], &all[..1], &all[1..], &all[..]] {
            let found = with_threads(1, || cpu_norms(matrix, deltas, &values));
            let expected = twin(deltas, &widened(&values), inputs, &wide, outputs);
            assert_close(&found, &expected, 1e-6, "norms");
            for threads in [2, 3, 16] {
                let other = with_threads(threads, || cpu_norms(matrix, deltas, &values));
                assert_eq!(found, other, "{threads} threads");
            }
        }
    }
}

/// W in strips gives the bits of W in rows; codes give the norms of their values.
#[test]
fn every_form_of_weights_has_its_norms() {
    let (inputs, outputs) = (130, 192);
    let (values, weight) = (numbers(1, LEN), f16_numbers(2, inputs * outputs));
    let deltas = deltas((inputs, outputs));
    let rows = Matrix::f16(weight[..].into(), inputs, outputs);
    let expected = cpu_norms(rows, &deltas, &values);
    let strips: Vec<f16> = (0..outputs / 32)
        .flat_map(|strip| {
            (0..inputs).flat_map(move |row| (0..32).map(move |j| row * outputs + strip * 32 + j))
        })
        .map(|at| weight[at])
        .collect();
    let layout = crate::kernels::matmul::Layout::Strips;
    let strips = Matrix { layout, ..Matrix::f16(strips[..].into(), inputs, outputs) };
    assert_eq!(cpu_norms(strips, &deltas, &values), expected);

    let mut codes = vec![0i8; inputs * outputs];
    let wide: Vec<f32> = weight.iter().map(|w| w.to_f32()).collect();
    let blocks = wide.chunks(q8::BLOCK).zip(codes.chunks_mut(q8::BLOCK));
    let scales: Vec<f16> = blocks.map(|(wide, codes)| q8::quantise(wide, codes)).collect();
    let four = nf4::quantise(&wide, nf4::Sizes { rows: inputs, cols: outputs });
    let eight = Matrix::codes(codes[..].into(), scales[..].into(), inputs, outputs);
    for matrix in [eight, Matrix::nf4(four.view())] {
        let rounded = widened(&matrix.to_floats());
        let found = cpu_norms(matrix, &deltas, &values);
        assert_close(
            &found,
            &twin(&deltas, &widened(&values), inputs, &rounded, outputs),
            1e-6,
            "norms of codes",
        );
        assert_ne!(found, expected);
    }
}

#[test]
fn a_scale_follows_from_norms_and_is_zero_where_they_are() {
    let (m, dg, norms) = ([3.0f32, -2.0, 5.0, 1.0], [1.0f32, 4.0, 7.0, 1.0], [2.0f32, 4.0, 0.0, f32::NAN]);
    let (mut g, mut dm) = ([9.0f32; 4], [10.0f32; 4]);
    output_scale(m[..].into(), norms[..].into(), g.as_mut_slice().into());
    output_scale_backward(dg[..].into(), norms[..].into(), dm.as_mut_slice().into());
    assert_eq!((g[..3].to_vec(), dm[..3].to_vec()), (vec![1.5, -0.5, 0.0], vec![10.5, 11.0, 10.0]));
    assert!(g[3].is_nan() && dm[3].is_nan());
}

/// A column that its delta takes away has norm 0.
#[test]
fn a_column_may_vanish() {
    let weight = [1.0f32, 2.0, 3.0, 4.0].map(f16::from_f32);
    let delta = Delta { a: 0, b: 2, rank: 1, columns: 1..2, scale: -1.0, ..Delta::default() };
    let norms = cpu_norms(Matrix::f16(weight[..].into(), 2, 2), &[delta], &[2.0, 4.0, 1.0]);
    assert_eq!(norms, [10f32.sqrt(), 0.0]);
}
