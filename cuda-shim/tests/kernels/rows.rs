//! Kernels that work row by row, against their twins: embedding, layer norm, gather and scatter, cross-entropy.

use cuda_shim::{Launcher, kernels};
use engraft::kernels::{argmax, head_loss, layernorm::reference};
use half::{bf16, f16};

use crate::{args, harness::*};

kernels!(
    embed_f32_launch,
    embed_f16_launch,
    embed_bf16_launch,
    layernorm_forward_f32_launch,
    layernorm_forward_f16_launch,
    layernorm_forward_bf16_launch,
    layernorm_backward_f32_launch,
    layernorm_backward_f16_launch,
    layernorm_backward_bf16_launch,
    layernorm_forward_trained_f32_launch,
    layernorm_forward_trained_f16_launch,
    layernorm_forward_trained_bf16_launch,
    layernorm_backward_trained_f32_launch,
    layernorm_backward_trained_f16_launch,
    layernorm_backward_trained_bf16_launch,
    layernorm_parameters_f32_launch,
    layernorm_parameters_f16_launch,
    layernorm_parameters_bf16_launch,
    layernorm_parameters_finish_launch,
    argmax_launch,
    gather_f32_launch,
    gather_f16_launch,
    gather_bf16_launch,
    scatter_f32_launch,
    scatter_f16_launch,
    scatter_bf16_launch,
    cross_entropy_f32_launch,
    cross_entropy_f16_launch,
    cross_entropy_bf16_launch,
    cross_entropy_once_f32_launch,
    cross_entropy_once_f16_launch,
    cross_entropy_once_bf16_launch,
);

/// Widths: odd, a vector, more than a warp takes at once.
const WIDTHS: [usize; 4] = [5, 8, 264, 1043];

fn embed<T: Activation>(kernel: Launcher) {
    for c in WIDTHS {
        let (ids, positions) = ([6.0, 0.0, 2.0], [0.0, 4.0, 4.0]);
        let (wte, wpe) = (rounded::<T::Weight>(1, 7 * c), rounded::<f16>(2, 5 * c));
        let x = Device::<T>::poisoned(3 * c);
        let tables = (Device::<T::Weight>::of(&wte), Device::<f16>::of(&wpe));
        let (i, p) = (Device::<u32>::of(&ids), Device::<u32>::of(&positions));
        let (wte_in, wpe_in, none) = (tables.0.head(), tables.1.head(), std::ptr::null::<f32>());
        let args = args![i.head(), p.head(), wte_in, wpe_in, none, x.head(), 7i32, c as i32];
        run(kernel, [3, 1, 1], 128, 0, 1, args);
        let rows = ids.into_iter().zip(positions).flat_map(|(id, position)| {
            let (token, place) = (&wte[id as usize * c..][..c], &wpe[position as usize * c..][..c]);
            token.iter().zip(place).map(|(a, b)| a + b).collect::<Vec<_>>()
        });
        assert_close(&x.wide(), &rows.collect::<Vec<_>>(), T::ROUNDING, "x");
    }
}

#[test]
fn embedding_adds_rows_of_both_tables() {
    embed::<f32>(embed_f32_launch);
    embed::<f16>(embed_f16_launch);
    embed::<bf16>(embed_bf16_launch);
}

/// Grid, threads and shared memory of a block for each of `n` rows, in which a thread holds up to `runs` runs.
fn a_row_a_block(n: usize, c: usize, runs: usize, values: usize) -> ([usize; 3], usize, usize) {
    let lines = c.div_ceil(256);
    ([n, 1, 1], 32 * lines.div_ceil(runs), 128 * values * lines)
}

fn layernorm<T: Activation>(forward: Launcher, backward: Launcher) {
    let n = 7;
    // The last width takes every run of the fewest threads. Threads change no bit.
    for c in WIDTHS.into_iter().chain([2043]) {
        let [whole, some, few] = [(1, 1), (2, 2), (4, 3)]
            .map(|(runs, seed)| layernorm_of::<T>((forward, backward), (n, c), runs, seed));
        assert!(whole == some && whole == few, "the number of threads changes bits, width {c}");
    }
}

