//! Norms of the columns of a frozen matrix with deltas, and the output scale over them.

use cuda_shim::{Launcher, kernels};
use engraft::kernels::{
    adapted_linear::reference::Delta,
    column_norms::{device_scratch, reference},
};
use half::{bf16, f16};

use crate::{args, harness::*};

kernels!(
    column_norms_factors_launch,
    column_norms_parts_f16_launch,
    column_norms_parts_bf16_launch,
    column_norms_finish_launch,
    output_scale_launch,
    output_scale_backward_launch,
);

/// By the type of activations: FP32 ones stand beside FP16 matrices.
const PARTS: [Launcher; 3] =
    [column_norms_parts_f16_launch, column_norms_parts_f16_launch, column_norms_parts_bf16_launch];

/// Deltas of these ranks on these columns; the first one has d and e.
fn check<T: Activation>((inputs, outputs): (usize, usize), deltas: &[(usize, usize, usize)], seed: u64) {
    let w = rounded::<T::Weight>(1, inputs * outputs);
    let tensors: Vec<[Vec<f64>; 4]> = (10u64..)
        .step_by(4)
        .zip(deltas)
        .map(|(seed, &(rank, first, end))| {
            let lens = [rank * inputs, (end - first) * rank, rank, end - first];
            std::array::from_fn(|at| rounded::<f32>(seed + at as u64, lens[at]))
        })
        .collect();
    let scales = [1.7f32, -0.6, 0.3];
    let twins: Vec<Delta<f64>> = (0..)
        .zip(&tensors)
        .zip(deltas)
        .map(|((at, [a, b, d, e]), &(rank, first, end))| Delta {
            a,
            b,
            rank,
            columns: first..end,
            tokens: 0..0,
            scale: f64::from(scales[at]),
            d: (at == 0).then_some(d),
            e: (at == 0).then_some(e),
            dropped: None,
        })
        .collect();

    let ranks: usize = deltas.iter().map(|delta| delta.0).sum();
    let (a_all, b_all) = (Device::<f32>::poisoned(ranks * inputs), Device::<f32>::poisoned(ranks * outputs));
    let mut before = 0;
    for (at, (values, &(rank, first, end))) in tensors.iter().zip(deltas).enumerate() {
        let [a, b, d, e] = values.each_ref().map(|values| Device::<f32>::of(values));
        let null = std::ptr::null_mut();
        let (d_head, e_head) = if at == 0 { (d.head(), e.head()) } else { (null, null) };
        let (to_a, to_b) = (a_all.at(before * inputs), b_all.at(before * outputs));
        let sizes = [rank, inputs, outputs, first, end - first].map(|size| size as i32);
        let [rank_, inputs_, outputs_, first_, columns] = sizes;
        let args = args![
            a.head(),
            b.head(),
            d_head,
            e_head,
            scales[at],
            to_a,
            to_b,
            rank_,
            inputs_,
            outputs_,
            first_,
            columns
        ];
        let blocks = (rank * inputs.max(outputs)).div_ceil(256);
        run(column_norms_factors_launch, [blocks, 1, 1], 256, 0, seed, args);
        before += rank;
    }

    let share = device_scratch::share(inputs);
    let splits = inputs.div_ceil(share);
    let (weight, parts) = (Device::<T::Weight>::of(&w), Device::<f32>::poisoned(splits * outputs));
    let norms = Device::<f32>::poisoned(outputs);
    let [ranks_, inputs_, outputs_, share_, splits_] =
        [ranks, inputs, outputs, share, splits].map(|size| size as i32);
    let args =
        args![weight.head(), a_all.head(), b_all.head(), parts.head(), ranks_, inputs_, outputs_, share_];
    run(PARTS[T::INDEX], [outputs.div_ceil(64), splits, 1], 256, 0, seed, args);
    let args = args![parts.head(), splits_, norms.head(), outputs_];
    run(column_norms_finish_launch, [outputs.div_ceil(256), 1, 1], 256, 0, seed, args);
    let expected = reference::forward(&w, (inputs, outputs), &twins);
    assert_close(&norms.wide(), &expected, 2e-6, "norms");

    let bytes = 4 * (ranks * (inputs + outputs) + splits * outputs);
    assert_eq!(device_scratch::norms((inputs, outputs), ranks), bytes, "scratch is what was used");
}

#[test]
fn norms_match_the_twin() {
    check::<f16>((7, 11), &[], 1);
    check::<f16>((7, 11), &[(3, 2, 9)], 2);
    check::<f16>((64, 64), &[(16, 0, 64)], 1);
    check::<f16>((70, 130), &[(19, 1, 99), (5, 60, 130), (1, 0, 130)], 3);
    check::<bf16>((70, 130), &[(19, 1, 99), (5, 60, 130), (1, 0, 130)], 1);
    // Several shares, the last of a part of a tile.
    check::<f16>((600, 67), &[(8, 0, 67)], 2);
}

#[test]
fn a_scale_and_its_gradient_match_the_twin() {
    let count = 301;
    let (m, dg, before) = (rounded::<f32>(1, count), rounded::<f32>(2, count), rounded::<f32>(3, count));
    let mut norms: Vec<f64> = rounded::<f32>(4, count).iter().map(|n| n.abs()).collect();
    norms[5] = 0.0;
    let [m_in, dg_in, n_in, dm] = [&m, &dg, &norms, &before].map(|values| Device::<f32>::of(values));
    let g = Device::<f32>::poisoned(count);
    let args = args![m_in.head(), n_in.head(), g.head(), count as i32];
    run(output_scale_launch, [count.div_ceil(256), 1, 1], 256, 0, 1, args);
    assert_close(&g.wide(), &reference::output_scale(&m, &norms), 1e-7, "g");
    let args = args![dg_in.head(), n_in.head(), dm.head(), count as i32];
    run(output_scale_backward_launch, [count.div_ceil(256), 1, 1], 256, 0, 1, args);
    let part = reference::output_scale_backward(&dg, &norms);
    let expected: Vec<f64> = before.iter().zip(part).map(|(a, b)| a + b).collect();
    assert_close(&dm.wide(), &expected, 1e-6, "dm");
}