/// y and dx, held against the twin.
fn layernorm_of<T: Activation>(
    (forward, backward): (Launcher, Launcher),
    (n, c): (usize, usize),
    runs: usize,
    seed: u64,
) -> [Vec<f64>; 2] {
    let x: Vec<f64> = numbers(1, n * c).iter().map(|x| T::of(3.0 * x + 5.0).wide()).collect();
    let (gain, bias) = (rounded::<f16>(2, c), rounded::<f16>(3, c));
    let (dy, dx) = (rounded::<T>(4, n * c), rounded::<T>(5, n * c));
    let (x_in, g, b) = (Device::<T>::of(&x), Device::<f16>::of(&gain), Device::<f16>::of(&bias));
    let (y, stats) = (Device::<T>::poisoned(n * c), Device::<f32>::poisoned(n * 2));
    let width = c as i32;
    let (grid, threads, shared) = a_row_a_block(n, c, runs, 1);
    let args = args![x_in.head(), g.head(), b.head(), 1e-5f32, y.head(), stats.head(), width];
    run(forward, grid, threads, shared, seed, args);
    let (expected, expected_stats) = reference::forward(&x, &gain, &bias, 1e-5);
    assert_close(&y.wide(), &expected, T::ROUNDING + 2e-6, "y");
    assert_close(&stats.wide(), &expected_stats, 2e-6, "stats");

    let (dy_in, sum) = (Device::<T>::of(&dy), Device::<T>::of(&dx));
    let args = args![dy_in.head(), x_in.head(), stats.head(), g.head(), sum.head(), width];
    run(backward, grid, threads, 2 * shared, seed, args);
    let part = reference::backward(&dy, &x, &expected_stats, &gain);
    let expected: Vec<f64> = dx.iter().zip(part).map(|(a, b)| a + b).collect();
    assert_close(&sum.wide(), &expected, T::ROUNDING + 2e-6, "dx");
    [y.wide(), sum.wide()]
}

#[test]
fn layernorm_matches_its_twin() {
    layernorm::<f32>(layernorm_forward_f32_launch, layernorm_backward_f32_launch);
    layernorm::<f16>(layernorm_forward_f16_launch, layernorm_backward_f16_launch);
    layernorm::<bf16>(layernorm_forward_bf16_launch, layernorm_backward_bf16_launch);
}

/// A gain, a bias or both in FP32.
fn trained_layernorm<T: Activation>([forward, backward, parameters]: [Launcher; 3]) {
    let n = 7;
    for (c, (gain_trained, bias_trained)) in
        WIDTHS.into_iter().flat_map(|c| [(true, true), (true, false), (false, true)].map(move |of| (c, of)))
    {
        let x: Vec<f64> = numbers(1, n * c).iter().map(|x| T::of(3.0 * x + 5.0).wide()).collect();
        let of =
            |seed, trained: bool| if trained { rounded::<f32>(seed, c) } else { rounded::<f16>(seed, c) };
        let (gain, bias) = (of(2, gain_trained), of(3, bias_trained));
        let (dy, dx) = (rounded::<T>(4, n * c), rounded::<T>(5, n * c));
        let (x_in, dy_in, sum) = (Device::<T>::of(&x), Device::<T>::of(&dy), Device::<T>::of(&dx));
        let [half_gain, half_bias] = [&gain, &bias].map(|values| Device::<f16>::of(values));
        let [wide_gain, wide_bias] = [&gain, &bias].map(|values| Device::<f32>::of(values));
        let (y, stats) = (Device::<T>::poisoned(n * c), Device::<f32>::poisoned(n * 2));
        let (rows, width) = (n as i32, c as i32);
        let (grid, threads, shared) = a_row_a_block(n, c, 2, 1);
        let half =
            |trained: bool, values: &Device<f16>| if trained { std::ptr::null_mut() } else { values.head() };
        let wide =
            |trained: bool, values: &Device<f32>| if trained { values.head() } else { std::ptr::null_mut() };
        let (g, tg) = (half(gain_trained, &half_gain), wide(gain_trained, &wide_gain));
        let (b, tb) = (half(bias_trained, &half_bias), wide(bias_trained, &wide_bias));
        let args = args![x_in.head(), g, tg, b, tb, 1e-5f32, y.head(), stats.head(), width];
        run(forward, grid, threads, shared, 1, args);
        let (expected, expected_stats) = reference::forward(&x, &gain, &bias, 1e-5);
        assert_close(&y.wide(), &expected, T::ROUNDING + 2e-6, "y");
        if gain_trained {
            let args = args![dy_in.head(), x_in.head(), stats.head(), tg, sum.head(), width];
            run(backward, grid, threads, 2 * shared, 1, args);
            let part = reference::backward(&dy, &x, &expected_stats, &gain);
            let expected: Vec<f64> = dx.iter().zip(part).map(|(a, b)| a + b).collect();
            assert_close(&sum.wide(), &expected, T::ROUNDING + 2e-6, "dx");
        }

        let (d_gain, d_bias) = reference::parameter_gradients(&dy, &x, &expected_stats, c);
        for (splits, seed) in [(1, 1), (3, 2)] {
            let parts = Device::<f32>::poisoned(splits * 2 * c);
            let args = args![dy_in.head(), x_in.head(), stats.head(), parts.head(), rows, width];
            run(parameters, [c.div_ceil(256), splits, 1], 256, 0, seed, args);
            let (before_gain, before_bias) = (rounded::<f32>(6, c), rounded::<f32>(7, c));
            let (to_gain, to_bias) = (Device::<f32>::of(&before_gain), Device::<f32>::of(&before_bias));
            let (g, b) = (wide(gain_trained, &to_gain), wide(bias_trained, &to_bias));
            let args = args![parts.head(), splits as i32, g, b, width];
            run(layernorm_parameters_finish_launch, [c.div_ceil(256), 1, 1], 256, 0, seed, args);
            for (trained, before, gradient, to) in [
                (gain_trained, &before_gain, &d_gain, to_gain),
                (bias_trained, &before_bias, &d_bias, to_bias),
            ] {
                let part = |at: usize| if trained { gradient[at] } else { 0.0 };
                let expected: Vec<f64> = before.iter().enumerate().map(|(at, x)| x + part(at)).collect();
                assert_close(&to.wide(), &expected, 1e-5, "gradients of gain and bias");
            }
        }
    }
}

#[test]
fn layernorm_with_trained_parameters_matches_its_twin() {
    trained_layernorm::<f32>([
        layernorm_forward_trained_f32_launch,
        layernorm_backward_trained_f32_launch,
        layernorm_parameters_f32_launch,
    ]);
    trained_layernorm::<f16>([
        layernorm_forward_trained_f16_launch,
        layernorm_backward_trained_f16_launch,
        layernorm_parameters_f16_launch,
    ]);
    trained_layernorm::<bf16>([
        layernorm_forward_trained_bf16_launch,
        layernorm_backward_trained_bf16_launch,
        layernorm_parameters_bf16_launch,
    ]);
}

fn gather_scatter<T: Activation>(gather: Launcher, scatter: Launcher) {
    let (n, c) = (9, 133);
    let (from, rows) = (rounded::<T>(1, n * c), [1.0, 2.0, 5.0, 8.0]);
    let (source, index) = (Device::<T>::of(&from), Device::<u32>::of(&rows));
    let (some, back) = (Device::<T>::poisoned(4 * c), Device::<T>::of(&vec![0.0; n * c]));
    run(gather, [4, 1, 1], 128, 0, 1, args![source.head(), index.head(), some.head(), c as i32]);
    run(scatter, [4, 1, 1], 128, 0, 1, args![some.head(), index.head(), back.head(), c as i32]);
    let named = |at: usize| rows.contains(&((at / c) as f64));
    let expected: Vec<f64> = (0..n * c).map(|at| if named(at) { from[at] } else { 0.0 }).collect();
    assert_eq!(back.wide(), expected);
    assert_eq!(some.wide()[..c], from[c..2 * c]);
}

#[test]
fn rows_are_gathered_and_scattered() {
    gather_scatter::<f32>(gather_f32_launch, scatter_f32_launch);
    gather_scatter::<f16>(gather_f16_launch, scatter_f16_launch);
    gather_scatter::<bf16>(gather_bf16_launch, scatter_bf16_launch);
}

#[test]
fn argmax_takes_what_its_twin_takes() {
    let v = 1043;
    let mut logits: Vec<f32> = numbers(1, 7 * v).iter().map(|x| (x * 9.0) as f32).collect();
    // Equal ones far apart and side by side, of both signs of zero, and some that are not finite.
    (logits[700], logits[v - 1], logits[v + 32], logits[v + 31]) = (10.0, 10.0, 10.0, 10.0);
    logits[2 * v..3 * v].fill(-0.0);
    logits[2 * v + 5] = 0.0;
    (logits[3 * v + 900], logits[3 * v + 40]) = (f32::INFINITY, f32::NAN);
    logits[4 * v + 1] = f32::NEG_INFINITY;
    logits[5 * v..6 * v].fill(f32::MIN);
    let expected: Vec<argmax::Largest> = logits.chunks(v).map(argmax::reference::row).collect();
    let device = Device::<f32>::new(&logits);
    for (threads, seed) in [(1024, 1), (32, 2), (256, 3)] {
        let to = Device::<u32>::poisoned(2 * 7);
        run(argmax_launch, [7, 1, 1], threads, 0, seed, args![device.head(), to.head(), v as i32]);
        for (numbers, expected) in to.get().chunks(2).zip(&expected) {
            assert_eq!(numbers, [expected.id, expected.logit.to_bits()]);
        }
    }
}

/// The twin computes logits itself; a head that is the identity makes them the hidden states.
fn cross_entropy<T: Activation>(
    kernel: Launcher,
    once: bool,
    v: usize,
    smoothing: f64,
    in_place: bool,
    seed: u64,
) {
    let (m, factor) = (3, 0.37f32);
    // Columns after the vocabulary have any values, and gradients of 0.
    let ld = v.next_multiple_of(64);
    let z: Vec<f64> = numbers(1, m * ld).iter().map(|x| f64::from((x * 9.0) as f32)).collect();
    let targets = [0, v as i32 - 1, 3];
    let identity: Vec<f64> = (0..v * v).map(|at| if at / v == at % v { 1.0 } else { 0.0 }).collect();
    let rows: Vec<f64> = (0..m).flat_map(|row| z[row * ld..][..v].to_vec()).collect();
    let (expected, d_expected) =
        head_loss::reference::forward_backward(&rows, &targets, &identity, v, smoothing);

    let (logits, index) = (Device::<f32>::of(&z), Device::<i32>::of(&targets.map(f64::from)));
    let (losses, apart) = (Device::<f32>::poisoned(m), Device::<T>::poisoned(m * ld));
    let wide = size_of::<f32>() / size_of::<T>();
    let (dz, ld_dz) = if in_place { (logits.head().cast(), wide * ld) } else { (apart.head(), ld) };
    let (e, width) = (smoothing as f32, v as i32);
    let (to, strides) = (losses.head(), (ld as i64, ld_dz as i64));
    let args = args![logits.head(), strides.0, index.head(), e, factor, to, dz, strides.1, width];
    let (threads, shared) = if once { (1024, 4 * v.next_multiple_of(8)) } else { (512, 0) };
    run(kernel, [m, 1, 1], threads, shared, seed, args);
    assert_close(&losses.wide(), &expected, 4e-6, "loss");
    logits.get();
    for row in 0..m {
        // SAFETY: the row is inside the buffer that the kernel wrote.
        let found = unsafe { std::slice::from_raw_parts(dz.add(row * ld_dz), ld) };
        let expected: Vec<f64> =
            (0..ld).map(|j| if j < v { d_expected[row * v + j] * f64::from(factor) } else { 0.0 }).collect();
        let found: Vec<f64> = found.iter().map(|&x| x.wide()).collect();
        assert_close(&found, &expected, T::ROUNDING + 1e-6, "dz");
    }
}

#[test]
fn cross_entropy_matches_its_twin() {
    for (v, smoothing) in [(61, 0.2), (700, 0.0), (1043, 0.1)] {
        for (in_place, seed) in [(true, 1), (false, 2), (true, 3)] {
            cross_entropy::<f32>(cross_entropy_f32_launch, false, v, smoothing, in_place, seed);
            cross_entropy::<f32>(cross_entropy_once_f32_launch, true, v, smoothing, in_place, seed);
            cross_entropy::<f16>(cross_entropy_f16_launch, false, v, smoothing, in_place, seed);
            cross_entropy::<f16>(cross_entropy_once_f16_launch, true, v, smoothing, in_place, seed);
            cross_entropy::<bf16>(cross_entropy_bf16_launch, false, v, smoothing, in_place, seed);
            cross_entropy::<bf16>(cross_entropy_once_bf16_launch, true, v, smoothing, in_place, seed);
        }
    }
}

/// More columns than the threads of a block load at a time, against the kernel that reads them twice.
fn one_pass_as_two<T: Activation>(twice: Launcher, once: Launcher, seed: u64) {
    let (m, v, factor) = (2usize, 20_011usize, 0.37f32);
    let ld = v.next_multiple_of(64);
    let z: Vec<f64> = numbers(seed, m * ld).iter().map(|x| 12.0 * x).collect();
    let targets = Device::<i32>::of(&[v as f64 - 1.0, 17.0]);
    let of = |kernel: Launcher, threads, shared| {
        let (z, losses, dz) =
            (Device::<f32>::of(&z), Device::<f32>::poisoned(m), Device::<T>::poisoned(m * ld));
        let (stride, to) = (ld as i64, losses.head());
        let args = args![z.head(), stride, targets.head(), 0.1f32, factor, to, dz.head(), stride, v as i32];
        run(kernel, [m, 1, 1], threads, shared, seed, args);
        (losses.wide(), dz.wide())
    };
    let ((losses, dz), (expected, d_expected)) =
        (of(once, 1024, 4 * v.next_multiple_of(8)), of(twice, 512, 0));
    assert_close(&losses, &expected, 2e-6, "loss");
    // The logarithms of the sums differ in their last bit, so roundings may.
    for (at, (found, expected)) in dz.iter().zip(&d_expected).enumerate() {
        let bound = 2.0 * T::ROUNDING * expected.abs() + 1e-6 * expected.abs() + 1e-7;
        assert!((found - expected).abs() <= bound, "dz[{at}]: {found} against {expected}");
    }
    assert!(dz.chunks(ld).all(|row| row[v..].iter().all(|&padding| padding == 0.0)), "a gradient of nothing");
}

#[test]
fn rows_that_are_read_once_have_the_losses_of_rows_read_twice() {
    one_pass_as_two::<f32>(cross_entropy_f32_launch, cross_entropy_once_f32_launch, 1);
    one_pass_as_two::<f16>(cross_entropy_f16_launch, cross_entropy_once_f16_launch, 2);
    one_pass_as_two::<bf16>(cross_entropy_bf16_launch, cross_entropy_once_bf16_launch, 3);
}
